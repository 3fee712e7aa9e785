# SPDX-License-Identifier: AGPL-3.0-or-later
"""A small HTTP/1.1 client for one origin: kept connections, whole answers, nothing else.

A front makes a hundred calls a second for a thousand open streams. A general client spends two to four milliseconds on
each, which would be most of what the front does; this one spends a tenth.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import h11

CONNECT_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 5.0  # the API closes its side after 15
READ_BYTES: Final = 64 * 1024
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024  # far more than any answer; a server gone wrong shall not fill the memory
USER_AGENT: Final = b"aihorde-oai-front"
DEFAULT_PORTS: Final = {"http": 80, "https": 443}

type HeaderPairs = Sequence[tuple[bytes, bytes]]


class HttpFailure(Exception):
    """No whole answer came: not connected, cut off, or not HTTP."""


class _StaleConnection(HttpFailure):
    """A kept connection ended before anything of an answer came, as one does that the server had closed meanwhile."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Names of headers are lower case; of several with one name the last counts."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes


class HttpClient:
    """Calls of one loop to one origin, `connections` of them at once; further ones wait their turn.

    `base_url` is http or https, and may have a path. Redirects are answers, and no proxy of the environment is heeded.
    """

    def __init__(self, base_url: str, connections: int) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
        self._authority = parts.netloc.rpartition("@")[2].encode("ascii")
        self._path = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._turns = asyncio.Semaphore(connections)
        self._idle: list[_Connection] = []  # the last one used stands last, so that the others may grow old

    async def call(self, method: str, path: str, headers: HeaderPairs, content: bytes = b"") -> HttpAnswer:
        """One call. Raises HttpFailure. Bound it with `asyncio.timeout`: a call that is cut short loses its connection.

        A call without content is sent a second time when the server had closed the connection that was kept.
        """
        target = f"{self._path}{path}".encode("ascii")
        sent = [(b"host", self._authority), (b"user-agent", USER_AGENT), *headers]
        if content:
            sent.append((b"content-length", b"%d" % len(content)))
        request = _build_request(method, target, sent)
        async with self._turns:
            kept = self._take_idle()
            if kept is not None:
                try:
                    return await self._use(kept, request, content)
                except _StaleConnection:
                    if content:
                        raise
            return await self._use(await self._connect(), request, content)

    async def close(self) -> None:
        """Close what is kept."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=READ_BYTES)
        except (OSError, TimeoutError) as error:  # an error of TLS is an OSError
            raise HttpFailure(type(error).__name__) from None
        return _Connection(reader, writer)

    async def _use(self, connection: "_Connection", request: h11.Request, content: bytes) -> HttpAnswer:
        is_reusable = False
        try:
            answer = await connection.exchange(request, content)
            is_reusable = connection.begin_next()
        except (OSError, h11.ProtocolError) as error:
            raise HttpFailure(type(error).__name__) from None
        finally:
            if is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
        self._drop_old()
        return answer

    def _drop_old(self) -> None:
        while self._idle and not self._idle[0].is_usable:
            self._idle.pop(0).close()


class _Connection:
    """One connection, for one call after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT)
        self._used_at = time.monotonic()
        self._has_served = False

    @property
    def is_usable(self) -> bool:
        """Whether the server seems to be there still."""
        is_fresh = time.monotonic() - self._used_at < IDLE_SECONDS
        return is_fresh and not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        """End it, whatever is under way."""
        with contextlib.suppress(OSError):
            self._writer.transport.abort()

    def begin_next(self) -> bool:
        """Whether another call may follow."""
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        self._used_at, self._has_served = time.monotonic(), True
        return True

    async def exchange(self, request: h11.Request, content: bytes) -> HttpAnswer:
        """Send a request, read its answer. Raises OSError, h11.ProtocolError or _StaleConnection."""
        protocol = self._protocol
        head = protocol.send(request)
        body = protocol.send(h11.Data(content)) if content else b""
        end = protocol.send(h11.EndOfMessage())
        try:
            self._writer.writelines([part for part in (head, body, end) if part])
            await self._writer.drain()
        except ConnectionError:
            if self._has_served:
                raise _StaleConnection from None
            raise
        response = await self._receive_response()
        parts: list[bytes] = []
        length = 0
        while isinstance(event := await self._receive(), h11.Data):
            parts.append(bytes(event.data))
            length += len(event.data)
            if length > MAX_ANSWER_BYTES:
                raise h11.RemoteProtocolError("the answer has no end")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
        return HttpAnswer(response.status_code, headers, b"".join(parts))

    async def _receive_response(self) -> h11.Response:
        while True:
            event = await self._receive()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("the connection ended")

    async def _receive(self) -> object:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            try:
                data = await self._reader.read(READ_BYTES)
            except ConnectionError:
                data = b""
            if not data and self._has_served and self._protocol.their_state is h11.SEND_RESPONSE:
                raise _StaleConnection
            self._protocol.receive_data(data)
        return event


def _build_request(method: str, target: bytes, headers: HeaderPairs) -> h11.Request:
    try:
        return h11.Request(method=method, target=target, headers=list(headers))
    except h11.LocalProtocolError as error:  # a header that no server would take
        raise HttpFailure(type(error).__name__) from None
