# SPDX-License-Identifier: AGPL-3.0-or-later
"""A backend's chat completion, read into what the horde takes."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from horde_sdk.worker.chat_declaration import ChatFinishReason, ChatUsage

from horde.json_text import write_document

NATIVE_FINISH_REASON_CHARACTERS = 32  # the horde refuses a longer one
TOOL_CALL_ID_CHARACTERS = 256  # the horde's bound, in requests and replies

REASONING_OPENING, REASONING_CLOSING = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A reply without anything a backend adds of its own. ``content`` is None only beside calls."""

    content: str | None
    reasoning: str | None
    tool_calls: list[dict[str, Any]]
    finish_reason: ChatFinishReason
    native_finish_reason: str | None
    usage: ChatUsage

    def build_message(self) -> dict[str, Any]:
        """The ``message`` of the submit."""
        message: dict[str, Any] = {"content": self.content}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message


def parse_chat_reply(completion: Mapping[str, Any], *, opens_reasoning: bool | None) -> ChatReply:
    """Read the only choice of an OpenAI chat completion.

    ``opens_reasoning`` says whether the chat template left a reasoning block open; None when nobody
    knows. Raises ``ValueError`` when the body is no completion.
    """
    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise ValueError("the backend's answer has no message")
    native = choice.get("finish_reason")
    content, reasoning = (
        _read_text(message.get("content")) or "",
        _read_text(read_reasoning(message)),
    )
    if not reasoning:
        content, reasoning = split_reasoning(
            content, opens_reasoning=opens_reasoning, is_cut=is_cut_at_length(native)
        )
    return build_chat_reply(
        content, reasoning, message.get("tool_calls"), native=native, usage=completion.get("usage")
    )


def build_chat_reply(
    content: str, reasoning: str, tool_calls: object, *, native: object, usage: object
) -> ChatReply:
    """A reply from its text, parted already, and what else the backend said: its calls, its finish
    reason and its counts.
    """
    calls = _parse_tool_calls(tool_calls)
    return ChatReply(
        content=(content or None) if calls else content,
        reasoning=reasoning or None,
        tool_calls=calls,
        finish_reason=_parse_finish_reason(native, has_calls=bool(calls)),
        native_finish_reason=native[:NATIVE_FINISH_REASON_CHARACTERS]
        if isinstance(native, str)
        else None,
        usage=_parse_usage(usage),
    )


def read_reasoning(message: Mapping[str, Any]) -> object:
    """The reasoning of a message or of a piece of one: ``reasoning_content``, which newer vLLMs
    call ``reasoning``.
    """
    return message.get("reasoning_content") or message.get("reasoning")


def is_cut_at_length(native: object) -> bool:
    """Whether a backend's finish reason says that the reply reached its length."""
    return bool(native == ChatFinishReason.LENGTH.value)


def split_reasoning(content: str, *, opens_reasoning: bool | None, is_cut: bool) -> tuple[str, str]:
    """Part a reply into the answer and the reasoning its backend left inside.

    The block counts only at the start, so an answer that talks about the tags is left alone. A
    block that never ends is reasoning to the end. When the template opened the block, the reply
    shows only its end, or nothing of it if it was cut before. When nobody knows what the template
    did, a lone closing tag is taken as the end of such a block.
    """
    text = content.lstrip()
    if text.startswith(REASONING_OPENING):
        reasoning, _, answer = text.removeprefix(REASONING_OPENING).partition(REASONING_CLOSING)
        return answer.lstrip(), reasoning.strip()
    if opens_reasoning is False:
        return content, ""
    reasoning, closing, answer = content.partition(REASONING_CLOSING)
    if closing and REASONING_OPENING not in reasoning:
        return answer.lstrip(), reasoning.strip()
    return ("", content.strip()) if opens_reasoning and is_cut else (content, "")


def clean_text(text: str) -> str:
    """Replace lone surrogates: a backend that cuts inside a character escapes half of it, which no
    UTF-8 body can carry.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def build_tool_call(name: str, arguments: str, call_id: str | None = None) -> dict[str, Any]:
    """A call in OpenAI's shape, with an id of its own unless one is given."""
    return {
        "id": call_id or f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": name, "arguments": clean_text(arguments)},
    }


def _parse_tool_calls(calls: object) -> list[dict[str, Any]]:
    """The calls with arguments as a string and ids that differ; models that write their own ids
    repeat them.
    """
    parsed: list[dict[str, Any]] = []
    seen: set[str] = set()
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = write_document({} if arguments is None else arguments)
        call_id = call.get("id")
        is_usable = (
            isinstance(call_id, str)
            and 0 < len(call_id) <= TOOL_CALL_ID_CHARACTERS
            and call_id not in seen
        )
        parsed.append(
            build_tool_call(str(function.get("name")), arguments, call_id if is_usable else None)
        )
        seen.add(parsed[-1]["id"])
    return parsed


def _parse_finish_reason(native: object, *, has_calls: bool) -> ChatFinishReason:
    """The horde's word for it; what is unknown, such as the name of an end token, is a stop."""
    if native in (ChatFinishReason.LENGTH.value, ChatFinishReason.CONTENT_FILTER.value):
        return ChatFinishReason(str(native))
    if has_calls and native in (ChatFinishReason.TOOL_CALLS.value, "function_call"):
        return ChatFinishReason.TOOL_CALLS
    return ChatFinishReason.STOP


def _read_text(value: object) -> str | None:
    return clean_text(value) if isinstance(value, str) else None


def _parse_usage(usage: object) -> ChatUsage:
    """The counts the backend reported; what is absent or no count stays absent."""
    counts = usage if isinstance(usage, dict) else {}
    details = counts.get("completion_tokens_details")
    return ChatUsage(
        prompt_tokens=_read_count(counts.get("prompt_tokens")),
        completion_tokens=_read_count(counts.get("completion_tokens")),
        reasoning_tokens=_read_count(details.get("reasoning_tokens"))
        if isinstance(details, dict)
        else None,
    )


def _read_count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
