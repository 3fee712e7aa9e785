# SPDX-License-Identifier: AGPL-3.0-or-later
"""From a client's body to the stored request and the worker's job."""

import copy
import dataclasses
import hashlib
import json
from contextlib import suppress
from typing import Any
from uuid import UUID

import pytest
from horde_sdk.generation_parameters.text.chat_limits import (
    MAX_CHAT_TEXT_BYTES,
    MAX_CHAT_TOOL_SPEC_BYTES,
)
from horde_sdk.generation_parameters.text.chat_policy import chat_request_requirements
from horde_sdk.worker.chat_declaration import ChatJobPayload
from hypothesis import given, settings
from hypothesis import strategies as st

from horde.chat.images import list_image_parts
from horde.chat_contract import MAX_CHAT_IMAGE_BYTES, MAX_CHAT_IMAGE_TOTAL_BYTES, ChatRequestRefused
from horde.classes.kobold.chat_request import (
    OPERATION_FINGERPRINT_EXCLUDED_HORDE_KEYS,
    ChatRequest,
    build_chat_job_payload,
    build_chat_request_traits,
    build_operation_fingerprint,
    build_stored_chat_extras,
    build_worker_targeting,
    chat_tools_temperature,
    estimate_chat_prompt_tokens,
    flatten_messages,
    parse_chat_request,
    replace_image_urls,
    required_chat_features,
    rewrite_message_texts,
    streams_progress,
)
from horde.exceptions import HordeError, PayloadInvalid
from horde.json_body import parse_json_body
from horde.return_codes import ReturnCode

USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "m", "messages": [USER]}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "lookup_weather", "arguments": '{"city":"Oslo"}'},
}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
]
TOOL = {
    "type": "function",
    "function": {"name": "lookup_weather", "parameters": {"type": "object"}},
}
OTHER_TOOL = {"type": "function", "function": {"name": "lookup_time"}}
FORCED = {"type": "function", "function": {"name": "lookup_weather"}}
UNSUPPORTED, CONFLICT, BAD = (
    ReturnCode.UNSUPPORTED_CHAT_PARAMETER,
    ReturnCode.CHAT_REQUEST_CONFLICT,
    ReturnCode.BAD_REQUEST,
)


def parse(**changes: Any) -> ChatRequest:
    return parse_chat_request(BODY | changes)


def refusal_of(**changes: Any) -> ChatRequestRefused:
    with pytest.raises(ChatRequestRefused) as refused:
        parse(**changes)
    return refused.value


def build_payload(chat: ChatRequest) -> dict[str, Any]:
    return build_chat_job_payload(
        messages=chat.messages,
        text_params=chat.text_params,
        chat_extras=build_stored_chat_extras(chat),
        max_length=chat.requested_max_length,
        max_context_length=chat.requested_context_length,
    )


# --- keys and values
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [None, [], "hi", 1, True])
def test_body_is_an_object(body: object) -> None:
    with pytest.raises(ChatRequestRefused) as refused:
        parse_chat_request(body)
    assert refused.value.rc is BAD


@pytest.mark.parametrize(
    "key",
    ["logprobs", "top_logprobs", "logit_bias", "modalities", "audio", "prediction", "top_k", "x"],
)
@pytest.mark.parametrize("value", [None, True, {}])
def test_unknown_key_is_refused_by_name_even_as_null(key: str, value: object) -> None:
    refused = refusal_of(**{key: value})
    assert (refused.message, refused.rc) == (
        f"'{key}' is not supported on chat requests.",
        UNSUPPORTED,
    )


def test_answer_to_a_huge_key_is_short() -> None:
    assert len(refusal_of(**{"x" * 1_000_000: 1}).message) < 400


