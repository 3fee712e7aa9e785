# SPDX-License-Identifier: AGPL-3.0-or-later
"""Completions and model cards from native answers."""

from typing import Any

import pytest

from horde.oai.mapping import (
    CompletedReply,
    CompletionHead,
    build_completion,
    build_dry_run_completion,
    build_message,
    build_model_card,
    build_model_list,
    build_system_fingerprint,
    build_usage,
    build_x_horde,
    list_supported_parameters,
    parse_completed_reply,
)

FACTS = CompletionHead(
    request_id="id",
    created=7,
    model="m",
    estimated_prompt_tokens=40,
    include_reasoning=True,
    include_usage=False,
)
GENERATION = {
    "message": {"role": "assistant", "content": "Blue."},
    "finish_reason": "stop",
    "native_finish_reason": "eos",
    "prompt_tokens": 21,
    "completion_tokens": 3,
    "reasoning_tokens": None,
    "charge_basis": "output_estimate",
    "queue_wait_seconds": 0.2,
    "text": "Blue.",
    "worker_id": "00000000-0000-0000-0000-000000000001",
    "worker_name": "w",
    "model": "koboldcpp/model",
    "state": "ok",
}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def read(status: dict[str, Any] | None = None, **generation: Any) -> CompletedReply:
    reply = parse_completed_reply(
        {"generations": [GENERATION | generation], "kudos": 12} | (status or {})
    )
    assert reply is not None
    return reply


def test_54_the_fingerprint_follows_the_formula() -> None:
    assert (
        build_system_fingerprint("00000000-0000-0000-0000-000000000001", "koboldcpp/model")
        == "fp_66d806c83a"
    )
    completion = build_completion(FACTS, read())
    assert completion["system_fingerprint"] == "fp_66d806c83a"


def test_without_a_generation_there_is_no_reply() -> None:
    assert parse_completed_reply({"generations": [], "kudos": 1}) is None
    assert parse_completed_reply({}) is None


def test_47_the_counts_of_the_worker_are_used() -> None:
    assert build_usage(FACTS, read()) == {
        "prompt_tokens": 21,
        "completion_tokens": 3,
        "total_tokens": 24,
    }
    assert build_x_horde(FACTS, read())["estimated_usage"] is False


def test_48_each_count_is_estimated_on_its_own() -> None:
    reply = read(prompt_tokens=None)
    assert build_usage(FACTS, reply) == {
        "prompt_tokens": 40,
        "completion_tokens": 3,
        "total_tokens": 43,
    }
    reply = read(
        completion_tokens=None,
        message={"content": "12345", "reasoning_content": "123", "tool_calls": [CALL]},
    )
    assert build_usage(FACTS, reply)["completion_tokens"] == -(-(5 + 3 + 4 + 2) // 4)
    assert build_x_horde(FACTS, reply)["estimated_usage"] is True
    assert (
        build_usage(FACTS, read(completion_tokens=None, message={"content": ""}, text=""))[
            "completion_tokens"
        ]
        == 0
    )
    assert build_usage(FACTS, read(completion_tokens=0, prompt_tokens=0))["total_tokens"] == 0


def test_48_dropped_turns_lower_the_estimate() -> None:
    adjustments = [
        {"from": 1, "to": 2, "reason": "grow"},
        {"from": 90, "to": 30, "reason": "truncate_oldest", "dropped_messages": 1},
    ]
    reply = read({"context_adjustments": adjustments}, prompt_tokens=None)
    assert build_usage(FACTS, reply)["prompt_tokens"] == 30
    assert build_x_horde(FACTS, reply)["context_adjustments"] == adjustments
    assert "context_adjustments" not in build_x_horde(FACTS, read())


def test_56_a_lowered_limit_shows() -> None:
    assert read(
        {"context_adjustments": [{"from": 2, "to": 1, "reason": "worker_max_length"}]}
    ).is_lowered
    assert not read().is_lowered


def test_49_reasoning_tokens_stand_in_the_details() -> None:
    assert build_usage(FACTS, read(reasoning_tokens=0))["completion_tokens_details"] == {
        "reasoning_tokens": 0
    }
    assert "completion_tokens_details" not in build_usage(FACTS, read())


def test_51_reasoning_is_shown_unless_it_is_hidden() -> None:
    reply = read(message={"content": "a", "reasoning_content": "b"})
    assert build_message(FACTS, reply) == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "b",
    }
    hidden = CompletionHead(
        request_id="id",
        created=7,
        model="m",
        estimated_prompt_tokens=40,
        include_reasoning=False,
        include_usage=False,
    )
    assert build_message(hidden, reply) == {"role": "assistant", "content": "a"}
    assert build_usage(hidden, reply) == build_usage(FACTS, reply)


