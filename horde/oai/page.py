# SPDX-License-Identifier: AGPL-3.0-or-later
"""The page to chat at: files beside this one and the style sheet of all pages,
served as they are.

The page may load and call nothing but this server, and no markup can come from a model's reply: its
policy forbids both.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from horde.web.files import HEADERS, STATIC_FOLDER

FOLDER: Final = Path(__file__).with_name("page")
FILES: Final[Mapping[str, tuple[Path, str]]] = MappingProxyType(
    {
        "/": (FOLDER, "index.html"),
        "/chat.css": (FOLDER, "chat.css"),
        "/chat.js": (FOLDER, "chat.js"),
        "/horde.css": (STATIC_FOLDER, "horde.css"),
    }
)

type Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def build_page_handlers() -> dict[str, Handler]:
    """Path to handler of its GET, for each file of the page."""
    return {
        path: _build_handler(StaticFiles(directory=folder), name)
        for path, (folder, name) in FILES.items()
    }


def _build_handler(files: StaticFiles, name: str) -> Handler:
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        response = await files.get_response(name, scope)
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    return handle
