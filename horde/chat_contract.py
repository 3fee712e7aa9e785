# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes, limits and arithmetic of chat requests that the native route and the OpenAI-compatible
front share.

Pure: values in, values out. The limits that clients need as well are the SDK's (``chat_limits``).
Source: docs/reference/chat_requests.md.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from horde_sdk.generation_parameters.text.chat_limits import (
    MAX_CHAT_SCHEMA_NESTING,
    MAX_CHAT_TEXT_BYTES,
    MAX_CHAT_TOOL_COUNT,
    MAX_CHAT_TOOL_SPEC_BYTES,
    chat_schema_exceeds_nesting,
)
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
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from horde.exceptions import BadRequest
from horde.json_body import parse_json_body as parse_json_body
from horde.json_text import JsonText, write_document
from horde.return_codes import ReturnCode
from horde.token_estimate import TextSize, estimate_prompt_tokens

type JsonObject = dict[str, Any]

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
SCHEMA_KEYS: Final = ("tools", "response_format")

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
            "The worker could not build the grammar the request's tool choice or response format needs."
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


def _quote(path: str) -> str:
    return (
        f"'{path}'"
        if len(path) <= _MAX_QUOTED_CHARACTERS
        else f"'{path[:_MAX_QUOTED_CHARACTERS]}…'"
    )


def unsupported_parameter(path: str) -> ChatRequestRefused:
    """A key or value outside the accepted set; a value is written as `key=value` in the path."""
    message = f"{_quote(path)} is not supported on chat requests."
    return ChatRequestRefused(
        path, message, ReturnCode.UNSUPPORTED_CHAT_PARAMETER, kind=RefusalKind.UNSUPPORTED
    )


def limit_exceeded(path: str, limit: str) -> ChatRequestRefused:
    """More of something than a chat request may carry; `limit` completes "'path' may ..."."""
    message = f"{_quote(path)} may {limit}."
    return ChatRequestRefused(
        path, message, ReturnCode.UNSUPPORTED_CHAT_PARAMETER, kind=RefusalKind.LIMIT
    )


def malformed_value(
    path: str, expectation: str, kind: RefusalKind = RefusalKind.VALUE
) -> ChatRequestRefused:
    """A missing or badly formed value; `expectation` completes "'path' ..."."""
    return ChatRequestRefused(path, f"{_quote(path)} {expectation}.", kind=kind)


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
    def drop_nulls(cls, data: Any) -> Any:
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
    parameters: dict[str, Any] | None = None
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
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ChatResponseFormat(_StrictModel):
    """The form of the reply's text; `json_schema` stands only beside its own type."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: ChatJsonSchema | None = None


_TOOLS: Final = TypeAdapter(Annotated[list[ChatTool], FailFast()])
_TOOL_CALLS: Final = TypeAdapter(Annotated[list[ChatToolCall], FailFast()])
_FUNCTION_CHOICE: Final = TypeAdapter(ChatFunctionChoice)
_RESPONSE_FORMAT: Final = TypeAdapter(ChatResponseFormat)
_HORDE_OPTIONS: Final = TypeAdapter(ChatHordeOptions)


def _validate[T](adapter: TypeAdapter[T], value: object, root: str) -> T:
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
    options = _validate(_HORDE_OPTIONS, value, "horde")
    if options.only is not None and options.ignore is not None:
        raise request_conflict("horde.only", "'horde.only' and 'horde.ignore' cannot be combined.")
    return options


def parse_tools(value: object) -> list[JsonObject]:
    """The tool definitions as sent, without the nulls of their own optional keys; empty for
    null.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise malformed_value("tools", "has to be an array", RefusalKind.TYPE)
    if len(value) > MAX_CHAT_TOOL_COUNT:
        raise limit_exceeded("tools", f"hold at most {MAX_CHAT_TOOL_COUNT} tools")
    _validate(_TOOLS, value, "tools")
    for index, tool in enumerate(value):
        _check_nesting(tool["function"].get("parameters"), f"tools[{index}].function.parameters")
    return [tool | {"function": _without_nulls(tool["function"])} for tool in value]


