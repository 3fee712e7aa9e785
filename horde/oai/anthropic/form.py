# SPDX-License-Identifier: AGPL-3.0-or-later
"""Anthropic's Messages API as a form of the front, and the count of a body's tokens.

Source: docs/reference/front_messages.md.
"""

from collections.abc import Mapping
from typing import ClassVar

from starlette.types import Send

from horde.chat_contract import ChatContextFit
from horde.json_text import JsonObject
from horde.oai.anthropic.answer import MessageAnswer
from horde.oai.anthropic.models import NamedModels, build_unknown_model
from horde.oai.anthropic.reply import MessageHead, build_quote_message, build_warm_message
from horde.oai.anthropic.request import MessagesRequest
from horde.oai.calls import Calls, OpenCall
from horde.oai.chat_service import ChatService
from horde.oai.errors import ErrorAnswer, NativeRefused
from horde.oai.forms import ChatAnswer, ChatForm, FormName
from horde.oai.mapping import get_quoted_model
from horde.oai.native import Caller
from horde.return_codes import ReturnCode


class MessagesForm(ChatForm[MessagesRequest]):
    """`POST /v1/messages`."""

    name: ClassVar[FormName] = FormName.MESSAGES

    def __init__(
        self, models: NamedModels, context_fit: ChatContextFit, ping_seconds: float
    ) -> None:
        self._models, self._context_fit = models, context_fit
        self.silence_seconds = ping_seconds

    def parse(self, body: object) -> MessagesRequest:
        """Read a body."""
        return MessagesRequest.parse(body, self._context_fit)

    async def prepare(self, request: MessagesRequest, caller: Caller) -> None:
        """Find the models that stand for the name, and drop hints that none of them takes."""
        targets = await self._models.resolve(request.model)
        native, thinking = request.native_body, request.thinking
        if len(targets) == 1:
            native["model"] = targets[0]
        else:
            del native["model"]
            native["models"] = list(targets)
        if thinking.effort is None:
            return
        if await self._models.takes_effort(targets):
            native["reasoning_effort"] = thinking.effort
        else:
            request.dropped_hints.append(thinking.effort_path)

    def begin_answer(self, request: MessagesRequest, request_id: str, created: int) -> ChatAnswer:
        """The message of a request that the horde took."""
        return MessageAnswer(MessageHead.read(request, request_id, created))

    def render_quote(
        self, request: MessagesRequest, quote: Mapping[str, object], created: int
    ) -> JsonObject:
        """A message without content."""
        return build_quote_message(request, quote, get_quoted_model(quote))


class MessagesService(ChatService[MessagesRequest]):
    """Serves messages."""

    async def serve(
        self, call: OpenCall, request: MessagesRequest, caller: Caller, send: Send
    ) -> None:
        """Answer a request. Raises FrontFailure while no byte of an answer is out."""
        request.front_id = call.front_id
        if request.max_tokens == 0:
            await self._calls.send_object(call, build_warm_message(request), send)
            return
        try:
            await super().serve(call, request, caller, send)
        except NativeRefused as refused:
            if refused.rc != ReturnCode.UNKNOWN_CHAT_MODEL:
                raise
            raise build_unknown_model(request.model, rc=refused.rc) from None


class CountService:
    """`POST /v1/messages/count_tokens`: an estimate; nothing is queued, and nobody asked."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    @property
    def name(self) -> FormName:
        """The form's name."""
        return FormName.MESSAGES

    def parse(self, body: object) -> MessagesRequest:
        """Read a decoded body. Raises RequestRefused."""
        return MessagesRequest.parse_for_estimate(body)

    def render_error(self, error: ErrorAnswer) -> JsonObject:
        """The body of an error; the front words those of this path by itself."""
        return error.build_body()

    async def serve(
        self,
        call: OpenCall,
        request: MessagesRequest,
        caller: Caller,
        send: Send,
    ) -> None:
        """Answer with the count."""
        body: JsonObject = {"input_tokens": request.estimated_prompt_tokens}
        await self._calls.send_object(call, body, send)
