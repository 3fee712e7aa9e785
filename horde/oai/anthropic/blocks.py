# SPDX-License-Identifier: AGPL-3.0-or-later
"""Content blocks of one message, as the parts, calls and answers of chat messages.

Source: docs/reference/front_messages.md, "Messages".
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from horde.chat.wire import ContentPart, ImagePart, TextPart, ToolCall
from horde.chat_contract import MAX_CHAT_TOOL_CALL_ID_CHARACTERS
from horde.json_text import JsonObject, write_document
from horde.oai.anthropic.refusals import (
    check_members,
    refuse,
    require_list,
    require_object,
    require_one_of,
    require_string,
    show,
    unsupported,
    wrong_type,
)
from horde.oai.anthropic.tools import shorten_name
from horde.oai.errors import RequestRefused

IMAGE_TYPES: Final = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
ERROR_LINE: Final = "The tool reported an error:"
CHARACTERS_PER_REFUSED_TOKEN: Final = 4  # of what is counted though it cannot be served
# Their place in a conversation says nothing to a worker, which has none for past reasoning.
_DROPPED_TYPES: Final = frozenset({"thinking", "redacted_thinking"})


@dataclass(slots=True)
class Result:
    """The answer to one call, where it stood."""

    call_id: str
    text: str
    path: str


@dataclass(slots=True)
class Pieces:
    """What the blocks of one turn hold, in the order of chat messages.

    `images` are those of the results. `refused_characters` is None where what cannot be served is
    refused; for an estimate it counts them.
    """

    parts: list[ContentPart] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_paths: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    images: list[ImagePart] = field(default_factory=list)
    compactions: list[str] = field(default_factory=list)
    refused_characters: int | None = None

    def add_text(self, text: str) -> None:
        """Text that is not blank; clients replay their own empty replies."""
        if text.strip():
            self.parts.append({"type": "text", "text": text})

    def refuse(self, block: JsonObject, refusal: RequestRefused) -> None:
        """Refuse a block, or count its size for an estimate."""
        if self.refused_characters is None:
            raise refusal
        self.refused_characters += len(json.dumps(block))


type BlockReader = Callable[[JsonObject, str, Pieces], None]


def read_content(content: object, role: str, path: str, pieces: Pieces) -> None:
    """Add the content of a user's or an assistant's message. Raises RequestRefused."""
    if isinstance(content, str):
        if content if role == "user" else content.strip():
            pieces.parts.append({"type": "text", "text": content})
        return
    for index, block in enumerate(require_list(content, path)):
        _read_block(block, role, f"{path}.{index}", pieces)


def _read_block(value: object, role: str, path: str, pieces: Pieces) -> None:
    block = require_object(value, path)
    kind = require_string(block.get("type"), f"{path}.type")
    if kind in _DROPPED_TYPES and role == "assistant":
        return
    reader = _READERS[role].get(kind)
    if reader is not None:
        reader(block, path, pieces)
    elif any(kind in readers for readers in _READERS.values()) or kind in _DROPPED_TYPES:
        raise unsupported(f"{path}.type", f"a '{kind}' block has no place in {role} messages")
    else:
        message = f"'{show(kind)}' blocks are not supported: the horde cannot carry their content"
        pieces.refuse(block, unsupported(f"{path}.type", message))


def read_texts(content: object, path: str) -> list[str]:
    """The texts of content that may hold nothing else. Raises RequestRefused."""
    if isinstance(content, str):
        return [content]
    texts = []
    for index, value in enumerate(require_list(content, path)):
        block_path = f"{path}.{index}"
        block = require_object(value, block_path)
        if require_string(block.get("type"), f"{block_path}.type") != "text":
            raise unsupported(f"{block_path}.type", "only text blocks may stand here")
        texts.append(_get_text(block, block_path))
    return texts


def _get_text(block: JsonObject, path: str) -> str:
    check_members(block, ("type", "text", "citations", "parsed_output"), path)
    citations = block.get("citations")
    if citations is not None:
        require_list(citations, f"{path}.citations")
    return require_string(block.get("text"), f"{path}.text")


# --- blocks by their type
# -----------------------------------------------------------------------------------


def _read_text(block: JsonObject, path: str, pieces: Pieces) -> None:
    pieces.add_text(_get_text(block, path))


def _read_image(block: JsonObject, path: str, pieces: Pieces) -> None:
    pieces.parts.append(_build_image(block, path))


def _build_image(block: JsonObject, path: str) -> ImagePart:
    check_members(block, ("type", "source", "transformations"), path)
    if block.get("transformations"):
        raise unsupported(f"{path}.transformations", "images are not transformed here")
    source_path = f"{path}.source"
    source = require_object(block.get("source"), source_path)
    kind = require_string(source.get("type"), f"{source_path}.type")
    if kind == "base64":
        check_members(source, ("type", "media_type", "data"), source_path)
        media_type = require_one_of(
            source.get("media_type"), IMAGE_TYPES, f"{source_path}.media_type"
        )
        data = require_string(source.get("data"), f"{source_path}.data")
        url = f"data:{media_type};base64,{data}"
    elif kind == "url":
        check_members(source, ("type", "url"), source_path)
        url = require_string(source.get("url"), f"{source_path}.url")
    elif kind == "file":
        raise unsupported(f"{source_path}.type", "uploaded files are not supported")
    else:
        raise refuse(f"{source_path}.type", "Input should be one of base64, url")
    return {"type": "image_url", "image_url": {"url": url}}


def _read_document(block: JsonObject, path: str, pieces: Pieces) -> None:
    parts = _flatten_document(block, path, pieces)
    pieces.parts += [part for part in parts if part["type"] != "text" or part["text"].strip()]


def _flatten_document(block: JsonObject, path: str, pieces: Pieces) -> list[ContentPart]:
    """The title and the context as lines, then the text; images as they come between."""
    check_members(block, ("type", "source", "title", "context", "citations"), path)
    _check_citations(block, path)
    source_path = f"{path}.source"
    source = require_object(block.get("source"), source_path)
    kind = require_string(source.get("type"), f"{source_path}.type")
    heads = [
        require_string(block[key], f"{path}.{key}")
        for key in ("title", "context")
        if block.get(key) is not None
    ]
    if kind == "text":
        check_members(source, ("type", "media_type", "data"), source_path)
        return [
            _text("\n".join([*heads, require_string(source.get("data"), f"{source_path}.data")]))
        ]
    if kind != "content":
        message = "PDF documents are not supported; send text or images"
        pieces.refuse(block, unsupported(f"{source_path}.type", message))
        return []
    check_members(source, ("type", "content"), source_path)
    found = Pieces()
    content = source.get("content")
    if isinstance(content, str):
        found.parts.append(_text(content))
    else:
        for index, value in enumerate(require_list(content, f"{source_path}.content")):
            block_path = f"{source_path}.content.{index}"
            inner = require_object(value, block_path)
            inner_kind = require_one_of(inner.get("type"), ("text", "image"), f"{block_path}.type")
            (_read_text if inner_kind == "text" else _read_image)(inner, block_path, found)
    return _put_before(heads, found.parts)


def _put_before(heads: list[str], parts: list[ContentPart]) -> list[ContentPart]:
    """The parts, with lines in front of the first text."""
    if not heads:
        return parts
    first = parts[0] if parts else None
    if first is not None and first["type"] == "text":
        return [_text("\n".join([*heads, first["text"]])), *parts[1:]]
    return [_text("\n".join(heads)), *parts]


def _check_citations(block: JsonObject, path: str) -> None:
    citations = block.get("citations")
    if citations is None:
        return
    if require_object(citations, f"{path}.citations").get("enabled"):
        raise unsupported(f"{path}.citations", "citations are not supported")


def _read_search_result(block: JsonObject, path: str, pieces: Pieces) -> None:
    pieces.add_text(_flatten_search_result(block, path))


def _flatten_search_result(block: JsonObject, path: str) -> str:
    check_members(block, ("type", "title", "source", "content", "citations"), path)
    _check_citations(block, path)
    heads = [require_string(block.get(key), f"{path}.{key}") for key in ("title", "source")]
    return "\n".join([*heads, *read_texts(block.get("content"), f"{path}.content")])


def _read_compaction(block: JsonObject, path: str, pieces: Pieces) -> None:
    if block.get("content") is not None:
        pieces.compactions.append(require_string(block["content"], f"{path}.content"))


def _read_tool_use(block: JsonObject, path: str, pieces: Pieces) -> None:
    check_members(block, ("type", "id", "name", "input", "caller"), path)
    caller = block.get("caller")
    if caller is not None and require_object(caller, f"{path}.caller").get("type") != "direct":
        raise unsupported(f"{path}.caller", "only calls by the model itself can be carried")
    call_id = _require_call_id(block.get("id"), f"{path}.id")
    name = require_string(block.get("name"), f"{path}.name")
    if not name:
        raise refuse(f"{path}.name", "String should have at least 1 character")
    arguments = write_document(require_object(block.get("input"), f"{path}.input"))
    pieces.calls.append(
        {
            "id": call_id,
            "type": "function",
            "function": {"name": shorten_name(name), "arguments": arguments},
        }
    )
    pieces.call_paths.append(f"{path}.id")


def _require_call_id(value: object, path: str) -> str:
    call_id = require_string(value, path)
    if not 1 <= len(call_id) <= MAX_CHAT_TOOL_CALL_ID_CHARACTERS:
        raise refuse(path, f"String should have 1 to {MAX_CHAT_TOOL_CALL_ID_CHARACTERS} characters")
    return call_id


def _read_tool_result(block: JsonObject, path: str, pieces: Pieces) -> None:
    """A chat message of a tool carries text only, so images go into the user's message."""
    check_members(block, ("type", "tool_use_id", "content", "is_error"), path)
    call_id = _require_call_id(block.get("tool_use_id"), f"{path}.tool_use_id")
    is_error = block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise wrong_type(f"{path}.is_error", "a valid boolean")
    texts = [ERROR_LINE] if is_error else []
    content = block.get("content")
    if isinstance(content, str):
        texts += [content] if content or not is_error else []
    elif content is not None:
        texts += _read_result_blocks(content, f"{path}.content", pieces)
    pieces.results.append(Result(call_id, "\n".join(texts), path))


