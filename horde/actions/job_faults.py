# SPDX-License-Identifier: AGPL-3.0-or-later
"""Ending a job without a reply: given up by its worker, or given back by the horde."""

from datetime import datetime
from uuid import UUID

from sqlalchemy.orm import Session

from horde import metrics, tally
from horde.chat_contract import WORKER_FAULT_MESSAGES
from horde.chat_signal import ChatEvent, publish_chat_event
from horde.classes.kobold.processing_generation import (
    GateShadowOutcome,
    build_gate_shadow_attributes,
)
from horde.database.job_faults import Fault, fault_job
from horde.database.request_endings import record_chat_refusal
from horde.database.text_jobs import TextJob, find_job
from horde.db import run_transaction
from horde.exceptions import BadRequest
from horde.logger import get_logger
from horde.return_codes import ReturnCode

logger = get_logger(__name__)

UNREADABLE_INPUT = "The horde could not read the images of the request."


def fault(job: TextJob, *, is_raid: bool, now: datetime, fault_reason: str | None = None) -> float:
    """End a job without a reply; 0, also for a job that was faulted before. Raises BadRequest for a
    completed one.
    """
    if job.is_completed:
        raise build_lost_refusal(job)

    def work(session: Session) -> tuple[Fault, TextJob | None]:
        outcome = fault_job(session, job, is_raid=is_raid, now=now, fault_reason=fault_reason)
        return outcome, None if outcome.is_applied else find_job(session, job.id)

    outcome, ended = run_transaction(work)
    if ended is not None and ended.is_completed:
        raise build_lost_refusal(ended)
    if outcome.is_applied and not outcome.is_fake:
        tally.count_fault(job.worker_id, name_fault_reason(fault_reason))
        _report_fault(job, outcome)
    return 0.0


def name_fault_reason(fault_reason: str | None) -> str:
    """The reason when it is a known one; `none` without one, `unknown` for a worker's own words."""
    if fault_reason is None:
        return tally.NO_REASON
    return fault_reason if fault_reason in WORKER_FAULT_MESSAGES else "unknown"


def build_lost_refusal(job: TextJob) -> BadRequest:
    """The refusal of a submit for a job that ended before, however it ended."""
    if job.is_completed:
        message = f"Processing generation '{job.id}' was already submitted."
        return BadRequest(message, ReturnCode.DUPLICATE_GEN)
    message = (
        f"Processing generation '{job.id}' took too long or was aborted. "
        f"Generations have to be completed within {job.job_ttl} seconds."
    )
    return BadRequest(message, ReturnCode.ABORTED_GEN)


def give_back_unreadable(job_id: UUID, now: datetime) -> None:
    """End a chat job whose images the horde cannot read. It counts against the request, never
    against the worker.
    """

    def work(session: Session) -> tuple[TextJob, Fault] | None:
        job = find_job(session, job_id)
        if job is None or not job.is_pending:
            return None
        rc = ReturnCode.CHAT_IMAGE_STORAGE_UNAVAILABLE
        record_chat_refusal(session, job.wp_id, UNREADABLE_INPUT, rc)
        return job, fault_job(session, job, is_raid=False, now=now, blames_worker=False)

    ended = run_transaction(work)
    if ended is not None and ended[1].is_applied:
        _report_fault(*ended)


def _report_fault(job: TextJob, outcome: Fault) -> None:
    logger.info(
        "horde.job_submit.faulted", extra={"job": str(job.id), "worker": str(job.worker_id)}
    )
    if job.is_over_capacity:
        attributes = build_gate_shadow_attributes(
            owner_trusted=job.worker_owner_trusted, max_length=job.max_length
        )
        metrics.gate_shadow_outcomes.add(
            1, attributes | {"horde.outcome": GateShadowOutcome.FAULTED.value}
        )
    if job.is_chat and outcome.is_request_faulted:
        publish_chat_event(
            job.wp_id,
            ChatEvent.FAULTED,
            outcome.finished_count,
            fault_reason=outcome.fault_reason,
            fault_rc=outcome.fault_rc,
        )
