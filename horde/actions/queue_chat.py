# SPDX-License-Identifier: AGPL-3.0-or-later
"""Queueing a chat request: its checks in their order, its price, its row and objects, and its
activation.

Source: docs/reference/chat_requests.md.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from horde import metrics
from horde.actions.load_images import load_chat_images
from horde.actions.operation_keys import (
    answer_repeat,
    build_claim,
    find_claim,
    find_twin,
    find_winner,
)
from horde.actions.queue_requests import (
    Queued,
    RequestContext,
    StoredRequest,
    activate,
    admit,
    build_accepted,
    check_limits,
    compute_quote,
    reporting_rejected_prompts,
    require_allowed_submitter,
    require_open_horde,
    store,
    taking_back,
)
from horde.actions.store_objects import store_objects
from horde.chat.context import SizedContext, size_chat_context
from horde.chat.flattening import FlattenedChat, iter_message_texts
from horde.chat.images import SubmittedImage, list_kept_images, measure_data_urls
from horde.chat.job import (
    ChatWorkerTargeting,
    build_stored_chat_extras,
    build_worker_targeting,
    chat_tools_temperature,
    required_chat_features,
)
from horde.chat.messages import rewrite_message_texts
from horde.chat.request import ChatRequest
from horde.chat.stored_objects import replace_image_urls
from horde.chat.wire import Message
from horde.chat_contract import (
    MAX_CHAT_IMAGE_TOTAL_BYTES,
    MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED,
    ChatContextAdjustmentReason,
    ChatContextFit,
)
from horde.classes.kobold.waiting_prompt import OperationKeyClaim, TextWaitingPrompt
from horde.classes.kobold.worker import RequestNeeds
from horde.clock import utcnow
from horde.config import Config
from horde.database.functions import TextWorkerBounds, get_highest_text_worker_limits
from horde.database.moderation import (
    check_prompt_left,
    find_prompt_rewrite,
    telling_what_was_judged,
)
from horde.database.text_admission import Submitter
from horde.database.text_functions import is_chat_model_served
from horde.database.text_requests import RequestContent, require_worker_ids
from horde.db import retry_deadlocks, transaction
from horde.exceptions import BadRequest, Forbidden, NotFound, ServiceUnavailable, TooManyRequests
from horde.json_text import JsonObject
from horde.model_reference import is_known_text_model
from horde.return_codes import ReturnCode
from horde.shapes.base import MAX_MODEL_NAME_LENGTH
from horde.shapes.requests import RequestQuote
from horde.shapes.text_params import TextParams, check_text_param_rules


def queue_chat(chat: ChatRequest, context: RequestContext) -> Queued:
    """Queue a chat request; a dry run quotes its price, a repeated operation key tells of the first
    request.

    Raises the refusals of docs/reference/chat_requests.md in their order.
    """
    claim = build_claim(chat)
    try:
        with reporting_rejected_prompts(context, chat.models, is_chat=True):
            return retry_deadlocks(lambda: _queue(chat, context, claim, utcnow()))
    except (Forbidden, TooManyRequests) as refused:
        twin = find_twin(refused, context.api_key, claim)
        if claim is None or twin is None:
            raise
        return answer_repeat(twin, claim)


def _queue(
    chat: ChatRequest, context: RequestContext, claim: OperationKeyClaim | None, now: datetime
) -> Queued:
    """The steps from the operation key to the activation."""
    with transaction() as session:
        claimed = find_claim(session, context.api_key, claim)
        if claim is not None and claimed is not None:
            return answer_repeat(claimed, claim)
        check_admission(context.config)
        is_raid = require_open_horde(session)
        submitter = require_allowed_submitter(session, context, allow_downgrade=False, now=now)
        targeting = build_worker_targeting(chat.horde)
        worker_ids = require_worker_ids(session, targeting.worker_ids)
        check_limits(session, submitter, context, n=1, models=chat.models)
        moderated = moderate_messages(session, submitter, chat)
        bounds = get_highest_text_worker_limits(session, chat.models, is_chat=True, now=now)
        ensure_model_known(session, chat, bounds, now)
        sized = size_chat_request(moderated, bounds)
        check_text_param_rules(
            chat.text_params,
            max_length=sized.max_length,
            max_context_length=sized.max_context_length,
        )
        images = list_kept_images(chat.messages, sized.messages)
        needs = build_needs(
            chat, sized, targeting, images, user_id=submitter.caller.id, worker_ids=worker_ids
        )
        check_kudos_cap(chat, needs, len(images))
        stored = admit(
            session,
            submitter,
            needs,
            n=1,
            image_count=len(images),
            allow_downgrade=False,
            is_dry_run=chat.horde.dry_run,
            config=context.config,
            now=now,
        )
        cap_bytes = get_image_total_cap(submitter)
        measure_data_urls(images, cap_bytes)
        if chat.horde.dry_run:
            return Queued(body=answer_dry_run(chat, sized, stored))
        content = build_content(chat, sized, stored.id, worker_ids)
        store(session, stored, content, context, now)
    count_adjustments(chat, sized)
    messages = content.messages or []
    try:
        with taking_back(stored, now) as sent:
            jpegs = load_chat_images(stored.id, images, messages, cap_bytes)
            store_objects(stored.id, messages, jpegs, sent, context.config)
            activate(stored, claim=claim, now=now)
    except IntegrityError:
        repeated = find_winner(submitter.caller.id, claim)
        if repeated is None:
            raise
        return repeated
    return build_accepted(stored, is_raid=is_raid)


def check_admission(config: Config) -> None:
    """Refuse while the operator has chat switched off; requests already queued go on."""
    if not config.chat_admission_enabled:
        message = "The horde takes no new chat requests at the moment."
        raise ServiceUnavailable(message, ReturnCode.CHAT_ADMISSION_DISABLED)


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
        # A name may be megabytes long, so the message quotes its start only.
        name = model[:MAX_MODEL_NAME_LENGTH]
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


def moderate_messages(session: Session, submitter: Submitter, chat: ChatRequest) -> ChatRequest:
    """The request with the messages workers get: each text rewritten where the filter applies.
    Raises PromptRejected.
    """
    judged = chat.flattened.join()
    with telling_what_was_judged(submitted=judged, judged=judged, models=chat.models):
        rewrite = find_prompt_rewrite(
            session,
            is_flagged=submitter.is_flagged,
            models=chat.models,
            prompt=judged,
        )
        if rewrite is None:
            return chat
        rewritten = rewrite_message_texts(chat.messages, rewrite)
        if _join_texts(chat.messages):
            check_prompt_left(_join_texts(rewritten))
    flattened = FlattenedChat.read(rewritten, chat.tools)
    return replace(chat, messages=rewritten, flattened=flattened)


def _join_texts(messages: Sequence[Message]) -> str:
    """What the messages say, without the role labels of the flattened prompt."""
    return "".join(text for message in messages for text in iter_message_texts(message)).strip()


def size_chat_request(chat: ChatRequest, bounds: TextWorkerBounds) -> SizedContext:
    """Lower, grow and trim a moderated request against what the online workers declare; raises
    BadRequest when nothing fits.
    """
    return size_chat_context(
        chat.messages,
        chat.flattened,
        context_fit=ChatContextFit(chat.horde.context_fit),
        requested_max_length=chat.requested_max_length,
        requested_context_length=chat.requested_context_length,
        declared_max_length=bounds.max_length,
        declared_context_length=bounds.max_context_length,
    )


def get_image_total_cap(submitter: Submitter) -> int:
    """Bytes that all images of a request may take."""
    caller = submitter.caller
    is_generous = caller.is_trusted or caller.is_patron
    return MAX_CHAT_IMAGE_TOTAL_BYTES if is_generous else MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED


def check_kudos_cap(chat: ChatRequest, needs: RequestNeeds, image_count: int) -> None:
    """Refuse a request whose quote is above `horde.max_kudos`; equal is allowed."""
    cap = chat.horde.max_kudos
    if cap is None:
        return
    quote = compute_quote(needs, 1, image_count)
    if quote > cap:
        message = (
            f"The request's kudos estimate at current pricing is {quote}, above its horde.max_kudos"
            f" of {cap}. The estimate assumes the full max_tokens is generated."
        )
        raise BadRequest(message, ReturnCode.CHAT_KUDOS_CAP_EXCEEDED)


def count_adjustments(chat: ChatRequest, sized: SizedContext) -> None:
    """Count what sizing changed."""
    if sized.max_length < chat.requested_max_length:
        metrics.chat_max_length_lowered.add(
            1,
            {
                "horde.requested_bucket": metrics.get_text_length_bucket(chat.requested_max_length),
                "horde.declared_bucket": metrics.get_text_length_bucket(sized.max_length),
                "horde.dry_run": chat.horde.dry_run,
            },
        )
    if sized.dropped_message_count:
        mode = ChatContextAdjustmentReason.TRUNCATE_OLDEST.value
        metrics.text_context_fit.add(1, {"horde.outcome": "truncated", "horde.mode": mode})


def build_needs(
    chat: ChatRequest,
    sized: SizedContext,
    targeting: ChatWorkerTargeting,
    images: Sequence[SubmittedImage],
    *,
    user_id: int,
    worker_ids: tuple[UUID, ...],
) -> RequestNeeds:
    """What decides who may serve the request, after sizing: what dropped turns would have needed no
    longer counts.
    """
    kept = replace(chat, messages=list(sized.messages))
    return RequestNeeds(
        user_id=user_id,
        is_chat=True,
        models=chat.models,
        max_length=sized.max_length,
        max_context_length=sized.max_context_length,
        trusted_workers=targeting.trusted_workers,
        validated_backends=targeting.validated_backends,
        slow_workers=targeting.slow_workers,
        worker_ids=frozenset(worker_ids),
        worker_blacklist=targeting.is_deny_list,
        required_features=frozenset(required_chat_features(kept)),
        tools_temperature=chat_tools_temperature(chat),
        has_images=bool(images),
    )


def build_content(
    chat: ChatRequest, sized: SizedContext, wp_id: UUID, worker_ids: tuple[UUID, ...]
) -> RequestContent:
    """The request as it is stored: messages and prompt hold the kept turns, the submission as it
    was sent.

    Images are named by the keys they will be stored under.
    """
    return RequestContent(
        prompt=sized.prompt,
        submitted_prompt=chat.flattened.join(),
        params=chat.text_params,
        gen_payload=TextWaitingPrompt.prepare_job_payload(
            params=chat.text_params,
            max_length=sized.max_length,
            max_context_length=sized.max_context_length,
        ),
        messages=replace_image_urls(sized.messages, wp_id),
        chat_extras=build_stored_chat_extras(chat),
        context_adjustments=sized.adjustments,
        conformance=chat.horde.conformance.value,
        worker_ids=worker_ids,
    )


def answer_dry_run(chat: ChatRequest, sized: SizedContext, stored: StoredRequest) -> RequestQuote:
    """The quote and the request as it would run; `params` holds what the client sent under its
    native names.
    """
    params: TextParams = {**chat.text_params, "max_length": sized.max_length}
    if "max_context_length" in params or sized.max_context_length != chat.requested_context_length:
        params["max_context_length"] = sized.max_context_length
    context_fit = ChatContextFit(chat.horde.context_fit)
    if context_fit is ChatContextFit.TRUNCATE_OLDEST:
        context_fit = ChatContextFit.GROW
    resolved: JsonObject = {
        "estimated_prompt_tokens": sized.estimated_prompt_tokens,
        "context_fit": context_fit.value,
        "prompt": sized.prompt,
        "params": params,
        "models": list(chat.models),
        "style": None,
    }
    count_adjustments(chat, sized)
    return RequestQuote(kudos=stored.quote, resolved=resolved)
