# SPDX-License-Identifier: AGPL-3.0-or-later
"""Responses in the background: waited for by one process at a time, whoever reads them.

The process that holds a record's lease waits for its native request and writes what comes of it. A
process that ends gives the lease back, or lets it lapse, and whoever is asked for the response next
goes on from the native status. Source: docs/reference/front_responses.md, "In the background".
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.types import Message

from horde.json_text import JsonObject
from horde.logger import build_failure_fields, get_logger
from horde.oai.calls import Calls, OpenCall
from horde.oai.errors import ErrorAnswer, FrontFailure, build_defect
from horde.oai.forms import FormName
from horde.oai.mapping import CompletedReply, parse_completed_reply
from horde.oai.native import Caller
from horde.oai.relay import DeltaKind, Relay
from horde.oai.responses_form.answer import LONGEST_SILENCE_SECONDS, ResponseAnswer
from horde.oai.responses_form.records import Record
from horde.oai.responses_form.store import Lease, ResponseGone, ResponseStore, StoreUnavailable
from horde.oai.signals import Subscription
from horde.oai.streaming import EventStream, stream_reply
from horde.oai.waiting import RequestWait, wait_for_first_status, wait_for_reply

logger = get_logger(__name__)

RETRY_SECONDS: Final = 1.0  # between writes, while Redis is away

type Describe = Callable[[FrontFailure], ErrorAnswer]


class Run:
    """One response while this process waits for it."""

    def __init__(self, store: ResponseStore, lease: Lease, record: Record) -> None:
        self.record, self.answer = record, ResponseAnswer(record.build_head())
        self._store, self._lease = store, lease
        self._order = asyncio.Lock()  # writes go out in the order in which they were made
        self._number = 0  # of the next event
        self.events: EventStream | None = None  # of a streamed one

    def drop(self) -> None:
        """Let another process go on."""
        self._store.drop(self._lease)

    async def restore(self) -> None:
        """Take up the events that another process wrote. Raises StoreUnavailable."""
        events: list[JsonObject] = []
        while found := await self._store.read_events(self._lease.request_id, self._number - 1):
            events += [parse_frame(frame) for _, frame in found]
            self._number = found[-1][0] + 1
        self.answer.restore(events)

    async def send(self, message: Message) -> None:
        """Take the bytes of a stream, as a connection would, and keep their events."""
        frames = split_frames(message.get("body", b""))
        if frames:
            await self.write(frames)

    async def write(self, frames: list[bytes]) -> None:
        """Keep events, and the object if it has changed. Raises ResponseGone.

        While Redis is away it is tried again: the reply may still be long in coming.
        """
        async with self._order:
            first, self._number = self._number, self._number + len(frames)
            record, changed = self.record, self.answer.final
            if changed is None and record.status != self.answer.status:
                changed = {**record.response, "status": self.answer.status}
            if changed is not None:
                record.response = changed
            while True:
                try:
                    await self._store.write(
                        self._lease,
                        record,
                        events=frames if record.is_streamed else (),
                        first_number=first,
                        has_changed=changed is not None,
                    )
                    return
                except StoreUnavailable:
                    if time.time() > record.deadline:
                        raise ResponseGone from None
                    await asyncio.sleep(RETRY_SECONDS)


class Runs:
    """The responses that this process waits for."""

    def __init__(self, calls: Calls, store: ResponseStore) -> None:
        self._calls, self._store = calls, store
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._side_tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop waiting; nothing is cancelled natively."""
        tasks = [*self._tasks.values(), *self._side_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def start(
        self,
        run: Run,
        caller: Caller,
        describe: Describe,
        *,
        is_fail_fast: bool = False,
        is_new: bool = True,
    ) -> None:
        """Wait for a response whose lease this process holds."""
        id_ = run.record.request_id
        task = asyncio.create_task(
            self._run(run, caller, describe, is_fail_fast=is_fail_fast, is_new=is_new)
        )
        self._tasks[id_] = task
        task.add_done_callback(lambda done: self._forget(id_, done))

    def _forget(self, id_: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(id_) is task:
            del self._tasks[id_]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("horde.oai.task_failed", extra=build_failure_fields(error))

    async def take_over(self, record: Record, caller: Caller, describe: Describe) -> None:
        """Wait for a running response for which nobody waits; otherwise do nothing. Raises
        StoreUnavailable.
        """
        if record.request_id in self._tasks or not self._calls.has_room:
            return
        lease = await self._store.claim(record.request_id)
        if lease is None:
            return
        run = await self._restore(record, lease)
        if run is not None:
            self.start(run, caller, describe, is_new=False)

    async def cancel(self, record: Record, caller: Caller) -> Record | None:
        """End a running response here and natively; the record as it is then, None for one that
        is gone. Raises StoreUnavailable.
        """
        lease = await self._store.claim(record.request_id, by_force=True)
        assert lease is not None
        if (task := self._tasks.get(record.request_id)) is not None:
            task.cancel()
        run = await self._restore(record, lease)
        if run is None:
            return await self._store.find(record.request_id, record.owner)
        reply = await self._build_wait(run, caller).cancel()
        with contextlib.suppress(ResponseGone):
            await run.write(split_frames(run.answer.cancel(reply)))
        return run.record

    async def _restore(self, record: Record, lease: Lease) -> Run | None:
        """A running response as the store has it now; None for one that is over or gone, whose
        lease is given back. Raises StoreUnavailable.
        """
        try:
            latest = await self._store.find(record.request_id, record.owner)
            if latest is None or not latest.is_running:
                await self._store.release(lease)
                return None
            run = Run(self._store, lease, latest)
            await run.restore()
        except StoreUnavailable:
            self._store.drop(lease)
            raise
        return run

    # --- one run

    async def _run(
        self, run: Run, caller: Caller, describe: Describe, *, is_fail_fast: bool, is_new: bool
    ) -> None:
        call = OpenCall(form=FormName.RESPONSES.value, is_stream=run.record.is_streamed)
        record = run.record
        try:
            with self._calls.admit(call, is_bounded=False):
                async with self._calls.hub.subscribe(
                    record.request_id, with_progress=record.is_streamed
                ) as subscription:
                    await self._serve(run, caller, describe, subscription, is_fail_fast, is_new)
        except ResponseGone:  # deleted, evicted, or taken by another process
            run.drop()
        except Exception:
            run.drop()
            raise

    async def _serve(
        self,
        run: Run,
        caller: Caller,
        describe: Describe,
        subscription: Subscription,
        is_fail_fast: bool,
        is_new: bool,
    ) -> None:
        wait = self._build_wait(run, caller, is_fail_fast=is_fail_fast)
        if run.record.is_streamed:
            run.events = self._open_events(run)
            if is_new:
                await run.events.write(run.answer.open())
            else:
                run.events.is_open = True
        try:
            reply = await self._wait(run, wait, subscription, describe)
        except FrontFailure as failure:
            await run.write(split_frames(run.answer.fail(describe(failure))))
        except (ResponseGone, StoreUnavailable):
            raise
        except Exception:
            if run.record.is_running:
                await run.write(split_frames(run.answer.fail(build_defect(wait.request_id))))
            raise
        else:
            if reply is not None:
                call = OpenCall(form=FormName.RESPONSES.value, is_stream=run.record.is_streamed)
                self._calls.record_delivered(
                    call, finish_reason=reply.finish_reason, is_lowered=reply.is_lowered
                )

    async def _wait(
        self,
        run: Run,
        wait: RequestWait[CompletedReply],
        subscription: Subscription,
        describe: Describe,
    ) -> CompletedReply | None:
        """Wait and write what comes. Raises WaitFailed, or ResponseGone."""
        reply = await wait_for_first_status(wait, subscription)
        if run.events is not None:
            return await stream_reply(
                stream=run.events,
                answer=run.answer,
                text=self._build_relay(run),
                wait=wait,
                subscription=subscription,
                describe=describe,
                first_reply=reply,
            )
        if reply is None:
            reply = await wait_for_reply(wait, subscription)
        run.answer.render(reply)
        await run.write([])
        return reply

    def _build_wait(
        self, run: Run, caller: Caller, *, is_fail_fast: bool = False
    ) -> RequestWait[CompletedReply]:
        def parse_reply(status: Mapping[str, object]) -> CompletedReply | None:
            if status.get("processing") and run.answer.status == "queued":
                self._spawn(self._tell_running(run))
            return parse_completed_reply(status)

        return self._calls.build_wait(
            caller,
            run.record.request_id,
            time.monotonic() + run.record.deadline - time.time(),
            parse_reply,
            is_fail_fast=is_fail_fast,
        )

    async def _tell_running(self, run: Run) -> None:
        """Say that a worker has the job."""
        with contextlib.suppress(ResponseGone):
            frames = split_frames(run.answer.note_running())
            if frames:
                await run.write(frames)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._side_tasks.add(task)
        task.add_done_callback(self._side_tasks.discard)

    def _open_events(self, run: Run) -> EventStream:
        now = time.monotonic()
        return EventStream(
            run.send,
            form=FormName.RESPONSES.value,
            accepted_at=now,
            open_at=now + LONGEST_SILENCE_SECONDS,
            keepalive_seconds=LONGEST_SILENCE_SECONDS,
            headers={},
        )

    def _build_relay(self, run: Run) -> Relay:
        record = run.record
        relay = Relay(
            requested_model=record.requested_model, include_reasoning=record.include_reasoning
        )
        relay.resume(
            reasoning=run.answer.get_text(DeltaKind.REASONING),
            content=run.answer.get_text(DeltaKind.CONTENT),
        )
        return relay


def split_frames(body: bytes) -> list[bytes]:
    """The events in bytes of a stream, each with its blank line; comments are left out."""
    return [
        frame + b"\n\n" for frame in body.split(b"\n\n") if frame and not frame.startswith(b":")
    ]


def parse_frame(frame: bytes) -> JsonObject:
    """What an event says."""
    data = frame.split(b"\ndata: ", 1)[1]
    event: JsonObject = json.loads(data)
    return event
