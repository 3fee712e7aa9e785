# SPDX-License-Identifier: AGPL-3.0-or-later
"""Which method of a path is served by what, and what is no path of the front."""

import re
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.types import Receive, Scope, Send

from horde.oai.answers import send_empty
from horde.oai.errors import RequestRefused, shorten_param
from horde.oai.pops import render_native_error
from horde.oai.unknown_routes import build_unknown_url_message

CALL_KEY: Final = "horde.oai.call"  # of the scope
UNKNOWN_URL: Final = "unknown_url"
_AUTHORITY: Final = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_RAW_AUTHORITY: Final = re.compile(rb"\Ahttps?://[^/?#]*", re.IGNORECASE)

type Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def take_authority_off(scope: Scope) -> Scope:
    """The scope of a request line with a whole URL, which proxies and some clients send, as that of
    its path.
    """
    found = _AUTHORITY.match(scope["path"])
    if found is None:
        return scope
    raw = _RAW_AUTHORITY.sub(b"", scope.get("raw_path") or b"", count=1) or b"/"
    return {**scope, "path": scope["path"][found.end() :] or "/", "raw_path": raw}


class Methods:
    """One path: a handler for each method; a preflight for OPTIONS, 405 for the rest."""

    def __init__(self, **handlers: Handler) -> None:
        self._handlers = handlers | ({"HEAD": handlers["GET"]} if "GET" in handlers else {})
        self.allow = ", ".join([*handlers, "OPTIONS"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises RequestRefused (405)."""
        method = scope["method"]
        if method == "OPTIONS":
            await send_empty(send, {"allow": self.allow, **scope.get("horde.oai.preflight", {})})
            return
        handler = self._handlers.get(method)
        if handler is None:
            message = (
                f"Not allowed to {shorten_param(method)} on {shorten_param(scope['path'])}."
                f" Allowed: {self.allow}."
            )
            raise RequestRefused(
                "method_not_supported", message, status=405, headers={"Allow": self.allow}
            )
        await handler(scope, receive, send)


class NativeMethods(Methods):
    """A path of the native API, refused in its own form."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As `Methods`."""
        scope[CALL_KEY].render_error = render_native_error
        await super().__call__(scope, receive, send)


async def refuse_unknown_route(scope: Scope, _receive: Receive, _send: Send) -> None:
    """What answers where there is no route. Raises RequestRefused (404)."""
    message = build_unknown_url_message(scope.get("method", ""), scope["path"])
    raise RequestRefused(UNKNOWN_URL, message, status=404)


class UnknownRoute:
    """What would match a route with a parameter, and is none; a plain function would be wrapped."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestRefused (404)."""
        await refuse_unknown_route(scope, receive, send)
