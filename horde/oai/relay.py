# SPDX-License-Identifier: AGPL-3.0-or-later
"""What of a worker's progress a client gets to see, and how the final reply completes it. Pure:
entries in, deltas out.

Text that was sent cannot be recalled, while the reply that counts is the submitted one, perhaps by
another worker than the one whose text was sent. Everything here follows from that. Source:
docs/reference/chat_front.md, "Relaying progress", and docs/explanation/streaming.md.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from horde.oai.mapping import CompletedReply
from horde.oai.signals import ProgressEntry


class DeltaKind(StrEnum):
    """Which of the two texts a delta continues."""

    REASONING = "reasoning"
    CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Source:
    """Who wrote a text."""

    worker_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that continues what was sent; never empty."""

    kind: DeltaKind
    text: str
    source: Source


@dataclass(frozen=True, slots=True)
class Remainder:
    """What a finished reply has beyond the text that was sent; empty when nothing."""

    reasoning: str
    content: str


class RelayBroken(Exception):
    """The reply, or the attempt that is going on, does not continue what the client has seen.

    `is_restart`: it is another attempt than the one whose text was sent.
    """

    def __init__(self, *, is_restart: bool) -> None:
        super().__init__("restarted" if is_restart else "diverged")
        self.is_restart = is_restart


class _SentText:
    """One of the two texts as the client has it, and how far the followed generation has repeated
    it.
    """

    __slots__ = ("repeated", "text")

    def __init__(self) -> None:
        self.text = ""
        self.repeated = 0  # characters

    @property
    def is_behind(self) -> bool:
        """Whether the followed generation has yet to repeat some of it."""
        return self.repeated < len(self.text)

    def take(self, piece: str) -> str | None:
        """The part of the next piece that the client has not seen; None when the piece contradicts
        what it has.
        """
        seen = self.text[self.repeated : self.repeated + len(piece)]
        if not piece.startswith(seen):
            return None
        self.repeated += len(piece)
        surplus = piece[len(seen) :]
        self.text += surplus
        return surplus


class Relay:
    """Follows one generation at a time, through every attempt the horde makes.

    `requested_model` stands for entries that name none; where it is None too, their text waits for
    the reply.
    """

    def __init__(self, *, requested_model: str | None, include_reasoning: bool) -> None:
        self._requested_model, self._include_reasoning = requested_model, include_reasoning
        self._content, self._reasoning = _SentText(), _SentText()
        self._over: set[str] = set()
        self._followed: str | None = None  # the generation, until it ends
        self._followed_worker_id: str | None = None
        # Of its text, fixed by the first entry whose text was taken.
        self._source: Source | None = None
        self._sequence = 0  # of its last entry
        self._is_held = False  # its further text waits for the reply
        self._is_reasoning_held = False
        self.has_sent = False  # the client has seen text
        self.has_restarted = False  # another attempt took over after that

    def resume(self, *, reasoning: str, content: str) -> None:
        """Take up a client that was sent these texts before, by another process."""
        self._reasoning.text, self._content.text = reasoning, content
        self.has_sent = self.has_restarted = bool(reasoning or content)

    def feed(self, entries: Iterable[ProgressEntry]) -> list[Delta]:
        """What to send for entries in the order of the stream; repeated ones count once. Raises
        RelayBroken.
        """
        deltas: list[Delta] = []
        for entry in entries:
            for delta in self._feed_one(entry):
                last = deltas[-1] if deltas else None
                if last is not None and (last.kind, last.source) == (delta.kind, delta.source):
                    deltas[-1] = replace(last, text=last.text + delta.text)
                else:
                    deltas.append(delta)
        return deltas

    def finish(self, reply: CompletedReply) -> Remainder:
        """What is missing of the reply. Raises RelayBroken."""
        if (
            self.has_sent
            and self._followed is not None
            and self._followed_worker_id != reply.worker_id
        ):
            self._leave()  # nobody said that the attempt had ended
        sent, content = self._content.text, reply.content or ""
        # A stop text or blanks, by its own worker.
        is_cut = not self._content.is_behind and sent.startswith(content)
        if not content.startswith(sent) and not is_cut:
            raise RelayBroken(is_restart=self._content.is_behind)
        return Remainder(
            reasoning=self._find_missing_reasoning(reply), content=content[len(sent) :]
        )

    def _find_missing_reasoning(self, reply: CompletedReply) -> str:
        """Reasoning is not the reply: what does not continue what was sent is left out, and nothing
        fails.
        """
        sent, reasoning = self._reasoning.text, reply.reasoning or ""
        return (
            reasoning[len(sent) :] if self._include_reasoning and reasoning.startswith(sent) else ""
        )

    def _feed_one(self, entry: ProgressEntry) -> Iterator[Delta]:
        if entry.generation_id in self._over:
            return
        if entry.has_ended:
            self._over.add(entry.generation_id)
            if entry.generation_id == self._followed:
                self._leave()
            return
        if entry.generation_id != self._followed:
            self._leave()
            self._followed = entry.generation_id
        if entry.sequence <= self._sequence:
            return
        # Text behind a gap would tear a hole into the reply, so it waits, as does text that cannot
        # name its model.
        model = entry.model or self._requested_model
        if self._source is None and model is not None and entry.worker_id:
            self._source = Source(entry.worker_id, model)
        self._is_held |= entry.sequence != self._sequence + 1 or self._source is None
        self._sequence, self._followed_worker_id = entry.sequence, entry.worker_id
        if self._source is not None and not self._is_held:
            yield from self._continue(entry, self._source)

    def _continue(self, entry: ProgressEntry, source: Source) -> Iterator[Delta]:
        if entry.reasoning and self._include_reasoning and not self._is_reasoning_held:
            reasoning = self._reasoning.take(entry.reasoning)
            self._is_reasoning_held = reasoning is None
            if reasoning:
                self.has_sent = True
                yield Delta(DeltaKind.REASONING, reasoning, source)
        content = self._content.take(entry.content)
        if content is None:
            raise RelayBroken(is_restart=True)
        if content:
            self.has_sent = True
            yield Delta(DeltaKind.CONTENT, content, source)

    def _leave(self) -> None:
        """Stop following: whoever comes next is compared with what was sent from its first
        character.
        """
        if self._followed is not None:
            self._over.add(self._followed)
        self._followed = self._followed_worker_id = self._source = None
        self._sequence = 0
        self._is_held = self._is_reasoning_held = False
        self._content.repeated = self._reasoning.repeated = 0
        self.has_restarted |= self.has_sent
