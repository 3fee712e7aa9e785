# SPDX-License-Identifier: AGPL-3.0-or-later
"""Messages that are waited for, and their shape. Numbers are those of the form's checklist."""

from collections.abc import Iterator
from typing import Any

import pytest

from devtools.services import ServiceAddresses
from tests.integration._fake_chat_worker import MODEL, Body, build_call, start_anew
from tests.integration.chat_front import FrontStack, run_front_stack
from tests.integration.messages_front import (
    MESSAGE_KEYS,
    TOOL,
    USAGE_KEYS,
    complete,
    get_payload,
    post,
    read_error,
    refuse,
    serve,
)

TOOLS_DECLARED: Body = {
    "chat_features": ["prompt_overflow_refused", "tools", "tool_choice_enforced"]
}
REASONING: Body = {"reasoning_content": "The sky."}


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "messages_replies", models_cache_seconds=0.0) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def call_tools(stack: FrontStack, *calls: Body, **options: Any) -> Body:
    reply = {"tool_calls": list(calls), "finish_reason": "tool_calls"} | options.pop("reply", {})
    return complete(stack, None, pop=TOOLS_DECLARED, reply=reply, tools=[TOOL], **options)


def test_1_a_message_has_exactly_the_keys_of_the_reference(stack: FrontStack) -> None:
    answer, _ = serve(stack, reply={"prompt_tokens": 21, "completion_tokens": 3})
    message = answer.json()
    assert set(message) == MESSAGE_KEYS
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert message["content"] == [{"type": "text", "text": "Blue."}]
    assert set(message["x_horde"]) == {
        *("request_id", "worker_id", "worker_name", "kudos", "charge_basis"),
        *("estimated_usage", "queue_wait_seconds", "model"),
    }
    request_id = message["x_horde"]["request_id"]
    assert message["id"] == f"msg_{request_id.replace('-', '')}"
    assert answer.headers["x-horde-request-id"] == request_id
    assert answer.headers["x-horde-model"] == message["x_horde"]["model"] == MODEL
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_2_a_query_changes_nothing(stack: FrontStack) -> None:
    assert set(complete(stack, path="/v1/messages?beta=true&a=b")) == MESSAGE_KEYS


def test_3_another_method_is_refused_with_those_there_are(stack: FrontStack) -> None:
    answer = stack.call("GET", "/v1/messages")
    assert read_error(answer)["type"] == "invalid_request_error"
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST, OPTIONS")


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/batches/a/results"])
def test_4_batches_are_not_offered(stack: FrontStack, path: str) -> None:
    answer = stack.call("POST", path, content=b"{}")
    assert (answer.status_code, read_error(answer)["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/skills", "/v1/complete", "/api/event_logging/batch"]
)
def test_4_other_routes_of_the_api_are_not_offered(stack: FrontStack, path: str) -> None:
    answer = post(stack, path=path)
    assert (answer.status_code, read_error(answer)["type"]) == (404, "not_found_error")


def test_a_base_url_with_its_version_is_explained(stack: FrontStack) -> None:
    answer = post(stack, path="/v1/v1/messages", headers={})
    assert answer.status_code == 404
    assert "base URL has no /v1" in read_error(answer)["message"]


def test_5_the_start_page_answers_a_probe(stack: FrontStack) -> None:
    answer = stack.call("HEAD", "/")
    assert (answer.status_code, answer.content) == (200, b"")


def test_63_reasons_to_stop(stack: FrontStack) -> None:
    for sent, told in (
        ("stop", "end_turn"),
        ("length", "max_tokens"),
        ("content_filter", "refusal"),
    ):
        message = complete(stack, reply={"finish_reason": sent})
        assert (message["stop_reason"], message["stop_sequence"]) == (told, None)
        assert set(message) - MESSAGE_KEYS == ({"stop_details"} if told == "refusal" else set())
    assert message["stop_details"] == {"type": "refusal", "category": None, "explanation": None}
    assert call_tools(stack, build_call())["stop_reason"] == "tool_use"
    forced = call_tools(
        stack,
        build_call(),
        reply={"finish_reason": "stop"},
        tool_choice={"type": "tool", "name": "lookup_weather"},
    )
    assert forced["stop_reason"] == "tool_use"
    cut = call_tools(stack, build_call(), reply={"finish_reason": "length"})
    assert cut["stop_reason"] == "max_tokens"


