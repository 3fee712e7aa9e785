# SPDX-License-Identifier: AGPL-3.0-or-later
"""The items of an input: what each says of the conversation, and what is refused with its path.

Agents send back what they received, through SDKs that add members of their own. So every item that
the front returned is accepted: what a worker would not see is left out instead of refused. Source:
docs/reference/front_responses.md, "Items".
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from horde.chat_contract import CHAT_IMAGE_DETAILS, MAX_CHAT_TOOL_CALL_ID_CHARACTERS
from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused, shorten_param
from horde.oai.leniency import CACHE_HINT, drop_keys
from horde.oai.readers import is_neutral, missing, unsupported, unsupported_value, wrong_type
from horde.oai.responses_form.tools import build_native_name

MAX_ITEM_COUNT: Final = 4096  # far above 1024 messages with their calls and reasoning
# On any item; `caller` and `async` at the values that ask for nothing.
_DROPPED: Final = frozenset({"id", "status", "phase", "created_by", CACHE_HINT})
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {"caller": ({"type": "direct"},), "async": (False,)}
)
_DROPPED_OF_PARTS: Final = frozenset(
    {"annotations", "logprobs", "parsed", "prompt_cache_breakpoint", CACHE_HINT}
)
_ROLES: Final = ("user", "system", "developer", "assistant")


@dataclass(frozen=True, slots=True)
class MessageItem:
    """A message; `content` is in the form of chat. `path` is the client's, as everywhere here."""

    path: str
    role: str
    content: str | list[JsonObject]


@dataclass(frozen=True, slots=True)
class CallItem:
    """One call of a function; `name` is the native one."""

    path: str
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class OutputItem:
    """What a call brought: its text, and images that chat's tool messages cannot hold, each by the
    client's path of it.
    """

    path: str
    call_id: str
    text: str
    images: Mapping[str, JsonObject]


@dataclass(frozen=True, slots=True)
class ReferenceItem:
    """The id of an item that was stored."""

    path: str
    item_id: str


type Item = MessageItem | CallItem | OutputItem | ReferenceItem


@dataclass(frozen=True, slots=True)
class Input:
    """The items of a request: as they were sent, and as they were read."""

    raw: list[JsonObject]
    items: list[Item | None]


def parse_input(value: object) -> Input:
    """`input`; a string is one message of the user. Raises RequestRefused."""
    if isinstance(value, str):
        if not value:
            raise RequestRefused("invalid_value", "Invalid value: 'input' is empty.", "input")
        message: JsonObject = {"type": "message", "role": "user", "content": value}
        return Input([message], [parse_item(message, "input")])
    if not isinstance(value, list):
        raise wrong_type("input", "a string or an array of items")
    if len(value) > MAX_ITEM_COUNT:
        raise unsupported_value("input", f"may hold at most {MAX_ITEM_COUNT} items")
    items = [parse_item(item, f"input[{index}]") for index, item in enumerate(value)]
    return Input(value, items)


def parse_item(item: object, path: str) -> Item | None:
    """One item; None of one that no worker sees. Raises RequestRefused with the path at fault."""
    if not isinstance(item, dict):
        raise wrong_type(path, "an object")
    members: JsonObject = drop_keys(item)
    kind = members.get("type")
    if kind is None:
        kind = _guess_kind(members, path)
    if not isinstance(kind, str):
        raise wrong_type(f"{path}.type", "a string")
    parse = _PARSERS.get(kind)
    if parse is None:
        raise unsupported_value(
            f"{path}.type", f"is '{shorten_param(kind)}', an item that the horde has no place for"
        )
    return parse(members, path)


def _guess_kind(item: JsonObject, path: str) -> str:
    if "role" in item:
        return "message"
    if item.keys() == {"id"}:
        return "item_reference"
    raise missing(f"{path}.type")


def _parse_message(item: JsonObject, path: str) -> MessageItem:
    role = _require_string(item, "role", path)
    if role not in _ROLES:
        raise unsupported_value(f"{path}.role", f"has to be one of {', '.join(_ROLES)}")
    _check_members(item, path, "type", "role", "content")
    content = item.get("content")
    place = f"{path}.content"
    if content is None:
        raise missing(place)
    if isinstance(content, str):
        return MessageItem(path, role, content)
    if not isinstance(content, list):
        raise wrong_type(place, "a string or an array of parts")
    if role == "assistant":
        texts = [_parse_said_part(part, f"{place}[{index}]") for index, part in enumerate(content)]
        return MessageItem(path, role, "".join(texts))
    if not content:
        raise RequestRefused("invalid_value", f"Invalid value: '{place}' is empty.", place)
    parts = [
        _parse_part(part, f"{place}[{index}]", may_be_image=role == "user")
        for index, part in enumerate(content)
    ]
    return MessageItem(path, role, parts)


def _parse_call(item: JsonObject, path: str) -> CallItem:
    _check_members(item, path, "type", "call_id", "name", "arguments", "namespace")
    call_id, name = _require_call_id(item, path), _require_name(item, path)
    arguments = _require_string(item, "arguments", path)
    return CallItem(path, call_id, name, arguments or "{}")


def _parse_custom_call(item: JsonObject, path: str) -> CallItem:
    _check_members(item, path, "type", "call_id", "name", "input", "namespace")
    call_id, name = _require_call_id(item, path), _require_name(item, path)
    text = _require_string(item, "input", path)
    return CallItem(path, call_id, name, json.dumps({"input": text}, ensure_ascii=False))