@pytest.mark.parametrize(
    ("changes", "path", "rc"),
    [
        ({"model": None}, "model", BAD),
        ({"model": ""}, "model", BAD),
        ({"model": 1}, "model", BAD),
        ({"models": ["a"]}, "models", CONFLICT),
        ({"model": None, "models": []}, "models", BAD),
        ({"model": None, "models": ["a", ""]}, "models[1]", BAD),
        ({"model": None, "models": ["a", "a"]}, "models[1]", BAD),
        ({"model": None, "models": list("abcdef")}, "models", BAD),
        ({"model": None, "models": "a"}, "models", BAD),
        ({"messages": None}, "messages", BAD),
        ({"messages": []}, "messages", BAD),
        ({"messages": {}}, "messages", BAD),
        ({"max_tokens": 64, "max_completion_tokens": 65}, "max_tokens", CONFLICT),
        ({"max_tokens": 64.0}, "max_tokens", BAD),
        ({"max_completion_tokens": "64"}, "max_completion_tokens", BAD),
        ({"max_tokens": True}, "max_tokens", BAD),
        ({"temperature": "1"}, "temperature", BAD),
        ({"top_p": False}, "top_p", BAD),
        ({"seed": 1.0}, "seed", BAD),
        ({"seed": 2**63}, "seed", BAD),
        ({"seed": -(2**63) - 1}, "seed", BAD),
        ({"reasoning_effort": "extreme"}, "reasoning_effort", BAD),
        ({"reasoning_effort": 1}, "reasoning_effort", BAD),
        ({"stop": ""}, "stop", BAD),
        ({"stop": ["a", ""]}, "stop", BAD),
        ({"stop": [1]}, "stop", BAD),
        ({"n": 2}, "n=2", UNSUPPORTED),
        ({"n": 0}, "n=0", UNSUPPORTED),
        ({"n": 1.0}, "n", BAD),
        ({"n": True}, "n", BAD),
        ({"stream": "true"}, "stream", BAD),
        ({"stream_options": []}, "stream_options", BAD),
        ({"user": 1}, "user", BAD),
        ({"metadata": "x"}, "metadata", BAD),
        ({"horde": {"models": ["a"]}}, "horde.models", UNSUPPORTED),
        ({"tools": {}}, "tools", BAD),
        ({"tools": [{"type": "function"}]}, "tools[0].function", BAD),
        ({"tools": [TOOL | {"extra": None}]}, "tools[0].extra", UNSUPPORTED),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", BAD),
        ({"tools": [TOOL], "tool_choice": FORCED | {"x": 1}}, "tool_choice.x", UNSUPPORTED),
        ({"tools": [TOOL], "parallel_tool_calls": 0}, "parallel_tool_calls", BAD),
    ],
)
def test_bad_key_is_refused_with_its_path(
    changes: dict[str, Any], path: str, rc: ReturnCode
) -> None:
    refused = refusal_of(**changes)
    assert (refused.path, refused.rc) == (path, rc)


@pytest.mark.parametrize(
    ("message", "path", "rc"),
    [
        ("hi", "messages[0]", BAD),
        ({"content": "hi"}, "messages[0].role", BAD),
        ({"role": "function", "content": "hi"}, "messages[0].role=function", UNSUPPORTED),
        ({"role": "banana", "content": "hi"}, "messages[0].role=banana", UNSUPPORTED),
        (USER | {"tool_calls": [CALL]}, "messages[0].tool_calls", UNSUPPORTED),
        (USER | {"tool_calls": None}, "messages[0].tool_calls", UNSUPPORTED),
        (
            {"role": "tool", "content": "x", "tool_call_id": "a", "name": "b"},
            "messages[0].name",
            UNSUPPORTED,
        ),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id", BAD),
        (
            {"role": "tool", "content": "x", "tool_call_id": "a" * 257},
            "messages[0].tool_call_id",
            BAD,
        ),
        ({"role": "tool", "content": None, "tool_call_id": "a"}, "messages[0].content", BAD),
        (USER | {"name": ""}, "messages[0].name", BAD),
        (USER | {"name": "x" * 65}, "messages[0].name", BAD),
        ({"role": "user"}, "messages[0].content", BAD),
        ({"role": "user", "content": None}, "messages[0].content", BAD),
        ({"role": "user", "content": []}, "messages[0].content", BAD),
        ({"role": "assistant", "content": None}, "messages[0].content", BAD),
        (
            {"role": "assistant", "content": "x", "refusal": None},
            "messages[0].refusal",
            UNSUPPORTED,
        ),
        ({"role": "assistant", "tool_calls": []}, "messages[0].tool_calls", BAD),
        (
            {"role": "assistant", "tool_calls": [CALL | {"index": 0}]},
            "messages[0].tool_calls[0].index",
            UNSUPPORTED,
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"id": "x" * 257}]},
            "messages[0].tool_calls[0].id",
            BAD,
        ),
        ({"role": "user", "content": ["hi"]}, "messages[0].content[0]", BAD),
        ({"role": "user", "content": [{"text": "hi"}]}, "messages[0].content[0].type", BAD),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", BAD),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]},
            "messages[0].content[0].b",
            UNSUPPORTED,
        ),
    ],
)
def test_bad_message_is_refused_with_its_path(message: object, path: str, rc: ReturnCode) -> None:
    refused = refusal_of(messages=[message])
    assert (refused.path, refused.rc) == (path, rc)
    assert path in refused.message


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        ("system", "image_url"),
        ("assistant", "image_url"),
        ("tool", "image_url"),
        ("user", "input_audio"),
        ("user", "image"),
    ],
)
def test_part_of_another_type_is_unsupported(role: str, kind: str) -> None:
    content = [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]
    keys = {"tool_call_id": "a"} if role == "tool" else {}
    refused = refusal_of(messages=[USER, {"role": role, "content": content, **keys}])
    assert (refused.rc, refused.path) == (UNSUPPORTED, f"messages[1].content[1].type={kind}")


