# SPDX-License-Identifier: AGPL-3.0-or-later
"""The messages of a completion: what is forwarded, what is left out, and what is refused with its
path.

Agent loops append the message they received to the history, through SDKs that add keys of their
own. So every message the front returns is accepted back: what does not change what a worker gets is
left out instead of refused. Source: docs/reference/chat_front.md, "Messages".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, cast

from horde.chat.flattening import (
    check_text_size,
    count_image_parts,
    count_text_bytes,
)
from horde.chat.tool_history import check_tool_history
from horde.chat.tools import parse_tool_calls
from horde.chat.wire import Message, ToolCall
from horde.chat_contract import (
    CHAT_IMAGE_DETAILS,
    CHAT_MESSAGE_KEYS,
    MAX_CHAT_IMAGE_COUNT,
    MAX_CHAT_MESSAGE_COUNT,
    MAX_CHAT_NAME_CHARACTERS,
    MAX_CHAT_TOOL_CALL_ID_CHARACTERS,
    JsonObject,
    RefusalKind,
    limit_exceeded,
    malformed_value,
    unsupported_parameter,
)
from horde.oai.errors import RequestRefused

# A hint for the caches of a provider, which clients put on messages, parts, calls and tools.
CACHE_HINT: Final = "cache_control"
_DROPPED_KEYS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "assistant": frozenset({"reasoning_content", "reasoning", "reasoning_details", "parsed"}),
        "tool": frozenset({"name"}),
    }
)
_DROPPED_WHEN_EMPTY: Final = frozenset({"annotations", "tool_calls"})  # of an assistant message


def parse_messages(value: object) -> list[Message]:
    """The messages to submit, without the keys that are left out.

    Raises ChatRequestRefused with the path of the first message at fault, RequestRefused for too
    many images.
    """
    if not isinstance(value, list):
        raise malformed_value("messages", "has to be an array", RefusalKind.TYPE)
    if not value:
        raise malformed_value("messages", "has to hold at least one message")
    if len(value) > MAX_CHAT_MESSAGE_COUNT:
        raise limit_exceeded("messages", f"hold at most {MAX_CHAT_MESSAGE_COUNT} messages")
    messages = [
        _parse_message(message, f"messages[{index}]") for index, message in enumerate(value)
    ]
    check_text_size(count_text_bytes(messages))
    if count_image_parts(messages) > MAX_CHAT_IMAGE_COUNT:
        message = f"A request may carry at most {MAX_CHAT_IMAGE_COUNT} images."
        raise RequestRefused("too_many_images", message, "messages")
    check_tool_history(messages)
    return messages


def _parse_message(message: object, path: str) -> Message:
    if not isinstance(message, dict):
        raise malformed_value(path, "has to be an object", RefusalKind.TYPE)
    role = _require_role(message, path)
    parsed: JsonObject = {}
    for key, value in message.items():
        if value is None or key == CACHE_HINT or key in _DROPPED_KEYS.get(role, ()):
            continue
        if role == "assistant" and key in _DROPPED_WHEN_EMPTY and value == []:
            continue
        if key not in CHAT_MESSAGE_KEYS[role]:
            raise unsupported_parameter(f"{path}.{key}")
        parsed[key] = value
    if "name" in parsed:
        _check_short_string(parsed["name"], f"{path}.name", MAX_CHAT_NAME_CHARACTERS)
    if role == "tool":
        _require_call_id(parsed, path)
    if "tool_calls" in parsed:
        parsed["tool_calls"] = _parse_tool_calls(parsed["tool_calls"], f"{path}.tool_calls")
        if parsed.get("content", []) == []:  # some SDKs write an absent content as no parts
            parsed.pop("content", None)
            return cast(Message, parsed)
    if "content" not in parsed:
        raise malformed_value(f"{path}.content", "is required", RefusalKind.MISSING)
    parsed["content"] = _parse_content(parsed["content"], role, f"{path}.content")
    return cast(Message, parsed)


def _require_role(message: JsonObject, path: str) -> str:
    role = message.get("role")
    if role is None:
        raise malformed_value(f"{path}.role", "is required", RefusalKind.MISSING)
    if not isinstance(role, str):
        raise malformed_value(f"{path}.role", "has to be a string", RefusalKind.TYPE)
    if role not in CHAT_MESSAGE_KEYS:
        raise unsupported_parameter(f"{path}.role={role}")
    return role


def _require_call_id(parsed: JsonObject, path: str) -> None:
    if "tool_call_id" not in parsed:
        raise malformed_value(f"{path}.tool_call_id", "is required", RefusalKind.MISSING)
    _check_short_string(
        parsed["tool_call_id"], f"{path}.tool_call_id", MAX_CHAT_TOOL_CALL_ID_CHARACTERS
    )


def _parse_tool_calls(value: object, path: str) -> list[ToolCall]:
    """The calls without what stream accumulators and parsers of the SDKs leave in them."""
    if isinstance(value, list):
        value = [drop_keys(call, "index", CACHE_HINT) for call in value]
        value = [
            call | {"function": drop_keys(call["function"], "parsed_arguments", CACHE_HINT)}
            if _has_function(call)
            else call
            for call in value
        ]
    return parse_tool_calls(value, path)


def drop_keys(value: object, *dropped: str) -> Any:
    """An object without its nulls and these keys; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {
        key: member for key, member in value.items() if key not in dropped and member is not None
    }


