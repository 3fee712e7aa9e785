# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text completions: native text requests, one for each prompt, that are waited for side by side.

The horde signals nothing about text requests and streams none of them, so they are polled, and a
stream brings each choice whole. Source: docs/reference/front_completions.md.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final
from uuid import uuid4

from starlette.types import Send

from horde.json_text import JsonObject
from horde.oai.bodies import write_native_body
from horde.oai.calls import Calls, OpenCall
from horde.oai.errors import ErrorAnswer, FrontFailure, NativeRefused
from horde.oai.forms import FormName
from horde.oai.mapping import get_kudos
from horde.oai.models import TextModels
from horde.oai.native import Caller, NativeFamily, Submitted
from horde.oai.signals import PollingHub, Subscription
from horde.oai.sse import DONE, KEEP_ALIVE, build_error_events, encode_events
from horde.oai.streaming import EventStream, StreamOutcome, run_stream
from horde.oai.text_mapping import (
    TEXT_ID_PREFIX,
    TextHead,
    TextReply,
    TextSample,
    build_choice,
    build_finish_chunk,
    build_text_chunks,
    build_text_completion,
    build_text_quote,
    build_text_x_horde,
    build_usage_chunk,
    list_choices,
    parse_samples,
)
from horde.oai.text_schema import TextCompletionRequest
from horde.oai.waiting import RequestWait, wait_for_first_status, wait_for_reply

TEXT: Final = NativeFamily("/v2/generate/text", is_repeatable=False)  # it has no operation key
REQUEST_ID_HEADER: Final = "x-horde-request-id"
LEAST_PAUSE_SECONDS: Final = 1.0  # before a submit that a rate limit refused is sent again

# Samples with the index of their choice; None once all of them came, or none will any more.
type Arrivals = asyncio.Queue[tuple[int, TextSample] | None]


class TextService:
    """`POST /v1/completions`."""

    def __init__(self, calls: Calls, models: TextModels, max_prompts: int) -> None:
        self._calls, self._models, self._max_prompts = calls, models, max_prompts
        self._hub = PollingHub()

    @property
    def name(self) -> FormName:
        """The form's name."""
        return FormName.COMPLETIONS

    def parse(self, body: object) -> TextCompletionRequest:
        """Read a decoded body. Raises RequestRefused."""
        return TextCompletionRequest.parse(body, self._max_prompts)

    def render_error(self, error: ErrorAnswer) -> JsonObject:
        """The body of an error."""
        return error.build_body()

    async def serve(
        self, call: OpenCall, request: TextCompletionRequest, caller: Caller, send: Send
    ) -> None:
        """Answer a request. Raises FrontFailure while no byte of an answer is out."""
        await self._models.check(request.models, is_list=request.is_list)
        call.phase = "submit"
        watches = [_Watch(number, request.sample_count) for number in range(len(request.prompts))]
        try:
            submitted = await self._submit_all(call, request, watches, caller)
            if request.is_dry_run:
                await self._calls.send_object(call, _quote(call, request, submitted), send)
                return
            call.headers[REQUEST_ID_HEADER] = call.waits[0].request_id
            head = _build_head(call, request)
            async with self._calls.waiting(call):
                replies = await self._deliver(call, head, watches, send)
        except FrontFailure:
            await _cancel_all(call)
            raise
        if replies is not None:
            first = list_choices(head, replies)[0]
            self._calls.record_delivered(call, finish_reason=first.finish_reason, is_lowered=False)
            call.served_by = (first.sample.worker_id, first.sample.model)

    async def _submit_all(
        self,
        call: OpenCall,
        request: TextCompletionRequest,
        watches: "Sequence[_Watch]",
        caller: Caller,
    ) -> list[Submitted]:
        """Queue a request for each prompt, in their order. Raises FrontFailure at the first
        refusal.

        The horde limits how many one address may send in a second; what comes from one call waits
        for its turn.
        """
        submitted: list[Submitted] = []
        while len(submitted) < len(watches):
            watch = watches[len(submitted)]
            body = {"prompt": request.prompts[watch.number], **request.native_body}
            try:
                taken, _ = await self._calls.submit(
                    call,
                    await self._calls.bodies.work(
                        call.body_bytes, partial(write_native_body, body)
                    ),
                    caller,
                    TEXT,
                    watch.parse,
                    is_fail_fast=request.is_fail_fast,
                )
            except NativeRefused as refused:
                if not submitted or refused.status != 429 or refused.rc is not None:
                    raise
                await asyncio.sleep(_parse_pause(refused.retry_after))
            else:
                submitted.append(taken)
        return submitted

    async def _deliver(
        self, call: OpenCall, head: TextHead, watches: "Sequence[_Watch]", send: Send
    ) -> list[TextReply] | None:
        """Wait for every reply and send them; None when an error ended an open stream."""
        waits: list[RequestWait[TextReply]] = call.waits
        async with contextlib.AsyncExitStack() as stack:
            subscriptions = [
                await stack.enter_async_context(
                    self._hub.subscribe(wait.request_id, with_progress=False)
                )
                for wait in waits
            ]
            pairs = list(zip(waits, subscriptions, strict=True))
            first = await _run_side_by_side(wait_for_first_status(*pair) for pair in pairs)

            async def wait_for_all() -> list[TextReply]:
                try:
                    return await _run_side_by_side(
                        _wait_unless_there(reply, *pair)
                        for reply, pair in zip(first, pairs, strict=True)
                    )
                except FrontFailure:
                    await _cancel_all(call)
                    raise

            if not call.is_stream:
                replies = await wait_for_all()
                await self._calls.send_object(call, build_text_completion(head, replies), send)
                return replies
            stream = self._calls.open_stream(call, send)
            arrivals: Arrivals = asyncio.Queue()
            for watch in watches:
                watch.tell(arrivals)
            return await run_stream(
                stream,
                lambda: _stream_choices(stream, head, wait_for_all(), arrivals),
                deadline=call.deadline,
                request_id=call.native_id,
                describe=lambda failure: self._calls.describe(failure, call),
                write_failure=build_error_events,
            )


