# SPDX-License-Identifier: AGPL-3.0-or-later
"""The applier's steps: claim rows, sum them per account and counter, write each table once.

Everything here runs in the applier's transaction, under its lock. Rows are locked users first,
workers last, each by id.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Row, delete, exists, insert, select, text, update
from sqlalchemy.orm import Session

from horde.classes.base.kudos import (
    Account,
    EntryType,
    KudosBalanceSnapshot,
    KudosPosting,
    QueuedStatistics,
    Statistic,
    StatPosting,
    StatTarget,
    parse_additions,
)
from horde.classes.base.user import (
    ANONYMOUS_ID,
    User,
    UserRecordTypes,
    UserRole,
    UserRoleTypes,
    get_kudos_floor,
)
from horde.classes.base.worker import Worker
from horde.database.functions import note_text_workers_changed
from horde.database.suspicions import list_suspicious_users
from horde.db import after_commit

TRUST_AGE = timedelta(days=7)
ACTIVITY_ENTRY_TYPES = frozenset({EntryType.GENERATION, EntryType.UPTIME_REWARD})
WORKER_COUNTERS = ("kudos", "contributions", "fulfilments")

ZERO = Decimal(0)


@dataclass(slots=True)
class AccountSums:
    """What a batch moves on one user's balances, and when the user last did something."""

    balance: Decimal = ZERO
    escrow: Decimal = ZERO
    last_active: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedAccount:
    """A user's balances before the batch, and what decides about its floor and its trust."""

    balance: Decimal
    escrow: Decimal
    floor: int
    is_anonymous: bool
    is_trusted: bool
    created: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedAccount:
    """A user's balances after the batch. `drained` left the escrow for the balance; `forgiven`
    lifted it to its floor.
    """

    balance: Decimal
    escrow: Decimal
    drained: Decimal = ZERO
    forgiven: Decimal = ZERO


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotions:
    """What folding brought about by itself: users that became trusted, and the display totals of
    drained escrow.
    """

    trusted_user_ids: tuple[int, ...] = ()
    statistics: tuple[Statistic, ...] = ()


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


# Claiming


def claim_currencies(session: Session, batch: int) -> Sequence[Row[Any]]:
    """Mark the oldest unapplied postings as applied and return them.

    By a flag on each row and not by a highest id: an id given out early may be committed late.
    """
    oldest = (
        select(KudosPosting.id)
        .where(KudosPosting.applied.is_(False))
        .order_by(KudosPosting.id)
        .limit(batch)
    )
    return session.execute(
        update(KudosPosting)
        .where(KudosPosting.id.in_(oldest))
        .values(applied=True)
        .returning(
            KudosPosting.user_id,
            KudosPosting.account,
            KudosPosting.amount,
            KudosPosting.reservation_id,
            KudosPosting.entry_type,
            KudosPosting.created,
        )
        .execution_options(synchronize_session=False)
    ).all()


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


# Balances


def sum_currencies(postings: Iterable[Row[Any]]) -> dict[int, AccountSums]:
    """Add up a batch by user."""
    sums: defaultdict[int, AccountSums] = defaultdict(AccountSums)
    for posting in postings:
        account = sums[posting.user_id]
        if posting.account == Account.ESCROW:
            account.escrow += posting.amount
        else:
            account.balance += posting.amount
        if posting.entry_type in ACTIVITY_ENTRY_TYPES:
            account.last_active = max(account.last_active or posting.created, posting.created)
    return dict(sums)


def fold_account(account: LockedAccount, sums: AccountSums, *, gains_trust: bool) -> FoldedAccount:
    """The balances after a batch: escrow of the trusted drains into the balance, and the floor
    forgives what is below.
    """
    escrow = account.escrow + sums.escrow
    drained = max(escrow, ZERO) if account.is_trusted or gains_trust else ZERO
    balance = account.balance + sums.balance + drained
    forgiven = max(account.floor - balance, ZERO)
    return FoldedAccount(
        balance=balance + forgiven, escrow=escrow - drained, drained=drained, forgiven=forgiven
    )


def is_promotable(
    account: LockedAccount, sums: AccountSums, *, trust_threshold: int | None, now: datetime
) -> bool:
    """Whether an account has earned trust by itself; suspicion, asked separately, still stands
    against it.
    """
    return (
        trust_threshold is not None
        and not account.is_trusted
        and not account.is_anonymous
        and account.escrow + sums.escrow > trust_threshold
        and now - account.created >= TRUST_AGE
    )


def apply_currencies(
    session: Session, postings: Sequence[Row[Any]], *, trust_threshold: int | None, now: datetime
) -> Promotions:
    """Fold claimed postings into balances, escrows and holds, and book what the floors and
    promotions add.
    """
    if not postings:
        return Promotions()
    sums = sum_currencies(postings)
    accounts = _lock_accounts(session, sums)
    candidates = {
        user_id
        for user_id, account in accounts.items()
        if is_promotable(account, sums[user_id], trust_threshold=trust_threshold, now=now)
    }
    promoted = candidates - list_suspicious_users(session, candidates)
    folded = {
        user_id: fold_account(account, sums[user_id], gains_trust=user_id in promoted)
        for user_id, account in accounts.items()
    }
    _write_balances(session, folded, sums, now)
    _write_consumption(session, postings)
    _book_adjustments(session, folded, now)
    _grant_trust(session, promoted)
    return Promotions(
        trusted_user_ids=tuple(sorted(promoted)), statistics=_build_drained_statistics(folded)
    )


