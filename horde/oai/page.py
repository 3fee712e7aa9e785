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

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from horde.front_config import FrontConfig
from horde.oai.answers import send_bytes
from horde.web.files import HEADERS, HTML_TYPE, KINDS, STATIC_FOLDER

FOLDER: Final = Path(__file__).with_name("page")
SHARED: Final = ("horde.css", "parts.js")
SERVED: Final = (".css", ".js")
PROGRAMS: Final = ("/v1", "/api", "/health", "/chat/", "/models")
ROOT: Final = "{root}"  # in the page of an unknown address: the way from there to the chat


def _list_files() -> dict[str, tuple[Path, str]]:
    own = sorted(path for path in FOLDER.rglob("*") if path.suffix in SERVED)
    names = [path.relative_to(FOLDER).as_posix() for path in own]
    return {
        "/": (FOLDER, "index.html"),
        **{f"/{name}": (FOLDER, name) for name in names},
        **{f"/{name}": (STATIC_FOLDER, name) for name in SHARED},
    }


FILES: Final[Mapping[str, tuple[Path, str]]] = MappingProxyType(_list_files())
"""Path to the folder and the name of its file."""
_MISSING: Final = (FOLDER / "missing.html").read_text()

type Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def build_page_handlers(config: FrontConfig) -> dict[str, Handler]:
    """Path to handler of its GET, for each file of the page and for what it asks of its horde."""
    handlers = {
        path: _build_handler(StaticFiles(directory=folder), name)
        for path, (folder, name) in FILES.items()
    }
    facts = {
        "title": config.title,
        "site": config.public_url.rstrip("/") or None,
        "source": config.repository or None,
    }
    return {**handlers, "/page.json": JSONResponse(facts, headers=dict(HEADERS))}


def _build_handler(files: StaticFiles, name: str) -> Handler:
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        response = await files.get_response(name, scope)
        response.headers.update(HEADERS)
        await response(scope, receive, send)

    return handle


def wants_page(scope: Scope, headers: Headers) -> bool:
    """Whether a person asks with a browser, at an address that no program takes for a route."""
    is_program = scope["path"].lower().startswith(PROGRAMS)
    first_wish = headers.get("accept", "").partition(",")[0].partition(";")[0].strip()
    return scope["method"] == "GET" and not is_program and first_wish == HTML_TYPE


async def send_missing_page(send: Send, path: str) -> None:
    """404 for a person. Its links are relative: a proxy may serve the page below a path."""
    root = "../" * (path.count("/") - 1) or "./"
    content = _MISSING.replace(ROOT, root).encode()
    await send_bytes(send, 404, content, {**HEADERS, "content-type": KINDS[".html"]})
