# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes, limits and arithmetic of chat requests that the native route and the OpenAI-compatible
front share.

Pure: values in, values out. The limits that clients need as well are the SDK's (``chat_limits``).
Source: docs/reference/chat_requests.md.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from horde_sdk.generation_parameters.text.chat_policy import (
    DEFAULT_CHAT_CONFORMANCE,
    ChatConformance,
    ChatGuarantee,
)
from horde_sdk.worker.chat_declaration import ChatFaultReason
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from horde.exceptions import BadRequest
from horde.json_body import parse_json_body as parse_json_body
from horde.return_codes import ReturnCode

# 25 MiB of images as base64, 1 MiB of text, room for JSON structure.
MAX_CHAT_BODY_BYTES: Final = 36 * 1024 * 1024
MAX_CHAT_MESSAGE_COUNT: Final = 1024
MAX_CHAT_MODEL_COUNT: Final = 5
# Of `only` or `ignore`: text keeps the first five, chat refuses more.
MAX_CHAT_WORKER_ID_COUNT: Final = 5
MAX_CHAT_TOOL_CALL_COUNT: Final = 128
MAX_CHAT_TOOL_CALL_ID_CHARACTERS: Final = 256
MAX_CHAT_NAME_CHARACTERS: Final = 64  # OpenAI's bound for `name`

MAX_CHAT_IMAGE_COUNT: Final = 20
MAX_CHAT_IMAGE_BYTES: Final = 5 * 1024 * 1024  # one image, decoded or fetched
MAX_CHAT_IMAGE_TOTAL_BYTES: Final = 25 * 1024 * 1024  # trusted users
MAX_CHAT_IMAGE_TOTAL_BYTES_UNTRUSTED: Final = 5 * 1024 * 1024
# What koboldcpp's worker adds per image in its own overflow estimate.
CHAT_IMAGE_PROMPT_TOKENS: Final = 512
CHAT_IMAGE_PLACEHOLDER: Final = "[image]"
CHAT_IMAGE_DETAILS: Final = ("auto", "low", "high")

_NAMED_KEYS: Final = frozenset({"role", "content", "name"})
CHAT_MESSAGE_KEYS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "system": _NAMED_KEYS,
        "developer": _NAMED_KEYS,
        "user": _NAMED_KEYS,
        "assistant": _NAMED_KEYS | {"tool_calls"},
        "tool": frozenset({"role", "content", "tool_call_id"}),
    }
)
"""The keys of a message that are stored and sent to workers, by role."""

MAX_CONTEXT_LENGTH: Final = 1048576  # tokens, of text requests too

MAX_STOP_SEQUENCE_COUNT: Final = 128
MAX_STOP_SEQUENCE_CHARACTERS: Final = 2000  # over all of a request's distinct sequences

_NAME_PATTERN: Final = r"^[A-Za-z0-9_-]{1,64}$"
_MAX_QUOTED_CHARACTERS: Final = 256  # a refused key may be megabytes long; the answer is not


class ChatContextAdjustmentReason(StrEnum):
    """Why a context adjustment was made, the `reason` of a `context_adjustments` entry."""

    GROW = "grow"
    TRUNCATE_OLDEST = "truncate_oldest"
    WORKER_MAX_LENGTH = "worker_max_length"


class ChatContextFit(StrEnum):
    """What happens to messages that do not fit the requested context; `ignore` is for text only."""

    GROW = "grow"
    REJECT = "reject"
    TRUNCATE_OLDEST = "truncate_oldest"


# What the horde says for a worker's known fault reasons; a worker's own text is shown nowhere.
WORKER_FAULT_MESSAGES: Final[Mapping[str, str]] = MappingProxyType(
    {
        ChatFaultReason.PROMPT_OVERFLOW: "The worker could not fit the prompt into its context.",
        ChatFaultReason.UNBUILDABLE_GRAMMAR: (
            "The worker could not build the grammar the request's tool choice or response format"
            " needs."
        ),
        ChatFaultReason.TOOL_VIOLATION: "The model's reply broke the request's tool controls.",
        ChatFaultReason.REPLY_REFUSED: "The AI Horde refused the worker's reply.",
        ChatFaultReason.GENERATION_ERROR: "The worker's backend failed while generating.",
    }
)


