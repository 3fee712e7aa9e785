# SPDX-License-Identifier: AGPL-3.0-or-later
"""Making an account, and a new key for one whose owner signed in.

Source: docs/reference/accounts.md, "The registration page".
"""

from dataclasses import dataclass
from functools import partial

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from horde import clock
from horde.database.stats import read_horde_modes
from horde.database.users import create_user, find_user_by_identity, reset_api_key
from horde.db import reading, run_transaction
from horde.exceptions import Forbidden


@dataclass(frozen=True, slots=True)
class Registered:
    """An account and its key, which is shown once."""

    alias: str
    api_key: str
    is_new: bool


def find_alias_of(identity: str) -> str | None:
    """The account of who signed in; None when there is none yet."""
    with reading() as session:
        user = find_user_by_identity(session, identity)
    return None if user is None else user.alias


def register_account(username: str, identity: str | None = None) -> Registered:
    """Make an account; with an identity that has one, a new key for it, which ends the old one.

    Without an identity the account is pseudonymous, and none are made in a raid. Errors: Forbidden.
    """
    work = partial(_register_account, username=username, identity=identity)
    try:
        return run_transaction(work)
    except IntegrityError:  # the same person made the account in between
        return run_transaction(work)


def _register_account(session: Session, username: str, identity: str | None) -> Registered:
    if identity is None and read_horde_modes(session).raid:
        raise Forbidden("No accounts are made at the moment. Please come back later.")
    known = None if identity is None else find_user_by_identity(session, identity)
    if known is not None:
        return Registered(known.alias, reset_api_key(session, known.id), is_new=False)
    made = create_user(session, username=username, oauth_id=identity, now=clock.utcnow())
    return Registered(made.user.alias, made.api_key, is_new=True)
