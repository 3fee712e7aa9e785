# SPDX-License-Identifier: AGPL-3.0-or-later
"""The front as an ASGI application: its routes, and the one place where failures become OpenAI's
errors.

Source: docs/reference/chat_front.md.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final
from uuid import uuid4

from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from horde import metrics
from horde.chat_contract import ChatContextFit
from horde.front_config import FrontConfig
from horde.logger import build_failure_fields, get_logger
from horde.oai.answers import (
    add_headers,
    build_cors_headers,
    build_preflight_headers,
    send_json,
)
from horde.oai.anthropic import errors as anthropic_errors
from horde.oai.anthropic.form import CountService, MessagesForm, MessagesService
from horde.oai.anthropic.models import NamedModels
from horde.oai.bodies import ClientGone
from horde.oai.calls import Calls, OpenCall, Service, keep_name
from horde.oai.chat_form import ChatCompletionForm
from horde.oai.chat_service import ChatService
from horde.oai.errors import (
    NO_RETRY,
    ErrorAnswer,
    FrontFailure,
    NativeRefused,
    RequestRefused,
    WaitFailed,
    WaitFailure,
    build_defect,
    build_gap_answer,
    build_gap_message,
    build_native_refusal,
    describe_speed_limit,
    locate_names,
    shorten_param,
)
from horde.oai.hub import RedisHub
from horde.oai.methods import (
    CALL_KEY,
    UNKNOWN_URL,
    Handler,
    Methods,
    NativeMethods,
    UnknownRoute,
    refuse_unknown_route,
    take_authority_off,
)
from horde.oai.models import ModelList, TextModels
from horde.oai.native import NativeClient
from horde.oai.page import build_page_handlers, send_missing_page, wants_page
from horde.oai.pops import Pops
from horde.oai.request_log import log_request
from horde.oai.responses_form.parts import Responses
from horde.oai.signals import PollingHub, SignalHub
from horde.oai.text_service import TextService
from horde.oai.wait_texts import CANCELLED_SENTENCE, FAULT_ROWS, NOT_TAKEN, WAIT_ROWS
from horde.oai.work_feed import WorkFeed
from horde.return_codes import ReturnCode

logger = get_logger(__name__)

POP_PATH: Final = "/api/v2/generate/text/pop"  # as workers call the API
NO_GENERATION_RC: Final = "ChatRequestNoGeneration"


class ChatFrontError(Exception):
    """An error as a client of the front gets it."""

    def __init__(self, answer: ErrorAnswer) -> None:
        super().__init__(answer.code)
        self.answer = answer


# --- failures as errors
# -----------------------------------------------------------------------------------------------


def build_error(failure: FrontFailure, locate: Callable[[str], str] = keep_name) -> ChatFrontError:
    """The error of a failure; `locate` gives the client's own name of what the horde calls a
    parameter.
    """
    error = _build_error(failure)
    answer = error.answer
    if isinstance(failure, RequestRefused):  # the front's own have the client's names
        return error
    return ChatFrontError(
        replace(
            answer,
            param=None if answer.param is None else shorten_param(locate(answer.param)),
            message=locate_names(answer.message, locate),
        )
    )


def _build_error(failure: FrontFailure) -> ChatFrontError:
    if isinstance(failure, WaitFailed):
        return _wait_error(failure)
    if isinstance(failure, NativeRefused):
        return _native_error(failure)
    if isinstance(failure, RequestRefused):
        return ChatFrontError(
            ErrorAnswer(
                status=failure.status,
                code=failure.code,
                message=failure.message,
                param=failure.param,
                metadata=failure.metadata,
                headers=failure.headers,
            )
        )
    return ChatFrontError(
        ErrorAnswer(
            status=502,
            code="upstream_unavailable",
            message="The horde cannot be reached. Try again in a moment.",
        )
    )


def _native_error(refused: NativeRefused) -> ChatFrontError:
    """The error of a refusal before anything was queued."""
    if refused.rc == ReturnCode.CHAT_KUDOS_CAP_EXCEEDED:
        return _kudos_cap_error(refused)
    if refused.rc == ReturnCode.NO_ELIGIBLE_WORKER:
        return _no_eligible_worker_error(refused)
    return ChatFrontError(build_native_refusal(refused))


_KUDOS_NUMBERS: Final = re.compile(r"is (\d+), above its horde\.max_kudos of (\d+)")


def _kudos_cap_error(refused: NativeRefused) -> ChatFrontError:
    """400 with the estimate and the cap, which stand only in the native text."""
    metadata: dict[str, object] = {"rc": refused.rc}
    numbers = _KUDOS_NUMBERS.search(refused.message)
    if numbers is not None:
        metadata |= {"kudos_estimate": int(numbers.group(1)), "max_kudos": int(numbers.group(2))}
    return ChatFrontError(
        ErrorAnswer(
            status=400,
            code="max_kudos_exceeded",
            message=refused.message,
            param="horde.max_kudos",
            metadata=metadata,
        )
    )


def _no_eligible_worker_error(refused: NativeRefused) -> ChatFrontError:
    reason = refused.body.get("impossible_reason")
    if not isinstance(reason, Mapping):
        metadata = {"rc": refused.rc}
        message = refused.message
        return ChatFrontError(
            ErrorAnswer(
                status=503,
                code="no_worker_available",
                message=message,
                param="model",
                metadata=metadata,
                headers=NO_RETRY,
            )
        )
    return ChatFrontError(
        build_gap_answer(reason, refused.message, {"rc": refused.rc, "impossible_reason": reason})
    )


def _wait_error(failed: WaitFailed) -> ChatFrontError:
    """The error of a queued request that gives no completion."""
    details = failed.details
    metadata: dict[str, object] = {"request_id": failed.request_id}
    if failed.kind is WaitFailure.DECLARATION_GAP:
        reason = details.impossible_reason or {}
        message = (
            f"No worker can serve this request: {build_gap_message(reason)} {CANCELLED_SENTENCE}"
        )
        return ChatFrontError(
            replace(build_gap_answer(reason, message, metadata), headers=NO_RETRY)
        )
    status, code, param, message = WAIT_ROWS[failed.kind]
    if failed.kind is WaitFailure.FAULTED:
        message = details.fault_reason or message
        status, code, param, remedy = FAULT_ROWS.get(message, (status, code, param, ""))
        message += remedy
        if details.fault_rc == ReturnCode.CHAT_SUBMIT_NONCONFORMANT:
            code = "nonconformant_reply"
    if failed.kind is WaitFailure.NO_GENERATION:
        metadata["rc"] = NO_GENERATION_RC
    elif details.fault_rc is not None:
        metadata["rc"] = details.fault_rc
    if (
        failed.kind in {WaitFailure.DEADLINE, WaitFailure.FAIL_FAST_WAIT}
        and details.wait_time is not None
    ):
        metadata["wait_time"] = details.wait_time
    if failed.kind is WaitFailure.DEADLINE and details.queue_position is not None:
        metadata["queue_position"] = details.queue_position
    if failed.kind in NOT_TAKEN and details.largest_max_length is not None:
        param, metadata["largest_max_length"] = "max_tokens", details.largest_max_length
        message = f"{describe_speed_limit(details.largest_max_length)} {CANCELLED_SENTENCE}"
    # Another try would queue, and be charged, again.
    return ChatFrontError(
        ErrorAnswer(
            status=status,
            code=code,
            message=message,
            param=param,
            metadata=metadata,
            headers=NO_RETRY,
        )
    )


def _internal_error(request_id: str | None) -> ChatFrontError:
    return ChatFrontError(build_defect(request_id))


# --- the frame around every route
# -------------------------------------------------------------------------------------


class Frame:
    """Names each request, answers its failures, and lets pages of other origins read the
    answers.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other scopes go through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = take_authority_off(scope)
        headers = Headers(scope=scope)
        front_id = f"req_{uuid4().hex}"
        common = {
            "x-request-id": front_id,
            **build_cors_headers(self._origins, headers.get("origin")),
        }
        call = scope[CALL_KEY] = OpenCall(front_id=front_id)
        is_anthropic = anthropic_errors.is_spoken(
            scope["path"], headers.get(anthropic_errors.VERSION_HEADER)
        )
        sent_status: int | None = None

        async def send_with_common(message: Message) -> None:
            nonlocal sent_status
            if message["type"] == "http.response.start":
                sent_status = message["status"]
                message = add_headers(message, common)
                if is_anthropic:
                    own = anthropic_errors.build_headers(call.headers, front_id)
                    message = add_headers(message, own)
            await send(message)

        error: ChatFrontError | None = None
        try:
            await self._serve(scope, receive, send_with_common, headers)
        except ClientGone:
            call.phase = "gone"
        except ChatFrontError as raised:
            error = raised
        # The handler of last resort: a defect must not be a page of the server.
        except Exception as defect:  # noqa: BLE001
            logger.error(
                "horde.oai.defect", extra={"request_id": front_id, **build_failure_fields(defect)}
            )
            error = _internal_error(call.native_id)
        if error is not None:
            metrics.oai_errors.add(
                1,
                {
                    "code": error.answer.code,
                    "phase": call.phase if call.phase != "gone" else "wait",
                    "form": call.form,
                },
            )
            if error.answer.code == UNKNOWN_URL and wants_page(scope, headers):
                await send_missing_page(send_with_common, scope["path"])
            elif sent_status is None:
                status, body = error.answer.status, call.render_error(error.answer)
                if is_anthropic:
                    status = anthropic_errors.get_status(error.answer)
                    body = anthropic_errors.build_error_body(error.answer, front_id)
                answered = {**call.headers, **error.answer.headers}
                await send_json(send_with_common, status, body, answered)
        log_request(call, headers, front_id, sent_status, None if error is None else error.answer)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        call: OpenCall = scope[CALL_KEY]
        try:
            if scope["method"] == "OPTIONS":
                scope["horde.oai.preflight"] = build_preflight_headers(self._origins, headers)
            if scope["path"].endswith("\n"):  # the end of a route's pattern matches in front of it
                await refuse_unknown_route(scope, receive, send)
            await self._app(scope, receive, send)
        except FrontFailure as failure:
            raise build_error(failure, call.locate) from None


