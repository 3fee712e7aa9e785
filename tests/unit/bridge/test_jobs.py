# SPDX-License-Identifier: AGPL-3.0-or-later
import base64
import json
from typing import Any

import httpx
import pytest
from horde_sdk.generation_parameters.text.chat_policy import ChatFeature, ChatGuarantee

from horde.bridge.job import JobFault, parse_job
from horde.bridge.jobs import serve_job
from horde.bridge.refusals import BackendUnavailable
from tests.unit.bridge.scripted import (
    TOOLS,
    Script,
    answer,
    build_connections,
    build_plan,
    chat_answer,
    completion,
    llama_script,
    text_answer,
)

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
STRICT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "strict": True, "schema": {"type": "object", "required": ["a"]}},
}
LOOSE = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "required": ["a"]}},
}


def serve(
    body: dict[str, Any], script: Script, store: Script | None = None, **changes: Any
) -> dict[str, Any]:
    plan = build_plan(llama_script(), **changes)
    return serve_job(parse_job(body, plan), build_connections(script, store), plan)


def fault(
    body: dict[str, Any], script: Script, store: Script | None = None, **changes: Any
) -> JobFault:
    with pytest.raises(JobFault) as caught:
        serve(body, script, store, **changes)
    return caught.value


def test_a_chat_job_becomes_a_reply() -> None:
    script = llama_script()
    assert serve(chat_answer(), script) == {
        "id": "job-1",
        "model_id": "tiny",
        "message": {"role": "assistant", "content": "Blue."},
        "finish_reason": "stop",
        "native_finish_reason": "stop",
        "prompt_tokens": 21,
        "completion_tokens": 3,
    }


def test_every_sampling_value_is_sent_so_no_default_of_the_backend_applies() -> None:
    script = llama_script()
    serve(chat_answer(temperature=0.5, seed=7, stop_sequence=["\nuser:"], rep_pen=1.1), script)
    (sent,) = script.bodies(CHAT)
    assert sent == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Name one colour."}],
        "max_tokens": 64,
        "temperature": 0.5,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "top_k": 0,
        "min_p": 0.0,
        "repeat_penalty": 1.1,
        "stop": ["\nuser:"],
        "seed": 7,
        "stream": False,
    }


def test_null_keys_of_messages_are_dropped_but_a_null_content_stays() -> None:
    script = llama_script()
    calls = [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}]
    history = [
        {"role": "assistant", "content": None, "tool_calls": calls, "name": None},
        {"role": "tool", "content": "noon", "tool_call_id": "a"},
    ]
    serve(chat_answer(messages=history), script)
    (sent,) = script.bodies(CHAT)
    assert sent["messages"][0] == {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize(
    ("prompt_tokens", "max_length", "max_context_length", "fits"),
    [
        (1984, 64, 2048, True),
        (1985, 64, 4096, False),  # no room for the reply in the worker's 2048
        (1001, 64, 1000, False),  # over what the request allows
        (1000, 64, 1000, True),
    ],
)
def test_a_prompt_that_does_not_fit_is_given_back(
    prompt_tokens: int, max_length: int, max_context_length: int, fits: bool
) -> None:
    script = llama_script(tokenize=answer({"tokens": [1] * prompt_tokens}))
    job = chat_answer(max_length=max_length, max_context_length=max_context_length)
    if fits:
        serve(job, script)
    else:
        assert fault(job, script).reason == "prompt_overflow"
        assert not script.bodies(CHAT)


@pytest.mark.parametrize(
    ("status", "error", "payload", "reason"),
    [
        (400, {"type": "exceed_context_size_error", "n_ctx": 2048}, {}, "prompt_overflow"),
        (
            400,
            {"message": "This model's maximum context length is 2048 tokens"},
            {},
            "prompt_overflow",
        ),
        (
            400,
            {"message": "JSON schema error at #: unrecognized type foo"},
            {"response_format": STRICT},
            "unbuildable_grammar",
        ),
        (
            500,
            {"message": "failed to parse grammar"},
            {"response_format": LOOSE},
            "unbuildable_grammar",
        ),
        (
            400,
            {"message": "JSON schema error"},
            {"tools": TOOLS, "tool_choice": "required"},
            "unbuildable_grammar",
        ),
        (500, {"message": "out of memory"}, {"response_format": STRICT}, "generation_error"),
        (400, {"message": "seed must be a number"}, {}, "generation_error"),
    ],
)
def test_refusals_of_the_backend_have_their_reasons(
    status: int, error: object, payload: dict[str, Any], reason: str
) -> None:
    assert (
        fault(chat_answer(**payload), llama_script(chat=answer({"error": error}, status))).reason
        == reason
    )


@pytest.mark.parametrize(
    ("status", "is_trouble"), [(400, False), (401, True), (404, True), (500, True), (503, True)]
)
def test_only_a_refusal_about_the_request_leaves_the_backend_trusted(
    status: int, is_trouble: bool
) -> None:
    assert (
        fault(chat_answer(), llama_script(chat=answer({}, status))).is_backend_trouble is is_trouble
    )


def test_a_lost_backend_is_not_a_fault_of_the_job() -> None:
    with pytest.raises(BackendUnavailable):
        serve(chat_answer(), llama_script(chat=httpx.ConnectError("refused")))


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "vision",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"tools": TOOLS, "temperature": 1.5}, "tools_max_temperature"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "unreadable"),
    ],
)
def test_a_job_outside_the_declaration_is_given_back_before_it_runs(
    payload: dict[str, Any], named: str
) -> None:
    script = llama_script()
    given_back = fault(chat_answer(**payload), script, tools_max_temperature=1.0)
    assert (given_back.reason, named in given_back.detail) == ("generation_error", True)
    assert not script.requests


