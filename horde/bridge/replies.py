# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a backend ended a chat with, in the horde's words: its finish reason, its counts, and the
reply as it is submitted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from horde_sdk.worker.chat_declaration import ChatFinishReason, ChatUsage

from horde.bridge.reasoning import clean_text
from horde.bridge.refusals import UnreadableAnswer, name_safely
from horde.bridge.wire import ToolCall
from horde.json_text import JsonObject

NATIVE_FINISH_REASON_CHARACTERS = 32  # the horde refuses a longer one
MAX_TOKENS = 10_000_000  # the horde refuses a larger count

# The words of the servers that people run, without case and punctuation.
_FINISH_REASONS = {
    ChatFinishReason.STOP: "stop eos eostoken eot eotid endturn endofturn endofsequence endoftext"
    " stopsequence stoptoken stopstring complete completed finish finished done",
    ChatFinishReason.LENGTH: "length maxtokens maxlength maxnewtokens maxoutputtokens limit"
    " maxtokensreached modellength tokenlimit contextlength contextlengthexceeded"
    " modelcontextwindowexceeded",
    ChatFinishReason.CONTENT_FILTER: "contentfilter contentfiltered safety sensitive recitation"
    " blocklist prohibitedcontent spii guardrail guardrailintervened refusal",
    ChatFinishReason.TOOL_CALLS: "toolcalls toolcall tooluse functioncall functioncalls",
}
_KNOWN_FINISH_REASONS = {
    word: reason for reason, words in _FINISH_REASONS.items() for word in words.split()
}
_END_TOKEN = re.compile(r"[<\[|].*[>\]|]", re.DOTALL)  # such as </s> and <|im_end|>


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A reply without anything a backend adds of its own. ``content`` is None only beside calls."""

    content: str | None
    reasoning: str | None
    tool_calls: list[ToolCall]
    finish_reason: ChatFinishReason
    native_finish_reason: str | None
    usage: ChatUsage

    def build_message(self) -> JsonObject:
        """The ``message`` of the submit."""
        message: JsonObject = {"content": self.content}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message


def build_chat_reply(
    content: str,
    reasoning: str,
    calls: list[ToolCall],
    *,
    native: str | None,
    usage: Mapping[str, object],
) -> ChatReply:
    """A reply from its text, parted already, and what else the backend said.

    Raises ``UnreadableAnswer`` when the backend says that it failed, says that it called and no
    call came, or says nothing at all.
    """
    reason = parse_finish_reason(native)
    if reason is ChatFinishReason.TOOL_CALLS and not calls:
        raise UnreadableAnswer("calls were announced and none came")
    if native is None and not (content or reasoning or calls):
        raise UnreadableAnswer("neither text nor calls nor a finish reason came")
    if calls and reason is ChatFinishReason.STOP:
        reason = ChatFinishReason.TOOL_CALLS  # clients go on by this word
    return ChatReply(
        content=(content or None) if calls else content,
        reasoning=reasoning or None,
        tool_calls=calls,
        finish_reason=reason,
        native_finish_reason=clean_text(native)[:NATIVE_FINISH_REASON_CHARACTERS]
        if native
        else None,
        usage=_parse_usage(usage),
    )


def parse_finish_reason(native: str | None) -> ChatFinishReason:
    """The horde's word for a backend's; a stop when it sent none, or the name of an end token.

    Raises ``UnreadableAnswer`` for any other, such as ``error`` or ``abort``: whether the reply is
    whole then is not known.
    """
    known = _KNOWN_FINISH_REASONS.get(re.sub(r"[^a-z]", "", (native or "stop").lower()))
    if known is not None:
        return known
    if native is not None and _END_TOKEN.fullmatch(native):
        return ChatFinishReason.STOP
    raise UnreadableAnswer(f"the finish reason is {name_safely(native)}")


def is_cut_at_length(native: str | None) -> bool:
    """Whether a backend's finish reason says that the reply reached its length."""
    try:
        return parse_finish_reason(native) is ChatFinishReason.LENGTH
    except UnreadableAnswer:
        return False


def _parse_usage(usage: Mapping[str, object]) -> ChatUsage:
    """The counts the backend reported; what is absent or no count stays absent."""
    details = usage.get("completion_tokens_details")
    return ChatUsage(
        prompt_tokens=_read_count(usage.get("prompt_tokens")),
        completion_tokens=_read_count(usage.get("completion_tokens")),
        reasoning_tokens=_read_count(details.get("reasoning_tokens"))
        if isinstance(details, dict)
        else None,
    )


def _read_count(value: object) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS
    return int(str(value)) if is_count else None
