# SPDX-License-Identifier: AGPL-3.0-or-later
"""The process's short memory."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from horde.database.caches import TimedCache


class Clock:
    """A clock that tests move."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> TimedCache[str, int]:
    return TimedCache(10.0, max_entries=2, clock=clock)


def fail() -> int:
    raise AssertionError("computed again")


def test_a_value_lives_its_lifetime(cache: TimedCache[str, int], clock: Clock) -> None:
    assert cache.get("a", lambda: 1) == 1
    clock.now = 9.9
    assert cache.get("a", fail) == 1
    clock.now = 10.0
    assert cache.get("a", lambda: 2) == 2


def test_a_failure_is_not_kept(cache: TimedCache[str, int]) -> None:
    with pytest.raises(AssertionError):
        cache.get("a", fail)
    assert cache.get("a", lambda: 1) == 1


def test_the_oldest_entry_makes_room(cache: TimedCache[str, int]) -> None:
    for value, key in enumerate("abc"):
        cache.get(key, lambda value=value: value)  # type: ignore[misc]
    assert cache.get("c", fail) == 2
    assert cache.get("a", lambda: 7) == 7


def test_what_was_computed_before_a_change_is_not_kept(cache: TimedCache[str, int]) -> None:
    def compute() -> int:
        cache.forget("a")  # the change happens while the old value is read
        return 1

    assert cache.get("a", compute) == 1
    assert cache.get("a", lambda: 2) == 2


def test_one_thread_computes_while_others_wait(cache: TimedCache[str, int]) -> None:
    entered, may_end, calls = threading.Event(), threading.Event(), []

    def compute() -> int:
        calls.append(1)
        entered.set()
        assert may_end.wait(60)
        return 1

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(cache.get, "a", compute) for _ in range(4)]
        assert entered.wait(60)
        may_end.set()
        assert [result.result(60) for result in results] == [1] * 4
    assert len(calls) == 1


@pytest.mark.parametrize(("age", "seen"), [(15.0, 1), (25.0, 2)])
def test_an_old_value_serves_for_one_more_lifetime_at_most(
    cache: TimedCache[str, int], clock: Clock, age: float, seen: int
) -> None:
    cache.get("a", lambda: 1)
    clock.now = age
    entered, may_end = threading.Event(), threading.Event()

    def compute() -> int:
        entered.set()
        assert may_end.wait(60)
        return 2

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "a", compute)
        assert entered.wait(60)
        second = pool.submit(cache.get, "a", fail)
        if seen == 1:
            assert second.result(60) == 1
        may_end.set()
        assert (first.result(60), second.result(60)) == (2, seen)
