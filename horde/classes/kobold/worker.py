# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text workers: what they declare on each pop, and whether a request is theirs to serve.

The rules here are pure: they compare a request's stored facts with a worker's. The queue query
repeats the cheap ones in SQL (database/text_functions.py); a property test proves the two equal.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from uuid import UUID

from horde_sdk.generation_parameters.text.chat_policy import ChatFeature, ChatLimitField
from horde_sdk.worker.chat_declaration import ChatImageTransport
from sqlalchemy import Boolean, Float, Integer, String, Text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from horde.chat.declaration import ChatDeclaration
from horde.classes.base.worker import (
    CHECK_IN_SECONDS,
    SPEED_BASELINE,
    UPTIME_REWARD_SECONDS,
    Worker,
    is_backend_validated,
    is_online,
)

TEXT_JOB_LEASE_SECONDS = 150  # how long a worker may hold a job it never posts progress for
TEXT_JOB_PREPARATION_SECONDS = 30  # template, tokenise, load
UNMEASURED_TEXT_WORKER_TOKENS_PER_SECOND = 10.0
# What the gap calls a worker with vision and no way to receive images.
MISSING_IMAGE_TRANSPORTS = "image_transports"
IMAGE_TRANSPORTS = frozenset({ChatImageTransport.URL.value, ChatImageTransport.BASE64.value})


class SkipReason(StrEnum):
    """Why a worker may not serve a request. `skipped` on the pop shows only those the API
    declares.
    """

    MAINTENANCE = "maintenance"
    STALE = "stale"
    NSFW = "nsfw"
    UNTRUSTED = "untrusted"
    WORKER_ID = "worker_id"
    MAX_CONTEXT_LENGTH = "max_context_length"
    MAX_LENGTH = "max_length"
    BRIDGE_VERSION = "bridge_version"
    SLOW = "slow"
    MODELS = "models"
    KIND = "kind"
    LEASE_SPEED = "lease_speed"
    DECLARATION = "declaration"
    TOOLS_MAX_TEMPERATURE = "tools_max_temperature"
    STORE_AWAY = "store_away"


