# SPDX-License-Identifier: AGPL-3.0-or-later
"""Kudos as postings: the rows of the ledger and the pure functions that build them.

A request transaction only appends postings. One elected applier folds them into balances
(database/kudos.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final, cast
from uuid import UUID

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    Numeric,
    String,
    Uuid,
)
from sqlalchemy.orm import Mapped, mapped_column

from horde.clock import utcnow
from horde.db import Base

CENT = Decimal("0.01")
USERS, WORKERS = "users", "workers"  # whose counters a document of additions moves


class EntryType(StrEnum):
    """Why kudos or counters moved."""

    GENERATION = "GENERATION"
    UPTIME_REWARD = "UPTIME_REWARD"
    EVALUATION_PROMOTION = "EVALUATION_PROMOTION"
    TRANSFER = "TRANSFER"
    ADMIN_ADJUSTMENT = "ADMIN_ADJUSTMENT"
    AWARD = "AWARD"
    STYLE_REWARD = "STYLE_REWARD"
    STAT_RECORD = "STAT_RECORD"
    STAT_CONTRIBUTION = "STAT_CONTRIBUTION"
    STAT_ACTIVITY = "STAT_ACTIVITY"
    FLOOR_ADJUSTMENT = "FLOOR_ADJUSTMENT"
    RECONCILIATION = "RECONCILIATION"


class Account(StrEnum):
    """Which of a user's two balances a currency posting moves."""

    BALANCE = "balance"
    ESCROW = "escrow"


class StatTarget(StrEnum):
    """Which counter a statistic posting moves; `name` (and `record`) pick the row or column."""

    USER_STATS = "user_stats"  # name: the action, such as accumulated
    USER_RECORDS = "user_records"  # name: the UserRecordTypes member; record: text
    WORKERS = "workers"  # name: kudos, contributions or fulfilments
    WORKER_STATS = "worker_stats"  # name: the action, generated or uptime


class KudosPosting(Base):
    """One signed amount against one balance of one user; permanent. `applied` says whether it was
    folded.
    """

    __tablename__ = "kudos_ledger"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    event_id: Mapped[UUID] = mapped_column(Uuid)
    entry_type: Mapped[str] = mapped_column(String(32))
    # No foreign key: it would lock Anonymous' row for almost every job.
    user_id: Mapped[int] = mapped_column(Integer)
    account: Mapped[str] = mapped_column(String(10), default=Account.BALANCE)
    amount: Mapped[Decimal] = mapped_column(Numeric(18, 2))
    # Business id of the hold that this debit consumes.
    reservation_id: Mapped[str | None] = mapped_column(String(100))
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    applied: Mapped[bool] = mapped_column(Boolean, default=False)


class QueuedStatistics(Base):
    """What one event adds to counters, until it is folded; see `build_additions`."""

    __tablename__ = "kudos_stat_queue"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    event_id: Mapped[UUID] = mapped_column(Uuid)
    additions: Mapped[dict[str, Any]] = mapped_column(JSON)
    created: Mapped[datetime] = mapped_column(DateTime)


class StatPosting(Base):
    """One signed amount for a counter of a user or a worker, never both.

    Servers before 5.1.28 wrote a row for each amount; what can never be added stays here.
    """

    __tablename__ = "kudos_stat_events"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    event_id: Mapped[UUID] = mapped_column(Uuid)
    entry_type: Mapped[str] = mapped_column(String(32))
    target: Mapped[str] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(String(30))
    record: Mapped[str | None] = mapped_column(String(30))
    user_id: Mapped[int | None] = mapped_column(Integer)
    worker_id: Mapped[UUID | None] = mapped_column(Uuid)
    amount: Mapped[Decimal] = mapped_column(Numeric(18, 2))
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    applied: Mapped[bool] = mapped_column(Boolean, default=False)
    quarantine_reason: Mapped[str | None] = mapped_column(String(255))


class KudosReservation(Base):
    """A payer's hold: not a debit, but not available for anything else while it is active."""

    __tablename__ = "kudos_reservations"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    user_id: Mapped[int] = mapped_column(Integer)
    business_id: Mapped[str] = mapped_column(String(100), unique=True)
    amount: Mapped[Decimal] = mapped_column(Numeric(18, 2))
    # Folded debits that name this hold.
    consumed: Mapped[Decimal] = mapped_column(Numeric(18, 2), default=Decimal(0))
    active: Mapped[bool] = mapped_column(Boolean, default=True)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    released_at: Mapped[datetime | None] = mapped_column(DateTime)


