# SPDX-License-Identifier: AGPL-3.0-or-later
"""Streams while time passes and things break: silence, budgets, slow readers, a lost Redis, a
restarted API.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from devtools.processes import find_free_ports
from devtools.services import ServiceAddresses
from horde.oai import chat_form, streaming
from horde.oai import hub as hub_module
from tests.integration._fake_chat_worker import Body, start_anew
from tests.integration.chat_front import (
    FrontStack,
    build_client,
    run_front,
    run_front_stack,
    run_native,
    wait_until,
)
from tests.integration.front_streams import OpenStream, list_request_ids, post_progress
from tests.integration.instruments import Counting
from tests.integration.own_redis import add_entry
from tests.integration.tcp_gate import TcpGate


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(
        service_urls,
        "front_stream_troubles",
        redis_url=f"{service_urls.redis_url}/7",
        stream_open_seconds=0.3,
        keepalive_seconds=0.2,
    ) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()
    stack.horde.take_nothing()


@pytest.fixture
def redis(stack: FrontStack) -> Iterator[Redis]:
    assert stack.config.redis_url is not None
    with Redis.from_url(stack.config.redis_url) as client:
        yield client


@contextmanager
def another_front(stack: FrontStack, **settings: Any) -> Iterator[FrontStack]:
    """A second front before the same API."""
    config = replace(stack.config, **settings)
    with run_front(config) as url, build_client(url) as client:
        yield replace(stack, url=url, config=config, client=client)


def open_stream(stack: FrontStack, **changes: Any) -> tuple[OpenStream, Body]:
    stream = OpenStream(stack, **changes)
    return stream, stack.await_job()


def fail_job(stack: FrontStack, job: Body) -> None:
    """Let a request fault for good."""
    for name in ("second worker", "third worker"):
        stack.horde.fault(job["id"])
        job = stack.await_job(name=name)
    stack.horde.fault(job["id"])


# Silence


def test_71_silence_is_filled_with_comments(stack: FrontStack) -> None:
    stream, job = open_stream(stack)
    with stream:
        stream.await_that(lambda opened: len(opened.comments) >= 3)
        # No chunk before there is a reply to describe.
        assert set(stream.lines) == {": keep-alive", ""}
        assert stream.lines[1::2] == [""] * len(stream.comments)
        post_progress(stack, job["id"], "Bl")
        stream.await_text("Bl")
        count = len(stream.comments)
        stream.await_that(lambda opened: len(opened.comments) > count)
        stack.horde.reply(job["id"], "Blue.")
        assert stream.finish().join() == "Blue."


def test_a_stream_opens_before_it_has_something_to_send(stack: FrontStack) -> None:
    with OpenStream(stack) as stream:
        stream.await_that(lambda opened: opened.status is not None)
        assert stream.status == 200
        assert stream.lines[:1] in ([], [": keep-alive"])


def test_a_failure_in_an_open_stream_without_text_is_an_event(stack: FrontStack) -> None:
    stream, job = open_stream(stack)
    with stream:
        stream.await_that(lambda opened: opened.comments)
        fail_job(stack, job)
        assert stream.finish_with_error()["code"] == "generation_failed"
    assert stream.chunks == []


def test_a_defect_in_an_open_stream_is_an_event_that_names_the_request(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(chat_form, "build_delta_events", fail)
    stream, job = open_stream(stack)
    with stream:
        stream.await_that(lambda opened: opened.comments)
        post_progress(stack, job["id"], "Blue")
        error = stream.finish_with_error()
    request_id = stream.headers["x-horde-request-id"]
    assert (error["code"], error["metadata"]) == ("internal_error", {"request_id": request_id})
    wait_until(lambda: stack.horde.status(request_id)["done"])


def test_a_stream_does_not_open_before_its_first_status_was_judged(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        held_back(stack, monkeypatch, "GET") as let_go,
        OpenStream(stack, reasoning_effort="low") as stream,
    ):
        time.sleep(0.6)  # past the moment at which it would open
        assert stream.status is None
        let_go()
        assert stream.refuse()[0] == 404


@contextmanager
def held_back(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch, method: str
) -> Iterator[Callable[[], None]]:
    """Hold the API's answers to status calls with a method back until the yielded function is
    called.
    """
    free = threading.Event()

    def wait(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] == method and "/chat/status/" in environ["PATH_INFO"]:
            free.wait(60)
        return inner(environ, start_response)

    inner = stack.horde.app.wsgi_app
    monkeypatch.setattr(stack.horde.app, "wsgi_app", wait)
    try:
        yield free.set
    finally:
        free.set()


# Budget and end of the process


def test_the_budget_ends_a_stream_while_text_flows(stack: FrontStack) -> None:
    with another_front(stack, stream_budget_seconds=1.0) as short:
        stream, job = open_stream(short)
        with stream:
            post_progress(stack, job["id"], "One")
            stream.await_text("One")
            error = stream.finish_with_error()
    assert (error["type"], error["code"]) == ("timeout_error", "wait_timeout")
    assert stack.horde.post_progress(job["id"], 2, ", two").json["cancelled"] is True


def test_a_front_that_ends_tells_its_open_streams(stack: FrontStack) -> None:
    with another_front(stack) as ending:
        stream, job = open_stream(ending)
        post_progress(stack, job["id"], "One")
        stream.await_text("One")
    with stream:
        error = stream.finish_with_error()
    assert (error["type"], error["code"]) == ("server_error", "front_shutting_down")
    assert stack.horde.post_progress(job["id"], 2, ", two").json["cancelled"] is True


# Clients


def test_75_hanging_up_on_a_silent_open_stream_cancels(stack: FrontStack) -> None:
    counting = Counting("horde.oai.streams")
    stream, job = open_stream(stack)
    stream.await_that(lambda opened: opened.comments)
    stream.hang_up()
    wait_until(lambda: stack.horde.post_progress(job["id"], 1, "One").json["cancelled"], 2.5)
    assert wait_until(counting.read) == [({"outcome": "disconnected", "form": "chat"}, 1)]


def flood(redis: Redis, request_id: str) -> str:
    """Far more text than the sockets between a front and its client hold; all of it."""
    text = "word " * 8_000
    for seq in range(1, 151):
        add_entry(redis, request_id, seq, text, gen="flood")
    return text * 150


def test_a_client_that_does_not_read_holds_up_nobody_and_gets_it_all_later(
    stack: FrontStack, redis: Redis
) -> None:
    with another_front(stack, keepalive_seconds=60.0) as patient, OpenStream(patient) as slow:
        slow.stop_reading()
        slow_job = stack.await_job()
        whole = flood(redis, list_request_ids()[0])
        other, job = open_stream(patient)
        with other:
            for seq in range(1, 5):
                post_progress(stack, job["id"], "x", start=seq)
                other.await_text("x" * seq)
            stack.horde.reply(job["id"], "xxxx.")
            assert other.finish().join() == "xxxx."
        slow.read_on()
        slow.await_that(lambda opened: sum(map(len, opened.lines)) > len(whole))
        stack.horde.reply(slow_job["id"], "Not that.")
        # The flood names another worker.
        assert slow.finish_with_error()["code"] == "generation_restarted"
    assert slow.join() == whole


def test_a_client_that_never_reads_is_given_up_after_the_budget(
    stack: FrontStack, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "LAST_EVENTS_SECONDS", 0.2)
    counting = Counting("horde.oai.streams")
    with another_front(stack, stream_budget_seconds=3.0) as short:
        with OpenStream(short) as stream:
            stream.stop_reading()
            job = stack.await_job()
            flood(redis, list_request_ids()[0])
            assert wait_until(counting.read) == [({"outcome": "disconnected", "form": "chat"}, 1)]
            stream.reset()
        time.sleep(0.3)  # the server drops what it could not send when it hears of the end
    assert stack.horde.post_progress(job["id"], 1, "One").json["cancelled"]


# Redis


@contextmanager
def gated_front(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FrontStack, TcpGate]]:
    """A front whose way to Redis can be cut."""
    monkeypatch.setattr(hub_module, "RETRY_SECONDS", 0.1)
    assert stack.config.redis_url is not None
    gate = TcpGate(stack.config.redis_url)
    address = stack.config.redis_url.rpartition("@")
    try:
        with another_front(
            stack, redis_url=f"{address[0]}@127.0.0.1:{gate.port}/7", poll_seconds=0.5
        ) as front:
            yield front, gate
    finally:
        gate.close()


def test_a_stream_survives_the_loss_of_redis(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated_front(stack, monkeypatch) as (front, gate):
        stream, job = open_stream(front)
        with stream:
            post_progress(stack, job["id"], "One")
            stream.await_text("One")
            gate.close()
            post_progress(stack, job["id"], ", two", start=2)
            stack.horde.reply(job["id"], "One, two.")
            assert stream.finish().join() == "One, two."


def test_a_stream_goes_on_live_when_redis_is_back(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated_front(stack, monkeypatch) as (front, gate):
        stream, job = open_stream(front)
        with stream:
            post_progress(stack, job["id"], "One")
            stream.await_text("One")
            gate.close()
            post_progress(stack, job["id"], ", two", start=2)
            gate.open()
            stream.await_text("One, two")
            post_progress(stack, job["id"], ", three", start=3)
            stream.await_text("One, two, three")
            stack.horde.reply(job["id"], "One, two, three.")
            assert stream.finish().join() == "One, two, three."


def test_a_stream_begun_without_redis_becomes_live_with_it(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated_front(stack, monkeypatch) as (front, gate):
        gate.close()
        stream, job = open_stream(front)
        with stream:
            post_progress(stack, job["id"], "One")
            stream.await_that(lambda opened: opened.comments)
            gate.open()
            stream.await_text("One")
            stack.horde.reply(job["id"], "One.")
            assert stream.finish().join() == "One."


@pytest.mark.parametrize("has_failed", [False, True])
def test_87_without_redis_everything_but_live_text_works(
    stack: FrontStack, has_failed: bool
) -> None:
    with another_front(stack, redis_url=None, poll_seconds=0.1) as polling:
        stream, job = open_stream(polling)
        with stream:
            post_progress(stack, job["id"], "One")
            stream.await_that(lambda opened: len(opened.comments) >= 2)
            assert stream.chunks == []
            if has_failed:
                fail_job(stack, job)
                assert stream.finish_with_error()["code"] == "generation_failed"
            else:
                stack.horde.reply(job["id"], "One, two.")
                assert stream.finish().join() == "One, two."
        assert polling.call("GET", "/health/ready").json()["redis"] is False


# The API


def test_streams_survive_a_restart_of_the_api(stack: FrontStack) -> None:
    port = find_free_ports(1)[0]
    native_url = f"http://127.0.0.1:{port}/api"
    with (
        run_native_once(stack, port) as stop,
        another_front(stack, native_url=native_url, poll_seconds=0.5) as front,
    ):
        stream, job = open_stream(front)
        with stream:
            post_progress(stack, job["id"], "One")
            stream.await_text("One")
            stop()
            # Its signal is heard; the status cannot be read.
            stack.horde.reply(job["id"], "One, two.")
            count = len(stream.comments)
            stream.await_that(lambda opened: len(opened.comments) > count + 2)
            with run_native(stack.horde.app, port):
                assert stream.finish().join() == "One, two."


@contextmanager
def run_native_once(stack: FrontStack, port: int) -> Iterator[Callable[[], None]]:
    """An API that can be stopped before the end of the block."""
    running = run_native(stack.horde.app, port)
    running.__enter__()
    is_running = True

    def stop() -> None:
        nonlocal is_running
        if is_running:
            is_running = False
            running.__exit__(None, None, None)

    try:
        yield stop
    finally:
        stop()
