# SPDX-License-Identifier: AGPL-3.0-or-later
"""Jobs that end without a reply: settled at a cancel, or counted against their worker."""

from datetime import datetime, timedelta
from uuid import UUID

from sqlalchemy import Integer, bindparam, case, exists, false, update
from sqlalchemy.orm import Session

from horde.classes.base.worker import (
    ABORT_MAINTENANCE_MESSAGE,
    ABORT_WINDOW_SECONDS,
    MAX_ABORTED_JOBS_PER_WINDOW,
    MAX_ABORTED_JOBS_PER_WINDOW_IN_RAID,
    Worker,
)
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.classes.kobold.worker import TextWorker
from horde.db import table_of
from horde.return_codes import ReturnCode

jobs = table_of(TextProcessingGeneration)

_SETTLE_CANCELLED = (
    update(jobs)
    .where(jobs.c.id == bindparam("job_id"), jobs.c.generation.is_(None), ~jobs.c.faulted)
    .values(
        faulted=True,
        cancelled=True,
        settled_character_count=bindparam("character_count", type_=Integer),
    )
    .returning(jobs.c.id)
)
_other = jobs.alias("other").c
_MARK_COUNTED_DROP = (
    update(jobs)
    .where(
        jobs.c.id == bindparam("job_id"),
        ~exists().where(
            _other.wp_id == bindparam("job_wp_id"),
            _other.worker_id == bindparam("job_worker_id"),
            _other.counted_drop,
        ),
    )
    .values(counted_drop=True)
    .returning(jobs.c.id)
)


def settle_cancelled(session: Session, *, job_id: UUID, character_count: int) -> bool:
    """Fault a pending job as cancelled, with the characters it is priced by; False for the
    loser to its submit.

    Neither restarts it nor counts it against its worker. The caller holds the request's row
    lock, prices and pays.
    """
    values = {"job_id": job_id, "character_count": character_count}
    return session.scalar(_SETTLE_CANCELLED, values) is not None


def mark_counted_drop(session: Session, *, job_id: UUID, wp_id: UUID, worker_id: UUID) -> bool:
    """Let a faulted job count toward its worker's hourly limit; False when one of the same
    request did before.

    Otherwise a requester could retire a worker with a handful of requests that fail on every
    attempt. The caller holds the request's row lock, so of two faults at once one counts.
    """
    values = {"job_id": job_id, "job_wp_id": wp_id, "job_worker_id": worker_id}
    return session.scalar(_MARK_COUNTED_DROP, values) is not None


def log_worker_abort(
    session: Session,
    *,
    worker_id: UUID,
    refusal_rc: str | None,
    counts: bool,
    is_raid: bool,
    now: datetime,
) -> bool:
    """Count a dropped job against its worker, in SQL arithmetic; True when they became too
    many, which is maintenance unless there is a raid.

    `counts` is whether it counts toward the hourly limit; the totals that are shown count every
    one.

    A reply refused as nonconformant is counted apart: the worker generated, the model broke the
    contract. The stored refusal decides, so a worker cannot claim the exemption itself.
    """
    if refusal_rc == ReturnCode.CHAT_SUBMIT_NONCONFORMANT:
        session.execute(
            update(TextWorker)
            .where(TextWorker.id == worker_id)
            .values(nonconformant_replies=TextWorker.nonconformant_replies + 1)
            .execution_options(synchronize_session=False)
        )
        return False
    if not counts:
        session.execute(
            update(TextWorker)
            .where(TextWorker.id == worker_id)
            .values(uncompleted_jobs=TextWorker.uncompleted_jobs + 1)
            .execution_options(synchronize_session=False)
        )
        return False
    return _log_aborted_job(session, worker_id=worker_id, is_raid=is_raid, now=now)


def _log_aborted_job(session: Session, *, worker_id: UUID, is_raid: bool, now: datetime) -> bool:
    """Count a dropped job; True when there were too many within the hour since the first of them.

    More than 20 put the worker into maintenance. In a raid more than 10 are too many, and a raider
    is not told: the worker goes on, under suspicion.
    """
    window_over = Worker.last_aborted_job < now - timedelta(seconds=ABORT_WINDOW_SECONDS)
    count = case((window_over, 1), else_=Worker.aborted_jobs + 1)
    is_over = count > (
        MAX_ABORTED_JOBS_PER_WINDOW_IN_RAID if is_raid else MAX_ABORTED_JOBS_PER_WINDOW
    )
    is_retired = false() if is_raid else is_over
    statement = (
        update(Worker)
        .where(Worker.id == worker_id)
        .values(
            uncompleted_jobs=Worker.uncompleted_jobs + 1,
            aborted_jobs=case((is_over, 0), else_=count),
            last_aborted_job=case((window_over, now), else_=Worker.last_aborted_job),
            maintenance=case((is_retired, True), else_=Worker.maintenance),
            maintenance_msg=case(
                (is_retired, ABORT_MAINTENANCE_MESSAGE), else_=Worker.maintenance_msg
            ),
        )
        .returning(Worker.aborted_jobs == 0)
        .execution_options(synchronize_session=False)
    )
    return bool(session.scalar(statement))
