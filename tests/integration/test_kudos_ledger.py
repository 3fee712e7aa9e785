# SPDX-License-Identifier: AGPL-3.0-or-later
"""The ledger on a real database: postings become balances exactly once, and nobody holds what they
do not have.

Most tests commit for real, since they are about what other connections see. Each makes accounts of
its own.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import count
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event, select, text, update

from devtools.services import ServiceAddresses
from horde import db, redis_ctrl
from horde.classes.base.kudos import (
    Account,
    Currency,
    EntryType,
    KudosBalanceSnapshot,
    KudosPosting,
    KudosReservation,
    Movements,
    Statistic,
    StatPosting,
    StatTarget,
)
from horde.classes.base.user import (
    User,
    UserRecords,
    UserRole,
    UserRoleTypes,
    UserStats,
    get_kudos_floor,
)
from horde.classes.base.worker import Worker, WorkerStats
from horde.classes.kobold.pricing import build_generation_movements
from horde.classes.kobold.worker import TextWorker
from horde.clock import utcnow
from horde.config import Config
from horde.database import kudos
from horde.database.kudos import (
    append_movements,
    audit_ledger,
    fold_postings,
    get_available_kudos,
    get_effective_kudos,
    hold_kudos,
    release_hold,
)
from horde.database.migrate import migrate
from horde.db import transaction
from tests.integration.statements import count_statements
from tests.services import make_database

TRUST_THRESHOLD = 100
serial = count(1)


@pytest.fixture(scope="module", autouse=True)
def ledger(service_urls: ServiceAddresses) -> Iterator[Config]:
    """A migrated database of this module's own, connected."""
    config = Config(
        database_url=make_database(service_urls.database_url, "ledger").replace(
            "postgresql://", "postgresql+psycopg2://", 1
        ),
        redis_url=service_urls.redis_url,
        secret_key="salt of the tests",
        kudos_trust_threshold=TRUST_THRESHOLD,
    )
    before = db.state.get()
    engine = db.connect(config)
    redis_ctrl.connect(config)
    migrate(engine, secret_key=config.secret_key)
    kudos.configure(config)
    yield config
    engine.dispose()
    db.state.set(before)


@pytest.fixture(autouse=True)
def folded(ledger: Config) -> None:
    """What earlier tests left queued is folded, so that a test counts its own rows."""
    while fold_postings():
        pass


def make_user(
    *,
    opening: int = 0,
    oauth_id: str | None = None,
    age: timedelta = timedelta(days=30),
    trusted: bool = False,
) -> int:
    """An account that had `opening` kudos before the ledger knew it."""
    number = next(serial)
    with transaction() as session:
        user = User(
            username=f"user {number}",
            oauth_id=oauth_id or f"test_{number}",
            api_key=f"hash {number}",
            kudos=opening,
            created=utcnow() - age,
            roles=[UserRole(user_role=UserRoleTypes.TRUSTED)] if trusted else [],
        )
        session.add(user)
        session.flush()
        return user.id


def make_worker(user_id: int) -> UUID:
    with transaction() as session:
        worker = TextWorker(user_id=user_id, name=f"worker {next(serial)}")
        session.add(worker)
        session.flush()
        return worker.id


def move(
    user_id: int,
    amount: str | Decimal,
    *,
    account: Account = Account.BALANCE,
    hold: str | None = None,
) -> Movements:
    currency = Currency(
        user_id=user_id,
        entry_type=EntryType.GENERATION,
        amount=Decimal(amount),
        account=account,
        reservation_id=hold,
    )
    return Movements(currencies=(currency,))


def post(*movements: Movements) -> None:
    with transaction() as session:
        for each in movements:
            append_movements(session, uuid4(), each, utcnow())


def hold(user_id: int, amount: str, business_id: str | None = None) -> bool:
    with transaction() as session:
        return hold_kudos(
            session,
            user_id=user_id,
            business_id=business_id or f"test:{uuid4()}",
            amount=Decimal(amount),
            now=utcnow(),
        )


def available(user_id: int) -> Decimal:
    with transaction() as session:
        return get_available_kudos(session, user_id)


def balances(user_id: int) -> tuple[Decimal, Decimal, int, int]:
    """(balance, escrow) to the cent, then what the account shows of both."""
    with transaction() as session:
        snapshot = session.get_one(KudosBalanceSnapshot, user_id)
        user = session.get_one(User, user_id)
        return snapshot.balance, snapshot.escrow, user.kudos, user.evaluating_kudos


