# SPDX-License-Identifier: AGPL-3.0-or-later
"""A completion as an event stream. Until progress is relayed, the reply arrives in one piece."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import Send

from horde.chat_contract import JsonObject
from horde.oai.errors import ErrorAnswer, FrontFailure
from horde.oai.mapping import (
    CompletedReply,
    CompletionFacts,
    build_message,
    build_system_fingerprint,
    build_usage,
    build_x_horde,
)
from horde.oai.signals import Subscription
from horde.oai.waiting import RequestWait, wait_for_reply

STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Clocks are monotonic: when the call was accepted, and when the stream opens at the latest."""

    accepted_at: float
    open_at: float
    keepalive_seconds: float


async def stream_completion(
    *,
    send: Send,
    facts: CompletionFacts,
    wait: RequestWait,
    subscription: Subscription,
    settings: StreamSettings,
    describe: Callable[[FrontFailure], ErrorAnswer],
    headers: list[tuple[bytes, bytes]],
    first_reply: CompletedReply | None,
) -> CompletedReply | None:
    """Send the stream. The reply when it was delivered, None when the stream ended with an error event.

    Raises FrontFailure while no byte is out.
    """
    reply = first_reply or await wait_for_reply(wait, subscription)
    await send({"type": "http.response.start", "status": 200, "headers": [*headers, *STREAM_HEADERS]})
    fingerprint = build_system_fingerprint(reply.worker_id, reply.model)

    async def emit(delta: JsonObject, finish: str | None, extra: JsonObject) -> None:
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish,
            "native_finish_reason": reply.native_finish_reason if finish else None,
            "logprobs": None,
        }
        chunk: JsonObject = {
            "id": facts.completion_id,
            "object": "chat.completion.chunk",
            "created": facts.created,
            "model": reply.model,
            "choices": [choice],
            **({"usage": None} if facts.include_usage else {}),
            "system_fingerprint": fingerprint,
            **extra,
        }
        if "usage" in extra:
            chunk["choices"] = []
        await send({"type": "http.response.body", "body": f"data: {json.dumps(chunk)}\n\n".encode(), "more_body": True})

    await emit({"role": "assistant", "content": ""}, None, {})
    message = build_message(facts, reply)
    if message.get("reasoning_content"):
        await emit({"reasoning_content": message["reasoning_content"]}, None, {})
    if reply.content:
        await emit({"content": reply.content}, None, {})
    for index, call in enumerate(reply.tool_calls):
        await emit({"tool_calls": [{"index": index, **call}]}, None, {})
    await emit({}, reply.finish_reason, {"x_horde": build_x_horde(facts, reply)})
    if facts.include_usage:
        await emit({}, None, {"usage": build_usage(facts, reply)})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
    return reply
