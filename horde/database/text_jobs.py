# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text and chat jobs from the claim to the settled reply or the fault."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from functools import cache, partial
from typing import Any
from uuid import UUID, uuid4

from horde_sdk.worker.chat_declaration import ChatFaultReason
from sqlalchemy import (
    DateTime,
    Integer,
    Select,
    String,
    TextClause,
    Update,
    bindparam,
    cast,
    exists,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.orm import Session

from horde.chat.wire import ChatExtras
from horde.chat_progress import STALE_JOBS_PERIOD_SECONDS
from horde.classes.base.kudos import (
    APPENDING,
    KudosReservation,
    Movements,
    build_posting_parameters,
    upfront_hold_id,
)
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.stats import TextGenState, TextGenStatistic
from horde.classes.base.suspicion import Suspicion
from horde.classes.base.user import User, UserRole, UserRoleTypes
from horde.classes.base.waiting_prompt import (
    REQUEST_TTL,
    TerminalOutcome,
    WaitingPrompt,
    WPAllowedWorkers,
)
from horde.classes.kobold.chat_request import CHAT_STREAM_PROGRESS_KEY, streams_progress
from horde.classes.kobold.pricing import (
    build_generation_movements,
    compute_generation_charge,
    compute_text_kudos,
    count_text_tokens,
)
from horde.classes.kobold.processing_generation import (
    LeaseOwner,
    TextProcessingGeneration,
    compute_speed_sample,
    seconds_since,
)
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt, select_as_sent
from horde.classes.kobold.worker import TextWorker
from horde.database.job_endings import log_worker_abort, mark_counted_drop, settle_cancelled
from horde.database.kudos import append_movements, release_hold
from horde.database.queue_claims import ClaimedRequest, announce_returned_work
from horde.database.queue_classes import TEXT_FAMILY
from horde.database.suspects import suspect_worker
from horde.database.text_requests import has_pending_jobs
from horde.database.users import charge_shared_key
from horde.database.workers import announce_worker_change
from horde.db import after_commit, execute_later, table_of
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
class JobFacts:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What a stored reply moved. `is_done` when it was the request's last."""

    kudos: Decimal
    finished_count: int
    is_done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A verified reply, ready to be stored: the job's columns, the tokens it is priced by, and
    those its worker is timed by.
    """

    columns: dict[str, Any] = field(repr=False)
    tokens: int
    generated_tokens: int
    is_censored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model reference says of the model that served a job; multiplier in billions of
    parameters.
    """

    multiplier: float
    is_known: bool
    is_validated: bool  # the worker's program is one whose results are taken at full value
    is_targeted: bool = False  # the horde pays a fixed sum for requests that list workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What faulting a job did; `is_applied` is False for the loser of a race."""

    is_applied: bool
    is_fake: bool = False
    is_request_faulted: bool = False
    finished_count: int = 0
    fault_reason: str | None = None  # what the request's status tells of it, when the horde knows
    fault_rc: str | None = None


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


def find_job(session: Session, job_id: UUID) -> JobFacts | None:
    """A text or chat job by id, in one statement; None when it is unknown or went with its expired
    request.
    """
    row = session.execute(_FIND_JOB, {"job_id": job_id}).one_or_none()
    return None if row is None else JobFacts(**row._mapping)


def show_fake_as_real(job: JobFacts, now: datetime) -> JobFacts:
    """A job as its worker has to see it: a fake has ended when a real one would have been aborted
    or settled.

    No row tells that of a fake: it is never faulted, so that nothing of the request moves.
    """
    if not job.is_fake or not job.is_pending:
        return job
    is_lapsed = seconds_since(job.start_time, now) > job.job_ttl + STALE_JOBS_PERIOD_SECONDS
    is_settled = job.is_streamed and job.is_request_cancelled
    return replace(job, is_faulted=True) if is_lapsed or is_settled else job


def compute_job_kudos(job: JobFacts, tokens: int, model: ModelFacts) -> Decimal:
    """What a reply of so many tokens to a job earns its worker."""
    return compute_text_kudos(
        reply_tokens=tokens,
        prompt_tokens=count_text_tokens(job.prompt_characters, job.max_length),
        multiplier=model.multiplier,
        is_known=model.is_known,
        owner_trusted=job.worker_owner_trusted,
        validated=model.is_validated,
        targeted=model.is_targeted,
    )


def settle_job(
    session: Session, job: JobFacts, submitted: Submitted, kudos: Decimal, now: datetime
) -> Settlement | None:
    """Store a reply and everything it moves, once; None for the loser of a race, whose transaction
    must be rolled back.

    Locks the request first, so that whoever stores the last reply sees all others and ends the
    request.
    """
    charge = compute_generation_charge(kudos, censored=submitted.is_censored)
    movements = _build_movements(job, kudos, is_censored=submitted.is_censored)
    execute_later(session, _LOCK_REQUEST, {"wp_id": job.wp_id})
    columns = submitted.columns | {"censored": submitted.is_censored}
    values = {
        **{f"new_{name}": value for name, value in columns.items()},
        **_build_samples(job, submitted, now),
        **build_posting_parameters(job.id, movements, now),
        "job_id": job.id,
        "wp_id": job.wp_id,
        "charge": round(charge),
        "new_expiry": now + REQUEST_TTL,
        "hold_id": upfront_hold_id(job.wp_id),
    }
    row = session.execute(_build_settlement(frozenset(columns)), values).one_or_none()
    if row is None:
        return None
    if job.is_streamed:
        TextProcessingGeneration.end_progress_after_submit(session, job_id=job.id)
    if job.sharedkey_id is not None:
        charge_shared_key(session, job.sharedkey_id, charge)
    return Settlement(kudos=kudos, finished_count=row.finished_count, is_done=row.is_done)


_LOCK_REQUEST = keep(
    select(requests.c.id).where(requests.c.id == bindparam("wp_id")).with_for_update(key_share=True)
)


@cache
def _build_settlement(names: frozenset[str]) -> TextClause:
    """Everything that a stored reply moves as one statement, for the columns that a text or a chat
    reply has: the job, its request, its hold, four samples and the postings.

    No row, and nothing written, when the job is no longer pending. The request's row has to be
    locked before: the counts are as of the statement's begin.
    """
    stored = ", ".join(f"{name} = :new_{name}" for name in sorted(names))
    settlement = text(f"""
    WITH claimed AS (
        UPDATE processing_gens SET {stored}
        WHERE id = :job_id AND generation IS NULL AND NOT faulted
        RETURNING id
    ), others AS (
        SELECT count(*) FILTER (WHERE generation IS NOT NULL) AS finished,
            count(*) FILTER (WHERE generation IS NULL AND NOT faulted) AS pending
        FROM processing_gens WHERE wp_id = :wp_id AND id <> :job_id AND NOT fake
    ), counted AS (
        SELECT others.finished + 1 AS finished_count, others.pending = 0 AS is_idle,
            request.faulted,
            request.n = 0 AND (
                others.finished + 1 >= request.jobs OR request.terminal_outcome IS NOT NULL
            ) AS is_complete
        FROM claimed, others, waiting_prompts AS request WHERE request.id = :wp_id
    ), outcome AS (
        SELECT finished_count, is_idle AND is_complete AND NOT faulted AS is_done,
            is_idle AND (is_complete OR faulted) AS is_end
        FROM counted
    ), charged AS (
        UPDATE waiting_prompts AS request SET
            consumed_kudos = request.consumed_kudos + :charge,
            expiry = greatest(request.expiry, :new_expiry),
            terminal_outcome = CASE
                WHEN is_end THEN coalesce(request.terminal_outcome, 'completed')
                ELSE request.terminal_outcome END,
            terminal_recorded_at = CASE
                WHEN is_end AND request.terminal_outcome IS NULL THEN :now
                ELSE request.terminal_recorded_at END
        FROM outcome WHERE request.id = :wp_id
    ), released AS (
        UPDATE kudos_reservations SET active = false, released_at = :now
        FROM outcome WHERE is_end AND business_id = :hold_id AND active
    ), worker_sample AS (
        INSERT INTO worker_performances (worker_id, performance, generated_tokens, seconds, created)
        SELECT :worker_id, :speed, :generated_tokens, :seconds, :now FROM outcome
    ), model_sample AS (
        INSERT INTO model_performances (model, performance, created)
        SELECT :model, :speed, :now FROM outcome
    ), fulfilment AS (
        INSERT INTO horde_fulfillments (things, thing_type, deliver_time, created)
        SELECT :things, 'text', :deliver_time, :now FROM outcome
    ), statistic AS (
        INSERT INTO text_gen_stats (
            finished, created, model, max_length, max_context_length, softprompt, prompt_length,
            client_agent, bridge_agent, state, style_id
        )
        SELECT :now, :start_time, :model, :max_length, :max_context_length, :softprompt,
            :prompt_length,
            :client_agent, :bridge_agent, CAST(:state AS textgenstate), CAST(:style_id AS uuid)
        FROM outcome
    ), {APPENDING.format(source="outcome")}
    SELECT finished_count, is_done FROM outcome
    """)
    types = {name: jobs.c[name].type for name in names}
    return keep(
        settlement.bindparams(*(bindparam(f"new_{name}", type_=types[name]) for name in names))
    )


def _build_movements(job: JobFacts, kudos: Decimal, *, is_censored: bool = False) -> Movements:
    """What a job earned its worker and costs its requester."""
    return build_generation_movements(
        kudos=kudos,
        max_length=job.max_length,
        worker_id=job.worker_id,
        owner_id=job.worker_owner_id,
        owner_trusted=job.worker_owner_trusted,
        requester_id=job.requester_id,
        requester_usage_multiplier=job.requester_usage_multiplier,
        reservation_id=upfront_hold_id(job.wp_id) if job.has_hold else None,
        censored=is_censored,
    )


def settle_cancelled_job(
    session: Session, job: JobFacts, *, character_count: int, kudos: Decimal, now: datetime
) -> bool:
    """Pay for what a streamed job had posted when its request was cancelled, and end it; False when
    it had ended before.

    The caller cancelled the request in this transaction, so its row is locked and no submit is
    between the two steps. It is no sample of a speed, no drop of its worker, and is not restarted.
    """
    if not settle_cancelled(session, job_id=job.id, character_count=character_count):
        return False
    charge = compute_generation_charge(kudos)
    _charge_request(session, job, charge, now)
    session.execute(
        insert(TextGenStatistic).values(_build_unserved_statistic(job, TextGenState.CANCELLED, now))
    )
    append_movements(session, job.id, _build_movements(job, kudos), now)
    if job.sharedkey_id is not None:
        charge_shared_key(session, job.sharedkey_id, charge)
    return True


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


_CHARGE_REQUEST = keep(
    update(requests)
    .where(requests.c.id == bindparam("wp_id"))
    .values(
        consumed_kudos=requests.c.consumed_kudos + bindparam("charge", type_=Integer),
        expiry=func.greatest(requests.c.expiry, bindparam("new_expiry", type_=DateTime)),
    )
)


def store_fake_reply(session: Session, job: JobFacts, submitted: Submitted) -> bool:
    """End a fake job as a real one ends, so that its worker cannot tell them apart; nothing is paid
    or counted.
    """
    columns = submitted.columns | {"censored": submitted.is_censored}
    values = {f"new_{name}": value for name, value in columns.items()}
    statement = _build_reply_of_fake(frozenset(columns))
    is_stored = session.scalar(statement, {"job_id": job.id, **values}) is not None
    if is_stored and job.is_streamed:
        TextProcessingGeneration.end_progress_after_submit(session, job_id=job.id)
    return is_stored


def _charge_request(session: Session, job: JobFacts, charge: Decimal, now: datetime) -> None:
    """Add the charge to what a request has cost so far; its life is extended as by a pop."""
    facts = {"wp_id": job.wp_id, "charge": round(charge), "new_expiry": now + REQUEST_TTL}
    session.execute(_CHARGE_REQUEST, facts)


@cache
def _build_reply_of_fake(names: frozenset[str]) -> Update:
    return keep(
        update(jobs)
        .where(jobs.c.id == bindparam("job_id"), jobs.c.generation.is_(None), ~jobs.c.faulted)
        .values({name: bindparam(f"new_{name}", type_=jobs.c[name].type) for name in names})
        .returning(jobs.c.id)
    )


def _build_samples(job: JobFacts, submitted: Submitted, now: datetime) -> dict[str, Any]:
    seconds = seconds_since(job.start_time, now)
    speed = compute_speed_sample(submitted.tokens, seconds)
    state = TextGenState.CENSORED if submitted.is_censored else TextGenState.OK
    return _build_statistic(job, state, now) | {
        "worker_id": job.worker_id,
        "speed": speed,
        "seconds": max(seconds, 0.0),  # another host's clock may be behind
        "generated_tokens": submitted.generated_tokens,
        "things": submitted.tokens,
        "deliver_time": job.start_time,
        "now": now,
    }


def _build_statistic(job: JobFacts, state: TextGenState, now: datetime) -> dict[str, Any]:
    return {
        "finished": now,
        "start_time": job.start_time,
        "model": job.model,
        "max_length": job.max_length,
        "max_context_length": job.max_context_length,
        "softprompt": job.softprompt,
        "style_id": job.style_id,
        "prompt_length": job.prompt_characters,
        "client_agent": job.client_agent,
        "bridge_agent": job.bridge_agent,
        "state": state.name,
    }


def fault_job(
    session: Session,
    job: JobFacts,
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
        insert(TextGenStatistic).values(_build_unserved_statistic(job, TextGenState.FAULTED, now))
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
    session: Session, job: JobFacts, fault_reason: str | None, *, is_raid: bool, now: datetime
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


def _is_estimate_at_fault(job: JobFacts, fault_reason: str | None) -> bool:
    """Whether a worker gave a job up for the length of its prompt, which the horde let pass.

    Every chat request was estimated to fit, or it would have been refused. A worker whose reply was
    refused had room for the prompt, whatever it says.
    """
    is_overflow = fault_reason == ChatFaultReason.PROMPT_OVERFLOW
    return is_overflow and job.is_chat and job.chat_refusal_rc is None


def _build_unserved_statistic(job: JobFacts, state: TextGenState, now: datetime) -> dict[str, Any]:
    statistic = _build_statistic(job, state, now)
    return statistic | {"state": state, "created": statistic.pop("start_time")}


def count_finished_jobs(session: Session, wp_id: UUID) -> int:
    """Jobs of a request with a stored reply; fakes never count."""
    job = ProcessingGeneration
    return (
        session.scalar(
            select(func.count()).where(job.wp_id == wp_id, job.generation.is_not(None), ~job.fake)
        )
        or 0
    )


def record_job_refusal(session: Session, job: JobFacts, rc: str) -> None:
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
