# SPDX-License-Identifier: AGPL-3.0-or-later
"""Calls of `POST /v1/responses`: answered as any form, with what is stored of them.

Source: docs/reference/front_responses.md, "Stored responses".
"""

import asyncio
import time
from typing import Final

from starlette.types import Send

from horde.chat_contract import ChatAvailabilityMode
from horde.json_text import JsonObject
from horde.oai.calls import Calls, OpenCall, finish_even_if_cancelled
from horde.oai.chat_service import REQUEST_ID_HEADER, ChatService
from horde.oai.errors import ErrorAnswer, FrontFailure, RequestRefused
from horde.oai.forms import FormName
from horde.oai.native import Caller
from horde.oai.responses_form.answer import ResponseHead, build_response
from horde.oai.responses_form.form import ResponsesForm, build_unavailable
from horde.oai.responses_form.records import Record, build_owner
from horde.oai.responses_form.request import ResponsesRequest
from horde.oai.responses_form.runs import Run, Runs
from horde.oai.responses_form.store import ResponseStore, StoreUnavailable
from horde.oai.responses_form.stored_answer import StoredAnswer
from horde.oai.responses_form.stored_stream import StoredStream
from horde.oai.submitting import submit_chat

CANCEL_SECONDS: Final = 5.0


class ResponsesService:
    """Serves responses: those that are waited for by the core, those in the background here."""

    def __init__(
        self,
        calls: Calls,
        form: ResponsesForm,
        store: ResponseStore | None,
        runs: Runs | None,
        stream: StoredStream | None,
        background_seconds: float,
    ) -> None:
        self._calls, self._form, self._chat = calls, form, ChatService(calls, form)
        self._store, self._runs, self._stream = store, runs, stream
        self._background_seconds = background_seconds

    @property
    def name(self) -> FormName:
        """The form's name."""
        return self._form.name

    def parse(self, body: object) -> ResponsesRequest:
        """Read a decoded body. Raises RequestRefused."""
        return self._form.parse(body)

    def render_error(self, error: ErrorAnswer) -> JsonObject:
        """The body of an error."""
        return self._form.render_error(error)

    async def serve(
        self, call: OpenCall, request: ResponsesRequest, caller: Caller, send: Send
    ) -> None:
        """Answer a request. Raises FrontFailure while no byte of an answer is out."""
        if request.background:
            await self._serve_in_background(call, request, caller, send)
            return
        try:
            await self._chat.serve(call, request, caller, send)
        except FrontFailure as failure:
            if isinstance(request.answer, StoredAnswer):
                await request.answer.record_failure(self._calls.describe(failure, call))
            raise
        except asyncio.CancelledError:
            if isinstance(request.answer, StoredAnswer):
                leaving = request.answer.record_departure(is_resumable=call.is_resumable)
                await finish_even_if_cancelled(leaving)
            raise
        if isinstance(request.answer, StoredAnswer):
            await request.answer.record_end()

    async def _serve_in_background(
        self, call: OpenCall, request: ResponsesRequest, caller: Caller, send: Send
    ) -> None:
        await self._form.prepare(request, caller)
        assert self._store is not None
        assert self._runs is not None
        assert self._stream is not None
        call.is_resumable = True  # the client's going away cancels nothing
        record = await finish_even_if_cancelled(self._begin(call, request, caller))
        call.headers[REQUEST_ID_HEADER] = record.request_id
        if request.stream:
            await self._stream.serve(call, record, caller, send, after=-1)
        else:
            await self._calls.send_object(call, record.response, send)

    async def _begin(self, call: OpenCall, request: ResponsesRequest, caller: Caller) -> Record:
        """Queue, write the record, and wait for it behind the call. Raises FrontFailure."""
        assert self._store is not None
        assert self._runs is not None
        is_fail_fast = request.horde.availability_mode is ChatAvailabilityMode.FAIL_FAST
        _, wait = await submit_chat(self._calls, call, request, caller)
        assert wait is not None
        head = ResponseHead.of(request, wait.request_id, call.created)
        owner = build_owner(self._store.secret, caller.api_key or "")
        deadline = time.time() + call.accepted_at + self._background_seconds - time.monotonic()
        record = Record.of(request, head, build_response(head, "queued"), owner, deadline)
        try:
            lease = await self._store.create(record)
            if lease is None:
                return await self._find_repeated(record)
        except StoreUnavailable:
            await wait.cancel()
            raise build_unavailable("background") from None
        self._runs.start(
            Run(self._store, lease, record),
            caller,
            lambda failure: self._calls.describe(failure, call),
            is_fail_fast=is_fail_fast,
        )
        return record

    async def _find_repeated(self, record: Record) -> Record:
        """The record of the same operation, which was sent before."""
        assert self._store is not None
        found = await self._store.find(record.request_id, record.owner)
        if found is None:
            message = "The operation key stands for a request of another key."
            raise RequestRefused("operation_key_conflict", message, "horde.operation_key")
        return found
