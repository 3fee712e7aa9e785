# SPDX-License-Identifier: AGPL-3.0-or-later
"""Streams through a real front, API and Redis, with scripted workers. Numbers are those of the
front's checklist.
"""

import json
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from devtools.services import ServiceAddresses
from horde.oai.mapping import build_system_fingerprint
from tests.integration._fake_chat_worker import MODEL, Body, build_call, build_tool, start_anew
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    FrontStack,
    build_body,
    build_client,
    run_front_stack,
    wait_until,
)
from tests.integration.front_streams import OpenStream, list_request_ids, post_progress
from tests.integration.instruments import Counting

CHUNK_KEYS = {"id", "object", "created", "model", "choices", "system_fingerprint"}
STREAMS = "horde.oai.streams"


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(
        service_urls, "front_streams", redis_url=f"{service_urls.redis_url}/7"
    ) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()
    stack.horde.take_nothing()


def open_stream(stack: FrontStack, **changes: Any) -> tuple[OpenStream, Body]:
    """A stream and the job behind it."""
    stream = OpenStream(stack, **changes)
    return stream, stack.await_job()


def stream_reply(
    stack: FrontStack, content: str | None = "Blue.", *, reply: Body | None = None, **changes: Any
) -> OpenStream:
    """The finished stream of a worker that posts nothing."""
    stream, job = open_stream(stack, **changes)
    with stream:
        assert stack.horde.reply(job["id"], content, **(reply or {})).status_code == 200
        return stream.finish()


def is_cancelled(stack: FrontStack, request_id: str) -> bool:
    """Whether the native request has ended without a reply."""
    answer = stack.horde.get(f"/generate/chat/status/{request_id}")
    return answer.status_code == 404 or (bool(answer.json["done"]) and answer.json["finished"] == 0)


def read_outcome(counting: Counting) -> str:
    """How the one stream ended; it is counted after its last byte."""
    ((attributes, count),) = wait_until(counting.read)
    assert count == 1
    return str(attributes["outcome"])


# The frame


def test_57_a_stream_begins_with_the_role_and_ends_with_done(stack: FrontStack) -> None:
    stream = stream_reply(stack)
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["cache-control"] == "no-cache"
    assert stream.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in stream.headers
    assert stream.headers["x-request-id"].startswith("req_")
    assert f"chatcmpl-{stream.headers['x-horde-request-id']}" == stream.chunks[0]["id"]
    assert stream.deltas == [{"role": "assistant", "content": ""}, {"content": "Blue."}, {}]
    # A blank line behind each of the four events, and nothing else.
    assert stream.lines[1::2] == [""] * 4


def test_58_every_chunk_belongs_to_one_completion(stack: FrontStack) -> None:
    stream, job = open_stream(stack, stream_options={"include_usage": True})
    with stream:
        post_progress(stack, job["id"], "Bl", "ue")
        stack.horde.reply(job["id"], "Blue.")
        chunks = stream.finish().chunks
    assert {
        (chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks
    } == {(chunks[0]["id"], "chat.completion.chunk", chunks[0]["created"], MODEL)}
    assert abs(chunks[0]["created"] - time.time()) < 60


@pytest.mark.parametrize("options", [..., None, {"include_usage": False}, {}])
def test_59_usage_is_not_there_unless_it_was_asked_for(stack: FrontStack, options: Any) -> None:
    stream = stream_reply(stack, stream_options=options)
    assert all(CHUNK_KEYS <= set(chunk) <= CHUNK_KEYS | {"x_horde"} for chunk in stream.chunks)


def test_59_usage_comes_last_in_a_chunk_of_its_own(stack: FrontStack) -> None:
    counts = {"prompt_tokens": 21, "completion_tokens": 3, "reasoning_tokens": 1}
    stream = stream_reply(stack, reply=counts, stream_options={"include_usage": True})
    *others, last = stream.chunks
    assert all(chunk["usage"] is None for chunk in others)
    assert set(last) == CHUNK_KEYS | {"usage"}
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 21,
        "completion_tokens": 3,
        "total_tokens": 24,
        "completion_tokens_details": {"reasoning_tokens": 1},
    }


def test_60_only_the_finish_chunk_tells_of_the_horde(stack: FrontStack) -> None:
    stream = stream_reply(stack, reply={"finish_reason": "length", "native_finish_reason": "max"})
    *others, finish = stream.chunks
    assert all("x_horde" not in chunk for chunk in others)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in others)
    choice = {
        "index": 0,
        "delta": {},
        "finish_reason": "length",
        "native_finish_reason": "max",
        "logprobs": None,
    }
    assert finish["choices"] == [choice]
    assert finish["x_horde"]["request_id"] == stream.headers["x-horde-request-id"]
    fingerprint = build_system_fingerprint(finish["x_horde"]["worker_id"], MODEL)
    assert {chunk["system_fingerprint"] for chunk in stream.chunks} == {fingerprint}


