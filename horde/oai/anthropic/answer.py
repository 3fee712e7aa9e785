# SPDX-License-Identifier: AGPL-3.0-or-later
"""A message as it is answered: whole, or as the events of a stream.

Source: docs/reference/front_messages.md, "Stream".
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from horde.chat.wire import ToolCall
from horde.json_text import JsonObject
from horde.oai.anthropic.errors import build_error_body
from horde.oai.anthropic.reply import (
    MessageHead,
    build_frame,
    build_message,
    build_message_usage,
    build_message_x_horde,
    build_stop,
    build_thinking_block,
    build_tool_use,
    build_usage_counts,
    get_arguments,
    parse_input,
    sign,
)
from horde.oai.errors import ErrorAnswer
from horde.oai.forms import ChatAnswer
from horde.oai.mapping import CompletedReply
from horde.oai.relay import Delta, DeltaKind, Remainder
from horde.oai.sse import encode_named_event

PING: Final[JsonObject] = {"type": "ping"}
_EMPTY_BLOCKS: Final[dict[DeltaKind, JsonObject]] = {
    DeltaKind.REASONING: build_thinking_block("", ""),
    DeltaKind.CONTENT: {"type": "text", "text": ""},
}


class MessageAnswer(ChatAnswer):
    """One message. While it streams, one block is open at a time."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._has_begun = False
        self._index = -1  # of the newest block
        self._open: DeltaKind | None = None  # what that holds, until it is stopped
        self._thoughts: list[str] = []

    def render(self, reply: CompletedReply) -> JsonObject:
        """The message."""
        return build_message(self._head, reply)

    def open(self) -> bytes:
        """The start, which needs no worker: the model has the client's name."""
        return _encode(self._begin())

    def fill_silence(self) -> bytes:
        """A ping."""
        return _encode([PING])

    def write_deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Text behind what was sent; thoughts behind text have no place."""
        events = [*self._begin()]
        for delta in deltas:
            events += self._write(delta.kind, delta.text)
        return _encode(events)

    def finish(self, reply: CompletedReply, remainder: Remainder) -> bytes:
        """The rest of the text, the calls, and the end. Raises WaitFailed for unreadable
        arguments.
        """
        for call in reply.tool_calls:
            parse_input(self._head, call)
        events = [
            *self._begin(),
            *self._write(DeltaKind.REASONING, remainder.reasoning),
            *self._write(DeltaKind.CONTENT, remainder.content),
        ]
        if not reply.tool_calls and self._open is not DeltaKind.CONTENT:
            events += self._start_text(is_needed=self._index < 0)
        events += self._stop()
        for index, call in enumerate(reply.tool_calls):
            events += self._call(index, call)
        return _encode([*events, *self._end(reply)])

    def fail(self, error: ErrorAnswer) -> bytes:
        """The error, which is the end."""
        return _encode([build_error_body(error, self._head.front_id)])

    # --- events

    def _begin(self) -> Iterator[JsonObject]:
        if self._has_begun:
            return
        self._has_begun = True
        head = self._head
        message = {
            **build_frame(head.message_id, head.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": build_usage_counts(head.chat.estimated_prompt_tokens, 0),
        }
        yield {"type": "message_start", "message": message}
        yield PING

    def _write(self, kind: DeltaKind, text: str) -> Iterator[JsonObject]:
        is_late = kind is DeltaKind.REASONING and self._index >= 0 and self._open is not kind
        if not text or is_late:
            return
        if self._open is not kind:
            yield from self._stop()
            yield self._start(_EMPTY_BLOCKS[kind])
            self._open = kind
        if kind is DeltaKind.CONTENT:
            yield self._continue({"type": "text_delta", "text": text})
        else:
            self._thoughts.append(text)
            yield self._continue({"type": "thinking_delta", "thinking": text})

    def _start_text(self, *, is_needed: bool) -> Iterator[JsonObject]:
        """An empty text where nothing else was said: programs read the first block."""
        if is_needed:
            yield self._start(_EMPTY_BLOCKS[DeltaKind.CONTENT])
            self._open = DeltaKind.CONTENT

    def _start(self, block: JsonObject) -> JsonObject:
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _continue(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> Iterator[JsonObject]:
        if self._open is None:
            return
        if self._open is DeltaKind.REASONING:
            signature = sign("".join(self._thoughts))
            yield self._continue({"type": "signature_delta", "signature": signature})
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _call(self, index: int, call: ToolCall) -> Iterator[JsonObject]:
        """A call; clients take its input from deltas alone."""
        yield self._start(build_tool_use(self._head, index, call))
        yield self._continue({"type": "input_json_delta", "partial_json": get_arguments(call)})
        yield {"type": "content_block_stop", "index": self._index}

    def _end(self, reply: CompletedReply) -> Iterator[JsonObject]:
        yield {
            "type": "message_delta",
            "delta": build_stop(self._head, reply),
            "usage": build_message_usage(self._head, reply),
            "x_horde": build_message_x_horde(self._head, reply),
        }
        yield {"type": "message_stop"}


def _encode(events: Iterable[JsonObject]) -> bytes:
    """Events with their types on lines of their own, without which SDKs ignore them."""
    return b"".join(map(encode_named_event, events))
