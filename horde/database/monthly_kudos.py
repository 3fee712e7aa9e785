# SPDX-License-Identifier: AGPL-3.0-or-later
"""Kudos that accounts get every month: what an admin set, and the pay of moderators."""

from datetime import datetime

from sqlalchemy import ColumnElement, exists, func, select, text, update
from sqlalchemy.orm import Session

from horde.classes.base.kudos import to_kudos
from horde.classes.base.user import WIPED, User, UserRole, UserRoleTypes
from horde.database.users import adjust_kudos
from horde.json_text import JsonObject
from horde.shapes.users import MAX_MONTHLY_KUDOS

MONTHLY_ACTION = "recurring"
MODERATOR_MONTHLY_KUDOS = 300_000
ACCOUNTS_A_BATCH = 100


def change_monthly_kudos(session: Session, user_id: int, amount: int, now: datetime) -> int:
    """Add to what an account gets each month; a gain is paid at once too.

    The new monthly amount.
    """
    monthly = func.least(func.greatest(User.monthly_kudos + amount, 0), MAX_MONTHLY_KUDOS)
    values: JsonObject = {"monthly_kudos": monthly}
    if amount > 0:
        adjust_kudos(session, user_id, to_kudos(amount), action=MONTHLY_ACTION, now=now)
        values["monthly_kudos_last_received"] = func.coalesce(User.monthly_kudos_last_received, now)
    statement = (
        update(User).where(User.id == user_id).values(**values).returning(User.monthly_kudos)
    )
    return int(session.execute(statement.execution_options(synchronize_session=False)).scalar_one())


def pay_due_monthly_kudos(session: Session, now: datetime) -> int:
    """Pay a batch of the accounts whose month is over; how many it paid.

    The first payment comes at once. Each moves the date by exactly one month, so that an account
    that was missed gets what it missed. Two runs at once pay nobody twice.
    """
    is_moderator = _holds(UserRoleTypes.MODERATOR)
    month = text("interval '1 month'")
    due = (
        select(User.id)
        .where(
            User.oauth_id != WIPED,
            ~_holds(UserRoleTypes.DELETED),
            (User.monthly_kudos > 0) | is_moderator,
            (User.monthly_kudos_last_received.is_(None))
            | (User.monthly_kudos_last_received + month <= now),
        )
        .order_by(User.id)
        .limit(ACCOUNTS_A_BATCH)
        .with_for_update(skip_locked=True, of=User, key_share=True)
    )
    paid = session.execute(
        update(User)
        .where(User.id.in_(due))
        .values(
            monthly_kudos_last_received=func.coalesce(User.monthly_kudos_last_received + month, now)
        )
        .returning(User.id, User.monthly_kudos, is_moderator.label("is_moderator"))
        .execution_options(synchronize_session=False)
    ).all()
    for row in paid:
        amount = row.monthly_kudos + (MODERATOR_MONTHLY_KUDOS if row.is_moderator else 0)
        adjust_kudos(session, row.id, to_kudos(amount), action=MONTHLY_ACTION, now=now)
    return len(paid)


def _holds(role: UserRoleTypes) -> ColumnElement[bool]:
    return exists().where(
        UserRole.user_id == User.id, UserRole.user_role == role, UserRole.value.is_(True)
    )
