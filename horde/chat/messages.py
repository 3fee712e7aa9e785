# SPDX-License-Identifier: AGPL-3.0-or-later
"""The messages of a chat request: their shape by role, their text, and the copy that is stored.

API and front read messages here; `Leniency` says what the front leaves out instead of refusing it.
Written by hand rather than as models: a request may carry 1,024 of them, and each refusal names its
exact path. Source: docs/reference/chat_requests.md, "Request body", "Tools" and "Refused keys and
values"; docs/reference/chat_front.md, "Messages".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, cast

from horde.chat.flattening import (
    check_text_size,
    count_text_bytes,
)
from horde.chat.images import check_image_count, list_image_parts
from horde.chat.tool_history import check_tool_history
from horde.chat.tools import parse_tool_calls
from horde.chat.wire import ContentPart, ImagePart, ImageUrl, Message, TextPart, ToolCall
from horde.chat_contract import (
    CHAT_IMAGE_DETAILS,
    CHAT_MESSAGE_KEYS,
    MAX_CHAT_MESSAGE_COUNT,
    MAX_CHAT_NAME_CHARACTERS,
    MAX_CHAT_TOOL_CALL_ID_CHARACTERS,
    RefusalKind,
    limit_exceeded,
    malformed_value,
    unsupported_parameter,
)

_NO_KEYS: Final[frozenset[str]] = frozenset()
_NO_ROLE_KEYS: Final[Mapping[str, frozenset[str]]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Leniency:
    """What is left out of messages instead of being refused, because it changes nothing of what a
    worker gets. The API leaves out nothing.
    """

    nulls: bool = False  # of keys that a message does not have
    hints: frozenset[str] = _NO_KEYS  # keys of a message and of every object in it
    role_keys: Mapping[str, frozenset[str]] = _NO_ROLE_KEYS
    empty_role_keys: Mapping[str, frozenset[str]] = _NO_ROLE_KEYS  # at an empty array
    empty_content: bool = False  # beside calls
    call_keys: frozenset[str] = _NO_KEYS
    function_keys: frozenset[str] = _NO_KEYS
    image_keys: frozenset[str] = _NO_KEYS

    def drops(self, role: str, key: str, value: object) -> bool:
        """Whether a key that messages of the role do not have is left out."""
        return (
            (value is None and self.nulls)
            or key in self.hints
            or key in self.role_keys.get(role, ())
            or self.drops_empty(role, key, value)
        )

    def drops_empty(self, role: str, key: str, value: object) -> bool:
        """Whether a key is left out because nothing is in its array."""
        return value == [] and key in self.empty_role_keys.get(role, ())

    def clean(
        self, members: Mapping[str, object], dropped: frozenset[str] = _NO_KEYS
    ) -> Mapping[str, object]:
        """An object within a message, without what is left out of it."""
        if not self.nulls:
            return members
        return {
            key: member
            for key, member in members.items()
            if member is not None and key not in dropped and key not in self.hints
        }


EXACT: Final = Leniency()


def parse_messages(value: object, leniency: Leniency = EXACT) -> list[Message]:
    """The messages without nulls of optional keys and without what is left out.

    Raises ChatRequestRefused with the path of the first message at fault.
    """
    if not isinstance(value, list):
        raise malformed_value("messages", "has to be an array", RefusalKind.TYPE)
    if not value:
        raise malformed_value("messages", "has to hold at least one message")
    if len(value) > MAX_CHAT_MESSAGE_COUNT:
        raise limit_exceeded("messages", f"hold at most {MAX_CHAT_MESSAGE_COUNT} messages")

    messages = [
        _parse_message(message, f"messages[{index}]", leniency)
        for index, message in enumerate(value)
    ]
    check_text_size(count_text_bytes(messages))
    check_tool_history(messages)
    check_image_count(list_image_parts(messages))
    return messages


def build_stored_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages as they are stored and sized: developer as system, null content beside calls."""
    return [_build_stored_message(message) for message in messages]


def _build_stored_message(message: Message) -> Message:
    if message["role"] == "developer":
        return message | {"role": "system"}
    if "content" not in message:
        return message | {"content": None}
    return message


