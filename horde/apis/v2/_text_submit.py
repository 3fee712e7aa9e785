# SPDX-License-Identifier: AGPL-3.0-or-later
"""The steps of a worker's submit: the job, the shape of what came, the reply's verification, the
settlement.
"""

from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Annotated, Any
from uuid import UUID

from horde_sdk.generation_parameters.text.chat_policy import ChatConformance
from horde_sdk.worker.chat_declaration import ChatFinishReason
from pydantic import Field
from sqlalchemy.orm import Session

from horde import metrics, tally
from horde.actions.evidence import keep_reported_prompt
from horde.actions.job_faults import build_lost_refusal, name_fault_reason
from horde.apis.requests import get_config
from horde.chat.reply_rules import explain_cut_reply
from horde.chat.wire import Reply
from horde.chat_signal import ChatEvent, publish_chat_event
from horde.classes.base.suspicion import Suspicion
from horde.classes.base.worker import is_backend_validated
from horde.classes.kobold.chat_request import (
    ChatSubmission,
    SubmissionState,
    chat_reply_finish_reason,
    verify_chat_reply,
)
from horde.classes.kobold.processing_generation import (
    GateShadowOutcome,
    TextProcessingGeneration,
    build_gate_shadow_attributes,
    seconds_since,
)
from horde.classes.kobold.speed_limits import is_unreasonably_fast
from horde.database.suspects import suspect_worker
from horde.database.text_jobs import (
    JobFacts,
    ModelFacts,
    Settlement,
    Submitted,
    compute_job_kudos,
    find_job,
    settle_job,
    store_fake_reply,
)
from horde.database.text_status import CSAM_METADATA, get_generation_state
from horde.database.users import Caller
from horde.database.workers import parse_id
from horde.db import after_commit, reading, run_transaction
from horde.exceptions import BadRequest, Forbidden, NotFound
from horde.logger import get_logger
from horde.model_reference import get_text_model_multiplier, is_known_text_model
from horde.return_codes import ReturnCode
from horde.shapes.base import LenientBody, Values, WholeNumber, parse_shape
from horde.webhooks import queue_webhook

logger = get_logger(__name__)

MAX_METADATA_ENTRIES = 50


class GenerationMetadata(LenientBody):
    """One entry of `gen_metadata` a text worker may send."""

    type: Annotated[str, Field(max_length=255)]
    value: Annotated[str, Field(max_length=255)]
    ref: Annotated[str, Field(max_length=255)] | None = None


class TextSubmitBody(LenientBody):
    """The keys of a text job's submit."""

    id: str
    generation: str
    state: SubmissionState = Field(default=SubmissionState.OK, strict=False)
    seed: Annotated[WholeNumber, Field(ge=-(2**63), le=2**63 - 1)] = 0
    gen_metadata: Values[GenerationMetadata] = Field(default_factory=list)


def require_job(job: JobFacts | None, caller: Caller | None, job_id: str) -> JobFacts:
    """The job of a submit in the hands of its worker's owner; raises NotFound or Forbidden."""
    if job is None:
        message = f"Processing generation '{job_id[:64]}' is unknown, or its request has expired."
        raise NotFound(message, ReturnCode.INVALID_JOB_ID)
    if caller is None or caller.id != job.worker_owner_id:
        message = f"The worker '{job.worker_name}' of this job belongs to another user."
        raise Forbidden(message, ReturnCode.WRONG_CREDENTIALS)
    return job


def parse_job_id(text: str) -> UUID | None:
    """A job id from a body; None for what cannot be one."""
    return parse_id(text)


def parse_text_submission_with_chat_keys(raw: dict[str, object]) -> TextSubmitBody:
    """The submit of a text job by a worker that sends chat's keys: a fault needs no `generation`
    then, as on chat.
    """
    is_fault = raw.get("state") == SubmissionState.FAULTED and raw.get("generation") is None
    return parse_shape(TextSubmitBody, raw | {"generation": ""} if is_fault else raw)


