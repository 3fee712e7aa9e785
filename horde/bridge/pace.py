# SPDX-License-Identifier: AGPL-3.0-or-later
"""How long a worker waits: between pops, after failures, in maintenance."""

import random
from collections.abc import Callable

# After so many empty pops, seconds between two; the pace of other text workers.
IDLE_STEPS = ((25, 3.0), (10, 2.0), (0, 1.0))
JITTER_SHARE = 0.2  # keeps threads and workers from popping in step
FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
MAX_SUBMIT_RETRY_SECONDS = 15.0
MAINTENANCE_PAUSE_SECONDS = 30.0


def compute_idle_seconds(empty_pop_count: int) -> float:
    """Seconds to wait after so many empty pops in a row, before jitter."""
    return next(seconds for least, seconds in IDLE_STEPS if empty_pop_count >= least)


def compute_retry_seconds(failure_count: int, ceiling_seconds: float = MAX_RETRY_SECONDS) -> float:
    """Seconds to wait after so many failures in a row (at least one), before jitter."""
    return min(FIRST_RETRY_SECONDS * 2.0 ** min(failure_count - 1, 16), ceiling_seconds)


def add_jitter(seconds: float, draw: Callable[[], float] = random.random) -> float:
    """The seconds, a fifth more or less at most."""
    return seconds * (1 + JITTER_SHARE * (2 * draw() - 1))
