# SPDX-License-Identifier: AGPL-3.0-or-later
"""Jobs that end without a reply: what that does to their request and to their worker."""

from dataclasses import dataclass
from datetime import datetime
from functools import partial

from horde_sdk.worker.chat_declaration import ChatFaultReason
from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from horde.classes.base.kudos import upfront_hold_id
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.stats import TextGenState, TextGenStatistic
from horde.classes.base.suspicion import Suspicion
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.database.job_endings import log_worker_abort, mark_counted_drop
from horde.database.kudos import release_hold
from horde.database.queue_claims import announce_returned_work
from horde.database.settlements import build_unserved_statistic
from horde.database.suspects import suspect_worker
from horde.database.text_jobs import TextJob, count_finished_jobs
from horde.database.text_requests import has_pending_jobs
from horde.database.workers import announce_worker_change
from horde.db import after_commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What faulting a job did; `is_applied` is False for the loser of a race."""

    is_applied: bool
    is_fake: bool = False
    is_request_faulted: bool = False
    finished_count: int = 0
    fault_reason: str | None = None  # what the request's status tells of it, when the horde knows
    fault_rc: str | None = None


def fault_job(
    session: Session,
    job: TextJob,
    *,
    is_raid: bool,
    now: datetime,
    fault_reason: str | None = None,
    blames_worker: bool = True,
) -> Fault:
    """End a job without a reply: its generation goes back to the request, its worker's counters
    move, once.

    The request is faulted by the fault that crosses the limit. Fakes move nothing. Without
    `blames_worker` the worker's counters stay: the horde itself could not give the job.
    """
    outcome = ProcessingGeneration.fault_and_restart(session, job_id=job.id, wp_id=job.wp_id)
    if outcome.is_applied and job.is_streamed:
        TextProcessingGeneration.end_progress_after_fault(session, job_id=job.id)
    if not outcome.is_applied or outcome.is_fake:
        return Fault(is_applied=outcome.is_applied, is_fake=outcome.is_fake)
    is_request_faulted = WaitingPrompt.mark_faulted_after_repeated_faults(session, job.wp_id)
    if outcome.is_restarted and not is_request_faulted:
        announce_returned_work(session, job.wp_id)
    if (is_request_faulted or not outcome.is_restarted) and not has_pending_jobs(
        session, job.wp_id
    ):
        release_hold(session, upfront_hold_id(job.wp_id), now)
    session.execute(
        insert(TextGenStatistic).values(build_unserved_statistic(job, TextGenState.FAULTED, now))
    )
    if blames_worker:
        _blame_worker(session, job, fault_reason, is_raid=is_raid, now=now)
    if not is_request_faulted:
        return Fault(is_applied=True)
    reason, rc = session.execute(
        select(TextWaitingPrompt.chat_fault_reason, TextWaitingPrompt.chat_fault_rc).where(
            TextWaitingPrompt.id == job.wp_id
        )
    ).one()
    return Fault(
        is_applied=True,
        is_request_faulted=True,
        finished_count=count_finished_jobs(session, job.wp_id),
        fault_reason=reason,
        fault_rc=rc,
    )


def _blame_worker(
    session: Session, job: TextJob, fault_reason: str | None, *, is_raid: bool, now: datetime
) -> None:
    """Move the counters of a dropped job's worker, and announce the maintenance that may follow."""
    counts = not _is_estimate_at_fault(job, fault_reason) and (
        mark_counted_drop(session, job_id=job.id, wp_id=job.wp_id, worker_id=job.worker_id)
    )
    drops_too_many = log_worker_abort(
        session,
        worker_id=job.worker_id,
        refusal_rc=job.chat_refusal_rc,
        counts=counts,
        is_raid=is_raid,
        now=now,
    )
    if not drops_too_many:
        return
    reason = Suspicion.TOO_MANY_JOBS_ABORTED
    after_commit(session, partial(suspect_worker, job.worker_id, job.worker_owner_id, reason))
    if not is_raid:
        announce_worker_change(session, job.worker_id, job.worker_name)


def _is_estimate_at_fault(job: TextJob, fault_reason: str | None) -> bool:
    """Whether a worker gave a job up for the length of its prompt, which the horde let pass.

    Every chat request was estimated to fit, or it would have been refused. A worker whose reply was
    refused had room for the prompt, whatever it says.
    """
    is_overflow = fault_reason == ChatFaultReason.PROMPT_OVERFLOW
    return is_overflow and job.is_chat and job.chat_refusal_rc is None


def record_job_refusal(session: Session, job: TextJob, rc: str) -> None:
    """Keep the return code of a refused reply on a job that is still pending: it decides how a
    later fault counts.
    """
    session.execute(
        update(TextProcessingGeneration)
        .where(
            TextProcessingGeneration.id == job.id,
            TextProcessingGeneration.generation.is_(None),
            ~TextProcessingGeneration.faulted,
        )
        .values(chat_refusal_rc=rc)
        .execution_options(synchronize_session=False)
    )
