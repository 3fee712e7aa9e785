# SPDX-License-Identifier: AGPL-3.0-or-later
"""The page to chat at: three files beside this one, served as they are.

The page may load and call nothing but this server, and no markup can come from a model's reply: its
policy forbids both.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

FOLDER: Final = Path(__file__).with_name("page")
FILES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "/": ("index.html", "text/html; charset=utf-8"),
        "/chat.css": ("chat.css", "text/css; charset=utf-8"),
        "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    }
)
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",  # the empty icon, which keeps browsers from asking for one
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Asked for again each time, answered with 304 while it is the same.
        "cache-control": "no-cache",
        "content-security-policy": POLICY,
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
)

type Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def build_page_handlers() -> dict[str, Handler]:
    """Path to handler of its GET, for each file of the page. Reads the files once."""
    return {
        path: build_handler((FOLDER / name).read_bytes(), kind)
        for path, (name, kind) in FILES.items()
    }


def build_handler(content: bytes, kind: str) -> Handler:
    """An ASGI handler that answers with this content: 200, or 304 when the client has it."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    common = [(name.encode(), value.encode()) for name, value in {**HEADERS, "etag": tag}.items()]
    described = [
        *common,
        (b"content-type", kind.encode()),
        (b"content-length", str(len(content)).encode()),
    ]

    async def handle(scope: Scope, _receive: Receive, send: Send) -> None:
        known = Headers(scope=scope).get("if-none-match", "")
        if tag in [word.strip().removeprefix("W/") for word in known.split(",")]:
            await send({"type": "http.response.start", "status": 304, "headers": common})
            await send({"type": "http.response.body", "body": b""})
            return
        await send({"type": "http.response.start", "status": 200, "headers": described})
        await send(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content}
        )

    return handle