def _parse_message(message: object, path: str, leniency: Leniency) -> Message:
    if not isinstance(message, dict):
        raise malformed_value(path, "has to be an object", RefusalKind.TYPE)
    role = _require_role(message, path)
    parsed = _keep_members(message, role, path, leniency)
    if "name" in parsed:
        _check_short_string(parsed["name"], f"{path}.name", MAX_CHAT_NAME_CHARACTERS)
    if role == "tool":
        _check_short_string(
            parsed.get("tool_call_id"), f"{path}.tool_call_id", MAX_CHAT_TOOL_CALL_ID_CHARACTERS
        )

    if "tool_calls" in parsed:
        parsed["tool_calls"] = _parse_calls(parsed["tool_calls"], f"{path}.tool_calls", leniency)
        if leniency.empty_content and parsed.get("content") == []:
            del parsed["content"]
        if "content" not in parsed:
            return cast(Message, parsed)
    parsed["content"] = _parse_content(
        parsed.get("content"), f"{path}.content", leniency, takes_images=role == "user"
    )
    return cast(Message, parsed)


def _require_role(message: Mapping[str, object], path: str) -> str:
    role = _require_string(message.get("role"), f"{path}.role")
    if role not in CHAT_MESSAGE_KEYS:
        raise unsupported_parameter(f"{path}.role={role}")
    return role


def _keep_members(
    message: Mapping[str, object], role: str, path: str, leniency: Leniency
) -> dict[str, object]:
    accepted = CHAT_MESSAGE_KEYS[role]
    kept = {}
    for key, value in message.items():
        if key not in accepted:
            if not leniency.drops(role, key, value):
                raise unsupported_parameter(f"{path}.{key}")
        elif value is not None and not leniency.drops_empty(role, key, value):
            kept[key] = value
    return kept


def _require_string(value: object, path: str) -> str:
    if value is None:
        raise malformed_value(path, "is required", RefusalKind.MISSING)
    if not isinstance(value, str):
        raise malformed_value(path, "has to be a string", RefusalKind.TYPE)
    return value


def _check_short_string(value: object, path: str, limit: int) -> None:
    if not 1 <= len(_require_string(value, path)) <= limit:
        raise malformed_value(path, f"has to be a string of 1 to {limit} characters")


def _parse_calls(value: object, path: str, leniency: Leniency) -> list[ToolCall]:
    if leniency is not EXACT and isinstance(value, list):
        value = [_clean_call(call, leniency) for call in value]
    return parse_tool_calls(value, path)


def _clean_call(call: object, leniency: Leniency) -> object:
    if not isinstance(call, dict):
        return call
    cleaned = leniency.clean(call, leniency.call_keys)
    function = cleaned.get("function")
    if not isinstance(function, dict):
        return cleaned
    return {**cleaned, "function": leniency.clean(function, leniency.function_keys)}


def _parse_content(
    content: object, path: str, leniency: Leniency, *, takes_images: bool
) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    if content is None:
        raise malformed_value(path, "is required", RefusalKind.MISSING)
    if not isinstance(content, list):
        raise malformed_value(path, "has to be a string or an array of parts", RefusalKind.TYPE)
    if not content:
        raise malformed_value(path, "has to hold at least one part")

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
        parsed = content.copy() if parsed is content else parsed
        parsed[index] = _parse_part(part, f"{path}[{index}]", leniency, takes_images=takes_images)
    return parsed


def _parse_part(part: object, path: str, leniency: Leniency, *, takes_images: bool) -> ContentPart:
    if not isinstance(part, dict):
        raise malformed_value(path, "has to be an object", RefusalKind.TYPE)
    kind = _require_string(part.get("type"), f"{path}.type")
    if kind != "text" and not (kind == "image_url" and takes_images):
        raise unsupported_parameter(f"{path}.type={kind}")

    kept = leniency.clean(part)
    for key in kept:
        if key not in ("type", kind):
            raise unsupported_parameter(f"{path}.{key}")
    if kind == "image_url":
        return _parse_image_part(kept.get("image_url"), f"{path}.image_url", leniency)
    return TextPart(type="text", text=_require_string(kept.get("text"), f"{path}.text"))


def _parse_image_part(image: object, path: str, leniency: Leniency) -> ImagePart:
    """The part in an object of its own, from which the URL is taken once it is read.

    Whether the address may be used and what it holds is judged by the API.
    """
    if image is None:
        raise malformed_value(path, "is required", RefusalKind.MISSING)
    if not isinstance(image, dict):
        raise malformed_value(path, "has to be an object", RefusalKind.TYPE)
    kept = leniency.clean(image, leniency.image_keys)
    for key in kept:
        if key not in ("url", "detail"):
            raise unsupported_parameter(f"{path}.{key}")
    image_url = ImageUrl(url=_require_string(kept.get("url"), f"{path}.url"))
    detail = kept.get("detail")
    if detail is not None:
        if detail not in CHAT_IMAGE_DETAILS:
            expectation = f"has to be one of {', '.join(CHAT_IMAGE_DETAILS)}"
            raise malformed_value(f"{path}.detail", expectation)
        image_url["detail"] = str(detail)
    return ImagePart(type="image_url", image_url=image_url)


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
