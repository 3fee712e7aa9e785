# SPDX-License-Identifier: AGPL-3.0-or-later
"""`POST /v1/responses` through a real front and a real API, with workers played by the tests.

Numbers are those of the form's checklist.
"""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from devtools.services import ServiceAddresses
from tests.integration._fake_chat_worker import MODEL, build_call, start_anew
from tests.integration.chat_front import FrontStack, get_error, run_front_stack
from tests.integration.front_streams import list_request_ids
from tests.integration.responses_front import (
    KEYS,
    TOOLS_DECLARED,
    build_function,
    get_payload,
    post,
    respond,
)
from tests.integration.text_horde import change_worker

MESSAGES = [{"role": "user", "content": "Name one colour."}]


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "responses", no_worker_grace_seconds=0.5) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def test_01_a_text_is_answered_with_every_key_of_the_object(stack: FrontStack) -> None:
    response, payload = respond(stack)
    assert set(response) == KEYS
    assert payload["messages"] == MESSAGES
    assert (response["object"], response["status"], response["model"]) == (
        "response",
        "completed",
        MODEL,
    )
    (message,) = response["output"]
    assert message["content"] == [
        {"type": "output_text", "text": "Blue.", "annotations": [], "logprobs": []}
    ]
    assert response["completed_at"] >= response["created_at"]


def test_02_what_there_is_no_route_for_is_said_as_such(stack: FrontStack) -> None:
    headers = {"authorization": f"Bearer {stack.horde.requester_key}"}
    listed = stack.call("GET", "/v1/responses", headers=headers)
    assert (listed.status_code, listed.headers["allow"]) == (405, "POST, OPTIONS")
    for path in ("/v1/responses/compact", "/v1/responses/input_tokens", "/v1/conversations"):
        answer = stack.call("POST", path, json={}, headers=headers)
        assert (answer.status_code, get_error(answer)["code"]) == (404, "unknown_url")


def test_04_and_05_the_sdk_reads_the_object_in_its_strictest_mode(stack: FrontStack) -> None:
    response, _ = respond(
        stack,
        None,
        pop=TOOLS_DECLARED,
        reply={"tool_calls": [build_call()], "finish_reason": "tool_calls"},
        tools=[build_function()],
    )
    Response.model_validate(response, strict=False)
    response, _ = respond(stack)
    assert "output_text" not in response
    assert Response.model_validate(response).output_text == "Blue."


def test_06_instructions_come_first(stack: FrontStack) -> None:
    payload = get_payload(stack, instructions="Be brief.")
    assert payload["messages"] == [{"role": "system", "content": "Be brief."}, *MESSAGES]


def test_07_and_08_the_length_of_the_output(stack: FrontStack) -> None:
    assert get_payload(stack, max_output_tokens=64)["max_length"] == 64
    pop = {"chat_limits": {"max_context_length": 16384, "max_length": 8192}}
    stack.horde.take_nothing(**pop)
    change_worker("chat worker", speed=100.0)  # or nobody is fast enough for so much
    response, payload = respond(stack, pop=pop, max_output_tokens=...)
    assert payload["max_length"] == 4096
    assert response["max_output_tokens"] is None


def test_09_null_is_absent(stack: FrontStack) -> None:
    names = ("instructions", "tools", "tool_choice", "text", "reasoning", "include", "store")
    nulls: dict[str, Any] = dict.fromkeys((*names, "metadata", "previous_response_id", "stream"))
    assert get_payload(stack, **nulls) == get_payload(stack)


def test_10_what_concerns_the_platform_goes_nowhere(stack: FrontStack) -> None:
    sent = {
        "metadata": {"a": "b"},
        "user": "u-1",
        "safety_identifier": "s-1",
        "prompt_cache_key": "p-1",
        "service_tier": "auto",
        "client_metadata": {"c": "d"},
    }
    response, payload = respond(stack, **sent)
    assert payload == get_payload(stack)
    for key in ("metadata", "user", "safety_identifier", "prompt_cache_key"):
        assert response[key] == sent[key]


def test_15_an_overlong_input_is_refused_or_cut_as_asked(stack: FrontStack) -> None:
    pop = {"chat_limits": {"max_context_length": 2048, "max_length": 256}}
    turns = [{"role": "user", "content": f"{number} " + "word " * 300} for number in range(9)]
    stack.horde.take_nothing(**pop)
    answer = post(stack, input=turns)
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "input",
    )
    response, payload = respond(stack, pop=pop, input=turns, truncation="auto")
    assert len(payload["messages"]) < 9
    reasons = [entry["reason"] for entry in response["x_horde"]["context_adjustments"]]
    assert "truncate_oldest" in reasons


