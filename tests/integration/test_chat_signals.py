# SPDX-License-Identifier: AGPL-3.0-or-later
"""Completion signals on a real Redis, read by a subscriber of the test's own."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from redis import Redis
from sqlalchemy import update

from devtools.services import ServiceAddresses
from horde import chat_signal, redis_ctrl
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.clock import utcnow
from horde.database import threads
from horde.database.stats import stop_waiting_requests
from horde.db import transaction
from tests.integration._fake_chat_worker import MODEL, ChatHorde, chat_horde, start_anew
from tests.integration.instruments import Counting
from tests.integration.rows import find_request, make_job, make_worker

QUIET_SECONDS = 0.3


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "chat_signals") as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> ChatHorde:
    start_anew()
    return module_horde


class Heard(list[dict[str, Any]]):
    """Messages of one request, filled when the block ends."""

    @property
    def events(self) -> list[tuple[str, int]]:
        return [(message["event"], message["generations"]) for message in self]


@pytest.fixture
def subscriber(service_urls: ServiceAddresses) -> Iterator[Redis]:
    # Any database hears them.
    with Redis.from_url(f"{service_urls.redis_url}/0", decode_responses=True) as client:
        yield client


@contextmanager
def listening(subscriber: Redis, request_id: str) -> Iterator[Heard]:
    """Hear what is published of a request while the block runs."""
    heard = Heard()
    with subscriber.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(f"horde:chat:{request_id}")
        channel.get_message(timeout=1)
        yield heard
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < QUIET_SECONDS:
            message = channel.get_message(timeout=0.1)
            if message is not None:
                heard.append(json.loads(message["data"]))
                quiet_since = time.monotonic()
    assert all(message["id"] == request_id for message in heard)


def test_a_reply_is_told_and_then_the_end(horde: ChatHorde, subscriber: Redis) -> None:
    request_id, job = horde.serve()
    with listening(subscriber, request_id) as heard:
        assert horde.reply(job["id"], "MARKER-7f3a").status_code == 200
    assert heard.events == [("generation", 1), ("done", 1)]
    assert all(set(message) == {"id", "event", "generations"} for message in heard)
    assert "MARKER-7f3a" not in str(heard)


@pytest.mark.parametrize("way", ["reply", "fault", "cancel", "expiry"])
def test_replies_to_fakes_are_in_no_count(horde: ChatHorde, subscriber: Redis, way: str) -> None:
    request_id, job = horde.serve()
    worker_id = make_worker(horde.owner_id)
    make_job(UUID(request_id), worker_id, fake=True, generation="nobody's")
    for _ in range(2 if way == "fault" else 0):
        make_job(UUID(request_id), worker_id, faulted=True)
    with listening(subscriber, request_id) as heard:
        if way == "reply":
            assert horde.reply(job["id"]).status_code == 200
        elif way == "fault":
            assert horde.fault(job["id"]).status_code == 200
        elif way == "cancel":
            assert horde.cancel(request_id).status_code == 200
        else:
            with transaction() as session:
                session.execute(
                    update(WaitingPrompt).values(expiry=utcnow() - timedelta(seconds=1))
                )
            threads.check_waiting_prompts()
    expected = {
        "reply": [("generation", 1), ("done", 1)],
        "fault": [("faulted", 0)],
        "cancel": [("cancelled", 0)],
        "expiry": [("faulted", 0)],
    }
    assert heard.events == expected[way]


def test_the_end_of_a_fake_is_not_told(horde: ChatHorde, subscriber: Redis) -> None:
    horde.take_nothing()
    request_id = horde.queue(stream=True)
    worker_id = make_worker(horde.owner_id)
    replied, *faulted = [
        str(make_job(UUID(request_id), worker_id, fake=True, model=MODEL, assigned_model=MODEL))
        for _ in range(4)
    ]
    with listening(subscriber, request_id) as heard:
        assert horde.reply(replied).json["reward"] > 0
        for job_id in faulted:
            assert horde.fault(job_id).json == {"reward": 0.0}
        threads.check_waiting_prompts()
    assert heard == []
    status = horde.status(request_id)
    assert (status["done"], status["faulted"], status["waiting"], status["finished"]) == (
        False,
        False,
        1,
        0,
    )


def test_a_refused_reply_and_a_first_fault_tell_nothing(
    horde: ChatHorde, subscriber: Redis
) -> None:
    request_id, job = horde.serve()
    with listening(subscriber, request_id) as heard:
        assert horde.reply(job["id"], finish_reason="eos").status_code == 400
        assert horde.fault(job["id"]).status_code == 200
    assert heard == []


def test_a_cancel_is_told_once(horde: ChatHorde, subscriber: Redis) -> None:
    horde.take_nothing()
    request_id = horde.queue()
    with listening(subscriber, request_id) as heard:
        horde.cancel(request_id)
        horde.cancel(request_id)
    assert heard.events == [("cancelled", 0)]


def test_a_reply_after_a_cancel_ends_the_request(horde: ChatHorde, subscriber: Redis) -> None:
    request_id, job = horde.serve()
    with listening(subscriber, request_id) as heard:
        for _ in range(2):  # the job is still in flight at the second
            horde.cancel(request_id)
        assert horde.reply(job["id"]).status_code == 200
        horde.cancel(request_id)
    assert heard.events == [("cancelled", 0), ("generation", 1), ("done", 1)]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (
            "prompt_overflow",
            {
                "fault_reason": "The worker could not fit the prompt into its context.",
                "fault_rc": "ChatWorkerFault",
            },
        ),
        ("disk full on alice-pc", {}),
        (None, {}),
    ],
)
def test_the_third_fault_is_told_with_its_reason(
    horde: ChatHorde, subscriber: Redis, reason: str | None, expected: dict[str, str]
) -> None:
    request_id, job = horde.serve()
    for _ in range(2):
        assert horde.fault(job["id"], fault_reason=reason).status_code == 200
        job = horde.take()
    with listening(subscriber, request_id) as heard:
        assert horde.fault(job["id"], fault_reason=reason).status_code == 200
        threads.check_waiting_prompts()
    assert heard == [{"id": request_id, "event": "faulted", "generations": 0} | expected]


def test_a_third_fault_after_a_cancel_leaves_the_request_cancelled(
    horde: ChatHorde, subscriber: Redis
) -> None:
    request_id, job = horde.serve()
    for _ in range(2):
        assert horde.fault(job["id"]).status_code == 200
        job = horde.take()
    with listening(subscriber, request_id) as heard:
        horde.cancel(request_id)
        assert horde.fault(job["id"]).status_code == 200
        threads.check_waiting_prompts()
    assert heard.events == [("cancelled", 0)]
    status = horde.status(request_id)
    assert (status["done"], status["faulted"], status["waiting"]) == (True, False, 0)


def test_the_third_lapsed_lease_is_told(horde: ChatHorde, subscriber: Redis) -> None:
    horde.take_nothing()
    request_id = horde.queue()
    with listening(subscriber, request_id) as heard:
        for _ in range(3):
            horde.take()
            with transaction() as session:
                session.execute(
                    update(TextProcessingGeneration).values(
                        start_time=utcnow() - timedelta(minutes=5)
                    )
                )
            threads.check_waiting_prompts()
    assert heard.events == [("faulted", 0)]
    assert horde.status(request_id)["faulted"]


def test_an_expiry_is_told_when_the_row_is_gone(horde: ChatHorde, subscriber: Redis) -> None:
    request_id, job = horde.serve()
    assert horde.reply(job["id"], finish_reason="eos").status_code == 400
    with transaction() as session:
        session.execute(update(WaitingPrompt).values(expiry=utcnow() - timedelta(seconds=1)))
    with listening(subscriber, request_id) as heard:
        threads.check_waiting_prompts()
        threads.check_waiting_prompts()
    assert heard.events == [("faulted", 0)]
    assert heard[0]["fault_rc"] == "ChatSubmitInvalid"
    gone = horde.get(f"/generate/chat/status/{request_id}").json
    assert (gone or {})["rc"] == "RequestNotFound"


def test_an_expiry_and_a_late_fault_are_committed_before_they_are_told(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is woken reads the state as it stays: 404, or a request that is faulted."""
    horde.take_nothing()
    expired, failing = horde.queue(), horde.queue()
    worker_id = make_worker(horde.owner_id)
    for _ in range(3):
        make_job(UUID(failing), worker_id, faulted=True)
    with transaction() as session:
        session.execute(
            update(WaitingPrompt)
            .where(WaitingPrompt.id == UUID(expired))
            .values(expiry=utcnow() - timedelta(seconds=1))
        )
    seen: dict[str, tuple[int, bool | None, bool]] = {}

    def look(_channel: str, message: dict[str, Any]) -> None:
        status = horde.get(f"/generate/chat/status/{message['id']}")
        is_stored = find_request(UUID(message["id"])) is not None
        seen[message["id"]] = (status.status_code, status.json.get("faulted"), is_stored)

    monkeypatch.setattr(chat_signal, "publish_chat_message", look)
    threads.check_waiting_prompts()
    assert seen == {expired: (404, None, False), failing: (200, True, True)}


