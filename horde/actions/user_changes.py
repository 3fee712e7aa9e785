# SPDX-License-Identifier: AGPL-3.0-or-later
"""Changes of an account by itself, by moderators and by admins, and its deletion in two steps."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from horde import clock
from horde.actions.actors import Actor, By, require_actor
from horde.actions.acts import record_act
from horde.actions.users import require_user_id, user_not_found
from horde.classes.base.kudos import to_kudos
from horde.classes.base.user import UserRoleTypes
from horde.database.account_deletion import wipe_account
from horde.database.kudos import get_effective_kudos
from horde.database.monthly_kudos import change_monthly_kudos
from horde.database.passkeys import generate_proxy_passkey
from horde.database.suspicions import forget_suspicions
from horde.database.users import Caller, adjust_kudos, find_account, set_role, update_account
from horde.db import run_transaction
from horde.exceptions import BadRequest, Forbidden, PayloadInvalid
from horde.return_codes import ReturnCode
from horde.shapes.acts import ModeratorAction
from horde.shapes.base import SimpleResponse
from horde.shapes.users import MAX_USERNAME_LENGTH, ModifyUser, ModifyUserInput
from horde.shown_text import clean_username, is_profane

ADMIN_KEYS = frozenset({"kudos", "monthly_kudos", "usage_multiplier", "moderator"})
OWNER_KEYS = frozenset(
    {"public_workers", "username", "contact", "generate_proxy_passkey", "undelete"}
)
ROLE_KEYS = (
    "moderator",
    "trusted",
    "flagged",
    "customizer",
    "vpn",
    "service",
    "education",
    "special",
)
COLUMN_KEYS = (
    "usage_multiplier",
    "concurrency",
    "worker_invited",
    "admin_comment",
    "public_workers",
    "username",
    "contact",
)

type Changes = dict[str, Any]


def change_user(by: By, user_id: str, body: ModifyUserInput) -> ModifyUser:
    """Change an account; the new values.

    Errors: Unauthorized, NotFound, Forbidden for who may not, BadRequest for what cannot be.
    """

    def work(session: Session) -> ModifyUser:
        changes = body.list_changes()
        actor = require_actor(session, by)
        account = _require_account(session, user_id)
        _check_may_change(actor, account, changes)
        _check_texts(changes)
        answer = _apply_changes(session, account, changes)
        if not actor.owns(account.id) or changes.keys() - OWNER_KEYS:
            record_act(
                session,
                actor,
                ModeratorAction.USER_CHANGED,
                describe_user(account.id),
                body.reason,
                changes=changes,
            )
        return answer

    return run_transaction(work)


def delete_user(by: By, user_id: str, reason: str | None = None) -> SimpleResponse:
    """Mark an account for deletion; when it is marked already, erase it.

    Errors: Unauthorized, NotFound, Forbidden, and Locked while a job refers to a worker of it.
    """
    now = clock.utcnow()

    def work(session: Session) -> SimpleResponse:
        actor = require_actor(session, by)
        account = _require_account(session, user_id)
        _check_may_delete(actor, account)
        if account.is_deleted:
            action = ModeratorAction.USER_WIPED
            if not wipe_account(session, account.id, now):
                raise Forbidden(
                    "The account was active in the last 30 days, so it cannot be erased yet.",
                    ReturnCode.CANNOT_WIPE_ACTIVE_USER,
                )
        else:
            action = ModeratorAction.USER_MARKED_FOR_DELETION
            set_role(session, account.id, UserRoleTypes.DELETED, granted=True, now=now)
        if not actor.owns(account.id):
            record_act(session, actor, action, describe_user(account.id), reason)
        return SimpleResponse()

    return run_transaction(work)


def describe_user(user_id: int) -> str:
    """The account as the subject of an act. Its name is left out: it may be erased."""
    return f"user {user_id}"


def _require_account(session: Session, user_id: str) -> Caller:
    account = find_account(session, require_user_id(user_id))
    if account is None:
        raise user_not_found(user_id)
    return account


def _check_may_delete(actor: Actor, account: Caller) -> None:
    if account.is_anonymous or (actor.account is not None and actor.account.is_anonymous):
        raise Forbidden(
            "The anonymous account deletes nobody and is not deleted.",
            ReturnCode.ANON_FORBIDDEN_USER,
        )
    if account.is_moderator:
        raise Forbidden("A moderator's account cannot be deleted.", ReturnCode.CANNOT_DELETE_MOD)
    if not (actor.owns(account.id) or actor.is_moderator or actor.is_admin):
        raise Forbidden(
            "Only the owner or a moderator can delete an account.", ReturnCode.NOT_USER_OR_MOD
        )


def _check_may_change(actor: Actor, account: Caller, changes: Changes) -> None:
    """Refuse changes the actor may not make: Forbidden, or BadRequest when there are none."""
    if actor.account is not None and actor.account.is_anonymous:
        raise Forbidden(
            "The anonymous account cannot change accounts.", ReturnCode.ANON_FORBIDDEN_USER_MOD
        )
    if not changes:
        raise BadRequest("No change was selected.", ReturnCode.NO_USER_MOD_SELECTED)
    if changes.keys() & ADMIN_KEYS and not actor.is_admin:
        raise Forbidden("Only an admin can make this change.", ReturnCode.NOT_ADMIN)
    may_moderate = actor.is_moderator or actor.is_admin
    if changes.keys() - ADMIN_KEYS - OWNER_KEYS and not may_moderate:
        raise Forbidden("Only a moderator can make this change.", ReturnCode.NOT_MODERATOR)
    if changes.keys() & OWNER_KEYS and not (actor.owns(account.id) or may_moderate):
        raise Forbidden(
            "Only a moderator can change somebody else's account.", ReturnCode.NOT_MODERATOR
        )
    if "generate_proxy_passkey" in changes and not account.is_service:
        raise Forbidden(
            "Only service accounts have a proxy passkey.", ReturnCode.NON_SERVICE_FORBIDDEN
        )
    if "undelete" in changes and not account.is_deleted:
        raise BadRequest("The account is not marked for deletion.", ReturnCode.USER_NOT_DELETED)


def _check_texts(changes: Changes) -> None:
    """Clean the new name in place; texts too long for their columns, or profane, are refused."""
    if "username" in changes:
        changes["username"] = clean_new_username(changes["username"])
    if is_profane(changes.get("contact", "")):
        raise BadRequest("The contact contains profanity.", ReturnCode.PROFANE_USER_CONTACT)
    if is_profane(changes.get("admin_comment", "")):
        raise BadRequest("The comment contains profanity.", ReturnCode.PROFANE_ADMIN_COMMENT)


def clean_new_username(text: str) -> str:
    """The name as it is stored. Raises BadRequest when it is too long, too short or profane."""
    username = clean_username(text)
    if len(username) > MAX_USERNAME_LENGTH:
        raise BadRequest(
            f"A username has at most {MAX_USERNAME_LENGTH} characters.",
            ReturnCode.TOO_LONG_USER_NAME,
        )
    if len(username) < 3:
        raise PayloadInvalid({"username": "String should have at least 3 visible characters"})
    if is_profane(username):
        raise BadRequest("The username contains profanity.", ReturnCode.PROFANE_USER_NAME)
    return username


def _apply_changes(session: Session, account: Caller, changes: Mapping[str, Any]) -> ModifyUser:
    """Make checked changes; the new values as they are answered."""
    now = clock.utcnow()
    answer = {key: value for key, value in changes.items() if key in (*ROLE_KEYS, *COLUMN_KEYS)}
    for name in ROLE_KEYS:
        if name in changes:
            set_role(
                session, account.id, UserRoleTypes[name.upper()], granted=changes[name], now=now
            )
    # After the roles: a concurrency that was sent stands against the one that comes with education.
    update_account(
        session, account.id, {key: changes[key] for key in COLUMN_KEYS if key in changes}
    )
    if "undelete" in changes:
        set_role(session, account.id, UserRoleTypes.DELETED, granted=False, now=now)
        answer["undeleted"] = True
    if "reset_suspicion" in changes:
        forget_suspicions(session, account.id)
        answer["new_suspicion"] = 0
    if "generate_proxy_passkey" in changes:
        answer["proxy_passkey"] = generate_proxy_passkey(session, account.id)
    if "monthly_kudos" in changes:
        answer["monthly_kudos"] = change_monthly_kudos(
            session, account.id, changes["monthly_kudos"], now
        )
    if "kudos" in changes:
        adjust_kudos(session, account.id, to_kudos(changes["kudos"]), action="admin", now=now)
        answer["new_kudos"] = float(get_effective_kudos(session, account.id))
    return ModifyUser(**answer)
