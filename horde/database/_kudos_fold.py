# SPDX-License-Identifier: AGPL-3.0-or-later
"""The applier's steps for balances: claim rows, sum them per account, write each table once.

Everything here runs in the applier's transaction, under its lock. Rows are locked users first,
workers last, each by id.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import uuid4

from sqlalchemy import Row, exists, insert, select, text, update
from sqlalchemy.orm import Session

from horde.classes.base.kudos import (
    Account,
    EntryType,
    KudosBalanceSnapshot,
    KudosPosting,
    Statistic,
    StatTarget,
)
from horde.classes.base.user import ANONYMOUS_ID, User, UserRole, UserRoleTypes, get_kudos_floor
from horde.classes.base.worker import Worker
from horde.database.functions import note_text_workers_changed
from horde.database.suspicions import list_suspicious_users
from horde.db import after_commit

TRUST_AGE = timedelta(days=7)
ACTIVITY_ENTRY_TYPES = frozenset({EntryType.GENERATION, EntryType.UPTIME_REWARD})

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
