# SPDX-License-Identifier: AGPL-3.0-or-later
"""Teams of workers."""

from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import BigInteger, DateTime, ForeignKey, Index, Integer, String, Uuid
from sqlalchemy.orm import Mapped, mapped_column

from horde.clock import utcnow
from horde.db import Base


class Team(Base):
    """A name that workers serve under; `owner_id` is who made it. Uptime is seconds."""

    __tablename__ = "teams"

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=uuid4)
    name: Mapped[str] = mapped_column(String(100))
    info: Mapped[str | None] = mapped_column(String(1000))
    owner_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    contributions: Mapped[int] = mapped_column(BigInteger, default=0)
    fulfilments: Mapped[int] = mapped_column(Integer, default=0)
    kudos: Mapped[int] = mapped_column(BigInteger, default=0)
    uptime: Mapped[int] = mapped_column(BigInteger, default=0)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    last_active: Mapped[datetime] = mapped_column(DateTime, default=utcnow)


Index("ix_teams_name", Team.name, unique=True)
