# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a process remembers of accounts, and what makes it forget."""

from horde.database.account_cache import AccountCache


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_key_is_remembered_for_its_lifetime_only() -> None:
    clock = Clock()
    cache = AccountCache[str](5, clock)
    cache.put("hash", 1, "account", cache.generation)
    clock.seconds = 4.9
    assert cache.find("hash") == "account"
    clock.seconds = 5
    assert cache.find("hash") is None


def test_a_changed_account_is_forgotten_and_others_are_not() -> None:
    cache = AccountCache[str]()
    for user_id in (1, 2):
        cache.put(f"hash {user_id}", user_id, "account", cache.generation)
    cache.forget(1)
    assert (cache.find("hash 1"), cache.find("hash 2")) == (None, "account")


def test_what_was_read_before_a_change_is_not_remembered_after_it() -> None:
    cache = AccountCache[str]()
    generation = cache.generation
    cache.forget(1)
    cache.put("hash", 1, "as it was before", generation)
    assert cache.find("hash") is None


def test_the_memory_is_bounded() -> None:
    cache = AccountCache[int]()
    for number in range(10_050):
        cache.put(str(number), number, number, cache.generation)
    assert (cache.find("49"), cache.find("50")) == (None, 50)
