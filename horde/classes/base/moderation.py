# SPDX-License-Identifier: AGPL-3.0-or-later
"""What moderators and operators did: who, what, to what, when and why."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, DateTime, Integer, String
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from horde.clock import utcnow
from horde.db import Base


class ModeratorAct(Base):
    """One act; permanent. It outlives the accounts it names, so nothing refers to them."""

    __tablename__ = "moderator_acts"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    user_id: Mapped[int | None] = mapped_column(Integer, index=True)  # None for the operator
    username: Mapped[str] = mapped_column(String(100))  # as it was then
    action: Mapped[str] = mapped_column(String(40), index=True)
    subject: Mapped[str] = mapped_column(String(255), index=True)
    reason: Mapped[str | None] = mapped_column(String(500))
    details: Mapped[dict[str, Any]] = mapped_column(JSONB, default=dict)