def test_64_a_text_that_ends_with_a_stop_sequence_names_it(stack: FrontStack) -> None:
    message = complete(stack, "Blue. END", stop_sequences=["D", "END"])
    assert message["content"] == [{"type": "text", "text": "Blue. END"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert complete(stack, "Blue.", stop_sequences=["END"])["stop_reason"] == "end_turn"


def test_65_an_empty_reply_is_one_empty_text(stack: FrontStack) -> None:
    assert complete(stack, "")["content"] == [{"type": "text", "text": ""}]


def test_66_ids_of_calls_differ_though_the_worker_repeats_them(stack: FrontStack) -> None:
    first = call_tools(stack, build_call(), build_call(call_id="call_2"))
    second = call_tools(stack, build_call())
    ids = [block["id"] for message in (first, second) for block in message["content"]]
    assert len(set(ids)) == 3
    assert all(call_id.startswith("toolu_") for call_id in ids)
    assert first["content"][0] == {
        "type": "tool_use",
        "id": f"toolu_{first['x_horde']['request_id'].replace('-', '')}_0",
        "name": "lookup_weather",
        "input": {"city": "Oslo"},
    }


def test_66_a_call_without_arguments_has_an_empty_input(stack: FrontStack) -> None:
    message = call_tools(stack, build_call(arguments=""))
    assert message["content"][0]["input"] == {}


@pytest.mark.parametrize("arguments", ["[1]", "{", '{"a": NaN}', "[" * 3000])
def test_arguments_that_are_no_object_fail_the_message(stack: FrontStack, arguments: str) -> None:
    stack.horde.take_nothing(**TOOLS_DECLARED)
    waiting = stack.threads.submit(post, stack, tools=[TOOL])
    job = stack.await_job(**TOOLS_DECLARED)
    sent = stack.horde.reply(
        job["id"],
        None,
        tool_calls=[build_call(arguments=arguments)],
        finish_reason="tool_calls",
    )
    assert sent.status_code == 200  # what a backend wrote is no business of the API
    answer = waiting.result(60)
    error = read_error(answer)
    assert (answer.status_code, error["type"]) == (502, "api_error")
    assert error["details"]["error_code"] == "nonconformant_reply"
    assert answer.headers["x-should-retry"] == "false"


def test_67_thinking_comes_first_with_a_signature(stack: FrontStack) -> None:
    message = complete(stack, reply=REASONING, thinking={"type": "adaptive"})
    thinking, text = message["content"]
    assert set(thinking) == {"type", "thinking", "signature"}
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "The sky.")
    assert thinking["signature"].startswith("aihorde-")
    assert text == {"type": "text", "text": "Blue."}


def test_68_usage_has_four_counts(stack: FrontStack) -> None:
    counts = {"prompt_tokens": 21, "completion_tokens": 3}
    assert complete(stack, reply=counts)["usage"] == {
        "input_tokens": 21,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 3,
    }
    estimated = complete(stack)["usage"]
    assert set(estimated) == USAGE_KEYS
    assert estimated["input_tokens"] > 0
    assert estimated["output_tokens"] == 2
    reasoned = complete(stack, reply=counts | {"reasoning_tokens": 2})["usage"]
    assert reasoned["output_tokens_details"] == {"thinking_tokens": 2}


def test_46_the_message_is_accepted_back_as_the_sdk_dumps_it(stack: FrontStack) -> None:
    message = complete(
        stack,
        "Looking.",
        pop=TOOLS_DECLARED,
        reply=REASONING | {"tool_calls": [build_call()], "finish_reason": "tool_calls"},
        tools=[TOOL],
        thinking={"type": "adaptive"},
    )
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    dumped = [
        block
        | {
            "thinking": {},
            "text": {"citations": None, "parsed_output": None},
            "tool_use": {"caller": None, "toolset_name": None},
        }[block["type"]]
        for block in message["content"]
    ]
    call_id = message["content"][2]["id"]
    user = {"role": "user", "content": "Name one colour."}
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "Rain."}],
    }
    turns = [user, message | {"content": dumped, "container": None}, result]
    payload = get_payload(stack, pop=TOOLS_DECLARED, messages=turns, tools=[TOOL])
    roles = [entry["role"] for entry in payload["messages"]]
    assert roles == ["user", "assistant", "tool"]
    called = payload["messages"][1]
    assert called["content"] == "Looking."
    assert called["tool_calls"][0]["id"] == call_id == payload["messages"][2]["tool_call_id"]


def test_unknown_models_are_named(stack: FrontStack) -> None:
    assert refuse(stack, model="claude-nobody-has") == (
        404,
        "not_found_error",
        "model: claude-nobody-has",
    )