# --- routes
# --------------------------------------------------------------------------------------------------


def create_front_app(config: FrontConfig, hub: SignalHub | None = None) -> Starlette:
    """The front with its connections, which open in its lifespan. A hub given replaces that of the
    configuration.

    `app.state.calls` and `app.state.pops` are what a server tells that it is shutting down.
    """
    front = _Front(config, hub or _build_hub(config))
    routes = [
        Route("/v1/chat/completions", Methods(POST=front.chat)),
        Route("/v1/chat/completions/", Methods(POST=front.chat)),
        Route("/v1/completions", Methods(POST=front.completions)),
        Route("/v1/completions/", Methods(POST=front.completions)),
        Route("/v1/messages", Methods(POST=front.messages)),
        Route("/v1/messages/", Methods(POST=front.messages)),
        Route("/v1/messages/count_tokens", Methods(POST=front.count_tokens)),
        Route("/v1/responses", Methods(POST=front.responses)),
        Route("/v1/responses/", Methods(POST=front.responses)),
        Route(POP_PATH, NativeMethods(POST=front.pop)),
        *(Route(f"/v1/responses/{name}", UnknownRoute()) for name in ("compact", "input_tokens")),
        Route("/v1/responses/{response_id}", Methods(**front.response)),
        Route("/v1/responses/{response_id}/cancel", Methods(POST=front.cancel_response)),
        Route("/v1/responses/{response_id}/input_items", Methods(GET=front.list_response_input)),
        Route("/v1/models", Methods(GET=front.answer_models)),
        Route("/v1/models/{model:path}", Methods(GET=front.answer_model)),
        Route("/health", Methods(GET=front.answer_health)),
        Route("/health/ready", Methods(GET=front.answer_readiness)),
        *(
            Route(path, Methods(GET=handler))
            for path, handler in build_page_handlers(config).items()
        ),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Frame, origins=config.cors_origins)],
        lifespan=front.run,
    )
    app.router.redirect_slashes = False  # a redirect loses the body of a POST
    app.router.default = refuse_unknown_route
    app.state.calls, app.state.pops = front.calls, front.pops
    return app


