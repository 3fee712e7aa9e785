# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text and chat jobs."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from uuid import UUID

from sqlalchemy import (
    Boolean,
    Integer,
    String,
    bindparam,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column

from horde import chat_progress, metrics
from horde.chat.reply import build_stored_reply, chat_reply_characters, list_reply_texts
from horde.chat.submission import ChatSubmission
from horde.chat.wire import Reply
from horde.chat_progress import StreamLease, compute_max_progress_bytes
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.kobold.pricing import count_text_tokens
from horde.classes.kobold.worker import (
    TEXT_JOB_LEASE_SECONDS,
    TextWorker,
    get_text_worker_lease_capacity,
)
from horde.db import after_commit, table_of
from horde.json_body import replace_unstorable
from horde.logger import get_logger
from horde.token_estimate import estimate_generated_tokens, measure_text

logger = get_logger(__name__)

# What progress may stretch a streamed job's lease to, in seconds from the pop.
TRUSTED_TEXT_JOB_LEASE_CAP_SECONDS = 600
UNTRUSTED_TEXT_JOB_LEASE_CAP_SECONDS = 200


class ChargeBasis(StrEnum):
    """What a job was priced by."""

    OUTPUT_ESTIMATE = "output_estimate"


class GateShadowOutcome(StrEnum):
    """How a legacy text job ended that the speed gate would have withheld from its worker."""

    COMPLETED = "completed"
    FAULTED = "faulted"
    ABORTED = "aborted"


class LeaseWriting(StrEnum):
    """What writing a renewed lease did to the job's row."""

    WRITTEN = "written"
    UNCHANGED = "unchanged"
    CANCELLED = "cancelled"  # the job was settled at its request's cancel


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """The owner of a popping worker, as far as the lease of a streamed job asks."""

    # What posts are compared with, see `chat_progress.build_lease_owner_key`.
    lease_key: str = field(repr=False)
    is_trusted: bool


# The columns that the reply of a chat job fills, and that of a text job leaves.
CHAT_REPLY_COLUMNS = (
    "message",
    "finish_reason",
    "native_finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "charge_basis",
)


class TextProcessingGeneration(ProcessingGeneration):
    """One generation of a text or chat request."""

    __mapper_args__ = {"polymorphic_identity": "text"}

    message: Mapped[Reply | None] = mapped_column(JSONB(none_as_null=True))
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    native_finish_reason: Mapped[str | None] = mapped_column(String(32))
    prompt_tokens: Mapped[int | None] = mapped_column(Integer)
    completion_tokens: Mapped[int | None] = mapped_column(Integer)
    reasoning_tokens: Mapped[int | None] = mapped_column(Integer)
    charge_basis: Mapped[str | None] = mapped_column(String(16))
    assigned_model: Mapped[str | None] = mapped_column(String(255))
    assigned_max_context_length: Mapped[int | None] = mapped_column(Integer)
    assigned_max_length: Mapped[int | None] = mapped_column(Integer)
    image_transport: Mapped[str | None] = mapped_column(String(16))
    chat_refusal_rc: Mapped[str | None] = mapped_column(String(32))
    settled_character_count: Mapped[int | None] = mapped_column(Integer)
    over_capacity_at_assignment: Mapped[bool] = mapped_column(Boolean, default=False)

    @staticmethod
    def set_job_ttl() -> int:
        """The lease of a new job in seconds, the same for every length: what a worker that never
        submits holds it for.
        """
        return TEXT_JOB_LEASE_SECONDS

    @staticmethod
    def is_over_capacity(*, is_chat: bool, max_length: int, speed: float) -> bool:
        """Whether a legacy text job asks more of its worker than the speed gate would allow a chat
        job.
        """
        return not is_chat and max_length > get_text_worker_lease_capacity(speed)

    @staticmethod
    def _record_over_capacity_assignment(
        *,
        job_id: UUID,
        wp_id: UUID,
        worker_id: UUID,
        owner_trusted: bool,
        max_length: int,
        speed: float,
    ) -> None:
        """Log and count a legacy text job that the speed gate would have withheld. Call it after
        the commit.
        """
        metrics.gate_shadow_assignments.add(
            1, build_gate_shadow_attributes(owner_trusted=owner_trusted, max_length=max_length)
        )
        logger.info(
            "horde.pop.over_capacity",
            extra={
                "job": str(job_id),
                "request": str(wp_id),
                "worker": str(worker_id),
                "max_length": max_length,
                "capacity": get_text_worker_lease_capacity(speed),
                "speed": speed,
            },
        )

    @staticmethod
    def _write_stream_lease(
        session: Session,
        *,
        job_id: UUID,
        wp_id: UUID,
        worker: TextWorker,
        model: str,
        owner: LeaseOwner,
        max_length: int,
        is_fake: bool,
        started: datetime,
        job_ttl: int,
    ) -> None:
        """Let a streamed job's worker post progress, once the pop is committed. Best effort: it
        never fails a pop.
        """
        lease = StreamLease(
            generation_id=job_id,
            request_id=wp_id,
            worker_id=worker.id,
            model=model,
            owner_id=worker.user_id,
            key=owner.lease_key,
            max_bytes=compute_max_progress_bytes(max_length),
            is_fake=is_fake,
            started=get_unix_seconds(started),
            job_ttl=job_ttl,
            lease_cap=text_job_lease_cap(owner_trusted=owner.is_trusted),
            owner_trusted=owner.is_trusted,
        )
        after_commit(session, partial(chat_progress.write_stream_lease, lease))

    @staticmethod
    def end_progress_after_submit(session: Session, *, job_id: UUID) -> None:
        """End a streamed job's posts once its reply is committed; the stream stays for its readers.
        Best effort.
        """
        after_commit(session, partial(chat_progress.delete_stream_lease, job_id))

    @staticmethod
    def end_progress_after_fault(session: Session, *, job_id: UUID) -> None:
        """Tell a streamed job's readers that it brings no reply, once its fault is committed. Best
        effort.
        """
        after_commit(session, partial(chat_progress.end_progress_stream, job_id))

    @staticmethod
    def get_things_count(message: Reply | None, generation: str | None, max_length: int) -> int:
        """Tokens a reply is priced and timed by: a chat reply's message, else a text; 0 with
        neither.
        """
        if message is not None:
            return count_text_tokens(chat_reply_characters(message), max_length)
        return 0 if generation is None else count_text_tokens(len(generation), max_length)

    @staticmethod
    def get_generated_tokens(message: Reply | None, generation: str | None, max_length: int) -> int:
        """Tokens a reply is taken to have been generated of, by which its worker's speed is known.

        Unlike what it is priced by, a short reply is not raised to the least that is paid for, and
        a letter of several bytes counts as more than a quarter.
        """
        texts = [generation or ""] if message is None else list_reply_texts(message)
        return min(estimate_generated_tokens(measure_text("".join(texts))), max_length)

    @staticmethod
    def get_charge_basis(*, is_chat: bool) -> ChargeBasis | None:
        """What a chat generation is priced by; text records none."""
        return ChargeBasis.OUTPUT_ESTIMATE if is_chat else None

    @staticmethod
    def get_submission_columns(
        submission: ChatSubmission, message: Reply, finish_reason: str
    ) -> dict[str, object]:
        """What one update writes of a verified chat reply: every column of it or, for a loser of
        the race, none.
        """
        stored = build_stored_reply(message)
        native = submission.native_finish_reason
        basis = TextProcessingGeneration.get_charge_basis(is_chat=True)
        return {
            "generation": stored["content"] or "",
            "message": stored,
            "finish_reason": finish_reason,
            "native_finish_reason": None if native is None else replace_unstorable(native),
            "prompt_tokens": submission.prompt_tokens,
            "completion_tokens": submission.completion_tokens,
            "reasoning_tokens": submission.reasoning_tokens,
            "charge_basis": None if basis is None else basis.value,
        }


jobs = table_of(TextProcessingGeneration)
_is_pending = (jobs.c.id == bindparam("job_id")) & jobs.c.generation.is_(None) & ~jobs.c.faulted


# The commit does not wait for the disk: a server that crashes forgets half a second of renewals at
# most, and the next post of each job makes up for it. Inside the statement, the setting costs no
# statement of its own.
_commits_lazily = func.set_config("synchronous_commit", "off", True) == "off"

_RENEW = (
    update(jobs)
    .where(_is_pending, jobs.c.job_ttl < bindparam("new_ttl", type_=Integer), _commits_lazily)
    .values(job_ttl=bindparam("new_ttl", type_=Integer))
    .returning(jobs.c.id)
)


def text_job_lease_cap(*, owner_trusted: bool) -> int:
    """How far progress stretches a job's lease, in seconds from the pop."""
    return (
        TRUSTED_TEXT_JOB_LEASE_CAP_SECONDS
        if owner_trusted
        else UNTRUSTED_TEXT_JOB_LEASE_CAP_SECONDS
    )


def renew_text_job_ttl(session: Session, *, job_id: UUID, job_ttl: int) -> bool:
    """Move a pending job's deadline, never back; False when it is there already or the job has
    ended. By primary key.
    """
    return session.scalar(_RENEW, {"job_id": job_id, "new_ttl": job_ttl}) is not None


def renew_text_job_lease(session: Session, *, job_id: UUID, job_ttl: int) -> LeaseWriting:
    """Write the deadline that a post moved on Redis to the job's row.

    A job that ended is found here when its lease outlived it, as when Redis was away at its end or
    its request was cancelled between its pop and its lease: the lease then ends as it should have,
    so that the worker learns it.
    """
    if renew_text_job_ttl(session, job_id=job_id, job_ttl=job_ttl):
        return LeaseWriting.WRITTEN
    ended = select(
        jobs.c.faulted, jobs.c.cancelled, jobs.c.generation.is_not(None).label("is_completed")
    )
    row = session.execute(ended.where(jobs.c.id == job_id)).one_or_none()
    if row is not None and row.cancelled:
        after_commit(session, partial(chat_progress.cancel_progress_streams, [job_id]))
        return LeaseWriting.CANCELLED
    if row is None or row.faulted:
        TextProcessingGeneration.end_progress_after_fault(session, job_id=job_id)
    elif row.is_completed:
        TextProcessingGeneration.end_progress_after_submit(session, job_id=job_id)
    return LeaseWriting.UNCHANGED


def get_unix_seconds(moment: datetime) -> float:
    """Unix seconds of a naive time in UTC, as rows hold it."""
    return moment.replace(tzinfo=UTC).timestamp()


def seconds_since(start: datetime, now: datetime) -> float:
    """Time a job has taken so far."""
    return (now - start).total_seconds()


def compute_speed_sample(tokens: int, seconds: float) -> float:
    """Tokens per second of one job, one decimal; 1 for a job that took no measurable time."""
    return 1.0 if seconds <= 0 else round(tokens / seconds, 1)


def build_gate_shadow_attributes(*, owner_trusted: bool, max_length: int) -> dict[str, str | bool]:
    """The attributes of the speed gate's shadow instruments."""
    return {
        "horde.worker_trusted": owner_trusted,
        "horde.size_bucket": metrics.get_text_length_bucket(max_length),
    }