# The counts a pop may show; refusals for any other reason serve availability alone.
REPORTED_SKIP_REASONS = frozenset(
    {
        SkipReason.NSFW,
        SkipReason.UNTRUSTED,
        SkipReason.WORKER_ID,
        SkipReason.MAX_CONTEXT_LENGTH,
        SkipReason.MAX_LENGTH,
        SkipReason.BRIDGE_VERSION,
        SkipReason.MODELS,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestNeeds:
    """What of a text or chat request decides who may serve it."""

    user_id: int
    is_chat: bool
    models: tuple[str, ...]  # empty: any model
    max_length: int  # tokens
    max_context_length: int  # tokens
    trusted_workers: bool = False
    validated_backends: bool = False
    slow_workers: bool = True
    nsfw: bool = False
    worker_ids: frozenset[UUID] = frozenset()
    worker_blacklist: bool = False
    required_features: frozenset[str] = frozenset()
    tools_temperature: float | None = None
    has_images: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRefusal:
    """Why a worker's chat declaration does not cover a request; the lists feed the declaration
    gap.
    """

    reason: SkipReason
    missing_declarations: tuple[str, ...] = ()
    exceeded_limits: tuple[str, ...] = ()
    largest_max_length: int | None = None  # what it could serve of a request too long for its speed


@dataclass(frozen=True, slots=True, kw_only=True)
class EligibilityInputs:
    """What eligibility needs beyond the worker's own row; gathered once a pop or availability
    pass.
    """

    models: frozenset[str]  # those offered: of this pop, or as stored
    owner_trusted: bool
    validated_backends: Collection[str]  # names of bridges whose results are taken at full value
    minimum_speed: float  # tokens per second asked of a worker when a request refuses slow ones
    now: datetime
    # Known of a pop alone: stored images could not be read for the worker.
    is_store_away: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckIn:
    """What a check-in writes to the worker's row."""

    columns: dict[str, object]
    is_rewarded: bool


class TextWorker(Worker):
    """A worker that serves text and, when it declares so, chat jobs."""

    __mapper_args__ = {"polymorphic_identity": "text_worker"}

    max_length: Mapped[int] = mapped_column(Integer, default=80, nullable=True)
    max_context_length: Mapped[int] = mapped_column(Integer, default=2048, nullable=True)
    accepts_chat_jobs: Mapped[bool] = mapped_column(Boolean, default=False)
    accepts_prompt_jobs: Mapped[bool] = mapped_column(Boolean, default=True)
    chat_features: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    chat_max_context_length: Mapped[int | None] = mapped_column(Integer)
    chat_max_length: Mapped[int | None] = mapped_column(Integer)
    chat_model_id: Mapped[str | None] = mapped_column(String(255))
    chat_tools_max_temperature: Mapped[float | None] = mapped_column(Float)
    image_transports: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    nonconformant_replies: Mapped[int] = mapped_column(Integer, default=0)

    @property
    def gate_speed(self) -> float:
        """The speed that the gate goes by: a few samples do not measure a worker yet."""
        return SPEED_BASELINE if self.speed_is_provisional else self.speed

    def is_check_in_due(self, now: datetime) -> bool:
        """Whether this pop rewrites the row: not within 30 s of the last, but always in the first
        30 s of life.
        """
        if self.is_young(now):
            return True
        return (now - self.last_check_in).total_seconds() >= CHECK_IN_SECONDS

    def is_young(self, now: datetime) -> bool:
        """Whether it is in its first 30 s of life."""
        return (now - self.created).total_seconds() <= CHECK_IN_SECONDS

    def check_in(
        self,
        *,
        now: datetime,
        ipaddr: str,
        bridge_agent: str,
        threads: int,
        nsfw: bool,
        limits: tuple[int, int],
    ) -> CheckIn:
        """Take what a pop says of the worker: the columns to write, and whether the uptime earns a
        reward.

        The copy at hand is changed along, so that this pop is judged by what it said. The caller
        writes the columns only if the row still has the `last_check_in` that was read: of two pops
        at once, one counts the uptime. `limits` is the text max_length and max_context_length.
        """
        uptime, last_reward_uptime, is_rewarded = self._count_uptime(now)
        columns: dict[str, object] = {
            "ipaddr": ipaddr,
            "bridge_agent": bridge_agent,
            "threads": threads,
            "nsfw": nsfw,
            "max_length": limits[0],
            "max_context_length": limits[1],
            "last_check_in": now,
            "uptime": uptime,
            "last_reward_uptime": last_reward_uptime,
        }
        for name, value in columns.items():
            setattr(self, name, value)
        return CheckIn(columns=columns, is_rewarded=is_rewarded)

    def _count_uptime(self, now: datetime) -> tuple[int, int, bool]:
        """(uptime, uptime at the last reward, whether one is due); an interrupted interval starts
        again.
        """
        if not is_online(self.last_check_in, now) or self.paused or self.maintenance:
            return self.uptime, self.uptime, False
        uptime = self.uptime + max(0, int((now - self.last_check_in).total_seconds()))
        is_rewarded = uptime - self.last_reward_uptime > UPTIME_REWARD_SECONDS
        return uptime, uptime if is_rewarded else self.last_reward_uptime, is_rewarded

    def take_chat_declaration(self, declaration: ChatDeclaration | None) -> dict[str, object]:
        """Take what the pop declares, None withdrawing it all; the columns that change, none for a
        worker that repeats itself.

        The copy at hand is changed along.
        """
        values = _declaration_columns(declaration)
        changed = {name: value for name, value in values.items() if getattr(self, name) != value}
        for name, value in changed.items():
            setattr(self, name, value)
        return changed

    def chat_refusal_reason(self, request: RequestNeeds) -> ChatRefusal | None:
        """Why the declaration of the latest pop does not cover a chat request; None when it
        does.
        """
        if not self.accepts_chat_jobs:
            return ChatRefusal(reason=SkipReason.KIND)
        if self.chat_model_id not in request.models:
            return ChatRefusal(reason=SkipReason.MODELS)
        missing = request.required_features - set(self.chat_features or ())
        if (
            request.has_images
            and ChatFeature.VISION.value not in missing
            and not IMAGE_TRANSPORTS & set(self.image_transports or ())
        ):
            missing = missing | {MISSING_IMAGE_TRANSPORTS}
        exceeded = self._exceeded_chat_limits(request)
        if missing:
            return ChatRefusal(
                reason=SkipReason.DECLARATION,
                missing_declarations=tuple(sorted(missing)),
                exceeded_limits=exceeded,
            )
        if exceeded:
            return ChatRefusal(reason=SkipReason(exceeded[0]), exceeded_limits=exceeded)
        return None

    def _exceeded_chat_limits(self, request: RequestNeeds) -> tuple[str, ...]:
        exceeded = []
        if request.max_context_length > (self.chat_max_context_length or 0):
            exceeded.append(ChatLimitField.MAX_CONTEXT_LENGTH.value)
        if request.max_length > (self.chat_max_length or 0):
            exceeded.append(ChatLimitField.MAX_LENGTH.value)
        cap = self.chat_tools_max_temperature
        if (
            request.tools_temperature is not None
            and cap is not None
            and request.tools_temperature > cap
        ):
            exceeded.append(ChatLimitField.TOOLS_MAX_TEMPERATURE.value)
        return tuple(exceeded)

    def can_generate_with_eligibility_inputs(
        self, request: RequestNeeds, inputs: EligibilityInputs
    ) -> ChatRefusal | None:
        """Why this worker may not serve the request now; None when it may.

        The checks stand in the order in which the API counts them. A worker in maintenance serves
        its own owner.
        """
        reason = self._common_refusal(request, inputs)
        if reason is None and not request.is_chat:
            reason = self._text_refusal(request, inputs)
        if reason is not None:
            return ChatRefusal(reason=reason)
        return self._chat_refusal(request, inputs) if request.is_chat else None

    def _common_refusal(
        self, request: RequestNeeds, inputs: EligibilityInputs
    ) -> SkipReason | None:
        if (self.maintenance or self.paused) and request.user_id != self.user_id:
            return SkipReason.MAINTENANCE
        if not is_online(self.last_check_in, inputs.now):
            return SkipReason.STALE
        if request.nsfw and not self.nsfw:
            return SkipReason.NSFW
        if request.trusted_workers and not inputs.owner_trusted:
            return SkipReason.UNTRUSTED
        if request.worker_ids and (self.id in request.worker_ids) == request.worker_blacklist:
            return SkipReason.WORKER_ID
        if request.validated_backends and not is_backend_validated(
            self.bridge_agent, inputs.validated_backends
        ):
            return SkipReason.BRIDGE_VERSION
        if not request.slow_workers and self.speed < inputs.minimum_speed:
            return SkipReason.SLOW
        return None

    def _text_refusal(self, request: RequestNeeds, inputs: EligibilityInputs) -> SkipReason | None:
        if not self.accepts_prompt_jobs:
            return SkipReason.KIND
        if request.max_context_length > self.max_context_length:
            return SkipReason.MAX_CONTEXT_LENGTH
        if request.max_length > self.max_length:
            return SkipReason.MAX_LENGTH
        if request.models and not inputs.models.intersection(request.models):
            return SkipReason.MODELS
        return None

    def _chat_refusal(self, request: RequestNeeds, inputs: EligibilityInputs) -> ChatRefusal | None:
        refusal = self.chat_refusal_reason(request)
        if refusal is not None:
            return refusal
        if (
            inputs.is_store_away
            and request.has_images
            and ChatImageTransport.URL.value not in (self.image_transports or ())
        ):
            # It would be given back, and end the request after three times.
            return ChatRefusal(reason=SkipReason.STORE_AWAY)
        capacity = get_text_worker_lease_capacity(self.gate_speed)
        if request.max_length > capacity:
            return ChatRefusal(reason=SkipReason.LEASE_SPEED, largest_max_length=int(capacity))
        return None

    def get_chat_details(self) -> dict[str, object] | None:
        """The declaration as worker details show it; None when the worker takes no chat jobs."""
        if not self.accepts_chat_jobs:
            return None
        limits: dict[str, object] = {
            "max_context_length": self.chat_max_context_length,
            "max_length": self.chat_max_length,
        }
        if self.chat_tools_max_temperature is not None:
            limits["tools_max_temperature"] = self.chat_tools_max_temperature
        return {
            "model_id": self.chat_model_id,
            "features": sorted(self.chat_features or ()),
            "limits": limits,
            "image_transports": sorted(self.image_transports or ()),
        }


def _declaration_columns(declaration: ChatDeclaration | None) -> dict[str, object]:
    if declaration is None:
        return {
            "accepts_chat_jobs": False,
            "accepts_prompt_jobs": True,
            "chat_features": None,
            "chat_max_context_length": None,
            "chat_max_length": None,
            "chat_model_id": None,
            "chat_tools_max_temperature": None,
            "image_transports": None,
        }
    return {
        "accepts_chat_jobs": True,
        "accepts_prompt_jobs": declaration.prompt_jobs,
        "chat_features": sorted(declaration.features),
        "chat_max_context_length": declaration.max_context_length,
        "chat_max_length": declaration.max_length,
        "chat_model_id": declaration.model_id,
        "chat_tools_max_temperature": declaration.tools_max_temperature,
        "image_transports": sorted(declaration.image_transports),
    }


def get_effective_text_worker_speed(speed: float) -> float:
    """Tokens per second to reckon with: a worker without samples stores the baseline and counts as
    10.
    """
    return UNMEASURED_TEXT_WORKER_TOKENS_PER_SECOND if speed == SPEED_BASELINE else speed


def get_text_worker_lease_capacity(speed: float) -> float:
    """Tokens a worker of this stored speed finishes within the base lease, after preparing the
    job.
    """
    return get_effective_text_worker_speed(speed) * (
        TEXT_JOB_LEASE_SECONDS - TEXT_JOB_PREPARATION_SECONDS
    )


def worker_may_be_speed_gated(speed: float, max_length: int) -> bool:
    """Whether the speed gate offers a worker less output than the length it declares; only a
    measured speed counts.
    """
    return speed != SPEED_BASELINE and get_text_worker_lease_capacity(speed) < max_length


def get_minimum_text_speed(multiplier: float | None) -> float:
    """Tokens per second below which a worker of a model counts as slow; None is a worker that
    offers no model.
    """
    if multiplier is None:
        return 3.0
    if multiplier >= 20:
        return 3.0
    return 4.0 if multiplier >= 13 else 5.0
