# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text and chat requests."""

from typing import Any
from uuid import UUID

from sqlalchemy import CHAR, Boolean, Float, Index, Integer, String, Text, Uuid
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from horde.classes.base.waiting_prompt import WaitingPrompt


class TextWaitingPrompt(WaitingPrompt):
    """A text request; `is_chat` makes it a chat request, whose input is `messages` instead of the prompt."""

    __mapper_args__ = {"polymorphic_identity": "text"}

    max_length: Mapped[int] = mapped_column(Integer, default=80, nullable=True)
    max_context_length: Mapped[int] = mapped_column(Integer, default=2048, nullable=True)
    softprompt: Mapped[str | None] = mapped_column(String(255))
    is_chat: Mapped[bool] = mapped_column(Boolean, default=False)
    messages: Mapped[list[dict[str, Any]] | None] = mapped_column(JSONB, deferred=True)
    operation_key: Mapped[UUID | None] = mapped_column(Uuid)
    operation_fingerprint: Mapped[str | None] = mapped_column(CHAR(64))
    context_adjustments: Mapped[list[dict[str, Any]] | None] = mapped_column(JSONB)
    chat_extras: Mapped[dict[str, Any] | None] = mapped_column(JSONB, deferred=True)
    chat_required_features: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    chat_conformance: Mapped[str] = mapped_column(String(16), default="strict")
    chat_tools_temperature: Mapped[float | None] = mapped_column(Float)
    chat_messages_offloaded: Mapped[bool] = mapped_column(Boolean, default=False)
    chat_fault_reason: Mapped[str | None] = mapped_column(String(1000))
    chat_fault_rc: Mapped[str | None] = mapped_column(String(32))


Index(
    "ix_waiting_prompts_user_operation_key",
    TextWaitingPrompt.user_id,
    TextWaitingPrompt.operation_key,
    unique=True,
    postgresql_where=TextWaitingPrompt.operation_key.is_not(None),
)
