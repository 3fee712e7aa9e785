# SPDX-License-Identifier: AGPL-3.0-or-later
"""The account routes: who a key belongs to, what an account is, and what owners and moderators
change.
"""

from functools import partial
from ipaddress import ip_address
from typing import Annotated, Any
from uuid import uuid4

from flask import request
from flask_restx import Api, Namespace, Resource
from pydantic import BeforeValidator, Field
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from horde import clock
from horde.apis.bodies import Body, read_body
from horde.apis.models.users import (
    build_modify_user,
    build_modify_user_input,
    build_test_user,
    build_test_user_input,
    build_user_details,
)
from horde.apis.requests import find_api_key, get_config, require_api_key
from horde.classes.base.kudos import to_kudos
from horde.classes.base.user import MAX_USERNAME_LENGTH, User, UserRoleTypes
from horde.database.kudos import fold_postings, get_effective_kudos, get_projected_kudos
from horde.database.user_details import Privilege, get_user_details
from horde.database.users import (
    MAX_ADJUSTMENT,
    Caller,
    adjust_kudos,
    clean_username,
    create_user,
    find_account,
    find_caller,
    find_shared_key_caller,
    generate_proxy_passkey,
    is_admin,
    parse_user_id,
    parse_uuid,
    reset_api_key,
    set_role,
    update_account,
)
from horde.database.workers import is_profane
from horde.db import retry_deadlocks, run_transaction, transaction
from horde.exceptions import BadRequest, Forbidden, NotFound, PayloadInvalid, Unauthorized
from horde.limiter import limit_user
from horde.return_codes import ReturnCode

MAX_CONTACT_LENGTH = 50  # what the column holds
MAX_WORKER_INVITED = 10_000
MAX_MONTHLY_KUDOS = 10**9

namespace = Namespace("users", description="Accounts.", path="/v2")
user_details = build_user_details(namespace)
modify_user_input = build_modify_user_input(namespace)
modify_user = build_modify_user(namespace)
test_user_input = build_test_user_input(namespace)
test_user = build_test_user(namespace)

OPTIONAL_KEY = {
    "apikey": {"in": "header", "description": "The account's own or a moderator's key shows more."}
}
REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = dict[str, Any]


def _read_whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_read_whole)]
"""An integer, also when a client writes it as 1.0."""


class UserBody(Body):
    """What a request to change an account may set, in groups by who may."""

    kudos: Annotated[float | None, Field(ge=-MAX_ADJUSTMENT, le=MAX_ADJUSTMENT)] = None
    monthly_kudos: Annotated[
        WholeNumber | None, Field(ge=-MAX_MONTHLY_KUDOS, le=MAX_MONTHLY_KUDOS)
    ] = None
    usage_multiplier: Annotated[float | None, Field(ge=0.1, le=10)] = None
    moderator: bool | None = None

    concurrency: Annotated[WholeNumber | None, Field(ge=0, le=500)] = None
    worker_invited: Annotated[WholeNumber | None, Field(ge=0, le=MAX_WORKER_INVITED)] = None
    trusted: bool | None = None
    flagged: bool | None = None
    customizer: bool | None = None
    vpn: bool | None = None
    service: bool | None = None
    education: bool | None = None
    special: bool | None = None
    admin_comment: Annotated[str | None, Field(min_length=5, max_length=500)] = None

    public_workers: bool | None = None
    username: Annotated[str | None, Field(min_length=3, max_length=100)] = None
    contact: Annotated[str | None, Field(min_length=5, max_length=500)] = None
    generate_proxy_passkey: bool | None = None
    undelete: bool | None = None

    def list_changes(self) -> Details:
        """What was sent; the two acts count only when they are asked for."""
        sent = self.model_dump(exclude_none=True)
        return {
            key: value
            for key, value in sent.items()
            if value or key not in ("generate_proxy_passkey", "undelete")
        }


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


class TestUserBody(Body):
    """The account a test asks for; `kudos` null leaves the balance."""

    username: Annotated[str, Field(min_length=1, max_length=MAX_USERNAME_LENGTH)] = "test_user"
    oauth_id: Annotated[str | None, Field(min_length=1, max_length=50)] = None
    moderator: bool = True
    trusted: bool = True
    kudos: Annotated[WholeNumber | None, Field(ge=-MAX_ADJUSTMENT, le=MAX_ADJUSTMENT)] = 10_000