# Progress


def test_61_progress_arrives_before_the_reply(stack: FrontStack) -> None:
    counting = Counting(STREAMS)
    stream, job = open_stream(stack)
    with stream:
        for seq, piece in enumerate(["One", ", two", ", three"], 1):
            post_progress(stack, job["id"], piece, start=seq)
            stream.await_text("One, two, three"[: sum(map(len, ["One", ", two", ", three"][:seq]))])
        assert "content" in stream.deltas[0]
        stack.horde.reply(job["id"], "One, two, three")
        stream.finish()
    assert stream.deltas[0] == {"role": "assistant", "content": ""}
    assert stream.join() == "One, two, three"
    assert read_outcome(counting) == "relayed"


def test_61_what_was_posted_before_anyone_read_is_relayed_too(stack: FrontStack) -> None:
    request_id, key = "", str(uuid4())
    with OpenStream(stack, horde={"operation_key": key}) as gone:
        job = stack.await_job()
        post_progress(stack, job["id"], "One", ", two")
        gone.await_text("One, two")
        request_id = gone.headers["x-horde-request-id"]
    with OpenStream(stack, horde={"operation_key": key}) as stream:
        stream.await_text("One, two")
        assert stream.headers["x-horde-request-id"] == request_id
        stack.horde.reply(job["id"], "One, two.")
        assert stream.finish().join() == "One, two."


@pytest.mark.parametrize("content", ["Blue.", ""])
def test_62_a_worker_that_posts_nothing_is_ordinary(stack: FrontStack, content: str) -> None:
    counting = Counting(STREAMS)
    stream = stream_reply(stack, content)
    assert stream.deltas == [
        {"role": "assistant", "content": ""},
        *([{"content": content}] if content else []),
        {},
    ]
    assert read_outcome(counting) == "whole"


@pytest.mark.parametrize(
    "final",
    ["One, two.", "One", "One, tw", ""],
    ids=["63_more", "64_less", "63_equal", "64_nothing"],
)
def test_63_and_64_the_reply_completes_what_was_sent(stack: FrontStack, final: str) -> None:
    stream, job = open_stream(stack)
    with stream:
        post_progress(stack, job["id"], "One", ", tw")
        stream.await_text("One, tw")
        stack.horde.reply(job["id"], final)
        stream.finish()
    assert stream.join() == ("One, two." if final == "One, two." else "One, tw")
    assert stream.chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_65_a_reply_that_contradicts_the_progress_breaks_off(stack: FrontStack) -> None:
    counting = Counting(STREAMS)
    stream, job = open_stream(stack)
    with stream:
        post_progress(stack, job["id"], "Blue")
        stream.await_text("Blue")
        stack.horde.reply(job["id"], "Red.")
        error = stream.finish_with_error()
    assert (error["type"], error["param"], error["code"]) == (
        "server_error",
        None,
        "stream_diverged",
    )
    request_id = error["metadata"]["request_id"]
    assert stack.horde.status(request_id)["generations"][0]["message"]["content"] == "Red."
    assert read_outcome(counting) == "diverged"


def test_66_reasoning_arrives_before_content(stack: FrontStack) -> None:
    stream, job = open_stream(stack)
    with stream:
        stack.horde.post_progress(job["id"], 1, None, reasoning="Let me")
        stream.await_text("Let me", "reasoning_content")
        stack.horde.post_progress(job["id"], 2, "Bl", reasoning=" think")
        stream.await_text("Bl")
        stack.horde.reply(job["id"], "Blue.", reasoning_content="Let me think.")
        stream.finish()
    assert stream.deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me"},
        {"reasoning_content": " think"},
        {"content": "Bl"},
        {"reasoning_content": "."},
        {"content": "ue."},
        {},
    ]


def test_66_hidden_reasoning_does_not_arrive(stack: FrontStack) -> None:
    stream, job = open_stream(stack, horde={"include_reasoning": False})
    with stream:
        stack.horde.post_progress(job["id"], 1, None, reasoning="Let me")
        stack.horde.post_progress(job["id"], 2, "Bl")
        stream.await_text("Bl")
        stack.horde.reply(job["id"], "Blue.", reasoning_content="Let me think.")
        stream.finish()
    assert "reasoning_content" not in str(stream.lines)
    assert stream.join() == "Blue."


