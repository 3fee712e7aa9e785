# SPDX-License-Identifier: AGPL-3.0-or-later
"""What moderators look at and what they did: evidence of prompts, notes, and acts."""

from datetime import datetime
from enum import StrEnum
from uuid import UUID

from sqlalchemy import BigInteger, Boolean, DateTime, ForeignKey, Index, Integer, String, Uuid
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
    details: Mapped[dict[str, object]] = mapped_column(JSONB, default=dict)


class ModerationReason(StrEnum):
    """Why there is evidence."""

    FILTER_REJECTION = "filter_rejection"  # of a flagged account's prompt nothing was left
    MODEL_REJECTION = "model_rejection"  # of a prompt for an adult model nothing was left
    WORKER_CSAM = "worker_csam"  # a worker reported what it was asked for


class TextState(StrEnum):
    """Where the text of an event is."""

    NONE = "none"  # none was kept
    WAITING = "waiting"  # in the row, until it is stored
    STORED = "stored"
    DELETING = "deleting"  # no longer shown, and on its way out of the store
    DELETED = "deleted"


class ModerationEvent(Base):
    """A prompt that was refused or reported. What names a person goes before the row does, which
    stays for its figures.
    """

    __tablename__ = "moderation_events"
    __table_args__ = (Index("ix_moderation_events_text_state", "text_state", "text_changed"),)

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    created: Mapped[datetime] = mapped_column(DateTime, index=True)
    reason: Mapped[str] = mapped_column(String(32))
    user_id: Mapped[int | None] = mapped_column(Integer, index=True)
    proxied_account: Mapped[str | None] = mapped_column(String(255))
    ipaddr: Mapped[str | None] = mapped_column(String(39))
    # A keyed hash, by which events of one address are found when the address is gone.
    ip_subject_key: Mapped[str | None] = mapped_column(String(32), index=True)
    worker_id: Mapped[UUID | None] = mapped_column(Uuid, index=True)
    models: Mapped[list[str]] = mapped_column(JSONB)
    is_chat: Mapped[bool] = mapped_column(Boolean)
    is_anonymised: Mapped[bool] = mapped_column(Boolean)
    text_state: Mapped[str] = mapped_column(String(16))
    text_changed: Mapped[datetime] = mapped_column(DateTime)
    object_id: Mapped[UUID] = mapped_column(Uuid, unique=True, index=True)
    prompts: Mapped[dict[str, object] | None] = mapped_column(JSONB(none_as_null=True))


class ModerationNote(Base):
    """What a moderator wrote down about an event."""

    __tablename__ = "moderation_notes"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    event_id: Mapped[int] = mapped_column(
        ForeignKey(ModerationEvent.id, ondelete="CASCADE"), index=True
    )
    created: Mapped[datetime] = mapped_column(DateTime)
    user_id: Mapped[int | None] = mapped_column(Integer)  # None for the operator
    username: Mapped[str] = mapped_column(String(100))  # as it was then
    note: Mapped[str] = mapped_column(String(2000))
