# SPDX-License-Identifier: AGPL-3.0-or-later
"""Connections whose clients cannot hold the threads of a server by sending slowly.

A thread reads a request with blocking calls, so whoever sends a byte now and then would keep it.
Waiting is therefore rationed: a request waits a moment for free, then needs one of the few places
of its process, and it has to bring more than a trickle. Bytes that are there already cost nothing,
which is all that a client behind a buffering proxy ever does.
"""

import select
import socket
import threading
import time
from collections.abc import Callable

SILENCE_SECONDS = 10.0  # without a byte in the middle of a request
FREE_SECONDS = 0.05  # one round trip of a near client; a place is asked for after it
PATIENCE_SECONDS = 10.0  # of waiting in all, and what the bytes received buy beyond it:
SLOWEST_BYTES_PER_SECOND = 16 * 1024


class ClientTooSlow(Exception):
    """A client stopped sending in the middle of a request, or trickles."""


class NoPlaceToWait(Exception):
    """A request is not here yet, and as many threads as may wait do so for others."""


class BoundedSocket(socket.socket):
    """A client's connection: `recv` waits within the request's ration. It takes the place of the
    socket it is made from.
    """

    def __init__(
        self,
        connection: socket.socket,
        places: threading.Semaphore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            connection.family, connection.type, connection.proto, fileno=connection.detach()
        )
        self._places, self._clock = places, clock
        self.begin_request()

    def begin_request(self) -> None:
        """Give the next request of the connection a ration of its own."""
        self._waited_seconds, self._received_bytes = 0.0, 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        """The next bytes, empty at the end. Raises ClientTooSlow, NoPlaceToWait, OSError."""
        if not self._is_readable(0):
            self._wait()
        data = super().recv(size, flags)
        self._received_bytes += len(data)
        return data

    def _wait(self) -> None:
        started_at = self._clock()
        try:
            patience = (
                PATIENCE_SECONDS
                + self._received_bytes / SLOWEST_BYTES_PER_SECOND
                - self._waited_seconds
            )
            ends_at = started_at + min(
                SILENCE_SECONDS, patience, self.gettimeout() or SILENCE_SECONDS
            )
            if self._is_readable(min(FREE_SECONDS - self._waited_seconds, ends_at - started_at)):
                return
            if not self._places.acquire(blocking=False):
                raise NoPlaceToWait
            try:
                if not self._is_readable(ends_at - self._clock()):
                    raise ClientTooSlow
            finally:
                self._places.release()
        finally:
            self._waited_seconds += self._clock() - started_at

    def _is_readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(max(seconds, 0.0) * 1000))
