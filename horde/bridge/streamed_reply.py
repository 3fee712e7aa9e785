# SPDX-License-Identifier: AGPL-3.0-or-later
"""A reply that grows while its backend streams it.

What is read from it at any time is the start of what it ends with: the horde relays the text to a
reader before the reply is submitted, and the two must not differ. So whatever could still turn out
to be something else is held back, and the text of the finished reply is what was let out, piece by
piece.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from horde.bridge.replies import (
    REASONING_CLOSING,
    REASONING_OPENING,
    ChatReply,
    build_chat_reply,
    clean_text,
    is_cut_at_length,
    read_reasoning,
    split_reasoning,
)

_HIGH_SURROGATES = ("\ud800", "\udbff")  # first and last


class SurrogateJoiner:
    """Puts characters together that a backend escaped in two halves, one a piece."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, piece: str) -> str:
        """The text that is complete with this piece."""
        text, self._held = self._held + piece, ""
        if text and _HIGH_SURROGATES[0] <= text[-1] <= _HIGH_SURROGATES[1]:
            text, self._held = text[:-1], text[-1]
        return clean_text(text)

    def finish(self) -> str:
        """What stands for a half whose other half never came."""
        text, self._held = self._held, ""
        return clean_text(text)


class _Place(Enum):
    """Where in a reply a splitter is."""

    START = "start"
    HELD = "held"  # inside what may be reasoning; only the closing tag or the end tells
    REASONING = "reasoning"
    ANSWER_START = "answer start"
    ANSWER = "answer"


class ReasoningSplitter:
    """Parts a growing reply into answer and reasoning as ``split_reasoning`` parts a whole one.

    With one difference: when nobody knows what the template did (``opens_reasoning`` None), a lone
    closing tag comes too late to call the text before it reasoning, so it stays a part of the
    answer.
    """

    def __init__(self, *, opens_reasoning: bool | None) -> None:
        self._opens_reasoning = opens_reasoning
        self._place = _Place.START
        self._held = ""
        self._has_reasoned = False

    def add(self, piece: str) -> tuple[str, str]:
        """The answer and the reasoning that are certain with this piece."""
        self._held += piece
        if self._place is _Place.START:
            self._find_start()
        if self._place is _Place.START:
            return "", ""
        if self._place is _Place.HELD:
            return self._leave_held()
        if self._place is _Place.REASONING:
            return self._read_reasoning()
        return self._read_answer(), ""

    def take_as_answer(self) -> str:
        """Stop parting: the backend does it by itself, so all that was held back and all that
        follows is the answer.
        """
        text, self._held, self._place = self._held, "", _Place.ANSWER
        return text

    def finish(self, *, is_cut: bool) -> tuple[str, str]:
        """The rest of both, once nothing follows."""
        text, self._held = self._held, ""
        if self._place in (_Place.START, _Place.HELD):
            return split_reasoning(text, opens_reasoning=bool(self._opens_reasoning), is_cut=is_cut)
        if self._place is _Place.REASONING:
            return "", text.rstrip() if self._has_reasoned else text.strip()
        return (text, "") if self._place is _Place.ANSWER else ("", "")

    def _find_start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(REASONING_OPENING):
            self._place, self._held = _Place.REASONING, text.removeprefix(REASONING_OPENING)
        elif not REASONING_OPENING.startswith(text):
            self._place = _Place.HELD if self._opens_reasoning else _Place.ANSWER

    def _leave_held(self) -> tuple[str, str]:
        """Once a block closes that the template opened, what was held is reasoning."""
        reasoning, closing, rest = self._held.partition(REASONING_CLOSING)
        if not closing or REASONING_OPENING in reasoning:
            return "", ""
        self._place, self._held = _Place.ANSWER_START, rest
        return self._read_answer(), reasoning.strip()

    def _read_reasoning(self) -> tuple[str, str]:
        reasoning, closing, rest = self._held.partition(REASONING_CLOSING)
        if closing:
            self._place, self._held = _Place.ANSWER_START, rest
            return (
                self._read_answer(),
                reasoning.rstrip() if self._has_reasoned else reasoning.strip(),
            )
        # White space and the start of a closing tag may be the end of the block, which is stripped.
        certain = reasoning[
            : len(reasoning) - _count_tag_start(reasoning, REASONING_CLOSING)
        ].rstrip()
        self._held = reasoning[len(certain) :]
        if not self._has_reasoned:
            certain = certain.lstrip()
            self._has_reasoned = bool(certain)
        return "", certain

    def _read_answer(self) -> str:
        if self._place is _Place.ANSWER_START:
            self._held = self._held.lstrip()
            if self._held:
                self._place = _Place.ANSWER
        text, self._held = self._held, ""
        return text


