# SPDX-License-Identifier: AGPL-3.0-or-later
"""Pops of workers that the front passes on, and keeps waiting when they ask for it.

A waiting worker costs a connection and a record here, and nothing in the API: that is asked again
only when the queue gains something the worker could take, and by a slow timer, since a hint may be
lost. A job that comes for a worker which has just gone is given back. Source:
docs/reference/chat_front.md, "Waiting pops".
"""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from opentelemetry.metrics import Observation
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from horde import metrics
from horde.front_config import FrontConfig
from horde.json_text import JsonObject
from horde.logger import get_logger
from horde.oai.bodies import INLINE_BYTES, BodyReader, ClientGone, IncomingBody
from horde.oai.callers import find_client_address
from horde.oai.errors import ErrorAnswer, NativeUnavailable, RequestRefused
from horde.oai.http import HeaderPairs, HttpAnswer
from horde.oai.native import NativeClient
from horde.oai.preferences import parse_wait_seconds
from horde.oai.waiting_room import Offer, Place, WaitingRoom, build_offer
from horde.return_codes import ReturnCode
from horde.text_work import POPPING_ADDRESS_HEADER, WORK_LEFT_HEADER, TextWork

logger = get_logger(__name__)

MAX_WAIT_SECONDS: Final = 30
MAX_BODY_BYTES: Final = 10 * 1024 * 1024  # as the API takes
MAX_WAITING_BODY_BYTES: Final = INLINE_BYTES  # a longer pop is passed on and does not wait
BODY_SECONDS: Final = 60.0
SEND_SECONDS: Final = 60.0
JITTER_SHARE: Final = 0.2  # of each pause, so that workers do not ask in step
# Before each further attempt to give a job back; after the last its lease ends by itself.
HAND_BACK_RETRY_SECONDS: Final = (0.5, 2.0, 5.0)
RETRY_AFTER: Final = {"Retry-After": "5"}

# What of a worker's headers goes to the API, and what of the answer does not come back: the front
# has its own.
_PASSED_HEADERS: Final = frozenset(
    {b"apikey", b"client-agent", b"content-type", b"content-encoding", b"accept"}
)
_OWN_HEADERS: Final = frozenset(
    {
        *("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"),
        *("vary", "x-request-id", WORK_LEFT_HEADER),
    }
)
_CODES: Final = {400: ReturnCode.BAD_REQUEST, 413: ReturnCode.REQUEST_TOO_LARGE}


class _Reason(StrEnum):
    """Why the API is asked."""

    FIRST = "first"
    HINT = "hint"
    TIMER = "timer"


@dataclass(frozen=True, slots=True)
class Pop:
    """A pop as it goes to the API, and whose it is."""

    headers: HeaderPairs
    body: bytes
    owner: tuple[bytes, str]  # key and address, as limits count them


@dataclass(slots=True, eq=False)
class Waiter:
    """A worker from its pop to its answer."""

    pop: Pop
    answer: asyncio.Future[HttpAnswer]
    place: Place | None  # None for one that does not wait
    idle: HttpAnswer | None = None  # the latest answer without a job
    is_asking: bool = False
    is_over: bool = False  # its time is over: the answer to what it asks now is the last
    is_gone: bool = False
    timer: asyncio.TimerHandle | None = None  # of its next question
    end: asyncio.TimerHandle | None = None


def render_native_error(error: ErrorAnswer) -> JsonObject:
    """A refusal of the front in the API's own form."""
    code = _CODES.get(error.status)
    message = error.message if error.status != 413 else "The body is too large."
    return {"message": message} if code is None else {"message": message, "rc": code.value}


