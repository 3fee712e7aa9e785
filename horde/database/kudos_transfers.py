# SPDX-License-Identifier: AGPL-3.0-or-later
"""The log of gifts, and what a gift does to a shared key."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import case, exists, insert, select, update
from sqlalchemy.orm import Session

from horde.classes.base.kudos_gifts import KudosTransfer
from horde.classes.base.user import UserSharedKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A gift from one account to another, or to a shared key of it."""

    source_id: int
    dest_id: int
    kudos: int
    sharedkey_id: UUID | None


def find_transfer(session: Session, event_id: UUID) -> Transfer | None:
    """The gift that was booked under this event; None when there is none."""
    row = session.execute(
        select(
            KudosTransfer.source_id,
            KudosTransfer.dest_id,
            KudosTransfer.kudos,
            KudosTransfer.sharedkey_id,
        ).where(KudosTransfer.event_id == event_id)
    ).one_or_none()
    return None if row is None else Transfer(**row._mapping)


def has_given_since(session: Session, *, source_id: int, dest_id: int, since: datetime) -> bool:
    """Whether an account gave something to another from that moment on."""
    given = exists().where(
        KudosTransfer.source_id == source_id,
        KudosTransfer.dest_id == dest_id,
        KudosTransfer.created >= since,
    )
    return bool(session.scalar(select(given)))


def add_transfer(session: Session, event_id: UUID, transfer: Transfer, now: datetime) -> None:
    """Log a gift. Its event is unique, so of two at once one fails."""
    session.execute(
        insert(KudosTransfer).values(
            source_id=transfer.source_id,
            dest_id=transfer.dest_id,
            kudos=transfer.kudos,
            sharedkey_id=transfer.sharedkey_id,
            event_id=event_id,
            created=now,
        )
    )


def raise_shared_key_budget(session: Session, sharedkey_id: UUID, amount: int) -> None:
    """Add to what a shared key may spend; an unlimited one stays so."""
    session.execute(
        update(UserSharedKey)
        .where(UserSharedKey.id == sharedkey_id)
        .values(kudos=case((UserSharedKey.kudos == -1, -1), else_=UserSharedKey.kudos + amount))
        .execution_options(synchronize_session=False)
    )
