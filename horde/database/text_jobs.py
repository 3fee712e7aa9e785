# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text and chat jobs: the rows that a claim gets, and what later steps need to know of one."""

from dataclasses import dataclass, fields, replace
from datetime import datetime
from uuid import UUID

from sqlalchemy import bindparam, column, func, select, text
from sqlalchemy.orm import Session

from horde.chat.job import CHAT_STREAM_PROGRESS_KEY, streams_progress
from horde.chat.wire import ChatExtras
from horde.chat_progress import STALE_JOBS_PERIOD_SECONDS
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.kobold.processing_generation import (
    LeaseOwner,
    TextProcessingGeneration,
    seconds_since,
)
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import TextWorker
from horde.database.queue_claims import ClaimedRequest
from horde.database.queue_classes import TEXT_FAMILY
from horde.db import WrittenJson, insert_rows, table_of
from horde.hot_session import keep

jobs = table_of(TextProcessingGeneration)
requests = table_of(TextWaitingPrompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedJobs:
    """The jobs of one pop, all of one request and with the same model."""

    ids: tuple[UUID, ...]
    wp_id: UUID
    model: str
    ttl_seconds: int
    is_over_capacity: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextJob:
    """A job with what its submit needs of the request and the worker; read without a lock."""

    id: UUID
    wp_id: UUID
    worker_id: UUID
    model: str
    is_completed: bool
    is_faulted: bool
    is_fake: bool
    start_time: datetime
    job_ttl: int
    assigned_model: str | None
    chat_refusal_rc: str | None
    is_over_capacity: bool
    is_chat: bool
    chat_extras: ChatExtras | None
    chat_conformance: str
    max_length: int
    max_context_length: int
    softprompt: str | None
    style_id: UUID | None
    prompt_characters: int
    requester_id: int
    requester_usage_multiplier: float
    sharedkey_id: UUID | None
    client_agent: str
    lists_workers: bool
    has_hold: bool
    is_request_cancelled: bool
    webhook: str | None
    worker_name: str
    worker_owner_id: int
    worker_owner_trusted: bool
    bridge_agent: str

    @property
    def is_pending(self) -> bool:
        """Whether it may still be submitted."""
        return not self.is_completed and not self.is_faulted

    @property
    def is_streamed(self) -> bool:
        """Whether its worker was asked for progress."""
        return streams_progress(self.chat_extras)


def assign_jobs(
    session: Session,
    claimed: ClaimedRequest,
    worker: TextWorker,
    now: datetime,
    *,
    owner: LeaseOwner,
    is_fake: bool = False,
) -> AssignedJobs:
    """The jobs of a claim. A streamed job gets its lease after the commit.

    The claim wrote their rows. Fake jobs, which keep a paused worker busy, are written here: they
    look the same and count for nothing.
    """
    ttl = TextProcessingGeneration.set_job_ttl()
    request = claimed.request
    is_over = not is_fake and TextProcessingGeneration.is_over_capacity(
        is_chat=request.is_chat, max_length=request.max_length, speed=worker.gate_speed
    )
    if is_fake:
        _write_fakes(session, claimed, worker, now, ttl)
    if streams_progress(request.chat_extras):
        for job_id in claimed.job_ids:
            TextProcessingGeneration._write_stream_lease(
                session,
                job_id=job_id,
                wp_id=request.id,
                worker=worker,
                model=claimed.model,
                owner=owner,
                max_length=request.max_length,
                is_fake=is_fake,
                started=now,
                job_ttl=ttl,
            )
    return AssignedJobs(
        ids=claimed.job_ids,
        wp_id=request.id,
        model=claimed.model,
        ttl_seconds=ttl,
        is_over_capacity=is_over,
    )


def _write_fakes(
    session: Session, claimed: ClaimedRequest, worker: TextWorker, now: datetime, ttl: int
) -> None:
    shared = {
        "procgen_type": TEXT_FAMILY,
        "model": claimed.model,
        "start_time": now,
        "created": now,
        "fake": True,
        "job_ttl": ttl,
        "wp_id": claimed.request.id,
        "worker_id": worker.id,
        **claimed.request.get_generation_assignment(worker),
    }
    insert_rows(session, jobs, [{"id": job_id, **shared} for job_id in claimed.job_ids])


_FIND_JOB = keep(
    text("SELECT * FROM find_job(:job_id)").columns(
        *(
            column(fact.name, WrittenJson if fact.name == "chat_extras" else None)
            for fact in fields(TextJob)
        )
    )
)


def find_job(session: Session, job_id: UUID) -> TextJob | None:
    """A text or chat job by id, in one statement; None when it is unknown or went with its expired
    request.
    """
    row = session.execute(_FIND_JOB, {"job_id": job_id}).one_or_none()
    return None if row is None else TextJob(**row._mapping)


def show_fake_as_real(job: TextJob, now: datetime) -> TextJob:
    """A job as its worker has to see it: a fake has ended when a real one would have been aborted
    or settled.

    No row tells that of a fake: it is never faulted, so that nothing of the request moves.
    """
    if not job.is_fake or not job.is_pending:
        return job
    is_lapsed = seconds_since(job.start_time, now) > job.job_ttl + STALE_JOBS_PERIOD_SECONDS
    is_settled = job.is_streamed and job.is_request_cancelled
    return replace(job, is_faulted=True) if is_lapsed or is_settled else job


_LIST_STREAMED_JOBS = keep(
    select(jobs.c.id, jobs.c.fake)
    .join(requests, requests.c.id == jobs.c.wp_id)
    .where(
        jobs.c.wp_id == bindparam("wp_id"),
        jobs.c.generation.is_(None),
        ~jobs.c.faulted,
        requests.c.chat_extras.has_key(CHAT_STREAM_PROGRESS_KEY),
    )
    .order_by(jobs.c.id)
)


def list_streamed_jobs(session: Session, wp_id: UUID) -> list[tuple[UUID, bool]]:
    """(id, is fake) of each job in flight of a request that streams; none of any other."""
    return [(row.id, row.fake) for row in session.execute(_LIST_STREAMED_JOBS, {"wp_id": wp_id})]


def count_finished_jobs(session: Session, wp_id: UUID) -> int:
    """Jobs of a request with a stored reply; fakes never count."""
    job = ProcessingGeneration
    return (
        session.scalar(
            select(func.count()).where(job.wp_id == wp_id, job.generation.is_not(None), ~job.fake)
        )
        or 0
    )


_FIND_JOB_END = select(
    jobs.c.generation.is_not(None).label("is_completed"),
    jobs.c.faulted,
    jobs.c.fake,
    jobs.c.start_time,
    jobs.c.job_ttl,
).where(jobs.c.id == bindparam("job_id"), jobs.c.procgen_type == TEXT_FAMILY)


def is_job_aborted(session: Session, job_id: UUID, now: datetime) -> bool:
    """Whether nothing is wanted of a job any more: it is faulted, or unknown, as when its request
    has expired.

    A fake is never faulted, so it counts as aborted when a real one would be: past its lease.
    """
    row = session.execute(_FIND_JOB_END, {"job_id": job_id}).one_or_none()
    if row is None or row.faulted:
        return True
    return bool(
        row.fake and not row.is_completed and seconds_since(row.start_time, now) > row.job_ttl
    )
