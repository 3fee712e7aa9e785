# SPDX-License-Identifier: AGPL-3.0-or-later
"""An end to a request, whatever it waits for.

An HTTP client's time-outs begin anew with every byte, and a thread inside a read hears of nothing
else. So the connections of a request are known here, and cut from outside.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import httpx

Trace = Callable[[str, Mapping[str, Any]], None]

# Only new connections are told of.
WITHOUT_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)


class RequestConnections:
    """The connections that one request opens. ``cut`` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        """Whether the request was ended from outside."""
        return self._is_cut

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """What httpx calls as its extension ``trace``."""
        if event != "connection.connect_tcp.complete":
            return
        connection = info["return_value"].get_extra_info("socket")
        with self._lock:
            self._connections.append(connection.dup())  # TLS takes the socket itself away
            is_late = self._is_cut
        if is_late:
            self.cut()

    def cut(self) -> None:
        """End the request, now or as soon as it is connected."""
        with self._lock:
            self._is_cut = True
            for connection in self._connections:
                with suppress(OSError):  # closed by the other side a moment ago
                    # Closing alone would not wake a thread inside recv.
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connections, once the request is over."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections = []


class LatestConnection(RequestConnections):
    """The connection of a client that keeps one at a time, over all its requests."""

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """As above; a new connection takes the place of the one before, which is over."""
        if event == "connection.connect_tcp.complete":
            self.close()
        super().trace(event, info)


@contextmanager
def ending_at(deadline: float) -> Iterator[Trace]:
    """A trace for httpx that cuts the request's connections at a moment of ``time.monotonic``."""
    connections = RequestConnections()
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), connections.cut)
    timer.daemon = True
    timer.start()
    try:
        yield connections.trace
    finally:
        timer.cancel()
        timer.join()
        connections.close()
