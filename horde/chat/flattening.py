# SPDX-License-Identifier: AGPL-3.0-or-later
"""The messages as one text, and what of them counts against limits and estimates.

Source: docs/reference/chat_requests.md, "Flattened prompt".
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from horde_sdk.generation_parameters.text.chat_limits import MAX_CHAT_TEXT_BYTES

from horde.chat_contract import (
    CHAT_IMAGE_PLACEHOLDER,
    CHAT_IMAGE_PROMPT_TOKENS,
    JsonObject,
    limit_exceeded,
)
from horde.json_text import write_document
from horde.token_estimate import TextSize, estimate_prompt_tokens


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
