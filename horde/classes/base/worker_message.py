# SPDX-License-Identifier: AGPL-3.0-or-later
"""Messages that workers get with their pops."""

from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import DateTime, ForeignKey, String, Text, Uuid
from sqlalchemy.orm import Mapped, mapped_column

from horde.clock import utcnow
from horde.db import Base


class WorkerMessage(Base):
    """A message to one worker; without one to every worker of `worker_type`, or of any type.

    `user_id` wrote it, `origin` is whom it is from as its reader is told.
    """

    __tablename__ = "worker_messages"

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=uuid4)
    worker_id: Mapped[UUID | None] = mapped_column(
        ForeignKey("workers.id", ondelete="CASCADE"), index=True
    )
    worker_type: Mapped[str | None] = mapped_column(String(30))
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"), index=True)
    message: Mapped[str] = mapped_column(Text)
    origin: Mapped[str] = mapped_column(String(255))
    expiry: Mapped[datetime] = mapped_column(DateTime, index=True)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
