# SPDX-License-Identifier: AGPL-3.0-or-later
"""One open stream: when it opens, what flows while it is open, and how it ends.

Source: docs/reference/chat_front.md, "Streams".
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from starlette.types import Send

from horde import metrics
from horde.oai.errors import ErrorAnswer, FrontFailure, WaitFailed, WaitFailure, build_defect
from horde.oai.mapping import CompletedReply, CompletionFacts
from horde.oai.relay import Relay, RelayBroken
from horde.oai.signals import ProgressEntry, Subscription
from horde.oai.sse import (
    DONE,
    KEEP_ALIVE,
    STREAM_HEADERS,
    build_completion_events,
    build_delta_events,
    build_error_events,
    encode_events,
)
from horde.oai.waiting import RequestWait, wait_for_reply

# Past the budget, for the native cancel and the last events; a client that has not read them by
# then gets no more.
LAST_EVENTS_SECONDS: Final = 20.0


class StreamOutcome(StrEnum):
    """How a stream ended."""

    RELAYED = "relayed"  # text was sent while it was written
    WHOLE = "whole"  # all of it came with the reply
    CAUGHT_UP = "caught_up"  # another attempt went on where the one that was sent had stopped
    RESTARTED = "restarted"  # another attempt wrote something else
    DIVERGED = "diverged"  # the reply is not what its worker had posted
    FAILED = "failed"
    DISCONNECTED = "disconnected"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Moments are monotonic."""

    accepted_at: float
    open_at: float  # when the stream opens though there is nothing to send yet
    keepalive_seconds: float


async def stream_completion(
    *,
    send: Send,
    facts: CompletionFacts,
    wait: RequestWait,
    subscription: Subscription,
    settings: StreamSettings,
    describe: Callable[[FrontFailure], ErrorAnswer],
    headers: Iterable[tuple[bytes, bytes]],
    first_reply: CompletedReply | None,
) -> CompletedReply | None:
    """Stream a request whose status was read once; `first_reply` is the reply when it was there
    already.

    Returns the reply once it is delivered, None when an error ended the open stream. Raises
    FrontFailure while the stream is not open, since the failure still has its own status then. When
    the client is gone, cancel the task.
    """
    stream = _Stream(send, facts, settings, headers)
    outcome = StreamOutcome.FAILED
    try:
        async with asyncio.timeout(
            max(wait.deadline - time.monotonic(), 0.0) + LAST_EVENTS_SECONDS
        ):
            try:
                reply = await _relay(stream, wait, subscription, first_reply)
            except WaitFailed as failure:
                outcome = _OUTCOMES.get(failure.kind, StreamOutcome.FAILED)
                if not stream.is_open:
                    raise
                await stream.fail(describe(failure))
                return None
            except Exception:
                if stream.is_open:
                    await stream.fail(build_defect(wait.request_id))
                raise
        outcome = stream.describe_success()
        return reply
    except TimeoutError:  # it does not read, so there is nothing to tell it
        outcome = StreamOutcome.DISCONNECTED
        return None
    except asyncio.CancelledError:
        outcome = StreamOutcome.DISCONNECTED
        raise
    finally:
        metrics.oai_streams.add(1, {"outcome": outcome.value})


_OUTCOMES: Final[Mapping[WaitFailure, StreamOutcome]] = {
    WaitFailure.STREAM_DIVERGED: StreamOutcome.DIVERGED,
    WaitFailure.GENERATION_RESTARTED: StreamOutcome.RESTARTED,
}


async def _relay(
    stream: "_Stream", wait: RequestWait, subscription: Subscription, reply: CompletedReply | None
) -> CompletedReply:
    """Send progress until there is a reply, then what that has beyond it. Raises WaitFailed."""
    waiting: asyncio.Task[CompletedReply] | None = None
    try:
        if reply is None:
            waiting = asyncio.create_task(wait_for_reply(wait, subscription))
            waiting.add_done_callback(lambda _: subscription.wake())
            while not waiting.done():
                await stream.relay(
                    await subscription.next_entries(stream.compute_silence_seconds())
                )
            reply = waiting.result()
        # What tells of other attempts; text alone would come with the reply as well.
        await stream.relay(await subscription.next_entries(0.0))
        await stream.finish(reply)
        return reply
    except RelayBroken as broken:
        await _end(waiting)
        await wait.cancel()
        kind = (
            WaitFailure.GENERATION_RESTARTED if broken.is_restart else WaitFailure.STREAM_DIVERGED
        )
        raise WaitFailed(kind, wait.request_id) from None
    finally:
        await _end(waiting)


async def _end(waiting: asyncio.Task[CompletedReply] | None) -> None:
    """Stop waiting; whatever comes of it now is of no interest."""
    if waiting is None:
        return
    waiting.cancel()
    await asyncio.wait([waiting])
    if not waiting.cancelled():
        waiting.exception()  # noted, or the loop would report it as forgotten


class _Stream:
    """What a client has been sent, and when."""

    def __init__(
        self,
        send: Send,
        facts: CompletionFacts,
        settings: StreamSettings,
        headers: Iterable[tuple[bytes, bytes]],
    ) -> None:
        self._send, self._facts, self._settings, self._headers = send, facts, settings, headers
        self._text = Relay(requested_model=facts.model, include_reasoning=facts.include_reasoning)
        # When to send a comment unless there is something better before.
        self._speak_at = settings.open_at
        self._has_begun = False  # the role was sent
        self.is_open = False

    def compute_silence_seconds(self) -> float:
        """How long nothing needs to be sent."""
        return max(self._speak_at - time.monotonic(), 0.0)

    async def relay(self, entries: Sequence[ProgressEntry]) -> None:
        """Send what is new in a worker's progress, or break a long silence. Raises RelayBroken."""
        deltas = self._text.feed(entries)
        if deltas:
            events = build_delta_events(self._facts, deltas, has_begun=self._has_begun)
            await self._write(encode_events(events))
            self._note_text()
        elif self.compute_silence_seconds() == 0.0:
            await self._write(KEEP_ALIVE)

    async def finish(self, reply: CompletedReply) -> None:
        """Send what is missing of a reply, and the end. Raises RelayBroken."""
        remainder = self._text.finish(reply)
        events = build_completion_events(self._facts, reply, remainder, has_begun=self._has_begun)
        await self._write(encode_events(events) + DONE, is_last=True)
        if remainder.content or remainder.reasoning:
            self._note_text()

    async def fail(self, error: ErrorAnswer) -> None:
        """Send an error, and the end."""
        metrics.oai_errors.add(1, {"code": error.code, "phase": "stream"})
        await self._write(build_error_events(error), is_last=True)

    def describe_success(self) -> StreamOutcome:
        """The outcome of a stream that was finished."""
        if self._text.has_restarted:
            return StreamOutcome.CAUGHT_UP
        return StreamOutcome.RELAYED if self._text.has_sent else StreamOutcome.WHOLE

    def _note_text(self) -> None:
        if not self._has_begun:
            metrics.oai_first_delta_seconds.record(time.monotonic() - self._settings.accepted_at)
        self._has_begun = True

    async def _write(self, body: bytes, *, is_last: bool = False) -> None:
        """Send bytes, and the headers before the first of them; waits while the client reads too
        slowly.
        """
        if not self.is_open:
            self.is_open = True
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [*self._headers, *STREAM_HEADERS],
                }
            )
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._speak_at = time.monotonic() + self._settings.keepalive_seconds
