# SPDX-License-Identifier: AGPL-3.0-or-later
"""Chunks of a streamed completion, and events as bytes. Pure.

Source: docs/reference/chat_front.md, "Streams".
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from horde.json_text import JsonObject
from horde.oai.errors import ErrorAnswer
from horde.oai.mapping import (
    CompletedReply,
    CompletionHead,
    build_system_fingerprint,
    build_usage,
    build_x_horde,
)
from horde.oai.relay import Delta, DeltaKind, Remainder, Source

# A proxy that buffers or caches would turn a stream back into one late answer.
STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"
# JSON allows these raw, but many clients take them for the end of a line.
_LINE_BREAKS: Final = ("\u0085", "\u2028", "\u2029")
# Made once: `json.dumps` would build an encoder for each chunk.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_DELTA_KEYS: Final[Mapping[DeltaKind, str]] = {
    DeltaKind.REASONING: "reasoning_content",
    DeltaKind.CONTENT: "content",
}


def encode_event(body: Mapping[str, object]) -> bytes:
    """One event: a `data:` line and a blank line, in UTF-8."""
    text = _ENCODER.encode(body)
    for character in _LINE_BREAKS:
        if character in text:
            text = text.replace(character, f"\\u{ord(character):04x}")
    try:
        return b"data: %b\n\n" % text.encode()
    # Half of a surrogate pair, which JSON can escape and UTF-8 cannot hold.
    except UnicodeEncodeError:
        return b"data: %b\n\n" % json.dumps(body, separators=(",", ":")).encode()


def encode_named_event(body: Mapping[str, object]) -> bytes:
    """One event that also says its `type` on a line of its own."""
    return b"event: %b\n%b" % (str(body["type"]).encode(), encode_event(body))


def encode_wait_comment(wait: Mapping[str, object]) -> bytes:
    """A comment for whoever asked how a request waits; everybody else's parser skips it."""
    return b": waiting %b\n\n" % _ENCODER.encode(wait).encode()


def encode_events(bodies: Iterable[Mapping[str, object]]) -> bytes:
    """Events one behind the other."""
    return b"".join(encode_event(body) for body in bodies)


def build_error_events(error: ErrorAnswer) -> bytes:
    """The end of an open stream that failed. No finish chunk: a client would take what it has for
    the whole reply.
    """
    return encode_event(error.build_body()) + DONE


def build_delta_events(
    head: CompletionHead, deltas: Iterable[Delta], *, has_begun: bool
) -> Iterator[JsonObject]:
    """Chunks of relayed text, behind the role's chunk unless the stream `has_begun`."""
    for delta in deltas:
        if not has_begun:
            yield _build_chunk(head, delta.source, {"role": "assistant", "content": ""})
            has_begun = True
        yield _build_chunk(head, delta.source, {_DELTA_KEYS[delta.kind]: delta.text})


def build_completion_events(
    head: CompletionHead,
    reply: CompletedReply,
    remainder: Remainder | None = None,
    *,
    has_begun: bool = False,
) -> Iterator[JsonObject]:
    """The chunks that complete a stream: role, reasoning, content, tool calls, finish, usage.

    `remainder` is the text that was not relayed, None for all of it; `has_begun` leaves out the
    role. `data: [DONE]` follows. The finish chunk alone has `x_horde`; the usage chunk is there
    when the client asked for it.
    """
    source = Source(reply.worker_id, reply.model)
    if remainder is None:
        remainder = Remainder(
            reply.reasoning or "" if head.include_reasoning else "", reply.content or ""
        )
    texts = ((DeltaKind.REASONING, remainder.reasoning), (DeltaKind.CONTENT, remainder.content))
    if not has_begun:
        yield _build_chunk(head, source, {"role": "assistant", "content": ""})
    yield from build_delta_events(
        head, (Delta(kind, text, source) for kind, text in texts if text), has_begun=True
    )
    for index, call in enumerate(reply.tool_calls):
        yield _build_chunk(head, source, {"tool_calls": [{"index": index, **call}]})
    finish = _build_chunk(head, source, {}, reply)
    yield finish | {"x_horde": build_x_horde(head, reply)}
    if head.include_usage:
        yield _build_chunk(head, source, None) | {"usage": build_usage(head, reply)}


def _build_chunk(
    head: CompletionHead,
    source: Source,
    delta: JsonObject | None,
    ended: CompletedReply | None = None,
) -> JsonObject:
    """One chunk; without a delta it has no choice. `usage` is there, as null, only when it was
    asked for.
    """
    choice = {
        "index": 0,
        "delta": delta,
        "finish_reason": None if ended is None else ended.finish_reason,
        "native_finish_reason": None if ended is None else ended.native_finish_reason,
        "logprobs": None,
    }
    chunk: JsonObject = {
        "id": head.completion_id,
        "object": "chat.completion.chunk",
        "created": head.created,
        "model": source.model,
        "choices": [] if delta is None else [choice],
    }
    if head.include_usage:
        chunk["usage"] = None
    chunk["system_fingerprint"] = build_system_fingerprint(source.worker_id, source.model)
    return chunk
