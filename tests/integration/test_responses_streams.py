# SPDX-License-Identifier: AGPL-3.0-or-later
"""Streams of `/v1/responses` with Redis: events in their order, the SDK's helper, and troubles.

Numbers are those of the form's checklist.
"""

from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest

from devtools.services import ServiceAddresses
from tests.integration._fake_chat_worker import MODEL, build_call, start_anew
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    FrontStack,
    run_front,
    run_front_stack,
    wait_until,
)
from tests.integration.front_streams import list_request_ids, post_progress
from tests.integration.responses_front import (
    TOOLS_DECLARED,
    ResponseStream,
    build_function,
    respond,
)

TEXT_EVENTS = [
    *("response.created", "response.in_progress", "response.output_item.added"),
    *("response.content_part.added", "response.output_text.delta", "response.output_text.done"),
    *("response.content_part.done", "response.output_item.done", "response.completed"),
]


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(
        service_urls,
        "responses_streams",
        redis_url=f"{service_urls.redis_url}/7",
        poll_seconds=1.0,
        no_worker_grace_seconds=2 * PATIENCE_SECONDS,
        stream_open_seconds=2 * PATIENCE_SECONDS,
    ) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


@pytest.fixture
def client(stack: FrontStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{stack.url}/v1", api_key=stack.horde.requester_key, max_retries=0
    ) as client:
        yield client


