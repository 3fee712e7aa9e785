# SPDX-License-Identifier: AGPL-3.0-or-later
"""The page to chat at: three files beside this one, served as they are.

The page may load and call nothing but this server, and no markup can come from a model's reply: its
policy forbids both.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

FOLDER: Final = Path(__file__).with_name("page")
FILES: Final[Mapping[str, str]] = MappingProxyType(
    {"/": "index.html", "/chat.css": "chat.css", "/chat.js": "chat.js"}
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
    """Path to handler of its GET, for each file of the page."""
    files = StaticFiles(directory=FOLDER)
    return {path: _build_handler(files, name) for path, name in FILES.items()}


def _build_handler(files: StaticFiles, name: str) -> Handler:
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        response = await files.get_response(name, scope)
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    return handle
