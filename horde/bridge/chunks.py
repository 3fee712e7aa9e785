# SPDX-License-Identifier: AGPL-3.0-or-later
"""One chunk of a chat completion, read into what it adds to the reply.

Backends agree with OpenAI on the outline and differ inside it. What carries text in a form that is
not known here raises ``UnreadableAnswer``: a reply without it would be another reply.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from horde.bridge.refusals import UnreadableAnswer, name_safely
from horde.json_text import JsonObject

_TEXT_PARTS = frozenset({"text", "output_text", "refusal", None})
_REASONING_PARTS = frozenset({"thinking", "reasoning", "reasoning.text", "reasoning.summary"})
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "reasoning_text")
# What a chunk without choices may hold: some servers' own form of a reply, which is not read.
_FOREIGN_KEYS = frozenset(
    {"content", "text", "response", "output", "generated_text", "token", "results", "candidates"}
)
_NO_FINISH_REASONS = (None, "", "null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one chunk adds. ``is_message`` when it came under the name that whole replies have."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[JsonObject, ...] = ()
    finish_reason: str | None = None
    usage: JsonObject | None = None
    is_message: bool = False


class ChunkReader:
    """Reads the chunks of one completion: those of its first choice, should there be several."""

    def __init__(self) -> None:
        self._index: object = None
        self._has_choice = self._has_deltas = False

    def read(self, chunk: Mapping[str, object]) -> Piece:
        """What a chunk adds. Raises ``UnreadableAnswer``."""
        usage = _find_usage(chunk)
        choice = self._find_choice(chunk)
        if choice is None:
            return Piece(usage=usage)

        message, is_message = _find_message(choice)
        if is_message and self._has_deltas:
            message = {}  # all of the reply once more, after its pieces
        self._has_deltas = self._has_deltas or not is_message
        content, reasoning = read_text(message.get("content"))
        refusal = message.get("refusal")
        if not content and isinstance(refusal, str):
            content = refusal
        return Piece(
            content=content,
            reasoning=_read_reasoning(message) or reasoning,
            calls=_list_calls(message),
            finish_reason=_read_finish_reason(choice),
            usage=usage,
            is_message=is_message,
        )

    def _find_choice(self, chunk: Mapping[str, object]) -> Mapping[str, object] | None:
        choices = chunk.get("choices")
        if choices is None:
            if isinstance(chunk.get("message"), dict) or "delta" in chunk:
                return chunk  # Ollama's own form
            if foreign := sorted(key for key in _FOREIGN_KEYS if chunk.get(key)):
                raise UnreadableAnswer(f"an answer of another kind, with {foreign[0]}")
            return None
        if isinstance(choices, dict):
            choices = [choices]
        if not isinstance(choices, list):
            raise UnreadableAnswer(f"choices are {type(choices).__name__}")
        for choice in choices:
            if choice is None:
                continue
            if not isinstance(choice, dict):
                raise UnreadableAnswer(f"a choice is {type(choice).__name__}")
            if not self._has_choice:
                self._has_choice, self._index = True, choice.get("index") or 0
            if (choice.get("index") or 0) == self._index:
                return choice
        return None


def read_text(value: object) -> tuple[str, str]:
    """Answer and reasoning of a ``content``: a string, a part, or an array of them.

    Raises ``UnreadableAnswer``.
    """
    if value is None:
        return "", ""
    if isinstance(value, str):
        return value, ""
    if isinstance(value, list):
        parts = [read_text(part) for part in value]
        return "".join(content for content, _ in parts), "".join(text for _, text in parts)
    if not isinstance(value, dict):
        raise UnreadableAnswer(f"content is {type(value).__name__}")
    if not value:
        return "", ""
    kind = value.get("type")
    if kind in _REASONING_PARTS:
        return "", _read_loosely(value)
    text = value.get("text", value.get("refusal"))
    if isinstance(text, dict):  # of OpenAI's assistants
        text = text.get("value")
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise UnreadableAnswer(f"a part of the content is {name_safely(kind)}")
    return text, ""


def _find_message(choice: Mapping[str, object]) -> tuple[Mapping[str, object], bool]:
    """The object with the text, and whether it is a message and no delta."""
    delta, message = choice.get("delta"), choice.get("message")
    if isinstance(delta, str):
        delta = {"content": delta}
    if isinstance(message, str):
        message = {"content": message}
    delta, message = _require_object(delta), _require_object(message)
    if any(value for key, value in delta.items() if key != "role"):
        return delta, False
    if message:
        return message, True
    return {"content": choice.get("text")}, not choice.get("text")


def _require_object(value: object) -> JsonObject:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UnreadableAnswer(f"a message is {type(value).__name__}")
    return value


def _read_reasoning(message: Mapping[str, object]) -> str:
    """The reasoning that a backend parted from the answer; servers that repeat it under a second
    key are read once.
    """
    for key in (*_REASONING_KEYS, "reasoning_details"):
        if text := _read_loosely(message.get(key)):
            return text
    return ""


def _read_loosely(value: object) -> str:
    """The text in a value of reasoning.

    What is no text is about the reasoning, not a part of it.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_read_loosely(item) for item in value)
    if isinstance(value, dict):
        keys = ("text", "thinking", "reasoning", "summary", "content")
        return next((text for key in keys if (text := _read_loosely(value.get(key)))), "")
    return ""


def _list_calls(message: Mapping[str, object]) -> tuple[JsonObject, ...]:
    calls = message.get("tool_calls") or []
    if isinstance(calls, dict):
        calls = [calls] if "function" in calls or "name" in calls else list(calls.values())
    if not isinstance(calls, list) or not all(isinstance(call, dict | None) for call in calls):
        raise UnreadableAnswer("the tool calls are no objects")
    if not calls and isinstance(function := message.get("function_call"), dict):
        calls = [{"index": 0, "function": function}]  # as OpenAI's first models called
    return tuple(call for call in calls if call)


def _read_finish_reason(choice: Mapping[str, object]) -> str | None:
    reason = choice.get("finish_reason")
    if reason in _NO_FINISH_REASONS:
        reason = choice.get("done_reason")
    if isinstance(reason, dict):  # SGLang's own form
        reason = reason.get("type")
    if reason in _NO_FINISH_REASONS:
        return None
    if not isinstance(reason, str):
        raise UnreadableAnswer(f"a finish reason is {type(reason).__name__}")
    return reason


def _find_usage(chunk: Mapping[str, object]) -> JsonObject | None:
    own = chunk.get("x_groq")
    for holder in (chunk, own if isinstance(own, dict) else {}):
        if isinstance(usage := holder.get("usage"), dict) and usage:
            return usage
    return None