def test_51_to_53_a_text_is_told_event_by_event(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with ResponseStream(stack) as stream:
        stack.horde.reply(stack.await_job()["id"])
        stream.finish()
        assert stream.kinds == TEXT_EVENTS
        (native_id,) = list_request_ids()
        ids = {event["response"]["id"] for event in stream.events if "response" in event}
        assert ids == {f"resp_{native_id}"}
        assert stream.join() == stream.response["output"][0]["content"][0]["text"] == "Blue."
        assert "x_horde" not in stream.events[0]["response"]


def test_54_a_call_is_told_in_one_piece(stack: FrontStack) -> None:
    stack.horde.take_nothing(**TOOLS_DECLARED)
    with ResponseStream(stack, tools=[build_function()]) as stream:
        job = stack.await_job(**TOOLS_DECLARED)
        stack.horde.reply(job["id"], None, tool_calls=[build_call()], finish_reason="tool_calls")
        stream.finish()
    told = [event for event in stream.events if "item_id" in event or "item" in event]
    assert [event["type"].removeprefix("response.") for event in told] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    ids = {event.get("item_id") or event["item"]["id"] for event in told}
    assert len(ids) == 1
    assert told[0]["item"]["arguments"] == ""
    assert told[1]["delta"] == told[3]["item"]["arguments"] == '{"city":"Oslo"}'


def test_55_progress_arrives_before_the_reply(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with ResponseStream(stack) as stream:
        job = stack.await_job()
        post_progress(stack, job["id"], "Bl", "ue")
        stream.await_text("Blue")
        stack.horde.reply(job["id"], "Blue, or green.")
        stream.finish()
    assert stream.join() == "Blue, or green."
    assert stream.response["output"][0]["content"][0]["text"] == "Blue, or green."


def test_56_reasoning_is_an_item_of_its_own(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with ResponseStream(stack) as stream:
        job = stack.await_job()
        stack.horde.post_progress(job["id"], 1, None, reasoning="The sky")
        stream.await_text("The sky", "reasoning_text")
        post_progress(stack, job["id"], "Bl", start=2)
        stream.await_text("Bl")
        # It comes too late to be shown, and stays out of the object.
        stack.horde.post_progress(job["id"], 3, None, reasoning=" comes")
        stack.horde.reply(job["id"], "Blue.", reasoning_content="The sky comes to mind.")
        stream.finish()
    reasoning, message = stream.response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "The sky"}]
    assert message["content"][0]["text"] == "Blue."
    kinds = stream.kinds
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


@pytest.mark.parametrize("with_calls", [False, True])
def test_58_the_stream_helper_returns_the_object_of_the_plain_call(
    stack: FrontStack, client: openai.OpenAI, with_calls: bool
) -> None:
    reply = {
        "tool_calls": [build_call(), build_call(call_id="call_2")],
        "finish_reason": "tool_calls",
    }
    content = None if with_calls else "Blue."
    tools = [build_function(strict=False)]
    plain, _ = respond(
        stack, content, pop=TOOLS_DECLARED, reply=reply if with_calls else {}, tools=tools
    )

    def stream() -> dict[str, object]:
        with client.responses.stream(
            model=MODEL,
            input="Name one colour.",
            max_output_tokens=64,
            tools=tools,
        ) as events:
            return events.get_final_response().model_dump(mode="json")

    waiting = stack.threads.submit(stream)
    job = stack.await_job(**TOOLS_DECLARED)
    stack.horde.reply(job["id"], content, **(reply if with_calls else {}))
    streamed = waiting.result(PATIENCE_SECONDS)
    for item, other in zip(streamed["output"], plain["output"], strict=True):
        assert {key: item[key] for key in other if key not in ("id", "content")} == {
            key: value for key, value in other.items() if key not in ("id", "content")
        }
    assert streamed["status"] == plain["status"]
    counts = ("input_tokens", "output_tokens", "total_tokens")
    assert {name: streamed["usage"][name] for name in counts} == {
        name: plain["usage"][name] for name in counts
    }


def test_59_a_fault_behind_text_ends_as_failed(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with ResponseStream(stack) as stream:
        job = stack.await_job()
        post_progress(stack, job["id"], "Bl")
        stream.await_text("Bl")
        stack.horde.fault(job["id"])
        for number in range(2):
            stack.horde.fault(stack.await_job(name=f"worker {number}")["id"])
        stream.finish()
    assert stream.kinds[-1] == "response.failed"
    assert "response.output_item.done" not in stream.kinds
    response = stream.response
    assert (response["status"], response["error"]["code"]) == ("failed", "generation_failed")
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"] is None


def test_60_another_text_than_was_told_ends_as_failed(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with ResponseStream(stack) as stream:
        job = stack.await_job()
        post_progress(stack, job["id"], "Red")
        stream.await_text("Red")
        stack.horde.reply(job["id"], "Blue.")
        stream.finish()
    assert stream.response["error"]["code"] == "stream_diverged"
    with ResponseStream(stack) as stream:
        job = stack.await_job()
        post_progress(stack, job["id"], "Red")
        stream.await_text("Red")
        stack.horde.fault(job["id"])
        other = stack.await_job(name="another worker")
        post_progress(stack, other["id"], "Blue")
        stream.finish()
    assert stream.response["error"]["code"] == "generation_restarted"


def test_61_a_stream_that_is_refused_is_no_stream(stack: FrontStack) -> None:
    with ResponseStream(stack, model="nobody/serves-it") as stream:
        status, error = stream.refuse()
    assert (status, error["code"]) == (404, "model_not_found")


def test_62_leaving_a_stream_cancels_its_request(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with ResponseStream(stack) as stream:
        job = stack.await_job()
        post_progress(stack, job["id"], "Bl")
        stream.await_text("Bl")
    (native_id,) = list_request_ids()
    wait_until(lambda: stack.horde.status(native_id)["done"])


def test_an_open_stream_begins_with_its_object_though_nothing_was_said(
    service_urls: ServiceAddresses, stack: FrontStack
) -> None:

    stack.horde.take_nothing()
    with (
        run_front(replace(stack.config, stream_open_seconds=0.0)) as url,
        ResponseStream(stack, url=url) as stream,
    ):
        stream.await_that(lambda stream: "response.in_progress" in stream.kinds)
        assert stream.kinds == ["response.created", "response.in_progress"]
        stack.horde.reply(stack.await_job()["id"])
        stream.finish()
        assert stream.kinds == TEXT_EVENTS
