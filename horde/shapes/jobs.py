# SPDX-License-Identifier: AGPL-3.0-or-later
"""What workers send and are told: a pop, the job it brings, the reply to it, and its progress."""

from enum import StrEnum
from typing import Annotated, Any, NotRequired, Required, TypedDict

from horde_sdk.worker.chat_declaration import ChatFinishReason
from pydantic import Field

from horde.shapes.base import LenientBody, Values, WholeNumber
from horde.shown_text import clean_shown_text

MAX_POPPED_MODELS = 200
MAX_WORKER_NAME_LENGTH = 100  # what the column holds
MAX_BRIDGE_AGENT_LENGTH = 1000  # one worker's agent grows with each reload of its settings
UNKNOWN_BRIDGE_AGENT = "unknown:0:unknown"

CountedName = Annotated[str, Field(max_length=4096)]


class TextPopBody(LenientBody):
    """The keys of a text pop; the chat declaration is checked by
    `parse_chat_declaration_fields`.
    """

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    models: Values[CountedName] = Field(
        default_factory=list, description="At least one; the first 200 count."
    )
    bridge_agent: str = Field(default=UNKNOWN_BRIDGE_AGENT, description="name:version:url")
    threads: Annotated[WholeNumber, Field(ge=1, le=50)] = 1
    amount: Annotated[
        WholeNumber, Field(ge=1, le=20, description="Generations of one request; 1 on chat.")
    ] = 1
    nsfw: bool = True
    priority_usernames: Values[CountedName] = Field(default_factory=list, description="name#id")
    max_length: Annotated[WholeNumber, Field(ge=1, le=2**31 - 1)] = 512
    max_context_length: Annotated[WholeNumber, Field(ge=1, le=2**31 - 1)] = 2048
    leaving: bool = Field(
        default=False, description="The worker stops: it gets no job and is offline at once."
    )

    @property
    def clean_name(self) -> str:
        """The worker's name as it is shown, cut to what the column holds."""
        return clean_shown_text(self.name)[:MAX_WORKER_NAME_LENGTH].rstrip()

    @property
    def clean_agent(self) -> str:
        """The bridge agent without markup; a long one is cut, since one worker's grows with every
        reload.
        """
        return clean_shown_text(self.bridge_agent)[:MAX_BRIDGE_AGENT_LENGTH]

    @property
    def known_models(self) -> list[str]:
        """The models offered, each once, in order; the first 200 count."""
        return list(dict.fromkeys(self.models[:MAX_POPPED_MODELS]))


class ChatLimitsInput(TypedDict):
    """How much a worker takes of a chat job."""

    max_context_length: Annotated[int, Field(ge=1)]
    max_length: Annotated[int, Field(ge=1)]
    tools_max_temperature: NotRequired[Annotated[float, Field(ge=0)]]


class PopBody(TextPopBody):
    """All keys of a pop. `parse_chat_declaration_fields` judges those of the chat declaration, once
    the account is known.
    """

    softprompts: list[str] = Field(default_factory=list, description="Accepted and not applied.")
    chat_jobs: bool = False
    prompt_jobs: bool = True
    chat_features: list[str] = Field(default_factory=list)
    chat_limits: ChatLimitsInput | None = None
    model_id: str | None = None
    image_transports: list[str] = Field(default_factory=list)


class PopAnswer(TypedDict):
    """A job, or nothing."""

    payload: dict[str, object]
    id: str | None
    ids: list[str]
    messages: list[dict[str, object]]
    ttl: Annotated[
        int | None, Field(description="Seconds until the job is given to another worker.")
    ]
    extra_source_images: Any
    skipped: Annotated[
        dict[str, int], Field(description="Why waiting requests were not for this worker.")
    ]
    softprompt: str | None
    model: str | None
    chat: NotRequired[Annotated[bool, Field(description="True on a chat job, absent otherwise.")]]


class SubmissionState(StrEnum):
    """How a worker ended a job."""

    OK = "ok"
    CENSORED = "censored"
    CSAM = "csam"
    FAULTED = "faulted"


class GenerationMetadata(LenientBody):
    """One entry of `gen_metadata` a text worker may send."""

    type: Annotated[str, Field(max_length=255)]
    value: Annotated[str, Field(max_length=255)]
    ref: Annotated[str, Field(max_length=255)] | None = None


class TextSubmitBody(LenientBody):
    """The keys of a text job's submit."""

    id: str
    generation: str
    state: SubmissionState = Field(default=SubmissionState.OK, strict=False)
    seed: Annotated[WholeNumber, Field(ge=-(2**63), le=2**63 - 1)] = 0
    gen_metadata: Values[GenerationMetadata] = Field(default_factory=list)


class SubmitBody(TypedDict, total=False):
    """All keys of a submit: `generation` for a text job, the others for a chat job, which
    `parse_chat_submission` judges.
    """

    id: Required[str]
    generation: str
    state: SubmissionState
    seed: int
    gen_metadata: list[dict[str, object]]
    message: object
    finish_reason: ChatFinishReason
    native_finish_reason: Annotated[str, Field(max_length=32)]
    prompt_tokens: Annotated[int, Field(ge=0)]
    completion_tokens: Annotated[int, Field(ge=0)]
    reasoning_tokens: Annotated[int, Field(ge=0)]
    model_id: str
    fault_reason: str


class SubmitAnswer(TypedDict):
    """What a reply earned."""

    reward: float


class ProgressDelta(TypedDict, total=False):
    """What a worker has generated since its previous post."""

    content: Annotated[str, Field(description="Text; empty only beside reasoning.")]
    reasoning_content: str


class ProgressBody(TypedDict):
    """A post of a streamed job's worker, which `parse_progress_post` judges."""

    id: Annotated[str, Field(description="The job.")]
    seq: Annotated[
        int, Field(ge=1, description="1 for the first post of a job, then one more for each.")
    ]
    delta: ProgressDelta


class ProgressAnswer(TypedDict):
    """What an accepted post is told."""

    accepted_seq: int
    cancelled: Annotated[
        bool, Field(description="Whether the request was cancelled: stop generating.")
    ]