@namespace.route("/find_user")
class FindUser(Resource):
    """The account of a key."""

    @namespace.doc(
        params={"apikey": {"in": "header", "description": "A user key, or a shared key."}}
    )
    @namespace.response(200, "The account", user_details)
    @namespace.response(401, "InvalidAPIKey: the key is missing")
    @namespace.response(404, "UserNotFound")
    def get(self) -> Details:
        """The account that a key belongs to; with a shared key what everybody may see of its
        owner.
        """
        api_key = find_api_key()
        if not api_key:
            raise Unauthorized("An API key is needed to find its user.", ReturnCode.INVALID_API_KEY)
        with transaction() as session:
            sharedkey_id = parse_uuid(api_key)
            caller = find_shared_key_caller(session, sharedkey_id) if sharedkey_id else None
            caller = caller or find_caller(session, api_key)
            if caller is None:
                raise NotFound("No user with this API key.", ReturnCode.USER_NOT_FOUND)
            details = require_details(
                session, caller.id, Privilege.PUBLIC if caller.sharedkey else Privilege.OWNER
            )
        if caller.sharedkey:
            suffix = f": {caller.sharedkey.name}" if caller.sharedkey.name else ""
            details["username"] += f" (Shared Key{suffix})"
        return details


@namespace.route("/users/<string:user_id>")
class UserSingle(Resource):
    """One account."""

    @namespace.doc(params=OPTIONAL_KEY)
    @namespace.response(200, "The account", user_details)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(404, "UserNotFound")
    @limit_user
    def get(self, user_id: str) -> Details:
        """The account, as its viewer may see it."""
        with transaction() as session:
            viewer = require_caller(session, api_key) if (api_key := find_api_key()) else None
            number = require_user_id(user_id)
            return require_details(session, number, get_privilege(viewer, number))

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(modify_user_input, validate=False)
    @namespace.response(200, "What was changed", modify_user)
    @namespace.response(
        400, "NoUserModSelected, ProfaneUserName, TooLongUserName, UserNotDeleted, …"
    )
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotAdmin, NotModerator, AnonForbiddenUserMod, NonServiceForbidden")
    @namespace.response(404, "UserNotFound")
    @limit_user
    def put(self, user_id: str) -> Details:
        """Change an account. Answers with the new values."""
        body = read_body(UserBody)
        api_key = require_api_key()

        def work(session: Session) -> Details:
            changes = body.list_changes()
            caller = require_caller(session, api_key)
            account = find_account(session, require_user_id(user_id))
            if account is None:
                raise user_not_found(user_id)
            check_may_change(caller, account, changes)
            check_texts(changes)
            return apply_changes(session, account, changes)

        return run_transaction(work)


@namespace.route("/dev/test-user")
class TestUser(Resource):
    """Accounts for tests of clients."""

    @namespace.expect(test_user_input, validate=False)
    @namespace.response(200, "The account there was, with a new key", test_user)
    @namespace.response(201, "A new account", test_user)
    @namespace.response(403, "Forbidden: not from this machine")
    @namespace.response(404, "This horde makes no test accounts")
    def post(self) -> tuple[Details, int]:
        """Make an account, or give the one with this oauth_id a new key. Only from the machine
        itself, where switched on.
        """
        if not get_config().test_apikeys:
            raise NotFound("This horde makes no test accounts.", None)
        # The socket's own peer: what a proxy forwards must not open this.
        if not is_loopback(request.remote_addr):
            raise Forbidden(
                "Test accounts are made from the machine itself only. Register an account instead."
            )
        body = read_body(TestUserBody)
        make = partial(make_test_user, body)
        try:
            answer, status = retry_deadlocks(make)
        except IntegrityError:  # another request made the account in between
            answer, status = retry_deadlocks(make)
        fold_postings()  # so that the kudos can be spent at once
        return answer, status


def require_caller(session: Session, api_key: str) -> Caller:
    """The account of a user key; raises Unauthorized."""
    caller = find_caller(session, api_key)
    if caller is None:
        raise Unauthorized("No user with this API key.", ReturnCode.INVALID_API_KEY)
    return caller


def require_user_id(text: str) -> int:
    """The id in a path; raises NotFound for what cannot be one."""
    user_id = parse_user_id(text)
    if user_id is None:
        raise user_not_found(text)
    return user_id


def require_details(session: Session, user_id: int, privilege: Privilege) -> Details:
    """The account as it is shown; raises NotFound."""
    details = get_user_details(session, user_id, privilege, clock.utcnow())
    if details is None:
        raise user_not_found(str(user_id))
    return details


def user_not_found(user_id: str) -> NotFound:
    """The refusal of an id that nobody has."""
    return NotFound(f"User with ID '{user_id[:64]}' not found.", ReturnCode.USER_NOT_FOUND)


def get_privilege(viewer: Caller | None, user_id: int) -> Privilege:
    """How much a viewer may see of an account."""
    if viewer is None:
        return Privilege.PUBLIC
    if viewer.is_moderator:
        return Privilege.MODERATOR
    return Privilege.OWNER if viewer.id == user_id else Privilege.PUBLIC