class _Watch:
    """What is known of the reply to one prompt, and who is told of each sample."""

    def __init__(self, number: int, sample_count: int) -> None:
        self.number = number
        self._sample_count = sample_count
        self._seen: list[TextSample] = []
        self._arrivals: Arrivals | None = None

    def parse(self, status: Mapping[str, object]) -> TextReply | None:
        """The reply of a status; its samples are told one by one as they come."""
        # A status names no generation, and one that ends later may stand before the others.
        unseen = Counter(parse_samples(status)) - Counter(self._seen)
        for sample in unseen.elements():
            self._seen.append(sample)
            self._tell(len(self._seen) - 1)
        if len(self._seen) < self._sample_count:
            return None
        return TextReply(samples=tuple(self._seen), kudos=get_kudos(status))

    def tell(self, arrivals: Arrivals) -> None:
        """Put each sample there, with the index of its choice; those that are there already at
        once.
        """
        self._arrivals = arrivals
        for position in range(len(self._seen)):
            self._tell(position)

    def _tell(self, position: int) -> None:
        if self._arrivals is not None:
            index = self.number * self._sample_count + position
            self._arrivals.put_nowait((index, self._seen[position]))


async def _cancel_all(call: OpenCall) -> None:
    """End what is left of the native requests of a call that failed."""
    await asyncio.gather(*(wait.cancel() for wait in call.waits))


async def _wait_unless_there(
    reply: TextReply | None, wait: RequestWait[TextReply], subscription: Subscription
) -> TextReply:
    return reply if reply is not None else await wait_for_reply(wait, subscription)


async def _run_side_by_side[T](works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in their order. The first failure ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end_all(tasks)


async def _end_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _stream_choices(
    stream: EventStream,
    head: TextHead,
    waiting: Coroutine[Any, Any, list[TextReply]],
    arrivals: Arrivals,
) -> tuple[list[TextReply], StreamOutcome]:
    """Send each choice as it comes, then the end. Raises WaitFailed."""
    replying = asyncio.create_task(waiting)
    replying.add_done_callback(lambda _: arrivals.put_nowait(None))
    left = len(head.prompts) * head.sample_count
    try:
        while True:
            try:
                async with asyncio.timeout(stream.compute_silence_seconds()):
                    arrived = await arrivals.get()
            except TimeoutError:
                await stream.write(KEEP_ALIVE)
                continue
            if arrived is None:
                raise AssertionError(replying.result())  # a failure, as samples come before replies
            left -= 1
            choice = build_choice(head, *arrived)
            events = list(build_text_chunks(head, choice))
            if left:
                events.append(build_finish_chunk(head, choice))
            if events:
                await stream.write(encode_events(events))
                stream.note_text()
            if not left:
                break
        replies = await replying
        end = [build_finish_chunk(head, choice) | {"x_horde": build_text_x_horde(head, replies)}]
        if head.include_usage:
            end.append(build_usage_chunk(head, replies))
        await stream.write(encode_events(end) + DONE, is_last=True)
        return replies, StreamOutcome.WHOLE
    finally:
        await _end_all([replying])


def _build_head(call: OpenCall, request: TextCompletionRequest) -> TextHead:
    return TextHead(
        request_ids=tuple(wait.request_id for wait in call.waits),
        created=call.created,
        prompts=request.prompts,
        sample_count=request.sample_count,
        max_tokens=request.max_tokens,
        stops=request.stops,
        echo=request.echo,
        include_usage=request.include_usage,
    )


def _quote(
    call: OpenCall, request: TextCompletionRequest, submitted: Sequence[Submitted]
) -> JsonObject:
    return build_text_quote(
        [taken.body for taken in submitted],
        completion_id=f"{TEXT_ID_PREFIX}dryrun-{uuid4()}",
        created=call.created,
        model=request.models[0],
    )


def _parse_pause(retry_after: str | None) -> float:
    """Seconds to wait for a rate limit's next window."""
    if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
        return max(float(retry_after), LEAST_PAUSE_SECONDS)
    return LEAST_PAUSE_SECONDS
