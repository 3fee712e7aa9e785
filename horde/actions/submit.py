# SPDX-License-Identifier: AGPL-3.0-or-later
"""A worker's submit: the job, the shape of what came, the reply's verification, the settlement.

Source: docs/reference/text_requests.md and docs/reference/chat_requests.md, "Structured submit".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from horde_sdk.generation_parameters.text.chat_policy import ChatConformance
from horde_sdk.worker.chat_declaration import ChatFinishReason

from horde import metrics
from horde.actions.chat_refusals import record_refusal, record_worker_fault
from horde.actions.job_faults import build_lost_refusal, fault, name_fault_reason
from horde.actions.settle_jobs import settle_or_refuse
from horde.chat.reply import chat_reply_finish_reason, explain_cut_reply
from horde.chat.submission import (
    ChatSubmission,
    check_submitted_model,
    check_text_job_submission,
    is_chat_submission,
    parse_chat_submission,
)
from horde.chat.wire import Reply
from horde.classes.kobold.chat_request import verify_chat_reply
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.config import Config
from horde.database.settlements import Submitted
from horde.database.stats import get_horde_modes
from horde.database.text_admission import UNKNOWN_KEY
from horde.database.text_jobs import TextJob, find_job, show_fake_as_real
from horde.database.text_status import CSAM_METADATA
from horde.database.users import Caller, find_caller
from horde.database.workers import parse_id
from horde.db import reading
from horde.exceptions import (
    BadRequest,
    Forbidden,
    HordeError,
    NotFound,
    PayloadInvalid,
    Unauthorized,
)
from horde.return_codes import ReturnCode
from horde.shapes.base import parse_shape
from horde.shapes.jobs import SubmissionState, TextSubmitBody

MAX_METADATA_ENTRIES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A submit as it came.

    `text_body` is None where the body carries keys of a structured reply: which of the two it has
    to be, the job tells.
    """

    raw_body: Mapping[str, object] = field(repr=False)
    text_body: TextSubmitBody | None = field(repr=False)
    api_key: str = field(repr=False)
    config: Config
    now: datetime


def parse_text_body(raw_body: Mapping[str, object]) -> TextSubmitBody | None:
    """The reply to a text job; None for a body with keys of a structured reply. Raises
    PayloadInvalid.
    """
    return None if is_chat_submission(raw_body) else parse_shape(TextSubmitBody, raw_body)


def submit_job(submit: Submit) -> float:
    """Store a reply or a fault of a job, text or chat; the reward in kudos.

    A refused reply of a chat job is recorded and leaves the job pending. Raises NotFound,
    Unauthorized, Forbidden, PayloadInvalid or BadRequest.
    """
    job, is_raid = require_submittable(submit)
    if job.is_chat:
        return submit_chat(submit, job, is_raid=is_raid)
    return submit_text(submit, job, is_raid=is_raid)


def require_submittable(submit: Submit) -> tuple[TextJob, bool]:
    """The job of a submit and whether there is a raid; raises NotFound, Unauthorized or
    Forbidden.
    """
    job_id = submit.raw_body.get("id")
    if not isinstance(job_id, str):
        raise PayloadInvalid({"id": "has to be a string"})
    parsed = parse_id(job_id)
    with reading() as session:
        job = None if parsed is None else find_job(session, parsed)
        caller = find_caller(session, submit.api_key)
        is_raid = get_horde_modes(session).raid
    if job is not None and caller is None:
        raise Unauthorized(UNKNOWN_KEY, ReturnCode.INVALID_API_KEY)
    return show_fake_as_real(require_job(job, caller, job_id), submit.now), is_raid


def require_job(job: TextJob | None, caller: Caller | None, job_id: str) -> TextJob:
    """The job of a submit in the hands of its worker's owner; raises NotFound or Forbidden."""
    if job is None:
        message = f"Processing generation '{job_id[:64]}' is unknown, or its request has expired."
        raise NotFound(message, ReturnCode.INVALID_JOB_ID)
    if caller is None or caller.id != job.worker_owner_id:
        message = f"The worker '{job.worker_name}' of this job belongs to another user."
        raise Forbidden(message, ReturnCode.WRONG_CREDENTIALS)
    return job


def submit_text(submit: Submit, job: TextJob, *, is_raid: bool) -> float:
    """Store the reply of a text job, or end it; the reward."""
    body = submit.text_body
    if body is None:
        check_text_job_submission(submit.raw_body)
        body = parse_text_submission_with_chat_keys(submit.raw_body)
    if body.state is SubmissionState.FAULTED:
        return fault(job, is_raid=is_raid, now=submit.now)
    if not job.is_pending:
        raise build_lost_refusal(job)
    submitted = build_text_submission(body, job)
    return settle_or_refuse(job, submitted, config=submit.config, now=submit.now)


def submit_chat(submit: Submit, job: TextJob, *, is_raid: bool) -> float:
    """Store the structured reply of a chat job, or end it; the reward."""
    is_fault = submit.raw_body.get("state") == SubmissionState.FAULTED
    if not job.is_pending and not (is_fault and job.is_faulted):
        raise build_lost_refusal(job)
    try:
        submission = prepare_chat_submission(submit.raw_body, job)
        if submission.state is SubmissionState.FAULTED:
            count_worker_fault(submission.fault_reason, job)
            record_worker_fault(job, submission.fault_reason)
            return fault(job, is_raid=is_raid, now=submit.now, fault_reason=submission.fault_reason)
        submitted, dropped_tool_calls = require_chat_submission(submission, job)
    except HordeError as refused:
        record_refusal(job, refused)
        raise
    return settle_or_refuse(
        job,
        submitted,
        dropped_tool_calls=dropped_tool_calls,
        config=submit.config,
        now=submit.now,
    )


def prepare_chat_submission(raw_body: Mapping[str, object], job: TextJob) -> ChatSubmission:
    """The submit with its shape and its model checked; raises BadRequest."""
    submission = parse_chat_submission(raw_body)
    check_submitted_model(submission, job.assigned_model)
    return submission


def parse_text_submission_with_chat_keys(raw: Mapping[str, object]) -> TextSubmitBody:
    """The submit of a text job by a worker that sends chat's keys: a fault needs no `generation`
    then, as on chat.
    """
    is_fault = raw.get("state") == SubmissionState.FAULTED and raw.get("generation") is None
    return parse_shape(TextSubmitBody, {**raw, "generation": ""} if is_fault else raw)


def build_text_submission(body: TextSubmitBody, job: TextJob) -> Submitted:
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
    state: SubmissionState, metadata: Sequence[Mapping[str, object]]
) -> tuple[Sequence[Mapping[str, object]] | None, bool]:
    """The stored metadata and whether the reply is censored: the state and a csam entry each imply
    the other.
    """
    has_entry = CSAM_METADATA in metadata
    if state is SubmissionState.CSAM and not has_entry:
        metadata = [*metadata, CSAM_METADATA]
    is_censored = state in {SubmissionState.CENSORED, SubmissionState.CSAM} or has_entry
    return metadata or None, is_censored


def require_chat_submission(submission: ChatSubmission, job: TextJob) -> tuple[Submitted, int]:
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


def count_worker_fault(fault_reason: str | None, job: TextJob) -> None:
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
