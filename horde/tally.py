# SPDX-License-Identifier: AGPL-3.0-or-later
"""What happened in this process since it was last asked, in numbers, for the operator's dashboard.

Counting adds to a number in memory; a periodic job takes the numbers and stores them. A name is
made of words of this project, never of what a user or worker sent.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from horde.runtime import Part

REFUSED: Final = "refused."
FAULT: Final = "fault."
WAIT: Final = "wait."
FIRST_TOKEN: Final = "first."
DONE: Final = "done"
TOKENS: Final = "tokens"
REDIS_FAILED: Final = "redis_failed"
STORE_FAILED: Final = "store_failed"
RATE_LIMITED: Final = "429"
NO_REASON: Final = "none"
ABORTED: Final = "lease_lapsed"

BOUNDS_SECONDS: Final = (
    *(0.1, 0.2, 0.5, 1, 2, 3, 5, 8, 13, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200),
    float("inf"),
)
"""Upper bounds of the spans that durations are counted in: about half as wide as they are long."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What was counted: by name, and faults by worker and reason."""

    amounts: Mapping[str, float]
    worker_faults: Mapping[tuple[UUID, str], int]


@dataclass(slots=True)
class _Tally:
    amounts: Counter[str] = field(default_factory=Counter)
    worker_faults: Counter[tuple[UUID, str]] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


_tally = Part(_Tally)


def count(name: str, amount: float = 1) -> None:
    """Count something by its name."""
    tally = _tally.get()
    with tally.lock:
        # A Counter adds what is put back; its stub knows whole numbers alone.
        tally.amounts[name] += amount  # type: ignore[assignment]


def count_seconds(kind: str, seconds: float) -> None:
    """Count a duration under `kind`, which is `WAIT` or `FIRST_TOKEN`."""
    count(name_span(kind, next(bound for bound in BOUNDS_SECONDS if seconds <= bound)))


def count_fault(worker_id: UUID, reason: str) -> None:
    """Count a job that a worker brought no reply for."""
    tally = _tally.get()
    with tally.lock:
        tally.amounts[FAULT + reason] += 1
        tally.worker_faults[worker_id, reason] += 1


def name_span(kind: str, bound: float) -> str:
    """The name that durations up to `bound` are counted by."""
    return f"{kind}{bound:g}"


def take() -> Counted:
    """What was counted since the last call."""
    tally = _tally.get()
    with tally.lock:
        taken = Counted(dict(tally.amounts), dict(tally.worker_faults))
        tally.amounts.clear()
        tally.worker_faults.clear()
    return taken


def give_back(counted: Counted) -> None:
    """Count again what could not be stored."""
    tally = _tally.get()
    with tally.lock:
        tally.amounts.update(counted.amounts)
        tally.worker_faults.update(counted.worker_faults)
