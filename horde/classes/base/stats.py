# SPDX-License-Identifier: AGPL-3.0-or-later
"""Samples and statistics of served work, and the switches of the whole horde."""

from datetime import datetime
from enum import Enum
from uuid import UUID

from sqlalchemy import BigInteger, Boolean, DateTime, Float, Integer, String, Text, Uuid
from sqlalchemy import Enum as SqlEnum
from sqlalchemy.orm import Mapped, mapped_column

from horde.clock import utcnow
from horde.db import Base


class TextGenState(Enum):
    """How a text job ended."""

    OK = 0
    CENSORED = 1
    CANCELLED = 3
    FAULTED = 4


class TextGenStatistic(Base):
    """One ended text job; append-only."""

    __tablename__ = "text_gen_stats"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    finished: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    created: Mapped[datetime | None] = mapped_column(DateTime)
    model: Mapped[str] = mapped_column(String(255))
    max_length: Mapped[int] = mapped_column(Integer)
    max_context_length: Mapped[int] = mapped_column(Integer)
    softprompt: Mapped[str | None] = mapped_column(String(255))
    prompt_length: Mapped[int] = mapped_column(Integer)
    client_agent: Mapped[str | None] = mapped_column(Text)
    bridge_agent: Mapped[str | None] = mapped_column(Text)
    state: Mapped[TextGenState] = mapped_column(SqlEnum(TextGenState, name="textgenstate"))
    style_id: Mapped[UUID | None] = mapped_column(Uuid)


class ModelPerformance(Base):
    """One speed sample of a model, in raw things per second; kept an hour."""

    __tablename__ = "model_performances"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    model: Mapped[str] = mapped_column(String(255))
    performance: Mapped[float] = mapped_column(Float)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow, index=True)


class FulfillmentPerformance(Base):
    """Things delivered at one moment; kept a minute, for the totals of the past minute."""

    __tablename__ = "horde_fulfillments"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    things: Mapped[float] = mapped_column(Float)
    thing_type: Mapped[str] = mapped_column(String(20))
    deliver_time: Mapped[datetime | None] = mapped_column(DateTime)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow, index=True)


class HordeSettings(Base):
    """The one row of horde-wide switches."""

    __tablename__ = "settings"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    raid: Mapped[bool] = mapped_column(Boolean, default=False)
    invite_only: Mapped[bool] = mapped_column(Boolean, default=False)
    maintenance: Mapped[bool] = mapped_column(Boolean, default=False)


class Filter(Base):
    """A moderation rule: text matching `regex` is refused or replaced, by `filter_type`."""

    __tablename__ = "filters"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    regex: Mapped[str] = mapped_column(Text)
    filter_type: Mapped[int] = mapped_column(Integer, index=True)
    description: Mapped[str | None] = mapped_column(String(512))
    replacement: Mapped[str] = mapped_column(String(255), default="")
    user_id: Mapped[int | None] = mapped_column(Integer)
