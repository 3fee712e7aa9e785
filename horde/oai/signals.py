# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the front hears about a request while it waits, and from whom. Signals carry no text; the
status is the truth.

`SignalHub` is the seam to Redis; `PollingHub` stands in where there is none.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class NoticeKind(StrEnum):
    """A completion event of the horde, or a change of the subscription itself."""

    GENERATION = "generation"
    DONE = "done"
    CANCELLED = "cancelled"
    FAULTED = "faulted"
    RECONNECTED = "reconnected"  # something may have been missed meanwhile
    LOST = "lost"  # nothing will be heard until it is back


@dataclass(frozen=True, slots=True)
class ChatNotice:
    """One notice; reason and code stand on a faulted one when the horde knows why."""

    kind: NoticeKind
    fault_reason: str | None = None
    fault_rc: str | None = None


@dataclass(frozen=True, slots=True)
class ProgressEntry:
    """One entry of a progress stream: a delta, or the end of a generation, whose `sequence` is
    0.
    """

    generation_id: str
    sequence: int
    content: str = ""
    reasoning: str = ""
    worker_id: str = ""
    model: str | None = None
    has_ended: bool = False


class Subscription(Protocol):
    """One request's notices and, when asked for, its progress. Each of the two is read by one
    task.
    """

    @property
    def is_healthy(self) -> bool:
        """Whether notices would arrive now."""

    async def next_notice(self, timeout_seconds: float) -> ChatNotice | None:
        """The next notice; None when none comes in time."""

    async def next_entries(self, timeout_seconds: float) -> Sequence[ProgressEntry]:
        """Progress since the last call, oldest first; empty when none comes in time or `wake` is
        called.
        """

    def wake(self) -> None:
        """End a pending `next_entries` at once."""


class SignalHub(Protocol):
    """Subscriptions of one process."""

    async def start(self) -> None:
        """Get ready; an unreachable server is no failure."""

    async def close(self) -> None:
        """End every subscription."""

    async def is_reachable(self) -> bool:
        """Whether the server answers, within half a second."""

    def subscribe(
        self, request_id: str, *, with_progress: bool
    ) -> AbstractAsyncContextManager[Subscription]:
        """Entered once the subscription is confirmed, or has failed and is tried again behind;
        raises for neither.
        """


class PollingHub:
    """Hears nothing, so that whoever waits polls."""

    async def start(self) -> None:
        """Nothing to get ready."""

    async def close(self) -> None:
        """Nothing to end."""

    async def is_reachable(self) -> bool:
        """Never: there is no server."""
        return False

    @asynccontextmanager
    async def subscribe(
        self, request_id: str, *, with_progress: bool
    ) -> AsyncIterator[Subscription]:
        """A subscription without notices."""
        yield _SilentSubscription()


class _SilentSubscription:
    is_healthy = False

    def __init__(self) -> None:
        self._woken = asyncio.Event()

    async def next_notice(self, timeout_seconds: float) -> ChatNotice | None:
        await asyncio.sleep(timeout_seconds)
        return None

    async def next_entries(self, timeout_seconds: float) -> Sequence[ProgressEntry]:
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._woken.wait()
        except TimeoutError:
            return ()
        self._woken.clear()
        return ()

    def wake(self) -> None:
        self._woken.set()