def test_67_tool_calls_arrive_whole_with_their_index(stack: FrontStack) -> None:
    tools = [build_tool()]
    calls = [build_call(), build_call(call_id="call_2", arguments='{"city":"Paris"}')]
    stack.horde.take_nothing(chat_features=["prompt_overflow_refused", "tools"])
    with OpenStream(stack, tools=tools) as stream:
        job = stack.await_job(chat_features=["prompt_overflow_refused", "tools"])
        assert (
            stack.horde.reply(
                job["id"], None, tool_calls=calls, finish_reason="tool_calls"
            ).status_code
            == 200
        )
        stream.finish()
    assert stream.deltas == [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, **calls[0]}]},
        {"tool_calls": [{"index": 1, **calls[1]}]},
        {},
    ]
    assert stream.chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


# Other attempts


def fault_and_take(stack: FrontStack, job: Body) -> Body:
    """The job of a second worker after the first has failed."""
    assert stack.horde.fault(job["id"]).status_code == 200
    return stack.await_job(name="second worker")


def test_68_a_fault_before_any_text_is_invisible(stack: FrontStack) -> None:
    stream, job = open_stream(stack)
    with stream:
        second = fault_and_take(stack, job)
        post_progress(stack, second["id"], "Bl")
        stream.await_text("Bl")
        stack.horde.reply(second["id"], "Blue.")
        stream.finish()
    assert stream.deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Bl"},
        {"content": "ue."},
        {},
    ]
    assert stream.chunks[-1]["x_horde"]["worker_name"] == "second worker"


def test_69_a_second_attempt_with_the_same_start_goes_on(stack: FrontStack) -> None:
    counting = Counting(STREAMS)
    stream, job = open_stream(stack)
    with stream:
        post_progress(stack, job["id"], "One, two")
        stream.await_text("One, two")
        second = fault_and_take(stack, job)
        post_progress(stack, second["id"], "One,", " two, three", ", four")
        stream.await_text("One, two, three, four")
        stack.horde.reply(second["id"], "One, two, three, four.")
        stream.finish()
    assert stream.join() == "One, two, three, four."
    fingerprints = [chunk["system_fingerprint"] for chunk in stream.chunks]
    assert fingerprints[0] == fingerprints[1]
    assert set(fingerprints[2:]) == {
        build_system_fingerprint(stream.chunks[-1]["x_horde"]["worker_id"], MODEL)
    }
    assert fingerprints[1] != fingerprints[2]
    assert read_outcome(counting) == "caught_up"


def test_69_a_second_attempt_that_posts_nothing_is_compared_by_its_reply(stack: FrontStack) -> None:
    stream, job = open_stream(stack)
    with stream:
        post_progress(stack, job["id"], "One, two")
        stream.await_text("One, two")
        second = fault_and_take(stack, job)
        stack.horde.reply(second["id"], "One, two, three.")
        assert stream.finish().join() == "One, two, three."


def test_70_a_different_second_attempt_breaks_off_and_is_cancelled(stack: FrontStack) -> None:
    counting = Counting(STREAMS)
    stream, job = open_stream(stack)
    with stream:
        post_progress(stack, job["id"], "One, two")
        stream.await_text("One, two")
        second = fault_and_take(stack, job)
        post_progress(stack, second["id"], "One, ")
        post_progress(stack, second["id"], "three", start=2)
        error = stream.finish_with_error()
    assert (error["type"], error["code"]) == ("server_error", "generation_restarted")
    assert is_cancelled(stack, error["metadata"]["request_id"])
    assert read_outcome(counting) == "restarted"


def test_70_a_shorter_reply_of_a_silent_second_attempt_breaks_off(stack: FrontStack) -> None:
    stream, job = open_stream(stack)
    with stream:
        post_progress(stack, job["id"], "One, two")
        stream.await_text("One, two")
        second = fault_and_take(stack, job)
        stack.horde.reply(second["id"], "One")
        assert stream.finish_with_error()["code"] == "generation_restarted"


def test_a_request_that_faults_altogether_after_text_ends_with_an_error(stack: FrontStack) -> None:
    counting = Counting(STREAMS)
    errors = Counting("horde.oai.errors")
    stream, job = open_stream(stack)
    with stream:
        post_progress(stack, job["id"], "Blue")
        stream.await_text("Blue")
        for name in ("second worker", "third worker"):
            stack.horde.fault(job["id"])
            job = stack.await_job(name=name)
        stack.horde.fault(job["id"])
        error = stream.finish_with_error()
    assert error["code"] == "generation_failed"
    assert error["metadata"]["request_id"] == stream.headers["x-horde-request-id"]
    assert read_outcome(counting) == "failed"
    assert errors.read() == [({"code": "generation_failed", "phase": "stream", "form": "chat"}, 1)]


# Refusals


def test_72_a_stream_refused_at_submit_is_an_http_error(stack: FrontStack) -> None:
    with OpenStream(stack, tool_choice="required") as stream:
        status, error = stream.refuse()
    assert (status, error["type"]) == (400, "invalid_request_error")
    with OpenStream(stack, model="nobody/knows-it") as stream:
        assert stream.refuse()[0] == 404


