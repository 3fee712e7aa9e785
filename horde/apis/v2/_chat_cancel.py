# SPDX-License-Identifier: AGPL-3.0-or-later
"""The steps of a cancel that only a streamed chat request has: its jobs in flight are paid for what
they posted.
"""

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from sqlalchemy.orm import Session

from horde.apis.v2._text_submit import compute_reward
from horde.chat_progress import read_posted_progress
from horde.classes.kobold.pricing import count_text_tokens
from horde.database.text_jobs import find_job, list_streamed_jobs, settle_cancelled_job
from horde.database.text_requests import release_hold_when_idle
from horde.database.workers import parse_id
from horde.db import reading
from horde.logger import get_logger

logger = get_logger(__name__)


def read_posted_characters(request_id: str) -> dict[UUID, int]:
    """Characters that each job in flight of a streamed request has posted, before anything is
    locked.

    Redis is asked only about jobs there are. One it cannot tell of is left out, and what is posted
    after this is not paid: it is what the worker writes in the moment of the cancel.
    """
    wp_id = parse_id(request_id)
    if wp_id is None:
        return {}
    with reading() as session:
        job_ids = [job_id for job_id, is_fake in list_streamed_jobs(session, wp_id) if not is_fake]
    return {
        job_id: posted.character_count
        for job_id, posted in read_posted_progress(wp_id, job_ids).items()
    }


def settle_streamed_jobs(
    session: Session, wp_id: UUID, posted: Mapping[UUID, int], now: datetime
) -> list[UUID]:
    """Settle the jobs in flight of a request cancelled in this transaction; those whose workers
    have to be told.

    A job taken since `posted` was read is settled on the floor, like any that posted nothing. Fakes
    are told alone.
    """
    streamed = list_streamed_jobs(session, wp_id)
    for job_id, is_fake in streamed:
        if not is_fake:
            _settle(session, job_id, posted.get(job_id, 0), now)
    if streamed:
        release_hold_when_idle(session, wp_id, now)
    return [job_id for job_id, _ in streamed]


def _settle(session: Session, job_id: UUID, character_count: int, now: datetime) -> None:
    job = find_job(session, job_id)
    if job is None:
        return
    kudos = compute_reward(job, count_text_tokens(character_count, job.max_length))
    if settle_cancelled_job(session, job, character_count=character_count, kudos=kudos, now=now):
        extra = {"job": str(job.id), "worker": str(job.worker_id), "characters": character_count}
        logger.info("horde.job.settled_at_cancel", extra=extra)
