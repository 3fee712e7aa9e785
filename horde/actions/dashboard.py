# SPDX-License-Identifier: AGPL-3.0-or-later
"""The operator's dashboard: what is counted and measured for it, and what a moderator sees.

What is shown is computed once in a few seconds whatever the number of viewers, and kept as the
bytes that are sent.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any

from sqlalchemy.orm import Session

from horde import clock, r2, redis_ctrl, tally
from horde.actions.actors import By, require_moderator
from horde.database import figures
from horde.database.caches import TimedCache
from horde.database.figures import GAINED, SPENT, Gauge, Minutes
from horde.database.operations_view import read_operations_view
from horde.database.stats import get_horde_modes
from horde.db import reading, run_transaction
from horde.json_text import JsonObject
from horde.redis_ctrl import RedisUnavailable

MOMENT_SECONDS = 4.0
SERIES_SECONDS = 20.0
PERCENTILES = (50, 90, 99)


class Window(StrEnum):
    """How far back the series go."""

    HOUR = "hour"
    DAY = "day"


WINDOWS = {
    Window.HOUR: (timedelta(hours=1), timedelta(minutes=1)),
    Window.DAY: (timedelta(days=1), timedelta(minutes=10)),
}
"""How far back, and the span of one point: 60 points and 144."""

_moments = TimedCache[None, bytes](MOMENT_SECONDS)
_series = TimedCache[Window, bytes](SERIES_SECONDS)


# What is kept


def store_tally() -> None:
    """Add what this process counted to the figures of the minute."""
    counted = tally.take()
    try:
        run_transaction(partial(_store, counted=counted))
    except Exception:
        tally.give_back(counted)
        raise


def _store(session: Session, counted: tally.Counted) -> None:
    now = clock.utcnow()
    figures.add_figures(session, counted.amounts, now)
    figures.add_worker_faults(session, counted.worker_faults, now)


def measure_horde() -> None:
    """Store how much waits, runs and serves now, and drop the figures of the day before."""

    def work(session: Session) -> None:
        now = clock.utcnow()
        figures.measure(session, now)
        figures.prune(session, now)

    run_transaction(work)


# What is shown


def show_moment(by: By) -> bytes:
    """The queue, the workers and the health of the parts, as JSON; a few seconds old.

    Errors: Unauthorized, Forbidden for who is no moderator.
    """
    _check_moderator(by)
    return _moments.get(None, _read_moment)


def show_series(by: By, window: Window) -> bytes:
    """Figures over time, as JSON. Errors: Unauthorized, Forbidden for who is no moderator."""
    _check_moderator(by)
    return _series.get(window, partial(_read_series, window))


def _check_moderator(by: By) -> None:
    with reading() as session:
        require_moderator(session, by)


def _read_moment() -> bytes:
    now = clock.utcnow()
    with reading() as session:
        started_at = time.monotonic()
        view = read_operations_view(session, now)
        milliseconds = _milliseconds_since(started_at)
        modes = get_horde_modes(session)
    found = asdict(view)
    found["database"] |= {"milliseconds": milliseconds}
    found |= {"redis": _probe_redis(), "store": _describe_store(), "modes": asdict(modes)}
    return _dump({"now": _to_unix(now), **found})


def _probe_redis() -> JsonObject:
    """Whether Redis answers, how fast, and what it holds."""
    started_at = time.monotonic()
    try:
        memory: Any = redis_ctrl.call(redis_ctrl.cache_db, lambda client: client.info("memory"))
    except RedisUnavailable:
        return {"is_reachable": False}
    return {
        "is_reachable": True,
        "milliseconds": _milliseconds_since(started_at),
        "used_bytes": memory.get("used_memory"),
    }


def _describe_store() -> JsonObject:
    """Whether there is a store and whether it failed last; nobody is asked."""
    is_configured = r2.is_configured()
    return {
        "is_configured": is_configured,
        "is_reachable": is_configured and not r2.is_circuit_open(),
    }


def _read_series(window: Window) -> bytes:
    back, span = WINDOWS[window]
    # What still runs is left out: half a minute would look like a fall.
    until = datetime.min + (clock.utcnow() - datetime.min) // span * span
    since = until - back
    with reading() as session:
        found = figures.read_figures(session, since=since, until=until, span=span)
    starts = [since + index * span for index in range(back // span)]
    minutes = span / timedelta(minutes=1)
    return _dump(build_series(found, starts) | build_sums(found, minutes))


def build_series(found: Minutes, starts: Sequence[datetime]) -> JsonObject:
    """A list of figures for each start, None where nothing was measured.

    `at` holds the starts as Unix seconds; `wait_50` and the like are seconds, everything that
    happens is as often a minute.
    """
    lines = [found.get(start) for start in starts]
    series: dict[str, list[float | None]] = {
        gauge.value: [None if line is None else line.get(gauge) for line in lines]
        for gauge in Gauge
    }
    for name in (tally.DONE, tally.TOKENS, tally.REDIS_FAILED, tally.STORE_FAILED):
        series[name] = [None if line is None else line.get(name, 0) for line in lines]
    for name, prefix in (
        ("faults", tally.FAULT),
        ("refused", tally.REFUSED),
        ("gained", GAINED),
        ("spent", SPENT),
    ):
        series[name] = [None if line is None else _sum_prefix(line, prefix) for line in lines]
    rate_limited = tally.REFUSED + tally.RATE_LIMITED
    series["rate_limited"] = [None if line is None else line.get(rate_limited, 0) for line in lines]
    for name, kind in (("wait", tally.WAIT), ("first", tally.FIRST_TOKEN)):
        spans = [[(line or {}).get(tally.name_span(kind, b), 0) for b in _BOUNDS] for line in lines]
        for percentile in PERCENTILES:
            series[f"{name}_{percentile}"] = [
                compute_percentile(counts, percentile) for counts in spans
            ]
    return {"at": [_to_unix(start) for start in starts], "series": series}


def build_sums(found: Minutes, minutes: float) -> JsonObject:
    """Faults, refusals and kudos of the whole window by their reason."""

    def add_up(prefix: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for line in found.values():
            for name, amount in line.items():
                if name.startswith(prefix):
                    reason = name.removeprefix(prefix)
                    sums[reason] = sums.get(reason, 0) + amount * minutes
        return {reason: round(amount, 2) for reason, amount in sums.items()}

    return {
        "faults": add_up(tally.FAULT),
        "refusals": add_up(tally.REFUSED),
        "gained": add_up(GAINED),
        "spent": add_up(SPENT),
    }


_BOUNDS = tally.BOUNDS_SECONDS


def compute_percentile(counts: Sequence[float], percentile: float) -> float | None:
    """Seconds that so many in a hundred durations stay below, as far as the counts by span of
    `tally.BOUNDS_SECONDS` tell; None without any. What lies in a span is taken as spread evenly.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, seen, lower = total * percentile / 100, 0.0, 0.0
    for count, bound in zip(counts, _BOUNDS, strict=True):
        if count and seen + count >= wanted:
            if bound == float("inf"):
                return lower
            return round(lower + (bound - lower) * (wanted - seen) / count, 2)
        seen += count
        lower = bound
    return lower


def _sum_prefix(line: dict[str, float], prefix: str) -> float:
    return sum(amount for name, amount in line.items() if name.startswith(prefix))


def _milliseconds_since(started_at: float) -> float:
    return round((time.monotonic() - started_at) * 1000, 1)


def _to_unix(moment: datetime) -> int:
    return int(moment.replace(tzinfo=UTC).timestamp())


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
