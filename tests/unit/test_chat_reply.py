# SPDX-License-Identifier: AGPL-3.0-or-later
"""Verification of replies, and the helper that checks them against clients' schemas."""

import os
import threading
import time
from typing import Any

import pytest
from horde_sdk.generation_parameters.text.chat_policy import ChatConformance

from horde.classes.kobold import reply_schema
from horde.classes.kobold.chat_request import SubmissionState, VerifiedChatReply, verify_chat_reply
from horde.classes.kobold.reply_schema import (
    SchemaHelperUnavailable,
    SchemaVerdict,
    judge_content_by_schema,
)
from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode

STRICT, BEST_EFFORT = ChatConformance.STRICT, ChatConformance.BEST_EFFORT
WEATHER = {"type": "function", "function": {"name": "lookup_weather"}}
TIME = {"type": "function", "function": {"name": "lookup_time"}}
TOOLS = {"tools": [WEATHER, TIME]}
COLOUR = {
    "type": "object",
    "properties": {"shade": {"type": "string"}},
    "required": ["shade"],
    "additionalProperties": False,
}


def build_reply(*names: str, content: str | None = None, **keys: Any) -> dict[str, Any]:
    calls = [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for index, name in enumerate(names)
    ]
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": calls} if calls else {}),
        **keys,
    }


def build_format(kind: str, schema: object = None, *, strict: bool = False) -> dict[str, Any]:
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    return {
        "response_format": {
            "type": kind,
            "json_schema": {"name": "colour", "schema": schema or COLOUR, "strict": strict},
        }
    }


def code_of(
    reply: dict[str, Any], extras: dict[str, Any] | None, conformance: ChatConformance = STRICT
) -> ReturnCode | None:
    try:
        verify_chat_reply(reply, extras, conformance)
    except BadRequest as refused:
        return refused.rc
    return None


@pytest.mark.parametrize("conformance", list(ChatConformance))
@pytest.mark.parametrize("extras", [TOOLS, None, {"response_format": {"type": "json_object"}}])
def test_call_that_was_not_offered_is_invalid_in_both_modes(
    extras: dict[str, Any] | None, conformance: ChatConformance
) -> None:
    assert (
        code_of(build_reply("format_disk"), extras, conformance) is ReturnCode.CHAT_SUBMIT_INVALID
    )


@pytest.mark.parametrize("conformance", list(ChatConformance))
def test_two_calls_with_one_id_are_invalid_in_both_modes(conformance: ChatConformance) -> None:
    reply = build_reply("lookup_weather", "lookup_time")
    reply["tool_calls"][1]["id"] = reply["tool_calls"][0]["id"]
    assert code_of(reply, TOOLS, conformance) is ReturnCode.CHAT_SUBMIT_INVALID


FORCED = {"type": "function", "function": {"name": "lookup_weather"}}


@pytest.mark.parametrize(
    ("choice", "reply"),
    [
        ("none", build_reply("lookup_weather")),
        ("required", build_reply(content="It rains.")),
        (FORCED, build_reply(content="It rains.")),
        (FORCED, build_reply("lookup_time")),
        (FORCED, build_reply("lookup_weather", "lookup_time")),
    ],
)
def test_broken_tool_choice_is_nonconformant_under_strict_alone(
    choice: Any, reply: dict[str, Any]
) -> None:
    extras = TOOLS | {"tool_choice": choice}
    assert code_of(reply, extras, STRICT) is ReturnCode.CHAT_SUBMIT_NONCONFORMANT
    assert code_of(reply, extras, BEST_EFFORT) is None


@pytest.mark.parametrize(
    ("choice", "reply"),
    [
        ("none", build_reply(content="It rains.")),
        ("auto", build_reply(content="It rains.")),
        ("required", build_reply("lookup_time", "lookup_weather")),
        (FORCED, build_reply("lookup_weather", "lookup_weather")),
    ],
)
def test_reply_that_follows_the_tool_choice_passes(choice: Any, reply: dict[str, Any]) -> None:
    assert verify_chat_reply(reply, TOOLS | {"tool_choice": choice}, STRICT) == VerifiedChatReply(
        message=reply
    )