def _build_hub(config: FrontConfig) -> SignalHub:
    return PollingHub() if config.redis_url is None else RedisHub(config.redis_url)


def _log_failed_task(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what nobody waited for; asyncio's own words hold the error's text."""
    error = context.get("exception")
    fields = {} if error is None else build_failure_fields(error)
    logger.error("horde.oai.task_failed", extra=fields)


class _Front:
    """The handlers and what they share."""

    def __init__(self, config: FrontConfig, hub: SignalHub) -> None:
        self._config, self._hub = config, hub
        self._native = NativeClient(config)
        self._models = ModelList(self._native, config.models_cache_seconds)
        self.calls = Calls(config, self._native, hub, _describe)
        self.pops = Pops(config, self._native, self.calls.bodies)
        self.pop: Handler = self.pops.answer
        self._feed = WorkFeed(config.redis_url, self.pops.take_work, self.pops.set_health)
        self.chat = self._serve(ChatService(self.calls, ChatCompletionForm()))
        self._responses = Responses(config, self.calls)
        self.responses = self._serve(self._responses.service)
        stored = self._responses.stored
        self.response = {
            "GET": _hand_call(stored.get),
            "DELETE": _hand_call(stored.delete),
        }
        self.cancel_response = _hand_call(stored.cancel)
        self.list_response_input = _hand_call(stored.list_input)
        text_models = TextModels(self._native, config.models_cache_seconds)
        self.completions = self._serve(
            TextService(self.calls, text_models, config.completions_max_prompts)
        )

        self._named_models = NamedModels(self._models, config.model_map)
        self.messages = self._serve(
            MessagesService(
                self.calls,
                MessagesForm(
                    self._named_models,
                    ChatContextFit(config.messages_context_fit),
                    config.messages_ping_seconds,
                ),
            )
        )
        self.count_tokens = self._serve(CountService(self.calls))

    @contextlib.asynccontextmanager
    async def run(self, _app: Starlette) -> AsyncIterator[None]:
        """Start and end what serves the requests."""
        if not self._config.proxy_passkey:
            logger.warning(
                "horde.oai.no_passkey",
                extra={"effect": "all clients of this front share its limits by address"},
            )
        asyncio.get_running_loop().set_exception_handler(_log_failed_task)
        await self._hub.start()
        self._feed.start()
        await self._responses.start()
        try:
            yield
        finally:
            await self._feed.stop()
            await self.pops.close()
            await self.calls.close()
            await self._responses.close()
            await self._hub.close()
            await self._native.close()

    def _serve(self, service: Service[Any]) -> Handler:
        """The handler of a form's calls."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await self.calls.answer(service, scope[CALL_KEY], scope, receive, send)

        return answer

    async def answer_models(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """GET /v1/models, in the form of the API whose version the client names."""
        if anthropic_errors.VERSION_HEADER in Headers(scope=scope):
            query = QueryParams(scope["query_string"])
            body: Mapping[str, object] = await self._named_models.list_page(query)
        else:
            body = await self._models.get_list()
        await send_json(send, 200, body, {})

    async def answer_model(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """GET /v1/models/{id}, in the form of the API whose version the client names."""
        model = scope["path_params"]["model"]
        if anthropic_errors.VERSION_HEADER in Headers(scope=scope):
            body: Mapping[str, object] = await self._named_models.get_entry(model)
        else:
            body = await self._models.get_card(model)
        await send_json(send, 200, body, {})

    async def answer_health(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """GET /health: the process serves; nothing else is asked."""
        await send_json(send, 200, {"status": "ok"}, {})

    async def answer_readiness(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """GET /health/ready: without the native API nothing can be served, without Redis everything
        but live deltas.
        """
        is_native_reachable, is_redis_reachable = (
            await self._native.is_reachable(),
            await self._hub.is_reachable(),
        )
        body = {
            "status": "ready" if is_native_reachable else "not_ready",
            "native": is_native_reachable,
            "redis": is_redis_reachable,
            "store": await self._responses.is_store_reachable(),
        }
        await send_json(send, 200 if is_native_reachable else 503, body, {})


def _hand_call(
    answer: Callable[[Scope, Receive, Send, OpenCall], Awaitable[None]],
) -> Handler:
    """A handler that also gets its call."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(scope, receive, send, scope[CALL_KEY])

    return handle


def _describe(failure: FrontFailure, call: OpenCall) -> ErrorAnswer:
    return build_error(failure, call.locate).answer
