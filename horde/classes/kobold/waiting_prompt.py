# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text and chat requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import CHAR, Boolean, DateTime, Float, Index, Integer, String, Text, Uuid, bindparam, func, update
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column
from sqlalchemy.sql.elements import Grouping

from horde.classes.base.waiting_prompt import LIVE, QUEUE_RANK, TerminalOutcome, WaitingPrompt
from horde.classes.kobold.chat_request import (
    CHAT_WORKER_FAULT_MESSAGES,
    MAX_CHAT_FAULT_REASON_LENGTH,
    build_chat_job_payload,
)
from horde.classes.kobold.pricing import (
    AllowanceLimits,
    compute_free_output_allowance,
    compute_text_quote,
    compute_upfront_estimate,
)
from horde.classes.kobold.worker import TextWorker
from horde.db import table_of
from horde.return_codes import ReturnCode

# What a text job's payload carries when the client did not say: the schema's defaults for these six keys alone.
TEXT_PAYLOAD_DEFAULTS: dict[str, Any] = {
    "max_context_length": 2048,
    "max_length": 80,
    "min_p": 0.0,
    "smoothing_factor": 0.0,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
}


class UpfrontOutcome(StrEnum):
    """How a request's output is paid for at admission."""

    FREE = "free"
    FUNDED = "funded"
    DOWNGRADED = "downgraded"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpfrontNeeds:
    """What admission has to hold. `hold` of zero needs nothing; lengths are tokens, amounts kudos."""

    allowance: int
    estimate: Decimal
    is_hold_required: bool
    can_downgrade: bool  # lowering to the allowance would make it free


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationKeyClaim:
    """A key and the fingerprint of what was sent with it, written with the activation."""

    key: UUID
    fingerprint: str


class TextWaitingPrompt(WaitingPrompt):
    """A text request; `is_chat` makes it a chat request, whose input is `messages` instead of the prompt."""

    __mapper_args__ = {"polymorphic_identity": "text"}

    max_length: Mapped[int] = mapped_column(Integer, default=80, nullable=True)
    max_context_length: Mapped[int] = mapped_column(Integer, default=2048, nullable=True)
    softprompt: Mapped[str | None] = mapped_column(String(255))
    is_chat: Mapped[bool] = mapped_column(Boolean, default=False)
    messages: Mapped[list[dict[str, Any]] | None] = mapped_column(JSONB(none_as_null=True), deferred=True)
    operation_key: Mapped[UUID | None] = mapped_column(Uuid)
    operation_fingerprint: Mapped[str | None] = mapped_column(CHAR(64))
    context_adjustments: Mapped[list[dict[str, Any]] | None] = mapped_column(JSONB(none_as_null=True))
    chat_extras: Mapped[dict[str, Any] | None] = mapped_column(JSONB(none_as_null=True), deferred=True)
    chat_required_features: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    chat_conformance: Mapped[str] = mapped_column(String(16), default="strict")
    chat_tools_temperature: Mapped[float | None] = mapped_column(Float)
    chat_messages_offloaded: Mapped[bool] = mapped_column(Boolean, default=False)
    chat_fault_reason: Mapped[str | None] = mapped_column(String(1000))
    chat_fault_rc: Mapped[str | None] = mapped_column(String(32))

    @staticmethod
    def calculate_kudos(*, max_length: int, max_context_length: int, models: Sequence[tuple[float, bool]], n: int) -> Decimal:
        """The quote: what a dry run answers and `horde.max_kudos` is compared with, priced at the first listed model.

        `models` are (multiplier, is known). Rounded for display by `pricing.round_quote`.
        """
        return compute_text_quote(max_length=max_length, max_context_length=max_context_length, models=models, n=n)

    @staticmethod
    def require_upfront_kudos(
        *,
        max_length: int,
        n: int,
        multipliers: Sequence[float],
        wait_seconds: float | None,
        limits: AllowanceLimits,
        slow_workers: bool,
        lists_workers: bool,
        holds_for_worker_lists: bool,
    ) -> UpfrontNeeds:
        """What a request has to hold before it may queue, by its estimated wait on the workers eligible for it.

        Three things ask for a hold: output above the allowance, refusing slow workers, and, where the horde is set
        so, naming workers, which no lowering of the output cures.
        """
        allowance = compute_free_output_allowance(wait_seconds, limits)
        held_for_list = lists_workers and holds_for_worker_lists
        return UpfrontNeeds(
            allowance=allowance,
            estimate=compute_upfront_estimate(max_length=max_length, multipliers=multipliers, n=n),
            is_hold_required=max_length > allowance or not slow_workers or held_for_list,
            can_downgrade=not held_for_list,
        )

    @staticmethod
    def prepare_job_payload(
        *,
        params: dict[str, Any],
        max_length: int,
        max_context_length: int,
    ) -> dict[str, Any]:
        """What is stored of a job's payload when the request is made: the parameters with the validated lengths.

        The prompt or the messages join at the pop, from their own columns.
        """
        payload = {key: value for key, value in params.items() if key != "n"}
        return payload | {"max_length": max_length, "max_context_length": max_context_length}

    def get_pop_payload(self) -> dict[str, Any]:
        """The payload a worker gets with a job of this request."""
        if self.is_chat:
            return build_chat_job_payload(
                messages=self.messages or [],
                text_params=self.gen_payload,
                chat_extras=self.chat_extras,
                max_length=self.max_length,
                max_context_length=self.max_context_length,
            )
        return TEXT_PAYLOAD_DEFAULTS | self.gen_payload | {"prompt": self.prompt, "n": 1}

    def get_generation_assignment(self, worker: TextWorker) -> dict[str, Any]:
        """What a job remembers of the declaration it was assigned under, so that a later one does not redefine it."""
        if not self.is_chat:
            return {"assigned_model": None, "assigned_max_context_length": None, "assigned_max_length": None}
        return {
            "assigned_model": worker.chat_model_id,
            "assigned_max_context_length": worker.chat_max_context_length,
            "assigned_max_length": worker.chat_max_length,
        }

    @staticmethod
    def _activate(
        session: Session, wp_id: UUID, *, tax: int, priority: int, claim: OperationKeyClaim | None, now: datetime
    ) -> bool:
        """Show an inactive request to the workers, with its tax and, for chat, its operation key; False when it is gone.

        The caller appends the tax's postings in the same transaction. A key that another request of the user claimed
        meanwhile breaks the unique index: the transaction fails with an IntegrityError and leaves nothing.
        """
        values = {
            "wp_id": wp_id,
            "now": now,
            "priority": priority,
            "tax": tax,
            "key": None if claim is None else claim.key,
            "fingerprint": None if claim is None else claim.fingerprint,
        }
        return session.scalar(_ACTIVATE, values) is not None

    @staticmethod
    def cancel(session: Session, wp_id: UUID, now: datetime) -> bool:
        """Stop handing out a request's generations; True for the one call that did it.

        Jobs in flight go on, are paid and keep their results. The first terminal outcome stands, so a request that
        was done or faulted before stays that.
        """
        statement = (
            update(TextWaitingPrompt)
            .where(
                TextWaitingPrompt.id == wp_id,
                TextWaitingPrompt.terminal_outcome.is_(None),
                ~TextWaitingPrompt.faulted,
            )
            .values(n=0, terminal_outcome=TerminalOutcome.CANCELLED, terminal_recorded_at=now)
            .returning(TextWaitingPrompt.id)
            .execution_options(synchronize_session=False)
        )
        return session.scalar(statement) is not None

    @staticmethod
    def record_chat_refusal(session: Session, wp_id: UUID, message: str, rc: ReturnCode) -> None:
        """Keep why the horde refused a reply; a later refusal overwrites it."""
        _write_fault(session, wp_id, message, rc)

    @staticmethod
    def record_chat_worker_fault(session: Session, wp_id: UUID, fault_reason: str) -> None:
        """Keep the sentence for a worker's known fault reason; the worker's own text is never stored."""
        message = CHAT_WORKER_FAULT_MESSAGES.get(fault_reason)
        if message is not None:
            _write_fault(session, wp_id, message, ReturnCode.CHAT_WORKER_FAULT)


