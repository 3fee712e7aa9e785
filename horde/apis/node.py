# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a process knows about itself: requests in flight and waiting, and whether its database
answered last.
"""

import threading
from collections.abc import Callable


class NodeState:
    """Facts for the heartbeat. Nothing here asks another part, so it answers while everything else
    is stuck.
    """

    def __init__(self, thread_count: int) -> None:
        self.thread_count = thread_count
        self.is_database_reachable = True
        # The server replaces it with that of its thread pool.
        self.read_queue_length: Callable[[], int] = lambda: 0
        self._active_count = 0
        self._lock = threading.Lock()

    @property
    def active_count(self) -> int:
        """Requests being answered, the one that asks included."""
        return self._active_count

    @property
    def status(self) -> str:
        """`DOWN` without a database, `OVERLOADED` when a full round of requests waits for a thread,
        else `OK`.
        """
        if not self.is_database_reachable:
            return "DOWN"
        return "OVERLOADED" if self.read_queue_length() >= self.thread_count else "OK"

    def count_request(self, change: int) -> None:
        """Note that a request began (1) or ended (-1)."""
        with self._lock:
            self._active_count += change

    def note_database(self, is_reachable: bool) -> None:
        """Note what the last connection or statement showed of the database."""
        self.is_database_reachable = is_reachable
