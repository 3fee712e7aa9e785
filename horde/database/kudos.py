# SPDX-License-Identifier: AGPL-3.0-or-later
"""The ledger: append postings, hold kudos, fold postings into balances, prove the balances.

Request transactions append and hold. Only `fold_postings` writes balances and counters, one applier
at a time. Source: docs/explanation/kudos.md.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import partial
from uuid import UUID

from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from horde.classes.base.kudos import (
    POSTING_ARGUMENTS,
    Account,
    KudosPosting,
    KudosReservation,
    Movements,
    build_posting_parameters,
)
from horde.classes.base.user import (
    ANONYMOUS_FLOOR,
    ANONYMOUS_ID,
    PSEUDONYMOUS_FLOOR,
    REGISTERED_FLOOR,
)
from horde.clock import utcnow
from horde.config import Config
from horde.database._kudos_fold import apply_currencies, claim_currencies
from horde.database._statistics_fold import (
    apply_statistics,
    claim_statistics,
    take_queued_statistics,
)
from horde.database.account_cache import publish_account_change
from horde.db import after_commit, retry_deadlocks, transaction
from horde.hot_session import keep
from horde.runtime import Part

# Advisory locks are pairs: a kind, and what of that kind.
PAYER_LOCK = 0x4B55444F
APPLIER_LOCK = 0x4B554450

# Rows a table: about 100 jobs, and well under a second of locks on the rows they add up to.
FOLD_BATCH = 1000


@dataclass(slots=True)
class FoldState:
    """What `configure` set for this runtime."""

    trust_threshold: int | None = None


state = Part(FoldState)


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One thing the audit found: `kind` says which rule is broken, the numbers what it should be
    and what is stored.
    """

    kind: str
    subject: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of replaying the ledger. Unapplied and quarantined rows are no error: the first
    are on their way.
    """

    accounts: int
    postings: int
    unapplied_postings: int
    unapplied_statistics: int
    quarantined_statistics: int
    discrepancies: tuple[Discrepancy, ...]


def configure(config: Config) -> None:
    """Tell the applier of this process at how much escrow an account becomes trusted."""
    state.get().trust_threshold = config.kudos_trust_threshold


# Appending

_APPEND = keep(text(f"SELECT append_postings(event => :event_id, {POSTING_ARGUMENTS})"))


def append_movements(session: Session, event_id: UUID, movements: Movements, now: datetime) -> None:
    """Append the postings of one business event, in one statement; none when nothing moves.

    An event moves each balance at most once in each direction: the audit reports one that was
    booked twice.
    """
    if movements.currencies or movements.statistics:
        values = build_posting_parameters(movements, now)
        session.execute(_APPEND, {"event_id": event_id, **values})


# Reading and holding

# The floor in SQL, equal to get_kudos_floor: a hold may not cost a query of its own for it.
_FLOOR = f"""
    CASE WHEN users.id = {ANONYMOUS_ID} THEN {ANONYMOUS_FLOOR}
         WHEN regexp_replace(users.oauth_id, '^urn:uuid:|[{{}}-]', '', 'g')
            ~* '^[0-9a-f]{{32}}$' THEN {PSEUDONYMOUS_FLOOR}
         ELSE {REGISTERED_FLOOR} END
"""

# Queued credits never count. Queued debits always do, unless an active hold, which counts in full,
# covers them already.
_PAYER = f"""
    WITH pending AS (
        SELECT reservation_id, -sum(amount) AS total
        FROM kudos_ledger
        WHERE user_id = :user_id AND applied IS FALSE AND account = '{Account.BALANCE}'
            AND amount < 0
        GROUP BY reservation_id
    ), holds AS (
        SELECT business_id, amount - consumed AS remaining
        FROM kudos_reservations
        WHERE user_id = :user_id AND active IS TRUE AND business_id <> :business_id
    ), payer AS (
        SELECT coalesce(kudos_balance_snapshots.balance, users.kudos) - ({_FLOOR})
            - coalesce((
                SELECT sum(greatest(holds.remaining, coalesce(pending.total, 0)))
                FROM holds LEFT JOIN pending ON pending.reservation_id = holds.business_id
              ), 0)
            - coalesce((
                SELECT sum(pending.total) FROM pending
                WHERE NOT EXISTS (SELECT FROM holds
                    WHERE holds.business_id = pending.reservation_id)
              ), 0) AS available
        FROM users LEFT JOIN kudos_balance_snapshots ON kudos_balance_snapshots.user_id = users.id
        WHERE users.id = :user_id
    )