def check_may_change(caller: Caller, account: Caller, changes: Details) -> None:
    """Refuse changes the caller may not make: Forbidden, or BadRequest when there are none."""
    if caller.is_anonymous:
        raise Forbidden(
            "The anonymous account cannot change accounts.", ReturnCode.ANON_FORBIDDEN_USER_MOD
        )
    if not changes:
        raise BadRequest("No change was selected.", ReturnCode.NO_USER_MOD_SELECTED)
    if changes.keys() & ADMIN_KEYS and not is_admin(caller):
        raise Forbidden("Only an admin can make this change.", ReturnCode.NOT_ADMIN)
    if changes.keys() - ADMIN_KEYS - OWNER_KEYS and not (caller.is_moderator or is_admin(caller)):
        raise Forbidden("Only a moderator can make this change.", ReturnCode.NOT_MODERATOR)
    if (
        changes.keys() & OWNER_KEYS
        and caller.id != account.id
        and not (caller.is_moderator or is_admin(caller))
    ):
        raise Forbidden(
            "Only a moderator can change somebody else's account.", ReturnCode.NOT_MODERATOR
        )
    if "generate_proxy_passkey" in changes and not account.is_service:
        raise Forbidden(
            "Only service accounts have a proxy passkey.", ReturnCode.NON_SERVICE_FORBIDDEN
        )
    if "undelete" in changes and not account.is_deleted:
        raise BadRequest("The account is not marked for deletion.", ReturnCode.USER_NOT_DELETED)


def check_texts(changes: Details) -> None:
    """Clean the new name in place, and refuse texts that are too long for their columns or
    profane.
    """
    if "username" in changes:
        changes["username"] = check_username(changes["username"])
    if len(changes.get("contact", "")) > MAX_CONTACT_LENGTH:
        raise PayloadInvalid(
            {"contact": f"String should have at most {MAX_CONTACT_LENGTH} characters"}
        )
    if is_profane(changes.get("contact", "")):
        raise BadRequest("The contact contains profanity.", ReturnCode.PROFANE_USER_CONTACT)
    if is_profane(changes.get("admin_comment", "")):
        raise BadRequest("The comment contains profanity.", ReturnCode.PROFANE_ADMIN_COMMENT)


def check_username(text: str) -> str:
    """The name as it is stored; raises BadRequest for one that is too long, too short or
    profane.
    """
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


def apply_changes(session: Session, account: Caller, changes: Details) -> Details:
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
    if "generate_proxy_passkey" in changes:
        answer["proxy_passkey"] = generate_proxy_passkey(session, account.id)
    if "monthly_kudos" in changes:
        answer["monthly_kudos"] = change_monthly_kudos(
            session, account.id, changes["monthly_kudos"]
        )
    if "kudos" in changes:
        adjust_kudos(session, account.id, to_kudos(changes["kudos"]), action="admin", now=now)
        answer["new_kudos"] = float(get_effective_kudos(session, account.id))
    return answer


def change_monthly_kudos(session: Session, user_id: int, amount: int) -> int:
    """Add to what an account gets each month; a gain is paid at once too. The new monthly
    amount.
    """
    now = clock.utcnow()
    monthly = func.least(func.greatest(User.monthly_kudos + amount, 0), MAX_MONTHLY_KUDOS)
    values: Details = {"monthly_kudos": monthly}
    if amount > 0:
        adjust_kudos(session, user_id, to_kudos(amount), action="recurring", now=now)
        values["monthly_kudos_last_received"] = func.coalesce(User.monthly_kudos_last_received, now)
    statement = (
        update(User).where(User.id == user_id).values(**values).returning(User.monthly_kudos)
    )
    return int(session.execute(statement.execution_options(synchronize_session=False)).scalar_one())


def is_loopback(address: str | None) -> bool:
    """Whether a socket's peer is on this machine."""
    try:
        parsed = ip_address(address or "")
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def make_test_user(body: TestUserBody) -> tuple[Details, int]:
    """The account of a test with a new key, and 201 when it is new, else 200."""
    now = clock.utcnow()
    # A made-up identity, and not a bare UUID: that would make the account pseudonymous.
    oauth_id = body.oauth_id or f"test_{uuid4().hex}"
    with transaction() as session:
        user = session.scalars(select(User).where(User.oauth_id == oauth_id)).one_or_none()
        is_new = user is None
        if user is None:
            user, api_key = (
                (
                    made := create_user(session, username=body.username, oauth_id=oauth_id, now=now)
                ).user,
                made.api_key,
            )
        else:
            api_key = reset_api_key(session, user.id)
        # Moderator before trusted: granting it grants trust too, which the second decides on.
        set_role(session, user.id, UserRoleTypes.MODERATOR, granted=body.moderator, now=now)
        set_role(session, user.id, UserRoleTypes.TRUSTED, granted=body.trusted, now=now)
        if body.kudos is not None:
            difference = to_kudos(body.kudos) - get_projected_kudos(session, user.id)
            if difference:
                adjust_kudos(session, user.id, difference, action="admin", now=now)
        answer = {
            "api_key": api_key,
            "user_id": str(user.id),
            "username": user.username,
            "alias": user.alias,
            "kudos": int(get_effective_kudos(session, user.id)),
            "trusted": body.trusted,
            "moderator": body.moderator,
            "created": is_new,
        }
    return answer, 201 if is_new else 200


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
