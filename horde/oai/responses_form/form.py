# SPDX-License-Identifier: AGPL-3.0-or-later
"""Responses as a form of the front. Source: docs/reference/front_responses.md."""

from collections.abc import Mapping
from typing import ClassVar, Final
from uuid import uuid4

from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused
from horde.oai.forms import ChatForm, FormName
from horde.oai.mapping import Usage, build_quote_x_horde, get_quoted_tokens
from horde.oai.native import Caller
from horde.oai.responses_form.answer import (
    ResponseAnswer,
    ResponseHead,
    build_response,
    build_response_usage,
)
from horde.oai.responses_form.history import find_history
from horde.oai.responses_form.records import Record, build_owner, write_json
from horde.oai.responses_form.request import ResponsesRequest
from horde.oai.responses_form.store import ResponseStore, StoreUnavailable
from horde.oai.responses_form.stored_answer import StoredAnswer

ANONYMOUS_KEY: Final = "0000000000"


class ResponsesForm(ChatForm[ResponsesRequest]):
    """`POST /v1/responses`."""

    name: ClassVar[FormName] = FormName.RESPONSES

    def __init__(
        self, default_max_tokens: int, store: ResponseStore | None, budget_seconds: float
    ) -> None:
        self._default_max_tokens, self._store = default_max_tokens, store
        self._budget_seconds = budget_seconds

    def parse(self, body: object) -> ResponsesRequest:
        """Read a body."""
        return ResponsesRequest.parse(body, self._default_max_tokens)

    async def prepare(self, request: ResponsesRequest, caller: Caller) -> None:
        """Look up what came before, and whether the response can be stored."""
        param = request.find_storage_param()
        if param is None:
            return
        if request.store and caller.api_key == ANONYMOUS_KEY:
            message = "Nothing is stored for the anonymous key, which is everybody's."
            raise RequestRefused("key_not_allowed", message, param, status=403)
        if self._store is None:
            raise build_unavailable(param)
        request.owner = build_owner(self._store.secret, caller.api_key or "")
        try:
            if request.needs_items:
                items = await find_history(request, request.owner, self._store)
                request.converse(items)
            if request.store:
                await self._check_storable(request)
        except StoreUnavailable:
            raise build_unavailable(param) from None

    async def _check_storable(self, request: ResponsesRequest) -> None:
        assert self._store is not None
        size = len(write_json([request.stored_items, request.echo]))
        if size > self._store.max_bytes:
            message = f"A stored response may take {self._store.max_bytes} bytes, images included."
            raise RequestRefused("request_too_large", message, "store", status=413)
        await self._store.check()

    def begin_answer(
        self, request: ResponsesRequest, request_id: str, created: int
    ) -> ResponseAnswer:
        """The response of a request that the horde took."""
        head = ResponseHead.of(request, request_id, created)
        answer = ResponseAnswer(head)
        if request.store and self._store is not None:
            waiting = build_response(head, "in_progress")
            deadline = created + self._budget_seconds
            record = Record.of(request, head, waiting, request.owner, deadline)
            answer = StoredAnswer(head, self._store, record)
        request.answer = answer
        return answer

    def render_quote(
        self, request: ResponsesRequest, quote: Mapping[str, object], created: int
    ) -> JsonObject:
        """A response without output."""
        x_horde = build_quote_x_horde(quote)
        tokens = get_quoted_tokens(quote)
        counts: Usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        return build_response(
            ResponseHead.of(request, f"dryrun-{uuid4()}", created),
            "completed",
            completed_at=created,
            usage=build_response_usage(counts),
            x_horde=x_horde,
        )


def build_unavailable(param: str | None) -> RequestRefused:
    """503 of what needs the store of responses while it cannot be reached."""
    message = "Responses cannot be stored or looked up now. Send the whole conversation as 'input'."
    return RequestRefused(
        "response_store_unavailable", message, param, status=503, headers={"Retry-After": "5"}
    )
