# SPDX-License-Identifier: AGPL-3.0-or-later
"""Chat Completions as a form of the front. Source: docs/reference/chat_front.md."""

from collections.abc import Mapping, Sequence
from typing import ClassVar
from uuid import uuid4

from horde.json_text import JsonObject
from horde.oai.errors import ErrorAnswer
from horde.oai.forms import ChatAnswer, ChatForm, FormName
from horde.oai.mapping import (
    COMPLETION_ID_PREFIX,
    CompletedReply,
    CompletionHead,
    build_completion,
    build_dry_run_completion,
    get_quoted_model,
)
from horde.oai.relay import Delta, Remainder
from horde.oai.schema import ChatCompletionRequest
from horde.oai.sse import (
    DONE,
    build_completion_events,
    build_delta_events,
    build_error_events,
    encode_events,
)


class ChatCompletionAnswer(ChatAnswer):
    """A completion, or its chunks."""

    def __init__(self, head: CompletionHead) -> None:
        self._head = head
        self._has_begun = False  # the role was sent

    def render(self, reply: CompletedReply) -> JsonObject:
        """The completion."""
        return build_completion(self._head, reply)

    def write_deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Chunks of text, behind the role's."""
        events = build_delta_events(self._head, deltas, has_begun=self._has_begun)
        self._has_begun = True
        return encode_events(events)

    def finish(self, reply: CompletedReply, remainder: Remainder) -> bytes:
        """The last chunks and the end."""
        events = build_completion_events(self._head, reply, remainder, has_begun=self._has_begun)
        return encode_events(events) + DONE

    def fail(self, error: ErrorAnswer) -> bytes:
        """The error and the end."""
        return build_error_events(error)


class ChatCompletionForm(ChatForm[ChatCompletionRequest]):
    """`POST /v1/chat/completions`."""

    name: ClassVar[FormName] = FormName.CHAT

    def parse(self, body: object) -> ChatCompletionRequest:
        """Read a body."""
        return ChatCompletionRequest.parse(body)

    def begin_answer(
        self, request: ChatCompletionRequest, request_id: str, created: int
    ) -> ChatAnswer:
        """The completion of a request that the horde took."""
        head = CompletionHead(
            request_id=request_id,
            created=created,
            model=request.model,
            estimated_prompt_tokens=request.estimated_prompt_tokens,
            include_reasoning=request.horde.include_reasoning,
            include_usage=request.include_usage,
        )
        return ChatCompletionAnswer(head)

    def render_quote(
        self, request: ChatCompletionRequest, quote: Mapping[str, object], created: int
    ) -> JsonObject:
        """A completion without choices."""
        return build_dry_run_completion(
            quote,
            completion_id=f"{COMPLETION_ID_PREFIX}dryrun-{uuid4()}",
            created=created,
            model=request.model or get_quoted_model(quote),
        )