_GUARANTEES: Final = frozenset(guarantee.value for guarantee in ChatGuarantee)
_LIMIT_ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_length": "Lower 'max_tokens'.",
        "max_context_length": "Shorten the messages, or lower 'horde.max_context_length'.",
        "tools_max_temperature": "Lower 'temperature'.",
    }
)


def build_gap_advice(missing: Sequence[str], exceeded: Sequence[str]) -> str:
    """What a requester can change about a gap, as sentences behind a blank; empty when the gap's
    own names say it.

    `missing` are the declarations and `exceeded` the limits of an impossible reason.
    """
    advice = [_LIMIT_ADVICE[limit] for limit in exceeded if limit in _LIMIT_ADVICE]
    if missing and not exceeded and _GUARANTEES.issuperset(missing):
        advice.append(
            'Send horde.conformance: "best_effort" to be served by workers that promise less.'
        )
    return "".join(f" {sentence}" for sentence in advice)


class ChatAvailabilityMode(StrEnum):
    """Read by the front: queue for its whole budget, or give up when nobody can serve."""

    WAIT = "wait"
    FAIL_FAST = "fail_fast"


class RefusalKind(StrEnum):
    """What is wrong with a part of a chat request; the native codes do not tell all of them apart,
    OpenAI's do.
    """

    TYPE = "type"
    MISSING = "missing"
    VALUE = "value"
    LIMIT = "limit"
    UNSUPPORTED = "unsupported"
    CONFLICT = "conflict"
    HISTORY = "history"
    SCHEMA = "schema"
    INTEGER_BELOW = "integer_below"
    INTEGER_ABOVE = "integer_above"
    DECIMAL_BELOW = "decimal_below"
    DECIMAL_ABOVE = "decimal_above"


class ChatRequestRefused(BadRequest):
    """400 of a chat request, with the path at fault and the kind of fault for the front's error.

    `detail` is the message without a leading path.
    """

    def __init__(
        self,
        path: str,
        message: str,
        rc: ReturnCode = ReturnCode.BAD_REQUEST,
        *,
        detail: str | None = None,
        kind: RefusalKind = RefusalKind.VALUE,
    ) -> None:
        super().__init__(message, rc)
        self.path, self.kind = path, kind
        self.detail = message if detail is None else detail


def quote_path(path: str) -> str:
    """A path for a message: of one that may be megabytes long the start alone."""
    return (
        f"'{path}'"
        if len(path) <= _MAX_QUOTED_CHARACTERS
        else f"'{path[:_MAX_QUOTED_CHARACTERS]}…'"
    )


def unsupported_parameter(path: str, detail: str | None = None) -> ChatRequestRefused:
    """A key or value outside the accepted set; a value is written as `key=value` in the path."""
    return ChatRequestRefused(
        path,
        f"{quote_path(path)} is not supported on chat requests.",
        ReturnCode.UNSUPPORTED_CHAT_PARAMETER,
        detail=detail,
        kind=RefusalKind.UNSUPPORTED,
    )


def limit_exceeded(path: str, limit: str) -> ChatRequestRefused:
    """More of something than a chat request may carry; `limit` completes "'path' may ..."."""
    message = f"{quote_path(path)} may {limit}."
    return ChatRequestRefused(
        path, message, ReturnCode.UNSUPPORTED_CHAT_PARAMETER, kind=RefusalKind.LIMIT
    )


def malformed_value(
    path: str, expectation: str, kind: RefusalKind = RefusalKind.VALUE
) -> ChatRequestRefused:
    """A missing or badly formed value; `expectation` completes "'path' ..."."""
    return ChatRequestRefused(path, f"{quote_path(path)} {expectation}.", kind=kind)


def request_conflict(path: str, message: str) -> ChatRequestRefused:
    """Two keys that contradict each other."""
    return ChatRequestRefused(
        path, message, ReturnCode.CHAT_REQUEST_CONFLICT, kind=RefusalKind.CONFLICT
    )