def _read_result_blocks(content: object, path: str, pieces: Pieces) -> list[str]:
    texts: list[str] = []
    image_count = 0
    for index, value in enumerate(require_list(content, path)):
        block_path = f"{path}.{index}"
        block = require_object(value, block_path)
        kind = require_string(block.get("type"), f"{block_path}.type")
        parts: list[ContentPart]
        if kind == "text":
            parts = [_text(_get_text(block, block_path))]
        elif kind == "image":
            parts = [_build_image(block, block_path)]
        elif kind == "document":
            parts = _flatten_document(block, block_path, pieces)
        elif kind == "search_result":
            parts = [_text(_flatten_search_result(block, block_path))]
        elif kind == "tool_reference":
            check_members(block, ("type", "tool_name"), block_path)
            name = require_string(block.get("tool_name"), f"{block_path}.tool_name")
            parts = [_text(f"Tool available: {shorten_name(name)}")]
        else:
            message = f"'{show(kind)}' blocks are not supported in a tool_result"
            pieces.refuse(block, unsupported(f"{block_path}.type", message))
            continue
        for part in parts:
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                image_count += 1
                texts.append(f"[image {image_count} of this result follows]")
                pieces.images.append(part)
    return texts


def _text(text: str) -> TextPart:
    return {"type": "text", "text": text}


_READERS: Final[Mapping[str, Mapping[str, BlockReader]]] = MappingProxyType(
    {
        "user": {
            "text": _read_text,
            "image": _read_image,
            "document": _read_document,
            "search_result": _read_search_result,
            "tool_result": _read_tool_result,
            "compaction": _read_compaction,
        },
        "assistant": {
            "text": _read_text,
            "tool_use": _read_tool_use,
            "compaction": _read_compaction,
        },
    }
)