def build_image(url: object = "https://example.com/a.png", **image_url: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **image_url}}


def build_data_url(byte_count: int) -> str:
    return "data:image/png;base64," + "A" * (byte_count // 3 * 4)


def with_parts(*parts: object) -> list[dict[str, Any]]:
    return [USER, {"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]


@pytest.mark.parametrize(
    ("part", "path", "rc"),
    [
        ({"type": "image_url"}, "messages[1].content[1].image_url", BAD),
        (
            {"type": "image_url", "image_url": "https://example.com"},
            "messages[1].content[1].image_url",
            BAD,
        ),
        ({"type": "image_url", "image_url": {}}, "messages[1].content[1].image_url.url", BAD),
        (build_image(url=None), "messages[1].content[1].image_url.url", BAD),
        (build_image(url=1), "messages[1].content[1].image_url.url", BAD),
        (build_image(detail="best"), "messages[1].content[1].image_url.detail", BAD),
        (build_image(detail=["low"]), "messages[1].content[1].image_url.detail", BAD),
        (build_image(size=1), "messages[1].content[1].image_url.size", UNSUPPORTED),
        (build_image() | {"text": "x"}, "messages[1].content[1].text", UNSUPPORTED),
        (
            build_image("ftp://example.com/a"),
            "messages[1].content[1].image_url.url",
            ReturnCode.SOURCE_IMAGE_URL_INVALID,
        ),
        (
            build_image("data:text/plain;base64,AAAA"),
            "messages[1].content[1].image_url.url",
            ReturnCode.SOURCE_IMAGE_URL_INVALID,
        ),
        (
            build_image(build_data_url(MAX_CHAT_IMAGE_BYTES + 3)),
            "messages[1].content[1].image_url.url",
            ReturnCode.SOURCE_IMAGE_SIZE_EXCEEDED,
        ),
    ],
)
def test_bad_image_is_refused_with_its_path(part: object, path: str, rc: ReturnCode) -> None:
    refused = refusal_of(messages=with_parts(part))
    assert (refused.path, refused.rc, refused.status) == (path, rc, 400)
    assert path in refused.message


def test_an_image_is_kept_as_sent_and_a_null_detail_is_none() -> None:
    images = [
        build_image(),
        build_image(detail=None),
        build_image("data:image/png;base64,eHl6", detail="low"),
    ]
    assert parse(messages=with_parts(*images)).messages[1]["content"][1:] == [
        images[0],
        images[0],
        images[2],
    ]


def test_twenty_images_are_taken_and_no_more() -> None:
    assert len(parse(messages=with_parts(*[build_image()] * 20)).messages[1]["content"]) == 21
    refused = refusal_of(
        messages=[
            *with_parts(*[build_image()] * 19),
            {"role": "user", "content": [build_image()] * 2},
        ]
    )
    assert refused.rc is ReturnCode.TOO_MANY_EXTRA_SOURCE_IMAGES


def test_data_urls_are_held_to_25_mebibytes_in_all() -> None:
    largest = build_image(build_data_url(MAX_CHAT_IMAGE_BYTES - 1))
    parse(messages=with_parts(*[largest] * 5))
    refused = refusal_of(messages=with_parts(*[largest] * 5, build_image(build_data_url(12))))
    assert refused.rc is ReturnCode.SOURCE_IMAGE_SIZE_EXCEEDED
    total = 5 * ((MAX_CHAT_IMAGE_BYTES - 1) // 3 * 3) + 12
    assert str(total) in refused.message
    assert str(MAX_CHAT_IMAGE_TOTAL_BYTES) in refused.message


def test_stored_messages_name_images_by_key_and_keep_no_url() -> None:
    request_id = UUID(int=7)
    messages = parse(
        messages=[*with_parts(build_image(detail="low")), *with_parts(build_image(), build_image())]
    ).messages
    stored = replace_image_urls(messages, request_id)
    assert [image.image_url for image in list_image_parts(stored)] == [
        {"url": f"horde-r2://{request_id}_chat_0.jpg", "detail": "low"},
        {"url": f"horde-r2://{request_id}_chat_1.jpg"},
        {"url": f"horde-r2://{request_id}_chat_2.jpg"},
    ]
    assert "example.com" not in json.dumps(stored)
    assert "example.com" in json.dumps(messages)


def test_fingerprint_covers_images_by_their_urls_as_submitted() -> None:
    def fingerprint(*urls: str) -> str:
        return build_operation_fingerprint(parse(messages=with_parts(*map(build_image, urls))))

    first, second = "https://example.com/a.png", "https://example.com/b.png"
    assert fingerprint(first, second) == fingerprint(first, second)
    assert (
        len(
            {
                fingerprint(first),
                fingerprint(second),
                fingerprint(first, second),
                fingerprint(second, first),
            }
        )
        == 4
    )


def test_fingerprint_is_the_digest_of_the_whole_canonical_document() -> None:
    chat = parse(
        messages=with_parts(build_image('https://example.com/"\\u0000"'), build_image(detail="low"))
    )
    identity = {
        "messages": chat.messages,
        "params": {"max_length": 512},
        "models": sorted(chat.models),
        "horde": chat.horde.model_dump(
            mode="json", exclude=set(OPERATION_FINGERPRINT_EXCLUDED_HORDE_KEYS)
        ),
    }
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert build_operation_fingerprint(chat) == hashlib.sha256(canonical.encode()).hexdigest()


def test_stream_asks_for_progress() -> None:
    assert parse(stream=False).stream is parse(stream=None).stream is False
    assert parse(stream=True).stream is True


@pytest.mark.parametrize(
    ("changes", "errors"),
    [
        ({"max_tokens": 8}, {"params.max_length": "8 is less than the minimum of 16"}),
        (
            {"max_completion_tokens": 16385},
            {"params.max_length": "16385 is greater than the maximum of 16384"},
        ),
        ({"temperature": 5.5}, {"params.temperature": "5.5 is greater than the maximum of 5"}),
        ({"top_p": 0}, {"params.top_p": "0.0 is less than the minimum of 0.001"}),
        (
            {"frequency_penalty": 2.5, "presence_penalty": -3},
            {
                "params.frequency_penalty": "2.5 is greater than the maximum of 2",
                "params.presence_penalty": "-3.0 is less than the minimum of -2",
            },
        ),
        (
            {"horde": {"max_context_length": 79}},
            {"params.max_context_length": "79 is less than the minimum of 80"},
        ),
    ],
)
def test_number_outside_its_range_is_not_clamped(
    changes: dict[str, Any], errors: dict[str, str]
) -> None:
    with pytest.raises(PayloadInvalid) as refused:
        parse(**changes)
    assert refused.value.extra["errors"] == errors


def test_more_than_1024_messages_are_unsupported() -> None:
    assert len(parse(messages=[USER] * 1024).messages) == 1024
    assert refusal_of(messages=[USER] * 1025).rc is UNSUPPORTED


def test_text_limit_counts_every_part_name_and_argument_in_bytes() -> None:
    room = MAX_CHAT_TEXT_BYTES - len("lookup_weather") - len('{"city":"Oslo"}') - len("Rain")
    pieces = ["é" * (room // 100) for _ in range(50)]
    pieces[-1] += "x" * (room - sum(len(piece.encode()) for piece in pieces))
    parts = [{"type": "text", "text": piece} for piece in pieces]
    full = [{"role": "user", "content": parts}, *HISTORY[1:]]
    parse(messages=full)
    refused = refusal_of(messages=[*full, {"role": "user", "content": "x"}])
    assert (refused.rc, refused.path) == (UNSUPPORTED, "messages")


def test_tool_spec_is_bounded_together() -> None:
    spec = {
        "tools": [{"type": "function", "function": {"name": "a", "description": ""}}],
        "tool_choice": None,
        "response_format": None,
    }
    room = MAX_CHAT_TOOL_SPEC_BYTES - len(json.dumps(spec, separators=(",", ":")))
    function = {"name": "a", "description": "é" * (room // 2) + "x" * (room % 2)}
    parse(tools=[{"type": "function", "function": function}])
    refused = refusal_of(tools=[{"type": "function", "function": function}], tool_choice="auto")
    assert (refused.rc, refused.path) == (UNSUPPORTED, "tools")


def test_openai_guards_ask_for_the_word_json() -> None:
    object_format = {"type": "json_object"}
    parse(response_format=object_format)
    parse(
        response_format=object_format,
        messages=[{"role": "system", "content": "Answer in JSON."}],
        horde={"openai_guards": True},
    )
    refused = refusal_of(response_format=object_format, horde={"openai_guards": True})
    assert (refused.rc, refused.message) == (
        CONFLICT,
        (
            "'messages' must contain the word 'json' in some form, to use 'response_format' of type"
            " 'json_object'."
        ),
    )


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("stream", [True, False])
def test_impossible_tool_choice_is_a_conflict(tools: object, stream: bool) -> None:
    assert refusal_of(tools=tools, tool_choice="required", stream=stream).rc is CONFLICT
    assert (
        refusal_of(tools=tools, parallel_tool_calls=False, stream=stream).message
        == "Invalid value for 'parallel_tool_calls': 'parallel_tool_calls' is only allowed when"
        " 'tools' are specified."
    )


# --- what is stored
# -------------------------------------------------------------------------------------------------

NULLS = dict.fromkeys(
    [
        *(
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "n",
            "seed",
            "stop",
            "stream",
            "stream_options",
        ),
        *(
            "presence_penalty",
            "frequency_penalty",
            "reasoning_effort",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
        ),
        *("response_format", "metadata", "user", "models", "horde"),
    ]
)


def test_null_on_every_optional_key_is_the_same_as_absent() -> None:
    chat = parse(**NULLS)
    assert chat == parse()
    assert build_payload(chat) == {
        "messages": [USER],
        "temperature": 1.0,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "rep_pen": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_length": 512,
        "max_context_length": 2048,
        "n": 1,
    }
    assert required_chat_features(chat) == ["prompt_overflow_refused"]


def test_developer_is_stored_as_system() -> None:
    developer = [{"role": "developer", "content": "Be brief.", "name": "a"}, USER]
    chat = parse(messages=developer)
    assert chat.messages == [{"role": "system", "content": "Be brief.", "name": "a"}, USER]
    assert developer[0]["role"] == "developer"
    system = parse(messages=[developer[0] | {"role": "system"}, USER])
    assert build_operation_fingerprint(chat) == build_operation_fingerprint(system)


def test_text_parts_are_kept_in_order_unchanged() -> None:
    parts = [{"type": "text", "text": "ONE"}, {"type": "text", "text": "TWO"}]
    messages = [{"role": "user", "content": parts}, HISTORY[1], HISTORY[2] | {"content": parts}]
    assert build_payload(parse(messages=messages))["messages"] == messages


def test_history_of_calls_is_kept_with_null_content() -> None:
    without_content = [HISTORY[0], {"role": "assistant", "tool_calls": [CALL]}, HISTORY[2]]
    assert parse(messages=HISTORY).messages == parse(messages=without_content).messages == HISTORY


def test_nulls_of_optional_message_keys_are_dropped() -> None:
    assert parse(messages=[USER | {"name": None}]).messages == [USER]
    assert parse(messages=[{"role": "assistant", "content": "x", "tool_calls": None}]).messages == [
        {"role": "assistant", "content": "x"}
    ]


@pytest.mark.parametrize(
    ("stop", "stored"),
    [("\nuser:", ["\nuser:"]), (["b", "a", "b"], ["b", "a"]), ([], None), (None, None)],
)
def test_stop_becomes_a_list_without_repeats(stop: object, stored: list[str] | None) -> None:
    assert build_payload(parse(stop=stop)).get("stop_sequence") == stored


def test_clients_values_reach_the_payload() -> None:
    chat = parse(
        temperature=0,
        seed=-5,
        reasoning_effort="none",
        max_completion_tokens=64,
        presence_penalty=1,
    )
    payload = build_payload(chat)
    assert (payload["temperature"], payload["seed"], payload["reasoning_effort"]) == (
        0.0,
        -5,
        "none",
    )
    assert (payload["max_length"], payload["presence_penalty"]) == (64, 1.0)


def test_payload_has_the_shape_of_the_wire_examples() -> None:
    tools = {
        "tools": [TOOL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_object"},
    }
    payload = build_payload(
        parse(messages=HISTORY, temperature=0.5, stop="\nuser:", max_tokens=512, **tools)
    )
    assert list(payload) == [
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format"),
        *(
            "temperature",
            "top_p",
            "frequency_penalty",
            "presence_penalty",
            "rep_pen",
            "top_k",
            "min_p",
        ),
        *("stop_sequence", "max_length", "max_context_length", "n"),
    ]
    assert {key: payload[key] for key in tools} == tools


def test_worker_gets_no_tools_under_none() -> None:
    chat = parse(
        tools=[TOOL],
        tool_choice="none",
        parallel_tool_calls=True,
        response_format={"type": "json_object"},
    )
    assert build_stored_chat_extras(chat) == {
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "json_object"},
    }
    payload = build_payload(chat)
    assert payload["response_format"] == {"type": "json_object"}
    assert not payload.keys() & {"tools", "tool_choice", "parallel_tool_calls"}


def test_worker_gets_one_tool_as_required_under_a_function_choice() -> None:
    chat = parse(tools=[OTHER_TOOL, TOOL], tool_choice=FORCED)
    payload = build_payload(chat)
    assert (payload["tools"], payload["tool_choice"]) == ([TOOL], "required")
    assert build_stored_chat_extras(chat) == {"tools": [OTHER_TOOL, TOOL], "tool_choice": FORCED}


def test_nothing_is_stored_when_nothing_applies() -> None:
    assert build_stored_chat_extras(parse(tools=[], response_format={"type": "text"})) is None


def test_stream_hint_is_stored_sent_and_no_part_of_the_fingerprint() -> None:
    chat = parse(response_format={"type": "json_object"})
    streamed = dataclasses.replace(chat, stream=True)
    extras = build_stored_chat_extras(streamed)
    assert extras == {"response_format": {"type": "json_object"}, "stream_progress": True}
    assert build_payload(streamed)["stream_progress"] is True
    assert (
        streams_progress(extras),
        streams_progress(build_stored_chat_extras(chat)),
        streams_progress(None),
    ) == (
        True,
        False,
        False,
    )
    assert build_operation_fingerprint(streamed) == build_operation_fingerprint(chat)


def test_moderation_rewrites_texts_and_leaves_calls() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "bad"}]},
        HISTORY[1],
        HISTORY[2] | {"content": "worse"},
    ]
    rewritten = rewrite_message_texts(messages, lambda text: "" if text == "bad" else text.upper())
    assert rewritten == [
        {"role": "user", "content": [{"type": "text", "text": ""}]},
        HISTORY[1],
        HISTORY[2] | {"content": "WORSE"},
    ]
    assert messages[0]["content"] == [{"type": "text", "text": "bad"}]


def test_prompt_and_estimate_are_those_of_the_wire_examples() -> None:
    messages = [
        {"role": "system", "content": "You are a terse assistant."},
        {"role": "user", "content": [{"type": "text", "text": "Name one colour."}]},
    ]
    assert (
        flatten_messages(messages) == "system: You are a terse assistant.\nuser: Name one colour."
    )
    assert estimate_chat_prompt_tokens(messages) == 19


@pytest.mark.parametrize(
    ("horde", "ids", "is_deny_list"),
    [({}, (), False), ({"only": ["a", "b"]}, ("a", "b"), False), ({"ignore": ["c"]}, ("c",), True)],
)
def test_targeting_is_an_allow_or_a_deny_list(
    horde: dict[str, Any], ids: tuple[str, ...], is_deny_list: bool
) -> None:
    targeting = build_worker_targeting(parse(horde=horde | {"trusted_workers": True}).horde)
    assert (targeting.worker_ids, targeting.is_deny_list) == (ids, is_deny_list)
    assert (targeting.trusted_workers, targeting.validated_backends, targeting.slow_workers) == (
        True,
        False,
        True,
    )


# --- operation fingerprint
# ------------------------------------------------------------------------------------------

KEY = "0b8f6f0e-3c43-4d9f-8f39-6f0c8c0a7d11"


def test_operation_key_is_read_as_a_uuid() -> None:
    assert parse(horde={"operation_key": KEY.upper()}).operation_key == UUID(KEY)


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({"max_tokens": 64}, {"max_completion_tokens": 64}),
        ({}, {"max_tokens": 512}),
        ({}, {"temperature": 1, "top_p": 1.0, "frequency_penalty": 0, "presence_penalty": -0.0}),
        ({"temperature": 2}, {"temperature": 2.0}),
        (
            {},
            {
                "horde": {
                    "slow_workers": True,
                    "context_fit": "truncate_oldest",
                    "conformance": "strict",
                }
            },
        ),
        (
            {},
            {
                "horde": {
                    "max_kudos": 5,
                    "dry_run": True,
                    "include_reasoning": False,
                    "availability_mode": "fail_fast",
                }
            },
        ),
        ({}, {"horde": {"operation_key": KEY}}),
        ({}, {"model": None, "models": ["m"]}),
        ({"model": None, "models": ["a", "b"]}, {"model": None, "models": ["b", "a"]}),
        ({}, {"user": "u", "metadata": {"a": 1}, "stream_options": {}, "stream": False, "n": 1}),
        ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}),
        ({}, {"tools": [], "response_format": {"type": "text"}}),
        ({"stop": "a"}, {"stop": ["a", "a"]}),
    ],
)
def test_same_operation_has_the_same_fingerprint(
    changes: dict[str, Any], others: dict[str, Any]
) -> None:
    assert build_operation_fingerprint(parse(**changes)) == build_operation_fingerprint(
        parse(**others)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "user", "content": "other"}]},
        {"messages": [USER | {"name": "a"}]},
        {"model": "other"},
        {"max_tokens": 64},
        {"temperature": 0},
        {"seed": 0},
        {"stop": "a"},
        {"reasoning_effort": "none"},
        {"horde": {"only": ["a"]}},
        {"horde": {"slow_workers": False}},
        {"horde": {"context_fit": "grow"}},
        {"horde": {"openai_guards": True}},
        {"horde": {"max_context_length": 4096}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_another_operation_has_another_fingerprint(changes: dict[str, Any]) -> None:
    fingerprint = build_operation_fingerprint(parse(**changes))
    assert fingerprint != build_operation_fingerprint(parse())
    assert len(fingerprint) == 64


# --- requirements
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "declarations"),
    [
        ({"seed": 0}, ["seed"]),
        ({"reasoning_effort": "none"}, ["reasoning_effort"]),
        ({"presence_penalty": 0, "frequency_penalty": 0.1}, ["frequency_penalty"]),
        ({"messages": HISTORY}, ["tools"]),
        ({"tools": [TOOL], "tool_choice": "none"}, []),
        ({"tools": [TOOL]}, ["tools"]),
        ({"tools": [TOOL], "tool_choice": "required"}, ["tool_choice_enforced", "tools"]),
        (
            {"tools": [TOOL], "tool_choice": FORCED, "horde": {"conformance": "best_effort"}},
            ["tools"],
        ),
        (
            {"tools": [TOOL], "response_format": {"type": "json_object"}},
            ["json_object", "tools", "tools_with_response_format"],
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {}, "strict": True},
                }
            },
            ["json_schema", "structured_output_enforced"],
        ),
    ],
)
def test_request_needs_what_its_values_ask_for(
    changes: dict[str, Any], declarations: list[str]
) -> None:
    chat = parse(**changes)
    guarantee = ["prompt_overflow_refused"] if chat.horde.conformance == "strict" else []
    assert required_chat_features(chat) == sorted([*declarations, *guarantee])


