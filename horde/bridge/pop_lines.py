# SPDX-License-Identifier: AGPL-3.0-or-later
"""Connections for pops that wait: one for each thread, kept between pops, cut at a stop."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from horde.bridge.connections import LatestConnection

# So that the latest connection of a client is the one its request uses.
ONE_CONNECTION = httpx.Limits(max_connections=1, max_keepalive_connections=1)


@dataclass(frozen=True, slots=True)
class _Line:
    client: httpx.Client
    connection: LatestConnection


class PopLines:
    """The lines of one bridge; safe for several threads."""

    def __init__(self, build_client: Callable[[httpx.Limits], httpx.Client]) -> None:
        self._build_client = build_client
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}
        self._is_cut = False

    def post(self, url: str, **options: Any) -> httpx.Response:
        """One call on the line of this thread. Raises httpx's errors, also when it is cut."""
        with self._lock:
            line = self._lines.get(threading.get_ident())
            if line is None:
                line = _Line(self._build_client(ONE_CONNECTION), LatestConnection())
                self._lines[threading.get_ident()] = line
            is_cut = self._is_cut
        if is_cut:
            raise httpx.ReadError("the line was cut")
        return line.client.post(url, extensions={"trace": line.connection.trace}, **options)

    @property
    def is_cut(self) -> bool:
        """Whether the waiting ended from outside."""
        return self._is_cut

    def cut(self) -> None:
        """End every pop that waits, and each that would."""
        with self._lock:
            self._is_cut = True
            lines = list(self._lines.values())
        for line in lines:
            line.connection.cut()

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.connection.close()
            line.client.close()