def _lock_accounts(session: Session, user_ids: Iterable[int]) -> dict[int, LockedAccount]:
    """These users, their rows locked in order of id until the applier commits."""
    is_trusted = exists().where(
        UserRole.user_id == User.id,
        UserRole.user_role == UserRoleTypes.TRUSTED,
        UserRole.value.is_(True),
    )
    rows = session.execute(
        select(
            User.id,
            User.kudos,
            User.evaluating_kudos,
            User.oauth_id,
            User.created,
            KudosBalanceSnapshot.balance,
            KudosBalanceSnapshot.escrow,
            is_trusted.label("is_trusted"),
        )
        .outerjoin(KudosBalanceSnapshot, KudosBalanceSnapshot.user_id == User.id)
        .where(User.id.in_(list(user_ids)))
        .order_by(User.id)
        .with_for_update(of=User, key_share=True)
    )
    return {
        row.id: LockedAccount(
            # The first posting of an account that is older than the ledger starts from the balance
            # it had.
            balance=Decimal(row.kudos) if row.balance is None else row.balance,
            escrow=Decimal(row.evaluating_kudos) if row.escrow is None else row.escrow,
            floor=get_kudos_floor(row.id, row.oauth_id),
            is_anonymous=row.id == ANONYMOUS_ID,
            is_trusted=row.is_trusted,
            created=row.created,
        )
        for row in rows
    }


def _write_balances(
    session: Session,
    folded: Mapping[int, FoldedAccount],
    sums: Mapping[int, AccountSums],
    now: datetime,
) -> None:
    """Write the balances to the cent, and the whole kudos of them where everybody reads them.

    The snapshots are first: a new one reads its opening balances from `users` before they change.
    """
    columns = {
        "user_ids": list(folded),
        "balances": [account.balance for account in folded.values()],
        "escrows": [account.escrow for account in folded.values()],
        "last_active": [sums[user_id].last_active for user_id in folded],
        "now": now,
    }
    session.execute(
        text("""
            INSERT INTO kudos_balance_snapshots (user_id, balance, escrow, opening_balance,
                opening_escrow, updated)
            SELECT users.id, folded.balance, folded.escrow, users.kudos, users.evaluating_kudos,
                :now
            FROM unnest(CAST(:user_ids AS integer[]), CAST(:balances AS numeric[]),
                CAST(:escrows AS numeric[]))
                AS folded (user_id, balance, escrow)
            JOIN users ON users.id = folded.user_id
            ON CONFLICT (user_id) DO UPDATE
            SET balance = excluded.balance, escrow = excluded.escrow, updated = excluded.updated
            """),
        columns,
    )
    session.execute(
        text("""
            UPDATE users
            SET kudos = floor(folded.balance),
                evaluating_kudos = least(floor(folded.escrow), 2147483647),
                last_active = greatest(users.last_active, folded.last_active)
            FROM unnest(CAST(:user_ids AS integer[]), CAST(:balances AS numeric[]),
                CAST(:escrows AS numeric[]),
                CAST(:last_active AS timestamp[])) AS folded (user_id, balance, escrow, last_active)
            WHERE users.id = folded.user_id
            """),
        columns,
    )


def _write_consumption(session: Session, postings: Iterable[Row[Any]]) -> None:
    """Count folded debits against the holds they name."""
    spent: defaultdict[str, Decimal] = defaultdict(Decimal)
    for posting in postings:
        if posting.reservation_id is not None:
            spent[posting.reservation_id] -= posting.amount
    if not spent:
        return
    session.execute(
        text("""
            UPDATE kudos_reservations SET consumed = consumed + spent.amount
            FROM unnest(CAST(:business_ids AS varchar[]), CAST(:amounts AS numeric[]))
                AS spent (business_id, amount)
            WHERE kudos_reservations.business_id = spent.business_id
            """),
        {"business_ids": list(spent), "amounts": list(spent.values())},
    )


def _book_adjustments(session: Session, folded: Mapping[int, FoldedAccount], now: datetime) -> None:
    """Book forgiven debt and promoted escrow, born applied, so that replaying the postings gives
    the balances.
    """
    rows = []
    for user_id, account in folded.items():
        moves = (
            (EntryType.EVALUATION_PROMOTION, Account.ESCROW, -account.drained),
            (EntryType.EVALUATION_PROMOTION, Account.BALANCE, account.drained),
            (EntryType.FLOOR_ADJUSTMENT, Account.BALANCE, account.forgiven),
        )
        event_id = uuid4()
        rows += [
            {
                "event_id": event_id,
                "entry_type": entry_type,
                "user_id": user_id,
                "account": of,
                "amount": amount,
                "created": now,
                "applied": True,
            }
            for entry_type, of, amount in moves
            if amount
        ]
    if rows:
        session.execute(insert(KudosPosting), rows)


def _grant_trust(session: Session, user_ids: set[int]) -> None:
    """Make these accounts trusted and let their paused workers work."""
    if not user_ids:
        return
    session.execute(
        text("""
            INSERT INTO user_roles (user_id, user_role, value)
            SELECT unnest(CAST(:user_ids AS integer[])), 'TRUSTED', true
            ON CONFLICT (user_id, user_role) DO UPDATE SET value = true
            """),
        {"user_ids": sorted(user_ids)},
    )
    session.execute(
        update(Worker)
        .where(Worker.user_id.in_(user_ids), Worker.paused.is_(True))
        .values(paused=False)
        .execution_options(synchronize_session=False)
    )
    after_commit(session, note_text_workers_changed)


def _build_drained_statistics(folded: Mapping[int, FoldedAccount]) -> tuple[Statistic, ...]:
    return tuple(
        Statistic(
            entry_type=EntryType.EVALUATION_PROMOTION,
            target=StatTarget.USER_STATS,
            name="accumulated",
            amount=account.drained,
            user_id=user_id,
        )
        for user_id, account in folded.items()
        if account.drained
    )


# Counters


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
        counter: [_to_whole(sums.get((worker_id, counter), ZERO)) for worker_id in worker_ids]
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
