# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a process counts for the dashboard, and what becomes of the counts."""

from datetime import datetime, timedelta
from uuid import uuid4

import pytest

from horde import tally
from horde.actions.dashboard import build_series, build_sums, compute_percentile
from horde.runtime import Runtime

BOUNDS = tally.BOUNDS_SECONDS


def counts(**by_bound: int) -> list[float]:
    """Counts in the order of the bounds, given by `b` and the bound."""
    found = {f"b{bound:g}".replace(".", "_"): bound for bound in BOUNDS}
    return [by_bound.get(name, 0) for name in found]


def test_what_is_taken_is_counted_no_more_and_what_is_given_back_is() -> None:
    worker_id = uuid4()
    with Runtime().entered():
        tally.count("done")
        tally.count("tokens", 12)
        tally.count_fault(worker_id, "none")
        taken = tally.take()
        assert taken.amounts == {"done": 1, "tokens": 12, "fault.none": 1}
        assert taken.worker_faults == {(worker_id, "none"): 1}
        assert not tally.take().amounts
        tally.count("done")
        tally.give_back(taken)
        assert tally.take().amounts == {"done": 2, "tokens": 12, "fault.none": 1}


@pytest.mark.parametrize(
    ("seconds", "name"), [(0, "wait.0.1"), (0.1, "wait.0.1"), (4, "wait.5"), (9999, "wait.inf")]
)
def test_a_duration_is_counted_in_the_span_it_lies_in(seconds: float, name: str) -> None:
    with Runtime().entered():
        tally.count_seconds(tally.WAIT, seconds)
        assert tally.take().amounts == {name: 1}


@pytest.mark.parametrize(
    ("found", "percentile", "seconds"),
    [
        (counts(), 50, None),
        (counts(b2=10), 50, 1.5),
        (counts(b1=50, b13=50), 50, 1),
        (counts(b1=50, b13=50), 90, 12),
        (counts(binf=3), 99, 1200),
    ],
)
def test_a_percentile_lies_within_its_span(
    found: list[float], percentile: float, seconds: float | None
) -> None:
    assert compute_percentile(found, percentile) == seconds


def test_a_minute_without_figures_is_a_gap_and_one_without_an_event_is_zero() -> None:
    start = datetime(2026, 1, 1)
    later = start + timedelta(minutes=1)
    found = {later: {"waiting": 3.0, "fault.a": 1.0, "fault.b": 2.0, "wait.2": 4.0}}
    series = build_series(found, [start, later])
    assert series["at"] == [1767225600, 1767225660]
    assert series["series"]["waiting"] == [None, 3.0]
    assert series["series"]["faults"] == [None, 3.0]
    assert series["series"]["done"] == [None, 0]
    assert series["series"]["wait_50"] == [None, 1.5]
    assert build_sums(found, 10)["faults"] == {"a": 10, "b": 20}
