# SPDX-License-Identifier: AGPL-3.0-or-later
"""The published examples of the front: each body is posted or produced, and compared key for key.

`tests/data/front_wire_examples.json` holds the bodies as published; strings in angle brackets are
placeholders.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools.services import ServiceAddresses
from tests.integration._fake_chat_worker import (
    MODEL,
    Body,
    build_call,
    build_pop_body,
    build_tool,
    start_anew,
)
from tests.integration.chat_front import PATIENCE_SECONDS, FrontStack, build_body, run_front_stack
from tests.integration.test_chat_wire_examples import compare, fill

EXAMPLES = Path(__file__).resolve().parents[1] / "data" / "front_wire_examples.json"
BODIES = {row["name"]: row["body"] for row in json.loads(EXAMPLES.read_text(encoding="utf-8"))}
FEATURES = ["seed", "presence_penalty", "vision", "tool_choice_enforced", "prompt_overflow_refused"]
COUNTS = {"prompt_tokens": 21, "completion_tokens": 3}


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "front_examples", models_cache_seconds=0.0) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def serve(
    stack: FrontStack,
    body: Body,
    *,
    pop: Body | None = None,
    content: str | None = "Blue.",
    **reply: Any,
) -> Any:
    """The answer to a body that a worker serves with one reply."""
    stack.horde.take_nothing(**(pop or {}))
    waiting = stack.threads.submit(stack.post, body)
    stack.horde.reply(stack.await_job(**(pop or {}))["id"], content, **COUNTS, **reply)
    answer = waiting.result(PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer


def get_request() -> Body:
    return dict(fill(BODIES["Front request"], {"model_name": MODEL}))


def iter_chunks(text: str) -> Iterator[Body]:
    """The events of a stream but the last."""
    *events, end = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")
    ]
    assert end == "[DONE]"
    yield from map(json.loads, events)


def test_completion(stack: FrontStack) -> None:
    completion = serve(stack, get_request()).json()
    compare(BODIES["Completion"], completion, "Completion")
    assert completion["usage"] == BODIES["Completion"]["usage"]


def test_chunks(stack: FrontStack) -> None:
    body = get_request() | {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(iter_chunks(serve(stack, body).text))
    content = next(
        chunk
        for chunk in chunks
        if chunk["choices"] and chunk["choices"][0]["delta"].get("content")
    )
    compare(BODIES["Content chunk"], content, "Content chunk")
    compare(BODIES["Finish chunk"], chunks[-2], "Finish chunk")
    compare(BODIES["Usage chunk"], chunks[-1], "Usage chunk")


def test_tool_call_completion(stack: FrontStack) -> None:
    call = build_call("get_weather", "call_weather_1", '{"city":"Paris"}')
    body = build_body(tools=[build_tool("get_weather")])
    pop = {"chat_features": ["tools", "prompt_overflow_refused"]}
    answer = serve(
        stack, body, pop=pop, content=None, tool_calls=[call], finish_reason="tool_calls"
    )
    compare(BODIES["Tool-call completion"], answer.json(), "Tool-call completion")


def test_no_worker_supports_features(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    answer = stack.post(get_request() | {"reasoning_effort": "low"})
    assert answer.status_code == 404
    compare(BODIES["No worker supports features"], answer.json(), "No worker supports features")


def test_kudos_cap(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    answer = stack.post(get_request() | {"horde": {"max_kudos": 1}})
    assert answer.status_code == 400
    expected, error = BODIES["Kudos cap"]["error"], answer.json()["error"]
    estimate = str(error["metadata"]["kudos_estimate"])
    assert error["message"] == expected["message"].replace("215", estimate)
    compare(expected | {"message": error["message"]}, error, "Kudos cap")


def test_model_list(stack: FrontStack) -> None:
    stack.horde.post(
        "/generate/text/pop", build_pop_body(chat_features=FEATURES), stack.horde.owner_key
    )
    listed = stack.call("GET", "/v1/models").json()
    compare(BODIES["Model list"], listed, "Model list")
    assert (
        listed["data"][0]["supported_parameters"]
        == BODIES["Model list"]["data"][0]["supported_parameters"]
    )
    assert listed["data"][0]["architecture"] == BODIES["Model list"]["data"][0]["architecture"]
