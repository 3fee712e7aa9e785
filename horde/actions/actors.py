# SPDX-License-Identifier: AGPL-3.0-or-later
"""Who asks for a use case: the account of a key, or the operator at the command line."""

from dataclasses import dataclass

from sqlalchemy.orm import Session

from horde.database.users import Caller, find_caller, is_admin
from horde.exceptions import Forbidden, Unauthorized
from horde.return_codes import ReturnCode


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts; without an account it is the operator, who may do everything."""

    account: Caller | None = None

    @property
    def user_id(self) -> int | None:
        """The acting account; None for the operator."""
        return None if self.account is None else self.account.id

    @property
    def is_admin(self) -> bool:
        """Whether the settings name the account."""
        return self.account is None or is_admin(self.account)

    @property
    def is_moderator(self) -> bool:
        """Whether the account administers others."""
        return self.account is None or self.account.is_moderator

    def owns(self, user_id: int) -> bool:
        """Whether this is that account itself."""
        return self.account is not None and self.account.id == user_id


OPERATOR = Actor()

type By = str | Actor
"""An API key, or who is known to act."""


def require_actor(session: Session, by: By) -> Actor:
    """Who acts; raises Unauthorized for a key that nobody has."""
    if isinstance(by, Actor):
        return by
    account = find_caller(session, by)
    if account is None:
        raise Unauthorized("No user with this API key.", ReturnCode.INVALID_API_KEY)
    return Actor(account)


def require_moderator(session: Session, by: By) -> Actor:
    """Who acts, being a moderator or the operator; raises Unauthorized or Forbidden."""
    actor = require_actor(session, by)
    if not actor.is_moderator:
        raise Forbidden("Only a moderator can do this.", ReturnCode.NOT_MODERATOR)
    return actor
