# SPDX-License-Identifier: AGPL-3.0-or-later
"""The reasoning that a backend left inside the content, parted from the answer, whole or as it
grows; and text made whole where a backend cuts inside a character.
"""

from enum import Enum

REASONING_OPENING, REASONING_CLOSING = "<think>", "</think>"

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
    answer. Not so with ``waits_for_end``, when nobody reads along: all is parted at the end.
    """

    def __init__(self, *, opens_reasoning: bool | None, waits_for_end: bool = False) -> None:
        self._opens_reasoning = opens_reasoning
        self._waits_for_end = waits_for_end
        self._place = _Place.START
        self._held = ""
        self._has_reasoned = False

    def add(self, piece: str) -> tuple[str, str]:
        """The answer and the reasoning that are certain with this piece."""
        self._held += piece
        if self._place is _Place.START and not self._waits_for_end:
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
            opens = self._opens_reasoning if self._waits_for_end else bool(self._opens_reasoning)
            return split_reasoning(text, opens_reasoning=opens, is_cut=is_cut)
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