def test_refusal_of_text_under_required_is_worded_as_in_the_examples() -> None:
    with pytest.raises(BadRequest) as refused:
        verify_chat_reply(build_reply(content="Rain."), TOOLS | {"tool_choice": "required"}, STRICT)
    assert (
        refused.value.message
        == "The request's 'tool_choice' is 'required', so the reply needs 'tool_calls'."
    )


def test_first_call_is_kept_without_parallel_calls_and_a_dropped_one_is_not_checked() -> None:
    reply = build_reply("lookup_weather", "format_disk", "lookup_time")
    verified = verify_chat_reply(reply, TOOLS | {"parallel_tool_calls": False}, STRICT)
    assert verified == VerifiedChatReply(
        message=build_reply("lookup_weather"), dropped_tool_call_count=2
    )
    assert len(reply["tool_calls"]) == 3


def test_every_call_is_kept_under_best_effort() -> None:
    reply = build_reply("lookup_weather", "lookup_time")
    assert (
        verify_chat_reply(reply, TOOLS | {"parallel_tool_calls": False}, BEST_EFFORT).message
        == reply
    )


@pytest.mark.parametrize(
    "response_format", [build_format("json_object"), build_format("json_schema")]
)
@pytest.mark.parametrize(
    "content",
    ["Blue.", "[1]", "", '{"a": NaN}', '{"a": Infinity}', "{" * 100_000, '"{}"', "1" * 5000],
)
def test_content_that_is_no_json_object_is_nonconformant_under_strict_alone(
    content: str, response_format: dict[str, Any]
) -> None:
    reply = build_reply(content=content)
    assert code_of(reply, response_format, STRICT) is ReturnCode.CHAT_SUBMIT_NONCONFORMANT
    assert code_of(reply, response_format, BEST_EFFORT) is None


def test_schema_without_strict_asks_for_an_object_and_no_more() -> None:
    assert code_of(build_reply(content="{}"), build_format("json_schema")) is None


@pytest.mark.parametrize(
    "content",
    ["Blue.", "{}", '["shade"]', '{"shade": 1}', '{"shade": "x", "more": 1}', '{"shade": NaN}'],
)
def test_content_that_breaks_a_strict_schema_is_nonconformant_under_strict_alone(
    content: str,
) -> None:
    response_format = build_format("json_schema", strict=True)
    assert (
        code_of(build_reply(content=content), response_format, STRICT)
        is ReturnCode.CHAT_SUBMIT_NONCONFORMANT
    )
    assert code_of(build_reply(content=content), response_format, BEST_EFFORT) is None


def test_content_that_matches_a_strict_schema_passes_whatever_its_reasoning_says() -> None:
    reply = build_reply(content='{"shade": "blue"}', reasoning_content="not JSON at all")
    assert code_of(reply, build_format("json_schema", strict=True)) is None


@pytest.mark.parametrize("content", [None, ""])
def test_reply_that_only_calls_is_exempt_from_the_format(content: str | None) -> None:
    reply = build_reply("lookup_weather", content=content)
    assert code_of(reply, TOOLS | build_format("json_schema", strict=True)) is None


def test_reply_that_calls_and_speaks_is_not_exempt() -> None:
    reply = build_reply("lookup_weather", content="Blue.")
    assert (
        code_of(reply, TOOLS | build_format("json_object")) is ReturnCode.CHAT_SUBMIT_NONCONFORMANT
    )


@pytest.mark.parametrize("state", [SubmissionState.CENSORED, SubmissionState.CSAM])
def test_censored_reply_is_held_to_the_rules_of_every_reply_alone(state: SubmissionState) -> None:
    extras = (
        TOOLS
        | {"tool_choice": "required", "parallel_tool_calls": False}
        | build_format("json_object")
    )
    verify_chat_reply(build_reply(content="withheld"), extras, STRICT, state)
    with pytest.raises(BadRequest) as refused:
        verify_chat_reply(build_reply("format_disk"), extras, STRICT, state)
    assert refused.value.rc is ReturnCode.CHAT_SUBMIT_INVALID


