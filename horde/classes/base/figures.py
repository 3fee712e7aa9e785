# SPDX-License-Identifier: AGPL-3.0-or-later
"""Figures of the horde by the minute, and faults of workers by their reason."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger, DateTime, Float, ForeignKey, String, Uuid
from sqlalchemy.orm import Mapped, mapped_column

from horde.db import Base

FIGURE_NAME_LENGTH = 64
FAULT_REASON_LENGTH = 40


class Figure(Base):
    """How often something happened within a minute, or how much there was of something in it."""

    __tablename__ = "horde_figures"

    minute: Mapped[datetime] = mapped_column(DateTime, primary_key=True)
    name: Mapped[str] = mapped_column(String(FIGURE_NAME_LENGTH), primary_key=True)
    amount: Mapped[float] = mapped_column(Float)


class WorkerFault(Base):
    """How many jobs a worker brought no reply for, for one reason."""

    __tablename__ = "worker_faults"

    worker_id: Mapped[UUID] = mapped_column(
        Uuid, ForeignKey("workers.id", ondelete="CASCADE"), primary_key=True
    )
    reason: Mapped[str] = mapped_column(String(FAULT_REASON_LENGTH), primary_key=True)
    faults: Mapped[int] = mapped_column(BigInteger)
    last_fault: Mapped[datetime] = mapped_column(DateTime)
