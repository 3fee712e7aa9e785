# SPDX-License-Identifier: AGPL-3.0-or-later
import pytest

from horde.limiter import (
    MAX_WHITELISTED_ADDRESSES,
    WHITELIST_SECONDS,
    Whitelist,
    build_limit_subject,
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
    assert build_limit_subject(address) == subject


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