class KudosBalanceSnapshot(Base):
    """A user's balances to the cent, as folded so far. `users.kudos` shows the whole kudos of it.

    opening + the sum of the applied postings = balance, for each of the two accounts: that is what
    the audit proves.
    """

    __tablename__ = "kudos_balance_snapshots"

    user_id: Mapped[int] = mapped_column(
        ForeignKey("users.id", ondelete="CASCADE"), primary_key=True
    )
    balance: Mapped[Decimal] = mapped_column(Numeric(18, 2), default=Decimal(0))
    escrow: Mapped[Decimal] = mapped_column(Numeric(18, 2), default=Decimal(0))
    opening_balance: Mapped[Decimal] = mapped_column(Numeric(18, 2), default=Decimal(0))
    opening_escrow: Mapped[Decimal] = mapped_column(Numeric(18, 2), default=Decimal(0))
    updated: Mapped[datetime] = mapped_column(DateTime, default=utcnow)


Index(
    "ix_kudos_ledger_unapplied", KudosPosting.id, postgresql_where=KudosPosting.applied.is_(False)
)
Index(
    "ix_kudos_ledger_unapplied_user",
    KudosPosting.user_id,
    postgresql_where=KudosPosting.applied.is_(False),
)
Index("ix_kudos_ledger_user_id_id", KudosPosting.user_id, KudosPosting.id)
Index(
    "ix_kudos_stat_events_waiting",
    StatPosting.id,
    postgresql_where=StatPosting.applied.is_(False) & StatPosting.quarantine_reason.is_(None),
)
Index(
    "ix_kudos_reservations_active_user",
    KudosReservation.user_id,
    postgresql_where=KudosReservation.active.is_(True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Currency:
    """A kudos movement to append: `amount` is signed, in kudos with two decimals."""

    user_id: int
    entry_type: EntryType
    amount: Decimal
    account: Account = Account.BALANCE
    reservation_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """A counter movement to append, for exactly one of a user and a worker."""

    entry_type: EntryType
    target: StatTarget
    name: str
    amount: Decimal
    record: str | None = None
    user_id: int | None = None
    worker_id: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Movements:
    """What one business event moves: appended together, in the transaction of the event."""

    currencies: tuple[Currency, ...] = ()
    statistics: tuple[Statistic, ...] = ()


# The arguments of `append_postings` that make the rows of an event, for the functions that pass
# them on. `build_posting_parameters` has their values.
POSTING_ARGUMENTS: Final = """
    entry_types => :entry_types, user_ids => :user_ids, accounts => :accounts, amounts => :amounts,
    reservation_ids => :reservation_ids, additions => :additions, moment => :now
"""


def build_posting_parameters(movements: Movements, now: datetime) -> dict[str, object]:
    """The values of `POSTING_ARGUMENTS`."""
    currencies = movements.currencies
    return {
        "entry_types": [item.entry_type.value for item in currencies],
        "user_ids": [item.user_id for item in currencies],
        "accounts": [item.account.value for item in currencies],
        "amounts": [item.amount for item in currencies],
        "reservation_ids": [item.reservation_id for item in currencies],
        "additions": build_additions(movements.statistics),
        "now": now,
    }


def build_additions(statistics: Sequence[Statistic]) -> str | None:
    """The counters that one event moves as a JSON document; None without any.

    For each user and worker the amounts, as text, by `target:name` or `target:name:record`.
    """
    sums: dict[str, dict[str, dict[str, Decimal]]] = {}
    for item in statistics:
        kind, subject = (
            (USERS, item.user_id) if item.worker_id is None else (WORKERS, item.worker_id)
        )
        counters = sums.setdefault(kind, {}).setdefault(str(subject), {})
        counter = f"{item.target.value}:{item.name}" + (f":{item.record}" if item.record else "")
        counters[counter] = counters.get(counter, Decimal(0)) + item.amount
    return json.dumps(sums, default=str, separators=(",", ":")) if sums else None


def parse_additions(additions: Mapping[str, Mapping[str, Mapping[str, str]]]) -> list[Statistic]:
    """The amounts of a document that `build_additions` made."""
    return [
        Statistic(
            entry_type=EntryType.STAT_RECORD,
            target=cast(StatTarget, target),  # an unknown one is found when it is folded
            name=name,
            record=record or None,
            amount=Decimal(amount),
            user_id=int(subject) if kind == USERS else None,
            worker_id=UUID(subject) if kind == WORKERS else None,
        )
        for kind, subjects in additions.items()
        for subject, counters in subjects.items()
        for counter, amount in counters.items()
        for target, name, record in [(*counter.split(":", 2), "")[:3]]
    ]


def to_kudos(amount: float | int | Decimal) -> Decimal:
    """An amount as the ledger keeps it: two decimals."""
    return Decimal(str(amount)).quantize(CENT)


def upfront_hold_id(wp_id: UUID) -> str:
    """The business id of the hold a request's output is paid from."""
    return f"upfront:{wp_id}"
