# SPDX-License-Identifier: AGPL-3.0-or-later
"""A switch before a server that may be away: once a call failed, the next ones are spared the wait
for a while.
"""

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Skips a failing server: when the pause after a failure is over one caller tries, and all
    others are told at once.

    `trial_seconds` is how long that caller may take before another one tries too; without it as
    long as the pause. A call that can take longer than the pause needs it, or a hanging server
    would collect a caller a pause.
    """

    def __init__(
        self,
        retry_after_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        trial_seconds: float | None = None,
    ) -> None:
        self._retry_after_seconds, self._clock = retry_after_seconds, clock
        self._trial_seconds = retry_after_seconds if trial_seconds is None else trial_seconds
        self._lock = threading.Lock()
        self._retry_at: float | None = None  # None while the server answers

    def admits(self) -> bool:
        """Whether this caller may try; of several at the end of the pause only one may."""
        with self._lock:
            if self._retry_at is None:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._trial_seconds
            return True

    def is_open(self) -> bool:
        """Whether a caller would be turned away now; unlike `admits` it takes nobody's turn."""
        retry_at = self._retry_at
        return retry_at is not None and self._clock() < retry_at

    def record_success(self) -> None:
        """Let everybody through again."""
        self._retry_at = None

    def record_failure(self) -> None:
        """Start the pause, or start it again."""
        with self._lock:
            self._retry_at = self._clock() + self._retry_after_seconds
