# SPDX-License-Identifier: AGPL-3.0-or-later
"""OpenAI's own Python SDK against the front with Redis: streams, errors in them, and signals that
end a wait.

Numbers are those of the front's checklist.
"""

import time
from collections.abc import Iterator

import openai
import pytest

from devtools.services import ServiceAddresses
from tests.integration._fake_chat_worker import MODEL, build_call, build_tool, start_anew
from tests.integration.chat_front import PATIENCE_SECONDS, FrontStack, run_front_stack, wait_until
from tests.integration.front_streams import list_request_ids, post_progress

MESSAGES = [{"role": "user", "content": "Name one colour."}]


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    # Without signals, nothing would be read for longer than the tests wait.
    with run_front_stack(
        service_urls,
        "front_sdk",
        redis_url=f"{service_urls.redis_url}/7",
        poll_seconds=2 * PATIENCE_SECONDS,
        subscribed_poll_seconds=2 * PATIENCE_SECONDS,
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


def test_a_signal_ends_the_wait_long_before_the_next_poll(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = stack.ask()
    job = stack.await_job()
    time.sleep(0.5)
    assert not waiting.done()
    stack.horde.reply(job["id"])
    assert waiting.result(PATIENCE_SECONDS).status_code == 200


def test_a_fault_is_heard_as_well(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = stack.ask()
    for number in range(3):
        stack.horde.fault(stack.await_job(name=f"worker {number}")["id"])
    assert waiting.result(PATIENCE_SECONDS).json()["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("with_calls", [False, True])
def test_73_the_stream_helper_assembles_the_message_of_the_plain_call(
    stack: FrontStack, client: openai.OpenAI, with_calls: bool
) -> None:
    declared = {"chat_features": ["prompt_overflow_refused", "tools"]}
    reply = (
        {"tool_calls": [build_call(), build_call(call_id="call_2")], "finish_reason": "tool_calls"}
        if with_calls
        else {}
    )
    content = None if with_calls else "Blue, or green."
    asked = {"model": MODEL, "messages": MESSAGES, "tools": [build_tool()]}

    def stream() -> openai.types.chat.ChatCompletion:
        with client.chat.completions.stream(
            **asked, stream_options={"include_usage": True}
        ) as events:
            for _ in events:
                pass
            return events.get_final_completion()

    answers = []
    for call in (lambda: client.chat.completions.create(**asked), stream):
        stack.horde.take_nothing(**declared)
        waiting = stack.threads.submit(call)
        job = stack.await_job(**declared)
        if content and job["payload"].get("stream_progress"):
            post_progress(stack, job["id"], "Blue,", " or ")
        assert stack.horde.reply(job["id"], content, **dict(reply)).status_code == 200
        answers.append(waiting.result(PATIENCE_SECONDS))
    plain, streamed = (answer.choices[0] for answer in answers)
    assert streamed.message.content == (plain.message.content or "")
    assert [
        (call.id, call.function.name, call.function.arguments)
        for call in streamed.message.tool_calls or []
    ] == [
        (call.id, call.function.name, call.function.arguments)
        for call in plain.message.tool_calls or []
    ]
    assert streamed.finish_reason == plain.finish_reason
    assert answers[0].usage == answers[1].usage


def test_74_a_failure_in_an_open_stream_raises_with_its_code(
    stack: FrontStack, client: openai.OpenAI
) -> None:
    stack.horde.take_nothing()

    def read() -> list[str]:
        texts = []
        for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
            texts.append(chunk.choices[0].delta.content or "")
            heard.extend(texts[-1:])
        return texts

    heard: list[str] = []
    reading = stack.threads.submit(read)
    post_progress(stack, stack.await_job()["id"], "Blue")
    wait_until(lambda: "Blue" in heard)
    stack.horde.cancel(list_request_ids()[0])
    with pytest.raises(openai.APIError) as raised:
        reading.result(PATIENCE_SECONDS)
    assert raised.value.code == "no_generation"
