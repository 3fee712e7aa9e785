# SPDX-License-Identifier: AGPL-3.0-or-later
"""A small HTTP client on a connection kept open: cheap, so that the server is what gets
measured.
"""

import asyncio
import collections
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_SECONDS = 60


@dataclass
class Timings:
    """Seconds of each call, by a name of its route. Safe for threads."""

    by_route: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, route: str, seconds: float) -> None:
        """One call."""
        with self.lock:
            self.by_route[route].append(seconds)


class Connection:
    """One client's connection with its key. Used by one thread at a time."""

    def __init__(self, port: int, api_key: str, timings: Timings) -> None:
        self.port, self.api_key, self.timings = port, api_key, timings
        self.socket: socket.socket | None = None

    def call(self, route: str, method: str, path: str, body: object = None) -> Any:
        """The decoded answer, timed as `route`; raises RuntimeError unless it is a success."""
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"{method} /api/v2{path} HTTP/1.1\r\nHost: 127.0.0.1\r\napikey: {self.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        started = time.perf_counter()
        status, answer = self.exchange(head.encode() + data)
        self.timings.add(route, time.perf_counter() - started)
        if not 200 <= status < 300:
            raise RuntimeError(f"{method} {path}: {status} {answer[:1000]!r}")
        return json.loads(answer)

    def exchange(self, data: bytes) -> tuple[int, bytes]:
        """Send a request; status and body. A connection that the server closed while idle is opened
        again.
        """
        if self.socket is not None:
            try:
                return self.send(self.socket, data)
            except (ConnectionError, EOFError):
                self.close()
        self.socket = socket.create_connection(("127.0.0.1", self.port), TIMEOUT_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self.send(self.socket, data)

    def send(self, connection: socket.socket, data: bytes) -> tuple[int, bytes]:
        """One request and its answer on an open connection; raises EOFError when the server closes
        it before.
        """
        connection.sendall(data)
        received = b""
        while b"\r\n\r\n" not in received:
            received += receive(connection)
        head, _, body = received.partition(b"\r\n\r\n")
        lowered = head.lower()
        place = lowered.index(b"content-length:") + len(b"content-length:")
        length = int(lowered[place:].partition(b"\r\n")[0])
        while len(body) < length:
            body += receive(connection)
        if b"connection: close" in lowered:
            self.close()
        return int(head[9:12]), body

    def close(self) -> None:
        """Let go of the connection."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def receive(connection: socket.socket) -> bytes:
    """What came in; raises EOFError at the end."""
    chunk = connection.recv(65536)
    if not chunk:
        raise EOFError
    return chunk


async def read_answer(reader: asyncio.StreamReader) -> Mapping[str, Any]:
    """One answer of a kept connection; raises RuntimeError unless it is a 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    body = await reader.readexactly(length)
    if " 200 " not in head.partition("\r\n")[0]:
        raise RuntimeError(f"{head}{body[:1000]!r}")
    answer: Mapping[str, Any] = json.loads(body)
    return answer