class Pops:
    """The pops of one process."""

    def __init__(self, config: FrontConfig, native: NativeClient, bodies: BodyReader) -> None:
        self._config, self._native, self._bodies = config, native, bodies
        self._waiters: dict[Place, Waiter] = {}
        self._counts: Counter[object] = Counter()  # waiting, by key and by address
        self._room = WaitingRoom(self._summon, time.monotonic)
        self._tasks: set[asyncio.Task[None]] = set()
        self._hears = False
        self._is_shutting_down = False
        metrics.set_gauge_source("horde.oai.waiting_workers", self._observe)

    def _observe(self) -> Iterable[Observation]:
        yield Observation(len(self._waiters))

    # --- what happens outside

    def take_work(self, work: TextWork) -> None:
        """The queue gained something."""
        self._room.take_work(work)

    def set_health(self, hears: bool) -> None:
        """Hints arrive from now on, or no longer. Either way some may have been missed, so that
        all workers ask soon, spread over the time of a poll.
        """
        self._hears = hears
        self._room.forget_looks()
        for waiter in list(self._waiters.values()):
            if not waiter.is_asking:
                self._ask_later(waiter, random.uniform(0, self._config.poll_seconds))

    def shut_down(self) -> None:
        """Keep nobody waiting any more."""
        self._is_shutting_down = True
        for waiter in list(self._waiters.values()):
            self._end(waiter)

    async def close(self) -> None:
        """Finish what was left to do for workers that are gone."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)

    # --- a pop from its headers to its end

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one pop. Raises FrontFailure while no byte of an answer is out, and ClientGone."""
        started = time.monotonic()
        headers, incoming = Headers(scope=scope), IncomingBody(receive)
        try:
            body = await self._bodies.read_bytes(
                headers, incoming, started + BODY_SECONDS, MAX_BODY_BYTES
            )
        except RequestRefused:
            await incoming.drain()
            raise
        pop = self._build_pop(scope, headers, body)
        seconds = parse_wait_seconds(headers.getlist("prefer"), MAX_WAIT_SECONDS)
        offer = None if seconds is None or self._is_shutting_down else _find_offer(body)
        if seconds is None or offer is None:
            waiter = self._open(pop, None)
            answered = await self._serve(waiter, receive)
            await _send(send, answered, {})
            return
        with self._admit(pop, offer) as waiter:
            loop = asyncio.get_running_loop()
            waiter.end = loop.call_later(
                max(started + seconds - time.monotonic(), 0), self._end, waiter
            )
            answered = await self._serve(waiter, receive)
        is_applied = answered.status_code == 200
        await _send(send, answered, {"preference-applied": f"wait={seconds}"} if is_applied else {})

    def _build_pop(self, scope: Scope, headers: Headers, body: bytes) -> Pop:
        """The pop with the worker's address: the API believes it where it trusts the front, and
        refuses the pop elsewhere.
        """
        peer = scope["client"][0] if scope.get("client") else None
        trusted = self._config.trusted_proxies
        address = find_client_address(peer, headers.getlist("x-forwarded-for"), trusted) or ""
        passed = [(name, value) for name, value in scope["headers"] if name in _PASSED_HEADERS]
        written = address.encode("latin-1", "replace")
        passed += [(b"x-forwarded-for", written), (POPPING_ADDRESS_HEADER.encode(), written)]
        return Pop(passed, body, (headers.get("apikey", "").encode("latin-1", "replace"), address))

    @contextlib.contextmanager
    def _admit(self, pop: Pop, offer: Offer) -> Iterator[Waiter]:
        """A place among the waiting. Raises RequestRefused when they are too many."""
        key, address = pop.owner
        most = self._config.max_waiting_pops_per_caller
        if len(self._waiters) >= self._config.max_waiting_pops:
            message = "Too many workers wait at this front. Try again in a moment."
            raise RequestRefused("front_overloaded", message, status=503, headers=RETRY_AFTER)
        if self._counts[key] >= most or self._counts[address] >= most:
            message = (
                f"More than {most} pops of this key or address wait already. Pop without 'Prefer:"
                " wait', or with fewer threads."
            )
            raise RequestRefused("too_many_waiting", message, status=429, headers=RETRY_AFTER)
        waiter = self._open(pop, self._room.enter(offer))
        assert waiter.place is not None
        self._waiters[waiter.place] = waiter
        self._counts.update(pop.owner)
        try:
            yield waiter
        finally:
            del self._waiters[waiter.place]
            self._counts.subtract(pop.owner)
            for counted in pop.owner:
                if not self._counts[counted]:
                    del self._counts[counted]

    def _open(self, pop: Pop, place: Place | None) -> Waiter:
        return Waiter(pop, asyncio.get_running_loop().create_future(), place)

    async def _serve(self, waiter: Waiter, receive: Receive) -> HttpAnswer:
        """The answer, once there is one. Raises ClientGone when the worker hangs up before."""
        self._ask(waiter, _Reason.FIRST)
        gone = asyncio.create_task(_wait_until_gone(receive))
        is_taken = False
        try:
            ends: set[asyncio.Future[Any]] = {waiter.answer, gone}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone
            answered = waiter.answer.result()
            is_taken = True
            return answered
        finally:
            gone.cancel()
            self._forget(waiter, is_taken=is_taken)

    def _forget(self, waiter: Waiter, *, is_taken: bool) -> None:
        """The worker waits no more; what it was given and did not get goes back."""
        for timer in (waiter.timer, waiter.end):
            if timer is not None:
                timer.cancel()
        if is_taken:
            return
        waiter.is_gone = True
        if waiter.answer.done():
            if waiter.answer.exception() is None:
                self._give_back(waiter.pop, waiter.answer.result())
        elif waiter.place is not None and not waiter.is_asking:
            self._room.leave(waiter.place)

    # --- asking the API

    def _summon(self, place: Place) -> None:
        """It is the worker's turn to ask."""
        self._ask(self._waiters[place], _Reason.HINT)

    def _ask_by_timer(self, waiter: Waiter) -> None:
        """Ask, unless another worker of the same models has meanwhile, and nothing waits for
        them: so one of a thousand asks where all would hear the same.
        """
        if waiter.place is not None:
            since_look = self._room.measure_look(waiter.place)
            if since_look < self._pause_seconds * (1 - JITTER_SHARE):
                self._ask_later(waiter, self._draw_pause() - since_look)
                return
            self._room.begin(waiter.place)
        self._ask(waiter, _Reason.TIMER)

    def _ask(self, waiter: Waiter, reason: _Reason) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
            waiter.timer = None
        waiter.is_asking = True
        self._start(self._take_turn(waiter, reason))

    async def _take_turn(self, waiter: Waiter, reason: _Reason) -> None:
        answer: HttpAnswer | None = None
        try:
            answer = await self._native.pop(waiter.pop.headers, waiter.pop.body)
        except NativeUnavailable as failure:
            if waiter.idle is None and not waiter.is_gone:
                waiter.answer.set_exception(failure)
        waiter.is_asking = False
        outcome = _judge(answer)
        metrics.oai_pops.add(1, {"reason": reason.value, "outcome": outcome})
        self._take_answer(waiter, answer, outcome)

    def _take_answer(self, waiter: Waiter, answer: HttpAnswer | None, outcome: str) -> None:
        """What becomes of the worker after it asked."""
        if answer is None or outcome == "failed":
            self._take_failure(waiter, answer)
            return
        if outcome == "idle" and waiter.place is not None and not waiter.is_gone:
            waiter.idle = answer
            if not waiter.is_over:
                # Before its turn is over, which may call it at once.
                self._ask_later(waiter, self._draw_pause())
                is_work_left = answer.headers.get(WORK_LEFT_HEADER) != "false"
                self._room.end_empty(waiter.place, is_work_left=is_work_left)
                return
        if waiter.place is not None:
            if outcome == "job":
                self._room.end_served(waiter.place)
            else:
                self._room.leave(waiter.place)
        if waiter.is_gone:
            self._give_back(waiter.pop, answer)
        else:
            waiter.answer.set_result(answer)

    def _take_failure(self, waiter: Waiter, answer: HttpAnswer | None) -> None:
        """The API was away or busy: a worker that waits asks again after a pause."""
        if waiter.place is not None:
            self._room.rest(waiter.place)
        if waiter.is_gone or waiter.answer.done():
            return
        if waiter.idle is None or waiter.is_over:
            last = answer if waiter.idle is None else waiter.idle
            assert last is not None
            waiter.answer.set_result(last)
            return
        pause = self._config.poll_seconds
        if answer is not None:
            pause = max(_parse_pause(answer.headers.get("retry-after")), pause)
        self._ask_later(waiter, _add_jitter(pause))

    @property
    def _pause_seconds(self) -> float:
        config = self._config
        return config.subscribed_poll_seconds if self._hears else config.poll_seconds

    def _draw_pause(self) -> float:
        return _add_jitter(self._pause_seconds)

    def _ask_later(self, waiter: Waiter, seconds: float) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        loop = asyncio.get_running_loop()
        waiter.timer = loop.call_later(seconds, self._ask_by_timer, waiter)

    def _end(self, waiter: Waiter) -> None:
        """Its time is over: it gets what was said last, unless it is just asking."""
        waiter.is_over = True
        if waiter.is_asking or waiter.is_gone or waiter.answer.done() or waiter.idle is None:
            return
        if waiter.place is not None:
            self._room.leave(waiter.place)
        waiter.answer.set_result(waiter.idle)

    # --- jobs whose worker is gone

    def _give_back(self, pop: Pop, answer: HttpAnswer) -> None:
        if _judge(answer) == "job":
            self._start(self._hand_back(pop, answer))

    async def _hand_back(self, pop: Pop, answer: HttpAnswer) -> None:
        """Give the jobs of an answer back, as their worker would that cannot serve them."""
        faults = await self._bodies.work(len(answer.content), lambda: _build_faults(answer.content))
        for fault in faults:
            outcome = await self._submit_fault(pop, fault)
            metrics.oai_hand_backs.add(1, {"outcome": outcome})
            logger.info("horde.oai.job_handed_back", extra={"outcome": outcome})

    async def _submit_fault(self, pop: Pop, fault: bytes) -> str:
        names = {b"content-type", b"content-encoding"}
        headers = [pair for pair in pop.headers if pair[0] not in names]
        headers.append((b"content-type", b"application/json"))
        for pause in (*HAND_BACK_RETRY_SECONDS, None):
            with contextlib.suppress(NativeUnavailable):
                answer = await self._native.submit_reply(headers, fault)
                if answer.status_code < 500 and answer.status_code != 429:
                    return "done" if answer.status_code == 200 else "refused"
            if pause is not None:
                await asyncio.sleep(pause)
        return "failed"

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _find_offer(body: bytes) -> Offer | None:
    """What the pop offers; None for one that cannot be kept waiting."""
    if len(body) > MAX_WAITING_BODY_BYTES:
        return None
    try:
        return build_offer(json.loads(body))
    except (ValueError, RecursionError):
        return None