def build_text_submission(body: TextSubmitBody, job: JobFacts) -> Submitted:
    """A text job's reply as stored; raises BadRequest for more metadata than anybody needs."""
    if len(body.gen_metadata) > MAX_METADATA_ENTRIES:
        raise BadRequest(f"'gen_metadata' may hold at most {MAX_METADATA_ENTRIES} entries.")
    entries = [entry.model_dump(exclude_none=True) for entry in body.gen_metadata]
    metadata, is_censored = mark_censorship(body.state, entries)
    columns: dict[str, Any] = {
        "generation": body.generation,
        "gen_metadata": metadata,
        "seed": max(body.seed, 0),
    }
    reply = (None, body.generation, job.max_length)
    return Submitted(
        columns=columns,
        tokens=TextProcessingGeneration.get_things_count(*reply),
        generated_tokens=TextProcessingGeneration.get_generated_tokens(*reply),
        is_censored=is_censored,
    )


def mark_censorship(
    state: SubmissionState, metadata: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]] | None, bool]:
    """The stored metadata and whether the reply is censored: the state and a csam entry each imply
    the other.
    """
    has_entry = CSAM_METADATA in metadata
    if state is SubmissionState.CSAM and not has_entry:
        metadata = [*metadata, CSAM_METADATA]
    is_censored = state in {SubmissionState.CENSORED, SubmissionState.CSAM} or has_entry
    return metadata or None, is_censored


def verify_chat_submission(submission: ChatSubmission, job: JobFacts) -> tuple[Submitted, int]:
    """The verified reply as stored, and how many calls the single-call rule dropped.

    May run the schema helper, so no transaction may be open. Raises BadRequest with
    ChatSubmitInvalid or ChatSubmitNonconformant.
    """
    message = submission.message or Reply(role="assistant", content="")
    try:
        verified = verify_chat_reply(
            message, job.chat_extras, ChatConformance(job.chat_conformance), submission.state
        )
    except BadRequest as refused:
        is_nonconformant = refused.rc == ReturnCode.CHAT_SUBMIT_NONCONFORMANT
        if is_nonconformant and submission.finish_reason == ChatFinishReason.LENGTH:
            raise explain_cut_reply(refused, job.max_length) from None
        raise
    finish_reason = chat_reply_finish_reason(
        submission.finish_reason or "", verified.message, job.chat_extras
    )
    metadata, is_censored = mark_censorship(submission.state, [])
    columns = TextProcessingGeneration.get_submission_columns(
        submission, verified.message, finish_reason
    )
    reply = (verified.message, None, job.max_length)
    submitted = Submitted(
        columns=columns | {"gen_metadata": metadata},
        tokens=TextProcessingGeneration.get_things_count(*reply),
        generated_tokens=TextProcessingGeneration.get_generated_tokens(*reply),
        is_censored=is_censored,
    )
    return submitted, verified.dropped_tool_call_count


def compute_reward(job: JobFacts, tokens: int) -> Decimal:
    """Kudos of a reply of so many tokens to a job, by the model that served it."""
    config = get_config()
    model = ModelFacts(
        multiplier=get_text_model_multiplier(job.model),
        is_known=is_known_text_model(job.model),
        is_validated=is_backend_validated(job.bridge_agent, config.validated_backends),
        is_targeted=config.require_matched_targeting and job.lists_workers,
    )
    return compute_job_kudos(job, tokens, model)


def settle(job: JobFacts, submitted: Submitted, *, dropped_tool_calls: int, now: datetime) -> float:
    """Store a reply and pay for it, once, and tell whoever waits; the reward in kudos.

    A fake job is answered alike and moves nothing. Raises BadRequest for the loser of a race.
    """
    kudos = compute_reward(job, submitted.tokens)
    if job.is_fake:
        is_stored = run_transaction(partial(store_fake_reply, job=job, submitted=submitted))
        if not is_stored:
            raise _JobLost
        return float(kudos)

    def work(session: Session) -> Settlement:
        settlement = settle_job(session, job, submitted, kudos, now)
        if settlement is None:
            raise _JobLost
        if is_too_fast(job, submitted, now):
            after_commit(
                session,
                partial(
                    suspect_worker,
                    job.worker_id,
                    job.worker_owner_id,
                    Suspicion.UNREASONABLY_FAST,
                ),
            )
        return settlement

    settlement = run_transaction(work)
    _report_stored(job, submitted, settlement, dropped_tool_calls, now)
    return float(kudos)


