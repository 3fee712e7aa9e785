# SPDX-License-Identifier: AGPL-3.0-or-later
"""The text routes and the chat routes over them: submit, status, cancel, pop, submit of a reply.

Each method is the list of its steps in the order in which they may refuse; the steps live in the
neighbours. Source: docs/reference/text_requests.md and docs/reference/chat_requests.md.
"""

from collections.abc import Mapping

from flask_restx import Api, Namespace, Resource

from horde.actions.cancel import cancel_request
from horde.actions.load_images import load_chat_images
from horde.actions.pop import Pop, pop_text_jobs
from horde.actions.progress import parse_progress_post, take_progress
from horde.actions.queue_chat import ensure_model_known, queue_chat
from horde.actions.queue_requests import Queued, RequestContext, activate
from horde.actions.queue_text import queue_text
from horde.actions.status import read_sent_request, show_request_status
from horde.actions.store_objects import prepare_messages_offload, upload_source_images
from horde.actions.submit import Submit, parse_text_body, prepare_chat_submission, submit_job
from horde.apis.requests import (
    build_waiting_headers,
    get_client_address,
    get_client_agent,
    get_config,
    get_peer_address,
    is_passed_on_by_front,
    is_proxied,
    read_json_body,
    read_json_object,
    require_api_key,
)
from horde.apis.swagger import (
    BODY_REFUSALS,
    build_answer_model,
    build_body_model,
    document_refusals,
)
from horde.chat.declaration import parse_chat_declaration_fields
from horde.chat.request import parse_chat_request
from horde.chat_contract import MAX_CHAT_BODY_BYTES
from horde.classes.kobold.text_request import (
    parse_text_request,
)
from horde.clock import utcnow
from horde.json_text import JsonObject
from horde.limiter import (
    count_refused_progress,
    exempt_from_limits,
    limit_chat_submit,
    limit_pop,
    limit_status_delete,
    limit_status_read,
    limit_submit,
    limit_text_submit,
    whitelist_address,
)
from horde.shapes.base import parse_shape
from horde.shapes.jobs import (
    PopAnswer,
    PopBody,
    ProgressAnswer,
    ProgressBody,
    SubmitAnswer,
    SubmitBody,
    TextPopBody,
)
from horde.shapes.requests import (
    ChatRequestBody,
    ChatStatus,
    RequestAccepted,
    RequestQuote,
    SentTextRequest,
    TextRequestBody,
    TextStatus,
)
from horde.text_work import WORK_LEFT_HEADER

namespace = Namespace(
    "generate",
    path="/v2/generate",
    description="Text and chat requests and the jobs they become.",
)
text_request = build_body_model(namespace, TextRequestBody, "GenerationInputKobold")
chat_request = build_body_model(namespace, ChatRequestBody, "ChatRequest")
sent_text_request = build_answer_model(namespace, SentTextRequest, "SentRequestKobold")
accepted = build_answer_model(namespace, RequestAccepted, "RequestAsync")
quote = build_answer_model(namespace, RequestQuote)
text_status = build_answer_model(namespace, TextStatus, "RequestStatusKobold")
chat_status = build_answer_model(namespace, ChatStatus, "RequestStatusChat")
pop_input = build_body_model(namespace, PopBody, "PopInputKobold")
popped = build_answer_model(namespace, PopAnswer, "GenerationPayloadKobold")
submit_input = build_body_model(namespace, SubmitBody, "SubmitInputKobold")
submitted = build_answer_model(namespace, SubmitAnswer, "GenerationSubmitted")
progress_input = build_body_model(namespace, ProgressBody, "ProgressInputKobold")
progress_accepted = build_answer_model(namespace, ProgressAnswer, "ProgressAccepted")


@namespace.route("/text/async")
class TextAsyncGenerate(Resource):
    """Queue a text request."""

    @namespace.expect(text_request)
    @namespace.param(
        "apikey", "The key of the account or shared key that pays.", _in="header", required=True
    )
    @namespace.response(202, "Queued", accepted)
    @namespace.response(200, "Dry run", quote)
    @document_refusals(namespace, *BODY_REFUSALS, 401, 403, 404)
    @limit_text_submit
    def post(self) -> tuple[Mapping[str, object], int]:
        """Queue a text request. 202 {id, kudos, message?}; 200 {kudos, resolved} for a dry run."""
        text = parse_text_request(read_json_object())
        return answer_queued(queue_text(text, build_request_context()))


def build_request_context() -> RequestContext:
    """What the request at hand comes with beside its body; raises PayloadInvalid without a key."""
    return RequestContext(
        api_key=require_api_key(),
        address=get_client_address(),
        is_proxied=is_proxied(),
        client_agent=get_client_agent(),
        config=get_config(),
        widen_limits=lambda: whitelist_address(get_client_address()),
    )


def answer_queued(queued: Queued) -> tuple[Mapping[str, object], int]:
    """202 for a new request, 200 for a dry run and a repeated operation key."""
    return queued.body, 202 if queued.is_new else 200


def read_chat_request_body() -> object:
    """The decoded body of a chat submit; raises RequestTooLarge beyond 36 MiB, before anything is
    parsed.
    """
    return read_json_body(MAX_CHAT_BODY_BYTES, keeps_number_forms=True)


