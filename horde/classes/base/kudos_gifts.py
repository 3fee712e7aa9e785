# SPDX-License-Identifier: AGPL-3.0-or-later
"""Kudos that change hands without work: gifts and awards, and the log of gifts."""

from datetime import datetime
from decimal import Decimal
from uuid import UUID

from sqlalchemy import BigInteger, DateTime, ForeignKey, Index, Integer, Uuid
from sqlalchemy.orm import Mapped, mapped_column

from horde.classes.base.kudos import Currency, EntryType, Movements, Statistic, StatTarget
from horde.clock import utcnow
from horde.db import Base


class KudosTransfer(Base):
    """One gift. `event_id` is that of its postings, the same for a gift that is sent again."""

    __tablename__ = "kudos_transfers"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    source_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    dest_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    kudos: Mapped[int] = mapped_column(BigInteger, default=0)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    event_id: Mapped[UUID | None] = mapped_column(Uuid)
    sharedkey_id: Mapped[UUID | None] = mapped_column(Uuid)  # no foreign key: keys are deleted


Index(
    "ix_kudos_transfers_event_id",
    KudosTransfer.event_id,
    unique=True,
    postgresql_where=KudosTransfer.event_id.is_not(None),
)


def build_transfer_movements(
    *, source_id: int, dest_id: int, amount: Decimal, is_donation: bool
) -> Movements:
    """What a gift moves. A gift to a school is shown as a donation of its giver."""
    return Movements(
        currencies=(
            Currency(user_id=source_id, entry_type=EntryType.TRANSFER, amount=-amount),
            Currency(user_id=dest_id, entry_type=EntryType.TRANSFER, amount=amount),
        ),
        statistics=(
            _build_total(
                source_id, EntryType.TRANSFER, "donated" if is_donation else "gifted", -amount
            ),
            _build_total(dest_id, EntryType.TRANSFER, "received", amount),
        ),
    )


def build_award_movements(*, dest_id: int, amount: Decimal) -> Movements:
    """What an award moves: it comes from nobody."""
    return Movements(
        currencies=(Currency(user_id=dest_id, entry_type=EntryType.AWARD, amount=amount),),
        statistics=(_build_total(dest_id, EntryType.AWARD, "awarded", amount),),
    )


def _build_total(user_id: int, entry_type: EntryType, action: str, amount: Decimal) -> Statistic:
    return Statistic(
        entry_type=entry_type,
        target=StatTarget.USER_STATS,
        name=action,
        amount=amount,
        user_id=user_id,
    )
