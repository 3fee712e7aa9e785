# SPDX-License-Identifier: AGPL-3.0-or-later
"""Answers kept for a few seconds: in this process, and shared through Redis while there is one.

Whatever is kept here can be computed again from the database, so losing it costs a query. By hand,
since the caches of cachetools let every thread compute a value that ran out, or make all wait for
one; here those who have an old value take it, and what was forgotten meanwhile is not kept.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from horde import redis_ctrl
from horde.json_text import write_json
from horde.redis_ctrl import RedisUnavailable
from horde.runtime import Part, get_runtime
from horde.written_answer import WrittenAnswer

# Of one kind. The few large lists are what packing takes long for.
MAX_REUSED_ANSWERS = 16


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

    def expire(self, key: K) -> None:
        """As `forget`, but whoever asks while the next one computes still gets the old value."""
        kept = self._kept.get()
        with kept.lock:
            kept.version += 1
            entry = kept.entries.get(key)
            if entry is not None:
                expires_at = min(entry.expires_at, self._clock())
                kept.entries[key] = _Entry(entry.value, expires_at)

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


def write_answer(value: object) -> WrittenAnswer:
    """A JSON value as the answer that many will read."""
    return WrittenAnswer(write_json(value, ensure_ascii=True))


class SharedAnswers[K: Hashable]:
    """Answers that one process writes for all: each is kept as bytes for `lifetime_seconds`, then
    read from Redis again.

    Where none is there the answer is computed here, and believed for `compute_seconds`; by all
    processes with `shares_computed`, which suits what no job keeps up to date.
    """

    def __init__(
        self,
        key_prefix: str,
        *,
        lifetime_seconds: float,
        compute_seconds: float,
        shares_computed: bool = False,
    ) -> None:
        self._key_prefix, self._shares_computed = key_prefix, shares_computed
        self._compute_seconds = compute_seconds
        self._answers: TimedCache[K, WrittenAnswer] = TimedCache(lifetime_seconds)
        self._computed: TimedCache[K, str] = TimedCache(compute_seconds)
        self._latest: Part[dict[K, WrittenAnswer]] = Part(dict)

    def get(self, key: K, compute: Callable[[], object]) -> WrittenAnswer:
        """The answer of `key`; `compute` makes the value that it is written from."""

        def read() -> WrittenAnswer:
            text = read_shared_text(self._name(key))
            if text is None:
                text = self._computed.get(key, lambda: self._write(key, compute()))
            return self._reuse(key, text)

        return self._answers.get(key, read)

    def publish(self, key: K, value: object, ttl_seconds: float) -> None:
        """Share an answer that is kept up to date, for this long should that end. Best effort."""
        write_shared_text(self._name(key), write_json(value, ensure_ascii=True), ttl_seconds)

    def forget(self, *keys: K) -> None:
        """Write these answers anew when they are next asked for. Call it after the commit."""
        forget_shared(*map(self._name, keys))
        for key in keys:
            self._computed.forget(key)
            self._answers.expire(key)

    def _write(self, key: K, value: object) -> str:
        text = write_json(value, ensure_ascii=True)
        if self._shares_computed:
            write_shared_text(self._name(key), text, self._compute_seconds)
        return text

    def _name(self, key: K) -> str:
        return f"{self._key_prefix}{key}"

    def _reuse(self, key: K, text: str) -> WrittenAnswer:
        """The answer of before when nothing changed, which may be packed already."""
        latest = self._latest.get()
        known = latest.get(key)
        if known is None or known.body != text.encode("ascii"):
            if len(latest) >= MAX_REUSED_ANSWERS:
                latest.clear()
            known = latest[key] = WrittenAnswer(text)
        return known


def read_shared_text(key: str) -> str | None:
    """An ASCII text that any process shared; None when there is none, or no Redis."""
    try:
        text = redis_ctrl.get_text(key)
    except RedisUnavailable:
        return None
    return text if text is not None and text.isascii() else None


def write_shared_text(key: str, text: str, ttl_seconds: float) -> None:
    """Share a text. Best effort: readers do without it."""
    try:
        redis_ctrl.set_text(key, text, ttl_seconds)
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