@namespace.route("/chat/async")
class ChatAsyncGenerate(Resource):
    """Queue a chat request."""

    @namespace.expect(chat_request)
    @namespace.param(
        "apikey", "The key of the account or shared key that pays.", _in="header", required=True
    )
    @namespace.response(202, "Queued", accepted)
    @namespace.response(200, "Dry run or repeated operation key", quote)
    @document_refusals(namespace, *BODY_REFUSALS, 401, 403, 404)
    @limit_chat_submit
    def post(self) -> tuple[Mapping[str, object], int]:
        """Queue a chat request. 202 {id, kudos, message?}; 200 for a dry run or a repeated
        operation key.
        """
        chat = parse_chat_request(read_chat_request_body())
        return answer_queued(queue_chat(chat, build_request_context()))

    ensure_model_known = staticmethod(ensure_model_known)
    load_chat_images = staticmethod(load_chat_images)
    prepare_messages_offload = staticmethod(prepare_messages_offload)
    upload_source_images = staticmethod(upload_source_images)
    activate_waiting_prompt = staticmethod(activate)


@namespace.route("/text/status/<string:id>")
class TextAsyncStatus(Resource):
    """Follow or cancel a text request."""

    @namespace.response(200, "The status", text_status)
    @document_refusals(namespace, 404, 429, 503)
    @limit_status_read
    def get(self, id: str) -> JsonObject:  # noqa: A002 (the path's own name)
        """The status with every finished generation."""
        return show_request_status(id, get_config(), is_chat=False)

    @namespace.response(200, "The status", text_status)
    @document_refusals(namespace, 404, 429, 503)
    @limit_status_delete
    def delete(self, id: str) -> JsonObject:  # noqa: A002
        """Cancel; 200 with the status before the cancel."""
        return cancel_request(id, get_config(), is_chat=False)


@namespace.route("/text/request/<string:id>")
class TextAsyncRequest(Resource):
    """Read a text request back. Chat has no such route."""

    @namespace.param("apikey", "The key that sent the request.", _in="header", required=True)
    @namespace.response(200, "The request", sent_text_request)
    @document_refusals(namespace, 400, 401, 403, 404, 429, 503)
    @limit_status_read
    def get(self, id: str) -> tuple[JsonObject, int, dict[str, str]]:  # noqa: A002
        """The request in the shape of its submission, with the prompt as it was sent."""
        sent = read_sent_request(id, require_api_key())
        return sent, 200, {"Cache-Control": "private, no-store"}


@namespace.route("/chat/status/<string:id>")
class ChatAsyncStatus(Resource):
    """Follow or cancel a chat request."""

    @namespace.response(200, "The status", chat_status)
    @document_refusals(namespace, 404, 429, 503)
    @limit_status_read
    def get(self, id: str) -> JsonObject:  # noqa: A002
        """The status with every finished generation and its structured reply."""
        return show_request_status(id, get_config(), is_chat=True)

    @namespace.response(200, "The status", chat_status)
    @document_refusals(namespace, 404, 429, 503)
    @limit_status_delete
    def delete(self, id: str) -> JsonObject:  # noqa: A002
        """Cancel, as text."""
        return cancel_request(id, get_config(), is_chat=True)


@namespace.route("/text/pop")
class TextJobPop(Resource):
    """Hand a job to a text worker."""

    @namespace.expect(pop_input)
    @namespace.param("apikey", "The key of the worker's owner.", _in="header", required=True)
    @namespace.response(200, "A job or nothing", popped)
    @document_refusals(namespace, *BODY_REFUSALS, 401, 403)
    @limit_pop
    def post(self) -> tuple[JsonObject, int, dict[str, str]]:
        """A job, or the body of an idle pop; 403 for a worker in maintenance without a job of its
        owner.
        """
        is_passed_on = is_passed_on_by_front()
        raw_body = read_json_object()
        pop = Pop(
            body=parse_shape(TextPopBody, raw_body),
            raw_body=raw_body,
            api_key=require_api_key(),
            address=get_peer_address(),
            config=get_config(),
            now=utcnow(),
        )
        jobs = pop_text_jobs(pop)
        if is_passed_on:
            return jobs.dump(), 200, {WORK_LEFT_HEADER: str(jobs.is_work_left).lower()}
        return jobs.dump(), 200, build_waiting_headers(get_config().front_url)

    # Judged inside the action, after the account.
    validate_chat_declaration = staticmethod(parse_chat_declaration_fields)


@namespace.route("/text/submit")
class TextJobSubmit(Resource):
    """Take a worker's reply."""

    @namespace.expect(submit_input)
    @namespace.param("apikey", "The key of the worker's owner.", _in="header", required=True)
    @namespace.response(200, "Stored", submitted)
    @document_refusals(namespace, *BODY_REFUSALS, 401, 403, 404)
    @limit_submit
    def post(self) -> JsonObject:
        """Store a reply or a fault; 200 {reward}."""
        raw_body = read_json_object(replace_unstorable_characters=True)
        submit = Submit(
            raw_body=raw_body,
            text_body=parse_text_body(raw_body),
            api_key=require_api_key(),
            config=get_config(),
            now=utcnow(),
        )
        return {"reward": submit_job(submit)}

    prepare_chat_submission = staticmethod(prepare_chat_submission)


@namespace.route("/text/progress")
class TextJobProgress(Resource):
    """Take the text that a streamed job's worker generated so far."""

    @namespace.expect(progress_input)
    @namespace.param("apikey", "The key of the worker's owner.", _in="header", required=True)
    @namespace.response(200, "Accepted", progress_accepted)
    @document_refusals(namespace, *BODY_REFUSALS, 403, 404, 409)
    @exempt_from_limits
    def post(self) -> JsonObject:
        """Append to the request's stream; 200 {accepted_seq, cancelled}. The lease alone tells who
        may post.
        """
        post = parse_progress_post(read_json_object(replace_unstorable_characters=True))
        accepted = take_progress(
            post, require_api_key(), utcnow(), count_refused=count_refused_progress
        )
        return {"accepted_seq": accepted.seq, "cancelled": accepted.is_cancelled}


def register(api: Api) -> None:
    """Add the text and chat routes."""
    api.add_namespace(namespace)
