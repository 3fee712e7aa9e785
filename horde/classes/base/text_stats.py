# SPDX-License-Identifier: AGPL-3.0-or-later
"""Sums of ended text jobs by spans of time, and what still has to be added to them."""

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, DateTime, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from horde.db import Base

ALL_TIME = 0  # the span of sums that never end


class TextStatQueue(Base):
    """An ended job that no sum counts yet. A trigger on `text_gen_stats` adds the row."""

    __tablename__ = "text_stat_queue"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    finished: Mapped[datetime] = mapped_column(DateTime)
    model: Mapped[str] = mapped_column(String(255))
    tokens: Mapped[int] = mapped_column(Integer)


class TextStatTotal(Base):
    """Jobs that ended within `span_seconds` from `start` on, and the tokens they were asked for."""

    __tablename__ = "text_stat_totals"

    span_seconds: Mapped[int] = mapped_column(Integer, primary_key=True)
    start: Mapped[datetime] = mapped_column(DateTime, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)


class TextStatModel(Base):
    """As `TextStatTotal`, of one model."""

    __tablename__ = "text_stat_models"

    span_seconds: Mapped[int] = mapped_column(Integer, primary_key=True)
    start: Mapped[datetime] = mapped_column(DateTime, primary_key=True)
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)


class TextStatBackfill(Base):
    """How far the jobs that ended before the queue existed are added up."""

    __tablename__ = "text_stat_backfill"
    __table_args__ = (CheckConstraint("id = 1"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True, default=1)
    next_id: Mapped[int] = mapped_column(BigInteger)
    last_id: Mapped[int] = mapped_column(BigInteger)
