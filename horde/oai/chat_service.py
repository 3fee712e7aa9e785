# SPDX-License-Identifier: AGPL-3.0-or-later
"""One chat request of the horde for one call, in whatever form the call came: submitted, waited for
and answered.

Source: docs/reference/chat_front.md, "The life of a completion".
"""

from typing import Final

from starlette.types import Send

from horde.json_text import JsonObject
from horde.oai.calls import Calls, OpenCall
from horde.oai.errors import ErrorAnswer
from horde.oai.forms import ChatAnswer, ChatForm, ChatFormRequest, FormName
from horde.oai.mapping import CompletedReply
from horde.oai.native import Caller
from horde.oai.relay import Relay
from horde.oai.streaming import stream_reply
from horde.oai.submitting import submit_chat
from horde.oai.waiting import RequestWait, wait_for_first_status, wait_for_reply

REQUEST_ID_HEADER: Final = "x-horde-request-id"
MODEL_HEADER: Final = "x-horde-model"  # of a stream only when one model was asked for


class ChatService[R: ChatFormRequest]:
    """Serves the calls of one form over chat requests."""

    def __init__(self, calls: Calls, form: ChatForm[R]) -> None:
        self._calls, self._form = calls, form

    @property
    def name(self) -> FormName:
        """The form's name."""
        return self._form.name

    def parse(self, body: object) -> R:
        """Read a decoded body. Raises RequestRefused."""
        return self._form.parse(body)

    def render_error(self, error: ErrorAnswer) -> JsonObject:
        """The body of an error."""
        return self._form.render_error(error)

    async def serve(self, call: OpenCall, request: R, caller: Caller, send: Send) -> None:
        """Answer a request. Raises FrontFailure while no byte of an answer is out."""
        await self._form.prepare(request, caller)
        only_model = request.native_body.get("model")
        submitted, wait = await submit_chat(self._calls, call, request, caller)
        if wait is None:
            quote = self._form.render_quote(request, submitted.body, call.created)
            await self._calls.send_object(call, quote, send)
            return
        call.headers[REQUEST_ID_HEADER] = wait.request_id
        if isinstance(only_model, str):
            _name_model(call, only_model)
        answer = self._form.begin_answer(request, wait.request_id, call.created)
        async with self._calls.waiting(call):
            await answer.begin()
            reply = await self._deliver(call, request, answer, wait, send)
        if reply is not None:
            self._calls.record_delivered(
                call, finish_reason=reply.finish_reason, is_lowered=reply.is_lowered
            )
            call.served_by = (reply.worker_id, reply.model)

    async def _deliver(
        self,
        call: OpenCall,
        request: R,
        answer: ChatAnswer,
        wait: RequestWait[CompletedReply],
        send: Send,
    ) -> CompletedReply | None:
        """Wait for the reply and send it; None when an error ended an open stream."""
        async with self._calls.hub.subscribe(
            wait.request_id, with_progress=call.is_stream
        ) as subscription:
            first_reply = await wait_for_first_status(wait, subscription)
            if call.is_stream:
                return await stream_reply(
                    stream=self._calls.open_stream(call, send, self._form.silence_seconds),
                    answer=answer,
                    text=Relay(
                        requested_model=request.model,
                        include_reasoning=request.include_reasoning,
                    ),
                    wait=wait,
                    subscription=subscription,
                    describe=lambda failure: self._calls.describe(failure, call),
                    first_reply=first_reply,
                )
            reply = first_reply
            if reply is None:
                reply = await wait_for_reply(wait, subscription)
            _name_model(call, reply.model)
            await answer.settle(reply, None)
            await self._calls.send_object(call, answer.render(reply), send)
            return reply


def _name_model(call: OpenCall, model: str) -> None:
    """Say in the headers which model serves, unless its name is none that fits there."""
    if model.isprintable():
        call.headers[MODEL_HEADER] = model
