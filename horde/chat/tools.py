# SPDX-License-Identifier: AGPL-3.0-or-later
"""The tools, the tool choice and the response format of a request: their shapes and limits, for API
and front alike.

Source: docs/reference/chat_requests.md, "Tools".
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, cast

from horde_sdk.generation_parameters.text.chat_limits import (
    MAX_CHAT_SCHEMA_NESTING,
    MAX_CHAT_TOOL_COUNT,
    MAX_CHAT_TOOL_SPEC_BYTES,
    chat_schema_exceeds_nesting,
)
from pydantic import FailFast, TypeAdapter

from horde.chat.flattening import count_utf8_bytes
from horde.chat.wire import ResponseFormat, Tool, ToolCall, ToolChoice
from horde.chat_contract import (
    MAX_CHAT_TOOL_CALL_COUNT,
    ChatFunctionChoice,
    ChatResponseFormat,
    ChatTool,
    ChatToolCall,
    RefusalKind,
    limit_exceeded,
    malformed_value,
    quote_path,
    request_conflict,
    unsupported_parameter,
    validate_shape,
)
from horde.json_text import JsonObject, JsonText, write_document

SCHEMA_KEYS: Final = ("tools", "response_format")
_TOOLS: Final = TypeAdapter(Annotated[list[ChatTool], FailFast()])
_TOOL_CALLS: Final = TypeAdapter(Annotated[list[ChatToolCall], FailFast()])
_FUNCTION_CHOICE: Final = TypeAdapter(ChatFunctionChoice)
_RESPONSE_FORMAT: Final = TypeAdapter(ChatResponseFormat)


def parse_tools(value: object) -> list[Tool]:
    """The tool definitions as sent, without the nulls of their own optional keys; empty for
    null.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise malformed_value("tools", "has to be an array", RefusalKind.TYPE)
    if len(value) > MAX_CHAT_TOOL_COUNT:
        raise limit_exceeded("tools", f"hold at most {MAX_CHAT_TOOL_COUNT} tools")
    validate_shape(_TOOLS, value, "tools")
    for index, tool in enumerate(value):
        _check_nesting(tool["function"].get("parameters"), f"tools[{index}].function.parameters")
    return [tool | {"function": _without_nulls(tool["function"])} for tool in value]


def parse_tool_choice(value: object, tools: Sequence[Tool]) -> ToolChoice | None:
    """The tool choice as sent; null is none."""
    if value is None:
        return None
    function_name = None
    if isinstance(value, dict):
        function_name = validate_shape(_FUNCTION_CHOICE, value, "tool_choice").function.name
    elif not isinstance(value, str) or value not in ("none", "auto", "required"):
        raise malformed_value(
            "tool_choice", "has to be 'none', 'auto', 'required' or an object naming a function"
        )
    _require_tools("tool_choice", tools)
    if function_name is not None and all(
        tool["function"]["name"] != function_name for tool in tools
    ):
        message = (
            f"Invalid value for 'tool_choice': the function {quote_path(function_name)} is not"
            " defined in 'tools'."
        )
        raise request_conflict("tool_choice", message)
    return cast(ToolChoice, value)


def parse_parallel_tool_calls(value: object, tools: Sequence[Tool]) -> bool | None:
    """Whether the reply may hold several calls, as sent; null is none."""
    if value is None:
        return None
    if not isinstance(value, bool):
        raise malformed_value("parallel_tool_calls", "has to be a boolean", RefusalKind.TYPE)
    _require_tools("parallel_tool_calls", tools)
    return value


def _require_tools(key: str, tools: Sequence[Tool]) -> None:
    if not tools:
        raise request_conflict(
            key, f"Invalid value for '{key}': '{key}' is only allowed when 'tools' are specified."
        )


def parse_response_format(value: object) -> ResponseFormat | None:
    """The response format as sent; null and `text` are none."""
    if value is None:
        return None
    parsed = validate_shape(_RESPONSE_FORMAT, value, "response_format")
    if parsed.type != "json_schema" and parsed.json_schema is not None:
        raise unsupported_parameter("response_format.json_schema")
    if parsed.type == "json_schema" and parsed.json_schema is None:
        raise malformed_value("response_format.json_schema", "is required", RefusalKind.MISSING)
    if parsed.type == "text" or not isinstance(value, dict):
        return None
    if parsed.json_schema is None:
        return {"type": parsed.type}
    _check_nesting(parsed.json_schema.schema_, "response_format.json_schema.schema")
    stored = value | {"json_schema": _without_nulls(value["json_schema"])}
    return cast(ResponseFormat, stored)


def parse_tool_calls(value: object, path: str) -> list[ToolCall]:
    """The calls of an assistant message of the history, as sent."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHAT_TOOL_CALL_COUNT:
        raise malformed_value(path, f"has to be an array of 1 to {MAX_CHAT_TOOL_CALL_COUNT} calls")
    validate_shape(_TOOL_CALLS, value, path)
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
            (
                f"take at most {MAX_CHAT_TOOL_SPEC_BYTES} bytes together with 'tool_choice' and"
                " 'response_format'"
            ),
        )
        raise limit_exceeded(path, limit)


def write_schemas(members: Mapping[str, object]) -> JsonObject:
    """The keys of a request or a job, with those that hold JSON Schemas as `JsonText`: in the form
    in which the client wrote them.
    """
    written = {key: JsonText(write_document(members[key])) for key in SCHEMA_KEYS if key in members}
    return {**members, **written}