class _StrictModel(BaseModel):
    """Exact types, no unknown keys, and null on an optional key the same as absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, data: object) -> Any:
        """Leave the null of an unknown key in place, so that it is refused like any other value.

        Of unknown keys the first alone is kept: it is the one named, and an error for each of a
        million takes half a minute of the whole process.
        """
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first_unknown = next((key for key in data if key not in known), None)
        kept = {key: data[key] for key in known & data.keys() if data[key] is not None}
        return kept if first_unknown is None else kept | {first_unknown: data[first_unknown]}


def _parse_uuid(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(
        r"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}", value
    ):
        raise ValueError("has to be a UUID")
    return UUID(value)


type _WorkerIds = Annotated[list[str], Field(min_length=1, max_length=MAX_CHAT_WORKER_ID_COUNT)]
type _Positive = Annotated[int, Field(gt=0)]


class ChatHordeOptions(_StrictModel):
    """The `horde` object of a chat request: the options that OpenAI has no key for."""

    only: _WorkerIds | None = None
    ignore: _WorkerIds | None = None
    trusted_workers: bool = False
    validated_backends: bool = False
    slow_workers: bool = True
    max_context_length: _Positive | None = None
    context_fit: Annotated[ChatContextFit, Field(strict=False)] = ChatContextFit.TRUNCATE_OLDEST
    conformance: Annotated[ChatConformance, Field(strict=False)] = DEFAULT_CHAT_CONFORMANCE
    openai_guards: bool = False
    include_reasoning: bool = True
    availability_mode: Annotated[ChatAvailabilityMode, Field(strict=False)] = (
        ChatAvailabilityMode.WAIT
    )
    max_kudos: _Positive | None = None
    dry_run: bool = False
    operation_key: Annotated[UUID, BeforeValidator(_parse_uuid)] | None = None


class ChatFunction(_StrictModel):
    """What a tool does and takes; `parameters` is a JSON Schema."""

    name: Annotated[str, Field(pattern=_NAME_PATTERN)]
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ChatTool(_StrictModel):
    """One function the model may call."""

    type: Literal["function"]
    function: ChatFunction


class ChatCalledFunction(_StrictModel):
    """The function of a call in the history; `arguments` is the model's text, which need not be
    JSON.
    """

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class ChatToolCall(_StrictModel):
    """One call an assistant message of the history made."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_CHAT_TOOL_CALL_ID_CHARACTERS)]
    type: Literal["function"]
    function: ChatCalledFunction


class ChatFunctionName(_StrictModel):
    """The function a `tool_choice` forces."""

    name: str


class ChatFunctionChoice(_StrictModel):
    """A `tool_choice` that forces one function."""

    type: Literal["function"]
    function: ChatFunctionName


class ChatJsonSchema(_StrictModel):
    """The schema a `json_schema` response format asks the reply to follow."""

    name: Annotated[str, Field(pattern=_NAME_PATTERN)]
    schema_: dict[str, object] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ChatResponseFormat(_StrictModel):
    """The form of the reply's text; `json_schema` stands only beside its own type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: ChatJsonSchema | None = None


_HORDE_OPTIONS: Final = TypeAdapter(ChatHordeOptions)


def validate_shape[T](adapter: TypeAdapter[T], value: object, root: str) -> T:
    """The value as a model; raises ChatRequestRefused with the path of the first fault below
    `root`.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise _build_refusal(error, root) from None


def _build_refusal(error: ValidationError, root: str) -> ChatRequestRefused:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = root + "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]
    )
    if first["type"] == "extra_forbidden":
        return unsupported_parameter(path)
    if first["type"] == "missing":
        return malformed_value(path, "is required", RefusalKind.MISSING)
    if first["type"] == "model_type":
        return malformed_value(path, "has to be an object", RefusalKind.TYPE)
    kind = RefusalKind.TYPE if first["type"].endswith("_type") else RefusalKind.VALUE
    return malformed_value(path, f"is invalid: {first['msg'].removeprefix('Value error, ')}", kind)


def parse_horde_options(value: object) -> ChatHordeOptions:
    """The `horde` object; null is an empty one."""
    if value is None:
        return ChatHordeOptions()
    options = validate_shape(_HORDE_OPTIONS, value, "horde")
    if options.only is not None and options.ignore is not None:
        raise request_conflict("horde.only", "'horde.only' and 'horde.ignore' cannot be combined.")
    return options
