# SPDX-License-Identifier: AGPL-3.0-or-later
"""Jobs: one generation of a request in the hands of one worker."""

from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import BigInteger, Boolean, DateTime, ForeignKey, Index, Integer, String, Text, Uuid
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from horde.clock import utcnow
from horde.db import Base

DEFAULT_JOB_TTL_SECONDS = 150


class ProcessingGeneration(Base):
    """One job. `generation` null is pending; an empty string is a completed reply."""

    __tablename__ = "processing_gens"
    __mapper_args__ = {"polymorphic_on": "procgen_type", "polymorphic_identity": "base"}

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=uuid4)
    procgen_type: Mapped[str] = mapped_column(String(30), index=True)
    generation: Mapped[str | None] = mapped_column(Text)
    gen_metadata: Mapped[list[dict[str, Any]] | None] = mapped_column(JSONB)
    model: Mapped[str] = mapped_column(String(255), default="")
    seed: Mapped[int] = mapped_column(BigInteger, default=0)
    start_time: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    cancelled: Mapped[bool] = mapped_column(Boolean, default=False)
    faulted: Mapped[bool] = mapped_column(Boolean, default=False)
    fake: Mapped[bool] = mapped_column(Boolean, default=False)
    censored: Mapped[bool] = mapped_column(Boolean, default=False)
    job_ttl: Mapped[int] = mapped_column(Integer, default=DEFAULT_JOB_TTL_SECONDS)
    wp_id: Mapped[UUID] = mapped_column(ForeignKey("waiting_prompts.id", ondelete="CASCADE"), index=True)
    worker_id: Mapped[UUID] = mapped_column(ForeignKey("workers.id"), index=True)


Index(
    "ix_processing_gens_pending",
    ProcessingGeneration.start_time,
    postgresql_where=ProcessingGeneration.generation.is_(None) & ProcessingGeneration.faulted.is_(False),
)
