# SPDX-License-Identifier: AGPL-3.0-or-later
"""Requests for text and chat, and what is answered to them."""

from enum import StrEnum
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

from horde_sdk.generation_parameters.text.chat_limits import OPENAI_SAMPLING_RANGES
from horde_sdk.generation_parameters.text.chat_policy import ChatReasoningEffort
from horde_sdk.worker.chat_declaration import ChatFinishReason
from pydantic import Field, WithJsonSchema

from horde.chat_contract import MAX_CHAT_MODEL_COUNT, ChatHordeOptions
from horde.shapes.base import MAX_MODEL_NAME_LENGTH, LenientBody, Values
from horde.shapes.text_params import TEXT_PARAM_RANGES, build_params_schema

MAX_TEMPLATE_FIELDS = 16
MAX_TEMPLATE_VALUE_LENGTH = 100_000
MAX_TARGET_COUNT = 1000  # no client lists more; bounds what is looked up and stored
ModelName = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME_LENGTH)]

_TEMPERATURES, _TOP_PS = TEXT_PARAM_RANGES["temperature"], TEXT_PARAM_RANGES["top_p"]
_LENGTHS = TEXT_PARAM_RANGES["max_length"]
_LOWEST_PENALTY, _HIGHEST_PENALTY = OPENAI_SAMPLING_RANGES["frequency_penalty"]

OutputTokens = Annotated[int, Field(ge=_LENGTHS.minimum, le=_LENGTHS.maximum)]
Penalty = Annotated[float, Field(ge=_LOWEST_PENALTY, le=_HIGHEST_PENALTY)]


class TextContextFit(StrEnum):
    """What happens to a prompt that does not fit: the worker cuts its front, it is refused, or the
    context grows.
    """

    IGNORE = "ignore"
    REJECT = "reject"
    GROW = "grow"


class TextRequestBody(LenientBody):
    """The keys of a text request; `params` is checked by `parse_text_params`."""

    prompt: str
    params: Annotated[dict[str, object], WithJsonSchema(build_params_schema())] = Field(
        default_factory=dict
    )
    models: Values[ModelName] = Field(
        default_factory=list,
        max_length=MAX_TARGET_COUNT,
        description="Any of them may serve it; empty accepts every model.",
    )
    softprompt: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Field(description="Accepted and not applied."),
    ] = None
    trusted_workers: bool = False
    validated_backends: bool = False
    slow_workers: bool = Field(default=True, description="False needs kudos upfront.")
    extra_slow_workers: bool = Field(default=False, description="Accepted and not applied.")
    nsfw: bool = Field(default=True, description="Accepted and not applied.")
    workers: Values[str] = Field(
        default_factory=list,
        max_length=MAX_TARGET_COUNT,
        description="Worker ids; the first five count.",
    )
    worker_blacklist: bool = Field(default=False, description="Makes `workers` a deny list.")
    dry_run: bool = Field(default=False, description="Answer the price without queueing.")
    proxied_account: Annotated[
        Annotated[str, Field(max_length=255)] | None, Field(description="Service accounts only.")
    ] = None
    extra_source_images: list[object] = Field(default_factory=list, description="Refused on text.")
    disable_batching: bool = Field(
        default=False, description="Trusted users only when n is above 1."
    )
    allow_downgrade: bool = Field(
        default=False, description="Lower the output rather than refuse for kudos."
    )
    webhook: Annotated[
        Annotated[str, Field(max_length=1024)] | None,
        Field(description="An https address told of each generation."),
    ] = None
    style: Annotated[str, Field(min_length=3, max_length=1024)] | None = None
    template_fields: Annotated[
        dict[
            Annotated[str, Field(max_length=64)],
            Annotated[str, Field(max_length=MAX_TEMPLATE_VALUE_LENGTH)],
        ],
        Field(max_length=MAX_TEMPLATE_FIELDS),
    ] = Field(default_factory=dict, description="What the template of the style asks for.")
    context_fit: Annotated[str, Field(json_schema_extra={"enum": [*TextContextFit]})] = (
        TextContextFit.IGNORE.value
    )