def _judge(answer: HttpAnswer | None) -> str:
    """`job`, `idle`, `refused`, or `failed` for what a later try may cure."""
    if answer is None or answer.status_code == 429 or answer.status_code >= 500:
        return "failed"
    if answer.status_code != 200:
        return "refused"
    # Idle answers are short; a long one is not read for that.
    if len(answer.content) > INLINE_BYTES:
        return "job"
    try:
        body = json.loads(answer.content)
    except (ValueError, RecursionError):
        return "failed"
    if not isinstance(body, dict):
        return "failed"
    return "job" if body.get("id") else "idle"


def _build_faults(content: bytes) -> list[bytes]:
    """The submits that give back each job of a pop's answer."""
    body: Mapping[str, object] = json.loads(content)
    ids = body.get("ids")
    job_ids = ids if isinstance(ids, list) and ids else [body.get("id")]
    rest = {"model_id": body.get("model")} if body.get("chat") else {"generation": "faulted"}
    return [json.dumps({"id": job_id, "state": "faulted", **rest}).encode() for job_id in job_ids]


def _add_jitter(seconds: float) -> float:
    return seconds * random.uniform(1 - JITTER_SHARE, 1 + JITTER_SHARE)


def _parse_pause(text: str | None) -> float:
    return float(text) if text is not None and text.isascii() and text.isdigit() else 0.0


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(send: Send, answer: HttpAnswer, headers: Mapping[str, str]) -> None:
    """Pass an answer on as it came. Raises ClientGone when nobody takes it."""
    kept = {
        name: value
        for name, value in answer.headers.items()
        if name not in _OWN_HEADERS and not name.startswith("access-control-")
    }
    sent = {**kept, **headers, "content-length": str(len(answer.content))}
    start = [
        (name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in sent.items()
    ]
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await send(
                {"type": "http.response.start", "status": answer.status_code, "headers": start}
            )
            await send({"type": "http.response.body", "body": answer.content})
    except TimeoutError:
        raise ClientGone from None