def test_image_part_needs_vision() -> None:
    image = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
    }
    assert "vision" in required_chat_features(dataclasses.replace(parse(), messages=[image]))


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [
        ({}, None),
        ({"tools": [TOOL]}, 1.0),
        ({"tools": [TOOL], "temperature": 0}, 0.0),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
    ],
)
def test_tools_temperature_is_set_when_tools_are_forwarded(
    changes: dict[str, Any], temperature: float | None
) -> None:
    assert chat_tools_temperature(parse(**changes)) == temperature


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


TEXTS = st.text(max_size=8)
MESSAGES = st.lists(
    st.sampled_from(
        [
            [USER],
            [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}],
            [{"role": "assistant", "content": "x"}],
            HISTORY,
        ]
    ),
    min_size=1,
    max_size=3,
).map(lambda groups: [copy.deepcopy(message) for group in groups for message in group])
RESPONSE_FORMATS = st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | st.builds(
    lambda strict: {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "string"}, "strict": strict},
    },
    optional(st.booleans()),
)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "m",
        "messages": draw(MESSAGES),
        "temperature": draw(optional(st.integers(0, 5) | st.floats(0, 5))),
        "frequency_penalty": draw(optional(st.integers(-2, 2) | st.floats(-2, 2))),
        "presence_penalty": draw(optional(st.integers(-2, 2) | st.floats(-2, 2))),
        "seed": draw(optional(st.integers(-(2**63), 2**63 - 1))),
        "reasoning_effort": draw(optional(st.sampled_from(["none", "low", "xhigh"]))),
        "tools": draw(optional(st.sampled_from([[], [TOOL], [OTHER_TOOL, TOOL]]))),
        "response_format": draw(optional(RESPONSE_FORMATS)),
        "horde": draw(
            optional(
                st.fixed_dictionaries(
                    {"conformance": optional(st.sampled_from(["strict", "best_effort"]))}
                )
            )
        ),
    }
    if body["tools"]:
        body["tool_choice"] = draw(optional(st.sampled_from(["none", "auto", "required", FORCED])))
        body["parallel_tool_calls"] = draw(optional(st.booleans()))
    missing = draw(
        st.sets(st.sampled_from([key for key, value in body.items() if value is None] or ["user"]))
    )
    return {key: value for key, value in body.items() if key not in missing}


