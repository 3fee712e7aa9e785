# SPDX-License-Identifier: AGPL-3.0-or-later
"""What can be asked of a stored response: the object, its events, its end, its input, its deletion.

Source: docs/reference/front_responses.md, "Stored responses".
"""

import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from horde import metrics
from horde.json_text import JsonObject
from horde.oai.calls import Calls, OpenCall
from horde.oai.errors import ErrorAnswer, FrontFailure, RequestRefused, shorten_param
from horde.oai.forms import FormName
from horde.oai.native import Caller
from horde.oai.responses_form.form import build_unavailable
from horde.oai.responses_form.records import Record, build_owner, find_request_id
from horde.oai.responses_form.runs import Runs
from horde.oai.responses_form.schema import check_include
from horde.oai.responses_form.store import ResponseStore, StoreUnavailable
from horde.oai.responses_form.stored_stream import StoredStream

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 100
_NUMBER: Final = re.compile(r"[0-9]{1,9}")


class StoredResponses:
    """The routes below `/v1/responses/{id}`; without a store each answers that there is none."""

    def __init__(
        self,
        calls: Calls,
        store: ResponseStore | None,
        runs: Runs | None,
        stream: StoredStream | None,
    ) -> None:
        self._calls, self._store, self._runs, self._stream = calls, store, runs, stream

    async def get(self, scope: Scope, receive: Receive, send: Send, call: OpenCall) -> None:
        """GET /v1/responses/{id}."""

        async def serve(caller: Caller) -> None:
            query = QueryParams(scope["query_string"])
            after = _read_get_query(query)
            record = await self._require(scope, caller)
            if record.is_running:
                await self._take_over(record, caller, call)
            if after is None:
                await self._calls.send_object(call, record.response, send)
                return
            if not record.is_streamed:
                raise RequestRefused(
                    "invalid_value",
                    "Invalid value: 'stream' needs a response made with 'background' and 'stream'.",
                    "stream",
                )
            if "starting_after" in query:
                metrics.oai_resumed_streams.add(1)
            assert self._stream is not None
            await self._stream.serve(call, record, caller, send, after=after)

        await self._answer(scope, receive, call, serve)

    async def delete(self, scope: Scope, receive: Receive, send: Send, call: OpenCall) -> None:
        """DELETE /v1/responses/{id}."""

        async def serve(caller: Caller) -> None:
            record = await self._require(scope, caller)
            store, runs = self._require_parts()
            try:
                if record.is_running:
                    await runs.cancel(record, caller)
                is_deleted = await store.delete(record)
            except StoreUnavailable:
                raise build_unavailable(None) from None
            if not is_deleted:
                raise _build_missing(scope)
            body = {"id": record.response["id"], "object": "response", "deleted": True}
            await self._calls.send_object(call, body, send)

        await self._answer(scope, receive, call, serve)

    async def cancel(self, scope: Scope, receive: Receive, send: Send, call: OpenCall) -> None:
        """POST /v1/responses/{id}/cancel."""

        async def serve(caller: Caller) -> None:
            record = await self._require(scope, caller)
            _, runs = self._require_parts()
            if not record.is_background:
                message = "Only a response made with 'background' can be cancelled."
                raise RequestRefused("invalid_value", message)
            if record.is_running:
                try:
                    ended = await runs.cancel(record, caller)
                except StoreUnavailable:
                    raise build_unavailable(None) from None
                if ended is None:
                    raise _build_missing(scope)
                record = ended
            await self._calls.send_object(call, record.response, send)

        await self._answer(scope, receive, call, serve)

    async def list_input(self, scope: Scope, receive: Receive, send: Send, call: OpenCall) -> None:
        """GET /v1/responses/{id}/input_items."""

        async def serve(caller: Caller) -> None:
            query = QueryParams(scope["query_string"])
            limit = _read_limit(query)
            is_ascending = _read_order(query)
            _check_query_include(query)
            record = await self._require(scope, caller)
            items = record.input if is_ascending else record.input[::-1]
            page = build_page(items, query.get("after"), limit)
            await self._calls.send_object(call, page, send)

        await self._answer(scope, receive, call, serve)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        call: OpenCall,
        serve: Callable[[Caller], Coroutine[Any, Any, None]],
    ) -> None:
        await self._calls.answer_bare(FormName.RESPONSES, call, scope, receive, serve)

    async def _require(self, scope: Scope, caller: Caller) -> Record:
        """The record that a path names. Raises RequestRefused."""
        store, _ = self._require_parts()
        request_id = find_request_id(scope["path_params"]["response_id"])
        if request_id is None:
            raise _build_missing(scope)
        try:
            record = await store.find(request_id, build_owner(store.secret, caller.api_key or ""))
        except StoreUnavailable:
            raise build_unavailable(None) from None
        if record is None:
            raise _build_missing(scope)
        return record

    def _require_parts(self) -> tuple[ResponseStore, Runs]:
        if self._store is None or self._runs is None:
            raise build_unavailable(None)
        return self._store, self._runs

    async def _take_over(self, record: Record, caller: Caller, call: OpenCall) -> None:
        """See to it that somebody waits for a running response."""
        _, runs = self._require_parts()

        def describe(failure: FrontFailure) -> ErrorAnswer:
            return self._calls.describe(failure, call)

        try:
            await runs.take_over(record, caller, describe)
        except StoreUnavailable:
            raise build_unavailable(None) from None


def _build_missing(scope: Scope) -> RequestRefused:
    """The same for an id that never was and for one of another key."""
    shown = shorten_param(scope["path_params"]["response_id"])
    message = (
        f"Response with id '{shown}' not found. Responses are kept for a while, when they are made"
        " with store: true."
    )
    return RequestRefused("response_not_found", message, status=404)


# --- queries
# ------------------------------------------------------------------------------------------


def _read_get_query(query: QueryParams) -> int | None:
    """The number behind which events are wanted; None for the object."""
    _check_query_include(query)
    is_stream = query.get("stream", "false")
    if is_stream not in ("true", "false"):
        raise _invalid("stream", "has to be true or false")
    after = query.get("starting_after")
    if after is not None and is_stream != "true":
        message = "'starting_after' is only allowed with 'stream=true'."
        raise RequestRefused("conflicting_parameters", message, "starting_after")
    if is_stream != "true":
        return None
    if after is None:
        return -1
    if _NUMBER.fullmatch(after) is None:
        raise _invalid("starting_after", "has to be the number of an event")
    return int(after)


def _check_query_include(query: QueryParams) -> None:
    names = [*query.getlist("include"), *query.getlist("include[]")]
    check_include("include", names)


def _read_limit(query: QueryParams) -> int:
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if _NUMBER.fullmatch(limit) is None or not 1 <= int(limit) <= MAX_LIMIT:
        raise _invalid("limit", f"has to be a whole number from 1 to {MAX_LIMIT}")
    return int(limit)


def _read_order(query: QueryParams) -> bool:
    """Whether the oldest item comes first."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _invalid("order", "has to be asc or desc")
    return order == "asc"


def _invalid(name: str, expectation: str) -> RequestRefused:
    return RequestRefused("invalid_value", f"Invalid value: '{name}' {expectation}.", name)


def build_page(items: Sequence[JsonObject], after: str | None, limit: int) -> JsonObject:
    """Items behind `after`, which are in their order already. Raises RequestRefused."""
    start = 0
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise _invalid("after", "names no item of this response")
        start = places[0] + 1
    page = list(items[start : start + limit])
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(items),
    }
