# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text and chat jobs: the rows that a claim gets, and what later steps need to know of one."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Select, String, bindparam, cast, exists, func, select
from sqlalchemy.orm import Session

from horde.chat.job import CHAT_STREAM_PROGRESS_KEY, streams_progress
from horde.chat.wire import ChatExtras
from horde.chat_progress import STALE_JOBS_PERIOD_SECONDS
from horde.classes.base.kudos import KudosReservation
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.user import User, UserRole, UserRoleTypes
from horde.classes.base.waiting_prompt import TerminalOutcome, WPAllowedWorkers
from horde.classes.kobold.processing_generation import (
    LeaseOwner,
    TextProcessingGeneration,
    seconds_since,
)
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt, select_as_sent
from horde.classes.kobold.worker import TextWorker
from horde.database.queue_claims import ClaimedRequest
from horde.database.queue_classes import TEXT_FAMILY
from horde.db import execute_later, table_of
from horde.hot_session import keep, keep_insert

jobs = table_of(TextProcessingGeneration)
requests = table_of(TextWaitingPrompt)
workers = table_of(TextWorker)
users, roles = table_of(User), table_of(UserRole)
targets, holds = table_of(WPAllowedWorkers), table_of(KudosReservation)


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
    models: Sequence[str],
    now: datetime,
    *,
    owner: LeaseOwner,
    is_fake: bool = False,
) -> AssignedJobs:
    """Write a job row for each generation claimed, in the transaction of the claim.

    The model is chosen once, from what this pop offers; on chat it is the model the worker
    declared. Fake jobs keep a paused worker busy: they look the same and count for nothing. A
    streamed job gets its lease after the commit.
    """
    model = _choose_model(claimed, worker, models)
    ids = tuple(uuid4() for _ in range(claimed.taken))
    ttl = TextProcessingGeneration.set_job_ttl()
    request = claimed.request
    is_over = not is_fake and TextProcessingGeneration.is_over_capacity(
        is_chat=request.is_chat, max_length=request.max_length, speed=worker.gate_speed
    )
    shared = {
        "procgen_type": TEXT_FAMILY,
        "model": model,
        "seed": 0,
        "start_time": now,
        "created": now,
        "cancelled": False,
        "faulted": False,
        "fake": is_fake,
        "censored": False,
        "job_ttl": ttl,
        "wp_id": request.id,
        "worker_id": worker.id,
        "over_capacity_at_assignment": is_over,
        **request.get_generation_assignment(worker),
    }
    statement = keep_insert(jobs, ("id", *shared))
    for job_id in ids:
        execute_later(session, statement, {"id": job_id, **shared})
    if streams_progress(request.chat_extras):
        for job_id in ids:
            TextProcessingGeneration._write_stream_lease(
                session,
                job_id=job_id,
                wp_id=request.id,
                worker=worker,
                model=model,
                owner=owner,
                max_length=request.max_length,
                is_fake=is_fake,
                started=now,
                job_ttl=ttl,
            )
    return AssignedJobs(
        ids=ids, wp_id=request.id, model=model, ttl_seconds=ttl, is_over_capacity=is_over
    )


def _choose_model(claimed: ClaimedRequest, worker: TextWorker, models: Sequence[str]) -> str:
    if claimed.request.is_chat:
        return worker.chat_model_id or ""
    wanted = set(claimed.models)
    return random.choice([model for model in models if model in wanted] if wanted else list(models))


def _build_find_job() -> Select[Any]:
    is_trusted = (
        (roles.c.user_id == workers.c.user_id)
        & (roles.c.user_role == UserRoleTypes.TRUSTED)
        & roles.c.value
    )
    hold_id = func.concat("upfront:", cast(requests.c.id, String))
    return (
        select(
            jobs.c.id,
            jobs.c.wp_id,
            jobs.c.worker_id,
            jobs.c.model,
            jobs.c.generation.is_not(None).label("is_completed"),
            jobs.c.faulted.label("is_faulted"),
            jobs.c.fake.label("is_fake"),
            jobs.c.start_time,
            jobs.c.job_ttl,
            jobs.c.assigned_model,
            jobs.c.chat_refusal_rc,
            jobs.c.over_capacity_at_assignment.label("is_over_capacity"),
            requests.c.is_chat,
            select_as_sent(requests.c, "chat_extras"),
            requests.c.chat_conformance,
            requests.c.max_length,
            requests.c.max_context_length,
            requests.c.softprompt,
            requests.c.style_id,
            func.length(requests.c.prompt).label("prompt_characters"),
            requests.c.user_id.label("requester_id"),
            users.c.usage_multiplier.label("requester_usage_multiplier"),
            requests.c.sharedkey_id,
            requests.c.client_agent,
            exists().where(targets.c.wp_id == requests.c.id).label("lists_workers"),
            exists().where(holds.c.business_id == hold_id, holds.c.active).label("has_hold"),
            (func.coalesce(requests.c.terminal_outcome, "") == TerminalOutcome.CANCELLED).label(
                "is_request_cancelled"
            ),
            requests.c.webhook,
            workers.c.name.label("worker_name"),
            workers.c.user_id.label("worker_owner_id"),
            exists().where(is_trusted).label("worker_owner_trusted"),
            workers.c.bridge_agent,
        )
        .join(requests, requests.c.id == jobs.c.wp_id)
        .join(workers, workers.c.id == jobs.c.worker_id)
        .join(users, users.c.id == requests.c.user_id)
        .where(jobs.c.id == bindparam("job_id"), jobs.c.procgen_type == TEXT_FAMILY)
    )


_FIND_JOB = keep(_build_find_job())


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