"""

_AVAILABLE = text(f"{_PAYER} SELECT available FROM payer")

# A hold that comes back to life covers `amount` on top of what its earlier life spent, folded or
# not.
_HOLD = text(f"""
    {_PAYER}, known AS (
        SELECT user_id FROM kudos_reservations WHERE business_id = :business_id
    ), written AS (
        INSERT INTO kudos_reservations (user_id, business_id, amount, consumed, active, created)
        SELECT :user_id, :business_id, :amount, 0, true, :now
        FROM payer
        WHERE available >= :amount AND coalesce((SELECT user_id FROM known), :user_id) = :user_id
        ON CONFLICT (business_id) DO UPDATE SET
            amount = kudos_reservations.consumed + excluded.amount
                + coalesce((SELECT total FROM pending
                    WHERE pending.reservation_id = excluded.business_id), 0),
            active = true, released_at = NULL
        RETURNING id
    )
    SELECT EXISTS (SELECT FROM written) AS held, (SELECT user_id FROM known) AS owner
    """)

_PROJECTED = text(f"""
    SELECT coalesce(kudos_balance_snapshots.balance, users.kudos) + coalesce((
            SELECT sum(amount) FROM kudos_ledger
            WHERE user_id = :user_id AND applied IS FALSE AND account = '{Account.BALANCE}'
        ), 0) AS balance,
        {_FLOOR} AS floor
    FROM users LEFT JOIN kudos_balance_snapshots ON kudos_balance_snapshots.user_id = users.id
    WHERE users.id = :user_id
    """)


def get_available_kudos(session: Session, user_id: int) -> Decimal:
    """What a user can spend now: the balance above its floor, less holds and queued debits. 0 for
    nobody.
    """
    available: Decimal | None = session.scalar(_AVAILABLE, {"user_id": user_id, "business_id": ""})
    return available if available is not None else Decimal(0)


def get_effective_kudos(session: Session, user_id: int) -> Decimal:
    """The balance as it will be once everything queued is folded, for answers that state a new
    balance.
    """
    row = session.execute(_PROJECTED, {"user_id": user_id}).one()
    return Decimal(max(row.balance, row.floor))


def get_projected_kudos(session: Session, user_id: int) -> Decimal:
    """As `get_effective_kudos` before the floor lifts it: the difference to it is what reaches a
    wanted balance.
    """
    return Decimal(session.execute(_PROJECTED, {"user_id": user_id}).one().balance)


def lock_payers(session: Session, user_ids: Iterable[int]) -> None:
    """Let nobody else hold or give kudos of these accounts until the transaction ends.

    In order of the ids, so that two who lock the same accounts wait in turn. A statement of its own
    each: what is read next has to see what the previous holder of the lock committed.
    """
    for user_id in sorted(set(user_ids)):
        session.execute(
            text("SELECT pg_advisory_xact_lock(:kind, :user_id)"),
            {"kind": PAYER_LOCK, "user_id": user_id},
        )


def hold_kudos(
    session: Session, *, user_id: int, business_id: str, amount: Decimal, now: datetime
) -> bool:
    """Hold `amount` for a business id; False when the user cannot spare it. Two statements, none
    for an amount of 0.

    Takes the payer's lock until the transaction ends, so that two holds never count the same kudos.
    A released hold is taken again by the payer it belonged to; raises ValueError when it belonged
    to another.
    """
    if amount <= 0:
        return True
    lock_payers(session, [user_id])
    row = session.execute(
        _HOLD, {"user_id": user_id, "business_id": business_id, "amount": amount, "now": now}
    ).one()
    if row.owner is not None and row.owner != user_id:
        raise ValueError("this hold belongs to another payer")
    return bool(row.held)


def release_hold(session: Session, business_id: str, now: datetime) -> None:
    """Give back what a hold did not consume. Nothing happens when it was released before or never
    taken.
    """
    release_holds(session, [business_id], now)


def release_holds(session: Session, business_ids: Sequence[str], now: datetime) -> None:
    """Release many holds in one statement; none when the list is empty."""
    if not business_ids:
        return
    session.execute(
        update(KudosReservation)
        .where(KudosReservation.business_id.in_(business_ids), KudosReservation.active.is_(True))
        .values(active=False, released_at=now)
        .execution_options(synchronize_session=False)
    )


# Folding


def fold_postings(*, batch: int = FOLD_BATCH) -> int:
    """Fold up to `batch` unapplied rows of each kind into balances and counters; how many it
    folded.

    Opens its own transaction and is exactly once: rows are claimed, summed and marked in it, so a
    crash folds nothing. Returns 0 when another applier is at work. Call again at once while it
    returns `batch` or more.
    """
    return retry_deadlocks(lambda: _fold_once(batch))


def _fold_once(batch: int) -> int:
    now = utcnow()
    with transaction() as session:
        locked = session.scalar(
            text("SELECT pg_try_advisory_xact_lock(:kind, 0)"), {"kind": APPLIER_LOCK}
        )
        if not locked:
            return 0
        currencies = claim_currencies(session, batch)
        statistics = claim_statistics(session, batch)
        event_count, queued = take_queued_statistics(session, batch)
        promotions = apply_currencies(
            session, currencies, trust_threshold=state.get().trust_threshold, now=now
        )
        apply_statistics(session, statistics, queued, promotions.statistics)
        for user_id in promotions.trusted_user_ids:
            after_commit(session, partial(publish_account_change, user_id))
    return len(currencies) + len(statistics) + event_count


# Proving

_AUDIT_BALANCES = text(f"""
    WITH applied AS (
        SELECT user_id,
            coalesce(sum(amount) FILTER (WHERE account = '{Account.BALANCE}'), 0) AS balance,
            coalesce(sum(amount) FILTER (WHERE account = '{Account.ESCROW}'), 0) AS escrow
        FROM kudos_ledger WHERE applied GROUP BY user_id
    ), accounts AS (
        SELECT users.id, users.kudos, users.evaluating_kudos, snapshot.balance, snapshot.escrow,
            coalesce(snapshot.opening_balance, 0) + coalesce(applied.balance, 0)
                AS expected_balance,
            coalesce(snapshot.opening_escrow, 0) + coalesce(applied.escrow, 0) AS expected_escrow
        FROM users
        LEFT JOIN kudos_balance_snapshots snapshot ON snapshot.user_id = users.id
        LEFT JOIN applied ON applied.user_id = users.id
        WHERE snapshot.user_id IS NOT NULL OR applied.user_id IS NOT NULL
    )
    SELECT 'balance' AS kind, id::text AS subject, expected_balance::text AS expected,
        coalesce(balance::text, 'none') AS found
    FROM accounts WHERE balance IS DISTINCT FROM expected_balance
    UNION ALL SELECT 'escrow', id::text, expected_escrow::text, coalesce(escrow::text, 'none')
    FROM accounts WHERE escrow IS DISTINCT FROM expected_escrow
    UNION ALL SELECT 'shown_balance', id::text, floor(expected_balance)::text, kudos::text
    FROM accounts WHERE kudos <> floor(expected_balance)
    UNION ALL SELECT 'shown_escrow', id::text, least(floor(expected_escrow), 2147483647)::text,
        evaluating_kudos::text
    FROM accounts WHERE evaluating_kudos <> least(floor(expected_escrow), 2147483647)
    ORDER BY 1, 2
    """)

_AUDIT_HOLDS = text("""
    WITH spent AS (
        SELECT reservation_id, -sum(amount) AS total FROM kudos_ledger
        WHERE applied AND reservation_id IS NOT NULL GROUP BY reservation_id
    )
    SELECT 'hold_consumed' AS kind, business_id AS subject, coalesce(total, 0)::text AS expected,
        consumed::text AS found
    FROM kudos_reservations LEFT JOIN spent ON spent.reservation_id = business_id
    WHERE active AND consumed <> coalesce(total, 0)
    UNION ALL SELECT 'hold_without_request', business_id, 'released', 'active'
    FROM kudos_reservations
    WHERE active AND business_id LIKE 'upfront:%'
        AND NOT EXISTS (SELECT FROM waiting_prompts
            WHERE 'upfront:' || waiting_prompts.id::text = business_id)
    ORDER BY 1, 2
    """)

_AUDIT_EVENTS = text("""
    SELECT 'booked_twice' AS kind, event_id::text AS subject, '1' AS expected,
        count(*)::text AS found
    FROM kudos_ledger
    GROUP BY event_id, entry_type, user_id, account, sign(amount) HAVING count(*) > 1
    ORDER BY 2
    """)

_AUDIT_COUNTS = text("""
    SELECT (SELECT count(*) FROM kudos_balance_snapshots) AS accounts,
        (SELECT count(*) FROM kudos_ledger) AS postings,
        (SELECT count(*) FROM kudos_ledger WHERE applied IS FALSE) AS unapplied_postings,
        (SELECT count(*) FROM kudos_stat_queue) + (SELECT count(*) FROM kudos_stat_events
            WHERE applied IS FALSE AND quarantine_reason IS NULL) AS unapplied_statistics,
        (SELECT count(*) FROM kudos_stat_events WHERE quarantine_reason IS NOT NULL)
            AS quarantined_statistics
    """)


def get_fold_lag_seconds(session: Session, now: datetime) -> float:
    """The age of the oldest posting that no balance shows yet; 0 when there is none."""
    oldest = (
        select(KudosPosting.created)
        .where(KudosPosting.applied.is_(False))
        .order_by(KudosPosting.id)
        .limit(1)
    )
    created = session.scalar(oldest)
    return 0.0 if created is None else max((now - created).total_seconds(), 0.0)


def audit_ledger(session: Session) -> AuditReport:
    """Replay every applied posting and compare with what is stored. Safe on a live database;
    changes nothing.

    Each check is one statement, so it sees one moment: the applier commits balances and marks
    together.
    """
    found = [
        Discrepancy(row.kind, row.subject, row.expected, row.found)
        for check in (_AUDIT_BALANCES, _AUDIT_HOLDS, _AUDIT_EVENTS)
        for row in session.execute(check)
    ]
    counts = session.execute(_AUDIT_COUNTS).one()
    return AuditReport(**counts._mapping, discrepancies=tuple(found))
