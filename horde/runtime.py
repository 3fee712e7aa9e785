# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a process holds for one configuration: engine, clients, caches, senders.

A module declares with ``Part`` what it needs to be held, and keeps nothing itself. The parts belong
to a runtime, so two applications with different configurations serve in one process. Whatever runs
in no other runtime, as commands and most tests do, runs in the one of the process.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast


class Runtime:
    """The parts that one configuration has made so far. Safe for threads."""

    def __init__(self) -> None:
        self._held: dict[Part[Any], Any] = {}
        # A part may need another one while it is made.
        self._lock = threading.RLock()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let what runs in the block, in this thread or task, find the parts of this runtime."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def find_or_make[T](self, part: "Part[T]") -> T:
        """What this runtime holds of a part, made now if it was not asked for before."""
        try:
            return cast(T, self._held[part])
        except KeyError:
            with self._lock:
                if part not in self._held:
                    self._held[part] = part.make()
                return cast(T, self._held[part])

    def hold[T](self, part: "Part[T]", value: T) -> None:
        """Hold something else as a part from now on."""
        with self._lock:
            self._held[part] = value

    def list_held[T](self, kind: type[T]) -> list[T]:
        """Everything of one class that is held."""
        with self._lock:
            return [value for value in self._held.values() if isinstance(value, kind)]


class Part[T]:
    """One thing of a module, held by whichever runtime asks; `make` makes it at first use."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], T]) -> None:
        self.make = make

    def get(self) -> T:
        """What the runtime at hand holds."""
        return _current.get().find_or_make(self)

    def set(self, value: T) -> None:
        """Have the runtime at hand hold something else."""
        _current.get().hold(self, value)


_current = ContextVar("horde.runtime", default=Runtime())  # noqa: B039  the one of the process


def get_runtime() -> Runtime:
    """The runtime at hand."""
    return _current.get()


def in_this_runtime[**P, R](call: Callable[P, R]) -> Callable[P, R]:
    """A call that finds the parts of the runtime at hand, wherever it is made: a new thread begins
    in the runtime of the process.
    """
    runtime = get_runtime()

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _current.set(runtime)
        try:
            return call(*args, **kwargs)
        finally:
            _current.reset(token)

    return run
