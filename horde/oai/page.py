# SPDX-License-Identifier: AGPL-3.0-or-later
"""The page to chat at: files beside this one and those that all pages share, and a word about the
horde it belongs to.

The page may load and call nothing but this server, and no markup can come from a model's reply: its
policy forbids both.
"""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from starlette.responses import JSONResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from horde.config import FrontConfig
from horde.web.files import HEADERS, STATIC_FOLDER

FOLDER: Final = Path(__file__).with_name("page")
SHARED: Final = ("horde.css", "parts.js")
KINDS: Final = (".css", ".js")


def _list_files() -> dict[str, tuple[Path, str]]:
    own = sorted(path for path in FOLDER.rglob("*") if path.suffix in KINDS)
    names = [path.relative_to(FOLDER).as_posix() for path in own]
    return {
        "/": (FOLDER, "index.html"),
        **{f"/{name}": (FOLDER, name) for name in names},
        **{f"/{name}": (STATIC_FOLDER, name) for name in SHARED},
    }


FILES: Final[Mapping[str, tuple[Path, str]]] = MappingProxyType(_list_files())
"""Path to the folder and the name of its file."""

type Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def build_page_handlers(config: FrontConfig) -> dict[str, Handler]:
    """Path to handler of its GET, for each file of the page and for what it asks of its horde."""
    handlers = {
        path: _build_handler(StaticFiles(directory=folder), name)
        for path, (folder, name) in FILES.items()
    }
    facts = {"title": config.title, "site": config.public_url.rstrip("/") or None}
    return {**handlers, "/page.json": JSONResponse(facts, headers=dict(HEADERS))}


def _build_handler(files: StaticFiles, name: str) -> Handler:
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        response = await files.get_response(name, scope)
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    return handle
