# SPDX-License-Identifier: AGPL-3.0-or-later
"""Points of suspicion: what an account or a worker did that an honest one rarely does."""

from enum import IntEnum
from uuid import UUID

from sqlalchemy import ForeignKey, Integer
from sqlalchemy.orm import Mapped, mapped_column

from horde.db import Base

SUSPICION_LIMIT = 5
"""Points from which an untrusted account moves no kudos, and a worker of one is paused."""


class Suspicion(IntEnum):
    """Why a point was given; the numbers are stored."""

    WORKER_NAME_LONG = 0
    WORKER_NAME_EXTREME = 1
    WORKER_PROFANITY = 2
    UNSAFE_IP = 3
    EXTREME_MAX_PIXELS = 4
    UNREASONABLY_FAST = 5
    USERNAME_LONG = 6
    USERNAME_PROFANITY = 7
    CORRUPT_PROMPT = 8
    TOO_MANY_JOBS_ABORTED = 9


ACCUMULATING = frozenset({Suspicion.UNREASONABLY_FAST, Suspicion.TOO_MANY_JOBS_ABORTED})
"""Reasons that count each time; every other one counts once."""


class UserSuspicion(Base):
    """One point of an account."""

    __tablename__ = "user_suspicions"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    suspicion_id: Mapped[int] = mapped_column(Integer)


class WorkerSuspicion(Base):
    """One point of a worker."""

    __tablename__ = "worker_suspicions"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    worker_id: Mapped[UUID] = mapped_column(
        ForeignKey("workers.id", ondelete="CASCADE"), index=True
    )
    suspicion_id: Mapped[int] = mapped_column(Integer)
