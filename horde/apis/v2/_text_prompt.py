# SPDX-License-Identifier: AGPL-3.0-or-later
"""The steps of queueing that only a text request has."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from horde.apis.v2._text_generate import StoredRequest
from horde.classes.kobold.text_request import (
    FREE_EXTRA_SOURCE_IMAGES,
    MAX_EXTRA_SOURCE_IMAGES,
    TextContextFit,
    TextRequest,
    estimate_text_prompt_tokens,
    size_text_context,
)
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import TextRequestFacts
from horde.database.functions import get_highest_text_worker_limits
from horde.database.moderation import check_prompt_left, find_prompt_rewrite
from horde.database.text_admission import Submitter
from horde.database.text_requests import RequestContent
from horde.exceptions import BadRequest, NotFound
from horde.return_codes import ReturnCode

MAX_SOFTPROMPT_LENGTH = 255  # what the column holds


def check_style(text: TextRequest) -> None:
    """No style exists yet, so none is found."""
    if text.body.style is not None:
        raise NotFound(f"Style '{text.body.style[:64]}' not found.", ReturnCode.STYLE_NOT_FOUND)


def size_text_request(session: Session, text: TextRequest, now: datetime) -> int:
    """The context in tokens; who could serve more is asked only when it may grow."""
    bound = None
    if text.context_fit is TextContextFit.GROW:
        bounds = get_highest_text_worker_limits(session, text.body.models, is_chat=False, now=now)
        bound = bounds.max_context_length
    return size_text_context(text, growth_bound=bound)


def check_webhook(text: TextRequest) -> None:
    """A webhook is an https address."""
    if text.body.webhook is not None and not text.body.webhook.startswith("https://"):
        raise BadRequest("'webhook' has to start with https://.")


def check_images_and_prompt(submitter: Submitter, text: TextRequest) -> None:
    """How many extra images who may send, and that there is a prompt."""
    caller, body = submitter.caller, text.body
    if len(body.extra_source_images) > MAX_EXTRA_SOURCE_IMAGES:
        message = f"A request may carry at most {MAX_EXTRA_SOURCE_IMAGES} extra source images."
        raise BadRequest(message, ReturnCode.TOO_MANY_EXTRA_SOURCE_IMAGES)
    if len(body.extra_source_images) > FREE_EXTRA_SOURCE_IMAGES and not caller.is_trusted:
        message = (
            f"Only trusted users may send more than {FREE_EXTRA_SOURCE_IMAGES} extra source image."
        )
        raise BadRequest(message, ReturnCode.MORE_THAN_MIN_EXTRA_SOURCE_IMAGE)
    if not body.prompt:
        raise BadRequest("You cannot specify an empty prompt.", ReturnCode.MISSING_PROMPT)


def check_batching(submitter: Submitter, text: TextRequest) -> None:
    """Batching is the default for all but trusted users."""
    if text.body.disable_batching and text.n > 1 and not submitter.caller.is_trusted:
        raise BadRequest("Only trusted users may disable batching.", ReturnCode.REQUIRES_TRUST)


def moderate_prompt(session: Session, submitter: Submitter, text: TextRequest) -> str:
    """The prompt workers get: rewritten where the filter applies."""
    rewrite = find_prompt_rewrite(
        session,
        is_flagged=submitter.caller.is_flagged,
        models=text.body.models,
        prompt=text.body.prompt,
    )
    if rewrite is None:
        return text.body.prompt
    prompt = rewrite(text.body.prompt)
    check_prompt_left(prompt)
    return prompt


def build_facts(
    text: TextRequest,
    models: tuple[str, ...],
    *,
    user_id: int,
    worker_ids: tuple[UUID, ...],
    max_context_length: int,
) -> TextRequestFacts:
    """What decides which workers may serve the request."""
    return TextRequestFacts(
        user_id=user_id,
        is_chat=False,
        models=models,
        max_length=text.max_length,
        max_context_length=max_context_length,
        trusted_workers=text.body.trusted_workers,
        validated_backends=text.body.validated_backends,
        slow_workers=text.body.slow_workers,
        worker_ids=frozenset(worker_ids),
        worker_blacklist=text.body.worker_blacklist and bool(worker_ids),
    )


def build_content(
    text: TextRequest, prompt: str, stored: StoredRequest, worker_ids: tuple[UUID, ...]
) -> RequestContent:
    """The row's content; `prompt` is as workers get it, and the lengths are those that were
    admitted.
    """
    facts, soft = stored.admission.facts, text.body.softprompt
    return RequestContent(
        prompt=prompt,
        submitted_prompt=text.body.prompt,
        params=text.params,
        gen_payload=TextWaitingPrompt.prepare_job_payload(
            params=text.params,
            max_length=facts.max_length,
            max_context_length=facts.max_context_length,
        ),
        n=text.n,
        proxied_account=text.body.proxied_account,
        webhook=text.body.webhook,
        softprompt=None if soft is None else soft[:MAX_SOFTPROMPT_LENGTH],
        extra_slow_workers=text.body.extra_slow_workers,
        disable_batching=text.body.disable_batching,
        worker_ids=worker_ids,
    )


def answer_text_dry_run(text: TextRequest, prompt: str, stored: StoredRequest) -> dict[str, Any]:
    """The quote and the request as it would run."""
    params = {key: value for key, value in text.params.items() if key != "n"}
    facts = stored.admission.facts
    resolved = {
        "prompt": prompt,
        "params": params
        | {"max_length": facts.max_length, "max_context_length": facts.max_context_length},
        "models": list(facts.models),
        "style": None,
        "estimated_prompt_tokens": estimate_text_prompt_tokens(prompt),
        "context_fit": text.context_fit.value,
    }
    return {"kudos": stored.quote, "resolved": resolved}


def check_no_images(text: TextRequest) -> None:
    """Text takes no extra source images at all."""
    if text.body.extra_source_images:
        raise BadRequest(
            "Text requests take no extra source images.", ReturnCode.INVALID_EXTRA_SOURCE_IMAGES
        )
