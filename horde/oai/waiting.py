# SPDX-License-Identifier: AGPL-3.0-or-later
"""Waiting for one queued request: when its status is read, what each reading means, and when to
give up.

Signals are hints; the status decides. Source: docs/reference/chat_front.md, "Waiting".
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from horde.front_config import FrontConfig
from horde.logger import get_logger
from horde.oai.errors import NativeUnavailable, WaitDetails, WaitFailed, WaitFailure
from horde.oai.native import (
    CHAT,
    Caller,
    NativeBusy,
    NativeClient,
    NativeFamily,
    NativeGone,
)
from horde.oai.signals import ChatNotice, NoticeKind, Subscription

logger = get_logger(__name__)

type ParseReply[R] = Callable[[Mapping[str, object]], R | None]

# Of one request; only its first notice is followed by a read at once.
LEAST_SECONDS_BETWEEN_READS: Final = 1.0
MAX_BUSY_SECONDS: Final = 10.0  # between reads that the API limits without saying for how long
_FAILURES_OF_GONE: Final[Mapping[NoticeKind | None, WaitFailure]] = {
    NoticeKind.FAULTED: WaitFailure.FAULTED,
    NoticeKind.CANCELLED: WaitFailure.NO_GENERATION,
}
_OUTCOMES: Final = frozenset(
    {NoticeKind.GENERATION, NoticeKind.DONE, NoticeKind.CANCELLED, NoticeKind.FAULTED}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSettings:
    """How long and how often, in seconds."""

    poll_seconds: float
    subscribed_poll_seconds: float
    grace_seconds: float
    is_fail_fast: bool

    @classmethod
    def from_config(cls, config: FrontConfig, *, is_fail_fast: bool) -> "WaitSettings":
        """The settings of the process, for one request."""
        return cls(
            poll_seconds=config.poll_seconds,
            subscribed_poll_seconds=config.subscribed_poll_seconds,
            grace_seconds=config.no_worker_grace_seconds,
            is_fail_fast=is_fail_fast,
        )


class RequestWait[R]:
    """One request from its submit to its end. `deadline` is monotonic, as is `clock`.

    `parse_reply` finds the reply in a status, None while it is not whole.
    """

    def __init__(
        self,
        native: NativeClient,
        caller: Caller,
        request_id: str,
        settings: WaitSettings,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        family: NativeFamily = CHAT,
        parse_reply: ParseReply[R],
    ) -> None:
        self.request_id, self.deadline = request_id, deadline
        self.kudos: float | None = None  # the price told at the submit
        self.is_judged = False  # a status was read, and gave no reason to give up
        self.is_over = False  # the request has ended, so there is nothing to cancel
        self._native, self._caller, self._settings, self._clock = native, caller, settings, clock
        self._family, self._parse_reply = family, parse_reply
        self._read_at = clock()
        self._is_read_due_soon = False
        self._has_heard = False  # a notice led to a read
        self._not_before = 0.0
        self._busy_seconds = settings.poll_seconds
        self._impossible_since: float | None = None
        self._is_running = False  # a worker has it
        self._last_outcome: ChatNotice | None = None
        self._details = WaitDetails()
        self._waiter: asyncio.Task[Any] | None = None
        self._abort_kind: WaitFailure | None = None

    def describe(self) -> dict[str, float | None]:
        """How the request waits, as far as the last reading tells: its place in the queue (0 when a
        worker has it), the estimate of the seconds until its reply, and the kudos it will cost at
        most.
        """
        details = self._details
        # The API counts the queue now and then: a request that has just come has no place yet.
        is_placed = details.queue_position != 0 or self._is_running
        return {
            "queue_position": details.queue_position if is_placed else None,
            "wait_time": details.wait_time,
            "kudos": self.kudos,
        }

    @property
    def largest_max_length(self) -> int | None:
        """The tokens that a worker is fast enough for, while the request asks for more than any
        is.
        """
        return self._details.largest_max_length

    @property
    def is_past_deadline(self) -> bool:
        """Whether the budget is spent."""
        return self._clock() >= self.deadline

    def compute_seconds_until_read(self, *, is_healthy: bool) -> float:
        """How long to listen before the status is read anyway, or the budget ends."""
        settings, now = self._settings, self._clock()
        interval = (
            settings.subscribed_poll_seconds
            if is_healthy and not self._is_read_due_soon
            else settings.poll_seconds
        )
        due = self._read_at + interval
        if self._impossible_since is not None:
            # Rounded up to the shortest interval, so that the last moment is not read again and
            # again.
            due = min(
                due,
                max(
                    self._impossible_since + settings.grace_seconds,
                    self._read_at + LEAST_SECONDS_BETWEEN_READS,
                ),
            )
        return max(min(max(due, self._not_before), self.deadline) - now, 0.0)

    def take_notice(self, notice: ChatNotice) -> None:
        """Remember what a signal said, for when the row is gone before it can be read."""
        if notice.kind in _OUTCOMES:
            self._last_outcome = notice

    async def wait_until_readable(self) -> None:
        """Sleep until a notice may be followed by a read: the first at once, a further one a second
        after the last read.

        No read comes while the API asked to be left alone, nor after the end of the budget.
        """
        earliest = (
            max(self._not_before, self._read_at + LEAST_SECONDS_BETWEEN_READS)
            if self._has_heard
            else self._not_before
        )
        self._has_heard = True
        await asyncio.sleep(max(min(earliest, self.deadline) - self._clock(), 0.0))

    async def read_status(self) -> R | None:
        """Read the status once. The reply when it is there; None to go on waiting, also when the
        API cannot be read.

        Raises WaitFailed when waiting is over or makes no sense; the request is then cancelled,
        unless it has ended.
        """
        try:
            status = await self._native.read_status(
                self.request_id, self._caller, self.deadline, self._family
            )
        except NativeBusy as busy:
            self._note_read(is_soon=True)
            self._postpone(busy)
            return None
        except NativeUnavailable as error:
            logger.warning(
                "horde.oai.status_unreadable",
                extra={"native_id": self.request_id, "cause": str(error)},
            )
            self._note_read(is_soon=True)
            return None
        except NativeGone as gone:
            self.is_over = True
            raise self._build_gone_failure(gone) from None
        self._busy_seconds, self._not_before = self._settings.poll_seconds, 0.0
        self._note_read(is_soon=self._last_outcome is not None)
        return await self._judge(status)

    def _note_read(self, *, is_soon: bool) -> None:
        self._read_at, self._is_read_due_soon = self._clock(), is_soon

    def _postpone(self, busy: NativeBusy) -> None:
        seconds = busy.retry_after_seconds
        if seconds is None:
            seconds = self._busy_seconds = min(self._busy_seconds * 2, MAX_BUSY_SECONDS)
        self._not_before = self._clock() + seconds

    def _build_gone_failure(self, gone: NativeGone) -> WaitFailed:
        outcome = self._last_outcome
        kind = _FAILURES_OF_GONE.get(outcome.kind if outcome else None, WaitFailure.REQUEST_LOST)
        if outcome is not None and kind is WaitFailure.FAULTED:
            return self._build_failure(
                kind, fault_reason=outcome.fault_reason, fault_rc=outcome.fault_rc
            )
        return self._build_failure(kind, fault_rc=gone.rc)

    def _build_failure(self, kind: WaitFailure, **changes: Any) -> WaitFailed:
        details = self._details
        values = {
            "queue_position": details.queue_position,
            "wait_time": details.wait_time,
            "impossible_reason": details.impossible_reason,
            "largest_max_length": details.largest_max_length,
        }
        return WaitFailed(kind, self.request_id, WaitDetails(**values | changes))

    async def _judge(self, status: Mapping[str, object]) -> R | None:
        """What one status means, ends before refusals: an ended request cannot be refused any
        more.
        """
        self._details = parse_wait_details(status)
        self._is_running = bool(status.get("processing"))
        reply = self._parse_reply(status)
        if reply is not None:
            self.is_over = self.is_judged = True
            return reply
        if status.get("faulted"):
            self.is_over = True
            raise self._build_failure(
                WaitFailure.FAULTED,
                fault_reason=status.get("fault_reason"),
                fault_rc=status.get("fault_rc"),
            )
        if status.get("done"):
            self.is_over = True
            raise self._build_failure(WaitFailure.NO_GENERATION)
        refusal = self._find_refusal(status)
        if refusal is not None:
            return await self.give_up(refusal)
        self.is_judged = True
        return None

    def _find_refusal(self, status: Mapping[str, object]) -> WaitFailure | None:
        now, is_running = self._clock(), bool(status.get("processing"))
        if (
            is_running
            or status.get("is_possible") is not False
            or self._details.impossible_reason is not None
        ):
            self._impossible_since = None
        elif self._impossible_since is None:
            self._impossible_since = now
        if self._details.impossible_reason is not None and not is_running:
            return WaitFailure.DECLARATION_GAP
        if self._settings.is_fail_fast and not self.is_judged:
            refusal = self._find_fast_refusal(status, is_running=is_running)
            if refusal is not None:
                return refusal
        since = self._impossible_since
        if since is not None and now - since >= self._settings.grace_seconds:
            return WaitFailure.NO_WORKER_GRACE
        return None

    def _find_fast_refusal(
        self, status: Mapping[str, object], *, is_running: bool
    ) -> WaitFailure | None:
        """Decided once, at the first reading."""
        if status.get("eligible_worker_threads") == 0 and not is_running:
            return WaitFailure.FAIL_FAST_NOBODY
        if (self._details.wait_time or 0) > self.deadline - self._clock():
            return WaitFailure.FAIL_FAST_WAIT
        return None

    async def give_up(self, kind: WaitFailure) -> R:
        """Cancel; a reply that was stored meanwhile is delivered all the same. Raises WaitFailed
        otherwise.
        """
        reply = await self.cancel()
        if reply is not None:
            return reply
        raise self._build_failure(kind)

    async def cancel(self) -> R | None:
        """End the request, once and best effort; the reply when the answer holds one."""
        if self.is_over:
            return None
        self.is_over = True
        status = await self._end()
        return None if status is None else self._parse_reply(status)

    async def withdraw(self) -> bool:
        """End the request, so that another can take its place; False when it may go on, or has its
        reply already: it can be waited for as before.
        """
        status = await self._end()
        self.is_over = status is not None and self._parse_reply(status) is None
        return self.is_over

    async def _end(self) -> Mapping[str, object] | None:
        """The last status of the request; None when it could not be ended."""
        try:
            return await self._native.cancel(self.request_id, self._caller, self._family)
        except (NativeBusy, NativeGone, NativeUnavailable) as error:
            logger.warning(
                "horde.oai.cancel_failed",
                extra={"native_id": self.request_id, "error_class": type(error).__name__},
            )
            return None

    def abort(self, kind: WaitFailure) -> None:
        """Make a running `wait_for_reply` give up, from another task."""
        self._abort_kind = kind
        if self._waiter is not None:
            self._waiter.cancel()

    def enter(self) -> None:
        """The current task waits from here on."""
        self._waiter = asyncio.current_task()
        if self._abort_kind is not None and self._waiter is not None:
            self._waiter.cancel()

    def leave(self) -> None:
        """The current task no longer waits."""
        self._waiter = None

    def take_abort(self) -> WaitFailure | None:
        """Why the wait was cut short by `abort`, once; None for a cancellation from elsewhere."""
        kind, self._abort_kind = self._abort_kind, None
        if kind is not None and (task := asyncio.current_task()) is not None:
            task.uncancel()
        return kind


def parse_wait_details(status: Mapping[str, object]) -> WaitDetails:
    """What a status tells about a request that goes on waiting."""
    position, wait_time, reason = (
        status.get("queue_position"),
        status.get("wait_time"),
        status.get("impossible_reason"),
    )
    speed_limit = status.get("speed_limit")
    largest = speed_limit.get("largest_max_length") if isinstance(speed_limit, Mapping) else None
    return WaitDetails(
        queue_position=position if isinstance(position, int) else None,
        wait_time=wait_time if isinstance(wait_time, int | float) else None,
        impossible_reason=reason if isinstance(reason, Mapping) else None,
        largest_max_length=largest if isinstance(largest, int) else None,
    )


async def wait_for_first_status[R](wait: RequestWait[R], subscription: Subscription) -> R | None:
    """Wait until a status was judged, however long the API takes to answer. The reply when it is
    there already.

    Raises WaitFailed.
    """
    return await _wait(wait, subscription, is_enough=lambda: wait.is_judged)


async def wait_for_reply[R](wait: RequestWait[R], subscription: Subscription) -> R:
    """Wait for the reply after the first status. Raises WaitFailed when there will be none, or the
    budget is spent.
    """
    reply = await _wait(wait, subscription, is_enough=lambda: False)
    assert reply is not None
    return reply


async def _wait[R](
    wait: RequestWait[R], subscription: Subscription, *, is_enough: Callable[[], bool]
) -> R | None:
    wait.enter()
    try:
        while True:
            if wait.is_past_deadline:
                return await wait.give_up(WaitFailure.DEADLINE)
            if not wait.is_judged or await _hear_reason_to_read(wait, subscription):
                reply = await wait.read_status()
                if reply is not None or is_enough():
                    return reply
                if not wait.is_judged:
                    await _hear_reason_to_read(wait, subscription)
    except asyncio.CancelledError:
        kind = wait.take_abort()
        if kind is None:
            raise
        return await wait.give_up(kind)
    finally:
        wait.leave()


async def _hear_reason_to_read(wait: RequestWait[Any], subscription: Subscription) -> bool:
    """Listen until the status has to be read; False when the budget ended first, or the rhythm has
    changed.
    """
    seconds = wait.compute_seconds_until_read(is_healthy=subscription.is_healthy)
    notice = await subscription.next_notice(seconds)
    if wait.is_past_deadline or (notice is not None and notice.kind is NoticeKind.LOST):
        return False
    if notice is not None:
        wait.take_notice(notice)
        await wait.wait_until_readable()
    return not wait.is_past_deadline