class ChatRequestBody(TypedDict, total=False):
    """The keys of a chat request.

    `parse_chat_request` judges them, as each refusal has its code.
    """

    model: Annotated[str, Field(description="Exactly one of model and models.")]
    models: Annotated[list[str], Field(min_length=1, max_length=MAX_CHAT_MODEL_COUNT)]
    messages: Required[list[dict[str, object]]]
    max_tokens: Annotated[OutputTokens, Field(description="512 by default.")]
    max_completion_tokens: OutputTokens
    temperature: Annotated[float, Field(ge=_TEMPERATURES.minimum, le=_TEMPERATURES.maximum)]
    top_p: Annotated[float, Field(ge=_TOP_PS.minimum, le=_TOP_PS.maximum)]
    frequency_penalty: Penalty
    presence_penalty: Penalty
    seed: int
    reasoning_effort: ChatReasoningEffort
    stop: Annotated[Any, Field(description="A string or an array of strings.")]
    n: Annotated[int, Field(ge=1, le=1)]
    stream: bool
    stream_options: dict[str, object]
    user: str
    metadata: dict[str, object]
    tools: list[dict[str, object]]
    tool_choice: Any
    parallel_tool_calls: bool
    response_format: dict[str, object]
    horde: ChatHordeOptions


class SentTextRequest(TypedDict, total=False):
    """A text request read back."""

    prompt: Annotated[str, Field(description="As sent. Absent where it was not kept.")]
    params: Annotated[
        dict[str, object], Field(description="As sent, without unknown keys and nulls.")
    ]
    models: list[str]
    workers: list[str]
    worker_blacklist: bool
    trusted_workers: bool
    validated_backends: bool
    slow_workers: bool
    extra_slow_workers: bool
    disable_batching: bool
    softprompt: str
    webhook: str
    proxied_account: str


class RequestAccepted(TypedDict):
    """The answer to a queued request."""

    id: Annotated[
        str, Field(description="Follow the request with it; whoever has it can read the reply.")
    ]
    kudos: Annotated[float, Field(description="The price to expect.")]
    message: NotRequired[
        Annotated[str, Field(description="Only when no online worker can take the request.")]
    ]


class RequestQuote(TypedDict):
    """The answer to a dry run, or to a repeated operation key."""

    kudos: float
    id: NotRequired[str]
    resolved: NotRequired[
        Annotated[dict[str, object], Field(description="The request as it would run.")]
    ]


class TextGeneration(TypedDict):
    """A finished generation of a text request."""

    text: str | None
    seed: int | None
    gen_metadata: list[dict[str, object]]
    worker_id: str
    worker_name: str
    model: str
    state: Literal["ok", "censored", "csam"]


class ChatGeneration(TextGeneration):
    """A finished generation of a chat request, with its structured reply."""

    message: Annotated[
        Any, Field(description="The reply: role, content, tool_calls, reasoning_content.")
    ]
    finish_reason: ChatFinishReason | None
    native_finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    reasoning_tokens: int | None
    charge_basis: str | None
    queue_wait_seconds: float | None


class RequestStanding(TypedDict):
    """Where a request of either family stands."""

    finished: int
    processing: int
    restarted: int
    waiting: int
    done: bool
    faulted: bool
    wait_time: Annotated[int, Field(description="Seconds.")]
    queue_position: Annotated[int, Field(description="From 1; 0 when nothing waits.")]
    kudos: Annotated[float, Field(description="Paid so far.")]
    is_possible: Annotated[
        bool, Field(description="A worker holds a job of it, or could take one now.")
    ]
    eligible_workers: int
    eligible_worker_threads: int
    might_stall: bool


class TextStatus(RequestStanding):
    """Where a text request stands."""

    generations: list[TextGeneration]


class ChatStatus(RequestStanding):
    """Where a chat request stands."""

    generations: list[ChatGeneration]
    context_adjustments: list[dict[str, object]] | None
    impossible_reason: Any
    speed_limit: NotRequired[
        Annotated[
            dict[str, object],
            Field(
                description="Present only while speed alone keeps every worker from the request."
            ),
        ]
    ]
    fault_reason: str | None
    fault_rc: str | None