def is_too_fast(job: JobFacts, submitted: Submitted, now: datetime) -> bool:
    """Whether the reply came faster than its model can write."""
    return is_unreasonably_fast(
        generated_tokens=submitted.generated_tokens,
        seconds=seconds_since(job.start_time, now),
        model=job.model,
        multiplier=get_text_model_multiplier(job.model),
        is_known=is_known_text_model(job.model),
        owner_trusted=job.worker_owner_trusted,
    )


class _JobLostError(Exception):
    """Rolls a settlement back whose job ended meanwhile."""


_JobLost = _JobLostError()


def settle_or_refuse(
    job: JobFacts, submitted: Submitted, *, dropped_tool_calls: int = 0, now: datetime
) -> float:
    """As `settle`; the loser of a race reads how the job ended and raises that refusal."""
    try:
        return settle(job, submitted, dropped_tool_calls=dropped_tool_calls, now=now)
    except _JobLostError:
        pass
    with reading() as session:
        ended = find_job(session, job.id)
    raise build_lost_refusal(replace(job, is_faulted=True) if ended is None else ended)


def _report_stored(
    job: JobFacts,
    submitted: Submitted,
    settlement: Settlement,
    dropped_tool_calls: int,
    now: datetime,
) -> None:
    """Log, count and tell of a stored reply, after its commit. Best effort."""
    extra = {"job": str(job.id), "worker": str(job.worker_id), "chat": job.is_chat}
    if dropped_tool_calls:
        extra["dropped_tool_calls"] = dropped_tool_calls
    logger.info("horde.job_submit.done", extra=extra)
    _count_stored(job, submitted, now)
    if CSAM_METADATA in (submitted.columns["gen_metadata"] or ()):
        keep_reported_prompt(job.id, get_config())
    if job.is_chat:
        publish_chat_event(job.wp_id, ChatEvent.GENERATION, settlement.finished_count)
        if settlement.is_done:
            publish_chat_event(job.wp_id, ChatEvent.DONE, settlement.finished_count)
    elif job.webhook is not None:
        queue_webhook(job.webhook, build_webhook_body(job, submitted, settlement))


def build_webhook_body(
    job: JobFacts, submitted: Submitted, settlement: Settlement
) -> dict[str, Any]:
    """What a webhook is told of a text generation: as on the status, with the ids and the worker's
    reward.
    """
    metadata = submitted.columns["gen_metadata"] or []
    return {
        "text": submitted.columns["generation"],
        "seed": submitted.columns["seed"],
        "worker_id": str(job.worker_id),
        "worker_name": job.worker_name,
        "model": job.model,
        "id": str(job.id),
        "state": get_generation_state(submitted.is_censored, metadata),
        "gen_metadata": metadata,
        "request": str(job.wp_id),
        "kudos": float(settlement.kudos),
    }


def _count_stored(job: JobFacts, submitted: Submitted, now: datetime) -> None:
    tally.count(tally.DONE)
    tally.count(tally.TOKENS, submitted.generated_tokens)
    has_calls = bool((submitted.columns.get("message") or {}).get("tool_calls"))
    if submitted.columns["generation"] == "" and not has_calls:
        label = job.model if is_known_text_model(job.model) else "other"
        metrics.text_empty_generations.add(1, {"horde.model": label})
    if job.is_over_capacity:
        attributes = build_gate_shadow_attributes(
            owner_trusted=job.worker_owner_trusted, max_length=job.max_length
        )
        metrics.gate_shadow_service_seconds.record(seconds_since(job.start_time, now), attributes)
        outcome = GateShadowOutcome.COMPLETED.value
        metrics.gate_shadow_outcomes.add(1, attributes | {"horde.outcome": outcome})


def count_worker_fault(fault_reason: str | None, job: JobFacts) -> None:
    """Count a faulted chat submit by the reason sent; a worker's own words are never an
    attribute.
    """
    metrics.chat_worker_faults.add(
        1,
        {
            "horde.reason": name_fault_reason(fault_reason),
            "horde.worker_trusted": job.worker_owner_trusted,
        },
    )