def discrepancies(*kinds: str) -> set[tuple[str, str]]:
    with transaction() as session:
        found = {(entry.kind, entry.subject) for entry in audit_ledger(session).discrepancies}
    return {entry for entry in found if not kinds or entry[0] in kinds}


# Appending and folding


def test_an_event_is_one_statement_whatever_it_moves(ledger: Config) -> None:
    owner, requester = make_user(), make_user()
    movements = build_generation_movements(
        kudos=Decimal("10.01"),
        max_length=80,
        worker_id=make_worker(owner),
        owner_id=owner,
        owner_trusted=False,
        requester_id=requester,
        requester_usage_multiplier=1.0,
        reservation_id=None,
    )
    with transaction() as session:
        assert (
            count_statements(
                session, lambda: append_movements(session, uuid4(), movements, utcnow())
            )
            == 1
        )
        assert (
            count_statements(
                session, lambda: append_movements(session, uuid4(), Movements(), utcnow())
            )
            == 0
        )


def test_a_generation_reaches_every_balance_and_counter() -> None:
    owner, requester = make_user(opening=100), make_user(opening=100)
    worker_id = make_worker(owner)
    post(
        build_generation_movements(
            kudos=Decimal("10.01"),
            max_length=80,
            worker_id=worker_id,
            owner_id=owner,
            owner_trusted=False,
            requester_id=requester,
            requester_usage_multiplier=1.5,
            reservation_id=None,
        )
    )
    assert fold_postings() == 3 + 1  # the statistics of an event are one row
    assert balances(owner) == (Decimal("105.01"), Decimal("5.00"), 105, 5)
    assert balances(requester) == (Decimal("88.99"), Decimal(0), 88, 0)
    with transaction() as session:
        stats = dict(session.execute(select(UserStats.user_id, UserStats.value)).tuples().all())
        records = {
            (row.user_id, row.record_type.name): row.value
            for row in session.scalars(
                select(UserRecords).where(UserRecords.user_id.in_([owner, requester]))
            )
        }
        worker = session.get_one(Worker, worker_id)
        generated = session.scalar(
            select(WorkerStats.value).where(WorkerStats.worker_id == worker_id)
        )
    assert (stats[owner], stats[requester]) == (5, -11)
    assert records == {
        (owner, "FULFILLMENT"): 1,
        (owner, "CONTRIBUTION"): 80,
        (requester, "REQUEST"): 1,
        (requester, "USAGE"): 120,
    }
    assert (worker.kudos, worker.contributions, worker.fulfilments, generated) == (10, 80, 1, 10)


def test_folding_marks_the_spender_active() -> None:
    user_id = make_user()
    long_ago = datetime(2020, 1, 1)
    with transaction() as session:
        session.execute(update(User).where(User.id == user_id).values(last_active=long_ago))
    post(move(user_id, "-1"))
    fold_postings()
    with transaction() as session:
        assert session.get_one(User, user_id).last_active > long_ago


def test_nothing_is_folded_twice() -> None:
    user_id = make_user(opening=100)
    post(move(user_id, "7.50"))
    assert fold_postings() == 1
    assert fold_postings() == 0
    assert balances(user_id)[0] == Decimal("107.50")


def test_a_batch_takes_the_oldest_rows_and_leaves_the_rest() -> None:
    user_id = make_user(opening=100)
    post(*[move(user_id, "1") for _ in range(5)])
    assert [fold_postings(batch=2) for _ in range(4)] == [2, 2, 1, 0]
    assert balances(user_id)[0] == Decimal(105)


@pytest.mark.race
def test_a_low_id_that_commits_late_is_still_folded() -> None:
    user_id = make_user(opening=100)
    with db.state.get().sessions() as late:  # type: ignore[misc]
        # Takes its id, not yet visible.
        append_movements(late, uuid4(), move(user_id, "3"), utcnow())
        post(move(user_id, "4"))
        assert fold_postings() == 1
        assert balances(user_id)[0] == Decimal(104)
        late.commit()
    assert fold_postings() == 1
    assert balances(user_id)[0] == Decimal(107)


@pytest.mark.race
def test_two_appliers_at_once_fold_exactly_once() -> None:
    user_ids = [make_user(opening=1000) for _ in range(5)]
    post(*[move(user_id, "1.25") for user_id in user_ids for _ in range(40)])
    barrier = threading.Barrier(2)

    def apply() -> int:
        barrier.wait()
        return sum(fold_postings(batch=7) for _ in range(40))

    with ThreadPoolExecutor(2) as pool:
        total = sum(future.result() for future in [pool.submit(apply), pool.submit(apply)])
    total += sum(iter(fold_postings, 0))
    assert total == 200
    assert {balances(user_id)[0] for user_id in user_ids} == {Decimal(1050)}


