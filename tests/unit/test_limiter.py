# SPDX-License-Identifier: AGPL-3.0-or-later
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from flask import Response
from limits import parse

from horde.ip_subject import build_ip_subject
from horde.limiter import (
    MAX_OWN_WINDOWS,
    MAX_WHITELISTED_ADDRESSES,
    WHITELIST_SECONDS,
    CountedRequest,
    OwnWindows,
    Whitelist,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("address", "subject"),
    [
        ("198.51.100.1", "198.51.100.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("a socket", "a socket"),
    ],
)
def test_who_is_counted(address: str, subject: str) -> None:
    assert build_ip_subject(address) == subject


def test_an_address_of_the_settings_is_whitelisted_for_ever() -> None:
    whitelist = Whitelist(("198.51.100.1",), Clock())
    assert whitelist.holds("198.51.100.1")
    assert not whitelist.holds_for_a_day("198.51.100.1")
    assert not whitelist.holds("198.51.100.2")


def test_another_address_is_whitelisted_for_a_day() -> None:
    clock = Clock()
    whitelist = Whitelist((), clock)
    whitelist.add("198.51.100.1")
    clock.now += WHITELIST_SECONDS - 1
    assert whitelist.holds("198.51.100.1")
    clock.now += 2
    assert not whitelist.holds("198.51.100.1")


def test_the_whitelist_forgets_the_oldest_when_it_is_full() -> None:
    clock = Clock()
    whitelist = Whitelist((), clock)
    for number in range(MAX_WHITELISTED_ADDRESSES):
        whitelist.add(str(number))
    whitelist.add("0")  # renewed, so "1" is the oldest now
    whitelist.add("one more")
    assert [whitelist.holds(address) for address in ("0", "1", "2", "one more")] == [
        True,
        False,
        True,
        True,
    ]


def test_a_window_counts_until_it_ends_and_starts_anew() -> None:
    clock = Clock()
    windows = OwnWindows(clock)
    assert [windows.count("a", 60), windows.count("a", 60)] == [(1, 160.0), (2, 160.0)]
    assert windows.count("b", 1) == (1, 101.0)
    clock.now += 60
    assert windows.count("a", 60) == (1, 220.0)


def test_threads_that_count_at_once_lose_no_request() -> None:
    windows = OwnWindows()
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda _: windows.count("a", 3600)[0], range(4000)))
    assert sorted(counts) == list(range(1, 4001))


def test_a_full_memory_of_windows_forgets_those_that_ended_and_then_the_longest_unused() -> None:
    clock = Clock()
    windows = OwnWindows(clock)
    windows.count("ended", 1)
    clock.now += 2
    for number in range(MAX_OWN_WINDOWS):
        windows.count(str(number), 3600)
    assert windows.count(str(MAX_OWN_WINDOWS - 1), 3600)[0] == 2
    assert windows.count("0", 3600)[0] == 1


@pytest.mark.parametrize(("seconds_left", "answered"), [(0.0, 1), (0.4, 1), (16.9, 17)])
def test_nobody_is_told_to_come_back_at_once(seconds_left: float, answered: int) -> None:
    """In the last second of a window a clock that counts whole seconds says 0."""
    counted = CountedRequest(parse("2/second"), count=3, resets_at=time.time() + seconds_left)
    response = Response()
    counted.write_headers(response)
    assert answered - 1 <= int(response.headers["Retry-After"]) <= answered
    assert int(response.headers["Retry-After"]) >= 1
    assert response.headers["X-RateLimit-Remaining"] == "0"
