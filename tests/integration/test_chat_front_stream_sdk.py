# SPDX-License-Identifier: AGPL-3.0-or-later
"""Streams read by OpenAI's own library. Numbers are those of the front's checklist."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import openai
import pytest

from devtools.services import ServiceAddresses
from tests.integration._fake_chat_worker import MODEL, build_call, build_tool, start_anew
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    FrontStack,
    build_body,
    run_front_stack,
    wait_until,
)
from tests.integration.front_streams import post_progress
from tests.integration.instruments import Counting

TOOL_FEATURES = ["prompt_overflow_refused", "tools"]


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(
        service_urls, "front_stream_sdk", redis_url=f"{service_urls.redis_url}/7"
    ) as stack:
        yield stack


@pytest.fixture
def client(stack: FrontStack) -> Iterator[openai.OpenAI]:
    start_anew()
    stack.horde.take_nothing(chat_features=TOOL_FEATURES)
    with httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS) as http:
        yield openai.OpenAI(
            base_url=f"{stack.url}/v1", api_key=stack.horde.requester_key, http_client=http
        )


def assemble(stack: FrontStack, client: openai.OpenAI, **changes: Any) -> "Future[Any]":
    """The completion that the library's stream helper makes of a stream, in a thread."""

    def read() -> Any:
        body = build_body(**changes)
        with client.chat.completions.stream(**body) as stream:
            for _event in stream:
                pass
            return stream.get_final_completion()

    return stack.threads.submit(read)


@pytest.mark.parametrize("is_relayed", [False, True])
def test_73_the_stream_helper_assembles_what_the_plain_call_answers(
    stack: FrontStack, client: openai.OpenAI, is_relayed: bool
) -> None:
    reply = {"prompt_tokens": 21, "completion_tokens": 3, "reasoning_content": "Hm."}
    pop = {"chat_features": TOOL_FEATURES}
    plain = stack.complete("Blue,\u2028green.", pop=pop, reply=reply)
    reading = assemble(stack, client, stream_options={"include_usage": True})
    job = stack.await_job(**pop)
    if is_relayed:
        stack.horde.post_progress(job["id"], 1, None, reasoning="H")
        post_progress(stack, job["id"], "Bl", "ue,", start=2)
    stack.horde.reply(job["id"], "Blue,\u2028green.", **reply)
    assembled = reading.result(PATIENCE_SECONDS)
    message = assembled.choices[0].message
    assert (message.role, message.content) == ("assistant", "Blue,\u2028green.")
    assert message.reasoning_content == "Hm."
    assert assembled.choices[0].finish_reason == "stop"
    assert assembled.usage.model_dump(exclude_none=True) == plain["usage"]
    assert (assembled.model, assembled.system_fingerprint) == (MODEL, plain["system_fingerprint"])
    # The message may be sent back as it is.
    again = stack.ask(
        messages=[
            {"role": "user", "content": "And?"},
            json.loads(message.to_json()),
            {"role": "user", "content": "?"},
        ]
    )
    stack.horde.reply(stack.await_job(**pop)["id"])
    assert again.result(PATIENCE_SECONDS).status_code == 200


def test_73_the_stream_helper_assembles_tool_calls(
    stack: FrontStack, client: openai.OpenAI
) -> None:
    calls = [build_call(), build_call(call_id="call_2", arguments='{"city":"Paris"}')]
    reading = assemble(stack, client, tools=[build_tool()])
    job = stack.await_job(chat_features=TOOL_FEATURES)
    stack.horde.reply(job["id"], None, tool_calls=calls, finish_reason="tool_calls")
    choice = reading.result(PATIENCE_SECONDS).choices[0]
    assert choice.finish_reason == "tool_calls"
    made = [
        (call.id, call.type, call.function.name, call.function.arguments)
        for call in choice.message.tool_calls
    ]
    assert made == [
        (call["id"], "function", call["function"]["name"], call["function"]["arguments"])
        for call in calls
    ]


def test_74_a_failure_in_an_open_stream_is_raised_with_its_code(
    stack: FrontStack, client: openai.OpenAI
) -> None:
    def read() -> list[Any]:
        return list(client.chat.completions.create(**build_body(), stream=True))

    counting = Counting("horde.oai.first_delta_seconds")
    reading = stack.threads.submit(read)
    job = stack.await_job(chat_features=TOOL_FEATURES)
    post_progress(stack, job["id"], "Blue")
    wait_until(counting.read)
    stack.horde.reply(job["id"], "Red.")
    with pytest.raises(openai.APIError) as raised:
        reading.result(PATIENCE_SECONDS)
    assert (raised.value.code, raised.value.type) == ("stream_diverged", "server_error")


def test_72_a_refused_stream_raises_the_error_of_its_status(
    stack: FrontStack, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(**build_body(model="nobody/knows-it"), stream=True)
    assert raised.value.code == "model_not_found"
