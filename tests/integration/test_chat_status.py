# SPDX-License-Identifier: AGPL-3.0-or-later
"""Reading and cancelling chat requests."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import update

from devtools.services import ServiceAddresses
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.classes.base.worker import Worker
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.clock import utcnow
from horde.database import text_status
from horde.database.functions import forget_cached_availability
from horde.db import transaction
from tests.integration._fake_chat_worker import MODEL, ChatHorde, build_tool, chat_horde, start_anew
from tests.integration.rows import find_job_row, make_chat_worker, make_worker
from tests.integration.text_horde import STATUS_KEYS

FIELDS = STATUS_KEYS | {
    "context_adjustments",
    "impossible_reason",
    "fault_reason",
    "fault_rc",
}


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "chat_status") as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> ChatHorde:
    start_anew()
    return module_horde


def get_counts(status: dict[str, Any]) -> tuple[int, int, int, int, bool]:
    return (
        status["waiting"],
        status["processing"],
        status["finished"],
        status["restarted"],
        status["done"],
    )


def test_a_request_from_its_queueing_to_its_end(horde: ChatHorde) -> None:
    horde.take_nothing()
    first, second = horde.queue(max_tokens=100), horde.queue(max_tokens=100)
    status = horde.status(second)
    assert set(status) == FIELDS
    assert get_counts(status) == (1, 0, 0, 0, False)
    assert (status["queue_position"], status["wait_time"]) == (2, 20)
    job = horde.take()
    status = horde.status(first)
    assert get_counts(status) == (0, 1, 0, 0, False)
    assert (status["queue_position"], status["is_possible"], status["eligible_workers"]) == (
        0,
        True,
        1,
    )
    assert 5 <= status["wait_time"] <= 10
    assert horde.fault(job["id"]).status_code == 200
    assert get_counts(horde.status(first)) == (1, 0, 0, 1, False)
    job = horde.take()
    assert horde.reply(job["id"]).status_code == 200
    status = horde.status(first)
    assert get_counts(status) == (0, 0, 1, 1, True)
    assert (status["wait_time"], len(status["generations"])) == (0, 1)
    assert "messages" not in str(status)


def test_a_status_read_across_a_submit_is_of_one_moment(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id, job = horde.serve()
    before = horde.status(request_id)
    list_jobs = text_status._list_jobs

    def submit_first(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(text_status, "_list_jobs", list_jobs)
        assert horde.reply(job["id"]).status_code == 200
        return list_jobs(*arguments, **options)

    monkeypatch.setattr(text_status, "_list_jobs", submit_first)
    status = horde.status(request_id)
    assert (status["done"], status["finished"], status["generations"]) == (False, 0, [])
    assert status["kudos"] == before["kudos"]

    status = horde.status(request_id)
    assert (status["done"], status["finished"], len(status["generations"])) == (True, 1, 1)
    assert status["kudos"] > before["kudos"]


def test_the_wait_counts_from_the_creation_to_the_pop_of_the_job_shown(horde: ChatHorde) -> None:
    horde.take_nothing()
    request_id = horde.queue()
    job_id = horde.take()["id"]
    with transaction() as session:
        moment = utcnow()
        session.execute(update(WaitingPrompt).values(created=moment - timedelta(seconds=30.25)))
        session.execute(update(TextProcessingGeneration).values(start_time=moment))
    assert horde.reply(job_id).status_code == 200
    assert horde.status(request_id)["generations"][0]["queue_wait_seconds"] == 30.25


@pytest.mark.parametrize(
    "path", ["nonsense", "6ba7b810-9dad-11d1-80b4-00c04fd430c8", "00000000000000000000000000000000"]
)
def test_an_unknown_id_is_not_found(horde: ChatHorde, path: str) -> None:
    for answer in (horde.get(f"/generate/chat/status/{path}"), horde.cancel(path)):
        assert (answer.status_code, answer.json["rc"]) == (404, "RequestNotFound")


def test_the_families_do_not_see_each_other(horde: ChatHorde) -> None:
    horde.take_nothing()
    chat_id = horde.queue()
    answer = horde.post(
        "/generate/text/async", {"prompt": "Once", "models": [MODEL]}, horde.requester_key
    )
    text_id = answer.json["id"]
    for family, request_id in (("text", chat_id), ("chat", text_id)):
        path = f"/generate/{family}/status/{request_id}"
        for answer in (horde.get(path), horde.client.delete(f"/api/v2{path}")):
            assert (answer.status_code, answer.json["rc"]) == (404, "RequestNotFound")
    shown = horde.get(f"/generate/text/status/{text_id}").json
    assert not {"context_adjustments", "impossible_reason", "fault_reason", "fault_rc"} & set(shown)
    assert not horde.status(chat_id)["done"]


def test_a_text_generation_shows_no_chat_key(horde: ChatHorde) -> None:
    horde.take_nothing()
    answer = horde.post(
        "/generate/text/async", {"prompt": "Once", "models": [MODEL]}, horde.requester_key
    )
    job = horde.take()
    assert (
        horde.post(
            "/generate/text/submit", {"id": job["id"], "generation": "upon"}, horde.owner_key
        ).status_code
        == 200
    )
    [shown] = horde.get(f"/generate/text/status/{answer.json['id']}").json["generations"]
    assert set(shown) == {
        "text",
        "seed",
        "gen_metadata",
        "worker_id",
        "worker_name",
        "model",
        "state",
    }


def test_an_expired_request_is_not_found(horde: ChatHorde) -> None:
    horde.take_nothing()
    request_id = horde.queue()
    assert horde.status(request_id)["waiting"] == 1
    with transaction() as session:
        session.execute(update(WaitingPrompt).values(expiry=utcnow() - timedelta(seconds=1)))
    answer = horde.get(f"/generate/chat/status/{request_id}")
    assert (answer.status_code, (answer.json or {})["rc"]) == (404, "RequestNotFound")


# --- impossible
# --------------------------------------------------------------------------------------------------


def test_a_gap_is_told_only_while_every_worker_has_one(horde: ChatHorde) -> None:
    horde.take_nothing(chat_features=["prompt_overflow_refused"])
    request_id = horde.queue(seed=1, tools=[build_tool()])
    gap = {
        "kind": "declaration_gap",
        "missing_declarations": ["seed", "tools"],
        "exceeded_limits": [],
    }
    status = horde.status(request_id)
    assert (status["is_possible"], status["impossible_reason"]) == (False, gap)
    horde.take_nothing(name="second", chat_features=["prompt_overflow_refused", "tools"])
    assert horde.status(request_id)["impossible_reason"] == gap
    assert horde.take(name="third", chat_features=["prompt_overflow_refused", "tools", "seed"])[
        "chat"
    ]
    status = horde.status(request_id)
    assert (status["is_possible"], status["impossible_reason"]) == (True, None)


def test_a_worker_refused_for_another_reason_makes_no_gap(horde: ChatHorde) -> None:
    features = ["prompt_overflow_refused", "seed"]
    horde.take_nothing(chat_features=["prompt_overflow_refused"])
    with transaction() as session:
        session.execute(update(Worker).values(speed=2.0))
    make_chat_worker(horde.owner_id, MODEL, speed=2.0, chat_features=features)
    status = horde.status(horde.queue(seed=1, max_tokens=512))
    assert (status["is_possible"], status["impossible_reason"]) == (False, None)


def test_workers_the_queue_never_asks_do_not_hide_a_gap(horde: ChatHorde) -> None:
    horde.take_nothing(chat_features=["prompt_overflow_refused"])
    both = ["prompt_overflow_refused", "seed"]
    make_chat_worker(horde.owner_id, MODEL, chat_features=both, bridge_agent="unknown:1:here")
    make_chat_worker(horde.owner_id, MODEL, chat_features=both, maintenance=True)
    make_chat_worker(
        horde.owner_id, MODEL, chat_features=both, last_check_in=utcnow() - timedelta(minutes=6)
    )
    make_worker(horde.owner_id, (MODEL,))
    status = horde.status(horde.queue(seed=1, horde={"validated_backends": True}))
    assert status["impossible_reason"] == {
        "kind": "declaration_gap",
        "missing_declarations": ["seed"],
        "exceeded_limits": [],
    }


def test_no_reason_while_a_job_is_in_flight_or_nobody_is_online(horde: ChatHorde) -> None:
    horde.take_nothing()
    request_id = horde.queue()
    job = horde.take()
    horde.take_nothing(chat_features=[])
    status = horde.status(request_id)
    assert (status["is_possible"], status["impossible_reason"]) == (True, None)
    assert horde.fault(job["id"]).status_code == 200
    forget_cached_availability()  # what was possible is believed for a minute
    status = horde.status(request_id)
    assert (status["is_possible"], status["impossible_reason"]["missing_declarations"]) == (
        False,
        ["prompt_overflow_refused"],
    )
    with transaction() as session:
        session.execute(update(Worker).values(last_check_in=utcnow() - timedelta(minutes=6)))
    forget_cached_availability()
    status = horde.status(request_id)
    assert (status["is_possible"], status["impossible_reason"]) == (False, None)


def test_a_declaration_that_shrinks_makes_a_length_gap(horde: ChatHorde) -> None:
    horde.take_nothing()
    request_id = horde.queue(max_tokens=512)
    horde.take_nothing(chat_limits={"max_context_length": 1024, "max_length": 256})
    forget_cached_availability()
    reason = horde.status(request_id)["impossible_reason"]
    assert reason["exceeded_limits"] == ["max_context_length", "max_length"]


# --- cancel
# --------------------------------------------------------------------------------------------------


def test_a_queued_request_is_cancelled_once(horde: ChatHorde) -> None:
    horde.take_nothing()
    request_id = horde.queue(max_tokens=1024, horde={"slow_workers": True})
    answer = horde.cancel(request_id)
    assert (answer.status_code, set(answer.json)) == (200, FIELDS)
    assert get_counts(answer.json) == (1, 0, 0, 0, False)
    assert get_counts(horde.status(request_id)) == (0, 0, 0, 0, True)
    assert horde.status(request_id)["faulted"] is False
    horde.take_nothing()
    assert get_counts(horde.cancel(request_id).json) == (0, 0, 0, 0, True)


def test_a_job_in_flight_goes_on_and_is_paid(horde: ChatHorde) -> None:
    request_id, job = horde.serve()
    assert get_counts(horde.cancel(request_id).json) == (0, 1, 0, 0, False)
    assert get_counts(horde.status(request_id)) == (0, 1, 0, 0, False)
    answer = horde.reply(job["id"])
    assert (answer.status_code, answer.json["reward"] > 0) == (200, True)
    status = horde.status(request_id)
    assert get_counts(status) == (0, 0, 1, 0, True)
    assert status["generations"][0]["text"] == "Blue."


def test_a_fault_after_the_cancel_restarts_nothing(horde: ChatHorde) -> None:
    request_id, job = horde.serve()
    horde.cancel(request_id)
    assert horde.fault(job["id"]).status_code == 200
    status = horde.status(request_id)
    assert (status["done"], status["waiting"], status["processing"], status["generations"]) == (
        True,
        0,
        0,
        [],
    )
    horde.take_nothing()
    row = find_job_row(UUID(job["id"]))
    assert row is not None
    assert row.faulted


def test_nothing_waits_of_a_faulted_request(horde: ChatHorde) -> None:
    request_id, job = horde.serve()
    for _ in range(2):
        horde.fault(job["id"])
        job = horde.take()
    horde.fault(job["id"])
    status = horde.status(request_id)
    assert (status["faulted"], status["waiting"]) == (True, 0)


def test_a_finished_request_stays_finished(horde: ChatHorde) -> None:
    request_id, job = horde.serve()
    assert horde.reply(job["id"]).status_code == 200
    before = horde.status(request_id)
    assert horde.cancel(request_id).json == before
    assert horde.status(request_id) == before