@pytest.mark.race
def test_an_applier_waits_for_nobody() -> None:
    post(move(make_user(opening=100), "1"))
    with db.state.get().sessions() as other:  # type: ignore[misc]
        other.execute(text("SELECT pg_advisory_xact_lock(:kind, 0)"), {"kind": kudos.APPLIER_LOCK})
        assert fold_postings() == 0
    assert fold_postings() == 1


@pytest.mark.parametrize("table", ["kudos_balance_snapshots", "users", "user_stats", "workers"])
def test_a_crash_in_the_middle_folds_nothing_and_loses_nothing(table: str) -> None:
    owner = make_user(opening=100, trusted=True)
    worker_id = make_worker(owner)
    post(
        build_generation_movements(
            kudos=Decimal(10),
            max_length=80,
            worker_id=worker_id,
            owner_id=owner,
            owner_trusted=True,
            requester_id=owner,
            requester_usage_multiplier=1.0,
            reservation_id=None,
        )
    )
    with crashing_at(db.require_engine(), table), pytest.raises(Crash):
        fold_postings()
    with transaction() as session:
        assert session.get_one(User, owner).kudos == 100
        assert session.get(KudosBalanceSnapshot, owner) is None
        assert session.get_one(Worker, worker_id).kudos == 0
    assert fold_postings() > 0
    assert balances(owner)[0] == Decimal(99)
    assert discrepancies() == set()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    moves=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(list(Account)),
            st.integers(-20_000, 20_000),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_every_balance_equals_the_sum_of_its_postings(
    moves: list[tuple[int, Account, int, bool]],
) -> None:
    user_ids = [make_user(opening=40), make_user(oauth_id=str(uuid4())), make_user(trusted=True)]
    for index, account, cents, fold_now in moves:
        amount = Decimal(abs(cents) if account is Account.ESCROW else cents) / 100
        post(move(user_ids[index], amount, account=account))
        if fold_now:
            fold_postings(batch=3)
    while fold_postings(batch=10):
        pass
    with transaction() as session:
        for user_id in {user_ids[index] for index, *_ in moves}:
            snapshot = session.get_one(KudosBalanceSnapshot, user_id)
            posted = dict(
                session.execute(
                    text(
                        "SELECT account, sum(amount) FROM kudos_ledger WHERE user_id = :id GROUP BY"
                        " account"
                    ),
                    {"id": user_id},
                )
                .tuples()
                .all()
            )
            assert snapshot.balance == snapshot.opening_balance + posted.get("balance", 0)
            assert snapshot.escrow == snapshot.opening_escrow + posted.get("escrow", 0)
            assert snapshot.balance >= get_kudos_floor(
                user_id, session.get_one(User, user_id).oauth_id
            )
    assert discrepancies() == set()


# Floors, escrow and trust


@pytest.mark.parametrize(
    ("oauth_id", "floor"),
    [("test_registered", 25), ("4a8d5b1c-0f62-4f5e-9f5b-2d1c2f0f8a11", 14), ("anon", -50)],
)
def test_debt_below_the_floor_is_forgiven_and_booked(oauth_id: str, floor: int) -> None:
    user_id = 0 if oauth_id == "anon" else make_user(oauth_id=oauth_id)
    post(move(user_id, "-1000.5"))
    fold_postings()
    assert balances(user_id)[0] == floor
    with transaction() as session:
        forgiven = session.scalars(
            select(KudosPosting.amount).where(
                KudosPosting.user_id == user_id,
                KudosPosting.entry_type == EntryType.FLOOR_ADJUSTMENT,
            )
        ).all()
    assert forgiven == [Decimal("1000.50") + floor]


def test_a_new_account_is_lifted_to_its_floor_by_its_first_movement() -> None:
    user_id = make_user()
    assert available(user_id) == Decimal(-25)
    post(move(user_id, "1"))
    fold_postings()
    assert balances(user_id)[0] == Decimal(25)


