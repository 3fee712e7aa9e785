# SPDX-License-Identifier: AGPL-3.0-or-later
"""What `GET` and `DELETE /generate/text/status/{id}` tell of a request."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from flask import Flask
from sqlalchemy import text

from devtools.services import ServiceAddresses
from horde.classes.base.user import UserRoleTypes
from horde.clock import utcnow
from horde.db import transaction
from tests.integration.rows import make_job, make_request, make_user, make_worker
from tests.integration.text_horde import (
    KNOWN,
    STATUS_KEYS,
    TextHorde,
    change_request,
    change_worker,
    forget_copies,
    forget_postings,
    get_request,
    list_holds,
    list_postings,
    minutes_ago,
    own_text_horde,
    refused,
    require_worker,
    start_clean,
)


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_text_horde(service_urls, "text_status") as app:
        yield app


@pytest.fixture
def horde(app: Flask) -> TextHorde:
    start_clean()
    return TextHorde(app)


@pytest.fixture(scope="module")
def owner(app: Flask) -> tuple[int, str]:
    return make_user(UserRoleTypes.TRUSTED)


@pytest.fixture
def key(owner: tuple[int, str]) -> str:
    return owner[1]


def read_fresh(horde: TextHorde, request_id: str) -> dict[str, Any]:
    """The status without anything that the process remembered."""
    forget_copies()
    return horde.status(request_id)


def test_a_fresh_request_answers_every_key_with_its_type(horde: TextHorde) -> None:
    status = read_fresh(horde, horde.queue())
    assert set(status) == STATUS_KEYS
    assert status["wait_time"] > 0
    assert status | {"wait_time": 0} == {
        "finished": 0,
        "processing": 0,
        "restarted": 0,
        "waiting": 1,
        "done": False,
        "faulted": False,
        "wait_time": 0,
        "queue_position": 1,
        "kudos": 1,
        "is_possible": False,
        "eligible_workers": 0,
        "eligible_worker_threads": 0,
        "might_stall": False,
        "generations": [],
    }
    for name, value in status.items():
        expected = (
            bool
            if name in {"done", "faulted", "is_possible", "might_stall"}
            else list
            if name == "generations"
            else int
        )
        assert type(value) is expected, name


def test_a_finished_generation_answers_every_key(horde: TextHorde, key: str) -> None:
    request_id = horde.queue()
    job_id = horde.take_job(key, "the worker")
    horde.submit(key, job_id, "and so on", seed=-1)
    status = horde.status(request_id)
    assert status["generations"] == [
        {
            "text": "and so on",
            "seed": 0,
            "gen_metadata": [],
            "worker_id": str(require_worker("the worker").id),
            "worker_name": "the worker",
            "model": KNOWN,
            "state": "ok",
        }
    ]
    assert (status["done"], status["wait_time"], status["queue_position"], status["waiting"]) == (
        True,
        0,
        0,
        0,
    )
    assert isinstance(status["kudos"], int)
    assert job_id not in str(status)
    assert horde.status(request_id) == status


def test_counts_follow_each_generation(horde: TextHorde, key: str) -> None:
    request_id = horde.queue(params={"n": 4})
    jobs = horde.take(key, amount=3)["ids"]
    horde.submit(key, jobs[0], "one")
    horde.fault(key, jobs[1])
    status = horde.status(request_id)
    counts = {
        name: status[name] for name in ("finished", "processing", "restarted", "waiting", "done")
    }
    assert counts == {"finished": 1, "processing": 1, "restarted": 1, "waiting": 2, "done": False}
    assert [generation["text"] for generation in status["generations"]] == ["one"]
    horde.submit(key, jobs[2], "two")
    for _ in range(2):
        horde.submit(key, horde.take_job(key), "more")
    status = horde.status(request_id)
    counts = {
        name: status[name] for name in ("finished", "processing", "restarted", "waiting", "done")
    }
    assert counts == {"finished": 4, "processing": 0, "restarted": 1, "waiting": 0, "done": True}


def test_waiting_never_exceeds_what_is_missing_nor_falls_below_nothing(
    horde: TextHorde, owner: tuple[int, str]
) -> None:
    worker = make_worker(owner[0])
    request_id = make_request(owner[0], n=5, jobs=2)
    make_job(request_id, worker, generation="x")
    assert horde.status(str(request_id))["waiting"] == 1
    make_job(request_id, worker)
    make_job(request_id, worker)
    assert horde.status(str(request_id))["waiting"] == 0


def test_fakes_are_in_no_count(horde: TextHorde, owner: tuple[int, str]) -> None:
    worker = make_worker(owner[0])
    request_id = make_request(owner[0], n=1, jobs=1)
    for columns in ({}, {"generation": "x"}, {"faulted": True}):
        make_job(request_id, worker, fake=True, **columns)
    status = horde.status(str(request_id))
    assert (status["finished"], status["processing"], status["restarted"], status["waiting"]) == (
        0,
        0,
        0,
        1,
    )
    assert status["generations"] == []


# Who may see what


def test_ids_that_name_no_text_request_are_all_the_same_404(
    horde: TextHorde, owner: tuple[int, str]
) -> None:
    unknown = str(uuid4())
    inactive = str(make_request(owner[0], active=False))
    expired = str(make_request(owner[0], expiry=minutes_ago(0.1)))
    chat = str(make_request(owner[0], is_chat=True, messages=[]))
    image = str(make_request(owner[0]))
    with transaction() as session:
        session.execute(
            text("UPDATE waiting_prompts SET wp_type = 'image' WHERE id = :id"), {"id": image}
        )
    live = str(make_request(owner[0]))
    odd = [f"{{{live}}}", live.replace("-", ""), f"urn:uuid:{live}", "x", "0" * 5000, "%00", "..."]
    client = horde.app.test_client()
    for request_id in [unknown, inactive, expired, chat, image, *odd]:
        for method in ("get", "delete"):
            answer = client.open(f"/api/v2/generate/text/status/{request_id}", method=method)
            if request_id == "%00":
                assert refused(answer)[0] in {400, 404}
            else:
                assert refused(answer) == (404, "RequestNotFound"), request_id
    assert client.get(f"/api/v2/generate/text/status/{live.upper()}").status_code == 200


def test_no_key_is_needed_and_a_wrong_one_does_no_harm(horde: TextHorde) -> None:
    request_id = horde.queue()
    answer = horde.app.test_client().get(
        f"/api/v2/generate/text/status/{request_id}", headers={"apikey": "no such key"}
    )
    assert answer.status_code == 200


def test_a_field_mask_narrows_the_answer(horde: TextHorde) -> None:
    request_id = horde.queue()
    answer = horde.app.test_client().get(
        f"/api/v2/generate/text/status/{request_id}", headers={"X-Fields": "done,waiting"}
    )
    assert answer.json == {"done": False, "waiting": 1}


# Possibility


def test_a_request_is_possible_right_after_a_matching_workers_first_pop(
    horde: TextHorde, key: str
) -> None:
    request_id = horde.queue(models=[KNOWN], params={"n": 2})
    assert horde.status(request_id)["is_possible"] is False
    horde.take(key, models=["another/model"])
    assert horde.status(request_id)["is_possible"] is False
    horde.take(key, "the right one", models=[KNOWN], threads=3)
    status = horde.status(request_id)
    assert (
        status["is_possible"],
        status["eligible_workers"],
        status["eligible_worker_threads"],
    ) == (True, 1, 3)


def test_a_request_becomes_possible_when_a_worker_raises_its_limits(
    horde: TextHorde, key: str
) -> None:
    request_id = horde.queue(params={"max_context_length": 8192})
    horde.take(key)
    assert horde.status(request_id)["is_possible"] is False
    horde.take(key, max_context_length=8192, amount=1, models=["x"])
    assert horde.status(request_id)["is_possible"] is True


def test_a_running_job_makes_a_request_possible(horde: TextHorde, key: str) -> None:
    request_id = horde.queue()
    horde.take_job(key)
    with transaction() as session:
        session.execute(text("UPDATE workers SET last_check_in = :then"), {"then": minutes_ago(6)})
    status = read_fresh(horde, request_id)
    assert (status["is_possible"], status["eligible_workers"]) == (True, 0)


@pytest.mark.parametrize(
    "columns", [{"maintenance": True}, {"paused": True}, {"last_check_in": minutes_ago(6)}]
)
def test_a_worker_that_takes_nothing_makes_nothing_possible(
    horde: TextHorde, key: str, columns: dict[str, Any]
) -> None:
    horde.take(key)
    change_worker("a worker", **columns)
    assert read_fresh(horde, horde.queue())["is_possible"] is False


def test_a_worker_in_maintenance_is_there_for_its_owner(horde: TextHorde, key: str) -> None:
    horde.take(key)
    change_worker("a worker", maintenance=True)
    assert read_fresh(horde, horde.queue(key))["is_possible"] is True


def test_an_unmeasured_worker_is_too_slow_for_who_refuses_slow_ones(
    horde: TextHorde, key: str
) -> None:
    horde.take(key)
    request_id = horde.queue(make_user(kudos=1000)[1], slow_workers=False)
    assert read_fresh(horde, request_id)["is_possible"] is False
    change_worker("a worker", speed=3.0)
    assert read_fresh(horde, request_id)["is_possible"] is True


# Places and waits


def test_positions_follow_the_queue(horde: TextHorde) -> None:
    first, second = horde.queue(), horde.queue()
    rich = horde.queue(make_user(kudos=5000)[1])
    forget_copies()
    assert [horde.status(request_id)["queue_position"] for request_id in (rich, first, second)] == [
        1,
        2,
        3,
    ]
    horde.cancel(first)
    forget_copies()
    assert [horde.status(request_id)["queue_position"] for request_id in (rich, first, second)] == [
        1,
        0,
        2,
    ]


def test_the_wait_counts_what_is_ahead_and_the_requests_own_output(
    horde: TextHorde, key: str
) -> None:
    horde.take(key)
    change_worker("a worker", speed=10.0)
    ahead = horde.queue(params={"max_length": 100, "n": 2})
    behind = horde.queue(params={"max_length": 50})
    elsewhere = horde.queue(models=["elsewhere"], params={"max_length": 500})
    forget_copies()
    assert horde.status(ahead)["wait_time"] == 20
    assert horde.status(behind)["wait_time"] == 25
    assert elsewhere


def test_an_unmeasured_worker_counts_ten_tokens_a_second(horde: TextHorde, key: str) -> None:
    horde.take(key)
    assert read_fresh(horde, horde.queue(params={"max_length": 64}))["wait_time"] == 6


def test_a_running_job_is_waited_for_by_its_workers_speed(horde: TextHorde, key: str) -> None:
    horde.take(key)
    change_worker("a worker", speed=2.0)
    request_id = horde.queue(params={"max_length": 100})
    horde.take_job(key)
    with transaction() as session:
        session.execute(
            text("UPDATE processing_gens SET start_time = :then"),
            {"then": utcnow() - timedelta(seconds=20)},
        )
    status = read_fresh(horde, request_id)
    assert (status["wait_time"], status["queue_position"]) == (pytest.approx(30, abs=1), 0)


# Cancel


def test_a_cancel_answers_the_status_before_it_and_stops_the_rest(
    horde: TextHorde, key: str
) -> None:
    forget_postings()
    user_id, asks = make_user()
    request_id = horde.queue(asks, params={"n": 3})
    answer = horde.cancel(request_id)
    assert answer.status_code == 200
    assert set(answer.json) == STATUS_KEYS
    assert (answer.json["waiting"], answer.json["done"]) == (3, False)
    status = horde.status(request_id)
    assert (status["waiting"], status["done"], status["faulted"]) == (0, True, False)
    assert get_request(request_id).terminal_outcome == "cancelled"
    assert horde.take(key)["id"] is None
    assert list_postings(user_id) == [-1]  # the tax stays


def test_cancelling_again_answers_alike_and_changes_nothing(horde: TextHorde) -> None:
    request_id = horde.queue()
    horde.cancel(request_id)
    before = get_request(request_id)
    answer = horde.cancel(request_id)
    assert (answer.status_code, answer.json["done"]) == (200, True)
    assert get_request(request_id).terminal_recorded_at == before.terminal_recorded_at


def test_a_cancel_lets_running_jobs_end(horde: TextHorde, key: str) -> None:
    request_id = horde.queue(params={"n": 2})
    job_id = horde.take_job(key)
    horde.cancel(request_id)
    status = horde.status(request_id)
    assert (status["processing"], status["waiting"], status["done"]) == (1, 0, False)
    horde.submit(key, job_id, "kept")
    status = horde.status(request_id)
    assert (status["done"], [generation["text"] for generation in status["generations"]]) == (
        True,
        ["kept"],
    )


def test_a_cancel_of_a_finished_or_faulted_request_keeps_its_end(
    horde: TextHorde, key: str
) -> None:
    finished = horde.queue()
    horde.submit(key, horde.take_job(key))
    faulted = horde.queue()
    for _ in range(3):
        horde.fault(key, horde.take_job(key))
    for request_id, outcome in ((finished, "completed"), (faulted, "faulted")):
        assert horde.cancel(request_id).status_code == 200
        assert get_request(request_id).terminal_outcome == outcome


def test_a_cancel_of_a_waiting_request_ends_its_hold(horde: TextHorde, key: str) -> None:
    horde.take(key)
    change_worker("a worker", speed=10.0)
    request_id = horde.queue(make_user(kudos=1000)[1], slow_workers=False)
    assert [is_active for _, is_active in list_holds()] == [True]
    horde.cancel(request_id)
    assert [is_active for _, is_active in list_holds()] == [False]


# Faulted


def test_nothing_waits_of_a_faulted_request(horde: TextHorde, key: str) -> None:
    """Whether its generations were given back or not."""
    request_id = horde.queue(params={"n": 4})
    assert horde.status(request_id)["waiting"] == 4
    for _ in range(3):
        horde.fault(key, horde.take_job(key))
    assert (get_request(request_id).n, horde.status(request_id)["waiting"]) == (4, 0)
    change_request(request_id, n=0)
    assert horde.status(request_id)["waiting"] == 0


@pytest.mark.parametrize("ended", [{"faulted": True}, {"terminal_outcome": "cancelled"}])
def test_nothing_waits_of_a_request_that_has_ended(horde: TextHorde, ended: dict[str, Any]) -> None:
    request_id = horde.queue(params={"n": 2})
    change_request(request_id, **ended)
    status = horde.status(request_id)
    assert (status["waiting"], status["queue_position"], status["wait_time"]) == (0, 0, 0)


def test_a_faulted_request_is_done_and_keeps_its_results(horde: TextHorde, key: str) -> None:
    request_id = horde.queue(params={"n": 4})
    horde.submit(key, horde.take_job(key), "the one")
    for _ in range(3):
        horde.fault(key, horde.take_job(key))
    status = horde.status(request_id)
    assert (status["faulted"], status["done"], status["is_possible"], status["queue_position"]) == (
        True,
        True,
        False,
        0,
    )
    assert (status["wait_time"], status["restarted"], status["finished"]) == (0, 3, 1)
    assert [generation["text"] for generation in status["generations"]] == ["the one"]
    change_request(request_id, expiry=minutes_ago(1))
    assert refused(horde.cancel(request_id)) == (404, "RequestNotFound")