def test_a_signal_that_is_lost_is_logged_and_counted(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise redis_ctrl.RedisUnavailable("left alone after an earlier failure")

    request_id, job = horde.serve()
    failures = Counting("horde.chat.signal_failures")
    with monkeypatch.context() as away:
        away.setattr(redis_ctrl, "call", fail)
        assert horde.reply(job["id"]).status_code == 200
    assert failures.read() == [({}, 2)]
    lost = [
        record.__dict__["channel"]
        for record in caplog.records
        if record.message == "horde.chat_signal.failed"
    ]
    assert lost == [f"horde:chat:{request_id}"] * 2


def test_a_finished_request_expires_silently(horde: ChatHorde, subscriber: Redis) -> None:
    request_id, job = horde.serve()
    assert horde.reply(job["id"]).status_code == 200
    with transaction() as session:
        session.execute(update(WaitingPrompt).values(expiry=utcnow() - timedelta(seconds=1)))
    with listening(subscriber, request_id) as heard:
        threads.check_waiting_prompts()
    assert heard == []


def test_progress_is_no_signal(horde: ChatHorde, subscriber: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    with listening(subscriber, request_id) as heard:
        assert horde.post_progress(job["id"]).status_code == 200
        assert horde.fault(job["id"]).status_code == 200
    assert heard == []


def test_a_settled_job_tells_of_the_cancel_alone(horde: ChatHorde, subscriber: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    with listening(subscriber, request_id) as heard:
        horde.cancel(request_id)
        assert (horde.reply(job["id"]).json or {})["rc"] == "AbortedGen"
        assert horde.fault(job["id"]).status_code == 200
        threads.check_waiting_prompts()
    assert heard.events == [("cancelled", 0)]


@pytest.mark.parametrize("way", ["submit", "fault", "cancel", "lapse"])
def test_the_stream_says_it_before_the_signal_does(
    horde: ChatHorde, subscriber: Redis, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Whoever is woken finds the lease gone or flagged, the end marked, and the rows as they
    stay.
    """
    request_id, job = horde.serve(stream=True)
    for _ in range(2):
        horde.fault(job["id"])
        job = horde.take()
    seen: list[tuple[str, bool, str | None, bool]] = []

    def look(_channel: str, message: dict[str, Any]) -> None:
        lease = f"horde:chat:lease:{job['id']}"
        entries = redis_ctrl.call(
            7, lambda client: client.xrange(f"horde:chat:stream:{request_id}")
        )
        has_ended = any(fields.get("ended") for _, fields in entries if fields["gen"] == job["id"])
        is_flagged = redis_ctrl.call(7, lambda client: client.hget(lease, "cancelled"))
        done = horde.status(request_id)["done"]
        assert done
        seen.append(
            (
                message["event"],
                has_ended,
                is_flagged,
                redis_ctrl.call(7, lambda client: bool(client.exists(lease))),
            )
        )

    monkeypatch.setattr(chat_signal, "publish_chat_message", look)
    if way == "submit":
        assert horde.reply(job["id"]).status_code == 200
    elif way == "fault":
        assert horde.fault(job["id"]).status_code == 200
    elif way == "cancel":
        assert horde.cancel(request_id).status_code == 200
    else:
        with transaction() as session:
            session.execute(
                update(TextProcessingGeneration).values(start_time=utcnow() - timedelta(minutes=5))
            )
        threads.check_waiting_prompts()
    assert (
        seen
        == {
            "submit": [("generation", False, None, False), ("done", False, None, False)],
            "fault": [("faulted", True, None, False)],
            "cancel": [("cancelled", True, "1", True)],
            "lapse": [("faulted", True, None, False)],
        }[way]
    )


def test_maintenance_lets_a_streamed_job_settle(horde: ChatHorde, subscriber: Redis) -> None:
    running, job = horde.serve(stream=True)
    waiting = horde.queue(stream=True)
    with listening(subscriber, waiting) as heard, transaction() as session:
        stopped = stop_waiting_requests(session, utcnow())
    assert [str(request.id) for request in stopped] == [waiting]
    assert heard == []  # the route tells of it, after this commit
    assert horde.post_progress(job["id"]).json == {"accepted_seq": 1, "cancelled": False}
    assert horde.reply(job["id"]).status_code == 200
    assert horde.status(running)["finished"] == 1
    assert horde.status(waiting)["done"]


def test_without_redis_everything_is_answered(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise redis_ctrl.RedisUnavailable("away")

    monkeypatch.setattr(redis_ctrl, "call", fail)
    horde.take_nothing()
    first, second = horde.queue(), horde.queue()
    job = horde.take()
    assert horde.reply(job["id"]).status_code == 200
    assert horde.cancel(second).status_code == 200
    assert horde.status(first)["done"]
