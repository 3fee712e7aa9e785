# SPDX-License-Identifier: AGPL-3.0-or-later
"""The life of a completion, from the body to the answer, for calls that wait and calls that stream.

Source: docs/reference/chat_front.md, "The life of a completion".
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from opentelemetry.metrics import Observation
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from horde import metrics
from horde.chat_contract import ChatAvailabilityMode, JsonObject
from horde.config import FrontConfig
from horde.oai.bodies import BodyReader, ClientGone, IncomingBody, PreparedRequest, build_overload
from horde.oai.callers import build_caller, require_api_key
from horde.oai.errors import ErrorAnswer, FrontFailure, NativeRefused, RequestRefused, WaitFailure
from horde.oai.mapping import (
    COMPLETION_ID_PREFIX,
    CompletedReply,
    CompletionFacts,
    build_completion,
    build_dry_run_completion,
)
from horde.oai.native import Caller, NativeClient, Submitted
from horde.oai.responses import send_json
from horde.oai.signals import SignalHub
from horde.oai.streaming import StreamSettings, stream_completion
from horde.oai.waiting import RequestWait, WaitSettings, wait_for_first_status, wait_for_reply

# A client that takes nothing of its answer for so long gives up its place.
SEND_SECONDS: Final = 60.0
REQUEST_ID_HEADER: Final = "x-horde-request-id"

type Describe = Callable[[FrontFailure, "OpenCall"], ErrorAnswer]


@dataclass(slots=True, eq=False)
class OpenCall:
    """One call while it is open. Clocks are monotonic, `created` is in Unix seconds."""

    accepted_at: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    phase: str = "request"
    is_stream: bool = False
    # The client can come back for the reply, so that its going away cancels nothing.
    is_resumable: bool = False
    token_limit_key: str = "max_tokens"
    wait: RequestWait | None = None
    served_by: tuple[str, str] | None = None  # worker id and model of the delivered reply
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def native_id(self) -> str | None:
        """The id of the native request, once there is one."""
        return self.wait.request_id if self.wait is not None else None


class Completions:
    """The completions of one process."""

    def __init__(
        self, config: FrontConfig, native: NativeClient, hub: SignalHub, describe: Describe
    ) -> None:
        self._config, self._native, self._hub, self._describe = config, native, hub, describe
        self._bodies = BodyReader()
        self._open: set[OpenCall] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._is_shutting_down = False
        metrics.set_gauge_source("horde.oai.open_requests", self._observe_open)

    def _observe_open(self) -> Iterable[Observation]:
        calls = list(self._open)
        for is_stream in (False, True):
            yield Observation(
                sum(call.is_stream is is_stream for call in calls), {"stream": is_stream}
            )

    async def close(self) -> None:
        """Finish what was left to do for clients that are gone."""
        self._bodies.close()
        if self._background:
            await asyncio.wait(self._background, timeout=5.0)

    def shut_down(self) -> None:
        """End every open call with `front_shutting_down`, cancelling it natively."""
        self._is_shutting_down = True
        for call in list(self._open):
            if call.wait is not None:
                call.wait.abort(WaitFailure.SHUTTING_DOWN)

    async def answer(self, call: OpenCall, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call. Raises FrontFailure while no byte of an answer is out, and ClientGone
        when nobody reads one.
        """
        headers, incoming = Headers(scope=scope), IncomingBody(receive)
        try:
            api_key = require_api_key(headers)
            with self._admit(call):
                # A byte now and then must not hold one of the places for ever.
                prepared = await self._bodies.read(
                    headers, incoming, call.accepted_at + self._config.completion_budget_seconds
                )
                peer = scope["client"][0] if scope.get("client") else None
                caller = build_caller(api_key, headers, peer, self._config.trusted_proxies)
                await self._serve_while_connected(call, prepared, caller, receive, send)
        except RequestRefused:
            # Who asked first has sent nothing yet, and reading on would say that it may.
            if incoming.has_begun or headers.get("expect", "").lower() != "100-continue":
                await incoming.drain()
            raise

    @contextlib.contextmanager
    def _admit(self, call: OpenCall) -> Iterator[None]:
        if len(self._open) >= self._config.max_open_requests or self._is_shutting_down:
            raise build_overload("it has as many open requests as it takes")
        self._open.add(call)
        try:
            yield
        finally:
            self._open.discard(call)

    async def _serve_while_connected(
        self,
        call: OpenCall,
        prepared: PreparedRequest,
        caller: Caller,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serve until the answer is out or the client hangs up, whichever comes first."""
        call.is_stream = prepared.request.stream
        call.is_resumable = prepared.operation_key.is_from_client
        call.token_limit_key = prepared.request.token_limit_key
        work = asyncio.create_task(self._serve(call, prepared, caller, send))
        del prepared  # it may be large, and is dropped once it is submitted
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await self._abandon(call, work)
                raise ClientGone
            await work
        finally:
            gone.cancel()
            if not work.done():  # this task itself is being ended
                await self._abandon(call, work)

    async def _abandon(self, call: OpenCall, work: asyncio.Task[None]) -> None:
        """Stop serving a client that is gone; its request is cancelled unless it can come back for
        it.
        """
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, FrontFailure):
            await work
        if call.wait is not None and not call.is_resumable:
            self._run_behind(call.wait.cancel())

    def _run_behind(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _serve(
        self, call: OpenCall, prepared: PreparedRequest, caller: Caller, send: Send
    ) -> None:
        request, config = prepared.request, self._config
        budget = (
            config.stream_budget_seconds if request.stream else config.completion_budget_seconds
        )
        deadline = call.accepted_at + budget
        settings = WaitSettings.from_config(
            config, is_fail_fast=request.horde.availability_mode is ChatAvailabilityMode.FAIL_FAST
        )
        call.phase = "submit"
        submitting = self._submit(call, prepared.native_bytes, caller, settings, deadline)
        del prepared
        submitted = await _finish_even_if_cancelled(submitting)
        call.headers.update(submitted.rate_limits)
        if submitted.request_id is None or call.wait is None:
            model = request.model or _get_quoted_model(submitted)
            completion_id = f"{COMPLETION_ID_PREFIX}dryrun-{uuid4()}"
            body = build_dry_run_completion(
                submitted.body, completion_id=completion_id, created=call.created, model=model
            )
            await self._send_completion(call, body, send)
            return
        call.headers[REQUEST_ID_HEADER] = submitted.request_id
        facts = CompletionFacts(
            request_id=submitted.request_id,
            created=call.created,
            model=request.model,
            estimated_prompt_tokens=request.estimated_prompt_tokens,
            include_reasoning=request.horde.include_reasoning,
            include_usage=request.include_usage,
        )
        call.phase = "wait"
        if self._is_shutting_down:
            await call.wait.give_up(WaitFailure.SHUTTING_DOWN)
        try:
            await self._wait(call, call.wait, facts, send)
        except (FrontFailure, ClientGone):
            raise
        except Exception:  # a defect: nobody would get the reply
            if not call.is_resumable:
                self._run_behind(call.wait.cancel())
            raise

    async def _submit(
        self, call: OpenCall, body: bytes, caller: Caller, settings: WaitSettings, deadline: float
    ) -> Submitted:
        try:
            submitted = await self._native.submit(body, caller, deadline)
        except NativeRefused as refused:
            call.headers.update(refused.rate_limits)
            raise
        if submitted.request_id is not None:
            call.wait = RequestWait(self._native, caller, submitted.request_id, settings, deadline)
        return submitted

    async def _wait(
        self, call: OpenCall, wait: RequestWait, facts: CompletionFacts, send: Send
    ) -> None:
        async with self._hub.subscribe(
            wait.request_id, with_progress=call.is_stream
        ) as subscription:
            reply = await wait_for_first_status(wait, subscription)
            if not call.is_stream:
                reply = reply or await wait_for_reply(wait, subscription)
                await self._send_completion(call, build_completion(facts, reply), send)
                self._record_delivered(call, reply)
                return
            call.phase = "stream"
            settings = StreamSettings(
                accepted_at=call.accepted_at,
                open_at=call.accepted_at + self._config.stream_open_seconds,
                keepalive_seconds=self._config.keepalive_seconds,
            )
            streamed = await stream_completion(
                send=send,
                facts=facts,
                wait=wait,
                subscription=subscription,
                settings=settings,
                describe=lambda failure: self._describe(failure, call),
                headers=[(name.encode(), value.encode()) for name, value in call.headers.items()],
                first_reply=reply,
            )
            if streamed is not None:
                self._record_delivered(call, streamed)

    def _record_delivered(self, call: OpenCall, reply: CompletedReply) -> None:
        metrics.oai_completions.add(
            1, {"finish_reason": reply.finish_reason, "lowered": reply.is_lowered}
        )
        metrics.oai_wait_seconds.record(
            time.monotonic() - call.accepted_at, {"stream": call.is_stream}
        )
        call.served_by = (reply.worker_id, reply.model)

    async def _send_completion(self, call: OpenCall, body: JsonObject, send: Send) -> None:
        milliseconds = round((time.monotonic() - call.accepted_at) * 1000)
        headers = {**call.headers, "openai-processing-ms": str(milliseconds)}
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await send_json(send, 200, body, headers)
        except TimeoutError:
            raise ClientGone from None


def _get_quoted_model(submitted: Submitted) -> str:
    """The first model of a quote, for a client that sent a list."""
    models = submitted.body["resolved"].get("models")
    return str(models[0]) if isinstance(models, list) and models else ""


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _finish_even_if_cancelled[T](work: Coroutine[Any, Any, T]) -> T:
    """Let a submit be answered even for a client that is gone: only the answer has the id that a
    cancel needs.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(FrontFailure):
            await task
        raise