def _has_function(call: object) -> bool:
    return isinstance(call, dict) and "function" in call


def _check_short_string(value: object, path: str, limit: int) -> None:
    if not isinstance(value, str):
        raise malformed_value(path, "has to be a string", RefusalKind.TYPE)
    if not 1 <= len(value) <= limit:
        raise malformed_value(path, f"has to be a string of 1 to {limit} characters")


def _parse_content(content: object, role: str, path: str) -> object:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise malformed_value(path, "has to be a string or an array of parts", RefusalKind.TYPE)
    if not content:
        raise malformed_value(path, "has to hold at least one part")
    parts = []
    for index, part in enumerate(content):
        # The exact shape of nearly every part, tested first because a body may hold very many.
        if (
            isinstance(part, dict)
            and len(part) == 2
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            parts.append(part)
        else:
            parts.append(_parse_part(part, role, f"{path}[{index}]"))
    return parts


def _parse_part(part: object, role: str, path: str) -> JsonObject:
    if not isinstance(part, dict):
        raise malformed_value(path, "has to be an object", RefusalKind.TYPE)
    kind = part.get("type")
    if kind is None:
        raise malformed_value(f"{path}.type", "is required", RefusalKind.MISSING)
    if not isinstance(kind, str):
        raise malformed_value(f"{path}.type", "has to be a string", RefusalKind.TYPE)
    if kind != "text" and not (kind == "image_url" and role == "user"):
        raise unsupported_parameter(f"{path}.type={kind}")
    parsed: JsonObject = drop_keys(part, CACHE_HINT)
    for key in parsed:
        if key not in ("type", kind):
            raise unsupported_parameter(f"{path}.{key}")
    if kind not in parsed:
        raise malformed_value(f"{path}.{kind}", "is required", RefusalKind.MISSING)
    if kind == "image_url":
        return parsed | {"image_url": _parse_image(parsed["image_url"], f"{path}.image_url")}
    if not isinstance(parsed["text"], str):
        raise malformed_value(f"{path}.text", "has to be a string", RefusalKind.TYPE)
    return parsed


def _parse_image(image: object, path: str) -> JsonObject:
    """Where the image is; whether the address may be used and what it holds is judged by the native
    API.
    """
    if not isinstance(image, dict):
        raise malformed_value(path, "has to be an object", RefusalKind.TYPE)
    parsed: JsonObject = drop_keys(
        image, "format", CACHE_HINT
    )  # some clients name the media type there
    for key in parsed:
        if key not in ("url", "detail"):
            raise unsupported_parameter(f"{path}.{key}")
    if "url" not in parsed:
        raise malformed_value(f"{path}.url", "is required", RefusalKind.MISSING)
    if not isinstance(parsed["url"], str):
        raise malformed_value(f"{path}.url", "has to be a string", RefusalKind.TYPE)
    if parsed.get("detail", "auto") not in CHAT_IMAGE_DETAILS:
        raise malformed_value(f"{path}.detail", f"has to be one of {', '.join(CHAT_IMAGE_DETAILS)}")
    return parsed
