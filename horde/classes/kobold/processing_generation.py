# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text and chat jobs."""

from typing import Any

from sqlalchemy import Boolean, Integer, String
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from horde.classes.base.processing_generation import ProcessingGeneration


class TextProcessingGeneration(ProcessingGeneration):
    """One generation of a text or chat request."""

    __mapper_args__ = {"polymorphic_identity": "text"}

    message: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    native_finish_reason: Mapped[str | None] = mapped_column(String(32))
    prompt_tokens: Mapped[int | None] = mapped_column(Integer)
    completion_tokens: Mapped[int | None] = mapped_column(Integer)
    reasoning_tokens: Mapped[int | None] = mapped_column(Integer)
    charge_basis: Mapped[str | None] = mapped_column(String(16))
    assigned_model: Mapped[str | None] = mapped_column(String(255))
    assigned_max_context_length: Mapped[int | None] = mapped_column(Integer)
    assigned_max_length: Mapped[int | None] = mapped_column(Integer)
    image_transport: Mapped[str | None] = mapped_column(String(16))
    chat_refusal_rc: Mapped[str | None] = mapped_column(String(32))
    settled_character_count: Mapped[int | None] = mapped_column(Integer)
    over_capacity_at_assignment: Mapped[bool] = mapped_column(Boolean, default=False)
