# SPDX-License-Identifier: AGPL-3.0-or-later
"""Jobs: one generation of a request in the hands of one worker."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    Uuid,
    column,
    func,
    select,
    table,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column

from horde.clock import utcnow
from horde.db import Base

DEFAULT_JOB_TTL_SECONDS = 150

# The request's own columns that a job may change; its row class lies above and imports this module.
_requests = table(
    "waiting_prompts",
    column("id", Uuid()),
    column("n", Integer()),
    column("faulted", Boolean()),
    column("terminal_outcome", String()),
)


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """What a fault did. `is_applied` is False for the loser of a race, who changed nothing."""

    is_applied: bool
    is_fake: bool = False
    is_restarted: bool = False


class ProcessingGeneration(Base):
    """One job. `generation` null is pending; an empty string is a completed reply."""

    __tablename__ = "processing_gens"
    __mapper_args__ = {"polymorphic_on": "procgen_type", "polymorphic_identity": "base"}

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=uuid4)
    procgen_type: Mapped[str] = mapped_column(String(30))
    generation: Mapped[str | None] = mapped_column(Text)
    gen_metadata: Mapped[list[dict[str, object]] | None] = mapped_column(JSONB(none_as_null=True))
    model: Mapped[str] = mapped_column(String(255), default="")
    seed: Mapped[int] = mapped_column(BigInteger, default=0)
    start_time: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    cancelled: Mapped[bool] = mapped_column(Boolean, default=False)
    faulted: Mapped[bool] = mapped_column(Boolean, default=False)
    fake: Mapped[bool] = mapped_column(Boolean, default=False)
    censored: Mapped[bool] = mapped_column(Boolean, default=False)
    # Its fault counted toward the hourly limit of its worker.
    counted_drop: Mapped[bool] = mapped_column(Boolean, default=False)
    job_ttl: Mapped[int] = mapped_column(Integer, default=DEFAULT_JOB_TTL_SECONDS)
    wp_id: Mapped[UUID] = mapped_column(
        ForeignKey("waiting_prompts.id", ondelete="CASCADE"), index=True
    )
    worker_id: Mapped[UUID] = mapped_column(ForeignKey("workers.id"), index=True)

    @staticmethod
    def fault_and_restart(session: Session, *, job_id: UUID, wp_id: UUID) -> FaultOutcome:
        """Fault a pending job and give its generation back to the request, once however often it is
        called.

        Locks the request row first, then the job, so that a claim, a submit and a second fault each
        see one order. A cancelled or faulted request gets nothing back. A fake job never took
        anything, so it returns nothing.
        """
        session.execute(
            select(_requests.c.id).where(_requests.c.id == wp_id).with_for_update(key_share=True)
        )
        faulted = (
            update(ProcessingGeneration)
            .where(
                ProcessingGeneration.id == job_id,
                ProcessingGeneration.generation.is_(None),
                ProcessingGeneration.faulted.is_(False),
            )
            .values(faulted=True)
            .returning(ProcessingGeneration.fake)
            .execution_options(synchronize_session=False)
        )
        fake = session.scalar(faulted)
        if fake is None:
            return FaultOutcome(is_applied=False)
        if fake:
            return FaultOutcome(is_applied=True, is_fake=True)
        restarted = (
            update(_requests)
            .where(
                _requests.c.id == wp_id,
                _requests.c.faulted.is_(False),
                func.coalesce(_requests.c.terminal_outcome, "") != "cancelled",
            )
            .values(n=_requests.c.n + 1)
            .returning(_requests.c.n)
        )
        return FaultOutcome(is_applied=True, is_restarted=session.scalar(restarted) is not None)


Index(
    "ix_processing_gens_pending",
    ProcessingGeneration.start_time,
    postgresql_where=ProcessingGeneration.generation.is_(None)
    & ProcessingGeneration.faulted.is_(False),
)
