# SPDX-License-Identifier: AGPL-3.0-or-later
"""Fitting a chat request into a context."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.chat.context import (
    SizedContext,
    grow_context,
    lower_max_length,
    size_chat_context,
)
from horde.chat.flattening import FlattenedChat
from horde.chat.tool_history import check_tool_history
from horde.chat_contract import ChatContextFit
from horde.classes.kobold.chat_request import estimate_chat_prompt_tokens, truncate_oldest_messages
from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode

Message = dict[str, Any]


def build_message(role: str, tokens: int = 100, **keys: Any) -> Message:
    """A message whose line in the flattened prompt, its newline counted, is estimated at
    `tokens`.
    """
    return {"role": role, "content": "x" * (tokens * 3 - len(role) - 3), **keys}


def build_conversation(rounds: int) -> list[Message]:
    return [
        build_message("system"),
        *[build_message(role) for _ in range(rounds) for role in ("user", "assistant")],
    ]


def size(messages: list[Message], **facts: Any) -> SizedContext:
    defaults: dict[str, Any] = {
        "context_fit": ChatContextFit.TRUNCATE_OLDEST,
        "requested_max_length": 512,
        "requested_context_length": 2048,
        "declared_max_length": 1024,
        "declared_context_length": 8192,
    }
    flattened = FlattenedChat.read(messages)
    return size_chat_context(messages, flattened, **(defaults | facts))


@pytest.mark.parametrize(
    ("requested", "declared", "lowered"),
    [(700, 512, 512), (512, 256, 256), (512, 8, 8), (64, 512, 64), (64, None, 64)],
)
def test_output_is_lowered_to_the_largest_declared_length(
    requested: int, declared: int | None, lowered: int
) -> None:
    assert lower_max_length(requested, declared) == lowered


@pytest.mark.parametrize(
    ("requested", "wanted", "bound", "context"),
    [
        (2048, 2048, 8192, 2048),
        (2048, 2049, 8192, 4096),
        (2048, 4096, 8192, 4096),
        (2048, 5000, 6000, 6000),
        (2048, 5000, 5000, 5000),
        (4096, 5000, 4096, 4096),
        (4096, 5000, 2048, 4096),
        (2048, 9000, 8192, 8192),
    ],
)
def test_context_grows_to_a_power_of_two_or_the_bound(
    requested: int, wanted: int, bound: int, context: int
) -> None:
    assert grow_context(requested, wanted, bound) == context


def test_nothing_is_recorded_when_nothing_changes() -> None:
    sized = size(build_conversation(1))
    assert (sized.max_length, sized.max_context_length, sized.adjustments) == (512, 2048, None)
    assert sized.messages == build_conversation(1)


def test_lowered_output_is_recorded_first() -> None:
    sized = size(build_conversation(15), requested_max_length=700, declared_max_length=512)
    assert sized.adjustments == [
        {"from": 700, "to": 512, "reason": "worker_max_length"},
        {"from": 2048, "to": 4096, "reason": "grow"},
    ]


def test_default_output_is_lowered_as_well() -> None:
    assert size(build_conversation(1), declared_max_length=256).adjustments == [
        {"from": 512, "to": 256, "reason": "worker_max_length"}
    ]


def test_oldest_turns_go_when_the_bound_does_not_hold_the_messages() -> None:
    messages = [*build_conversation(50), build_message("user")]
    sized = size(messages)
    assert sized.adjustments == [
        {"from": 2048, "to": 8192, "reason": "grow"},
        {"from": 10200, "to": 7600, "reason": "truncate_oldest", "dropped_messages": 26},
    ]
    assert sized.messages == [messages[0], *messages[27:]]
    assert (sized.estimated_prompt_tokens, sized.dropped_message_count) == (7600, 26)


def test_context_at_or_above_the_bound_is_trimmed_without_growing() -> None:
    sized = size(
        [*build_conversation(50), build_message("user")],
        requested_context_length=4096,
        declared_context_length=2048,
    )
    assert sized.max_context_length == 4096
    assert [adjustment["reason"] for adjustment in sized.adjustments or ()] == ["truncate_oldest"]


@pytest.mark.parametrize("context_fit", [ChatContextFit.GROW, ChatContextFit.REJECT])
def test_messages_over_the_bound_are_refused_with_all_three_numbers(
    context_fit: ChatContextFit,
) -> None:
    with pytest.raises(BadRequest) as refused:
        size(build_conversation(50), context_fit=context_fit)
    assert refused.value.rc is ReturnCode.PROMPT_EXCEEDS_CONTEXT
    context = 8192 if context_fit is ChatContextFit.GROW else 2048
    assert all(str(number) in refused.value.message for number in (10100, 512, 10612, context))


def test_reject_never_grows() -> None:
    with pytest.raises(BadRequest):
        size(build_conversation(10), context_fit=ChatContextFit.REJECT)


def test_kept_messages_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BadRequest) as refused:
        size(
            [build_message("user"), build_message("assistant"), build_message("user", tokens=9000)]
        )
    assert refused.value.rc is ReturnCode.PROMPT_EXCEEDS_CONTEXT


def test_system_messages_and_everything_from_the_latest_user_message_stay() -> None:
    messages = [
        build_message("user", name="old"),
        build_message("system"),
        build_message("assistant"),
        build_message("user"),
        build_message("assistant", name="last"),
    ]
    assert truncate_oldest_messages(messages, token_budget=0) == [messages[1], *messages[3:]]


def test_calls_go_together_with_their_answers() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    turn = [build_message("assistant", tool_calls=[call]), build_message("tool", tool_call_id="a")]
    messages = [
        build_message("assistant"),
        *turn,
        build_message("user"),
        *turn,
        build_message("user"),
    ]
    budget = estimate_chat_prompt_tokens(messages) - 1
    assert truncate_oldest_messages(messages, token_budget=budget) == messages[1:]
    assert truncate_oldest_messages(messages, token_budget=budget - 100) == messages[3:]
    assert truncate_oldest_messages(messages, token_budget=0) == messages[-1:]


def test_history_without_a_user_message_keeps_its_newest_turn() -> None:
    messages = [build_message("assistant"), build_message("assistant")]
    assert truncate_oldest_messages(messages, token_budget=0) == messages[1:]


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = []
    for number, kind in enumerate(
        draw(
            st.lists(
                st.sampled_from(["system", "user", "assistant", "calls"]), min_size=1, max_size=12
            )
        )
    ):
        # Letters of one, two, three and four bytes, marks that combine with them among them.
        text = draw(st.text("xé字กิ\u0651م🙂", max_size=40))
        if kind != "calls":
            messages.append({"role": kind, "content": text})
            continue
        call = {"id": str(number), "type": "function", "function": {"name": "f", "arguments": text}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": str(number), "content": text},
        ]
    return messages


@given(histories(), st.integers(0, 400))
def test_kept_history_is_valid_and_as_long_as_the_budget_lets_it(
    messages: list[Message], budget: int
) -> None:
    kept = truncate_oldest_messages(messages, token_budget=budget)
    check_tool_history(kept)
    assert [message for message in kept if message["role"] == "system"] == [
        m for m in messages if m["role"] == "system"
    ]
    if estimate_chat_prompt_tokens(messages) <= budget:
        assert kept == messages


@given(
    histories(),
    st.integers(16, 200),
    st.integers(80, 400),
    st.integers(80, 600),
    st.sampled_from(ChatContextFit),
)
def test_sized_request_fits_its_context(
    messages: list[Message],
    max_length: int,
    requested: int,
    declared: int,
    context_fit: ChatContextFit,
) -> None:
    try:
        sized = size(
            messages,
            context_fit=context_fit,
            requested_max_length=max_length,
            requested_context_length=requested,
            declared_context_length=declared,
        )
    except BadRequest:
        return
    assert sized.estimated_prompt_tokens == estimate_chat_prompt_tokens(sized.messages)
    assert (
        sized.estimated_prompt_tokens + sized.max_length
        <= sized.max_context_length
        <= max(requested, declared)
    )


def test_a_long_chinese_conversation_is_trimmed_and_not_overflowed_at_the_worker() -> None:
    """21 messages of 800 letters, each about a token, for a worker of 8,192 tokens."""
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": "天地玄黃宇宙洪荒" * 100}
        for number in range(21)
    ]
    sized = size(messages)
    assert sized.dropped_message_count >= 8
    # At three quarters of a token a letter, with the roles.
    assert sized.estimated_prompt_tokens == estimate_chat_prompt_tokens(sized.messages)
    assert sized.estimated_prompt_tokens > 600 * len(sized.messages)
    with pytest.raises(BadRequest, match="estimated at"):
        size(messages, context_fit=ChatContextFit.GROW)


@pytest.mark.parametrize("letter", ["字", "ก", "م", "ж", "🙂", "e\u0301", "क्षि"])
def test_every_script_is_trimmed_by_what_it_is_estimated_at(letter: str) -> None:
    messages = [{"role": "user", "content": (letter * 2000)[:2000]} for _ in range(12)]
    sized = size(messages, declared_context_length=4096)
    assert sized.dropped_message_count > 0
    assert sized.estimated_prompt_tokens + sized.max_length <= 4096
    one_more = messages[: len(sized.messages) + 1]
    assert estimate_chat_prompt_tokens(one_more) + sized.max_length > 4096
