# SPDX-License-Identifier: AGPL-3.0-or-later
"""Requests: one row a submission, shared by every family of work."""

from datetime import datetime, timedelta
from uuid import UUID, uuid4

from sqlalchemy import (
    BigInteger,
    Boolean,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    Uuid,
    func,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column
from sqlalchemy.sql.elements import Grouping

from horde.classes.base.processing_generation import ProcessingGeneration
from horde.clock import utcnow
from horde.db import Base
from horde.shapes.text_params import TextParams

REQUEST_TTL = timedelta(minutes=20)
FAULTED_GENERATIONS_LIMIT = 2  # more faulted jobs than this and the request is given up
PRIORITY_PER_SECOND = 5  # what a second of waiting is worth in the queue


class TerminalOutcome:
    """How a request ended; the first writer wins."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAULTED = "faulted"
    EXPIRED = "expired"


class WaitingPrompt(Base):
    """One submission: asks for `jobs` generations, of which `n` are still to be handed out."""

    __tablename__ = "waiting_prompts"
    __mapper_args__ = {"polymorphic_on": "wp_type", "polymorphic_identity": "base"}

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=uuid4)
    wp_type: Mapped[str] = mapped_column(String(30))
    prompt: Mapped[str] = mapped_column(Text)
    submitted_prompt: Mapped[str | None] = mapped_column(Text, deferred=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    params: Mapped[TextParams] = mapped_column(JSONB, default=dict)
    gen_payload: Mapped[TextParams] = mapped_column(JSONB, default=dict)
    nsfw: Mapped[bool] = mapped_column(Boolean, default=False)
    ipaddr: Mapped[str | None] = mapped_column(String(39))
    safe_ip: Mapped[bool] = mapped_column(Boolean, default=False)
    trusted_workers: Mapped[bool] = mapped_column(Boolean, default=False)
    validated_backends: Mapped[bool] = mapped_column(Boolean, default=True)
    slow_workers: Mapped[bool] = mapped_column(Boolean, default=True)
    extra_slow_workers: Mapped[bool] = mapped_column(Boolean, default=False)
    worker_blacklist: Mapped[bool] = mapped_column(Boolean, default=False)
    faulted: Mapped[bool] = mapped_column(Boolean, default=False)
    active: Mapped[bool] = mapped_column(Boolean, default=False)
    consumed_kudos: Mapped[int] = mapped_column(Integer, default=0)
    kudos: Mapped[float] = mapped_column(Float, default=0.0)
    n: Mapped[int] = mapped_column(Integer, default=0)
    jobs: Mapped[int] = mapped_column(Integer, default=0)
    things: Mapped[int] = mapped_column(BigInteger, default=0)
    total_usage: Mapped[float] = mapped_column(Float, default=0.0)
    extra_priority: Mapped[int] = mapped_column(Integer, default=0)
    webhook: Mapped[str | None] = mapped_column(String(1024))
    client_agent: Mapped[str] = mapped_column(Text, default="unknown:0:unknown")
    sharedkey_id: Mapped[UUID | None] = mapped_column(
        ForeignKey("user_sharedkeys.id", ondelete="CASCADE")
    )
    # Who sent it, where somebody else pays: as the key of a style does.
    sender_id: Mapped[int | None] = mapped_column(Integer)
    sender_sharedkey_id: Mapped[UUID | None] = mapped_column(Uuid)
    proxied_account: Mapped[str | None] = mapped_column(String(255))
    disable_batching: Mapped[bool] = mapped_column(Boolean, default=False)
    expiry: Mapped[datetime] = mapped_column(
        DateTime, default=lambda: utcnow() + REQUEST_TTL, index=True
    )
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    style_id: Mapped[UUID | None] = mapped_column(Uuid)
    terminal_outcome: Mapped[str | None] = mapped_column(String(32))
    terminal_recorded_at: Mapped[datetime | None] = mapped_column(DateTime)
    # What a worker has to offer to serve the request, hashed: rows of one class are served or
    # refused together, so a pop looks at one row of each class instead of at every waiting row.
    # Null on rows written
    # before the column.
    queue_class: Mapped[int | None] = mapped_column(BigInteger)

    @staticmethod
    def mark_faulted_after_repeated_faults(session: Session, wp_id: UUID) -> bool:
        """Fault a request more than `FAULTED_GENERATIONS_LIMIT` of whose jobs faulted; True for the
        call that did.

        One that ended before, as by a cancel, stays what it was: whoever waited was told so. The
        caller holds the request's row lock, so the count cannot change underneath. Fakes never
        count.
        """
        faulted_jobs = (
            select(func.count())
            .select_from(ProcessingGeneration)
            .where(
                ProcessingGeneration.wp_id == wp_id,
                ProcessingGeneration.faulted.is_(True),
                ProcessingGeneration.fake.is_(False),
                ProcessingGeneration.cancelled.is_(False),
            )
            .scalar_subquery()
        )
        statement = (
            update(WaitingPrompt)
            .where(
                WaitingPrompt.id == wp_id,
                WaitingPrompt.faulted.is_(False),
                WaitingPrompt.terminal_outcome.is_(None),
                faulted_jobs > FAULTED_GENERATIONS_LIMIT,
            )
            .values(
                faulted=True,
                terminal_outcome=TerminalOutcome.FAULTED,
                terminal_recorded_at=utcnow(),
            )
            .returning(WaitingPrompt.id)
            .execution_options(synchronize_session=False)
        )
        return session.scalar(statement) is not None


class WPModels(Base):
    """A model a request accepts, in the order it was listed."""

    __tablename__ = "wp_models"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    wp_id: Mapped[UUID] = mapped_column(ForeignKey("waiting_prompts.id", ondelete="CASCADE"))
    model: Mapped[str] = mapped_column(String(255))


class WPAllowedWorkers(Base):
    """A worker a request names: allowed, or denied when the request says `worker_blacklist`."""

    __tablename__ = "wp_allowed_workers"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    wp_id: Mapped[UUID] = mapped_column(ForeignKey("waiting_prompts.id", ondelete="CASCADE"))
    worker_id: Mapped[UUID] = mapped_column(
        ForeignKey("workers.id", ondelete="CASCADE"), index=True
    )


class WPTrickedWorkers(Base):
    """A worker that got a fake job of a request and must not see the request again."""

    __tablename__ = "wp_tricked_workers"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    wp_id: Mapped[UUID] = mapped_column(ForeignKey("waiting_prompts.id", ondelete="CASCADE"))
    worker_id: Mapped[UUID] = mapped_column(
        ForeignKey("workers.id", ondelete="CASCADE"), index=True
    )


# What the queue holds; the predicate of its partial indexes.
LIVE = text("active AND NOT faulted AND n > 0")

# Waiting adds the same to every request, so the order among them never changes: priority minus five
# a second of birth.
QUEUE_RANK = WaitingPrompt.extra_priority - PRIORITY_PER_SECOND * func.date_part(
    text("'epoch'"), WaitingPrompt.created
)

Index("ix_wp_models_wp_id_model", WPModels.wp_id, WPModels.model)
Index("ix_wp_allowed_workers_wp_id_worker_id", WPAllowedWorkers.wp_id, WPAllowedWorkers.worker_id)
Index("ix_wp_tricked_workers_wp_id_worker_id", WPTrickedWorkers.wp_id, WPTrickedWorkers.worker_id)
Index(
    "ix_waiting_prompts_queue_user",
    WaitingPrompt.user_id,
    Grouping(QUEUE_RANK).desc(),
    postgresql_where=LIVE,
)
Index(
    "ix_waiting_prompts_with_sharedkey",
    WaitingPrompt.sharedkey_id,
    postgresql_where=WaitingPrompt.sharedkey_id.is_not(None),
)
