# SPDX-License-Identifier: AGPL-3.0-or-later
"""The messages of a chat request: their shape by role, their text, and the copy that is stored.

Written by hand rather than as models: a request may carry 1,024 of them, and each refusal names its
exact path. Source: docs/reference/chat_requests.md, "Request body", "Tools" and "Refused keys and
values".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from horde.chat.flattening import (
    check_text_size,
    count_text_bytes,
)
from horde.chat.images import check_submitted_images, list_image_parts
from horde.chat.tool_history import check_tool_history
from horde.chat.tools import parse_tool_calls
from horde.chat.wire import ContentPart, ImagePart, ImageUrl, Message
from horde.chat_contract import (
    CHAT_IMAGE_DETAILS,
    CHAT_MESSAGE_KEYS,
    MAX_CHAT_MESSAGE_COUNT,
    MAX_CHAT_NAME_CHARACTERS,
    MAX_CHAT_TOOL_CALL_ID_CHARACTERS,
    ChatRequestRefused,
    limit_exceeded,
    malformed_value,
    unsupported_parameter,
)


def parse_messages(value: object) -> list[Message]:
    """The messages as they are stored: developer as system, no nulls of optional keys, null content
    beside calls.

    Raises ChatRequestRefused with the path of the first message at fault.
    """
    if not isinstance(value, list) or not value:
        raise malformed_value("messages", "has to be a non-empty array")
    if len(value) > MAX_CHAT_MESSAGE_COUNT:
        raise limit_exceeded("messages", f"hold at most {MAX_CHAT_MESSAGE_COUNT} messages")
    messages = [
        _parse_message(message, f"messages[{index}]") for index, message in enumerate(value)
    ]
    check_text_size(count_text_bytes(messages))
    check_tool_history(messages)
    check_submitted_images(list_image_parts(messages))
    return messages


def _parse_message(message: object, path: str) -> Message:
    if not isinstance(message, dict):
        raise malformed_value(path, "has to be an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise malformed_value(f"{path}.role", "has to be a string")
    accepted = CHAT_MESSAGE_KEYS.get(role)
    if accepted is None:
        raise unsupported_parameter(f"{path}.role={role}")
    for key in message:
        if key not in accepted:
            raise unsupported_parameter(f"{path}.{key}")
    parsed = {key: value for key, value in message.items() if value is not None}
    if role == "developer":
        parsed["role"] = "system"
    if "name" in parsed:
        _check_short_string(parsed["name"], f"{path}.name", MAX_CHAT_NAME_CHARACTERS)
    if role == "tool":
        _check_short_string(
            parsed.get("tool_call_id"), f"{path}.tool_call_id", MAX_CHAT_TOOL_CALL_ID_CHARACTERS
        )
    if "tool_calls" in parsed:
        parsed["tool_calls"] = parse_tool_calls(parsed["tool_calls"], f"{path}.tool_calls")
        parsed.setdefault("content", None)
        if parsed["content"] is None:
            return cast(Message, parsed)
    parsed["content"] = _parse_content(
        parsed.get("content"), f"{path}.content", takes_images=role == "user"
    )
    return cast(Message, parsed)


def _check_short_string(value: object, path: str, limit: int) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= limit:
        raise malformed_value(path, f"has to be a string of 1 to {limit} characters")


def _parse_content(content: object, path: str, *, takes_images: bool) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise malformed_value(path, "has to be a string or a non-empty array of parts")
    parsed = content
    for index, part in enumerate(content):
        # The exact shape of nearly every part, tested first because a body may hold very many.
        if (
            isinstance(part, dict)
            and len(part) == 2
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
        ):
            continue
        if not takes_images or not isinstance(part, dict) or part.get("type") != "image_url":
            raise _build_part_refusal(part, f"{path}[{index}]")
        parsed = content.copy() if parsed is content else parsed
        parsed[index] = _parse_image_part(part, f"{path}[{index}]")
    return parsed


def _parse_image_part(part: Mapping[str, object], path: str) -> ImagePart:
    """The part in an object of its own, from which the URL is taken once it is read."""
    for key in part:
        if key not in ("type", "image_url"):
            raise unsupported_parameter(f"{path}.{key}")
    image_url = part.get("image_url")
    if not isinstance(image_url, dict):
        raise malformed_value(f"{path}.image_url", "has to be an object")
    for key in image_url:
        if key not in ("url", "detail"):
            raise unsupported_parameter(f"{path}.image_url.{key}")
    if not isinstance(image_url.get("url"), str):
        raise malformed_value(f"{path}.image_url.url", "has to be a string")
    detail = image_url.get("detail")
    if detail is not None and detail not in CHAT_IMAGE_DETAILS:
        raise malformed_value(f"{path}.image_url.detail", "has to be 'auto', 'low' or 'high'")
    kept = {key: value for key, value in image_url.items() if value is not None}
    return {"type": "image_url", "image_url": cast(ImageUrl, kept)}


def _build_part_refusal(part: object, path: str) -> ChatRequestRefused:
    if not isinstance(part, dict):
        return malformed_value(path, "has to be an object")
    kind = part.get("type")
    if not isinstance(kind, str):
        return malformed_value(f"{path}.type", "has to be a string")
    if kind != "text":
        return unsupported_parameter(f"{path}.type={kind}")
    for key in part:
        if key not in ("type", "text"):
            return unsupported_parameter(f"{path}.{key}")
    return malformed_value(f"{path}.text", "has to be a string")


def carries_tool_turn(messages: Iterable[Message]) -> bool:
    """Whether the template has to render a call or an answer to one."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def rewrite_message_texts(
    messages: Sequence[Message], rewrite: Callable[[str], str]
) -> list[Message]:
    """The messages with every text passed through moderation's rewrite; an emptied text becomes an
    empty string.

    Tool call arguments are JSON documents and stay as they are.
    """
    return [_rewrite_message(message, rewrite) for message in messages]


def _rewrite_message(message: Message, rewrite: Callable[[str], str]) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": rewrite(content)}
    if not content:
        return message
    parts = [
        part | {"text": rewrite(part["text"])} if part["type"] == "text" else part
        for part in content
    ]
    return message | {"content": parts}