def _count_tag_start(text: str, tag: str) -> int:
    """How many characters at the end of the text may be the start of the tag."""
    return next(
        (size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])),
        0,
    )


class StreamedReply:
    """The chunks of one OpenAI chat stream, put together. Not for several threads at once.

    ``content`` and ``reasoning`` only ever grow. Calls are shown by ``build`` alone: half a call is
    of no use to anybody.
    """

    def __init__(self, *, opens_reasoning: bool | None) -> None:
        self.content, self.reasoning = "", ""
        self.token_count = 0
        """Pieces of text so far; a backend sends one a token, or nearly."""
        self.has_finish_reason = False
        self._native: object = None
        self._usage: object = None
        self._calls = _CallCollector()
        self._splitter = ReasoningSplitter(opens_reasoning=opens_reasoning)
        self._content_joiner, self._reasoning_joiner = SurrogateJoiner(), SurrogateJoiner()

    def add_chunk(self, chunk: Mapping[str, Any]) -> None:
        """Take a chunk; what is not known is passed over."""
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        if isinstance(delta := choice.get("delta"), dict):
            self._add_delta(delta)
        if choice.get("finish_reason") is not None:
            self._native, self.has_finish_reason = choice["finish_reason"], True

    def finish(self) -> None:
        """Let out what was held back; nothing may be added after it."""
        self.reasoning += self._reasoning_joiner.finish()
        self._add_content(self._content_joiner.finish())
        content, reasoning = self._splitter.finish(is_cut=is_cut_at_length(self._native))
        self.content += content
        self.reasoning += reasoning

    def build(self) -> ChatReply:
        """The reply, once finished."""
        return build_chat_reply(
            self.content,
            self.reasoning,
            self._calls.list_calls(),
            native=self._native,
            usage=self._usage,
        )

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        reasoning, content = read_reasoning(delta), delta.get("content")
        if isinstance(reasoning, str) and reasoning:
            self.token_count += 1
            self.content += self._splitter.take_as_answer()
            self.reasoning += self._reasoning_joiner.add(reasoning)
        if isinstance(content, str) and content:
            self.token_count += 1
            self._add_content(self._content_joiner.add(content))
        for call in delta.get("tool_calls") or ():
            self._calls.add(call)

    def _add_content(self, text: str) -> None:
        content, reasoning = self._splitter.add(text)
        self.content += content
        self.reasoning += reasoning


class _CallCollector:
    """Tool calls from their pieces: by ``index``; without one, an id or a name begins the next
    call.
    """

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, piece: object) -> None:
        """Take one entry of a delta's ``tool_calls``."""
        function = piece.get("function") if isinstance(piece, dict) else None
        if not isinstance(piece, dict) or not isinstance(function, dict):
            return
        call = self._calls.setdefault(
            self._find_index(piece, function), {"function": {"arguments": ""}}
        )
        if piece.get("id"):
            call["id"] = piece["id"]
        if function.get("name"):
            call["function"]["name"] = function["name"]
        arguments = function.get("arguments")
        if isinstance(arguments, str) and isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] += arguments
        elif arguments is not None:
            call["function"]["arguments"] = arguments  # an object, sent whole

    def list_calls(self) -> list[dict[str, Any]]:
        """The calls in their order."""
        return [call for _, call in sorted(self._calls.items())]

    def _find_index(self, piece: Mapping[str, Any], function: Mapping[str, Any]) -> int:
        index = piece.get("index")
        if isinstance(index, int) and not isinstance(index, bool):
            return index
        last = max(self._calls, default=-1)
        return last + 1 if last < 0 or piece.get("id") or function.get("name") else last