class TestRequirementParity:
    """The server and the SDK derive the same requirements, so a client's local answer and the
    routing agree.
    """

    @given(bodies())
    def test_server_and_sdk_need_the_same_of_a_worker(self, body: dict[str, Any]) -> None:
        chat, requirements = parse_chat_request(body), chat_request_requirements(body)
        assert required_chat_features(chat) == sorted(requirements.declarations)
        assert build_chat_request_traits(chat) == requirements.traits
        assert chat.horde.conformance == requirements.conformance
        forwarded_temperature = (
            requirements.traits.temperature if requirements.traits.forwards_tools else None
        )
        assert chat_tools_temperature(chat) == forwarded_temperature

    @given(bodies())
    def test_image_parts_need_the_same_on_both_sides(self, body: dict[str, Any]) -> None:
        image = {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
        }
        chat = parse_chat_request(body)
        with_image = dataclasses.replace(chat, messages=[*chat.messages, image])
        requirements = chat_request_requirements(body | {"messages": [*body["messages"], image]})
        assert required_chat_features(with_image) == sorted(requirements.declarations)

    @given(bodies())
    def test_popped_job_needs_the_same_features(self, body: dict[str, Any]) -> None:
        chat = parse_chat_request(body)
        job = ChatJobPayload.from_pop(
            {"chat": True, "id": "job", "model": "m", "payload": build_payload(chat)}
        )
        features = {feature.value for feature in job.requirements.features}
        assert features == {feature.value for feature in chat_request_requirements(body).features}


