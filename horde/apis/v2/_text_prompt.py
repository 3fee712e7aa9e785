# SPDX-License-Identifier: AGPL-3.0-or-later
"""The steps of queueing that only a text request has."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from horde.apis.v2._text_generate import StoredRequest
from horde.classes.base.style import (
    DECIDED_BY_REQUEST,
    fill_template,
    find_param_above_ceiling,
    merge_params,
)
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
from horde.database.moderation import (
    check_prompt_left,
    find_prompt_rewrite,
    telling_what_was_judged,
)
from horde.database.styles import TEXT_TYPE, FoundStyle, choose_style, find_request_styles
from horde.database.text_admission import Submitter
from horde.database.text_requests import RequestContent
from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode

MAX_SOFTPROMPT_LENGTH = 255  # what the column holds


def find_style(session: Session, text: TextRequest) -> FoundStyle | None:
    """The style that a request names; of a collection one of those that take its fields.

    Raises NotFound, and BadRequest for a style that is not for text or takes other fields.
    """
    fields = text.body.template_fields
    if text.body.style is None:
        if fields:
            raise BadRequest(
                "'template_fields' fill in the template of a 'style': send both.",
                ReturnCode.TEMPLATE_FIELDS_REQUIRE_STYLE,
            )
        return None
    found = find_request_styles(session, text.body.style)
    if any(style.style_type != TEXT_TYPE for style in found):
        raise BadRequest("This style is not for text.", ReturnCode.STYLE_MISMATCH)
    if found[0].collection_id is None:
        check_template_fields(found[0], fields)
        return found[0]
    fitting = [style for style in found if style.accepts_fields(fields)]
    if not fitting:
        raise BadRequest(
            "No style of the collection takes exactly these 'template_fields'.",
            ReturnCode.TEMPLATE_FIELDS_MATCH_NO_COLLECTION_STYLE,
        )
    return choose_style(fitting)


def check_template_fields(style: FoundStyle, fields: Mapping[str, str]) -> None:
    """The fields are those of the style, with none missing. Raises BadRequest."""
    known = {entry["name"]: bool(entry.get("required")) for entry in style.template_fields}
    unknown = sorted(fields.keys() - known.keys())
    if unknown:
        raise BadRequest(
            f"The style has no template field '{unknown[0][:64]}'.",
            ReturnCode.TEMPLATE_FIELD_UNKNOWN,
        )
    missing = sorted(
        name for name, is_required in known.items() if is_required and name not in fields
    )
    if missing:
        raise BadRequest(
            f"The style needs a value for its template field '{missing[0]}'.",
            ReturnCode.TEMPLATE_FIELD_MISSING,
        )


def apply_style(text: TextRequest, style: FoundStyle | None) -> TextRequest:
    """The request as the style makes it: its prompt in the template, the style's models and params.

    Of the request's own params stay `n`, the lengths where the style names none, and those that the
    style lets it replace. Raises BadRequest for one above a ceiling of the style.
    """
    if style is None:
        return text
    params = merge_params(
        style.params, text.params, style.parameter_policy, kept=DECIDED_BY_REQUEST
    )
    above = find_param_above_ceiling(params, style.parameter_policy)
    if above is not None:
        raise BadRequest(
            f"The style allows '{above[0]}' of at most {above[1]}.",
            ReturnCode.STYLE_PARAMETER_ABOVE_CEILING,
        )
    prompt = fill_template(style.prompt, text.body.prompt, text.body.template_fields)
    body = text.body.model_copy(update={"prompt": prompt, "models": list(style.models)})
    return replace(text, body=body, params=params)


def size_text_request(
    session: Session, text: TextRequest, style: FoundStyle | None, now: datetime
) -> int:
    """The context in tokens; who could serve more is asked only when it may grow."""
    bound = None
    if text.context_fit is TextContextFit.GROW:
        bounds = get_highest_text_worker_limits(session, text.body.models, is_chat=False, now=now)
        policy = (style.parameter_policy if style is not None else None) or {}
        ceiling = (policy.get("ceilings") or {}).get("max_context_length")
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
    facts, soft = stored.admission.facts, text.body.softprompt
    return RequestContent(
        prompt=prompt,
        submitted_prompt=submitted_prompt,
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
        style_id=None if stored.style is None else stored.style.id,
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
        "style": None if stored.style is None else stored.style.unique_name,
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
