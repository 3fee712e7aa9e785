# SPDX-License-Identifier: AGPL-3.0-or-later
"""The messages as one text, and what of them counts against limits and estimates.

Source: docs/reference/chat_requests.md, "Flattened prompt".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from horde_sdk.generation_parameters.text.chat_limits import MAX_CHAT_TEXT_BYTES

from horde.chat.wire import ContentPart, Message, Tool
from horde.chat_contract import (
    CHAT_IMAGE_PLACEHOLDER,
    CHAT_IMAGE_PROMPT_TOKENS,
    limit_exceeded,
)
from horde.json_text import write_document
from horde.token_estimate import (
    NEWLINE,
    NO_TEXT,
    TextSize,
    estimate_prompt_tokens,
    measure_text,
)


def list_parts(message: Message) -> Sequence[ContentPart]:
    """The parts of a message; none of one whose content is a string or null."""
    content = message.get("content")
    return content if isinstance(content, list) else ()


def iter_message_texts(message: Message) -> Iterator[str]:
    """The string content or the text parts of one message."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif content:
        yield from (part["text"] for part in content if part["type"] == "text")


def count_text_bytes(messages: Sequence[Message]) -> int:
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


def count_image_parts(messages: Sequence[Message]) -> int:
    """How many image parts the messages hold."""
    return sum(part["type"] == "image_url" for message in messages for part in list_parts(message))


@dataclass(frozen=True, slots=True)
class FlattenedChat:
    """A conversation as one text: a line of its own for each message and, last, the tools.

    Read and measured once; estimates, trimming, moderation and the stored prompt ask it. Messages
    are named by their places. Workers never receive the text.
    """

    lines: tuple[str, ...] = field(repr=False)
    tools: str | None = field(repr=False)
    sizes: tuple[TextSize, ...]
    tools_size: TextSize
    image_counts: tuple[int, ...]

    @classmethod
    def read(cls, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Self:
        """The text of validated messages and tools."""
        lines = tuple(map(_flatten_message, messages))
        written = write_document(tools) if tools else None
        return cls(
            lines=lines,
            tools=written,
            sizes=tuple(map(measure_text, lines)),
            tools_size=NO_TEXT if written is None else measure_text(written) + NEWLINE,
            image_counts=tuple(count_image_parts([message]) for message in messages),
        )

    def join(self, dropped: frozenset[int] = frozenset()) -> str:
        """The text of the messages that stay."""
        kept = [line for place, line in enumerate(self.lines) if place not in dropped]
        return "\n".join(kept if self.tools is None else [*kept, self.tools])

    def estimate_tokens(self, dropped: frozenset[int] = frozenset()) -> int:
        """Tokens that the messages which stay are taken to need, images included."""
        kept = [place for place in range(len(self.lines)) if place not in dropped]
        images = sum(self.image_counts[place] for place in kept)
        return estimate_flattened_tokens(self._measure(kept), images)

    def find_oldest_to_drop(
        self, turns: Sequence[Sequence[int]], *, token_budget: int
    ) -> frozenset[int]:
        """The places of the first turns without which the estimate is within the budget, or of all
        of them.
        """
        size = self._measure(range(len(self.lines)))
        images = sum(self.image_counts)
        dropped: list[int] = []
        for turn in turns:
            if estimate_flattened_tokens(size, images) <= token_budget:
                break
            dropped.extend(turn)
            for place in turn:
                size -= self.sizes[place] + NEWLINE
            images -= sum(self.image_counts[place] for place in turn)
        return frozenset(dropped)

    def _measure(self, places: Sequence[int]) -> TextSize:
        """The size of these messages and the tools, with the newlines between them."""
        newlines = max(len(places) - 1, 0)
        texts = sum((self.sizes[place] for place in places), start=self.tools_size)
        return texts + TextSize(newlines, newlines)


def _flatten_message(message: Message) -> str:
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


def estimate_flattened_tokens(size: TextSize, image_count: int) -> int:
    """Tokens a flattened prompt of this size, with its images, is taken to have."""
    return estimate_prompt_tokens(size) + CHAT_IMAGE_PROMPT_TOKENS * image_count


def flatten_messages(messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
    """The prompt column of a chat request; workers never receive it."""
    return FlattenedChat.read(messages, tools).join()


def estimate_chat_prompt_tokens(
    messages: Sequence[Message], tools: Sequence[Tool] | None = None
) -> int:
    """The tokens of the flattened prompt and 512 for each image; an estimate, since no tokenizer is
    known here.
    """
    return FlattenedChat.read(messages, tools).estimate_tokens()
