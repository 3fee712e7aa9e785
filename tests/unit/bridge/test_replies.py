# SPDX-License-Identifier: AGPL-3.0-or-later
from typing import Any

import pytest

from horde.bridge.reasoning import split_reasoning
from horde.bridge.refusals import UnreadableAnswer
from horde.bridge.streamed_reply import StreamedReply


def parse(
    message: dict[str, Any],
    finish_reason: object = "stop",
    opens_reasoning: bool | None = None,
    **rest: Any,
) -> Any:
    reply = StreamedReply(opens_reasoning=opens_reasoning, is_read_along=False)
    reply.add_chunk({"choices": [{"message": message, "finish_reason": finish_reason}], **rest})
    reply.finish()
    return reply.build()


@pytest.mark.parametrize(
    ("content", "opens_reasoning", "is_cut", "answer", "reasoning"),
    [
        ("Blue.", None, False, "Blue.", ""),
        ("<think>One colour.</think>\n\nBlue.", None, False, "Blue.", "One colour."),
        ("\n<think>\nOne colour.", False, True, "", "One colour."),  # never closed
        # The template opened it, or so it seems.
        ("One colour.</think>Blue.", None, False, "Blue.", "One colour."),
        ("One colour.</think>Blue.", True, False, "Blue.", "One colour."),
        ("The tag </think> ends a block.", False, False, "The tag </think> ends a block.", ""),
        ("It writes <think>a</think> first.", None, False, "It writes <think>a</think> first.", ""),
        ("One col", True, True, "", "One col"),  # cut inside a block the template opened
        # The model closed it without a word, and the backend took the tag away.
        ("Blue.", True, False, "Blue.", ""),
        ("<think></think>Blue.", None, False, "Blue.", ""),
    ],
)
def test_reasoning_is_parted_from_the_answer(
    content: str, opens_reasoning: bool | None, is_cut: bool, answer: str, reasoning: str
) -> None:
    assert split_reasoning(content, opens_reasoning=opens_reasoning, is_cut=is_cut) == (
        answer,
        reasoning,
    )


def test_reasoning_the_backend_parted_is_taken_as_it_is() -> None:
    reply = parse({"content": "Use <think>.", "reasoning_content": "Hm."})
    assert (reply.content, reply.reasoning) == ("Use <think>.", "Hm.")


@pytest.mark.parametrize(
    ("native", "has_calls", "finish_reason"),
    [
        ("stop", False, "stop"),
        ("length", False, "length"),
        ("length", True, "length"),
        ("content_filter", False, "content_filter"),
        ("tool_calls", True, "tool_calls"),
        ("function_call", True, "tool_calls"),
        ("stop", True, "tool_calls"),
        ("eos_token", False, "stop"),
        ("</s>", False, "stop"),
        ("<|im_end|>", False, "stop"),
        ("STOP", False, "stop"),
        ("end_turn", False, "stop"),
        ("tool_use", True, "tool_calls"),
        ("MAX_TOKENS", False, "length"),
        ("model_length", False, "length"),
        ("SAFETY", False, "content_filter"),
        ("", False, "stop"),
        ("null", False, "stop"),
        ({"type": "stop", "matched": 2}, False, "stop"),
        (None, False, "stop"),
    ],
)
def test_finish_reasons_are_the_hordes(native: object, has_calls: bool, finish_reason: str) -> None:
    calls = [{"id": "a", "function": {"name": "f", "arguments": "{}"}}] if has_calls else None
    assert parse({"content": "x", "tool_calls": calls}, native).finish_reason == finish_reason


@pytest.mark.parametrize(
    ("native", "calls"),
    [
        ("error", []),
        ("abort", []),
        ("timeout", []),
        ("insufficient_system_resource", []),
        ("MALFORMED_FUNCTION_CALL", []),
        ("something new", []),
        (7, []),
        ({"type": "abort", "message": "x"}, []),
        ("tool_calls", []),  # announced, and none came
        ("tool_calls", [{"function": {"name": "", "arguments": "{}"}}]),
    ],
)
def test_an_end_that_is_no_success_is_unreadable(native: object, calls: Any) -> None:
    with pytest.raises(UnreadableAnswer):
        parse({"content": "half a re", "tool_calls": calls}, native)


def test_a_null_content_never_becomes_the_word_none() -> None:
    assert parse({"content": None}).content == ""
    assert parse({"content": None, "tool_calls": [{"function": {"name": "f"}}]}).content is None


def test_calls_get_string_arguments_and_ids_that_differ() -> None:
    calls = [
        {
            "id": "a",
            "type": "function",
            "index": 0,
            "function": {"name": "f", "arguments": {"x": "é"}},
        },
        {"id": "a", "function": {"name": "g", "arguments": "{}"}},
        {"id": "", "function": {"name": "h"}},
        {"id": "x" * 257, "function": {"name": "i", "arguments": None}},
    ]
    parsed = parse({"content": None, "tool_calls": calls}).tool_calls
    assert parsed[0] == {
        "id": "a",
        "type": "function",
        "function": {"name": "f", "arguments": '{"x":"é"}'},
    }
    assert [call["function"]["arguments"] for call in parsed[1:]] == ["{}", "{}", "{}"]
    assert len({call["id"] for call in parsed}) == 4
    assert all(0 < len(call["id"]) <= 256 for call in parsed)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (None, (None, None, None)),
        ({"prompt_tokens": 0, "completion_tokens": 3}, (0, 3, None)),
        (
            {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 4}},
            (None, 9, 4),
        ),
        (
            {"prompt_tokens": -1, "completion_tokens": "3", "completion_tokens_details": None},
            (None, None, None),
        ),
        ({"prompt_tokens": 21.0, "completion_tokens": 10_000_001}, (21, None, None)),
        ({"prompt_tokens": True}, (None, None, None)),
    ],
)
def test_only_reported_counts_are_passed_on(usage: object, counts: tuple[int | None, ...]) -> None:
    found = parse({"content": "x"}, usage=usage).usage
    assert (found.prompt_tokens, found.completion_tokens, found.reasoning_tokens) == counts


def test_a_long_native_reason_is_cut() -> None:
    assert parse({"content": "x"}, f"<{'e' * 40}>").native_finish_reason == f"<{'e' * 31}"
