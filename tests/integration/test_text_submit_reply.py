# SPDX-License-Identifier: AGPL-3.0-or-later
"""What `POST /generate/text/submit` stores, pays, refuses and counts."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from flask import Flask
from sqlalchemy import select, text

from devtools.services import ServiceAddresses
from horde.classes.base.stats import (
    FulfillmentPerformance,
    HordeSettings,
    ModelPerformance,
    TextGenState,
    TextGenStatistic,
)
from horde.classes.base.user import UserRoleTypes
from horde.classes.base.worker import ABORT_MAINTENANCE_MESSAGE, WorkerPerformance
from horde.classes.kobold.pricing import compute_text_kudos, count_text_tokens
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.database.kudos import fold_postings
from horde.db import transaction
from horde.model_reference import get_text_model_multiplier
from tests.integration.rows import find_job_row, make_job, make_request, make_user
from tests.integration.text_horde import (
    KCPP_AGENT,
    KNOWN,
    TextHorde,
    change_request,
    change_worker,
    count_rows,
    forget_copies,
    forget_postings,
    get_request,
    get_shared_key,
    get_user,
    list_discrepancies,
    list_holds,
    list_postings,
    make_shared_key,
    minutes_ago,
    own_text_horde,
    refused,
    require_worker,
    start_clean,
)

REPLY = "and so on " * 20  # 50 tokens


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_text_horde(service_urls, "text_replies") as app:
        yield app


@pytest.fixture
def horde(app: Flask) -> TextHorde:
    start_clean()
    return TextHorde(app)


@pytest.fixture(scope="module")
def worker(app: Flask) -> tuple[int, str]:
    """A trusted owner: id and key."""
    return make_user(UserRoleTypes.TRUSTED)


@pytest.fixture(scope="module")
def requester(app: Flask) -> tuple[int, str]:
    return make_user(kudos=100_000)


@pytest.fixture
def key(worker: tuple[int, str]) -> str:
    return worker[1]


def set_modes(**modes: bool) -> None:
    with transaction() as session:
        session.add(HordeSettings(id=1, **modes))
    forget_copies()


def price(
    *,
    trusted: bool = True,
    known: bool = True,
    validated: bool = True,
    prompt: str = "Once upon a time",
) -> Decimal:
    """What REPLY to a request of 80 tokens is worth."""
    return compute_text_kudos(
        reply_tokens=count_text_tokens(len(REPLY), 80),
        prompt_tokens=count_text_tokens(len(prompt), 80),
        multiplier=get_text_model_multiplier(KNOWN) if known else 1,
        is_known=known,
        owner_trusted=trusted,
        validated=validated,
    )


# Storing and paying


def test_a_reply_is_stored_and_paid(
    horde: TextHorde, worker: tuple[int, str], requester: tuple[int, str]
) -> None:
    request_id = horde.queue(requester[1], models=[KNOWN])
    job_id = horde.take_job(worker[1])
    forget_postings()
    answer = horde.submit(worker[1], job_id, REPLY, seed=5)
    assert answer.status_code == 200
    assert answer.json == {"reward": float(price())}
    job = find_job_row(job_id)
    assert job is not None
    assert (job.generation, job.seed, job.censored, job.faulted, job.gen_metadata) == (
        REPLY,
        5,
        False,
        False,
        None,
    )
    assert list_postings(worker[0]) == [price()]
    assert list_postings(requester[0]) == [-price() - 1]
    row = get_request(request_id)
    assert (row.consumed_kudos, row.terminal_outcome, row.n) == (
        1 + round(price() + 1),
        "completed",
        0,
    )


@pytest.mark.parametrize("case", [
    {"trusted": False}, {"validated": False}, {"known": False}, {"known": False, "trusted": False},
    {"prompt": "long " * 500},
])  # fmt: skip
def test_the_reward_follows_the_owner_the_backend_the_model_and_the_prompt(
    horde: TextHorde, case: dict[str, Any]
) -> None:
    owner, key = make_user(*((UserRoleTypes.TRUSTED,) if case.get("trusted", True) else ()))
    agent = KCPP_AGENT if case.get("validated", True) else "unknown:1:x"
    model = KNOWN if case.get("known", True) else "nobody/knows"
    horde.queue(prompt=case.get("prompt", "Once upon a time"))
    job_id = horde.take_job(key, models=[model], bridge_agent=agent)
    forget_postings()
    reward = price(**case)
    assert horde.submit(key, job_id, REPLY).json == {"reward": float(reward)}
    if case.get("trusted", True):
        assert (list_postings(owner), list_postings(owner, "escrow")) == ([reward], [])
    else:
        half = (reward / 2).quantize(Decimal("0.01"))
        assert (list_postings(owner), list_postings(owner, "escrow")) == ([reward - half], [half])


def test_display_totals_follow_once_folded(horde: TextHorde, requester: tuple[int, str]) -> None:
    owner, key = make_user(UserRoleTypes.TRUSTED)
    horde.queue(requester[1])
    horde.submit(key, horde.take_job(key), REPLY)
    fold_postings()
    shown = require_worker("a worker")
    assert (shown.fulfilments, shown.contributions, shown.kudos) == (1, 80, round(price()))
    records = text("SELECT record_type::text, value FROM user_records WHERE user_id = :id")
    with transaction() as session:
        earned = session.execute(records, {"id": owner}).all()
        used = session.execute(records, {"id": requester[0]}).all()
    assert {tuple(row) for row in earned} == {("FULFILLMENT", 1), ("CONTRIBUTION", 80)}
    assert {row[0] for row in used} == {"REQUEST", "USAGE"}
    assert get_user(owner).kudos == int(price())
    assert list_discrepancies() == ()


@pytest.mark.parametrize(("length", "tokens"), [(16, 16), (80, 20)])
def test_a_short_or_empty_reply_counts_twenty_tokens_capped_by_the_request(
    horde: TextHorde, key: str, length: int, tokens: int
) -> None:
    request_id = horde.queue(params={"max_length": length})
    reward = compute_text_kudos(
        reply_tokens=tokens,
        prompt_tokens=tokens,
        multiplier=get_text_model_multiplier(KNOWN),
        is_known=True,
        owner_trusted=True,
        validated=True,
    )
    assert horde.submit(key, horde.take_job(key), "").json == {"reward": float(reward)}
    (generation,) = horde.status(request_id)["generations"]
    assert generation["text"] == ""


def test_a_reply_writes_one_statistic_and_one_sample_of_each_kind(
    horde: TextHorde, key: str
) -> None:
    horde.queue(headers={"Client-Agent": "tests:1:me"})
    job_id = horde.take_job(key)
    with transaction() as session:
        session.execute(
            text("UPDATE processing_gens SET start_time = :then"), {"then": minutes_ago(0.5)}
        )
    horde.submit(key, job_id, REPLY)
    horde.submit(key, job_id, REPLY)
    with transaction() as session:
        statistic = session.scalars(select(TextGenStatistic)).one()
        sample = session.scalars(select(WorkerPerformance)).one()
        model = session.scalars(select(ModelPerformance)).one()
        fulfilled = session.scalars(select(FulfillmentPerformance)).one()
    assert (statistic.state, statistic.model, statistic.max_length, statistic.prompt_length) == (
        TextGenState.OK,
        KNOWN,
        80,
        16,
    )
    assert (statistic.client_agent, statistic.bridge_agent) == ("tests:1:me", KCPP_AGENT)
    assert sample.performance == model.performance == pytest.approx(50 / 30, abs=0.2)
    assert (fulfilled.things, fulfilled.thing_type) == (50, "text")


@pytest.mark.parametrize(("body", "state", "metadata"), [
    ({"state": "censored"}, "censored", []),
    ({"state": "csam"}, "csam", [{"type": "censorship", "value": "csam"}]),
    ({"gen_metadata": [{"type": "censorship", "value": "csam"}]}, "csam",
        [{"type": "censorship", "value": "csam"}]),
])  # fmt: skip
def test_a_censored_reply_pays_the_worker_and_costs_the_burn_alone(
    horde: TextHorde,
    worker: tuple[int, str],
    requester: tuple[int, str],
    body: dict[str, Any],
    state: str,
    metadata: list[Any],
) -> None:
    request_id = horde.queue(requester[1])
    job_id = horde.take_job(worker[1])
    forget_postings()
    assert horde.submit(worker[1], job_id, REPLY, **body).json == {"reward": float(price())}
    assert (list_postings(worker[0]), list_postings(requester[0])) == ([price()], [Decimal(-1)])
    (generation,) = horde.status(request_id)["generations"]
    assert (generation["state"], generation["gen_metadata"]) == (state, metadata)
    with transaction() as session:
        assert session.scalars(select(TextGenStatistic.state)).one() is TextGenState.CENSORED


def test_metadata_is_kept_as_sent(horde: TextHorde, key: str) -> None:
    request_id = horde.queue()
    entries = [{"type": "information", "value": "see_ref", "ref": "x"}, {"type": "a", "value": "b"}]
    horde.submit(
        key, horde.take_job(key), gen_metadata=[entries[0], {**entries[1], "ref": None, "other": 1}]
    )
    assert horde.status(request_id)["generations"][0]["gen_metadata"] == entries


def test_more_than_fifty_entries_are_refused_before_anything_is_stored(
    horde: TextHorde, key: str
) -> None:
    horde.queue()
    job_id = horde.take_job(key)
    entries = [{"type": "a", "value": "b"}] * 51
    assert refused(horde.submit(key, job_id, gen_metadata=entries)) == (400, "BadRequest")
    assert horde.submit(key, job_id, gen_metadata=entries[:50]).status_code == 200


def test_what_cannot_be_stored_is_replaced(horde: TextHorde, key: str) -> None:
    request_id = horde.queue()
    body = f'{{"id": "{horde.take_job(key)}", "generation": "a\\u0000b\\ud800c \\ud83d\\ude00"}}'
    assert horde.post("submit", body.encode(), key).status_code == 200
    assert horde.status(request_id)["generations"][0]["text"] == "a\ufffdb\ufffdc \U0001f600"


def test_a_shared_key_pays_along_and_never_falls_below_nothing(horde: TextHorde, key: str) -> None:
    owner, _ = make_user(kudos=1000)
    sharedkey = make_shared_key(owner, kudos=25)
    horde.queue(sharedkey)
    horde.submit(key, horde.take_job(key), REPLY)
    stored = get_shared_key(sharedkey)
    assert stored.kudos == max(0, 24 - round(price() + 1))
    assert stored.utilized == pytest.approx(1 + float(price()) + 1, abs=1)


def test_matched_targeting_pays_a_fixed_sum(service_urls: ServiceAddresses) -> None:
    with own_text_horde(service_urls, "text_targeting", require_matched_targeting=True) as app:
        horde = TextHorde(app)
        start_clean()
        _, key = make_user(UserRoleTypes.TRUSTED)
        horde.take(key)
        horde.queue(workers=[str(require_worker("a worker").id)])
        assert horde.submit(key, horde.take_job(key), REPLY).json == {"reward": 0.1}


# Holds


def test_the_last_reply_ends_the_hold(
    horde: TextHorde, key: str, requester: tuple[int, str]
) -> None:
    horde.take(key)
    change_worker("a worker", speed=10.0)
    horde.queue(requester[1], slow_workers=False, params={"n": 2})
    jobs = [horde.take_job(key), horde.take_job(key)]
    horde.submit(key, jobs[0], REPLY)
    assert list_holds() == [(Decimal(40), True)]
    horde.submit(key, jobs[1], REPLY)
    assert list_holds() == [(Decimal(40), False)]
    with transaction() as session:
        tagged = session.scalars(
            text("SELECT count(*) FROM kudos_ledger WHERE reservation_id IS NOT NULL")
        ).one()
    assert tagged >= 2


def test_the_last_job_of_a_faulted_request_ends_the_hold(
    horde: TextHorde, key: str, requester: tuple[int, str]
) -> None:
    horde.take(key)
    change_worker("a worker", speed=10.0)
    horde.queue(requester[1], slow_workers=False, params={"n": 5})
    jobs = horde.take(key, amount=4)["ids"]
    for job_id in jobs[:3]:
        horde.fault(key, job_id)
    assert list_holds() == [(Decimal(100), True)]
    assert horde.submit(key, jobs[3], REPLY).status_code == 200
    assert list_holds() == [(Decimal(100), False)]


def test_the_fault_of_a_cancelled_requests_last_job_ends_the_hold(
    horde: TextHorde, key: str, requester: tuple[int, str]
) -> None:
    horde.take(key)
    change_worker("a worker", speed=10.0)
    request_id = horde.queue(requester[1], slow_workers=False)
    job_id = horde.take_job(key)
    horde.cancel(request_id)
    assert list_holds() == [(Decimal(20), True)]
    horde.fault(key, job_id)
    assert list_holds() == [(Decimal(20), False)]
    assert (get_request(request_id).n, horde.status(request_id)["done"]) == (0, True)


# Refusals


def test_refusals_come_in_the_published_order(horde: TextHorde, key: str) -> None:
    horde.queue()
    job_id = horde.take_job(key)
    horde.submit(key, job_id)
    _, stranger = make_user()

    def submit(key: str | None, **body: Any) -> tuple[int, str | None]:
        return refused(horde.post("submit", body, key))

    assert submit("no such key") == (400, "BadRequest")
    assert submit("no such key", id=str(uuid4())) == (400, "BadRequest")
    assert submit(None, id=str(uuid4()), generation="") == (400, "BadRequest")
    for unknown in (str(uuid4()), "no uuid", "", job_id.replace("-", "")):
        assert submit("no such key", id=unknown, generation="") == (404, "InvalidJobID")
    assert submit("no such key", id=job_id, generation="") == (401, "InvalidAPIKey")
    assert submit(stranger, id=job_id, generation="") == (403, "WrongCredentials")
    assert submit(
        key, id=job_id, generation="", gen_metadata=[{"type": "a", "value": "b"}] * 51
    ) == (400, "DuplicateGen")


@pytest.mark.parametrize(("name", "value"), [
    ("id", 5), ("id", None), ("generation", None), ("generation", 5), ("state", "great"),
    ("state", 1), ("seed", "1"),
    ("seed", 2**63),
    ("seed", 1.5), ("gen_metadata", {}), ("gen_metadata", [1]), ("gen_metadata", [{"type": "a"}]),
    ("gen_metadata", [{"type": "a", "value": "b", "ref": "x" * 256}]),
])  # fmt: skip
def test_a_key_of_the_wrong_shape_is_named_and_the_job_stays_pending(
    horde: TextHorde, key: str, name: str, value: Any
) -> None:
    horde.queue()
    job_id = horde.take_job(key)
    if name in {"id", "generation"}:
        answer = horde.post("submit", {"id": job_id, "generation": "a", name: value}, key)
    else:
        answer = horde.submit(key, job_id, **{name: value})
    assert refused(answer) == (400, "BadRequest")
    assert [path.split(".")[0] for path in answer.json["errors"]] == [name]
    assert horde.submit(key, job_id).status_code == 200


def test_a_second_submit_is_refused_and_moves_nothing(
    horde: TextHorde, worker: tuple[int, str]
) -> None:
    request_id = horde.queue()
    job_id = horde.take_job(worker[1])
    horde.submit(worker[1], job_id, REPLY)
    forget_postings()
    change_worker("a worker", maintenance=True)
    assert refused(horde.submit(worker[1], job_id, "another")) == (400, "DuplicateGen")
    assert refused(horde.fault(worker[1], job_id)) == (400, "DuplicateGen")
    assert list_postings(worker[0]) == []
    assert horde.status(request_id)["generations"][0]["text"] == REPLY


def test_a_faulted_job_takes_no_reply(horde: TextHorde, worker: tuple[int, str]) -> None:
    request_id = horde.queue()
    job_id = horde.take_job(worker[1])
    horde.fault(worker[1], job_id)
    forget_postings()
    answer = horde.submit(worker[1], job_id, REPLY)
    assert refused(answer) == (400, "AbortedGen")
    assert job_id in answer.json["message"]
    assert "150" in answer.json["message"]
    assert list_postings(worker[0]) == []
    assert horde.status(request_id)["generations"] == []


def test_a_job_that_went_with_its_request_is_unknown(horde: TextHorde, key: str) -> None:
    horde.queue()
    job_id = horde.take_job(key)
    with transaction() as session:
        session.execute(text("DELETE FROM waiting_prompts"))
    assert refused(horde.submit(key, job_id)) == (404, "InvalidJobID")
    assert refused(horde.fault(key, job_id)) == (404, "InvalidJobID")


def test_a_cancelled_requests_job_is_still_paid_and_kept(
    horde: TextHorde, worker: tuple[int, str]
) -> None:
    request_id = horde.queue()
    job_id = horde.take_job(worker[1])
    horde.cancel(request_id)
    forget_postings()
    assert horde.submit(worker[1], job_id, REPLY).json == {"reward": float(price())}
    assert list_postings(worker[0]) == [price()]
    status = horde.status(request_id)
    assert (status["done"], status["finished"], len(status["generations"])) == (True, 1, 1)


def test_a_settlement_extends_the_requests_life(horde: TextHorde, key: str) -> None:
    request_id = horde.queue(params={"n": 2})
    job_id = horde.take_job(key)
    change_request(request_id, expiry=minutes_ago(-1))
    horde.submit(key, job_id)
    assert get_request(request_id).expiry > minutes_ago(-19)
    assert get_request(request_id).terminal_outcome is None


# Faults


def test_a_fault_gives_the_generation_back_once(horde: TextHorde, worker: tuple[int, str]) -> None:
    request_id = horde.queue()
    job_id = horde.take_job(worker[1])
    forget_postings()
    for _ in range(3):
        answer = horde.fault(worker[1], job_id)
        assert (answer.status_code, answer.json) == (200, {"reward": 0.0})
    assert get_request(request_id).n == 1
    shown = require_worker("a worker")
    assert (shown.aborted_jobs, shown.uncompleted_jobs, shown.maintenance) == (1, 1, False)
    assert list_postings(worker[0]) == []
    with transaction() as session:
        assert session.scalars(select(TextGenStatistic.state)).one() is TextGenState.FAULTED
    assert count_rows(WorkerPerformance) == 0
    status = horde.status(request_id)
    assert (status["restarted"], status["waiting"], status["done"], status["faulted"]) == (
        1,
        1,
        False,
        False,
    )


def test_the_same_worker_may_get_a_faulted_generation_again(horde: TextHorde, key: str) -> None:
    horde.queue()
    horde.fault(key, horde.take_job(key))
    assert horde.submit(key, horde.take_job(key)).status_code == 200


def test_the_third_fault_faults_the_request_at_once(horde: TextHorde, key: str) -> None:
    request_id = horde.queue(params={"n": 5})
    jobs = horde.take(key, amount=4)["ids"]
    for job_id in jobs[:2]:
        horde.fault(key, job_id)
    assert not get_request(request_id).faulted
    horde.fault(key, jobs[2])
    row = get_request(request_id)
    assert (row.faulted, row.terminal_outcome) == (True, "faulted")
    status = horde.status(request_id)
    assert (status["faulted"], status["done"], status["is_possible"], status["processing"]) == (
        True,
        True,
        False,
        1,
    )
    assert horde.take(key)["id"] is None


def test_a_request_that_faulted_gives_no_refund(
    horde: TextHorde, key: str, requester: tuple[int, str]
) -> None:
    forget_postings()
    horde.queue(requester[1])
    for _ in range(3):
        horde.fault(key, horde.take_job(key))
    assert list_postings(requester[0]) == [Decimal(-1)]


def fault_often(horde: TextHorde, key: str, times: int) -> None:
    worker_id = require_worker("a worker").id
    user_id, _ = make_user()
    for _ in range(times):
        job_id = make_job(make_request(user_id, n=0), worker_id)
        assert horde.fault(key, str(job_id)).json == {"reward": 0.0}


def test_the_21st_dropped_job_of_an_hour_puts_a_worker_into_maintenance(
    horde: TextHorde, key: str
) -> None:
    horde.take(key)
    change_worker("a worker", aborted_jobs=19, uncompleted_jobs=50)
    fault_often(horde, key, 1)
    assert (require_worker("a worker").aborted_jobs, require_worker("a worker").maintenance) == (
        20,
        False,
    )
    fault_often(horde, key, 1)
    shown = require_worker("a worker")
    assert (shown.aborted_jobs, shown.uncompleted_jobs, shown.maintenance) == (0, 52, True)
    assert shown.maintenance_msg == ABORT_MAINTENANCE_MESSAGE


def test_an_hour_after_the_first_dropped_job_counting_starts_again(
    horde: TextHorde, key: str
) -> None:
    horde.take(key)
    change_worker("a worker", aborted_jobs=20, last_aborted_job=minutes_ago(61))
    fault_often(horde, key, 1)
    shown = require_worker("a worker")
    assert (shown.aborted_jobs, shown.maintenance) == (1, False)
    assert shown.last_aborted_job > minutes_ago(1)


def test_a_raid_puts_no_worker_into_maintenance(horde: TextHorde, key: str) -> None:
    horde.take(key)
    set_modes(raid=True)
    change_worker("a worker", aborted_jobs=30)
    fault_often(horde, key, 1)
    assert require_worker("a worker").maintenance is False


# Fakes


def test_a_fake_job_is_answered_alike_and_moves_nothing(
    horde: TextHorde, worker: tuple[int, str]
) -> None:
    request_id = horde.queue()
    horde.take_job(worker[1])
    job_id = horde_job_of(request_id)
    with transaction() as session:
        session.execute(text("UPDATE processing_gens SET fake = true"))
        session.execute(text("UPDATE waiting_prompts SET n = 1"))
    forget_postings()
    assert horde.submit(worker[1], job_id, REPLY).json == {"reward": float(price())}
    assert refused(horde.submit(worker[1], job_id, REPLY)) == (400, "DuplicateGen")
    assert list_postings(worker[0]) == []
    assert (count_rows(TextGenStatistic), count_rows(WorkerPerformance)) == (0, 0)
    status = horde.status(request_id)
    assert (status["finished"], status["waiting"], status["generations"], status["kudos"]) == (
        0,
        1,
        [],
        1,
    )


def test_a_faulted_fake_counts_for_nothing(horde: TextHorde, key: str) -> None:
    request_id = horde.queue()
    job_id = horde.take_job(key)
    with transaction() as session:
        session.execute(text("UPDATE processing_gens SET fake = true"))
        session.execute(text("UPDATE waiting_prompts SET n = 1"))
    for _ in range(2):
        assert horde.fault(key, job_id).json == {"reward": 0.0}
    assert get_request(request_id).n == 1
    assert require_worker("a worker").aborted_jobs == 0
    assert horde.status(request_id)["restarted"] == 0


def horde_job_of(request_id: str) -> str:
    with transaction() as session:
        return str(
            session.scalars(
                select(TextProcessingGeneration.id).where(
                    TextProcessingGeneration.wp_id == request_id
                )
            ).one()
        )


def test_an_old_job_that_nobody_aborted_yet_is_still_taken(horde: TextHorde, key: str) -> None:
    horde.queue()
    job_id = horde.take_job(key)
    with transaction() as session:
        session.execute(
            text("UPDATE processing_gens SET start_time = :then"), {"then": minutes_ago(4)}
        )
    assert horde.submit(key, job_id).status_code == 200