requests = table_of(TextWaitingPrompt)

_ACTIVATE = (
    update(requests)
    .where(requests.c.id == bindparam("wp_id"), ~requests.c.active, requests.c.expiry > bindparam("now", type_=DateTime))
    .values(
        active=True,
        extra_priority=bindparam("priority", type_=Integer),
        consumed_kudos=requests.c.consumed_kudos + bindparam("tax", type_=Integer),
        operation_key=bindparam("key", type_=Uuid),
        operation_fingerprint=bindparam("fingerprint", type_=CHAR(64)),
    )
    .returning(requests.c.id)
)


def _write_fault(session: Session, wp_id: UUID, message: str, rc: ReturnCode) -> None:
    session.execute(
        update(TextWaitingPrompt)
        .where(TextWaitingPrompt.id == wp_id)
        .values(chat_fault_reason=func.left(message, MAX_CHAT_FAULT_REASON_LENGTH), chat_fault_rc=rc.value)
        .execution_options(synchronize_session=False)
    )


# The queue as a pop reads it: class by class, each in queue order. The lengths come last, so that rows too long for a
# worker are passed over inside the index.
Index(
    "ix_waiting_prompts_queue_class",
    TextWaitingPrompt.wp_type,
    TextWaitingPrompt.queue_class,
    Grouping(QUEUE_RANK).desc(),  # an index takes an expression in brackets only
    TextWaitingPrompt.created,
    TextWaitingPrompt.id,
    TextWaitingPrompt.max_length,
    TextWaitingPrompt.max_context_length,
    postgresql_where=LIVE,
)
Index(
    "ix_waiting_prompts_user_operation_key",
    TextWaitingPrompt.user_id,
    TextWaitingPrompt.operation_key,
    unique=True,
    postgresql_where=TextWaitingPrompt.operation_key.is_not(None),
)
