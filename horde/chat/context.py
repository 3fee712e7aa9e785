# SPDX-License-Identifier: AGPL-3.0-or-later
"""Fitting a chat request into a context: lower the output, grow the context, drop the oldest turns.

Source: docs/reference/chat_requests.md, "Context adjustments".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from horde.chat.flattening import FlattenedChat
from horde.chat.wire import Message, Tool
from horde.chat_contract import (
    MAX_CONTEXT_LENGTH,
    ChatContextAdjustmentReason,
    ChatContextFit,
)
from horde.exceptions import BadRequest
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedContext:
    """What a request runs with after sizing; `adjustments` as the status shows them, None when
    nothing changed.
    """

    messages: Sequence[Message]
    prompt: str = field(repr=False)  # the same as one text
    dropped_message_count: int
    estimated_prompt_tokens: int
    max_length: int
    max_context_length: int
    adjustments: list[JsonObject] | None


def size_chat_context(
    messages: Sequence[Message],
    flattened: FlattenedChat,
    *,
    context_fit: ChatContextFit,
    requested_max_length: int,
    requested_context_length: int,
    declared_max_length: int | None,
    declared_context_length: int | None,
) -> SizedContext:
    """Size a request against what the online chat workers of its models declare (None when there is
    none).

    Lengths are tokens; the requested ones are the client's or the defaults.
    Raises BadRequest with PromptExceedsContext when the messages do not fit.
    """
    adjustments: list[JsonObject] = []
    max_length = lower_max_length(requested_max_length, declared_max_length)
    if max_length != requested_max_length:
        adjustments.append(
            _build_adjustment(
                requested_max_length, max_length, ChatContextAdjustmentReason.WORKER_MAX_LENGTH
            )
        )
    estimate = kept_estimate = flattened.estimate_tokens()
    context_length = requested_context_length
    if context_fit is not ChatContextFit.REJECT:
        bound = (
            requested_context_length
            if declared_context_length is None
            else min(declared_context_length, MAX_CONTEXT_LENGTH)
        )
        context_length = grow_context(requested_context_length, estimate + max_length, bound)
    if context_fit is ChatContextFit.TRUNCATE_OLDEST and estimate + max_length > context_length:
        dropped = find_dropped_messages(
            messages, flattened, token_budget=context_length - max_length
        )
        kept_estimate = flattened.estimate_tokens(dropped)
    else:
        dropped = frozenset()
    if kept_estimate + max_length > context_length:
        raise _build_refusal(kept_estimate, max_length, context_length)
    if context_length != requested_context_length:
        adjustments.append(
            _build_adjustment(
                requested_context_length, context_length, ChatContextAdjustmentReason.GROW
            )
        )
    if dropped:
        trimmed = _build_adjustment(
            estimate, kept_estimate, ChatContextAdjustmentReason.TRUNCATE_OLDEST
        )
        adjustments.append(trimmed | {"dropped_messages": len(dropped)})
    return SizedContext(
        messages=[message for index, message in enumerate(messages) if index not in dropped],
        prompt=flattened.join(dropped),
        dropped_message_count=len(dropped),
        estimated_prompt_tokens=kept_estimate,
        max_length=max_length,
        max_context_length=context_length,
        adjustments=adjustments or None,
    )


def lower_max_length(requested: int, declared: int | None) -> int:
    """The output length that is asked of the workers: never more than the largest one declares."""
    return requested if declared is None else min(requested, declared)


def grow_context(requested: int, wanted: int, bound: int) -> int:
    """The context for `wanted` tokens: the smallest power of two that holds them, or the bound when
    it comes first.

    A context at or above the bound stays. When not even the bound holds them, the caller decides
    what happens there.
    """
    if wanted <= requested or requested >= bound:
        return requested
    return min(1 << (wanted - 1).bit_length(), bound)


def _build_adjustment(before: int, after: int, reason: ChatContextAdjustmentReason) -> JsonObject:
    return {"from": before, "to": after, "reason": reason.value}


def _build_refusal(estimate: int, max_length: int, context_length: int) -> BadRequest:
    message = (
        f"The messages are estimated at {estimate} tokens. With the {max_length} tokens of output"
        f" that were requested they need {estimate + max_length} tokens, which do not fit the"
        f" context of {context_length} tokens."
    )
    return BadRequest(message, ReturnCode.PROMPT_EXCEEDS_CONTEXT)


def find_dropped_messages(
    messages: Sequence[Message], flattened: FlattenedChat, *, token_budget: int
) -> frozenset[int]:
    """The places of the oldest whole turns whose removal brings the estimate to the budget, or of
    all that may go.
    """
    turns = _list_droppable_turns(messages)
    return flattened.find_oldest_to_drop(turns, token_budget=token_budget)


def _list_droppable_turns(messages: Sequence[Message]) -> list[list[int]]:
    """Whole turns before the latest user message, oldest first; system messages stay wherever they
    sit.

    What a user says and the reply that follows are one turn; calls always go together with their
    answers, since a history that kept one without the other would be refused.
    """
    latest_user = max(
        (index for index, message in enumerate(messages) if message["role"] == "user"), default=None
    )
    turns: list[list[int]] = []
    for index, message in enumerate(messages[:latest_user]):
        role = message["role"]
        if role == "system":
            continue
        previous = messages[index - 1]["role"] if index else None
        if turns and (role == "tool" or (role == "assistant" and previous == "user")):
            turns[-1].append(index)
        else:
            turns.append([index])
    # Without a user message the newest turn is what remains.
    return turns if latest_user is not None else turns[:-1]


def truncate_oldest_messages(
    messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, token_budget: int
) -> list[Message]:
    """The messages that stay when whole turns go, oldest first, until the estimate is within the
    budget.

    System messages, the latest user message and everything after it always stay, so the result may
    still be too long.
    """
    dropped = find_dropped_messages(
        messages, FlattenedChat.read(messages, tools), token_budget=token_budget
    )
    return [message for index, message in enumerate(messages) if index not in dropped]
