# SPDX-License-Identifier: AGPL-3.0-or-later
"""The stored events of a response as a stream, from any of them on, for any number of readers.

Source: docs/reference/front_responses.md, "In the background".
"""

from starlette.types import Send

from horde.oai.calls import Calls, OpenCall
from horde.oai.native import Caller
from horde.oai.responses_form.answer import ENDS
from horde.oai.responses_form.form import build_unavailable
from horde.oai.responses_form.records import RUNNING, Record
from horde.oai.responses_form.runs import Runs
from horde.oai.responses_form.store import BLOCK_SECONDS, ResponseStore, StoreUnavailable
from horde.oai.sse import KEEP_ALIVE, encode_named_event
from horde.oai.streaming import EventStream


class StoredStream:
    """Reads events for clients."""

    def __init__(self, calls: Calls, store: ResponseStore, runs: Runs) -> None:
        self._calls, self._store, self._runs = calls, store, runs

    async def serve(
        self, call: OpenCall, record: Record, caller: Caller, send: Send, *, after: int
    ) -> None:
        """Send every event with a number above `after`, until the last one there will be. Raises
        RequestRefused while nothing was sent.
        """
        call.is_stream = True
        stream = self._calls.open_stream(call, send)
        try:
            events = await self._store.read_events(record.request_id, after)
        except StoreUnavailable:
            raise build_unavailable(None) from None
        await stream.write(b"")
        is_over = False  # after another look, which finds what was written meanwhile
        while not self._calls.is_shutting_down:
            if events:
                after = events[-1][0]
                await stream.write(b"".join(frame for _, frame in events))
                if _is_end(events[-1][1]):
                    break
            elif is_over:
                break
            elif stream.compute_silence_seconds() == 0.0:
                await stream.write(KEEP_ALIVE)
            events, is_over = await self._look(call, stream, record, caller, after)
        await stream.write(b"", is_last=True)

    async def _look(
        self, call: OpenCall, stream: EventStream, record: Record, caller: Caller, after: int
    ) -> tuple[list[tuple[int, bytes]], bool]:
        """Further events, and whether there will be none."""
        id_ = record.request_id
        try:
            events = await self._store.read_events(id_, after, wait_seconds=BLOCK_SECONDS)
            if events:
                return events, False
            status = await self._store.read_status(id_)
            if status is None:
                return [(after + 1, _build_lost_event(after + 1))], True
            if status in RUNNING:
                await self._runs.take_over(
                    record, caller, lambda failure: self._calls.describe(failure, call)
                )
                return [], False
            return await self._store.read_events(id_, after), True
        except StoreUnavailable:
            return [(after + 1, _build_lost_event(after + 1))], True


def _is_end(frame: bytes) -> bool:
    return any(frame.startswith(b"event: %b\n" % kind.encode()) for kind in (*ENDS, "error"))


def _build_lost_event(number: int) -> bytes:
    """Flat, since clients take a nested error for one of the transport."""
    return encode_named_event(
        {
            "type": "error",
            "sequence_number": number,
            "code": "response_not_found",
            "message": "The stored events of this response are lost.",
            "param": None,
        }
    )
