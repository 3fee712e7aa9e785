# SPDX-License-Identifier: AGPL-3.0-or-later
"""The applier's steps for statistics: claim rows, sum them per counter, write each table once.

Everything here runs in the applier's transaction, under its lock, after the accounts.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import Row, delete, insert, select, text, update
from sqlalchemy.orm import Session

from horde.classes.base.kudos import (
    QueuedStatistics,
    Statistic,
    StatPosting,
    StatTarget,
    parse_additions,
)
from horde.classes.base.user import User, UserRecordTypes
from horde.classes.base.worker import Worker

WORKER_COUNTERS = ("kudos", "contributions", "fulfilments")


@dataclass(slots=True)
class StatisticSums:
    """What a batch adds to counters, by the key of each table, and the rows that can never be added
    (id to reason).
    """

    user_stats: defaultdict[tuple[int, str], Decimal] = field(
        default_factory=lambda: defaultdict(Decimal)
    )
    user_records: defaultdict[tuple[int, str, str], Decimal] = field(
        default_factory=lambda: defaultdict(Decimal)
    )
    workers: defaultdict[tuple[UUID, str], Decimal] = field(
        default_factory=lambda: defaultdict(Decimal)
    )
    worker_stats: defaultdict[tuple[UUID, str], Decimal] = field(
        default_factory=lambda: defaultdict(Decimal)
    )

    def user_ids(self) -> set[int]:
        """Every user a counter belongs to."""
        return {key[0] for key in self.user_stats} | {key[0] for key in self.user_records}

    def worker_ids(self) -> set[UUID]:
        """Every worker a counter belongs to."""
        return {key[0] for key in self.workers} | {key[0] for key in self.worker_stats}


def claim_statistics(session: Session, batch: int) -> Sequence[Row[Any]]:
    """Mark the oldest unapplied statistic postings as applied and return them; quarantined ones
    stay where they are.
    """
    oldest = (
        select(StatPosting.id)
        .where(StatPosting.applied.is_(False), StatPosting.quarantine_reason.is_(None))
        .order_by(StatPosting.id)
        .limit(batch)
    )
    return session.execute(
        update(StatPosting)
        .where(StatPosting.id.in_(oldest))
        .values(applied=True)
        .returning(
            StatPosting.id,
            StatPosting.target,
            StatPosting.name,
            StatPosting.record,
            StatPosting.user_id,
            StatPosting.worker_id,
            StatPosting.amount,
        )
        .execution_options(synchronize_session=False)
    ).all()


@dataclass(frozen=True, slots=True)
class QueuedStatistic:
    """One amount of an event that was taken from the queue."""

    event_id: UUID
    created: datetime
    statistic: Statistic


def take_queued_statistics(session: Session, batch: int) -> tuple[int, list[QueuedStatistic]]:
    """Take the oldest events from the queue: how many there were, and their amounts."""
    oldest = select(QueuedStatistics.id).order_by(QueuedStatistics.id).limit(batch)
    events = session.execute(
        delete(QueuedStatistics)
        .where(QueuedStatistics.id.in_(oldest))
        .returning(QueuedStatistics.event_id, QueuedStatistics.created, QueuedStatistics.additions)
        .execution_options(synchronize_session=False)
    ).all()
    return len(events), [
        QueuedStatistic(event.event_id, event.created, statistic)
        for event in events
        for statistic in parse_additions(event.additions)
    ]


def find_statistic_fault(posting: Row[Any] | Statistic) -> str | None:
    """Why a statistic posting can never be added to anything, by its own columns; None for a good
    one.
    """
    belongs_to_user = posting.target in (StatTarget.USER_STATS, StatTarget.USER_RECORDS)
    belongs_to_worker = posting.target in (StatTarget.WORKERS, StatTarget.WORKER_STATS)
    if not belongs_to_user and not belongs_to_worker:
        return "unknown target"
    if (posting.user_id is not None) != belongs_to_user or (
        posting.worker_id is not None
    ) != belongs_to_worker:
        return "has to name exactly the user or the worker of its target"
    if posting.target == StatTarget.USER_RECORDS and (
        posting.name not in UserRecordTypes.__members__ or not posting.record
    ):
        return "unknown record"
    if posting.target == StatTarget.WORKERS and posting.name not in WORKER_COUNTERS:
        return "unknown counter"
    if (
        posting.target in (StatTarget.USER_STATS, StatTarget.WORKER_STATS)
        and len(posting.name) > 20
    ):
        return "action longer than its column"
    return None


def sum_statistics(postings: Iterable[Any]) -> StatisticSums:
    """Add up good statistic postings, rows or `Statistic`s, by counter."""
    sums = StatisticSums()
    for posting in postings:
        if posting.target == StatTarget.USER_STATS:
            sums.user_stats[posting.user_id, posting.name] += posting.amount
        elif posting.target == StatTarget.USER_RECORDS:
            sums.user_records[posting.user_id, posting.name, posting.record] += posting.amount
        elif posting.target == StatTarget.WORKERS:
            sums.workers[posting.worker_id, posting.name] += posting.amount
        else:
            sums.worker_stats[posting.worker_id, posting.name] += posting.amount
    return sums


def apply_statistics(
    session: Session,
    postings: Sequence[Row[Any]],
    queued: Sequence[QueuedStatistic],
    additions: Sequence[Statistic],
) -> None:
    """Fold statistics into counters: claimed postings, taken ones of the queue, and the `additions`
    of this very fold. Those that never can be are set aside with their reason.

    Counters of kudos are whole numbers: they round at each fold, balances do not.
    """
    if not postings and not queued and not additions:
        return
    claimed: list[tuple[Row[Any] | QueuedStatistic, Row[Any] | Statistic]] = [
        *((posting, posting) for posting in postings),
        *((taken, taken.statistic) for taken in queued),
    ]
    sums = sum_statistics(
        [*(item for _, item in claimed if find_statistic_fault(item) is None), *additions]
    )
    known_users = (
        set(session.scalars(select(User.id).where(User.id.in_(sums.user_ids()))))
        if sums.user_ids()
        else set()
    )
    _write_user_stats(
        session, {key: amount for key, amount in sums.user_stats.items() if key[0] in known_users}
    )
    _write_user_records(
        session, {key: amount for key, amount in sums.user_records.items() if key[0] in known_users}
    )
    # Workers last: a poll that holds its worker's row then delays the applier's end, not what
    # others wait for.
    known_workers = _lock_workers(session, sums.worker_ids())
    _write_worker_stats(
        session,
        {key: amount for key, amount in sums.worker_stats.items() if key[0] in known_workers},
    )
    _write_workers(session, sums.workers, known_workers)

    def find_fault(item: Row[Any] | Statistic) -> str | None:
        if (fault := find_statistic_fault(item)) is not None:
            return fault
        if item.user_id is not None and item.user_id not in known_users:
            return "the user is gone"
        if item.worker_id is not None and item.worker_id not in known_workers:
            return "the worker is gone"
        return None

    faults = [(source, fault) for source, item in claimed if (fault := find_fault(item))]
    _quarantine(
        session, {row.id: fault for row, fault in faults if not isinstance(row, QueuedStatistic)}
    )
    _keep_in_quarantine(
        session, [(taken, fault) for taken, fault in faults if isinstance(taken, QueuedStatistic)]
    )


def _lock_workers(session: Session, worker_ids: set[UUID]) -> set[UUID]:
    """Those of the workers that exist, their rows locked in order of id."""
    if not worker_ids:
        return set()
    statement = (
        select(Worker.id)
        .where(Worker.id.in_(worker_ids))
        .order_by(Worker.id)
        .with_for_update(key_share=True)
    )
    return set(session.scalars(statement))


def _to_whole(amount: Decimal) -> int:
    return int(amount.to_integral_value(ROUND_HALF_EVEN))


def _write_user_stats(session: Session, sums: Mapping[tuple[int, str], Decimal]) -> None:
    if not sums:
        return
    session.execute(
        text("""
            INSERT INTO user_stats (user_id, action, value)
            SELECT * FROM unnest(CAST(:user_ids AS integer[]), CAST(:actions AS varchar[]),
                CAST(:amounts AS bigint[]))
            ON CONFLICT (user_id, action) DO UPDATE SET value = user_stats.value + excluded.value
            """),
        {
            "user_ids": [key[0] for key in sums],
            "actions": [key[1] for key in sums],
            "amounts": [_to_whole(amount) for amount in sums.values()],
        },
    )


def _write_user_records(session: Session, sums: Mapping[tuple[int, str, str], Decimal]) -> None:
    if not sums:
        return
    session.execute(
        text("""
            INSERT INTO user_records (user_id, record_type, record, value)
            SELECT user_id, CAST(kind AS userrecordtypes), record, amount
            FROM unnest(CAST(:user_ids AS integer[]), CAST(:kinds AS varchar[]),
                CAST(:records AS varchar[]),
                CAST(:amounts AS float[])) AS added (user_id, kind, record, amount)
            ON CONFLICT (user_id, record_type, record) DO UPDATE
                SET value = user_records.value + excluded.value
            """),
        {
            "user_ids": [key[0] for key in sums],
            "kinds": [key[1] for key in sums],
            "records": [key[2] for key in sums],
            "amounts": [float(amount) for amount in sums.values()],
        },
    )


def _write_worker_stats(session: Session, sums: Mapping[tuple[UUID, str], Decimal]) -> None:
    if not sums:
        return
    session.execute(
        text("""
            INSERT INTO worker_stats (worker_id, action, value)
            SELECT * FROM unnest(CAST(:worker_ids AS uuid[]), CAST(:actions AS varchar[]),
                CAST(:amounts AS bigint[]))
            ON CONFLICT (worker_id, action) DO UPDATE
                SET value = worker_stats.value + excluded.value
            """),
        {
            "worker_ids": [str(key[0]) for key in sums],
            "actions": [key[1] for key in sums],
            "amounts": [_to_whole(amount) for amount in sums.values()],
        },
    )


def _write_workers(
    session: Session, sums: Mapping[tuple[UUID, str], Decimal], known_workers: set[UUID]
) -> None:
    worker_ids = sorted({key[0] for key in sums} & known_workers)
    if not worker_ids:
        return
    amounts = {
        counter: [_to_whole(sums.get((worker_id, counter), Decimal(0))) for worker_id in worker_ids]
        for counter in WORKER_COUNTERS
    }
    session.execute(
        text("""
            UPDATE workers
            SET kudos = workers.kudos + added.kudos,
                contributions = workers.contributions + added.contributions,
                fulfilments = workers.fulfilments + added.fulfilments
            FROM unnest(CAST(:worker_ids AS uuid[]), CAST(:kudos AS bigint[]),
                CAST(:contributions AS bigint[]),
                CAST(:fulfilments AS integer[]))
                AS added (worker_id, kudos, contributions, fulfilments)
            WHERE workers.id = added.worker_id
            """),
        {"worker_ids": [str(worker_id) for worker_id in worker_ids], **amounts},
    )


def _quarantine(session: Session, faults: Mapping[int, str]) -> None:
    """Set rows aside with a reason, so that they neither block the queue nor pass for folded."""
    if not faults:
        return
    session.execute(
        text("""
            UPDATE kudos_stat_events SET applied = false, quarantine_reason = fault.reason
            FROM unnest(CAST(:ids AS bigint[]), CAST(:reasons AS varchar[])) AS fault (id, reason)
            WHERE kudos_stat_events.id = fault.id
            """),
        {"ids": list(faults), "reasons": list(faults.values())},
    )


def _keep_in_quarantine(session: Session, faults: Sequence[tuple[QueuedStatistic, str]]) -> None:
    """Keep what left the queue and can never be added, with the reason."""
    rows = [
        {
            "event_id": taken.event_id,
            "entry_type": taken.statistic.entry_type,
            "target": taken.statistic.target,
            "name": taken.statistic.name,
            "record": taken.statistic.record,
            "user_id": taken.statistic.user_id,
            "worker_id": taken.statistic.worker_id,
            "amount": taken.statistic.amount,
            "created": taken.created,
            "applied": False,
            "quarantine_reason": fault,
        }
        for taken, fault in faults
    ]
    if rows:
        session.execute(insert(StatPosting), rows)
