# SPDX-License-Identifier: AGPL-3.0-or-later
"""Answers kept for a few seconds: in this process, and shared through Redis while there is one.

Whatever is kept here can be computed again from the database, so losing it costs a query.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from horde import redis_ctrl
from horde.redis_ctrl import RedisUnavailable
from horde.runtime import Part, get_runtime


@dataclass(frozen=True, slots=True)
class _Entry[V]:
    value: V
    expires_at: float


@dataclass(slots=True)
class _Kept[K: Hashable, V]:
    """What one cache keeps in one runtime."""

    entries: OrderedDict[K, _Entry[V]] = field(default_factory=OrderedDict)
    computing: dict[K, threading.Lock] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    # Moves when something is forgotten: what was computed before must not be kept after.
    version: int = 0

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            self.version += 1
            self.entries.clear()


class TimedCache[K: Hashable, V]:
    """Values by key for `lifetime_seconds`, of each runtime its own. One thread computes a value
    while others take the old one or wait.

    An old value is handed out for at most one more lifetime, and only while somebody computes the
    new one.
    """

    def __init__(
        self,
        lifetime_seconds: float,
        *,
        max_entries: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifetime_seconds, self._max_entries, self._clock = (
            lifetime_seconds,
            max_entries,
            clock,
        )
        self._kept: Part[_Kept[K, V]] = Part(_Kept)

    def get(self, key: K, compute: Callable[[], V]) -> V:
        """The value of `key`; what `compute` raises reaches the caller and is not kept."""
        kept = self._kept.get()
        entry = kept.entries.get(key)
        now = self._clock()
        if entry is not None and now < entry.expires_at:
            return entry.value
        with kept.lock:
            turn = kept.computing.setdefault(key, threading.Lock())
        is_recent = entry is not None and now < entry.expires_at + self._lifetime_seconds
        if not turn.acquire(blocking=not is_recent):
            assert entry is not None
            return entry.value
        try:
            return self._get_or_compute(kept, key, compute)
        finally:
            with kept.lock:
                kept.computing.pop(key, None)
            turn.release()

    def forget(self, key: K) -> None:
        """Compute `key` again when it is next asked for."""
        kept = self._kept.get()
        with kept.lock:
            kept.version += 1
            kept.entries.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.get().clear()

    def _get_or_compute(self, kept: _Kept[K, V], key: K, compute: Callable[[], V]) -> V:
        entry = kept.entries.get(key)  # the thread that was waited for may have brought it
        if entry is not None and self._clock() < entry.expires_at:
            return entry.value
        version = kept.version
        value = compute()
        with kept.lock:
            if version == kept.version:
                kept.entries[key] = _Entry(value, self._clock() + self._lifetime_seconds)
                kept.entries.move_to_end(key)
                while len(kept.entries) > self._max_entries:
                    kept.entries.popitem(last=False)
        return value


def clear_all() -> None:
    """Forget what the caches of this runtime keep, as between two tests."""
    for kept in get_runtime().list_held(_Kept):
        kept.clear()


def read_shared[V](key: str, parse: Callable[[Any], V]) -> V | None:
    """What any process shared under `key`; None when there is nothing, no Redis, or a value that
    `parse` cannot take.

    A server of another version may have written the value, so its shape is never trusted.
    """
    try:
        value = redis_ctrl.get_json(key)
        return None if value is None else parse(value)
    except (RedisUnavailable, TypeError, KeyError, ValueError, AttributeError):
        return None


def write_shared(key: str, value: object, ttl_seconds: float) -> None:
    """Share a JSON value. Best effort: readers do without it."""
    try:
        redis_ctrl.set_json(key, value, ttl_seconds)
    except RedisUnavailable:
        return


def forget_shared(*keys: str) -> None:
    """Withdraw shared values. Best effort: without Redis nobody can read them either, and they
    expire.
    """
    try:
        redis_ctrl.delete(*keys)
    except RedisUnavailable:
        return
