# SPDX-License-Identifier: AGPL-3.0-or-later
"""The open calls of a front, whatever form they came in, and what serving any of them takes.

A call is let in, read, served while its client is there, and given up when it goes. Source:
docs/reference/chat_front.md, "The life of a completion".
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from opentelemetry.metrics import Observation
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from horde import metrics
from horde.front_config import FrontConfig
from horde.json_text import JsonObject
from horde.oai.answers import send_json
from horde.oai.bodies import BodyReader, ClientGone, IncomingBody, build_overload
from horde.oai.callers import build_caller, require_api_key
from horde.oai.errors import ErrorAnswer, FrontFailure, NativeRefused, RequestRefused, WaitFailure
from horde.oai.forms import FormName, FormRequest
from horde.oai.native import CHAT, Caller, NativeClient, NativeFamily, Submitted
from horde.oai.signals import SignalHub
from horde.oai.streaming import EventStream
from horde.oai.waiting import ParseReply, RequestWait, WaitSettings

# A client that takes nothing of its answer for so long gives up its place.
SEND_SECONDS: Final = 60.0
# A client that sends it with the value `comments` is told in its stream how its request waits.
WAIT_HEADER: Final = "x-horde-wait"
WAIT_SECONDS: Final = 3.0  # between two of these comments

type Describe = Callable[[FrontFailure, "OpenCall"], ErrorAnswer]


def keep_name(param: str) -> str:
    """The name in a form that calls a parameter as the horde does."""
    return param


@dataclass(slots=True, eq=False)
class OpenCall:
    """One call while it is open. Clocks are monotonic, `created` is in Unix seconds; `front_id` is
    what `x-request-id` says.
    """

    front_id: str = ""
    accepted_at: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    deadline: float = 0.0  # of everything, once the body is read
    phase: str = "request"
    form: str = "none"
    render_error: Callable[[ErrorAnswer], JsonObject] = ErrorAnswer.build_body
    # The client's own name of what the horde calls a parameter.
    locate: Callable[[str], str] = keep_name
    is_stream: bool = False
    # The client can come back for the reply, so that its going away cancels nothing.
    is_resumable: bool = False
    body_bytes: int = 0
    request_headers: Headers = field(default_factory=Headers)
    waits: list[RequestWait[Any]] = field(default_factory=list)  # for its native requests
    served_by: tuple[str, str] | None = None  # worker id and model of the delivered reply
    headers: dict[str, str] = field(default_factory=dict)  # of the answer

    @property
    def native_id(self) -> str | None:
        """The id of the first native request, once there is one."""
        return self.waits[0].request_id if self.waits else None


class Service[R: FormRequest](Protocol):
    """What serves the calls of one form."""

    @property
    def name(self) -> FormName:
        """The form's name."""

    def parse(self, body: object) -> R:
        """Read a decoded body, in any thread. Raises RequestRefused."""

    def render_error(self, error: ErrorAnswer) -> JsonObject:
        """The body of an error."""

    async def serve(self, call: OpenCall, request: R, caller: Caller, send: Send) -> None:
        """Answer a request. Raises FrontFailure while no byte of an answer is out."""