def test_17_effort_reaches_the_worker(stack: FrontStack) -> None:
    pop = {"chat_features": ["prompt_overflow_refused", "reasoning_effort"]}
    asked = {"effort": "low", "summary": "auto"}
    response, payload = respond(stack, pop=pop, reasoning=asked)
    assert payload["reasoning_effort"] == "low"
    assert response["reasoning"] == asked
    for nothing in ({}, None):
        assert "reasoning_effort" not in get_payload(stack, reasoning=nothing)


def test_44_to_46_the_items_of_a_reply(stack: FrontStack) -> None:
    response, _ = respond(
        stack,
        "Both.",
        pop=TOOLS_DECLARED,
        reply={
            "reasoning_content": "Two towns.",
            "tool_calls": [build_call(), build_call(call_id="call_2")],
            "finish_reason": "tool_calls",
        },
        tools=[build_function()],
    )
    (native_id,) = list_request_ids()
    assert response["id"] == f"resp_{native_id}"
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert len({item["id"] for item in response["output"]}) == 4
    response, _ = respond(stack, "Blu", reply={"finish_reason": "length"})
    assert (response["status"], response["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert response["output"][-1]["status"] == "incomplete"
    assert response["usage"]["total_tokens"] > 0
    assert response["completed_at"] is None


def test_47_a_filtered_reply_is_incomplete(stack: FrontStack) -> None:
    response, _ = respond(stack, "…", reply={"finish_reason": "content_filter"})
    assert response["incomplete_details"] == {"reason": "content_filter"}


def test_48_usage_has_every_detail(stack: FrontStack) -> None:
    counted = {"prompt_tokens": 21, "completion_tokens": 9, "reasoning_tokens": 4}
    response, _ = respond(stack, reply=counted)
    assert response["usage"] == {
        "input_tokens": 21,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 30,
    }


def test_49_reasoning_is_shown_unless_it_is_hidden(stack: FrontStack) -> None:
    reply = {"reasoning_content": "The sky.", "completion_tokens": 9, "prompt_tokens": 2}
    shown, _ = respond(stack, reply=reply)
    hidden, _ = respond(stack, reply=reply, horde={"include_reasoning": False})
    assert shown["output"][0]["content"] == [{"type": "reasoning_text", "text": "The sky."}]
    assert [item["type"] for item in hidden["output"]] == ["message"]
    assert shown["usage"] == hidden["usage"]


def test_a_dry_run_answers_with_a_quote(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    response = post(stack, horde={"dry_run": True}).json()
    assert set(response) == KEYS
    assert (response["status"], response["output"]) == ("completed", [])
    assert response["x_horde"]["dry_run"] is True
    assert list_request_ids() == []


def test_50_the_sdk_parses_a_typed_reply(stack: FrontStack) -> None:
    class Colour(BaseModel):
        name: str

    pop = {
        "chat_features": [
            "prompt_overflow_refused",
            "json_schema",
            "structured_output_enforced",
        ]
    }
    stack.horde.take_nothing(**pop)
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.horde.requester_key) as client:
        waiting = stack.threads.submit(
            client.responses.parse,
            model=MODEL,
            input="Name one colour.",
            text_format=Colour,
            max_output_tokens=64,
        )
        job = stack.await_job(**pop)
        assert job["payload"]["response_format"]["json_schema"]["strict"] is True
        refused = stack.horde.reply(job["id"], '{"colour": 1}')
        assert refused.status_code == 400
        stack.horde.reply(job["id"], '{"name": "blue"}')
        assert waiting.result(60).output_parsed == Colour(name="blue")


LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}


def test_27_to_29_a_free_form_tool_is_called_with_raw_text(stack: FrontStack) -> None:
    tools = [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": LARK},
    ]
    for arguments, text in (('{"input": "*** Begin"}', "*** Begin"), ('"*** End"', "*** End")):
        response, payload = respond(
            stack,
            None,
            pop=TOOLS_DECLARED,
            reply={
                "tool_calls": [build_call("apply_patch", arguments=arguments)],
                "finish_reason": "tool_calls",
            },
            tools=tools,
            horde={"conformance": "best_effort"},
        )
        (tool,) = payload["tools"]
        assert tool["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
        assert response["x_horde"]["not_enforced"] == ["tools[0]", "tools[1].format"]
        (item,) = response["output"]
        assert (item["type"], item["name"], item["input"]) == (
            "custom_tool_call",
            "apply_patch",
            text,
        )
        assert item["call_id"]
