# SPDX-License-Identifier: AGPL-3.0-or-later
"""Calls to one origin over kept connections: whole answers in, whole answers out.

A thin cover over aiohttp, so that its errors and types stay here. It is what horde_sdk brings
along, and its calls cost a fraction of httpx's, which for a thousand open streams were most of what
the front did.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp

CONNECT_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 5.0  # the API closes its side after 15
# Far more than any answer; a server gone wrong shall not fill the memory.
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
USER_AGENT: Final = "aihorde-oai-front"

type HeaderPairs = Sequence[tuple[bytes, bytes]]


class HttpFailure(Exception):
    """No whole answer came: not connected, cut off, or not HTTP."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Names of headers are lower case; of several with one name the last counts."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes


class HttpClient:
    """Calls of one loop to one origin, `connections` of them at once; further ones wait their turn.

    `base_url` is http or https, and may have a path. Redirects are answers, and no proxy of the
    environment is heeded.
    """

    def __init__(self, base_url: str, connections: int) -> None:
        self._base_url, self._connections = base_url.rstrip("/"), connections
        # Made by the first call, since it belongs to a running loop.
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, method: str, path: str, headers: HeaderPairs, content: bytes = b""
    ) -> HttpAnswer:
        """One call. Raises HttpFailure. Bound it with `asyncio.timeout`: a call that is cut short
        loses its connection.

        A call without content is sent a second time when the server had closed the connection that
        was kept.
        """
        sent = [(name.decode("latin-1"), _decode(value)) for name, value in headers]
        try:
            async with self._require_session().request(
                method,
                f"{self._base_url}{path}",
                headers=sent,
                data=content or None,
                allow_redirects=False,
            ) as response:
                body = await _read_whole(response)
                answered = {name.lower(): value for name, value in response.headers.items()}
                return HttpAnswer(response.status, answered, body)
        # ValueError: a header that would be two.
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise HttpFailure(type(error).__name__) from None

    async def close(self) -> None:
        """Close what is kept."""
        if self._session is not None:
            await self._session.close()

    def _require_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=self._connections,
                keepalive_timeout=IDLE_SECONDS,
                resolver=aiohttp.ThreadedResolver(),  # the system's, which knows its own hosts
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                headers={"User-Agent": USER_AGENT},
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type"),
                cookie_jar=aiohttp.DummyCookieJar(),  # what one caller is given is not for the next
            )
        return self._session


def _decode(value: bytes) -> str:
    """The text that the library, which writes UTF-8, sends as these bytes; latin-1 becomes
    UTF-8.
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


async def _read_whole(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    length = 0
    async for part in response.content.iter_any():
        parts.append(part)
        length += len(part)
        if length > MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError("the answer has no end")
    return b"".join(parts)
