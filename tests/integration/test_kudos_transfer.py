# SPDX-License-Identifier: AGPL-3.0-or-later
"""Gifts and awards of kudos: what they move, what refuses them, and what concurrency may not do."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import delete, select, update

from devtools.services import ServiceAddresses
from horde.actions.jobs import pay_monthly_kudos
from horde.classes.base.kudos_gifts import KudosTransfer
from horde.classes.base.suspicion import Suspicion, UserSuspicion
from horde.classes.base.user import ANONYMOUS_KEY, User, UserRoleTypes
from horde.clock import utcnow
from horde.database.kudos import fold_postings
from horde.database.users import adjust_kudos
from horde.db import transaction
from tests.integration.api_horde import Api, make_moderator, own_api
from tests.integration.rows import make_user
from tests.integration.text_horde import (
    forget_postings,
    get_shared_key,
    get_user,
    list_discrepancies,
    list_postings,
    make_shared_key,
    refused,
)


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "kudos_transfer") as found:
        first_id, found.first_key = make_user()  # type: ignore[attr-defined]
        assert first_id == 1  # the account that awards
        yield found


@pytest.fixture(autouse=True)
def _sound_ledger(api: Api) -> Iterator[None]:
    """Whatever a test did, the balances are what the postings say."""
    forget_postings()
    yield
    assert list_discrepancies() == ()


def make_rich(kudos: int = 1000, *roles: UserRoleTypes) -> tuple[int, str]:
    """An account that can spend so much."""
    user_id, key = make_user(*roles)
    with transaction() as session:
        adjust_kudos(session, user_id, Decimal(kudos + 25), action="admin", now=utcnow())
    fold_postings()
    forget_postings()
    return user_id, key


def name_of(user_id: int) -> str:
    return get_user(user_id).alias


def give(api: Api, key: str, username: str, amount: Any = 100, **headers: str) -> Any:
    return api.post("/kudos/transfer", {"username": username, "amount": amount}, key, **headers)


def suspect(user_id: int) -> None:
    with transaction() as session:
        session.add_all(
            UserSuspicion(user_id=user_id, suspicion_id=Suspicion.UNREASONABLY_FAST)
            for _ in range(5)
        )


def list_transfers(source_id: int) -> list[KudosTransfer]:
    with transaction() as session:
        statement = select(KudosTransfer).where(KudosTransfer.source_id == source_id)
        return list(session.scalars(statement))


# What a gift moves


def test_a_gift_moves_kudos_and_shows_in_the_totals_of_both(api: Api) -> None:
    source_id, key = make_rich()
    dest_id, dest_key = make_user()
    answer = give(api, key, name_of(dest_id), 300)
    assert (answer.status_code, answer.json) == (200, {"transferred": 300})
    assert (list_postings(source_id), list_postings(dest_id)) == ([-300], [300])
    fold_postings()
    given, got = (api.get("/find_user", each).json for each in (key, dest_key))
    assert (given["kudos"], given["kudos_details"]["gifted"]) == (725, -300)
    assert (got["kudos"], got["kudos_details"]["received"]) == (300, 300)
    assert [(row.dest_id, row.kudos) for row in list_transfers(source_id)] == [(dest_id, 300)]


def test_a_gift_without_an_amount_is_of_100(api: Api) -> None:
    source_id, key = make_rich()
    answer = api.post("/kudos/transfer", {"username": name_of(make_user()[0])}, key)
    assert answer.json == {"transferred": 100}
    assert list_postings(source_id) == [-100]


def test_a_gift_to_a_school_is_a_donation(api: Api) -> None:
    _, key = make_rich()
    give(api, key, name_of(make_user(UserRoleTypes.EDUCATION)[0]))
    fold_postings()
    details = api.get("/find_user", key).json["kudos_details"]
    assert (details["donated"], details["gifted"]) == (-100, 0)


@pytest.mark.parametrize(("before", "after"), [(10, 110), (0, 100), (-1, -1)])
def test_a_gift_to_a_shared_key_credits_its_owner_and_raises_its_budget(
    api: Api, before: int, after: int
) -> None:
    source_id, key = make_rich()
    dest_id, _ = make_user()
    sharedkey = make_shared_key(dest_id, kudos=before)
    assert give(api, key, sharedkey, **{"Idempotency-Key": "once"}).status_code == 200
    assert give(api, key, sharedkey, **{"Idempotency-Key": "once"}).status_code == 200
    assert get_shared_key(sharedkey).kudos == after
    assert (list_postings(source_id), list_postings(dest_id)) == ([-100], [100])


# Sent again


def test_a_gift_sent_again_with_its_key_moves_nothing_more(api: Api) -> None:
    source_id, key = make_rich(100)
    username = name_of(make_user()[0])
    for _ in range(3):
        answer = give(api, key, username, 100, **{"Idempotency-Key": "a word"})
        assert (answer.status_code, answer.json) == (200, {"transferred": 100})
    assert list_postings(source_id) == [-100]


def test_a_key_with_another_gift_is_a_conflict(api: Api) -> None:
    source_id, key = make_rich()
    dest_id, _ = make_user()
    first, second = make_shared_key(dest_id), make_shared_key(dest_id)
    give(api, key, first, 100, **{"Idempotency-Key": "a word"})
    for username, amount in ((first, 101), (second, 100), (name_of(dest_id), 100)):
        answer = give(api, key, username, amount, **{"Idempotency-Key": "a word"})
        assert refused(answer) == (400, "IdempotencyKeyConflict")
    assert list_postings(source_id) == [-100]


def test_a_key_is_its_senders_own(api: Api) -> None:
    username = name_of(make_user()[0])
    for _ in range(2):
        _, key = make_rich()
        assert give(api, key, username, **{"Idempotency-Key": "shared"}).status_code == 200


def test_a_key_that_is_too_long_is_refused_and_an_empty_one_is_none(api: Api) -> None:
    source_id, key = make_rich()
    username = name_of(make_user()[0])
    assert refused(give(api, key, username, **{"Idempotency-Key": "x" * 256})) == (
        400,
        "BadRequest",
    )
    for _ in range(2):
        assert give(api, key, username, **{"Idempotency-Key": ""}).status_code == 200
    assert list_postings(source_id) == [-100, -100]


# What refuses a gift


def test_who_cannot_give(api: Api) -> None:
    username = name_of(make_user()[0])
    _, education = make_rich(1000, UserRoleTypes.EDUCATION)
    _, flagged = make_rich(1000, UserRoleTypes.FLAGGED)
    _, deleted = make_rich(1000, UserRoleTypes.DELETED)
    suspect_id, suspected = make_rich()
    suspect(suspect_id)
    assert refused(give(api, "x" * 22, username)) == (401, "InvalidAPIKey")
    assert refused(give(api, make_shared_key(suspect_id), username)) == (401, "InvalidAPIKey")
    assert refused(give(api, ANONYMOUS_KEY, username)) == (400, "KudosTransferFromAnon")
    assert refused(give(api, education, username)) == (400, "EducationCannotSendKudos")
    assert refused(give(api, flagged, username)) == (400, "SourceAccountFlagged")
    assert refused(give(api, deleted, username)) == (400, "DeletedUser")
    assert refused(give(api, suspected, username)) == (400, "FaultWhenKudosSending")


def test_who_cannot_receive(api: Api) -> None:
    source_id, key = make_rich()
    suspect_id, _ = make_user()
    suspect(suspect_id)
    expired = make_shared_key(suspect_id, expiry=utcnow() - timedelta(days=1))
    for username, code in (
        ("nobody", "InvalidTargetUsername"),
        ("nobody#1", "InvalidTargetUsername"),
        ("#", "InvalidTargetUsername"),
        ("00000000-0000-4000-8000-000000000000", "InvalidTargetUsername"),
        ("x" * 5000, "InvalidTargetUsername"),
        (expired, "SharedKeyExpired"),
        ("Anonymous#0", "KudosTransferToAnon"),
        (name_of(source_id), "KudosTransferToSelf"),
        (make_shared_key(source_id), "KudosTransferToSelf"),
        (name_of(suspect_id), "FaultWhenKudosReceiving"),
        (name_of(make_user(UserRoleTypes.FLAGGED)[0]), "TargetAccountFlagged"),
        (name_of(make_user(UserRoleTypes.DELETED)[0]), "DeletedUser"),
    ):
        assert refused(give(api, key, username)) == (400, code)
    assert list_postings(source_id) == []


def test_trusted_accounts_are_never_under_suspicion(api: Api) -> None:
    source_id, key = make_rich(1000, UserRoleTypes.TRUSTED)
    suspect(source_id)
    assert give(api, key, name_of(make_user()[0])).status_code == 200


@pytest.mark.parametrize(
    ("amount", "code"),
    [
        (1001, "KudosTransferNotEnough"),
        (10**12, "KudosTransferNotEnough"),
        (0, "InvalidKudosTransferAmount"),
        (-1, "NegativeKudosTransfer"),
        (-(10**30), "NegativeKudosTransfer"),
        (10**30, "BadRequest"),
        (1.5, "BadRequest"),
        ("100", "BadRequest"),
        (True, "BadRequest"),
        ([], "BadRequest"),
    ],
)
def test_amounts_that_cannot_be_given(api: Api, amount: Any, code: str) -> None:
    source_id, key = make_rich()
    assert refused(give(api, key, name_of(make_user()[0]), amount)) == (400, code)
    assert list_postings(source_id) == []


def test_all_above_the_floor_can_be_given_and_queued_gains_cannot(api: Api) -> None:
    source_id, key = make_rich(100)
    username = name_of(make_user()[0])
    with transaction() as session:
        adjust_kudos(session, source_id, Decimal(1000), action="admin", now=utcnow())
    assert refused(give(api, key, username, 101)) == (400, "KudosTransferNotEnough")
    assert give(api, key, username, 100.0).status_code == 200
    assert refused(give(api, key, username, 1)) == (400, "KudosTransferNotEnough")


def test_a_gift_cannot_be_sent_back_within_a_minute(api: Api) -> None:
    first_id, first = make_rich()
    second_id, second = make_rich()
    give(api, first, name_of(second_id))
    assert refused(give(api, second, name_of(first_id))) == (400, "TooFastKudosTransfers")
    assert give(api, first, name_of(second_id)).status_code == 200
    with transaction() as session:
        earlier = KudosTransfer.created - timedelta(seconds=61)
        session.execute(update(KudosTransfer).values(created=earlier))
    assert give(api, second, name_of(first_id)).status_code == 200


# At once


@pytest.mark.race
def test_gifts_at_once_never_spend_more_than_there_is(api: Api) -> None:
    source_id, key = make_rich(500)
    usernames = [name_of(make_user()[0]) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda username: give(api, key, username, 100), usernames))
    codes = [answer.json.get("rc") for answer in answers]
    assert codes.count(None) == 5
    assert codes.count("KudosTransferNotEnough") == 3
    assert list_postings(source_id) == [-100] * 5


@pytest.mark.race
def test_a_gift_sent_twice_at_once_with_one_key_moves_once(api: Api) -> None:
    source_id, key = make_rich()
    sharedkey = make_shared_key(make_user()[0], kudos=0)
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda _: give(api, key, sharedkey, **{"Idempotency-Key": "w"}), range(8))
        )
    assert {answer.status_code for answer in answers} == {200}
    assert list_postings(source_id) == [-100]
    assert get_shared_key(sharedkey).kudos == 100


@pytest.mark.race
def test_of_two_who_give_each_other_at_once_one_is_too_fast(api: Api) -> None:
    for _ in range(5):
        (first_id, first), (second_id, second) = make_rich(), make_rich()
        gifts = [(first, name_of(second_id)), (second, name_of(first_id))]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda gift: give(api, *gift), gifts))
        assert sorted(str(answer.json.get("rc")) for answer in answers) == [
            "None",
            "TooFastKudosTransfers",
        ]


# Awards


def test_the_first_account_awards_kudos_and_it_is_recorded(api: Api) -> None:
    dest_id, key = make_user()
    body = {"username": name_of(dest_id), "amount": 700, "reason": "found a hole"}
    answer = api.post("/kudos/award", body, api.first_key)  # type: ignore[attr-defined]
    assert (answer.status_code, answer.json) == (200, {"awarded": 700})
    fold_postings()
    details = api.get("/find_user", key).json
    assert (details["kudos"], details["kudos_details"]["awarded"]) == (700, 700)
    _, moderator = make_moderator()
    act = api.list_acts(moderator)[0]
    assert (act["action"], act["subject"], act["reason"], act["details"]) == (
        "kudos.awarded",
        f"user {dest_id}",
        "found a hole",
        {"amount": 700},
    )


def test_awards_that_are_refused(api: Api) -> None:
    dest_id, _ = make_user()
    first: str = api.first_key  # type: ignore[attr-defined]
    _, moderator = make_moderator()
    _, deleted = make_user(UserRoleTypes.DELETED)

    def award(key: str, username: str = name_of(dest_id), amount: Any = 100) -> Any:
        return api.post("/kudos/award", {"username": username, "amount": amount}, key)

    assert refused(award("x" * 22)) == (401, "InvalidAPIKey")
    assert refused(award(moderator)) == (403, "NotAllowedAwards")
    assert refused(award(ANONYMOUS_KEY)) == (403, "NotAllowedAwards")
    assert refused(award(deleted)) == (403, "DeletedUser")
    assert refused(award(first, "nobody#77")) == (400, "InvalidAwardUsername")
    assert refused(award(first, "Anonymous#0")) == (400, "KudosAwardToAnon")
    assert refused(award(first, amount=0)) == (400, "InvalidKudosTransferAmount")
    assert refused(award(first, amount=-5)) == (400, "NegativeKudosTransfer")
    assert refused(award(first, amount=10**18)) == (400, "BadRequest")
    assert list_postings(dest_id) == []


# Every month


@pytest.fixture
def _nobody_else_gets_monthly_kudos(api: Api) -> None:
    with transaction() as session:
        session.execute(update(User).values(monthly_kudos=0, monthly_kudos_last_received=utcnow()))


def received(user_id: int) -> Any:
    return get_user(user_id).monthly_kudos_last_received


@pytest.mark.usefixtures("_nobody_else_gets_monthly_kudos")
def test_monthly_kudos_come_at_once_and_then_after_each_calendar_month(api: Api) -> None:
    user_id, key = make_user(monthly_kudos=500)
    pay_monthly_kudos()
    pay_monthly_kudos()
    assert list_postings(user_id) == [500]
    last = utcnow() - timedelta(days=40)
    with transaction() as session:
        session.execute(
            update(User).where(User.id == user_id).values(monthly_kudos_last_received=last)
        )
    pay_monthly_kudos()
    pay_monthly_kudos()
    assert list_postings(user_id) == [500, 500]
    assert timedelta(days=28) <= received(user_id) - last <= timedelta(days=31)
    fold_postings()
    assert api.get("/find_user", key).json["kudos_details"]["recurring"] == 1000


@pytest.mark.usefixtures("_nobody_else_gets_monthly_kudos")
def test_moderators_get_kudos_for_their_work_beside_their_own(api: Api) -> None:
    plain_id, _ = make_user()
    moderator_id, _ = make_user(UserRoleTypes.MODERATOR, monthly_kudos=7)
    leaving_id, _ = make_user(UserRoleTypes.DELETED, monthly_kudos=9)
    pay_monthly_kudos()
    assert [list_postings(user_id) for user_id in (plain_id, moderator_id, leaving_id)] == [
        [],
        [300_007],
        [],
    ]


@pytest.mark.race
@pytest.mark.usefixtures("_nobody_else_gets_monthly_kudos")
def test_two_leaders_at_once_pay_a_month_once(api: Api) -> None:
    user_ids = [make_user(monthly_kudos=5)[0] for _ in range(120)]
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda _: pay_monthly_kudos(), range(4)):
            pass
    assert [list_postings(user_id) for user_id in user_ids] == [[5]] * 120
    with transaction() as session:
        session.execute(delete(KudosTransfer))
