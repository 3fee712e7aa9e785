# SPDX-License-Identifier: AGPL-3.0-or-later
"""A reply that grows while its backend writes it.

What is read from it at any time is the start of what it ends with: the horde relays the text to a
reader before the reply is submitted, and the two must not differ. So whatever could still turn out
to be something else is held back, and the text of the finished reply is what was let out, piece by
piece.
"""

from collections.abc import Mapping

from horde.bridge.chunks import ChunkReader
from horde.bridge.reasoning import ReasoningSplitter, SurrogateJoiner
from horde.bridge.refusals import UnreadableAnswer
from horde.bridge.replies import ChatReply, build_chat_reply, is_cut_at_length
from horde.bridge.tool_calls import CallCollector
from horde.json_text import JsonObject

MAX_REPLY_CHARACTERS = 8 * 1024 * 1024  # a backend that never ends, whatever max_tokens says
# How much has to repeat: while more may follow, at the end, and for a piece that adds nothing.
_SURE_PIECES, _SURE_CHARACTERS = 3, 8
_LIKELY_CHARACTERS = 4
_EQUAL_CHARACTERS = 16


class TextJoiner:
    """Joins pieces of text, also of a backend that repeats all of the text with each piece.

    Whether it does shows when pieces begin with all that came before, one after the other. Until
    that is certain nothing is let out, which takes a piece or two and hardly ever happens.
    """

    def __init__(self) -> None:
        self._text = ""
        self._repeating: list[str] = []
        self._repeats = False
        self._likely_characters = _LIKELY_CHARACTERS

    def add(self, piece: str, *, is_message: bool = False) -> str:
        """The text that is certain with this piece.

        ``is_message`` when it came as a message, which elsewhere is a whole. Raises
        ``UnreadableAnswer`` when a backend that repeated its text goes back on it.
        """
        if is_message:
            self._likely_characters = 1
        if self._repeats:
            if not piece.startswith(self._text) and not self._text.startswith(piece):
                raise UnreadableAnswer("the text so far was sent again with other words")
            return self._let_out(piece[len(self._text) :])
        before = self._repeating[-1] if self._repeating else self._text
        grows = len(piece) > len(before) or len(before) >= _EQUAL_CHARACTERS
        if before and grows and piece.startswith(before):
            self._repeating.append(piece)
            is_sure = len(self._repeating) >= _SURE_PIECES and len(before) >= _SURE_CHARACTERS
            return self._decide(repeats=True) if is_sure else ""
        return self._decide(repeats=False) + self._let_out(piece)

    def finish(self) -> str:
        """What was held back, once nothing follows."""
        pieces = self._repeating
        is_likely = bool(pieces) and (len(pieces) > 1 or len(self._text) >= self._likely_characters)
        return self._decide(repeats=is_likely)

    def _decide(self, *, repeats: bool) -> str:
        pieces, self._repeating = self._repeating, []
        self._repeats = repeats
        if not pieces:
            return ""
        rest = pieces[-1].removeprefix(self._text) if repeats else "".join(pieces)
        return self._let_out(rest)

    def _let_out(self, text: str) -> str:
        self._text += text
        return text


class StreamedReply:
    """The chunks of one chat completion, put together. Not for several threads at once.

    ``content`` and ``reasoning`` only ever grow. Calls are shown by ``build`` alone: half a call is
    of no use to anybody. ``is_read_along`` is false when nobody reads before the end.
    """

    def __init__(
        self,
        *,
        opens_reasoning: bool | None,
        is_read_along: bool = True,
        offered: frozenset[str] = frozenset(),
    ) -> None:
        self.content, self.reasoning = "", ""
        self.token_count = self._size = 0
        """Pieces of text so far; a backend sends one a token, or nearly."""
        self._native: str | None = None
        self._usage: JsonObject = {}
        self._reader, self._calls = ChunkReader(), CallCollector(offered)
        self._splitter = ReasoningSplitter(
            opens_reasoning=opens_reasoning, waits_for_end=not is_read_along
        )
        self._content, self._reasoning = TextJoiner(), TextJoiner()
        self._content_halves, self._reasoning_halves = SurrogateJoiner(), SurrogateJoiner()

    @property
    def has_finish_reason(self) -> bool:
        """Whether the backend said why it stopped."""
        return self._native is not None

    def add_chunk(self, chunk: Mapping[str, object]) -> None:
        """Take a chunk. Raises ``UnreadableAnswer`` for one in an unknown form."""
        piece = self._reader.read(chunk)
        self._size += len(piece.content) + len(piece.reasoning) + len(piece.calls)
        if self._size > MAX_REPLY_CHARACTERS:
            raise UnreadableAnswer(f"more than {MAX_REPLY_CHARACTERS} characters")
        self._usage = piece.usage or self._usage
        self._native = piece.finish_reason or self._native
        if piece.reasoning:
            self.token_count += 1
            self.content += self._splitter.take_as_answer()
            text = self._reasoning.add(piece.reasoning, is_message=piece.is_message)
            self.reasoning += self._reasoning_halves.add(text)
        if piece.content:
            self.token_count += 1
            text = self._content.add(piece.content, is_message=piece.is_message)
            self._add_content(self._content_halves.add(text))
        if piece.calls:
            self.token_count += 1
            self._calls.add(piece.calls)

    def finish(self) -> None:
        """Let out what was held back; nothing may be added after it."""
        self.reasoning += self._reasoning_halves.add(self._reasoning.finish())
        self.reasoning += self._reasoning_halves.finish()
        self._add_content(self._content_halves.add(self._content.finish()))
        self._add_content(self._content_halves.finish())
        content, reasoning = self._splitter.finish(is_cut=is_cut_at_length(self._native))
        self.content += content
        self.reasoning += reasoning

    def build(self) -> ChatReply:
        """The reply, once finished. Raises ``UnreadableAnswer``."""
        calls = self._calls.build_calls(is_cut=is_cut_at_length(self._native))
        return build_chat_reply(
            self.content, self.reasoning, calls, native=self._native, usage=self._usage
        )

    def _add_content(self, text: str) -> None:
        content, reasoning = self._splitter.add(text)
        self.content += content
        self.reasoning += reasoning
