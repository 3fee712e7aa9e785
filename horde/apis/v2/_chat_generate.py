# SPDX-License-Identifier: AGPL-3.0-or-later
"""The steps of queueing that only a chat request has."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from horde import metrics
from horde.apis.requests import get_config
from horde.apis.v2._text_generate import StoredRequest, compute_quote
from horde.chat.flattening import (
    FlattenedChat,
    iter_message_texts,
)
from horde.chat.images import SubmittedImage
from horde.chat.wire import Message
from horde.chat_contract import (
    MAX_CHAT_IMAGE_TOTAL_BYTES,
    MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED,
    ChatContextAdjustmentReason,
    ChatContextFit,
)
from horde.classes.kobold.chat_request import (
    ChatRequest,
    ChatWorkerTargeting,
    SizedContext,
    build_operation_fingerprint,
    build_stored_chat_extras,
    chat_tools_temperature,
    replace_image_urls,
    required_chat_features,
    rewrite_message_texts,
    size_chat_context,
)
from horde.classes.kobold.waiting_prompt import OperationKeyClaim, TextWaitingPrompt
from horde.classes.kobold.worker import TextRequestFacts
from horde.database.functions import TextWorkerBounds
from horde.database.moderation import (
    check_prompt_left,
    find_prompt_rewrite,
    telling_what_was_judged,
)
from horde.database.text_admission import Submitter
from horde.database.text_functions import OperationClaim, find_chat_operation_claim
from horde.database.text_requests import RequestContent
from horde.database.users import find_generate_caller
from horde.db import reading
from horde.exceptions import BadRequest, HordeError, ServiceUnavailable
from horde.return_codes import ReturnCode

# Refusals that a request can owe to its own twin, which took the kudos or the last place first.
RACED_REFUSALS = frozenset(
    {
        ReturnCode.KUDOS_UPFRONT,
        ReturnCode.SHARED_KEY_INSUFFICIENT_KUDOS,
        ReturnCode.NO_ELIGIBLE_WORKER,
        ReturnCode.TOO_MANY_PROMPTS,
    }
)
TWIN_WAIT_SECONDS = (0.0, 0.05, 0.15)  # between a twin's hold and its activation lie milliseconds


def build_claim(chat: ChatRequest) -> OperationKeyClaim | None:
    """The key this submission claims; a dry run claims none."""
    if chat.operation_key is None or chat.horde.dry_run:
        return None
    return OperationKeyClaim(key=chat.operation_key, fingerprint=build_operation_fingerprint(chat))


def find_claim(
    session: Session, api_key: str, claim: OperationKeyClaim | None
) -> OperationClaim | None:
    """The earlier request of the same account and key; an unknown account has none and is refused
    later.
    """
    caller = find_generate_caller(session, api_key) if claim is not None else None
    if claim is None or caller is None:
        return None
    return find_chat_operation_claim(session, caller.id, claim.key)


def answer_repeat(claimed: OperationClaim, claim: OperationKeyClaim) -> dict[str, Any]:
    """The first request's id and price; raises BadRequest when what was sent differs."""
    if claimed.fingerprint != claim.fingerprint:
        message = "This operation key was used for another request."
        raise BadRequest(message, ReturnCode.OPERATION_KEY_CONFLICT)
    return {"id": str(claimed.id), "kudos": claimed.kudos}


def check_admission() -> None:
    """Refuse while the operator has chat switched off; requests already queued go on."""
    if not get_config().chat_admission_enabled:
        message = "The horde takes no new chat requests at the moment."
        raise ServiceUnavailable(message, ReturnCode.CHAT_ADMISSION_DISABLED)


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


def check_kudos_cap(chat: ChatRequest, facts: TextRequestFacts, image_count: int) -> None:
    """Refuse a request whose quote is above `horde.max_kudos`; equal is allowed."""
    cap = chat.horde.max_kudos
    if cap is None:
        return
    quote = compute_quote(facts, 1, image_count)
    if quote > cap:
        message = (
            f"The request's kudos estimate at current pricing is {quote}, above its horde.max_kudos"
            f" of {cap}. The estimate assumes the full max_tokens is generated."
        )
        raise BadRequest(message, ReturnCode.CHAT_KUDOS_CAP_EXCEEDED)


def answer_chat_dry_run(
    chat: ChatRequest, sized: SizedContext, stored: StoredRequest
) -> dict[str, Any]:
    """The quote and the request as it would run; `params` holds what the client sent under its
    native names.
    """
    params: dict[str, Any] = chat.text_params | {"max_length": sized.max_length}
    if "max_context_length" in params or sized.max_context_length != chat.requested_context_length:
        params["max_context_length"] = sized.max_context_length
    context_fit = ChatContextFit(chat.horde.context_fit)
    if context_fit is ChatContextFit.TRUNCATE_OLDEST:
        context_fit = ChatContextFit.GROW
    resolved = {
        "estimated_prompt_tokens": sized.estimated_prompt_tokens,
        "context_fit": context_fit.value,
        "prompt": sized.prompt,
        "params": params,
        "models": list(chat.models),
        "style": None,
    }
    count_adjustments(chat, sized)
    return {"resolved": resolved, "kudos": stored.quote}


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


def find_twin(
    refused: HordeError, api_key: str, claim: OperationKeyClaim | None
) -> OperationClaim | None:
    """The request that was sent with the same key at the same moment and won what this one was
    refused for.
    """
    if claim is None or refused.rc not in RACED_REFUSALS:
        return None
    for seconds in TWIN_WAIT_SECONDS:
        time.sleep(seconds)
        with reading() as session:
            twin = find_claim(session, api_key, claim)
        if twin is not None:
            return twin
    return None


def build_facts(
    chat: ChatRequest,
    sized: SizedContext,
    targeting: ChatWorkerTargeting,
    images: Sequence[SubmittedImage],
    *,
    user_id: int,
    worker_ids: tuple[UUID, ...],
) -> TextRequestFacts:
    """What decides who may serve the request, after sizing: what dropped turns would have needed no
    longer counts.
    """
    kept = replace(chat, messages=list(sized.messages))
    return TextRequestFacts(
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
