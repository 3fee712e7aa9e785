# SPDX-License-Identifier: AGPL-3.0-or-later
"""Workers of every kind and the rows that hang from them."""

from collections.abc import Collection
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
    UniqueConstraint,
    Uuid,
)
from sqlalchemy.orm import Mapped, mapped_column

from horde.clock import utcnow
from horde.db import Base
from horde.shapes.jobs import UNKNOWN_BRIDGE_AGENT

WORKER_ONLINE_SECONDS = 300  # a worker that polled within this time is online
CHECK_IN_SECONDS = 30  # how often a polling worker's row is rewritten
UPTIME_REWARD_SECONDS = 600
ABORT_WINDOW_SECONDS = 3600
MAX_ABORTED_JOBS_PER_WINDOW = 20
MAX_ABORTED_JOBS_PER_WINDOW_IN_RAID = 10
DEFAULT_MAINTENANCE_MESSAGE = "This worker has been put into maintenance mode by its owner."
ABORT_MAINTENANCE_MESSAGE = (
    "This worker dropped too many jobs in the last hour and was put into maintenance. Take it out"
    " once it is fixed."
)
# Stored for a worker without samples; a measured mean of exactly this is stored as 0.99.
SPEED_BASELINE = 1.0


def online_since(now: datetime) -> datetime:
    """A worker that polled at or after this moment is online."""
    return now - timedelta(seconds=WORKER_ONLINE_SECONDS)


class Worker(Base):
    """A named client that pops and submits jobs; one table for every kind, told apart by
    `worker_type`.
    """

    __tablename__ = "workers"
    __mapper_args__ = {"polymorphic_on": "worker_type", "polymorphic_identity": "worker"}

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=uuid4)
    worker_type: Mapped[str] = mapped_column(String(30), index=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    name: Mapped[str] = mapped_column(String(100), unique=True, index=True)
    info: Mapped[str | None] = mapped_column(String(1000))
    ipaddr: Mapped[str | None] = mapped_column(String(39))
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    last_check_in: Mapped[datetime] = mapped_column(DateTime, default=utcnow, index=True)
    last_aborted_job: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    kudos: Mapped[int] = mapped_column(BigInteger, default=0)
    contributions: Mapped[int] = mapped_column(BigInteger, default=0)
    uptime: Mapped[int] = mapped_column(BigInteger, default=0)
    last_reward_uptime: Mapped[int] = mapped_column(BigInteger, default=0)
    fulfilments: Mapped[int] = mapped_column(Integer, default=0)
    aborted_jobs: Mapped[int] = mapped_column(Integer, default=0)
    uncompleted_jobs: Mapped[int] = mapped_column(Integer, default=0)
    threads: Mapped[int] = mapped_column(Integer, default=1)
    bridge_agent: Mapped[str] = mapped_column(Text, default=UNKNOWN_BRIDGE_AGENT)
    max_power: Mapped[int] = mapped_column(Integer, default=20)
    extra_slow_worker: Mapped[bool] = mapped_column(Boolean, default=False)
    paused: Mapped[bool] = mapped_column(Boolean, default=False)
    maintenance: Mapped[bool] = mapped_column(Boolean, default=False)
    maintenance_msg: Mapped[str] = mapped_column(String(300), default=DEFAULT_MAINTENANCE_MESSAGE)
    team_id: Mapped[UUID | None] = mapped_column(Uuid, index=True)
    allow_unsafe_ipaddr: Mapped[bool] = mapped_column(Boolean, default=True)
    speed: Mapped[float] = mapped_column(Float, default=SPEED_BASELINE)
    # Samples too few or too old to keep jobs from a worker by.
    speed_is_provisional: Mapped[bool] = mapped_column(Boolean, default=False)
    nsfw: Mapped[bool] = mapped_column(Boolean, default=False)


class WorkerModel(Base):
    """A model a worker offered on its latest check-in."""

    __tablename__ = "worker_models"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    worker_id: Mapped[UUID] = mapped_column(ForeignKey("workers.id", ondelete="CASCADE"))
    model: Mapped[str] = mapped_column(String(255), index=True)


class WorkerStats(Base):
    """A display total of a worker: kudos `generated`, kudos for `uptime`."""

    __tablename__ = "worker_stats"
    __table_args__ = (UniqueConstraint("worker_id", "action", name="worker_id_action"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    worker_id: Mapped[UUID] = mapped_column(
        ForeignKey("workers.id", ondelete="CASCADE"), index=True
    )
    action: Mapped[str] = mapped_column(String(20), index=True)
    value: Mapped[int] = mapped_column(BigInteger, default=0)


class WorkerPerformance(Base):
    """One speed sample of a worker, in raw things (tokens) per second.

    `generated_tokens` and `seconds` are null in samples that a server before 5.1.18 wrote.
    """

    __tablename__ = "worker_performances"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    worker_id: Mapped[UUID] = mapped_column(ForeignKey("workers.id", ondelete="CASCADE"))
    performance: Mapped[float] = mapped_column(Float)
    generated_tokens: Mapped[int | None] = mapped_column(Integer)
    seconds: Mapped[float | None] = mapped_column(Float)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow, index=True)


Index("ix_worker_models_worker_id_model", WorkerModel.worker_id, WorkerModel.model)
Index(
    "ix_worker_performances_worker_id_id", WorkerPerformance.worker_id, WorkerPerformance.id.desc()
)


def parse_bridge_name(bridge_agent: str) -> str:
    """The program's name in a `name:version:url` agent; `unknown` when it has no readable version.

    Split at the first two colons only, so that the URL may hold colons.
    """
    parts = bridge_agent.split(":", 2)
    if len(parts) != 3 or not parts[1].replace(".", "").isdigit():
        return "unknown"
    return parts[0]


def is_backend_validated(bridge_agent: str, validated_backends: Collection[str]) -> bool:
    """Whether the worker's program is one whose results are taken at full value."""
    return parse_bridge_name(bridge_agent) in validated_backends


def is_online(last_check_in: datetime, now: datetime) -> bool:
    """Whether a worker polled recently enough to count on."""
    return now - last_check_in <= timedelta(seconds=WORKER_ONLINE_SECONDS)