def test_72_a_stream_refused_after_it_was_queued_is_an_http_error(stack: FrontStack) -> None:
    with OpenStream(stack, reasoning_effort="low") as stream:
        status, error = stream.refuse()
    assert (status, error["code"]) == (404, "no_worker_supports_features")
    assert stream.headers["x-horde-request-id"] == error["metadata"]["request_id"]
    assert is_cancelled(stack, error["metadata"]["request_id"])


def test_a_failure_before_anything_was_sent_keeps_its_status(stack: FrontStack) -> None:
    stream, job = open_stream(stack)
    with stream:
        for name in ("second worker", "third worker"):
            stack.horde.fault(job["id"])
            job = stack.await_job(name=name)
        stack.horde.fault(job["id"])
        status, error = stream.refuse()
    assert (status, error["code"]) == (502, "generation_failed")
    assert stream.headers["x-should-retry"] == "false"


# Clients that come back, and those that go


def test_76_a_repeated_call_is_attached_to_the_same_reply(stack: FrontStack) -> None:
    key = str(uuid4())
    with OpenStream(stack, headers={"idempotency-key": key}) as first:
        job = stack.await_job()
        post_progress(stack, job["id"], "Blue")
        first.await_text("Blue")
    with OpenStream(stack, headers={"idempotency-key": key}) as second:
        second.await_text("Blue")
        stack.horde.reply(job["id"], "Blue.")
        second.finish()
    assert second.chunks[0]["id"] == first.chunks[0]["id"]
    with OpenStream(stack, headers={"idempotency-key": key}) as third:
        assert third.finish().join() == "Blue."  # all at once, since the reply is there


def test_76_a_stream_of_a_request_sent_without_one_brings_the_reply_at_its_end(
    stack: FrontStack,
) -> None:
    key = str(uuid4())
    waiting = stack.ask(horde={"operation_key": key})
    job = stack.await_job()
    assert "stream_progress" not in job["payload"]
    with OpenStream(stack, horde={"operation_key": key}) as stream:
        stack.horde.reply(job["id"], "Blue.")
        stream.finish()
    assert stream.join() == "Blue."
    assert waiting.result(PATIENCE_SECONDS).json()["id"] == stream.chunks[0]["id"]


def test_75_hanging_up_while_queued_cancels(stack: FrontStack) -> None:
    with OpenStream(stack):
        (request_id,) = wait_until(list_request_ids)
    wait_until(lambda: is_cancelled(stack, request_id), 2.5)


def test_75_hanging_up_while_text_flows_cancels_and_stops_the_worker(stack: FrontStack) -> None:
    stream, job = open_stream(stack)
    post_progress(stack, job["id"], "One")
    stream.await_text("One")
    request_id = stream.headers["x-horde-request-id"]
    stream.hang_up()
    wait_until(lambda: is_cancelled(stack, request_id), 2.5)
    assert stack.horde.post_progress(job["id"], 2, ", two").json == {
        "accepted_seq": 2,
        "cancelled": True,
    }


def test_a_cancel_from_outside_ends_the_stream(stack: FrontStack) -> None:
    stream, job = open_stream(stack)
    with stream:
        post_progress(stack, job["id"], "One")
        stream.await_text("One")
        stack.horde.cancel(stream.headers["x-horde-request-id"])
        error = stream.finish_with_error()
    assert (error["code"], error["metadata"]["rc"]) == ("no_generation", "ChatRequestNoGeneration")


# Text


def test_95_text_survives_a_client_that_splits_lines_wherever_python_does(
    stack: FrontStack,
) -> None:
    text = 'Zeile eins\nzwei\r\ndrei\u2028vier\u2029fünf\u0085sechs\x0b\x1c 🫐 \\u2028 "“'
    key = {"authorization": f"Bearer {stack.horde.requester_key}"}
    lines: list[str] = []

    def read() -> None:
        url, body = f"{stack.url}/v1/chat/completions", build_body(stream=True)
        with (
            build_client(stack.url) as client,
            client.stream("POST", url, json=body, headers=key) as answer,
        ):
            lines.extend("".join(answer.iter_text()).splitlines())

    reading = stack.threads.submit(read)
    job = stack.await_job()
    post_progress(stack, job["id"], text[:9], text[9:25])
    stack.horde.reply(job["id"], text)
    reading.result(PATIENCE_SECONDS)
    assert all(line.startswith("data: ") for line in lines[::2])
    assert not any(lines[1::2])
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines[:-2:2]]
    assert "".join(body["choices"][0]["delta"].get("content", "") for body in bodies) == text