def test_the_last_qualifying_reward_promotes_and_drains() -> None:
    user_id = make_user(opening=30)
    worker_id = make_worker(user_id)
    with transaction() as session:
        session.execute(update(Worker).where(Worker.id == worker_id).values(paused=True))
    post(move(user_id, TRUST_THRESHOLD, account=Account.ESCROW))
    fold_postings()
    assert balances(user_id)[1] == TRUST_THRESHOLD  # not strictly more
    post(move(user_id, "0.50", account=Account.ESCROW))
    fold_postings()
    assert balances(user_id)[:2] == (Decimal("130.50"), Decimal(0))
    with transaction() as session:
        role = session.scalar(select(UserRole.user_role).where(UserRole.user_id == user_id))
        assert role is UserRoleTypes.TRUSTED
        assert session.get_one(Worker, worker_id).paused is False
        assert session.scalar(select(UserStats.value).where(UserStats.user_id == user_id)) == 100


def test_a_young_account_is_not_promoted() -> None:
    user_id = make_user(age=timedelta(days=6, hours=23))
    post(move(user_id, "5000", account=Account.ESCROW))
    fold_postings()
    assert balances(user_id)[1] == 5000


def test_a_suspicious_account_is_not_promoted() -> None:
    user_id = make_user()
    with transaction() as session:
        for reason in range(5):
            session.execute(
                text(
                    "INSERT INTO user_suspicions (user_id, suspicion_id) VALUES (:user_id, :reason)"
                ),
                {"user_id": user_id, "reason": reason},
            )
    post(move(user_id, "5000", account=Account.ESCROW))
    fold_postings()
    assert balances(user_id)[1] == 5000


def test_escrow_of_a_trusted_account_drains_once() -> None:
    user_id = make_user(opening=30, trusted=True)
    post(move(user_id, "12.34", account=Account.ESCROW))
    fold_postings()
    fold_postings()
    assert balances(user_id)[:2] == (Decimal("42.34"), Decimal(0))
    with transaction() as session:
        pair = session.scalars(
            select(KudosPosting.amount).where(
                KudosPosting.user_id == user_id,
                KudosPosting.entry_type == EntryType.EVALUATION_PROMOTION,
            )
        ).all()
    assert sorted(pair) == [Decimal("-12.34"), Decimal("12.34")]


# Quarantine


GONE_OR_UNKNOWN = [
    (StatTarget.WORKERS, "kudos", None, uuid4(), "the worker is gone"),
    (StatTarget.USER_STATS, "gifted", 2**31 - 1, None, "the user is gone"),
    (StatTarget.WORKERS, "name", None, uuid4(), "unknown counter"),
    (StatTarget.USER_RECORDS, "NOPE", 1, None, "unknown record"),
]
MISNAMED = [
    (StatTarget.USER_STATS, "gifted", None, None, "has to name"),
    (StatTarget.USER_STATS, "gifted", 1, uuid4(), "has to name"),
]


@pytest.mark.parametrize(("target", "name", "user_id", "worker_id", "reason"), GONE_OR_UNKNOWN)
def test_a_statistic_that_can_never_fold_is_set_aside(
    target: StatTarget, name: str, user_id: int | None, worker_id: UUID | None, reason: str
) -> None:
    statistic = Statistic(
        entry_type=EntryType.STAT_RECORD,
        target=target,
        name=name,
        record="text" if target is StatTarget.USER_RECORDS else None,
        amount=Decimal("1.25"),
        user_id=user_id,
        worker_id=worker_id,
    )
    good_id = make_user()
    event_id = uuid4()
    with transaction() as session:
        movements = Movements(statistics=(statistic, build_gift(good_id)))
        append_movements(session, event_id, movements, utcnow())
    assert fold_postings() == 1
    assert fold_postings() == 0
    with transaction() as session:
        aside = session.scalars(select(StatPosting).where(StatPosting.event_id == event_id)).one()
        assert session.scalar(select(UserStats.value).where(UserStats.user_id == good_id)) == 5
    assert reason in (aside.quarantine_reason or "")
    assert (aside.target, aside.name, aside.amount, aside.applied) == (
        target,
        name,
        Decimal("1.25"),
        False,
    )
    assert (aside.user_id, aside.worker_id) == (user_id, worker_id)


