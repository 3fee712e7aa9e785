# SPDX-License-Identifier: AGPL-3.0-or-later
"""An account as its owner sees it on the page, and a new key for it."""

from dataclasses import asdict

from sqlalchemy.orm import Session

from horde import clock
from horde.database.account_overview import FLOW_DAYS as FLOW_DAYS
from horde.database.account_overview import read_account_overview
from horde.database.kudos import get_effective_kudos
from horde.database.users import Caller, find_caller, reset_api_key
from horde.db import reading, transaction
from horde.exceptions import Forbidden, Unauthorized
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode


def show_own_account(api_key: str) -> JsonObject:
    """What the account of a key has, gains and spends; docs/reference/pages.md lists it.

    Errors: Unauthorized for a key that nobody has, Forbidden for the anonymous one.
    """
    with reading() as session:
        caller = _require_account(session, api_key)
        found = read_account_overview(session, caller.id, clock.utcnow())
        kudos = get_effective_kudos(session, caller.id)
    return {
        "id": caller.id,
        "alias": caller.alias,
        "roles": sorted(role.name.lower() for role in caller.roles),
        "is_deleted": caller.is_deleted,
        "kudos": float(kudos),
        **asdict(found),
    }


def renew_own_key(api_key: str) -> str:
    """A new key in place of the caller's, which ends. Errors: Unauthorized, Forbidden."""
    with transaction() as session:
        return reset_api_key(session, _require_account(session, api_key).id)


def _require_account(session: Session, api_key: str) -> Caller:
    """The account of a key; nobody owns the anonymous one."""
    caller = find_caller(session, api_key)
    if caller is None:
        raise Unauthorized("No account has this key.", ReturnCode.INVALID_API_KEY)
    if caller.is_anonymous:
        raise Forbidden("The anonymous account belongs to nobody.", ReturnCode.ANON_FORBIDDEN)
    return caller