# --- fuzz
# --------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda child: st.lists(child, max_size=3) | st.dictionaries(TEXTS, child, max_size=3),
    max_leaves=8,
)
SHAPES = st.sampled_from(
    [
        *HISTORY,
        USER,
        [USER],
        HISTORY,
        TOOL,
        [TOOL],
        FORCED,
        {"type": "json_object"},
        "auto",
        [CALL],
        ["m"],
    ]
)
KEYS = st.sampled_from(
    [
        *NULLS,
        "model",
        "messages",
        "role",
        "content",
        "tool_calls",
        "type",
        "function",
        "name",
        "horde",
        "only",
    ]
)


@st.composite
def damaged_bodies(draw: st.DrawFn) -> object:
    """A body that may be served, with a few values replaced at any depth."""
    body: Any = copy.deepcopy(draw(bodies()))
    for _ in range(draw(st.integers(1, 3))):
        place = body
        while isinstance(place, dict | list) and place:
            step = draw(
                st.sampled_from(
                    sorted(place) if isinstance(place, dict) else list(range(len(place)))
                )
            )
            if draw(st.booleans()) or not isinstance(place[step], dict | list):
                # Else the next damage would be done to the shape itself.
                place[step] = copy.deepcopy(draw(VALUES | SHAPES))
                break
            place = place[step]
        if isinstance(place, dict) and draw(st.booleans()):
            place[draw(KEYS | TEXTS)] = copy.deepcopy(draw(VALUES | SHAPES))
    return body


def derive_everything(body: object) -> None:
    chat = parse_chat_request(body)
    json.dumps(build_payload(chat), allow_nan=False)
    required_chat_features(chat)
    build_operation_fingerprint(chat)
    estimate_chat_prompt_tokens(chat.messages, chat.tools)


@settings(max_examples=200)
@given(VALUES | st.dictionaries(KEYS, VALUES | SHAPES, max_size=6) | damaged_bodies())
def test_any_json_is_parsed_or_refused(body: object) -> None:
    with suppress(HordeError):
        derive_everything(body)


@given(damaged_bodies())
def test_whatever_is_parsed_can_be_sent_as_bytes_and_read_again(body: object) -> None:
    with suppress(HordeError):
        chat = parse_chat_request(body)
        again = parse_chat_request(parse_json_body(json.dumps(body).encode()))
        assert build_operation_fingerprint(again) == build_operation_fingerprint(chat)