@pytest.mark.parametrize(
    ("target", "name", "user_id", "worker_id", "reason"), GONE_OR_UNKNOWN + MISNAMED
)
def test_statistics_of_the_version_before_are_folded_or_set_aside(
    target: StatTarget, name: str, user_id: int | None, worker_id: UUID | None, reason: str
) -> None:
    good_id, event_id = make_user(), uuid4()
    of_event = {"event_id": event_id, "entry_type": EntryType.STAT_RECORD, "created": utcnow()}
    bad = {"target": target, "name": name, "user_id": user_id, "worker_id": worker_id}
    good = {"target": StatTarget.USER_STATS, "name": "gifted", "user_id": good_id}
    with transaction() as session:
        session.add(StatPosting(**of_event, **bad, record="text", amount=Decimal(1)))
        session.flush()
        session.add(StatPosting(**of_event, **good, amount=Decimal(5)))
    assert fold_postings() == 2
    assert fold_postings() == 0
    with transaction() as session:
        rows = session.scalars(
            select(StatPosting).where(StatPosting.event_id == event_id).order_by(StatPosting.id)
        ).all()
        assert session.scalar(select(UserStats.value).where(UserStats.user_id == good_id)) == 5
    assert [row.applied for row in rows] == [False, True]
    assert reason in (rows[0].quarantine_reason or "")


def build_gift(user_id: int) -> Statistic:
    return Statistic(
        entry_type=EntryType.STAT_RECORD,
        target=StatTarget.USER_STATS,
        name="gifted",
        amount=Decimal(5),
        user_id=user_id,
    )


# Holds


def test_available_leaves_out_the_floor_holds_queued_debits_and_queued_credits() -> None:
    user_id = make_user(opening=125)
    assert available(user_id) == 100
    assert hold(user_id, "30")
    assert available(user_id) == 70
    post(move(user_id, "-5.25"), move(user_id, "1000"))
    assert available(user_id) == Decimal("64.75")
    with transaction() as session:
        assert get_effective_kudos(session, user_id) == Decimal("1119.75")
    fold_postings()
    assert available(user_id) == Decimal("1064.75")


def test_a_hold_is_two_statements_and_nothing_for_nothing() -> None:
    user_id = make_user(opening=125)
    with transaction() as session:
        for amount, statements in ((Decimal(10), 2), (Decimal(1000), 2), (Decimal(0), 0)):
            assert (
                count_statements(
                    session,
                    lambda amount=amount: hold_kudos(
                        session,
                        user_id=user_id,
                        business_id=f"test:{uuid4()}",
                        amount=amount,
                        now=utcnow(),
                    ),
                )
                == statements
            )


def test_debits_of_a_hold_count_once_queued_or_folded() -> None:
    user_id = make_user(opening=125)
    business_id = f"test:{uuid4()}"
    assert hold(user_id, "40", business_id)
    post(move(user_id, "-15", hold=business_id))
    assert available(user_id) == 60
    fold_postings()
    assert available(user_id) == 60
    post(move(user_id, "-35", hold=business_id))  # more than what is left of the hold
    assert available(user_id) == 50
    fold_postings()
    assert available(user_id) == 50
    with transaction() as session:
        release_hold(session, business_id, utcnow())
    assert available(user_id) == 50


def test_a_release_gives_back_the_rest_while_debits_are_queued() -> None:
    user_id = make_user(opening=125)
    business_id = f"test:{uuid4()}"
    hold(user_id, "40", business_id)
    post(move(user_id, "-15", hold=business_id))
    with transaction() as session:
        release_hold(session, business_id, utcnow())
        release_hold(session, business_id, utcnow())
    assert available(user_id) == 85
    fold_postings()
    assert available(user_id) == 85


def test_a_released_hold_comes_back_for_its_payer_only() -> None:
    user_id, other = make_user(opening=125), make_user(opening=1000)
    business_id = f"test:{uuid4()}"
    hold(user_id, "40", business_id)
    post(move(user_id, "-15", hold=business_id))
    with transaction() as session:
        release_hold(session, business_id, utcnow())
    assert not hold(user_id, "86", business_id)
    assert hold(user_id, "85", business_id)
    assert available(user_id) == 0
    fold_postings()
    assert available(user_id) == 0
    with pytest.raises(ValueError, match="another payer"):
        hold(other, "10", business_id)


def test_the_floor_of_the_hold_is_that_of_the_account() -> None:
    for oauth_id in (
        "g_1",
        str(uuid4()),
        "{4a8d5b1c-0f62-4f5e-9f5b-2d1c2f0f8a12}",
        "d_4a8d5b1c0f624f5e9f5b2d1c2f0f8a11",
    ):
        user_id = make_user(opening=100, oauth_id=oauth_id)
        assert available(user_id) == 100 - get_kudos_floor(user_id, oauth_id)


@pytest.mark.race
def test_payers_at_once_never_hold_more_than_they_have() -> None:
    user_id = make_user(opening=125)
    barrier = threading.Barrier(8)

    def try_to_hold() -> bool:
        barrier.wait()
        return hold(user_id, "30")

    with ThreadPoolExecutor(8) as pool:
        held = [future.result() for future in [pool.submit(try_to_hold) for _ in range(8)]]
    assert held.count(True) == 3
    assert available(user_id) == 10


