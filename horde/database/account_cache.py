# SPDX-License-Identifier: AGPL-3.0-or-later
"""Accounts by key hash, kept in process for a few seconds so that a pop or submit pays no query for
its key.

A change is told to every process through Redis. Without Redis a change takes effect when the entry
expires.
"""

import threading
import time
from collections.abc import Callable

from horde import redis_ctrl
from horde.pop_epochs import ACCOUNTS, move_marks
from horde.redis_ctrl import RedisUnavailable
from horde.runtime import get_runtime, in_this_runtime

CACHE_SECONDS = 5.0
# Bounds the memory; far above the keys that one process sees in the cache's lifetime.
MAX_ENTRIES = 10_000
CHANGE_CHANNEL = "horde:account_changed"


class AccountCache[T]:
    """Values by key hash, each belonging to one user. Safe for threads."""

    def __init__(
        self, lifetime_seconds: float = CACHE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lifetime_seconds, self._clock = lifetime_seconds, clock
        self._lock = threading.Lock()
        # In order of insertion, hence of expiry.
        self._entries: dict[str, tuple[float, int, T]] = {}
        self._generation = 0

    @property
    def generation(self) -> int:
        """Changes with every forgotten account: read it before the query whose result `put`
        stores.
        """
        return self._generation

    def find(self, key_hash: str) -> T | None:
        """The value of a key while it lives."""
        entry = self._entries.get(key_hash)
        return entry[2] if entry is not None and self._clock() < entry[0] else None

    def put(self, key_hash: str, user_id: int, value: T, generation: int) -> None:
        """Keep a value, unless an account was forgotten since `generation`: the value may be from
        before the change.
        """
        with self._lock:
            if generation != self._generation:
                return
            self._entries.pop(key_hash, None)
            self._entries[key_hash] = (self._clock() + self._lifetime_seconds, user_id, value)
            if len(self._entries) > MAX_ENTRIES:
                del self._entries[next(iter(self._entries))]

    def forget(self, user_id: int) -> None:
        """Drop what belongs to a user."""
        with self._lock:
            self._generation += 1
            self._entries = {
                key: entry for key, entry in self._entries.items() if entry[1] != user_id
            }

    def clear(self) -> None:
        """Drop everything, as after a gap in which changes may have been missed."""
        with self._lock:
            self._generation += 1
            self._entries = {}


def publish_account_change(user_id: int) -> None:
    """Make every process forget what it knows of an account. Best effort; call it after the
    commit.
    """
    _forget_everywhere_here(user_id)
    move_marks([ACCOUNTS])
    try:
        redis_ctrl.publish(CHANGE_CHANNEL, str(user_id))
    except RedisUnavailable:
        return  # counted by redis_ctrl; the others learn it when their entries expire


def start_account_listener(stop: threading.Event) -> threading.Thread:
    """Hear of the changes other processes make, until `stop` is set. Start it once in each serving
    process.
    """
    thread = threading.Thread(
        target=in_this_runtime(redis_ctrl.listen),
        args=(CHANGE_CHANNEL, _handle_change, _handle_gap, stop),
        name="account-changes",
        daemon=True,
    )
    thread.start()
    return thread


def _handle_change(message: str) -> None:
    if message.isdecimal():
        _forget_everywhere_here(int(message))


def _handle_gap() -> None:
    for cache in get_runtime().list_held(AccountCache):
        cache.clear()


def _forget_everywhere_here(user_id: int) -> None:
    for cache in get_runtime().list_held(AccountCache):
        cache.forget(user_id)