class Calls:
    """The open calls of one process."""

    def __init__(
        self, config: FrontConfig, native: NativeClient, hub: SignalHub, describe: Describe
    ) -> None:
        self.hub, self.bodies = hub, BodyReader()
        self._config, self._native, self._describe = config, native, describe
        self._open: set[OpenCall] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._is_shutting_down = False
        metrics.set_gauge_source("horde.oai.open_requests", self._observe_open)

    def _observe_open(self) -> Iterable[Observation]:
        kinds = [(call.is_stream, call.form) for call in list(self._open)]
        for is_stream in (False, True):
            for form in FormName:
                count = kinds.count((is_stream, form.value))
                yield Observation(count, {"stream": is_stream, "form": form.value})

    async def close(self) -> None:
        """Finish what was left to do for clients that are gone."""
        self.bodies.close()
        if self._background:
            await asyncio.wait(self._background, timeout=5.0)

    def shut_down(self) -> None:
        """End every open call with `front_shutting_down`, cancelling it natively."""
        self._is_shutting_down = True
        for call in list(self._open):
            for wait in call.waits:
                wait.abort(WaitFailure.SHUTTING_DOWN)

    # --- a call from its headers to its end

    async def answer[R: FormRequest](
        self, service: Service[R], call: OpenCall, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve one call. Raises FrontFailure while no byte of an answer is out, and ClientGone
        when nobody reads one.
        """
        headers, incoming = Headers(scope=scope), IncomingBody(receive)
        call.form, call.render_error = service.name.value, service.render_error
        call.request_headers = headers
        try:
            api_key = require_api_key(headers)
            with self.admit(call):
                # A byte now and then must not hold one of the places for ever.
                deadline = call.accepted_at + self._config.completion_budget_seconds
                request = await self.bodies.read(headers, incoming, deadline, service.parse)
                caller = self._build_caller(api_key, headers, scope)
                self._note_request(call, request, incoming.size_bytes)
                work = asyncio.create_task(service.serve(call, request, caller, send))
                del request  # it may be large, and is dropped once it is submitted
                await self._serve_while_connected(call, work, receive)
        except RequestRefused:
            # Who asked first has sent nothing yet, and reading on would say that it may.
            if incoming.has_begun or headers.get("expect", "").lower() != "100-continue":
                await incoming.drain()
            raise

    async def answer_bare(
        self,
        name: FormName,
        call: OpenCall,
        scope: Scope,
        receive: Receive,
        serve: Callable[[Caller], Coroutine[Any, Any, None]],
    ) -> None:
        """Serve a call of a form whose body says nothing. Raises as `answer` does."""
        headers = Headers(scope=scope)
        call.form, call.request_headers = name.value, headers
        api_key = require_api_key(headers)
        with self.admit(call):
            call.deadline = call.accepted_at + self._config.stream_budget_seconds
            caller = self._build_caller(api_key, headers, scope)
            await self._serve_while_connected(call, asyncio.create_task(serve(caller)), receive)

    def _build_caller(self, api_key: str, headers: Headers, scope: Scope) -> Caller:
        peer = scope["client"][0] if scope.get("client") else None
        return build_caller(api_key, headers, peer, self._config.trusted_proxies)

    @property
    def is_shutting_down(self) -> bool:
        """Whether open calls are to end."""
        return self._is_shutting_down

    @property
    def has_room(self) -> bool:
        """Whether another call would be let in."""
        return len(self._open) < self._config.max_open_requests and not self._is_shutting_down

    @contextlib.contextmanager
    def admit(self, call: OpenCall, *, is_bounded: bool = True) -> Iterator[None]:
        """Count a call as open. Raises RequestRefused for one too many, where they are bounded."""
        if is_bounded and not self.has_room:
            raise build_overload("it has as many open requests as it takes")
        self._open.add(call)
        try:
            yield
        finally:
            self._open.discard(call)

    def _note_request(self, call: OpenCall, request: FormRequest, body_bytes: int) -> None:
        call.is_stream, call.locate, call.body_bytes = request.stream, request.locate, body_bytes
        config = self._config
        budget = (
            config.stream_budget_seconds if request.stream else config.completion_budget_seconds
        )
        call.deadline = call.accepted_at + budget

    async def _serve_while_connected(
        self, call: OpenCall, work: asyncio.Task[None], receive: Receive
    ) -> None:
        """Serve until the answer is out or the client hangs up, whichever comes first."""
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
        """Stop serving a client that is gone; its requests are cancelled unless it can come back
        for them.
        """
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, FrontFailure):
            await work
        self._cancel_behind(call)

    def _cancel_behind(self, call: OpenCall) -> None:
        if call.is_resumable:
            return
        for wait in call.waits:
            task = asyncio.create_task(wait.cancel())
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    # --- what services use

    def describe(self, failure: FrontFailure, call: OpenCall) -> ErrorAnswer:
        """The error of a failure, in the client's own names."""
        return self._describe(failure, call)

    async def submit[T](
        self,
        call: OpenCall,
        body: bytes,
        caller: Caller,
        family: NativeFamily,
        parse_reply: ParseReply[T],
        *,
        is_fail_fast: bool,
    ) -> tuple[Submitted, RequestWait[T] | None]:
        """Queue a native request; the wait for it, None for a dry run. A client that goes meanwhile
        does not cut it short, since only its answer has the id that a cancel needs.

        Raises FrontFailure.
        """
        return await finish_even_if_cancelled(
            self._submit(call, body, caller, family, parse_reply, is_fail_fast=is_fail_fast)
        )

    async def _submit[T](
        self,
        call: OpenCall,
        body: bytes,
        caller: Caller,
        family: NativeFamily,
        parse_reply: ParseReply[T],
        *,
        is_fail_fast: bool,
    ) -> tuple[Submitted, RequestWait[T] | None]:
        try:
            submitted = await self._native.submit(body, caller, call.deadline, family)
        except NativeRefused as refused:
            call.headers.update(refused.rate_limits)
            raise
        call.headers.update(submitted.rate_limits)
        if submitted.request_id is None:
            return submitted, None
        wait = self.build_wait(
            caller,
            submitted.request_id,
            call.deadline,
            parse_reply,
            family=family,
            is_fail_fast=is_fail_fast,
        )
        kudos = submitted.body.get("kudos")
        wait.kudos = kudos if isinstance(kudos, int | float) else None
        call.waits.append(wait)
        return submitted, wait

    def build_wait[T](
        self,
        caller: Caller,
        request_id: str,
        deadline: float,
        parse_reply: ParseReply[T],
        *,
        family: NativeFamily = CHAT,
        is_fail_fast: bool = False,
    ) -> RequestWait[T]:
        """The wait for a native request that was queued, perhaps by another process."""
        settings = WaitSettings.from_config(self._config, is_fail_fast=is_fail_fast)
        return RequestWait(
            self._native,
            caller,
            request_id,
            settings,
            deadline,
            family=family,
            parse_reply=parse_reply,
        )

    @contextlib.asynccontextmanager
    async def waiting(self, call: OpenCall) -> AsyncIterator[None]:
        """Around the time from the submit to the answer: a front that is ending, or a defect,
        leaves no request behind.
        """
        call.phase = "wait"
        if self._is_shutting_down:
            for wait in call.waits:
                await wait.give_up(WaitFailure.SHUTTING_DOWN)
        try:
            yield
        except (FrontFailure, ClientGone):
            raise
        except Exception:  # a defect: nobody would get the reply
            self._cancel_behind(call)
            raise

    def open_stream(
        self, call: OpenCall, send: Send, silence_seconds: float | None = None
    ) -> EventStream:
        """The stream of a call, whose headers go out with its first bytes. `silence_seconds` is how
        long nothing may be sent, unless the front's setting counts. A stream that tells how its
        request waits opens at once.
        """
        call.phase = "stream"
        tells_wait = call.request_headers.get(WAIT_HEADER, "").strip().lower() == "comments"
        patience = 0.0 if tells_wait else self._config.stream_open_seconds
        silence_seconds = silence_seconds or self._config.keepalive_seconds
        return EventStream(
            send,
            form=call.form,
            accepted_at=call.accepted_at,
            open_at=call.accepted_at + patience,
            keepalive_seconds=min(silence_seconds, WAIT_SECONDS) if tells_wait else silence_seconds,
            tells_wait=tells_wait,
            headers=call.headers,
        )

    async def send_object(self, call: OpenCall, body: JsonObject, send: Send) -> None:
        """Answer with a whole object. Raises ClientGone when nobody takes it."""
        milliseconds = round((time.monotonic() - call.accepted_at) * 1000)
        headers = {**call.headers, "openai-processing-ms": str(milliseconds)}
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await send_json(send, 200, body, headers)
        except TimeoutError:
            raise ClientGone from None

    def record_delivered(self, call: OpenCall, *, finish_reason: str, is_lowered: bool) -> None:
        """Count a reply that its client was given."""
        metrics.oai_completions.add(
            1, {"finish_reason": finish_reason, "lowered": is_lowered, "form": call.form}
        )
        metrics.oai_wait_seconds.record(
            time.monotonic() - call.accepted_at, {"stream": call.is_stream, "form": call.form}
        )


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def finish_even_if_cancelled[T](work: Coroutine[Any, Any, T]) -> T:
    """Let work end that must not be left half done, though nobody waits for it any more."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(FrontFailure):
            await task
        raise