def parse_tool_choice(value: object, tools: Sequence[JsonObject]) -> str | JsonObject | None:
    """The tool choice as sent; null is none."""
    if value is None:
        return None
    function_name = None
    if isinstance(value, dict):
        function_name = _validate(_FUNCTION_CHOICE, value, "tool_choice").function.name
    elif not isinstance(value, str) or value not in ("none", "auto", "required"):
        raise malformed_value(
            "tool_choice", "has to be 'none', 'auto', 'required' or an object naming a function"
        )
    _require_tools("tool_choice", tools)
    if function_name is not None and all(
        tool["function"]["name"] != function_name for tool in tools
    ):
        message = f"Invalid value for 'tool_choice': the function {_quote(function_name)} is not defined in 'tools'."
        raise request_conflict("tool_choice", message)
    return value


def parse_parallel_tool_calls(value: object, tools: Sequence[JsonObject]) -> bool | None:
    """Whether the reply may hold several calls, as sent; null is none."""
    if value is None:
        return None
    if not isinstance(value, bool):
        raise malformed_value("parallel_tool_calls", "has to be a boolean", RefusalKind.TYPE)
    _require_tools("parallel_tool_calls", tools)
    return value


def _require_tools(key: str, tools: Sequence[JsonObject]) -> None:
    if not tools:
        raise request_conflict(
            key, f"Invalid value for '{key}': '{key}' is only allowed when 'tools' are specified."
        )


def parse_response_format(value: object) -> JsonObject | None:
    """The response format as sent; null and `text` are none."""
    if value is None:
        return None
    parsed = _validate(_RESPONSE_FORMAT, value, "response_format")
    if parsed.type != "json_schema" and parsed.json_schema is not None:
        raise unsupported_parameter("response_format.json_schema")
    if parsed.type == "json_schema" and parsed.json_schema is None:
        raise malformed_value("response_format.json_schema", "is required", RefusalKind.MISSING)
    if parsed.type == "text" or not isinstance(value, dict):
        return None
    if parsed.json_schema is None:
        return {"type": parsed.type}
    _check_nesting(parsed.json_schema.schema_, "response_format.json_schema.schema")
    return value | {"json_schema": _without_nulls(value["json_schema"])}


def parse_tool_calls(value: object, path: str) -> list[JsonObject]:
    """The calls of an assistant message of the history, as sent."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHAT_TOOL_CALL_COUNT:
        raise malformed_value(path, f"has to be an array of 1 to {MAX_CHAT_TOOL_CALL_COUNT} calls")
    _validate(_TOOL_CALLS, value, path)
    return value


def _without_nulls(value: JsonObject) -> JsonObject:
    return {key: child for key, child in value.items() if child is not None}


def _check_nesting(schema: object, path: str) -> None:
    if chat_schema_exceeds_nesting(schema):
        raise limit_exceeded(path, f"nest at most {MAX_CHAT_SCHEMA_NESTING} levels below its root")


def check_tool_spec_size(tools: object, tool_choice: object, response_format: object) -> None:
    """Hold the three together to the SDK's bound, measured as its `check_chat_request_limits`
    does.
    """
    spec = {"tools": tools or [], "tool_choice": tool_choice, "response_format": response_format}
    if count_utf8_bytes(write_document(spec)) > MAX_CHAT_TOOL_SPEC_BYTES:
        path, limit = (
            "tools",
            f"take at most {MAX_CHAT_TOOL_SPEC_BYTES} bytes together with 'tool_choice' and 'response_format'",
        )
        raise limit_exceeded(path, limit)


def iter_message_texts(message: Mapping[str, Any]) -> Iterator[str]:
    """The string content or the text parts of one message."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif content:
        yield from (part["text"] for part in content if part["type"] == "text")


