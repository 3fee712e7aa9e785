# SPDX-License-Identifier: AGPL-3.0-or-later
"""The list of what moderators and operators did: rows are added and read, never changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from horde.classes.base.moderation import ModeratorAct


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAct:
    """One act as it was recorded; without a `user_id` it was the operator's."""

    id: int
    created: datetime
    user_id: int | None
    username: str
    action: str
    subject: str
    reason: str | None
    details: Mapping[str, object]


def add_act(
    session: Session,
    *,
    user_id: int | None,
    username: str,
    action: str,
    subject: str,
    reason: str | None,
    details: Mapping[str, object],
    now: datetime,
) -> None:
    """Record an act in the transaction that does it."""
    session.execute(
        insert(ModeratorAct).values(
            created=now,
            user_id=user_id,
            username=username,
            action=action,
            subject=subject,
            reason=reason,
            details=dict(details),
        )
    )


def list_acts(
    session: Session,
    *,
    user_id: int | None = None,
    action: str | None = None,
    subject: str | None = None,
    offset: int,
    limit: int,
) -> list[RecordedAct]:
    """Recorded acts, the newest first; those that fit what is given."""
    wanted = {
        ModeratorAct.user_id: user_id,
        ModeratorAct.action: action,
        ModeratorAct.subject: subject,
    }
    statement = (
        select(*ModeratorAct.__table__.columns)
        .where(*(column == value for column, value in wanted.items() if value is not None))
        .order_by(ModeratorAct.id.desc())
        .offset(offset)
        .limit(limit)
    )
    return [RecordedAct(**row._mapping) for row in session.execute(statement)]
