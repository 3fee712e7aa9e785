# SPDX-License-Identifier: AGPL-3.0-or-later
"""Accounts as they are read: by key, by id, and page by page."""

from horde import clock
from horde.actions.actors import Actor, require_actor
from horde.database.caches import SharedAnswers
from horde.database.user_details import Privilege, find_user_details, list_user_details
from horde.database.users import find_generate_caller, parse_user_id
from horde.db import reading
from horde.exceptions import NotFound, Unauthorized
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode
from horde.shapes.users import UserDetails, UsersQuery
from horde.written_answer import WrittenAnswer

USERS_A_PAGE = 25
LAST_PAGE = 10_000  # what lies beyond is empty, so that nobody makes the database count to the end
PAGE_SECONDS = 10.0
PAGE_KEY_TTL_SECONDS = 300

_pages = SharedAnswers[str](
    "users_cache_",
    lifetime_seconds=PAGE_SECONDS,
    compute_seconds=PAGE_KEY_TTL_SECONDS,
    shares_computed=True,
)


def find_user(api_key: str | None) -> UserDetails:
    """The account that a key belongs to; with a shared key what everybody may see of its owner.

    Errors: Unauthorized without a key, NotFound for an unknown one.
    """
    if not api_key:
        raise Unauthorized("An API key is needed to find its user.", ReturnCode.INVALID_API_KEY)
    with reading() as session:
        caller = find_generate_caller(session, api_key)
        if caller is None:
            raise NotFound("No user with this API key.", ReturnCode.USER_NOT_FOUND)
        privilege = Privilege.PUBLIC if caller.sharedkey else Privilege.OWNER
        details = find_user_details(session, caller.id, privilege, clock.utcnow())
    if details is None:
        raise NotFound("No user with this API key.", ReturnCode.USER_NOT_FOUND)
    if caller.sharedkey is None:
        return details
    suffix = f": {caller.sharedkey.name}" if caller.sharedkey.name else ""
    return details.model_copy(update={"username": f"{details.username} (Shared Key{suffix})"})


def show_user(user_id: str, api_key: str | None) -> UserDetails:
    """An account, as whoever has the key may see it. Errors: Unauthorized, NotFound."""
    with reading() as session:
        viewer = require_actor(session, api_key) if api_key else None
        number = require_user_id(user_id)
        details = find_user_details(session, number, get_privilege(viewer, number), clock.utcnow())
    if details is None:
        raise user_not_found(user_id)
    return details


def list_users(query: UsersQuery) -> WrittenAnswer:
    """A page of accounts as everybody may see them: at most five minutes old, the same in every
    process.
    """
    if query.page > LAST_PAGE:
        return WrittenAnswer("[]")
    return _pages.get(f"{query.sort}_{query.page}", lambda: _compute_page(query))


def _compute_page(query: UsersQuery) -> list[JsonObject]:
    with reading() as session:
        users = list_user_details(
            session,
            sort=query.sort,
            offset=(query.page - 1) * USERS_A_PAGE,
            limit=USERS_A_PAGE,
            now=clock.utcnow(),
        )
    return [user.dump() for user in users]


def get_privilege(viewer: Actor | None, user_id: int) -> Privilege:
    """How much a viewer may see of an account."""
    if viewer is None:
        return Privilege.PUBLIC
    if viewer.is_moderator:
        return Privilege.MODERATOR
    return Privilege.OWNER if viewer.owns(user_id) else Privilege.PUBLIC


def require_user_id(text: str) -> int:
    """The id in a path; raises NotFound for what cannot be one."""
    user_id = parse_user_id(text)
    if user_id is None:
        raise user_not_found(text)
    return user_id


def user_not_found(user_id: str) -> NotFound:
    """The refusal of an id that nobody has."""
    return NotFound(f"User with ID '{user_id[:64]}' not found.", ReturnCode.USER_NOT_FOUND)
