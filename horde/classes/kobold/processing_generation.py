# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text and chat jobs."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any
from uuid import UUID

from sqlalchemy import (
    Boolean,
    Integer,
    String,
    bindparam,
    case,
    exists,
    false,
    func,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column

from horde import chat_progress, metrics
from horde.chat.wire import Reply
from horde.chat_progress import StreamLease, compute_max_progress_bytes
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.worker import (
    ABORT_MAINTENANCE_MESSAGE,
    ABORT_WINDOW_SECONDS,
    MAX_ABORTED_JOBS_PER_WINDOW,
    MAX_ABORTED_JOBS_PER_WINDOW_IN_RAID,
    Worker,
)
from horde.classes.kobold.chat_request import (
    ChatSubmission,
    build_stored_reply,
    chat_reply_characters,
    list_reply_texts,
)
from horde.classes.kobold.pricing import count_text_tokens
from horde.classes.kobold.worker import (
    TEXT_JOB_LEASE_SECONDS,
    TextWorker,
    get_text_worker_lease_capacity,
)
from horde.db import after_commit, table_of
from horde.json_body import replace_unstorable
from horde.logger import get_logger
from horde.return_codes import ReturnCode
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
    def settle_cancelled(session: Session, *, job_id: UUID, character_count: int) -> bool:
        """Fault a pending job as cancelled, with the characters it is priced by; False for the
        loser to its submit.

        Neither restarts it nor counts it against its worker. The caller holds the request's row
        lock, prices and pays.
        """
        values = {"job_id": job_id, "character_count": character_count}
        return session.scalar(_SETTLE_CANCELLED, values) is not None

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
    ) -> dict[str, Any]:
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

    @staticmethod
    def mark_counted_drop(session: Session, *, job_id: UUID, wp_id: UUID, worker_id: UUID) -> bool:
        """Let a faulted job count toward its worker's hourly limit; False when one of the same
        request did before.

        Otherwise a requester could retire a worker with a handful of requests that fail on every
        attempt. The caller holds the request's row lock, so of two faults at once one counts.
        """
        values = {"job_id": job_id, "job_wp_id": wp_id, "job_worker_id": worker_id}
        return session.scalar(_MARK_COUNTED_DROP, values) is not None

    @staticmethod
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

        `counts` is whether it counts toward the hourly limit; the totals that are shown count every one.

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


jobs = table_of(TextProcessingGeneration)
_is_pending = (jobs.c.id == bindparam("job_id")) & jobs.c.generation.is_(None) & ~jobs.c.faulted

_SETTLE_CANCELLED = (
    update(jobs)
    .where(_is_pending)
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
