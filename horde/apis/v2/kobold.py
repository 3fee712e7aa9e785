# SPDX-License-Identifier: AGPL-3.0-or-later
"""The text routes and the chat routes over them: submit, status, cancel, pop, submit of a reply.

Each method is the list of its steps in the order in which they may refuse; the steps live in the
neighbours. Source: docs/reference/text_requests.md and docs/reference/chat_requests.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from flask_restx import Api, Namespace, Resource
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from horde.actions.cancel import cancel_request
from horde.actions.pop import Pop, pop_text_jobs
from horde.actions.progress import parse_progress_post, take_progress
from horde.actions.status import read_sent_request, show_request_status
from horde.actions.submit import Submit, parse_text_body, prepare_chat_submission, submit_job
from horde.apis.models import kobold as shapes
from horde.apis.requests import (
    get_config,
    get_peer_address,
    read_json_body,
    read_json_object,
    require_api_key,
)
from horde.apis.v2 import _chat_generate as chatting
from horde.apis.v2 import _chat_images as picturing
from horde.apis.v2 import _text_generate as generate
from horde.apis.v2 import _text_prompt as prompting
from horde.chat.images import (
    SubmittedImage,
    check_total_of_data_urls,
    list_kept_images,
)
from horde.chat.wire import Message
from horde.chat_contract import MAX_CHAT_BODY_BYTES
from horde.classes.kobold.chat_request import (
    ChatMessagesOffload,
    ChatRequest,
    build_chat_messages_offload,
    build_worker_targeting,
    parse_chat_declaration_fields,
    parse_chat_request,
)
from horde.classes.kobold.text_params import check_text_param_rules
from horde.classes.kobold.text_request import (
    MAX_MODEL_NAME_LENGTH,
    MAX_TARGETED_WORKERS,
    TextRequest,
    parse_text_request,
)
from horde.classes.kobold.waiting_prompt import OperationKeyClaim
from horde.clock import utcnow
from horde.database.functions import TextWorkerBounds, get_highest_text_worker_limits
from horde.database.text_admission import Submitter
from horde.database.text_functions import find_chat_operation_claim, is_chat_model_served
from horde.database.text_requests import (
    mark_messages_offloaded,
    require_worker_ids,
)
from horde.db import retry_deadlocks, run_transaction, transaction
from horde.exceptions import (
    Forbidden,
    NotFound,
    ServiceUnavailable,
    TooManyRequests,
)
from horde.limiter import (
    count_refused_progress,
    exempt_from_limits,
    limit_chat_submit,
    limit_pop,
    limit_status_delete,
    limit_status_read,
    limit_submit,
    limit_text_submit,
)
from horde.model_reference import is_known_text_model
from horde.r2 import StoreLeftAlone, StoreUnavailable, upload_chat_messages, upload_source_image
from horde.return_codes import ReturnCode
from horde.shapes.base import parse_shape
from horde.shapes.jobs import TextPopBody

namespace = Namespace(
    "v2/generate",
    path="/v2/generate",
    description="Text and chat requests and the jobs they become.",
)
text_request, chat_request = (
    shapes.build_text_request(namespace),
    shapes.build_chat_request(namespace),
)
accepted, quote = shapes.build_accepted(namespace), shapes.build_quote(namespace)
text_status, chat_status = shapes.build_text_status(namespace), shapes.build_chat_status(namespace)

STORE_AWAY = (
    "The images or messages of the request could not be stored. Nothing was charged. Try again"
    " later."
)


@namespace.route("/text/async")
class TextAsyncGenerate(Resource):
    """Queue a text request."""

    @namespace.expect(text_request)
    @namespace.param(
        "apikey", "The key of the account or shared key that pays.", _in="header", required=True
    )
    @namespace.response(202, "Queued", accepted)
    @namespace.response(200, "Dry run", quote)
    @shapes.document_refusals(namespace, *shapes.BODY_REFUSALS, 401, 403, 404)
    @limit_text_submit
    def post(self) -> tuple[dict[str, Any], int]:
        """Queue a text request. 202 {id, kudos, message?}; 200 {kudos, resolved} for a dry run."""
        text = parse_text_request(read_json_object())
        api_key = require_api_key()
        reporting = generate.reporting_rejected_prompts(
            api_key, text.body.models, is_chat=False, proxied_account=text.body.proxied_account
        )
        with reporting:
            return retry_deadlocks(lambda: self.queue(text, api_key, utcnow()))

    @staticmethod
    def queue(text: TextRequest, api_key: str, now: datetime) -> tuple[dict[str, Any], int]:
        """The steps from the account to the activation."""
        with transaction() as session:
            submitted_prompt, style = text.body.prompt, prompting.find_style(session, text)
            text = prompting.apply_style(text, style)
            context_length = prompting.size_text_request(session, text, style, now)
            is_raid = generate.check_maintenance(session)
            prompting.check_webhook(text)
            submitter = generate.check_submitter(
                session,
                api_key,
                allow_downgrade=text.body.allow_downgrade,
                proxied_account=text.body.proxied_account,
                style_sharedkey_id=None if style is None else style.sharedkey_id,
                now=now,
            )
            prompting.check_images_and_prompt(submitter, text)
            models = tuple(dict.fromkeys(text.body.models))
            worker_ids = require_worker_ids(session, text.body.workers[:MAX_TARGETED_WORKERS])
            prompting.check_batching(submitter, text)
            generate.check_limits(session, submitter, n=text.n, models=models)
            prompt = prompting.moderate_prompt(
                session, submitter, text, submitted_prompt=submitted_prompt
            )
            check_text_param_rules(
                text.params, max_length=text.max_length, max_context_length=context_length
            )
            prompting.check_no_images(text)
            facts = prompting.build_facts(
                text,
                models,
                user_id=submitter.caller.id,
                worker_ids=worker_ids,
                max_context_length=context_length,
            )
            stored = generate.admit(
                session,
                submitter,
                facts,
                n=text.n,
                allow_downgrade=text.body.allow_downgrade,
                is_dry_run=text.body.dry_run,
                now=now,
            )
            stored = replace(stored, style=style)
            if text.body.dry_run:
                return prompting.answer_text_dry_run(text, prompt, stored), 200
            generate.store(
                session,
                stored,
                prompting.build_content(
                    text, prompt, stored, worker_ids, submitted_prompt=submitted_prompt
                ),
                now,
            )
        with generate.taking_back(stored, now):
            generate.activate(stored, claim=None, now=now)
        return generate.build_accepted(stored, is_raid=is_raid), 202


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
    @shapes.document_refusals(namespace, *shapes.BODY_REFUSALS, 401, 403, 404)
    @limit_chat_submit
    def post(self) -> tuple[dict[str, Any], int]:
        """Queue a chat request. 202 {id, kudos, message?}; 200 for a dry run or a repeated
        operation key.
        """
        chat = parse_chat_request(read_chat_request_body())
        api_key = require_api_key()
        claim = chatting.build_claim(chat)
        try:
            with generate.reporting_rejected_prompts(api_key, chat.models, is_chat=True):
                return retry_deadlocks(lambda: self.queue(chat, api_key, claim, utcnow()))
        except (Forbidden, TooManyRequests) as refused:
            twin = chatting.find_twin(refused, api_key, claim)
            if claim is None or twin is None:
                raise
            return chatting.answer_repeat(twin, claim), 200

    def queue(
        self, chat: ChatRequest, api_key: str, claim: OperationKeyClaim | None, now: datetime
    ) -> tuple[dict[str, Any], int]:
        """The steps from the operation key to the activation."""
        with transaction() as session:
            claimed = chatting.find_claim(session, api_key, claim)
            if claim is not None and claimed is not None:
                return chatting.answer_repeat(claimed, claim), 200
            chatting.check_admission()
            is_raid = generate.check_maintenance(session)
            submitter = generate.check_submitter(session, api_key, allow_downgrade=False, now=now)
            targeting = build_worker_targeting(chat.horde)
            worker_ids = generate.check_targets_and_limits(
                session, submitter, listed_workers=targeting.worker_ids, n=1, models=chat.models
            )
            moderated = chatting.moderate_messages(session, submitter, chat)
            bounds = get_highest_text_worker_limits(session, chat.models, is_chat=True, now=now)
            self.ensure_model_known(session, chat, bounds, now)
            sized = chatting.size_chat_request(moderated, bounds)
            check_text_param_rules(
                chat.text_params,
                max_length=sized.max_length,
                max_context_length=sized.max_context_length,
            )
            images = list_kept_images(chat.messages, sized.messages)
            facts = chatting.build_facts(
                chat, sized, targeting, images, user_id=submitter.caller.id, worker_ids=worker_ids
            )
            chatting.check_kudos_cap(chat, facts, len(images))
            stored = generate.admit(
                session,
                submitter,
                facts,
                n=1,
                image_count=len(images),
                allow_downgrade=False,
                is_dry_run=chat.horde.dry_run,
                now=now,
            )
            cap_bytes = chatting.get_image_total_cap(submitter)
            check_total_of_data_urls(images, cap_bytes)
            if chat.horde.dry_run:
                return chatting.answer_chat_dry_run(chat, sized, stored), 200
            content = chatting.build_content(chat, sized, stored.id, worker_ids)
            generate.store(session, stored, content, now)
        chatting.count_adjustments(chat, sized)
        messages = content.messages or []
        try:
            with generate.taking_back(stored, now) as sent:
                jpegs = self.load_chat_images(stored.id, images, messages, cap_bytes)
                self.store_objects(stored.id, messages, jpegs, sent)
                self.activate_waiting_prompt(stored, claim, now)
        except IntegrityError:
            repeated = self.find_winner(submitter, claim)
            if repeated is None:
                raise
            return repeated, 200
        return generate.build_accepted(stored, is_raid=is_raid), 202

    @staticmethod
    def ensure_model_known(
        session: Session, chat: ChatRequest, bounds: TextWorkerBounds, now: datetime
    ) -> None:
        """Every listed model is known and at least one is served. Raises NotFound or Forbidden."""
        for index, model in enumerate(chat.models):
            if len(model) <= MAX_MODEL_NAME_LENGTH and (
                is_known_text_model(model) or is_chat_model_served(session, model, now)
            ):
                continue
            place = f"'models[{index}]': " if chat.lists_models else ""
            name = model[:MAX_MODEL_NAME_LENGTH]  # of megabytes, none comes back
            raise NotFound(
                f"{place}The model '{name}' is not known to the horde.",
                ReturnCode.UNKNOWN_CHAT_MODEL,
            )
        if bounds.worker_count:
            return
        if chat.lists_models:
            names = ", ".join(f"'{model}'" for model in chat.models)
            message = f"No worker is currently serving any of the models {names}."
        else:
            message = f"No worker is currently serving the model '{chat.models[0]}'."
        raise Forbidden(message, ReturnCode.NO_ELIGIBLE_WORKER)

    @staticmethod
    def load_chat_images(
        wp_id: UUID,
        images: Sequence[SubmittedImage],
        messages: Sequence[Message],
        cap_bytes: int,
    ) -> dict[str, bytes]:
        """The images of an inactive request as they will be stored, by key.

        `messages` are as stored. Takes seconds, so no transaction is open. Raises
        ChatRequestRefused, RequestTooLarge, ServiceUnavailable.
        """
        jpegs = picturing.load_images(images, wp_id, cap_bytes=cap_bytes)
        picturing.check_inlined_size(messages, jpegs)
        return jpegs

    @classmethod
    def store_objects(
        cls,
        wp_id: UUID,
        messages: list[Message],
        jpegs: Mapping[str, bytes],
        sent: list[str],
    ) -> None:
        """Put the images and the offloaded messages of an inactive request into the store, and note
        in `sent` each key that was sent.

        `messages` are as stored, `jpegs` by key. Raises ServiceUnavailable when the store is away.
        """
        offload = cls.prepare_messages_offload(wp_id, messages, jpegs)
        try:
            cls.upload_source_images(jpegs, sent)
            if offload is not None:
                sent.append(offload.key)
                upload_chat_messages(offload.key, offload.body, is_gzipped=offload.is_gzipped)
        except StoreUnavailable as error:
            if isinstance(error, StoreLeftAlone):
                sent.pop()
            raise ServiceUnavailable(
                STORE_AWAY, ReturnCode.CHAT_IMAGE_STORAGE_UNAVAILABLE
            ) from error

    @staticmethod
    def prepare_messages_offload(
        wp_id: UUID, messages: list[Message], jpegs: Mapping[str, bytes]
    ) -> ChatMessagesOffload | None:
        """The messages as one object, when the horde is set so and they are large; the row says so
        before it is stored.
        """
        config = get_config()
        if not config.chat_messages_offload_enabled:
            return None
        offload = build_chat_messages_offload(
            wp_id,
            messages,
            jpegs,
            largest_inline_bytes=config.chat_messages_offload_bytes,
            packs=config.chat_messages_offload_gzip,
        )
        if offload is not None:
            run_transaction(partial(mark_messages_offloaded, wp_id=wp_id))
        return offload

    @staticmethod
    def upload_source_images(jpegs: Mapping[str, bytes], sent: list[str]) -> None:
        """Store the images of a request, by key, and note in `sent` each that is tried. Raises
        StoreUnavailable at the first that fails.
        """
        for key, jpeg in jpegs.items():
            sent.append(key)
            upload_source_image(key, jpeg)

    @staticmethod
    def activate_waiting_prompt(
        stored: generate.StoredRequest, claim: OperationKeyClaim | None, now: datetime
    ) -> None:
        """Activate a stored request; raises IntegrityError for the loser of a race for its key."""
        generate.activate(stored, claim=claim, now=now)

    @staticmethod
    def find_winner(submitter: Submitter, claim: OperationKeyClaim | None) -> dict[str, Any] | None:
        """What the loser of a race for its key is answered; None when there was no such race."""
        if claim is None:
            return None
        with transaction() as session:
            winner = find_chat_operation_claim(session, submitter.caller.id, claim.key)
        return None if winner is None else chatting.answer_repeat(winner, claim)


@namespace.route("/text/status/<string:id>")
class TextAsyncStatus(Resource):
    """Follow or cancel a text request."""

    @namespace.response(200, "The status", text_status)
    @shapes.document_refusals(namespace, 404, 429, 503)
    @limit_status_read
    def get(self, id: str) -> dict[str, Any]:  # noqa: A002 (the path's own name)
        """The status with every finished generation."""
        return show_request_status(id, get_config(), is_chat=False)

    @namespace.response(200, "The status", text_status)
    @shapes.document_refusals(namespace, 404, 429, 503)
    @limit_status_delete
    def delete(self, id: str) -> dict[str, Any]:  # noqa: A002
        """Cancel; 200 with the status before the cancel."""
        return cancel_request(id, get_config(), is_chat=False)


@namespace.route("/text/request/<string:id>")
class TextAsyncRequest(Resource):
    """Read a text request back. Chat has no such route."""

    @namespace.param("apikey", "The key that sent the request.", _in="header", required=True)
    @namespace.response(200, "The request", shapes.build_sent_text_request(namespace))
    @shapes.document_refusals(namespace, 400, 401, 403, 404, 429, 503)
    @limit_status_read
    def get(self, id: str) -> tuple[dict[str, Any], int, dict[str, str]]:  # noqa: A002
        """The request in the shape of its submission, with the prompt as it was sent."""
        sent = read_sent_request(id, require_api_key())
        return sent, 200, {"Cache-Control": "private, no-store"}


@namespace.route("/chat/status/<string:id>")
class ChatAsyncStatus(Resource):
    """Follow or cancel a chat request."""

    @namespace.response(200, "The status", chat_status)
    @shapes.document_refusals(namespace, 404, 429, 503)
    @limit_status_read
    def get(self, id: str) -> dict[str, Any]:  # noqa: A002
        """The status with every finished generation and its structured reply."""
        return show_request_status(id, get_config(), is_chat=True)

    @namespace.response(200, "The status", chat_status)
    @shapes.document_refusals(namespace, 404, 429, 503)
    @limit_status_delete
    def delete(self, id: str) -> dict[str, Any]:  # noqa: A002
        """Cancel, as text."""
        return cancel_request(id, get_config(), is_chat=True)


@namespace.route("/text/pop")
class TextJobPop(Resource):
    """Hand a job to a text worker."""

    @namespace.expect(shapes.build_pop_input(namespace))
    @namespace.param("apikey", "The key of the worker's owner.", _in="header", required=True)
    @namespace.response(200, "A job or nothing", shapes.build_pop_response(namespace))
    @shapes.document_refusals(namespace, *shapes.BODY_REFUSALS, 401, 403)
    @limit_pop
    def post(self) -> dict[str, Any]:
        """A job, or the body of an idle pop; 403 for a worker in maintenance without a job of its
        owner.
        """
        raw_body = read_json_object()
        pop = Pop(
            body=parse_shape(TextPopBody, raw_body),
            raw_body=raw_body,
            api_key=require_api_key(),
            address=get_peer_address(),
            config=get_config(),
            now=utcnow(),
        )
        return pop_text_jobs(pop).dump()

    # Judged inside the action, after the account.
    validate_chat_declaration = staticmethod(parse_chat_declaration_fields)


@namespace.route("/text/submit")
class TextJobSubmit(Resource):
    """Take a worker's reply."""

    @namespace.expect(shapes.build_submit_input(namespace))
    @namespace.param("apikey", "The key of the worker's owner.", _in="header", required=True)
    @namespace.response(200, "Stored", shapes.build_submitted(namespace))
    @shapes.document_refusals(namespace, *shapes.BODY_REFUSALS, 401, 403, 404)
    @limit_submit
    def post(self) -> dict[str, Any]:
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

    @namespace.expect(shapes.build_progress_input(namespace))
    @namespace.param("apikey", "The key of the worker's owner.", _in="header", required=True)
    @namespace.response(200, "Accepted", shapes.build_progress_accepted(namespace))
    @shapes.document_refusals(namespace, *shapes.BODY_REFUSALS, 403, 404, 409)
    @exempt_from_limits
    def post(self) -> dict[str, Any]:
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
