# SPDX-License-Identifier: AGPL-3.0-or-later
import time

import pytest
from flask import Response
from limits import parse

from horde.ip_subject import build_ip_subject
from horde.limiter import (
    MAX_WHITELISTED_ADDRESSES,
    WHITELIST_SECONDS,
    CountedRequest,
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


@pytest.mark.parametrize(("seconds_left", "answered"), [(0.0, 1), (0.4, 1), (16.9, 17)])
def test_nobody_is_told_to_come_back_at_once(seconds_left: float, answered: int) -> None:
    """U-19: in the last second of a window a clock that counts whole seconds says 0."""
    counted = CountedRequest(parse("2/second"), count=3, resets_at=time.time() + seconds_left)
    response = Response()
    counted.write_headers(response)
    assert answered - 1 <= int(response.headers["Retry-After"]) <= answered
    assert int(response.headers["Retry-After"]) >= 1
    assert response.headers["X-RateLimit-Remaining"] == "0"