def count_text_bytes(messages: Sequence[Mapping[str, Any]]) -> int:
    """What counts against the text limit, in bytes of UTF-8: the texts and each call's function
    name and arguments.
    """
    texts = (text for message in messages for text in iter_message_texts(message))
    calls = (call["function"] for message in messages for call in message.get("tool_calls") or ())
    called = (text for call in calls for text in (call["name"], call["arguments"]))
    return sum(map(count_utf8_bytes, texts)) + sum(map(count_utf8_bytes, called))


def check_text_size(byte_count: int) -> None:
    """Hold the text of all messages together to the SDK's bound."""
    if byte_count > MAX_CHAT_TEXT_BYTES:
        raise limit_exceeded(
            "messages", f"hold at most {MAX_CHAT_TEXT_BYTES} bytes of text, tool calls included"
        )


# --- strict schemas
# -------------------------------------------------------------------------------------------------

_SUBSCHEMA_KEYWORDS: Final = frozenset(
    {
        *(
            "items",
            "additionalItems",
            "unevaluatedItems",
            "contains",
            "not",
            "if",
            "then",
            "else",
            "contentSchema",
        ),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    }
)
_SUBSCHEMA_LIST_KEYWORDS: Final = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_SUBSCHEMA_MAP_KEYWORDS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


def check_strict_schemas(tools: Sequence[JsonObject], response_format: JsonObject | None) -> None:
    """Hold every schema that asks for `strict` to OpenAI's structural rules, with OpenAI's
    messages.
    """
    for index, tool in enumerate(tools):
        function = tool["function"]
        if function.get("strict") is True:
            _check_strict_schema(
                function.get("parameters"),
                f"function '{function['name']}'",
                f"tools[{index}].function.parameters",
            )
    json_schema = (response_format or {}).get("json_schema")
    if json_schema is not None and json_schema.get("strict") is True:
        _check_strict_schema(
            json_schema["schema"], f"response_format '{json_schema['name']}'", "response_format"
        )


def _check_strict_schema(schema: object, subject: str, path: str) -> None:
    broken = next(_iter_broken_rules(schema, ()), None)
    if broken is not None:
        context, rule = broken
        message = f"Invalid schema for {subject}: In context={context!r}, {rule}"
        raise ChatRequestRefused(
            path, message, ReturnCode.UNSUPPORTED_CHAT_PARAMETER, kind=RefusalKind.SCHEMA
        )


