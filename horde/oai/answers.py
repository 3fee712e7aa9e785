# SPDX-License-Identifier: AGPL-3.0-or-later
"""JSON answers as ASGI messages, with the headers every answer of the front has.

By hand, since Starlette's own would not do: its JSON answer fails on half of a surrogate pair and
on a header of a gateway beyond latin-1, its CORS answers a preflight with a page of text and
without a request id, and its handlers of exceptions leave those nobody foresaw to the server, whose
log would quote them. Source: docs/reference/chat_front.md, "Headers" and "Browsers".
"""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Message, Send

PREFLIGHT_SECONDS: Final = 86400
CORS_METHODS: Final = "GET, POST, DELETE, OPTIONS"
EXPOSED_HEADERS: Final = ", ".join(
    (
        *(
            "x-request-id",
            "request-id",
            "x-horde-request-id",
            "x-horde-model",
            "retry-after",
            "openai-processing-ms",
            "x-should-retry",
        ),
        *(
            "x-ratelimit-limit-requests",
            "x-ratelimit-remaining-requests",
            "x-ratelimit-reset-requests",
        ),
    )
)


async def send_json(send: Send, status: int, body: object, headers: Mapping[str, str]) -> None:
    """Answer with one JSON document."""
    data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
    await send_bytes(send, status, data, {**headers, "content-type": "application/json"})


async def send_bytes(send: Send, status: int, data: bytes, headers: Mapping[str, str]) -> None:
    """Answer with bytes of the type that the headers name."""
    sent = {**headers, "content-length": str(len(data))}
    start = [
        (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in sent.items()
    ]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": data})


async def send_empty(send: Send, headers: Mapping[str, str]) -> None:
    """Answer with 204."""
    start = [
        (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in headers.items()
    ]
    await send({"type": "http.response.start", "status": 204, "headers": start})
    await send({"type": "http.response.body", "body": b""})


def build_cors_headers(origins: Sequence[str], origin: str | None) -> dict[str, str]:
    """What a page of `origin` needs to read an answer; nothing for others and for programs."""
    headers = {} if "*" in origins else {"vary": "Origin"}
    if origin is None or ("*" not in origins and origin not in origins):
        return headers
    allowed = "*" if "*" in origins else origin
    return {
        **headers,
        "access-control-allow-origin": allowed,
        "access-control-expose-headers": EXPOSED_HEADERS,
    }


def build_preflight_headers(origins: Sequence[str], headers: Headers) -> dict[str, str]:
    """What the browser of an allowed page asks before the call itself, beside the origin: any
    header may be sent.

    They are echoed because a `*` would not cover `Authorization`.
    """
    if "access-control-allow-origin" not in build_cors_headers(origins, headers.get("origin")):
        return {}
    requested = headers.get("access-control-request-headers")
    allowed = {"access-control-allow-headers": requested} if requested else {}
    return {
        **allowed,
        "access-control-allow-methods": CORS_METHODS,
        "access-control-max-age": str(PREFLIGHT_SECONDS),
    }


def add_headers(message: Message, headers: Mapping[str, str]) -> Message:
    """A response start with further headers."""
    extra = [
        (name.encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in headers.items()
    ]
    return {**message, "headers": [*message.get("headers", ()), *extra]}