VISION = {"supports": frozenset({ChatFeature.VISION})}
IMAGE = b"\xff\xd8\xff an image"
IMAGE_URL = "https://store.test/a.jpg?signature=secret"


def see(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def test_images_reach_the_backend_inside_and_are_not_counted_as_text() -> None:
    script = llama_script()
    store = Script({"/a.jpg": httpx.Response(200, content=IMAGE)})
    serve(chat_answer(messages=see(image_part(IMAGE_URL))), script, store, **VISION)
    (sent,) = script.bodies(CHAT)
    inside = f"data:image/jpeg;base64,{base64.b64encode(IMAGE).decode()}"
    assert sent["messages"] == see(image_part(inside))
    (counted,) = script.bodies("/apply-template")
    assert counted["messages"] == see()


def test_an_image_that_cannot_be_had_gives_the_job_back_without_a_reason() -> None:
    body = chat_answer(messages=see(image_part(IMAGE_URL)))
    script = llama_script()
    given_back = fault(body, script, Script({}), **VISION)
    assert (given_back.reason, given_back.is_backend_trouble) == (None, False)
    assert "secret" not in f"{given_back} {given_back.detail}"
    assert parse_job(body, build_plan()).build_fault(given_back.reason) == {
        "id": "job-1",
        "state": "faulted",
        "model_id": "tiny",
    }
    assert not script.bodies(CHAT)


def test_a_large_conversation_is_fetched_and_judged_like_any_other() -> None:
    body = chat_answer()
    messages = body["payload"].pop("messages")
    body["payload"]["messages_url"] = "https://store.test/m.json?signature=secret"
    script = llama_script()
    serve(body, script, Script({"/m.json": answer(messages)}), **VISION)
    assert script.bodies(CHAT)[0]["messages"] == messages
    seen = answer(see(image_part("data:image/jpeg;base64,/9j/")))
    assert "vision" in fault(body, llama_script(), Script({"/m.json": seen})).detail
    assert fault(body, llama_script(), Script({})).reason is None


def test_an_undeclared_guarantee_does_not_stop_a_job_since_nobody_may_have_asked_for_it() -> None:
    body = chat_answer(response_format=STRICT)
    script = llama_script(chat=completion('{"a":1}'))
    assert serve(body, script, exclude=frozenset(ChatGuarantee))["message"]["content"] == '{"a":1}'


def test_a_forced_call_is_asked_for_as_json_and_becomes_a_call() -> None:
    script = llama_script(
        chat=completion('{"name": "lookup_weather", "arguments": {"city": "Oslo"}}')
    )
    reply = serve(chat_answer(tools=TOOLS, tool_choice="required"), script)
    (sent,) = script.bodies(CHAT)
    assert (sent["tools"], sent["tool_choice"], sent["response_format"]["type"]) == (
        TOOLS,
        "none",
        "json_schema",
    )
    (call,) = reply["message"]["tool_calls"]
    assert (call["type"], call["function"]) == (
        "function",
        {"name": "lookup_weather", "arguments": '{"city": "Oslo"}'},
    )
    assert (reply["message"]["content"], reply["finish_reason"]) == (None, "tool_calls")


def test_a_forced_call_cut_at_its_length_keeps_what_it_has() -> None:
    script = llama_script(
        chat=completion('{"name":"lookup_weather","arguments":{"city":"Os', "length")
    )
    reply = serve(chat_answer(tools=TOOLS, tool_choice="required"), script)
    assert reply["message"]["tool_calls"][0]["function"]["arguments"] == '{"city":"Os'
    assert reply["finish_reason"] == "length"


def test_prose_where_a_call_is_required_is_a_violation() -> None:
    assert (
        fault(chat_answer(tools=TOOLS, tool_choice="required"), llama_script()).reason
        == "tool_violation"
    )


def test_a_call_to_a_function_that_was_not_offered_is_a_violation() -> None:
    calls = [{"id": "x", "type": "function", "function": {"name": "delete_all", "arguments": "{}"}}]
    script = llama_script(chat=completion(None, "tool_calls", tool_calls=calls))
    assert fault(chat_answer(tools=TOOLS), script).reason == "tool_violation"


def test_one_call_is_kept_when_parallel_calls_are_off() -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": "now", "arguments": "{}"}}
        for name in "ab"
    ]
    script = llama_script(chat=completion(None, "tool_calls", tool_calls=calls))
    reply = serve(chat_answer(tools=TOOLS, parallel_tool_calls=False), script)
    assert [call["id"] for call in reply["message"]["tool_calls"]] == ["a"]