def _iter_broken_rules(
    schema: object, context: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every broken rule with its place, parents before children. The depth is bounded by the
    nesting limit.
    """
    if not isinstance(schema, dict):
        return
    rule = _find_broken_rule(schema)
    if rule is not None:
        yield context, rule
    for keyword, value in schema.items():
        if keyword in _SUBSCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            for name, child in value.items():
                yield from _iter_broken_rules(child, (*context, keyword, name))
        elif keyword in _SUBSCHEMA_LIST_KEYWORDS and isinstance(value, list):
            for index, child in enumerate(value):
                yield from _iter_broken_rules(child, (*context, keyword, str(index)))
        elif keyword in _SUBSCHEMA_KEYWORDS:
            yield from _iter_broken_rules(value, (*context, keyword))


def _find_broken_rule(schema: JsonObject) -> str | None:
    kinds = schema.get("type")
    is_object = (
        kinds == "object"
        or (isinstance(kinds, list) and "object" in kinds)
        or "properties" in schema
    )
    if not is_object:
        return None
    if schema.get("additionalProperties") is not False:
        return "'additionalProperties' is required to be supplied and to be false."
    properties, required = schema.get("properties"), schema.get("required")
    listed = (
        {name for name in required if isinstance(name, str)}
        if isinstance(required, list)
        else set()
    )
    missing = (
        next((name for name in properties if name not in listed), None)
        if isinstance(properties, dict)
        else None
    )
    if missing is None:
        return None
    return f"'required' is required to be supplied and to be an array including every key in properties. Missing '{missing}'."


# --- tool history
# ---------------------------------------------------------------------------------------------------


def check_tool_history(messages: Sequence[Mapping[str, Any]]) -> None:
    """Each call of an assistant message is answered at once, exactly once, by its id.

    Takes messages whose own shape was checked. Raises with OpenAI's wording, prefixed with the
    path.
    """
    issued: set[str] = set()
    unanswered: dict[str, None] = {}
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            _answer_call(index, message["tool_call_id"], issued, unanswered)
            continue
        if unanswered:
            raise _unanswered_calls(f"messages[{index}].role", unanswered)
        ids = [call["id"] for call in message.get("tool_calls") or ()]
        issued, unanswered = set(ids), dict.fromkeys(ids)
        if len(issued) != len(ids):
            repeated = next(call_id for call_id in issued if ids.count(call_id) > 1)
            detail = f"The tool call id '{repeated}' is repeated within one assistant message."
            raise _broken_history(f"messages[{index}].tool_calls", detail)
    if unanswered:
        raise _unanswered_calls("messages", unanswered)


def _answer_call(index: int, call_id: str, issued: set[str], unanswered: dict[str, None]) -> None:
    if not unanswered or (call_id in issued and call_id not in unanswered):
        detail = "Invalid parameter: messages with role 'tool' must be a response to a preceding message with 'tool_calls'."
        raise _broken_history(f"messages[{index}].role", detail)
    if call_id not in issued:
        detail = f"Invalid parameter: 'tool_call_id' of '{call_id}' not found in 'tool_calls' of previous message."
        raise _broken_history(f"messages[{index}].tool_call_id", detail)
    del unanswered[call_id]


def _unanswered_calls(path: str, unanswered: Mapping[str, None]) -> ChatRequestRefused:
    detail = (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        f"The following tool_call_ids did not have response messages: {', '.join(unanswered)}"
    )
    return _broken_history(path, detail)


def _broken_history(path: str, detail: str) -> ChatRequestRefused:
    message = f"{path}: {detail}"
    return ChatRequestRefused(
        path,
        message,
        ReturnCode.UNSUPPORTED_CHAT_PARAMETER,
        detail=detail,
        kind=RefusalKind.HISTORY,
    )


# --- flattened prompt and its estimate
# ------------------------------------------------------------------------------


def write_schemas(members: Mapping[str, Any]) -> JsonObject:
    """The keys of a request or a job, with those that hold JSON Schemas as `JsonText`: in the form
    in which the client wrote them.
    """
    written = {key: JsonText(write_document(members[key])) for key in SCHEMA_KEYS if key in members}
    return {**members, **written}


def count_utf8_bytes(text: str) -> int:
    """The size of a text on the wire."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def flatten_chat_message(message: Mapping[str, Any]) -> str:
    """One message as `role: ` and its texts, image marks and tool calls, one below the other."""
    content = message.get("content")
    pieces: list[str] = []
    if isinstance(content, str):
        pieces.append(content)
    elif content:
        pieces.extend(
            part["text"] if part["type"] == "text" else CHAT_IMAGE_PLACEHOLDER for part in content
        )
    if message.get("tool_calls"):
        pieces.append(write_document(message["tool_calls"]))
    return f"{message['role']}: " + "\n".join(pieces)


def flatten_chat_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[JsonObject] | None = None
) -> str:
    """All messages and, last, the tool definitions: what the estimate and moderation read. Workers
    never receive it.
    """
    pieces = [flatten_chat_message(message) for message in messages]
    if tools:
        pieces.append(write_document(tools))
    return "\n".join(pieces)


def count_image_parts(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many image parts the messages hold."""
    return sum(
        part["type"] == "image_url"
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def estimate_flattened_tokens(size: TextSize, image_count: int) -> int:
    """Tokens a flattened prompt of this size, with its images, is taken to have."""
    return estimate_prompt_tokens(size) + CHAT_IMAGE_PROMPT_TOKENS * image_count
