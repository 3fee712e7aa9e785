# SPDX-License-Identifier: AGPL-3.0-or-later
"""One open stream: when it opens, what flows while it is open, and how it ends.

Source: docs/reference/chat_front.md, "Streams".
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final

from starlette.types import Send

from horde import metrics
from horde.oai.errors import ErrorAnswer, FrontFailure, WaitFailed, WaitFailure, build_defect
from horde.oai.forms import ChatAnswer
from horde.oai.mapping import CompletedReply
from horde.oai.relay import Relay, RelayBroken
from horde.oai.signals import ProgressEntry, Subscription
from horde.oai.sse import STREAM_HEADERS, encode_wait_comment
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


class EventStream:
    """An answer that goes out piece by piece: when it opens, and how long it has been silent.

    Moments are monotonic. `open_at` is when the stream opens though there is nothing to send yet.
    With `tells_wait` the comments that fill a silence say how the request waits.
    """

    def __init__(
        self,
        send: Send,
        *,
        form: str,
        accepted_at: float,
        open_at: float,
        keepalive_seconds: float,
        tells_wait: bool = False,
        headers: Mapping[str, str],
    ) -> None:
        self.form, self.is_open, self.tells_wait = form, False, tells_wait
        self._send, self._headers, self._keepalive_seconds = send, headers, keepalive_seconds
        self._accepted_at = accepted_at
        self._has_text = False
        self._speak_at = (
            open_at  # when to break the silence unless there is something to say before
        )

    def compute_silence_seconds(self) -> float:
        """How long nothing needs to be sent."""
        return max(self._speak_at - time.monotonic(), 0.0)

    def note_text(self) -> None:
        """Record how long the first text took."""
        if not self._has_text:
            seconds = time.monotonic() - self._accepted_at
            metrics.oai_first_delta_seconds.record(seconds, {"form": self.form})
        self._has_text = True

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        """Send bytes, and the headers before the first of them; waits while the client reads too
        slowly.
        """
        if not self.is_open:
            self.is_open = True
            headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [*headers, *STREAM_HEADERS],
                }
            )
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        self._speak_at = time.monotonic() + self._keepalive_seconds

    async def fail(self, error: ErrorAnswer, events: bytes) -> None:
        """Send the events of an error, which are the last."""
        metrics.oai_errors.add(1, {"code": error.code, "phase": "stream", "form": self.form})
        await self.write(events, is_last=True)


async def run_stream[R](
    stream: EventStream,
    deliver: Callable[[], Awaitable[tuple[R, StreamOutcome]]],
    *,
    deadline: float,
    request_id: str | None,
    describe: Callable[[FrontFailure], ErrorAnswer],
    write_failure: Callable[[ErrorAnswer], bytes],
) -> R | None:
    """Deliver a stream to its end, and count how it ended.

    Returns what was delivered, None when an error ended the open stream. Raises FrontFailure while
    the stream is not open, since the failure still has its own status then. When the client is
    gone, cancel the task.
    """
    outcome = StreamOutcome.FAILED
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.0) + LAST_EVENTS_SECONDS):
            try:
                delivered, outcome = await deliver()
            except WaitFailed as failure:
                outcome = _OUTCOMES.get(failure.kind, StreamOutcome.FAILED)
                if not stream.is_open:
                    raise
                error = describe(failure)
                await stream.fail(error, write_failure(error))
                return None
            except Exception:
                if stream.is_open:
                    error = build_defect(request_id)
                    await stream.fail(error, write_failure(error))
                raise
        return delivered
    except TimeoutError:  # it does not read, so there is nothing to tell it
        outcome = StreamOutcome.DISCONNECTED
        return None
    except asyncio.CancelledError:
        outcome = StreamOutcome.DISCONNECTED
        raise
    finally:
        metrics.oai_streams.add(1, {"outcome": outcome.value, "form": stream.form})


_OUTCOMES: Final[Mapping[WaitFailure, StreamOutcome]] = {
    WaitFailure.STREAM_DIVERGED: StreamOutcome.DIVERGED,
    WaitFailure.GENERATION_RESTARTED: StreamOutcome.RESTARTED,
}


async def stream_reply(
    *,
    stream: EventStream,
    answer: ChatAnswer,
    text: Relay,
    wait: RequestWait[CompletedReply],
    subscription: Subscription,
    describe: Callable[[FrontFailure], ErrorAnswer],
    first_reply: CompletedReply | None,
) -> CompletedReply | None:
    """Stream a chat request whose status was read once, as `run_stream` does.

    `first_reply` is the reply when it was there already.
    """
    relayed = _RelayedStream(stream, answer, text, wait)

    async def deliver() -> tuple[CompletedReply, StreamOutcome]:
        reply = await _relay(relayed, wait, subscription, first_reply)
        return reply, relayed.describe_success()

    return await run_stream(
        stream,
        deliver,
        deadline=wait.deadline,
        request_id=wait.request_id,
        describe=describe,
        write_failure=answer.fail,
    )


async def _relay(
    stream: "_RelayedStream",
    wait: RequestWait[CompletedReply],
    subscription: Subscription,
    reply: CompletedReply | None,
) -> CompletedReply:
    """Send progress until there is a reply, then what that has beyond it. Raises WaitFailed."""
    waiting: asyncio.Task[CompletedReply] | None = None
    try:
        if reply is None:
            waiting = asyncio.create_task(wait_for_reply(wait, subscription))
            waiting.add_done_callback(lambda _: subscription.wake())
            while not waiting.done():
                await stream.relay(
                    await subscription.next_entries(stream.events.compute_silence_seconds())
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


class _RelayedStream:
    """A stream, the words of its form, and what of the text the client has seen."""

    def __init__(
        self,
        events: EventStream,
        answer: ChatAnswer,
        text: Relay,
        wait: RequestWait[CompletedReply],
    ) -> None:
        self.events, self._answer, self._text, self._wait = events, answer, text, wait

    async def relay(self, entries: Sequence[ProgressEntry]) -> None:
        """Send what is new in a worker's progress, or break a long silence. Raises RelayBroken."""
        deltas = self._text.feed(entries)
        if deltas:
            await self.events.write(self._answer.write_deltas(deltas))
            self.events.note_text()
        elif self.events.compute_silence_seconds() == 0.0:
            speak = self._answer.fill_silence if self.events.is_open else self._answer.open
            await self.events.write(speak() + self._write_wait())

    def _write_wait(self) -> bytes:
        if not self.events.tells_wait or self._text.has_sent:
            return b""
        return encode_wait_comment(self._wait.describe())

    async def finish(self, reply: CompletedReply) -> None:
        """Send what is missing of a reply, and the end. Raises RelayBroken."""
        remainder = self._text.finish(reply)
        await self._answer.settle(reply, remainder)
        await self.events.write(self._answer.finish(reply, remainder), is_last=True)
        if remainder.content or remainder.reasoning:
            self.events.note_text()

    def describe_success(self) -> StreamOutcome:
        """The outcome of a stream that was finished."""
        if self._text.has_restarted:
            return StreamOutcome.CAUGHT_UP
        return StreamOutcome.RELAYED if self._text.has_sent else StreamOutcome.WHOLE
