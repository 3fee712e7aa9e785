# SPDX-License-Identifier: AGPL-3.0-or-later
"""Kudos that accounts get every month: what an admin set, and what moderators get for their work."""

from datetime import datetime
from typing import Any

from sqlalchemy import func, update
from sqlalchemy.orm import Session

from horde.classes.base.kudos import to_kudos
from horde.classes.base.user import User
from horde.database.users import adjust_kudos
from horde.shapes.users import MAX_MONTHLY_KUDOS

MONTHLY_ACTION = "recurring"


def change_monthly_kudos(session: Session, user_id: int, amount: int, now: datetime) -> int:
    """Add to what an account gets each month; a gain is paid at once too. The new monthly amount."""
    monthly = func.least(func.greatest(User.monthly_kudos + amount, 0), MAX_MONTHLY_KUDOS)
    values: dict[str, Any] = {"monthly_kudos": monthly}
    if amount > 0:
        adjust_kudos(session, user_id, to_kudos(amount), action=MONTHLY_ACTION, now=now)
        values["monthly_kudos_last_received"] = func.coalesce(User.monthly_kudos_last_received, now)
    statement = (
        update(User).where(User.id == user_id).values(**values).returning(User.monthly_kudos)
    )
    return int(session.execute(statement.execution_options(synchronize_session=False)).scalar_one())