def _parse_output(item: JsonObject, path: str) -> OutputItem:
    _check_members(item, path, "type", "call_id", "output", "name", "namespace")
    call_id = _require_call_id(item, path)
    output, place = item.get("output"), f"{path}.output"
    if output is None:
        raise missing(place)
    if isinstance(output, str):
        return OutputItem(path, call_id, output, {})
    if not isinstance(output, list):
        raise wrong_type(place, "a string or an array of parts")
    parts = {
        f"{place}[{index}]": _parse_part(part, f"{place}[{index}]", may_be_image=True)
        for index, part in enumerate(output)
    }
    texts = [str(part["text"]) for part in parts.values() if part["type"] == "text"]
    images = {path: part for path, part in parts.items() if part["type"] == "image_url"}
    return OutputItem(path, call_id, "\n".join(texts) if texts or not images else "(image)", images)


def _parse_reasoning(item: JsonObject, path: str) -> None:
    """A worker has no place for past reasoning."""
    _check_members(item, path, "type", "summary", "content", "encrypted_content")


def _parse_reference(item: JsonObject, path: str) -> ReferenceItem:
    _check_members(item, path, "type")
    return ReferenceItem(path, _require_string(item, "id", path))


_PARSERS: Final[Mapping[str, Callable[[JsonObject, str], Item | None]]] = MappingProxyType(
    {
        "message": _parse_message,
        "function_call": _parse_call,
        "custom_tool_call": _parse_custom_call,
        "function_call_output": _parse_output,
        "custom_tool_call_output": _parse_output,
        "reasoning": _parse_reasoning,
        "item_reference": _parse_reference,
    }
)


def _parse_said_part(part: object, path: str) -> str:
    """The text of a part that the assistant said."""
    kind, part = _require_part(part, path)
    if kind == "refusal":
        _check_part_members(part, path, "refusal")
        return _require_string(part, "refusal", path)
    if kind in ("output_text", "input_text"):
        _check_part_members(part, path, "text")
        return _require_string(part, "text", path)
    raise _build_part_refusal(kind, path, "'output_text'")


def _parse_part(part: object, path: str, *, may_be_image: bool) -> JsonObject:
    """A part in the form of chat."""
    kind, part = _require_part(part, path)
    if kind == "input_text":
        _check_part_members(part, path, "text")
        return {"type": "text", "text": _require_string(part, "text", path)}
    if kind == "input_image" and may_be_image:
        return _parse_image(part, path)
    raise _build_part_refusal(
        kind, path, "'input_text' or 'input_image'" if may_be_image else "'input_text'"
    )


def _parse_image(part: JsonObject, path: str) -> JsonObject:
    _check_part_members(part, path, "image_url", "detail")
    image = {"url": _require_string(part, "image_url", path)}
    detail = part.get("detail")
    if detail is not None:
        if detail not in CHAT_IMAGE_DETAILS:
            raise unsupported_value(
                f"{path}.detail", f"has to be one of {', '.join(CHAT_IMAGE_DETAILS)}"
            )
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def _require_part(part: object, path: str) -> tuple[str, JsonObject]:
    if not isinstance(part, dict):
        raise wrong_type(path, "an object")
    return _require_string(part, "type", path), drop_keys(part, *_DROPPED_OF_PARTS)


_CHAT_PARTS: Final[Mapping[str, str]] = MappingProxyType(
    {"text": "input_text", "image_url": "input_image"}
)


def _build_part_refusal(kind: str, path: str, expected: str) -> RequestRefused:
    meant = _CHAT_PARTS.get(kind)
    advice = f"; this API calls it '{meant}'" if meant is not None else ""
    return unsupported_value(f"{path}.type", f"has to be {expected} here{advice}")


def _check_part_members(part: JsonObject, path: str, *known: str) -> None:
    for key in part:
        if key != "type" and key not in known:
            raise unsupported(f"{path}.{key}")


def _check_members(item: JsonObject, path: str, *known: str) -> None:
    if "id" in item:
        _require_string(item, "id", path)
    for key, value in item.items():
        if key in known or key in _DROPPED or key in ("parsed", "parsed_arguments"):
            continue
        if key in ("annotations", "logprobs") or is_neutral(value, *_NEUTRAL.get(key, ())):
            continue
        raise unsupported(f"{path}.{key}")


def _require_string(value: JsonObject, key: str, path: str) -> str:
    member: Any = value.get(key)
    if member is None:
        raise missing(f"{path}.{key}")
    if not isinstance(member, str):
        raise wrong_type(f"{path}.{key}", "a string")
    return member


def _require_call_id(item: JsonObject, path: str) -> str:
    call_id = _require_string(item, "call_id", path)
    if not 1 <= len(call_id) <= MAX_CHAT_TOOL_CALL_ID_CHARACTERS:
        message = (
            f"Invalid value: '{path}.call_id' has to hold 1 to {MAX_CHAT_TOOL_CALL_ID_CHARACTERS}"
            " characters."
        )
        raise RequestRefused("invalid_value", message, f"{path}.call_id")
    return call_id


def _require_name(item: JsonObject, path: str) -> str:
    name = _require_string(item, "name", path)
    if not name:
        raise RequestRefused(
            "invalid_value", f"Invalid value: '{path}.name' is empty.", f"{path}.name"
        )
    namespace = item.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise wrong_type(f"{path}.namespace", "a string")
    return build_native_name(namespace, name)
