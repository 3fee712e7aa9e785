# SPDX-License-Identifier: AGPL-3.0-or-later
"""Cancelling a request.

The jobs of a streamed one that are in flight are paid for what they posted.
"""

from collections.abc import Mapping
from datetime import datetime
from uuid import UUID

from sqlalchemy.orm import Session

from horde.actions.job_rewards import compute_reward
from horde.chat_progress import cancel_progress_streams, read_posted_progress
from horde.chat_signal import ChatEvent, publish_chat_event
from horde.classes.kobold.pricing import count_text_tokens
from horde.clock import utcnow
from horde.config import Config
from horde.database.settlements import settle_cancelled_job
from horde.database.text_jobs import find_job, list_streamed_jobs
from horde.database.text_requests import cancel_text_request, release_hold_when_idle
from horde.database.text_status import RequestProgress, build_text_status, require_request_progress
from horde.database.workers import parse_id
from horde.db import reading, run_transaction
from horde.json_text import JsonObject
from horde.logger import get_logger

logger = get_logger(__name__)


def cancel_request(request_id: str, config: Config, *, is_chat: bool) -> JsonObject:
    """Cancel a request; the status as it was before. Repeated calls answer alike and change
    nothing.

    The jobs of a streamed request that are in flight are settled with the cancel, on what they had
    posted before it.
    """
    now = utcnow()
    posted = read_posted_characters(request_id) if is_chat else {}

    def work(session: Session) -> tuple[JsonObject, RequestProgress, bool, list[UUID]]:
        progress = require_request_progress(session, request_id, is_chat=is_chat, now=now)
        status = build_text_status(
            session,
            progress,
            is_chat=is_chat,
            validated_backends=config.validated_backends,
            now=now,
        )
        is_cancelled = not progress.is_done and cancel_text_request(session, progress.id, now)
        streamed = (
            settle_streamed_jobs(session, progress.id, posted, config, now)
            if is_chat and is_cancelled
            else []
        )
        return status, progress, is_cancelled, streamed

    status, progress, is_cancelled, streamed = run_transaction(work)
    if is_chat and is_cancelled:
        cancel_progress_streams(streamed)
        publish_chat_event(progress.id, ChatEvent.CANCELLED, progress.finished)
    return status


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
    session: Session, wp_id: UUID, posted: Mapping[UUID, int], config: Config, now: datetime
) -> list[UUID]:
    """Settle the jobs in flight of a request cancelled in this transaction; those whose workers
    have to be told.

    A job taken since `posted` was read is settled on the floor, like any that posted nothing. Fakes
    are told alone.
    """
    streamed = list_streamed_jobs(session, wp_id)
    for job_id, is_fake in streamed:
        if not is_fake:
            _settle(session, job_id, posted.get(job_id, 0), config, now)
    if streamed:
        release_hold_when_idle(session, wp_id, now)
    return [job_id for job_id, _ in streamed]


def _settle(
    session: Session, job_id: UUID, character_count: int, config: Config, now: datetime
) -> None:
    job = find_job(session, job_id)
    if job is None:
        return
    kudos = compute_reward(job, count_text_tokens(character_count, job.max_length), config)
    if settle_cancelled_job(session, job, character_count=character_count, kudos=kudos, now=now):
        extra = {"job": str(job.id), "worker": str(job.worker_id), "characters": character_count}
        logger.info("horde.job.settled_at_cancel", extra=extra)
