# SPDX-License-Identifier: AGPL-3.0-or-later
"""Queueing a text request: its checks in their order, its price, its row, and its activation.

Source: docs/reference/text_requests.md.
"""

from dataclasses import replace
from datetime import datetime
from uuid import UUID

from sqlalchemy.orm import Session

from horde.actions.queue_requests import (
    Queued,
    RequestContext,
    StoredRequest,
    activate,
    admit,
    build_accepted,
    check_limits,
    reporting_rejected_prompts,
    require_allowed_submitter,
    require_open_horde,
    store,
    taking_back,
)
from horde.actions.request_styles import apply_style, find_style
from horde.classes.kobold.text_request import (
    FREE_EXTRA_SOURCE_IMAGES,
    MAX_EXTRA_SOURCE_IMAGES,
    MAX_TARGETED_WORKERS,
    TextRequest,
    estimate_text_prompt_tokens,
    size_text_context,
)
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import RequestNeeds
from horde.clock import utcnow
from horde.database.functions import get_highest_text_worker_limits
from horde.database.moderation import (
    check_prompt_left,
    find_prompt_rewrite,
    telling_what_was_judged,
)
from horde.database.styles import FoundStyle
from horde.database.text_admission import Submitter
from horde.database.text_requests import RequestContent, require_worker_ids
from horde.db import retry_deadlocks, transaction
from horde.exceptions import BadRequest
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode
from horde.shapes.requests import RequestQuote, TextContextFit
from horde.shapes.text_params import check_text_param_rules

MAX_SOFTPROMPT_LENGTH = 255  # what the column holds


def queue_text(text: TextRequest, context: RequestContext) -> Queued:
    """Queue a text request, or quote its price for a dry run.

    Raises the refusals of docs/reference/text_requests.md in their order.
    """
    reporting = reporting_rejected_prompts(
        context, text.body.models, is_chat=False, proxied_account=text.body.proxied_account
    )
    with reporting:
        return retry_deadlocks(lambda: _queue(text, context, utcnow()))


def _queue(text: TextRequest, context: RequestContext, now: datetime) -> Queued:
    """The steps from the account to the activation."""
    with transaction() as session:
        submitted_prompt, style = text.body.prompt, find_style(session, text)
        text = apply_style(text, style)
        context_length = size_text_request(session, text, style, now)
        is_raid = require_open_horde(session)
        check_webhook(text)
        submitter = require_allowed_submitter(
            session,
            context,
            allow_downgrade=text.body.allow_downgrade,
            proxied_account=text.body.proxied_account,
            style_sharedkey_id=None if style is None else style.sharedkey_id,
            now=now,
        )
        check_images_and_prompt(submitter, text)
        models = tuple(dict.fromkeys(text.body.models))
        worker_ids = require_worker_ids(session, text.body.workers[:MAX_TARGETED_WORKERS])
        check_batching(submitter, text)
        check_limits(session, submitter, context, n=text.n, models=models)
        prompt = moderate_prompt(session, submitter, text, submitted_prompt=submitted_prompt)
        check_text_param_rules(
            text.params, max_length=text.max_length, max_context_length=context_length
        )
        check_no_images(text)
        needs = build_needs(
            text,
            models,
            user_id=submitter.caller.id,
            worker_ids=worker_ids,
            max_context_length=context_length,
        )
        stored = admit(
            session,
            submitter,
            needs,
            n=text.n,
            allow_downgrade=text.body.allow_downgrade,
            is_dry_run=text.body.dry_run,
            config=context.config,
            now=now,
        )
        stored = replace(stored, style=style)
        if text.body.dry_run:
            return Queued(body=answer_dry_run(text, prompt, stored))
        store(
            session,
            stored,
            build_content(text, prompt, stored, worker_ids, submitted_prompt=submitted_prompt),
            context,
            now,
        )
    with taking_back(stored, now):
        activate(stored, claim=None, now=now)
    return build_accepted(stored, is_raid=is_raid)


def size_text_request(
    session: Session, text: TextRequest, style: FoundStyle | None, now: datetime
) -> int:
    """The context in tokens; who could serve more is asked only when it may grow."""
    bound = None
    if text.context_fit is TextContextFit.GROW:
        bounds = get_highest_text_worker_limits(session, text.body.models, is_chat=False, now=now)
        policy = None if style is None else style.parameter_policy
        ceiling = (policy or {}).get("ceilings", {}).get("max_context_length")
        known = [length for length in (bounds.max_context_length, ceiling) if length is not None]
        bound = None if bounds.max_context_length is None else min(known)
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


def moderate_prompt(
    session: Session, submitter: Submitter, text: TextRequest, *, submitted_prompt: str
) -> str:
    """The prompt workers get: rewritten where the filter applies. Raises PromptRejected."""
    judged, models = text.body.prompt, text.body.models
    with telling_what_was_judged(submitted=submitted_prompt, judged=judged, models=models):
        rewrite = find_prompt_rewrite(
            session, is_flagged=submitter.is_flagged, models=models, prompt=judged
        )
        if rewrite is None:
            return judged
        prompt = rewrite(judged)
        check_prompt_left(prompt)
    return prompt


def check_no_images(text: TextRequest) -> None:
    """Text takes no extra source images at all."""
    if text.body.extra_source_images:
        raise BadRequest(
            "Text requests take no extra source images.", ReturnCode.INVALID_EXTRA_SOURCE_IMAGES
        )


def build_needs(
    text: TextRequest,
    models: tuple[str, ...],
    *,
    user_id: int,
    worker_ids: tuple[UUID, ...],
    max_context_length: int,
) -> RequestNeeds:
    """What decides which workers may serve the request."""
    return RequestNeeds(
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
    text: TextRequest,
    prompt: str,
    stored: StoredRequest,
    worker_ids: tuple[UUID, ...],
    *,
    submitted_prompt: str,
) -> RequestContent:
    """The row's content; `prompt` is as workers get it, and the lengths are those that were
    admitted.
    """
    needs, soft = stored.admission.needs, text.body.softprompt
    return RequestContent(
        prompt=prompt,
        submitted_prompt=submitted_prompt,
        params=text.params,
        gen_payload=TextWaitingPrompt.prepare_job_payload(
            params=text.params,
            max_length=needs.max_length,
            max_context_length=needs.max_context_length,
        ),
        n=text.n,
        proxied_account=text.body.proxied_account,
        webhook=text.body.webhook,
        softprompt=None if soft is None else soft[:MAX_SOFTPROMPT_LENGTH],
        extra_slow_workers=text.body.extra_slow_workers,
        disable_batching=text.body.disable_batching,
        worker_ids=worker_ids,
        style_id=None if stored.style is None else stored.style.id,
    )


def answer_dry_run(text: TextRequest, prompt: str, stored: StoredRequest) -> RequestQuote:
    """The quote and the request as it would run."""
    needs = stored.admission.needs
    params = TextWaitingPrompt.prepare_job_payload(
        params=text.params,
        max_length=needs.max_length,
        max_context_length=needs.max_context_length,
    )
    resolved: JsonObject = {
        "prompt": prompt,
        "params": params,
        "models": list(needs.models),
        "style": None if stored.style is None else stored.style.unique_name,
        "estimated_prompt_tokens": estimate_text_prompt_tokens(prompt),
        "context_fit": text.context_fit.value,
    }
    return RequestQuote(kudos=stored.quote, resolved=resolved)
