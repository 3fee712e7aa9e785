# SPDX-License-Identifier: AGPL-3.0-or-later
"""Responses as a form of the front. Source: docs/reference/front_responses.md."""

from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import uuid4

from horde.chat_contract import JsonObject
from horde.oai.errors import RequestRefused
from horde.oai.forms import ChatForm, FormName
from horde.oai.mapping import build_quote_x_horde
from horde.oai.native import Caller
from horde.oai.responses_form.answer import (
    ResponseAnswer,
    ResponseFacts,
    build_response,
    build_response_usage,
)
from horde.oai.responses_form.request import ResponsesRequest


class ResponsesForm(ChatForm[ResponsesRequest]):
    """`POST /v1/responses`."""

    name: ClassVar[FormName] = FormName.RESPONSES

    def __init__(self, default_max_tokens: int) -> None:
        self._default_max_tokens = default_max_tokens

    def parse(self, body: object) -> ResponsesRequest:
        """Read a body."""
        return ResponsesRequest.parse(body, self._default_max_tokens)

    async def prepare(self, request: ResponsesRequest, caller: Caller) -> None:
        """Refuse what has to be stored or looked up, since nothing is stored."""
        param = request.find_storage_param()
        if param is not None:
            raise build_store_unavailable(param)

    def begin_answer(
        self, request: ResponsesRequest, request_id: str, created: int
    ) -> ResponseAnswer:
        """The response of a request that the horde took."""
        return ResponseAnswer(ResponseFacts.of(request, request_id, created))

    def render_quote(
        self, request: ResponsesRequest, quote: Mapping[str, Any], created: int
    ) -> JsonObject:
        """A response without output."""
        x_horde = build_quote_x_horde(quote)
        tokens = x_horde["resolved"].get("estimated_prompt_tokens") or 0
        counts = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        return build_response(
            ResponseFacts.of(request, f"dryrun-{uuid4()}", created),
            "completed",
            completed_at=created,
            usage=build_response_usage(counts),
            x_horde=x_horde,
        )


def build_store_unavailable(param: str | None) -> RequestRefused:
    """503 of what needs the store of responses while it cannot be reached."""
    message = "Responses cannot be stored or looked up now. Send the whole conversation as 'input'."
    return RequestRefused(
        "response_store_unavailable", message, param, status=503, headers={"Retry-After": "5"}
    )
