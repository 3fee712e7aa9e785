# SPDX-License-Identifier: AGPL-3.0-or-later
"""The periodic jobs. Each opens its own transactions and may run twice, also on two hosts at once:
what one run did, another finds done. `background` decides when, and which process leads.

Source: docs/reference/background-jobs.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.orm import Session

from horde import chat_signal, clock, metrics, model_reference, object_deletes, tally
from horde.chat_progress import STALE_JOBS_PERIOD_SECONDS
from horde.chat_signal import ChatEvent
from horde.classes.base.kudos import upfront_hold_id
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.waiting_prompt import FAULTED_GENERATIONS_LIMIT, WaitingPrompt
from horde.classes.kobold.processing_generation import (
    GateShadowOutcome,
    build_gate_shadow_attributes,
)
from horde.classes.kobold.queue_class import compute_queue_class
from horde.classes.kobold.waiting_prompt import (
    TextWaitingPrompt,
    delete_stored_chat_images,
    retry_chat_image_deletes,
)
from horde.config import Config
from horde.database.job_faults import fault_job
from horde.database.kudos import FOLD_BATCH, fold_postings, release_hold, release_holds
from horde.database.queue_classes import (
    TEXT_FAMILY,
    build_text_work,
    get_needs_of_classes,
    list_unclassified_requests,
)
from horde.database.request_endings import list_object_keys
from horde.database.samples import prune_samples, refresh_worker_speeds
from horde.database.stats import (
    MODELS_REBUILD_SECONDS,
    TOTALS_REBUILD_SECONDS,
    compute_model_figures,
    compute_totals,
    get_horde_modes,
    publish_model_figures,
    publish_totals,
)
from horde.database.text_jobs import TextJob, find_job
from horde.database.text_queue import (
    list_gained_rows,
    list_queue_rows,
    note_seen_rows,
    publish_queue,
)
from horde.database.text_requests import has_pending_jobs
from horde.database.workers import (
    WORKERS_REBUILD_SECONDS,
    compute_online_worker_records,
    publish_online_worker_records,
)
from horde.db import after_commit, retry_deadlocks, run_transaction, transaction
from horde.logger import get_logger
from horde.pop_epochs import list_marks_of_models, move_marks
from horde.text_work import publish_text_work

logger = get_logger(__name__)

EXPIRED_REQUESTS_A_BATCH = 200
# Its images take a minute at most; what is older lost its process.
INACTIVE_REQUEST_TTL = timedelta(minutes=5)
STALE_JOBS_A_BATCH = 1000
FOLD_CYCLES_A_TICK = 10
UNCLASSIFIED_REQUESTS_A_BATCH = 200
ANNOUNCED_REQUESTS_A_TICK = 100  # of a queue that is new to the leader; its marks move all the same


@dataclass(frozen=True, slots=True)
class PeriodicJob:
    """Something to run every so often, on the leader alone or in every process."""

    name: str
    period_seconds: float
    run: Callable[[], object]
    leader_only: bool = True


@dataclass(frozen=True, slots=True)
class ChatFault:
    """A chat request that ended without its result, as those who wait for it are told."""

    request_id: UUID
    generations: int
    fault_reason: str | None
    fault_rc: str | None


def list_jobs(config: Config) -> list[PeriodicJob]:
    """Every periodic job of a process with these settings."""
    jobs = [
        PeriodicJob("queue_order", 1.0, publish_queue_order),
        PeriodicJob("kudos", 3.0, fold_kudos),
        PeriodicJob("queue_classes", 10.0, classify_requests),
        PeriodicJob("models", MODELS_REBUILD_SECONDS, publish_models),
        PeriodicJob("workers", WORKERS_REBUILD_SECONDS, publish_workers),
        PeriodicJob("worker_speeds", 30.0, refresh_worker_speeds),
        PeriodicJob("totals", TOTALS_REBUILD_SECONDS, publish_horde_totals),
        PeriodicJob("samples", 60.0, prune_samples),
        PeriodicJob("requests", STALE_JOBS_PERIOD_SECONDS, check_waiting_prompts),
    ]
    if config.text_model_reference:
        refresh = partial(model_reference.refresh_text_models, config.text_model_reference)
        jobs.append(PeriodicJob("model_reference", 3600.0, refresh, leader_only=False))
    return jobs


# Requests and jobs that nobody ended


def check_waiting_prompts() -> None:
    """Abort jobs past their lease, fault requests that failed too often, and delete what expired.

    In this order, so that a job is recorded as aborted before its request goes. Stored objects that
    could not be deleted with their request are tried again last.
    """
    abort_stale_jobs()
    fault_failing_requests()
    delete_expired_requests()
    retry_chat_image_deletes()


def abort_stale_jobs() -> int:
    """Abort each pending job whose lease is over and give its generation back; how many it aborted.

    All of them, in batches: an abort comes one period after the lease at most, however many workers
    vanished.
    """
    aborted_count = 0
    while True:
        with transaction() as session:
            job_ids = _list_stale_jobs(session, clock.utcnow())
        count = sum(retry_deadlocks(partial(_abort_stale_job, job_id)) for job_id in job_ids)
        aborted_count += count
        if count == 0 or len(job_ids) < STALE_JOBS_A_BATCH:
            return aborted_count


def _is_past_lease(now: datetime) -> list[ColumnElement[bool]]:
    """Conditions of a pending job whose lease is over. Fakes are never faulted: they end with their
    request.
    """
    job = ProcessingGeneration
    lease_end = job.start_time + func.make_interval(0, 0, 0, 0, 0, 0, job.job_ttl)
    return [job.generation.is_(None), job.faulted.is_(False), job.fake.is_(False), lease_end < now]


def _list_stale_jobs(session: Session, now: datetime) -> list[UUID]:
    statement = (
        select(ProcessingGeneration.id)
        .where(ProcessingGeneration.procgen_type == TEXT_FAMILY, *_is_past_lease(now))
        .order_by(ProcessingGeneration.start_time)
        .limit(STALE_JOBS_A_BATCH)
    )
    return list(session.scalars(statement))


def _abort_stale_job(job_id: UUID) -> bool:
    """Abort one job, unless it was submitted or its lease renewed since it was listed."""
    now = clock.utcnow()
    with transaction() as session:
        job = find_job(session, job_id)
        if job is None or not job.is_pending:
            return False
        # The order of every writer: the request, then the job. With the job locked its lease cannot
        # be renewed.
        session.execute(
            select(WaitingPrompt.id)
            .where(WaitingPrompt.id == job.wp_id)
            .with_for_update(key_share=True)
        )
        still_stale = select(ProcessingGeneration.id).where(
            ProcessingGeneration.id == job_id, *_is_past_lease(now)
        )
        if session.scalar(still_stale.with_for_update(key_share=True)) is None:
            return False
        fault = fault_job(session, job, is_raid=get_horde_modes(session).raid, now=now)
        if not fault.is_applied:
            return False
        after_commit(session, partial(_count_stale_abort, job))
        faults = collect_chat_faults(session, [job.wp_id]) if fault.is_request_faulted else []
    publish_chat_faults(faults)
    return True


def _count_stale_abort(job: TextJob) -> None:
    tally.count_fault(job.worker_id, tally.ABORTED)
    metrics.text_stale_aborts.add(
        1, {"horde.worker_trusted": job.worker_owner_trusted, "horde.chat": job.is_chat}
    )
    if job.is_over_capacity:
        attributes = build_gate_shadow_attributes(
            owner_trusted=job.worker_owner_trusted, max_length=job.max_length
        )
        metrics.gate_shadow_outcomes.add(
            1, {**attributes, "horde.outcome": GateShadowOutcome.ABORTED.value}
        )
    logger.info(
        "horde.job.aborted", extra={"generation_id": str(job.id), "worker_id": str(job.worker_id)}
    )


def fault_failing_requests() -> int:
    """Fault requests over the limit of faulted jobs that no submit faulted; how many it faulted."""
    with transaction() as session:
        request_ids = _list_failing_requests(session)
    return sum(retry_deadlocks(partial(_fault_failing_request, wp_id)) for wp_id in request_ids)


def _list_failing_requests(session: Session) -> list[UUID]:
    job = ProcessingGeneration
    statement = (
        select(job.wp_id)
        .join(WaitingPrompt, WaitingPrompt.id == job.wp_id)
        .where(
            job.faulted.is_(True),
            job.fake.is_(False),
            job.cancelled.is_(False),
            WaitingPrompt.faulted.is_(False),
            WaitingPrompt.terminal_outcome.is_(None),
        )
        .group_by(job.wp_id)
        .having(func.count() > FAULTED_GENERATIONS_LIMIT)
    )
    return list(session.scalars(statement))


def _fault_failing_request(wp_id: UUID) -> bool:
    with transaction() as session:
        session.execute(
            select(WaitingPrompt.id)
            .where(WaitingPrompt.id == wp_id)
            .with_for_update(key_share=True)
        )
        if not WaitingPrompt.mark_faulted_after_repeated_faults(session, wp_id):
            return False
        if not has_pending_jobs(session, wp_id):
            release_hold(session, upfront_hold_id(wp_id), clock.utcnow())
        faults = collect_chat_faults(session, [wp_id])
    publish_chat_faults(faults)
    return True


def delete_expired_requests() -> int:
    """Delete requests past their life, and inactive ones that their process left behind; how many
    it deleted.

    Each batch is one transaction with the release of its holds. Objects go after the rows that name
    them.
    """
    deleted_count = 0
    while True:
        count = retry_deadlocks(_delete_expired_batch)
        deleted_count += count
        if count < EXPIRED_REQUESTS_A_BATCH:
            return deleted_count


def _delete_expired_batch() -> int:
    now = clock.utcnow()
    with transaction() as session:
        request_ids = _lock_expired_requests(session, now)
        if not request_ids:
            return 0
        faults = collect_chat_faults(session, request_ids, expired=True)
        object_keys = collect_expired_chat_image_keys(session, request_ids)
        # Before the commit: a process that dies right after it must leave no object that nothing
        # names.
        object_deletes.queue_deletes(object_keys)
        release_holds(session, [upfront_hold_id(wp_id) for wp_id in request_ids], now)
        session.execute(
            delete(WaitingPrompt)
            .where(WaitingPrompt.id.in_(request_ids))
            .execution_options(synchronize_session=False)
        )
    publish_chat_faults(faults)
    delete_stored_chat_images(object_keys)
    logger.info(
        "horde.requests.expired",
        extra={"count": len(request_ids), "object_count": len(object_keys)},
    )
    return len(request_ids)


def _lock_expired_requests(session: Session, now: datetime) -> list[UUID]:
    """A batch of requests to delete, locked. One that a submit is just extending is left for the
    next pass.
    """
    request = TextWaitingPrompt
    statement = (
        select(request.id)
        .where(
            request.wp_type == TEXT_FAMILY,
            or_(
                request.expiry < now,
                and_(request.active.is_(False), request.created < now - INACTIVE_REQUEST_TTL),
            ),
        )
        .order_by(request.id)
        .limit(EXPIRED_REQUESTS_A_BATCH)
        .with_for_update(skip_locked=True)
    )
    return list(session.scalars(statement))


def collect_chat_faults(
    session: Session, request_ids: Sequence[UUID], *, expired: bool = False
) -> list[ChatFault]:
    """What to tell of the chat requests among these once the transaction that ends them is
    committed.

    With `expired` only of those that had not ended before: a finished request expires silently.
    """
    request, job = TextWaitingPrompt, ProcessingGeneration
    generations = (
        select(func.count())
        .select_from(job)
        .where(job.wp_id == request.id, job.generation.is_not(None), job.fake.is_(False))
        .scalar_subquery()
    )
    statement = select(
        request.id, generations, request.chat_fault_reason, request.chat_fault_rc
    ).where(request.id.in_(request_ids), request.is_chat)
    if expired:
        statement = statement.where(
            request.active, request.faulted.is_(False), request.terminal_outcome.is_(None)
        )
    return [ChatFault(*row) for row in session.execute(statement)]


def publish_chat_faults(faults: Sequence[ChatFault]) -> None:
    """Tell whoever waits for the requests. Best effort; call it after the commit."""
    for fault in faults:
        chat_signal.publish_chat_event(
            fault.request_id,
            ChatEvent.FAULTED,
            fault.generations,
            fault_reason=fault.fault_reason,
            fault_rc=fault.fault_rc,
        )


def collect_expired_chat_image_keys(session: Session, request_ids: Sequence[UUID]) -> list[str]:
    """Keys of the stored objects of chat requests about to be deleted: their images and their
    messages.
    """
    return list_object_keys(session, request_ids)


# Copies for every process


def publish_queue_order() -> None:
    """Share the order of the waiting requests, and tell of what is new among them: whoever queued
    it may have died, or lost Redis, before it could.
    """
    with transaction() as session:
        rows = list_queue_rows(session)
        gained = list_gained_rows(rows)
        classes = {row[1] for row in gained if row[1] is not None}
        facts = get_needs_of_classes(session, sorted(classes))
    publish_queue(rows)
    work = [build_text_work(facts[row[1]], row[4]) for row in gained if row[1] in facts]
    move_marks({mark for each in work for mark in list_marks_of_models(each.models)})
    note_seen_rows(rows)
    for each in work[:ANNOUNCED_REQUESTS_A_TICK]:
        publish_text_work(each)


def publish_models() -> None:
    """Share the model list."""
    with transaction() as session:
        figures = compute_model_figures(session, clock.utcnow())
    publish_model_figures(figures)


def publish_workers() -> None:
    """Share the list of online workers."""
    with transaction() as session:
        records = compute_online_worker_records(session, clock.utcnow())
    publish_online_worker_records(records)


def publish_horde_totals() -> None:
    """Share the totals."""
    with transaction() as session:
        totals = compute_totals(session, clock.utcnow())
    publish_totals(totals)


def classify_requests() -> int:
    """Give waiting requests of an older server their queue class, without which no pop sees them;
    how many got one.
    """
    return run_transaction(_classify_batch)


def _classify_batch(session: Session) -> int:
    requests = list_unclassified_requests(session, UNCLASSIFIED_REQUESTS_A_BATCH)
    for wp_id, facts in sorted(requests, key=lambda request: request[0]):
        session.execute(
            update(WaitingPrompt)
            .where(WaitingPrompt.id == wp_id, WaitingPrompt.queue_class.is_(None))
            .values(queue_class=compute_queue_class(facts))
            .execution_options(synchronize_session=False)
        )
        after_commit(session, partial(publish_text_work, build_text_work(facts, 1)))
    return len(requests)


# Kudos


def fold_kudos() -> int:
    """Fold what waits in the ledger, up to a bound that leaves the thread to others; how many rows
    it folded.
    """
    folded = 0
    for _ in range(FOLD_CYCLES_A_TICK):
        count = fold_postings()
        folded += count
        if count < FOLD_BATCH:
            break
    return folded