FAN_OUT: dict[str, Any] = {
    "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    | {"d40": {}},
    "$ref": "#/$defs/d0",
}


@pytest.mark.parametrize(
    ("content", "schema"),
    [
        ("{}", {"type": "no_such_type"}),
        ("{}", {"$ref": "#"}),
        ("{}", {"$ref": "#/$defs/missing"}),
        ("{}", {"$ref": "http://127.0.0.1:9/schema.json"}),
        ("{}", {"$ref": "file:///etc/passwd"}),
        ('"a"', {"pattern": "("}),
        (f'"{"a" * 60}!"', {"type": "string", "pattern": "^(a+)+$"}),
        ("{}", FAN_OUT),
    ],
)
def test_hostile_schema_cannot_be_compiled_and_ends_in_time(
    content: str, schema: dict[str, Any]
) -> None:
    judge_content_by_schema("{}", {})  # a helper that is running already
    started = time.monotonic()
    assert judge_content_by_schema(content, schema) is SchemaVerdict.UNCOMPILABLE
    assert time.monotonic() - started < 60
    assert judge_content_by_schema("{}", COLOUR) is SchemaVerdict.MISMATCH


def test_refusal_of_an_uncompilable_schema_says_so() -> None:
    with pytest.raises(BadRequest, match="schema cannot be compiled") as refused:
        verify_chat_reply(
            build_reply(content="{}"),
            build_format("json_schema", {"$ref": "#/x"}, strict=True),
            STRICT,
        )
    assert refused.value.rc is ReturnCode.CHAT_SUBMIT_NONCONFORMANT


@pytest.mark.parametrize(
    ("schema", "verdict"),
    [
        ({"prefixItems": [{"type": "string"}]}, SchemaVerdict.MISMATCH),
        (
            {"$schema": "https://example.com/unknown", "prefixItems": [{"type": "string"}]},
            SchemaVerdict.MISMATCH,
        ),
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "prefixItems": [{"type": "string"}],
            },
            SchemaVerdict.MATCH,
        ),
    ],
)
def test_schema_is_read_by_its_draft_or_else_2020_12(
    schema: dict[str, Any], verdict: SchemaVerdict
) -> None:
    assert judge_content_by_schema("[1]", schema) is verdict


def test_helper_killed_from_outside_is_replaced() -> None:
    judge_content_by_schema("{}", {})
    for helper in reply_schema._pool._idle:
        helper.process.kill()
        helper.process.wait()
    assert judge_content_by_schema("{}", {}) is SchemaVerdict.MATCH


def test_threads_share_the_helpers() -> None:
    verdicts: list[SchemaVerdict] = []
    threads = [
        threading.Thread(
            target=lambda: verdicts.append(judge_content_by_schema('{"shade": "x"}', COLOUR))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [SchemaVerdict.MATCH] * 8
    assert len(reply_schema._pool._idle) <= reply_schema.MAX_HELPER_COUNT


def test_forked_process_starts_helpers_of_its_own() -> None:
    judge_content_by_schema("{}", {})
    child = os.fork()
    if child == 0:
        is_right = judge_content_by_schema("{}", COLOUR) is SchemaVerdict.MISMATCH
        reply_schema._pool.close()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert judge_content_by_schema("{}", {}) is SchemaVerdict.MATCH


def test_hostile_replies_sent_at_once_hold_a_bounded_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reply_schema._pool, "wait_seconds", 0.05)
    monkeypatch.setattr(reply_schema._pool, "_slots", threading.BoundedSemaphore(1))
    monkeypatch.setattr(reply_schema._pool, "_places", threading.BoundedSemaphore(2))
    reply_schema._pool._slots.acquire()
    with pytest.raises(SchemaHelperUnavailable) as waited:
        judge_content_by_schema("{}", {})
    assert (waited.value.status, waited.value.rc) == (503, None)
    monkeypatch.setattr(reply_schema._pool, "wait_seconds", 60)
    for _ in range(2):
        reply_schema._pool._places.acquire()
    with pytest.raises(SchemaHelperUnavailable):  # at once
        judge_content_by_schema("{}", {})