@pytest.mark.race
def test_holds_debits_and_folds_at_once_never_overspend() -> None:
    user_id = make_user(opening=525)
    stop = threading.Event()

    def keep_folding() -> None:
        while not stop.is_set():
            fold_postings(batch=3)

    def spend() -> int:
        spent = 0
        for _ in range(15):
            business_id = f"test:{uuid4()}"
            if hold(user_id, "20", business_id):
                with transaction() as session:
                    append_movements(
                        session, uuid4(), move(user_id, "-20", hold=business_id), utcnow()
                    )
                    release_hold(session, business_id, utcnow())
                spent += 20
        return spent

    with ThreadPoolExecutor(4) as pool:
        folding = pool.submit(keep_folding)
        spent = sum(future.result() for future in [pool.submit(spend) for _ in range(3)])
        stop.set()
        folding.result()
    while fold_postings():
        pass
    assert spent == 500
    assert balances(user_id)[0] == 25
    assert discrepancies() == set()


# The audit


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("UPDATE users SET kudos = kudos + 1 WHERE id = :id", "shown_balance"),
        ("UPDATE users SET evaluating_kudos = 7 WHERE id = :id", "shown_escrow"),
        (
            "UPDATE kudos_balance_snapshots SET balance = balance + 0.01 WHERE user_id = :id",
            "balance",
        ),
        ("UPDATE kudos_balance_snapshots SET escrow = 3 WHERE user_id = :id", "escrow"),
        ("UPDATE kudos_ledger SET amount = amount + 1 WHERE user_id = :id", "balance"),
        ("DELETE FROM kudos_ledger WHERE user_id = :id", "balance"),
        ("DELETE FROM kudos_balance_snapshots WHERE user_id = :id", "balance"),
    ],
)
def test_the_audit_finds_what_was_tampered_with(statement: str, kind: str) -> None:
    user_id = make_user(opening=100)
    post(move(user_id, "10"))
    fold_postings()
    with db.state.get().sessions() as session:  # type: ignore[misc]
        assert audit_ledger(session).discrepancies == ()
        session.execute(text(statement), {"id": user_id})
        found = {(entry.kind, entry.subject) for entry in audit_ledger(session).discrepancies}
        session.rollback()
    assert (kind, str(user_id)) in found


def test_the_audit_finds_a_hold_without_its_request_and_an_event_booked_twice() -> None:
    user_id = make_user(opening=1000)
    business_id, event_id = f"upfront:{uuid4()}", uuid4()
    with db.state.get().sessions() as session:  # type: ignore[misc]
        hold_kudos(
            session, user_id=user_id, business_id=business_id, amount=Decimal(5), now=utcnow()
        )
        for _ in range(2):
            append_movements(session, event_id, move(user_id, "-1"), utcnow())
        found = {(entry.kind, entry.subject) for entry in audit_ledger(session).discrepancies}
        session.rollback()
    assert found == {("hold_without_request", business_id), ("booked_twice", str(event_id))}


def test_the_audit_counts_what_is_on_its_way() -> None:
    post(move(make_user(), "1"))
    with transaction() as session:
        report = audit_ledger(session)
    assert (report.unapplied_postings, report.unapplied_statistics) == (1, 0)
    assert report.discrepancies == ()


class Crash(Exception):
    """What stands for the applier's process dying."""


class crashing_at:  # noqa: N801  reads as a statement
    """While open, the first write to a table raises."""

    def __init__(self, engine: Engine, table: str) -> None:
        self.engine, self.table = engine, table

    def __enter__(self) -> None:
        event.listen(self.engine, "before_cursor_execute", self.check)

    def __exit__(self, *_: object) -> None:
        event.remove(self.engine, "before_cursor_execute", self.check)

    def check(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        """Raise at the write."""
        words = statement.split()
        if words[0] in {"INSERT", "UPDATE"} and self.table in words[1:3]:
            raise Crash


def test_a_released_hold_keeps_its_row() -> None:
    user_id = make_user(opening=100)
    business_id = f"test:{uuid4()}"
    hold(user_id, "10", business_id)
    with transaction() as session:
        release_hold(session, business_id, utcnow())
        row = session.scalars(
            select(KudosReservation).where(KudosReservation.business_id == business_id)
        ).one()
        assert (row.active, row.released_at is not None) == (False, True)
