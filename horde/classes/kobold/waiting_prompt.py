# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text and chat requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final, Protocol
from uuid import UUID

from horde_sdk.worker.chat_declaration import ChatImageTransport
from sqlalchemy import (
    CHAR,
    Boolean,
    ColumnElement,
    Float,
    Index,
    Integer,
    String,
    Text,
    Uuid,
    cast,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column
from sqlalchemy.sql.elements import Grouping

from horde import object_deletes
from horde.chat.flattening import count_image_parts
from horde.chat.job import build_chat_job_payload, build_text_job_payload, select_chat_transport
from horde.chat.stored_objects import (
    build_chat_messages_key,
    build_jpeg_url,
    replace_stored_images,
)
from horde.chat.wire import ChatExtras, JobPayload, Message
from horde.classes.base.kudos import POSTING_ARGUMENTS, Movements, build_posting_parameters
from horde.classes.base.waiting_prompt import LIVE, QUEUE_RANK, WaitingPrompt
from horde.classes.kobold.pricing import (
    AllowanceLimits,
    compute_free_output_allowance,
    compute_text_quote,
    compute_upfront_estimate,
)
from horde.classes.kobold.worker import TextWorker
from horde.db import WrittenJson, table_of
from horde.hot_session import keep
from horde.json_text import survives_jsonb
from horde.logger import get_logger
from horde.shapes.text_params import TextParams

logger = get_logger(__name__)

MIN_CHAT_IMAGE_URL_SECONDS: Final = 600  # a worker may fetch late in a job that its progress renews
# Fetched right after the pop; a leaked URL is soon worth nothing.
CHAT_MESSAGES_URL_SECONDS: Final = 120


# What a text job's payload carries when the client did not say: the schema's defaults for these six
# keys alone.
TEXT_PAYLOAD_DEFAULTS: TextParams = {
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
    """What admission has to hold. `hold` of zero needs nothing; lengths are tokens, amounts
    kudos.
    """

    allowance: int
    estimate: Decimal
    is_hold_required: bool
    can_downgrade: bool  # lowering to the allowance would make it free


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationKeyClaim:
    """A key and the fingerprint of what was sent with it, written with the activation."""

    key: UUID
    fingerprint: str


class ObjectStore(Protocol):
    """What a job's input needs of the store; `horde.r2` has it."""

    def get_object(self, key: str) -> bytes: ...

    def sign_download_url(self, key: str, lifetime_seconds: int) -> str: ...


class TextWaitingPrompt(WaitingPrompt):
    """A text request; `is_chat` makes it a chat request, whose input is `messages` instead of the
    prompt.
    """

    __mapper_args__ = {"polymorphic_identity": "text"}

    max_length: Mapped[int] = mapped_column(Integer, default=80, nullable=True)
    max_context_length: Mapped[int] = mapped_column(Integer, default=2048, nullable=True)
    softprompt: Mapped[str | None] = mapped_column(String(255))
    is_chat: Mapped[bool] = mapped_column(Boolean, default=False)
    messages: Mapped[list[Message] | None] = mapped_column(JSONB(none_as_null=True), deferred=True)
    operation_key: Mapped[UUID | None] = mapped_column(Uuid)
    operation_fingerprint: Mapped[str | None] = mapped_column(CHAR(64))
    context_adjustments: Mapped[list[dict[str, object]] | None] = mapped_column(
        JSONB(none_as_null=True)
    )
    chat_extras: Mapped[ChatExtras | None] = mapped_column(JSONB(none_as_null=True), deferred=True)
    chat_required_features: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    chat_conformance: Mapped[str] = mapped_column(String(16), default="strict")
    chat_tools_temperature: Mapped[float | None] = mapped_column(Float)
    chat_messages_offloaded: Mapped[bool] = mapped_column(Boolean, default=False)
    chat_fault_reason: Mapped[str | None] = mapped_column(String(1000))
    chat_fault_rc: Mapped[str | None] = mapped_column(String(32))
    messages_text: Mapped[list[Message] | None] = mapped_column(WrittenJson, deferred=True)
    chat_extras_text: Mapped[ChatExtras | None] = mapped_column(WrittenJson, deferred=True)

    @staticmethod
    def calculate_kudos(
        *,
        max_length: int,
        max_context_length: int,
        models: Sequence[tuple[float, bool]],
        n: int,
        image_count: int = 0,
    ) -> Decimal:
        """The quote: what a dry run answers and `horde.max_kudos` is compared with, priced at the
        first listed model.

        `models` are (multiplier, is known). Rounded for display by `pricing.round_quote`.
        """
        return compute_text_quote(
            max_length=max_length,
            max_context_length=max_context_length,
            models=models,
            n=n,
            image_count=image_count,
        )

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
        """What a request has to hold before it may queue, by its estimated wait on the workers
        eligible for it.

        Three things ask for a hold: output above the allowance, refusing slow workers, and, where
        the horde is set so, naming workers, which no lowering of the output cures.
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
        params: TextParams,
        max_length: int,
        max_context_length: int,
    ) -> TextParams:
        """What is stored of a job's payload when the request is made: the parameters with the
        validated lengths.

        The prompt or the messages join at the pop, from their own columns.
        """
        payload: TextParams = {
            **params,
            "max_length": max_length,
            "max_context_length": max_context_length,
        }
        payload.pop("n", None)
        return payload

    def get_pop_payload(
        self,
        *,
        transport: ChatImageTransport | None = None,
        ttl_seconds: int = 0,
        store: ObjectStore | None = None,
    ) -> JobPayload:
        """The payload a worker gets with a job of this request.

        With a transport it asks `store` for what lies there, so it has to run after the commit of
        the assignment. Raises StoreUnavailable then.
        """
        if not self.is_chat:
            return build_text_job_payload(
                {**TEXT_PAYLOAD_DEFAULTS, **self.gen_payload}, self.prompt
            )
        messages, messages_url = self.messages or [], None
        if transport is not None and store is not None:
            if transport is ChatImageTransport.MESSAGES_URL:
                messages_url = store.sign_download_url(
                    build_chat_messages_key(self.id), CHAT_MESSAGES_URL_SECONDS
                )
            else:
                messages = self.build_worker_messages(transport, ttl_seconds, store)
        return build_chat_job_payload(
            messages=messages,
            messages_url=messages_url,
            text_params=self.gen_payload,
            chat_extras=self.chat_extras,
            max_length=self.max_length,
            max_context_length=self.max_context_length,
        )

    def build_worker_messages(
        self, transport: ChatImageTransport, ttl_seconds: int, store: ObjectStore
    ) -> list[Message]:
        """The messages with each image as the worker declared it: a signed URL, or the stored JPEG
        itself.

        URLs hold for the job's TTL and for ten minutes at least. Raises StoreUnavailable.
        """
        lifetime_seconds = max(ttl_seconds, MIN_CHAT_IMAGE_URL_SECONDS)

        def build_url(key: str) -> str:
            if transport is ChatImageTransport.URL:
                return store.sign_download_url(key, lifetime_seconds)
            return build_jpeg_url(store.get_object(key))

        return replace_stored_images(self.messages or [], build_url)

    def select_transport(self, worker: TextWorker) -> ChatImageTransport | None:
        """How this worker gets what of the request lies in the store; None for a job that is whole
        by itself.
        """
        if not self.is_chat:
            return None
        return select_chat_transport(
            worker.image_transports or (),
            has_images=count_image_parts(self.messages or []) > 0,
            is_offloaded=self.chat_messages_offloaded,
        )

    def get_generation_assignment(self, worker: TextWorker) -> dict[str, object]:
        """What a job remembers of the declaration it was assigned under, so that a later one does
        not redefine it.
        """
        if not self.is_chat:
            return {
                "assigned_model": None,
                "assigned_max_context_length": None,
                "assigned_max_length": None,
                "image_transport": None,
            }
        transport = self.select_transport(worker)
        return {
            "assigned_model": worker.chat_model_id,
            "assigned_max_context_length": worker.chat_max_context_length,
            "assigned_max_length": worker.chat_max_length,
            "image_transport": None if transport is None else transport.value,
        }

    @staticmethod
    def _activate(
        session: Session,
        wp_id: UUID,
        *,
        tax: int,
        priority: int,
        claim: OperationKeyClaim | None,
        movements: Movements,
        now: datetime,
    ) -> bool:
        """Show an inactive request to the workers, with its tax, what that moves and, for chat, its
        operation key; False when it is gone, and then nothing moves.

        A key that another request of the user claimed meanwhile breaks the unique index: the
        transaction fails with an IntegrityError and leaves nothing.
        """
        values = {
            **build_posting_parameters(movements, now),
            "wp_id": wp_id,
            "priority": priority,
            "tax": tax,
            "key": None if claim is None else claim.key,
            "fingerprint": None if claim is None else claim.fingerprint,
        }
        return bool(session.scalar(_ACTIVATE, values))


requests = table_of(TextWaitingPrompt)


def select_as_sent(columns: Any, name: str) -> ColumnElement[Any]:
    """The column `messages` or `chat_extras` of a request in the form in which it was sent.

    `columns` has the columns as attributes. Rows whose jsonb keeps that form have no text.
    """
    as_text = func.coalesce(
        getattr(columns, f"{name}_text"), cast(getattr(columns, name), Text), type_=WrittenJson
    )
    return as_text.label(name)


def build_sent_columns(
    messages: Sequence[Message] | None, chat_extras: ChatExtras | None
) -> dict[str, object]:
    """The columns that hold what a client sent: jsonb for statements, and text where that changes
    the form.
    """
    return {
        "messages": messages,
        "messages_text": None if survives_jsonb(messages) else messages,
        "chat_extras": chat_extras,
        "chat_extras_text": None if survives_jsonb(chat_extras) else chat_extras,
    }


_ACTIVATE = keep(
    text(f"""
    SELECT activate_request(
        request => :wp_id, priority => :priority, tax => :tax, key => :key,
        fingerprint => :fingerprint,
        {POSTING_ARGUMENTS}
    )
    """)
)


def delete_stored_chat_images(keys: Sequence[str]) -> None:
    """Delete objects whose request is gone, see `object_deletes`. Best effort, after the commit."""
    object_deletes.delete_stored_objects(keys)


def retry_chat_image_deletes() -> int:
    """Try some of the waiting deletes again, see `object_deletes`; how many went."""
    return object_deletes.retry_deletes()


# The queue as a pop reads it: class by class, each in queue order. The lengths come last, so that
# rows too long for a worker are passed over inside the index.
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
