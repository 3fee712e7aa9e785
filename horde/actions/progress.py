# SPDX-License-Identifier: AGPL-3.0-or-later
"""A worker's post of what it has generated so far: its shape, its lease, what a post without one is
told, and the job's deadline.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from sqlalchemy.exc import DBAPIError

from horde import chat_progress, metrics, tally
from horde.chat_progress import AppendResult, LeaseRenewal, PostOutcome, ProgressPost
from horde.classes.kobold.processing_generation import (
    LeaseWriting,
    get_unix_seconds,
    renew_text_job_lease,
)
from horde.classes.kobold.worker import TEXT_JOB_LEASE_SECONDS
from horde.database.text_jobs import is_job_aborted
from horde.database.users import build_lease_key_of
from horde.database.workers import parse_id
from horde.db import reading, single_statement
from horde.exceptions import (
    BadRequest,
    Conflict,
    Forbidden,
    NotFound,
    RequestTooLarge,
    ServiceUnavailable,
)
from horde.logger import get_logger
from horde.redis_ctrl import RedisUnavailable
from horde.return_codes import ReturnCode

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PostBody:
    """A post of the right shape. `job_id` is None for an id that no job can have."""

    id: str
    job_id: UUID | None
    seq: int
    content: str = field(repr=False)
    reasoning: str = field(repr=False)


def parse_progress_post(body: dict[str, object]) -> PostBody:
    """The post in a body, null being as absent; raises BadRequest for anything missing, mistyped or
    empty.
    """
    job_id, seq, delta = body.get("id"), body.get("seq"), body.get("delta")
    if not isinstance(job_id, str):
        raise BadRequest("'id' has to be a string.")
    if isinstance(seq, bool) or not isinstance(seq, int) or seq < 1:
        raise BadRequest("'seq' has to be an integer of at least 1.")
    if not isinstance(delta, dict):
        raise BadRequest("'delta' has to be an object.")
    content, reasoning = _parse_text(delta, "content"), _parse_text(delta, "reasoning_content")
    if not content and not reasoning:
        raise BadRequest("'delta' has to carry content or reasoning_content.")
    return PostBody(
        id=job_id, job_id=parse_id(job_id), seq=seq, content=content, reasoning=reasoning
    )


def _parse_text(delta: dict[str, object], key: str) -> str:
    value = delta.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRequest(f"'delta.{key}' has to be a string.")
    return value


@dataclass(frozen=True, slots=True)
class AcceptedProgress:
    """What the worker of an accepted post is told."""

    seq: int
    is_cancelled: bool


def take_progress(
    post: PostBody, api_key: str, now: datetime, *, count_refused: Callable[[], None]
) -> AcceptedProgress:
    """Append a post to its request's stream. The lease alone tells who may post.

    `count_refused` is called for a post that no lease covers, before anything is read for it; it
    may refuse the post for being one of too many. Raises NotFound, Forbidden, Conflict,
    RequestTooLarge, or ServiceUnavailable while Redis is away.
    """
    appended = append(post, api_key, now)
    if appended.outcome is PostOutcome.NO_LEASE:
        count_refused()
        raise find_refusal_without_lease(post, now)
    if appended.outcome is PostOutcome.WRONG_KEY:
        count_refused()
    check_accepted(appended, post)
    if post.seq == 1 and not appended.is_fake:
        tally.count_seconds(tally.FIRST_TOKEN, appended.age_seconds)
    is_cancelled = renew_lease(appended, post)
    return AcceptedProgress(appended.seq, is_cancelled)


def append(post: PostBody, api_key: str, now: datetime) -> AppendResult:
    """What the stream makes of a post; raises ServiceUnavailable while Redis is away."""
    if post.job_id is None:
        return AppendResult(outcome=PostOutcome.NO_LEASE)
    progress = ProgressPost(
        generation_id=post.job_id, seq=post.seq, content=post.content, reasoning=post.reasoning
    )
    try:
        return chat_progress.append_progress(
            progress,
            key=build_lease_key_of(api_key),
            now=get_unix_seconds(now),
            base_lease_seconds=TEXT_JOB_LEASE_SECONDS,
        )
    except RedisUnavailable as error:
        message = "Progress cannot be taken at the moment. Submit the reply as usual."
        raise ServiceUnavailable(message, ReturnCode.CHAT_PROGRESS_UNAVAILABLE) from error


def find_refusal_without_lease(post: PostBody, now: datetime) -> NotFound:
    """What a worker without a lease is told: to stop, when the job has ended or is unknown, else to
    submit alone.
    """
    if post.job_id is not None:
        with reading() as session:
            is_aborted = is_job_aborted(session, post.job_id, now)
        if not is_aborted:
            message = (
                f"No progress is taken for generation {post.job_id}. Stop posting and submit the"
                " reply."
            )
            return NotFound(message, ReturnCode.CHAT_PROGRESS_NOT_STREAMING)
    message = f"Generation {post.id[:64]} was aborted, or its request has expired. Stop generating."
    return NotFound(message, ReturnCode.CHAT_JOB_ABORTED)


def check_accepted(appended: AppendResult, post: PostBody) -> None:
    """Raise the refusal of a post that has a lease and was not accepted."""
    if appended.outcome is PostOutcome.WRONG_KEY:
        message = f"Generation {post.job_id} belongs to a worker of another user."
        raise Forbidden(message, ReturnCode.WRONG_CREDENTIALS)
    if appended.outcome is PostOutcome.OUT_OF_SEQUENCE:
        expected_seq = appended.seq + 1
        message = f"Expected seq {expected_seq} for generation {post.job_id}."
        raise Conflict(message, ReturnCode.CHAT_PROGRESS_OUT_OF_SEQUENCE, expected_seq=expected_seq)
    if appended.outcome is PostOutcome.CAP_REACHED:
        message = (
            f"Generation {post.job_id} posted as much as it may. Stop posting and submit the reply."
        )
        raise RequestTooLarge(message, ReturnCode.CHAT_PROGRESS_CAP_REACHED)


def renew_lease(appended: AppendResult, post: PostBody) -> bool:
    """Write a deadline that the post moved to the job's row; whether the worker is told that the
    request was cancelled.

    Best effort: the text is appended already, and after a failure the next post moves the deadline
    again.
    """
    if appended.renewal is None or post.job_id is None:
        return appended.is_cancelled
    if appended.renewal is LeaseRenewal.AT_CAP:
        _count_renewal(appended)
        return appended.is_cancelled
    try:
        with single_statement() as session:
            written = renew_text_job_lease(session, job_id=post.job_id, job_ttl=appended.job_ttl)
    except (ServiceUnavailable, DBAPIError):
        metrics.text_lease_renewal_failures.add(1)
        logger.warning("horde.progress.renewal_failed", extra={"job": str(post.job_id)})
        chat_progress.take_back_renewal(post.job_id, appended)
        return appended.is_cancelled
    if written is LeaseWriting.WRITTEN:
        _count_renewal(appended)
    return appended.is_cancelled or written is LeaseWriting.CANCELLED


def _count_renewal(appended: AppendResult) -> None:
    if appended.is_fake:
        return
    outcome = "" if appended.renewal is None else appended.renewal.value
    metrics.text_lease_renewals.add(
        1, {"horde.outcome": outcome, "horde.worker_trusted": appended.owner_trusted}
    )
