# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text and chat jobs."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import Boolean, Integer, String, case, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column

from horde import metrics
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.worker import (
    ABORT_MAINTENANCE_MESSAGE,
    ABORT_WINDOW_SECONDS,
    MAX_ABORTED_JOBS_PER_WINDOW,
    Worker,
)
from horde.classes.kobold.chat_request import ChatSubmission, build_stored_reply, chat_reply_characters
from horde.classes.kobold.pricing import count_text_tokens
from horde.classes.kobold.worker import TEXT_JOB_LEASE_SECONDS, TextWorker, get_text_worker_lease_capacity
from horde.json_body import replace_unstorable
from horde.logger import get_logger
from horde.return_codes import ReturnCode

logger = get_logger(__name__)


class ChargeBasis(StrEnum):
    """What a job was priced by."""

    OUTPUT_ESTIMATE = "output_estimate"


class GateShadowOutcome(StrEnum):
    """How a legacy text job ended that the speed gate would have withheld from its worker."""

    COMPLETED = "completed"
    FAULTED = "faulted"
    ABORTED = "aborted"


class TextProcessingGeneration(ProcessingGeneration):
    """One generation of a text or chat request."""

    __mapper_args__ = {"polymorphic_identity": "text"}

    message: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True))
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
        """The lease of a new job in seconds, the same for every length: what a worker that never submits holds it for."""
        return TEXT_JOB_LEASE_SECONDS

    @staticmethod
    def is_over_capacity(*, is_chat: bool, max_length: int, speed: float) -> bool:
        """Whether a legacy text job asks more of its worker than the speed gate would allow a chat job."""
        return not is_chat and max_length > get_text_worker_lease_capacity(speed)

    @staticmethod
    def _record_over_capacity_assignment(
        *, job_id: UUID, wp_id: UUID, worker_id: UUID, owner_trusted: bool, max_length: int, speed: float
    ) -> None:
        """Log and count a legacy text job that the speed gate would have withheld. Call it after the commit."""
        metrics.gate_shadow_assignments.add(1, build_gate_shadow_attributes(owner_trusted=owner_trusted, max_length=max_length))
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
    def get_things_count(message: Mapping[str, Any] | None, generation: str | None, max_length: int) -> int:
        """Tokens a reply is priced and timed by: a chat reply's message, else a text; 0 with neither."""
        if message is not None:
            return count_text_tokens(chat_reply_characters(message), max_length)
        return 0 if generation is None else count_text_tokens(len(generation), max_length)

    @staticmethod
    def get_charge_basis(*, is_chat: bool) -> ChargeBasis | None:
        """What a chat generation is priced by; text records none."""
        return ChargeBasis.OUTPUT_ESTIMATE if is_chat else None

    @staticmethod
    def get_submission_columns(submission: ChatSubmission, message: Mapping[str, Any], finish_reason: str) -> dict[str, Any]:
        """What one update writes of a verified chat reply: every column of it or, for a loser of the race, none."""
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
    def log_worker_abort(session: Session, *, worker_id: UUID, refusal_rc: str | None, is_raid: bool, now: datetime) -> bool:
        """Count a dropped job against its worker, in SQL arithmetic; True when it was put into maintenance for it.

        A reply refused as nonconformant is counted apart: the worker generated, the model broke the contract. The
        stored refusal decides, so a worker cannot claim the exemption itself.
        """
        if refusal_rc == ReturnCode.CHAT_SUBMIT_NONCONFORMANT:
            session.execute(
                update(TextWorker)
                .where(TextWorker.id == worker_id)
                .values(nonconformant_replies=TextWorker.nonconformant_replies + 1)
                .execution_options(synchronize_session=False)
            )
            return False
        return _log_aborted_job(session, worker_id=worker_id, is_raid=is_raid, now=now)


def _log_aborted_job(session: Session, *, worker_id: UUID, is_raid: bool, now: datetime) -> bool:
    """More than 20 dropped jobs within the hour since the first of them put a worker into maintenance; not in a raid."""
    window_over = Worker.last_aborted_job < now - timedelta(seconds=ABORT_WINDOW_SECONDS)
    count = case((window_over, 1), else_=Worker.aborted_jobs + 1)
    is_over = (count > MAX_ABORTED_JOBS_PER_WINDOW) if not is_raid else (count < 0)
    statement = (
        update(Worker)
        .where(Worker.id == worker_id)
        .values(
            uncompleted_jobs=Worker.uncompleted_jobs + 1,
            aborted_jobs=case((is_over, 0), else_=count),
            last_aborted_job=case((window_over, now), else_=Worker.last_aborted_job),
            maintenance=case((is_over, True), else_=Worker.maintenance),
            maintenance_msg=case((is_over, ABORT_MAINTENANCE_MESSAGE), else_=Worker.maintenance_msg),
        )
        .returning((Worker.aborted_jobs == 0) & Worker.maintenance)
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
    return {"horde.worker_trusted": owner_trusted, "horde.size_bucket": metrics.get_text_length_bucket(max_length)}