@pytest.mark.parametrize(
    ("response_format", "content", "finish_reason", "is_served"),
    [
        (STRICT, '{"a": 1}', "stop", True),
        (STRICT, '{"b": 1}', "stop", False),
        (STRICT, "prose", "stop", False),
        (STRICT, '{"a": "cut', "length", True),  # the horde judges unfinished JSON
        (LOOSE, '{"b": 1}', "stop", True),
    ],
)
def test_a_strict_schema_is_checked_on_the_reply(
    response_format: Any, content: str, finish_reason: str, is_served: bool
) -> None:
    script = llama_script(chat=completion(content, finish_reason))
    if is_served:
        assert (
            serve(chat_answer(response_format=response_format), script)["message"]["content"]
            == content
        )
    else:
        assert (
            fault(chat_answer(response_format=response_format), script).reason
            == "unbuildable_grammar"
        )


@pytest.mark.parametrize(
    "broken",
    [{}, {"choices": []}, {"choices": [{}]}, {"choices": [{"message": None}]}, {"choices": "x"}],
)
def test_an_answer_without_a_message_is_a_generation_error(broken: dict[str, Any]) -> None:
    assert fault(chat_answer(), llama_script(chat=answer(broken))).reason == "generation_error"


def test_a_text_job_is_continued() -> None:
    script = llama_script()
    body = text_answer(
        temperature=0.7, rep_pen=1.1, rep_pen_range=64, stop_sequence=["###"], singleline=True
    )
    assert serve(body, script) == {"id": "job-2", "generation": " and then", "state": "ok"}
    (sent,) = script.bodies(COMPLETE)
    assert sent == {
        "model": "tiny",
        "prompt": "Once",
        "max_tokens": 32,
        "temperature": 0.7,
        "repeat_penalty": 1.1,
        "repeat_last_n": 64,
        "stop": ["###", "\n"],
        "stream": False,
    }


def test_an_empty_continuation_is_a_reply() -> None:
    script = llama_script(complete=answer({"choices": [{"text": ""}]}))
    assert serve(text_answer(), script)["generation"] == ""


def test_a_long_text_prompt_loses_its_beginning_but_not_its_leading_token() -> None:
    def tokenize(body: dict[str, Any]) -> httpx.Response:
        return answer({"tokens": [1, *range(100, 2100)] if body["content"] else [1]})

    script = llama_script(tokenize=tokenize)
    serve(text_answer(max_length=32, max_context_length=1024), script)
    (sent,) = script.bodies(COMPLETE)
    assert (sent["prompt"][0], sent["prompt"][-1], len(sent["prompt"])) == (1, 2099, 1024 - 32)


@pytest.mark.parametrize("payload", [None, {}, {"prompt": None}, {"prompt": ["a"]}])
def test_a_text_job_without_a_prompt_is_given_back(payload: object) -> None:
    assert fault({**text_answer(), "payload": payload}, llama_script()).reason == "generation_error"


def test_the_forms_of_a_fault() -> None:
    plan = build_plan()
    reason = fault(chat_answer(), llama_script(chat=answer({}, 500))).reason
    assert parse_job(chat_answer(), plan).build_fault(reason) == {
        "id": "job-1",
        "state": "faulted",
        "model_id": "tiny",
        "fault_reason": "generation_error",
    }
    assert parse_job(text_answer(), plan).build_fault(reason) == {
        "id": "job-2",
        "state": "faulted",
        "generation": "faulted",
    }


def test_half_a_character_does_not_break_the_submit() -> None:
    raw = httpx.Response(
        200, content=b'{"choices":[{"message":{"content":"a\\ud83d"},"finish_reason":"length"}]}'
    )
    reply = serve(chat_answer(), llama_script(chat=raw))
    assert reply["message"]["content"] == "a�"
    json.dumps(reply, ensure_ascii=False).encode()