def test_52_and_53_calls_are_passed_on() -> None:
    reply = read(
        message={"content": None, "tool_calls": [CALL]}, finish_reason="tool_calls", text=""
    )
    assert build_message(FACTS, reply) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
    }
    assert reply.finish_reason == "tool_calls"
    assert (
        read(message={"content": None, "tool_calls": [CALL]}, finish_reason="stop").finish_reason
        == "stop"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"finish_reason": "length"}, "length"),
        ({"finish_reason": None}, "stop"),
        ({"finish_reason": None, "message": {"content": None, "tool_calls": [CALL]}}, "tool_calls"),
        ({"state": "censored"}, "content_filter"),
        ({"state": "csam"}, "content_filter"),
    ],
)
def test_50_the_finish_reason(changes: dict[str, Any], expected: str) -> None:
    assert read(**changes).finish_reason == expected


def test_a_withheld_reply_holds_nothing() -> None:
    reply = read(
        state="csam", message={"content": "x", "reasoning_content": "y", "tool_calls": [CALL]}
    )
    assert build_message(FACTS, reply) == {"role": "assistant", "content": ""}
    censored = read(state="censored", message={"content": "withheld", "reasoning_content": None})
    assert build_message(FACTS, censored)["content"] == "withheld"


def test_34_a_quote_is_a_completion_without_choices() -> None:
    quote = {
        "kudos": 12,
        "resolved": {
            "estimated_prompt_tokens": 19,
            "prompt": "secret",
            "models": ["m"],
            "style": None,
        },
    }
    completion = build_dry_run_completion(
        quote, completion_id="chatcmpl-dryrun-x", created=7, model="m"
    )
    assert completion["choices"] == []
    assert completion["usage"] == {"prompt_tokens": 19, "completion_tokens": 0, "total_tokens": 19}
    assert completion["x_horde"] == {
        "request_id": None,
        "worker_id": None,
        "worker_name": None,
        "kudos": 12,
        "charge_basis": None,
        "estimated_usage": True,
        "queue_wait_seconds": None,
        "dry_run": True,
        "resolved": {"estimated_prompt_tokens": 19, "models": ["m"], "style": None},
    }


def test_90_the_example_features_give_the_example_parameters() -> None:
    features = frozenset(
        {"presence_penalty", "prompt_overflow_refused", "seed", "tool_choice_enforced", "vision"}
    )
    assert list_supported_parameters(features) == [
        *("max_tokens", "temperature", "top_p", "stop", "seed", "presence_penalty"),
        *("tools", "parallel_tool_calls", "tool_choice", "response_format"),
    ]


@pytest.mark.parametrize(
    ("feature", "added"),
    [
        ("seed", ["seed"]),
        ("reasoning_effort", ["reasoning_effort"]),
        ("presence_penalty", ["presence_penalty"]),
        ("frequency_penalty", ["frequency_penalty"]),
        ("tools", ["tools", "parallel_tool_calls"]),
        ("single_tool_call_enforced", ["tools", "parallel_tool_calls"]),
        ("tool_choice_enforced", ["tools", "parallel_tool_calls", "tool_choice"]),
        ("json_schema", ["structured_outputs"]),
        ("structured_output_enforced", ["structured_outputs"]),
        ("json_object", []),
        ("vision", []),
        ("a_future_feature", []),
    ],
)
def test_each_parameter_needs_its_feature(feature: str, added: list[str]) -> None:
    always = ["max_tokens", "temperature", "top_p", "stop", "response_format"]
    assert [
        name for name in list_supported_parameters(frozenset({feature})) if name not in always
    ] == added
    assert set(always) <= set(list_supported_parameters(frozenset({feature})))


def test_91_and_94_a_card_shows_the_limits_of_chat() -> None:
    chat = {
        "workers": 2,
        "max_context_length": 8192,
        "max_length": 1024,
        "features": ["vision"],
        "created": None,
    }
    card = build_model_card({"name": "a/b", "queued": 3.0, "count": 5, "chat": chat})
    assert card == {
        "id": "a/b",
        "object": "model",
        "created": 0,
        "owned_by": "aihorde",
        "context_length": 8192,
        "architecture": {
            "modality": "text+image->text",
            "input_modalities": ["text", "image"],
            "output_modalities": ["text"],
        },
        "top_provider": {"context_length": 8192, "max_completion_tokens": 1024},
        "supported_parameters": ["max_tokens", "temperature", "top_p", "stop", "response_format"],
        "x_horde": {"workers": 2, "queued": 3.0},
    }
    plain = build_model_card({"name": "a", "queued": 0.0, "chat": chat | {"features": []}})
    assert plain["architecture"] == {
        "modality": "text->text",
        "input_modalities": ["text"],
        "output_modalities": ["text"],
    }
    assert [listed["id"] for listed in build_model_list([plain | {"id": "b"}, plain])["data"]] == [
        "a",
        "b",
    ]
