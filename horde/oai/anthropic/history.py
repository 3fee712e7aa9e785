# SPDX-License-Identifier: AGPL-3.0-or-later
"""The system prompt and the messages of a body, as the messages of a chat request.

Chat has one system message, answers of tools in messages of their own, and templates that insist
on turns that alternate. Source: docs/reference/front_messages.md, "Messages".
"""

from dataclasses import dataclass, field
from typing import Final

from horde.chat.flattening import check_text_size, count_image_parts, count_text_bytes
from horde.chat.wire import ContentPart, Message
from horde.chat_contract import (
    MAX_CHAT_IMAGE_COUNT,
    MAX_CHAT_MESSAGE_COUNT,
    MAX_CHAT_TOOL_CALL_COUNT,
)
from horde.json_text import JsonObject
from horde.oai.anthropic.blocks import Pieces, read_content, read_texts
from horde.oai.anthropic.refusals import (
    check_members,
    missing,
    refuse,
    require_list,
    require_object,
    require_string,
    show,
    unsupported,
)
from horde.oai.errors import RequestRefused

BILLING_PREFIX: Final = "x-anthropic-billing-header:"
SYSTEM_PATH: Final = "system"
# Of a whole reply that was appended by mistake.
_REPLY_KEYS: Final = (
    *("id", "type", "model", "stop_reason", "stop_sequence", "stop_details"),
    *("usage", "container", "x_horde"),
)


@dataclass(slots=True)
class _Turn:
    """Neighbouring messages of one role; `path` is that of the first, `index` its place."""

    role: str
    path: str
    pieces: Pieces


@dataclass(slots=True)
class History:
    """Chat messages, and for each the path of the client's message it came from.

    `refused_characters` is the size of what an estimate counts though it would be refused.
    """

    messages: list[Message] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    refused_characters: int = 0

    def add(self, message: Message, origin: str) -> None:
        """Put one more message behind."""
        self.messages.append(message)
        self.origins.append(origin)


def parse_system(value: object) -> str:
    """The system prompt without the line by which an agent accounts for its calls, which differs
    from call to call. Raises RequestRefused.
    """
    texts = read_texts(value, SYSTEM_PATH)
    if not isinstance(value, str):
        texts = [text for text in texts if not text.startswith(BILLING_PREFIX)]
    return _join_paragraphs(texts)


def _join_paragraphs(texts: list[str]) -> str:
    return "\n\n".join(text for text in texts if text.strip())


def parse_history(system: str, value: object, *, is_estimate: bool) -> History:
    """The messages to submit. Raises RequestRefused, or ChatRequestRefused of shared limits."""
    entries = require_list(value, "messages")
    if not entries:
        raise refuse("messages", "at least one message is required")
    if len(entries) > MAX_CHAT_MESSAGE_COUNT:
        raise _too_many_messages()
    texts = [system]
    turns = _read_turns(entries, texts, is_estimate=is_estimate)
    _check_pairs(turns)
    history = History(refused_characters=sum(turn.pieces.refused_characters or 0 for turn in turns))
    if prompt := _join_paragraphs(texts):
        history.add({"role": "system", "content": prompt}, SYSTEM_PATH)
    for turn in turns:
        (_add_user if turn.role == "user" else _add_assistant)(history, turn)
    if not turns:
        raise refuse("messages", "at least one message is required")
    _check_limits(history.messages)
    return history


def _too_many_messages() -> RequestRefused:
    message = f"List should have at most {MAX_CHAT_MESSAGE_COUNT} items"
    return unsupported("messages", message)


def _check_limits(messages: list[Message]) -> None:
    if len(messages) > MAX_CHAT_MESSAGE_COUNT:
        raise _too_many_messages()
    check_text_size(count_text_bytes(messages))
    if count_image_parts(messages) > MAX_CHAT_IMAGE_COUNT:
        message = f"a request may carry at most {MAX_CHAT_IMAGE_COUNT} images"
        raise refuse("messages", message, "too_many_images")


# --- turns
# --------------------------------------------------------------------------------------------------


def _read_turns(entries: list[object], system: list[str], *, is_estimate: bool) -> list[_Turn]:
    """The turns, whose roles alternate; system messages before the first go to `system`."""
    turns: list[_Turn] = []

    def open_turn(role: str, path: str) -> Pieces:
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role, path, Pieces(refused_characters=0 if is_estimate else None)))
        return turns[-1].pieces

    has_begun = False
    for index, entry in enumerate(entries):
        path = f"messages.{index}"
        message = require_object(entry, path)
        role = _require_role(message, path)
        if role == "system":
            text = _join_paragraphs(read_texts(message.get("content"), f"{path}.content"))
            if not has_begun:
                system.append(text)
            elif text:
                open_turn("user", path).add_text(f"<system>\n{text}\n</system>")
            continue
        has_begun = True
        content, found = (
            message.get("content"),
            Pieces(refused_characters=0 if is_estimate else None),
        )
        if content is None:
            raise missing(f"{path}.content")
        read_content(content, role, f"{path}.content", found)
        for text in found.compactions:
            open_turn("user", path).add_text(text)
        # An assistant's message that says nothing is left out; a user's keeps its place.
        if role == "user" or found.parts or found.calls or found.refused_characters:
            _join(open_turn(role, path), found)
    return turns


def _require_role(message: JsonObject, path: str) -> str:
    role = require_string(message.get("role"), f"{path}.role")
    if role not in ("user", "assistant", "system"):
        raise unsupported(
            f"{path}.role", f"Input should be 'user' or 'assistant', not '{show(role)}'"
        )
    check_members(message, ("role", "content", *_REPLY_KEYS), path)
    return role


def _join(pieces: Pieces, found: Pieces) -> None:
    pieces.parts += found.parts
    pieces.calls += found.calls
    pieces.call_paths += found.call_paths
    pieces.results += found.results
    pieces.images += found.images
    if pieces.refused_characters is not None:
        pieces.refused_characters += found.refused_characters or 0


# --- calls and their answers
# --------------------------------------------------------------------------------


def _check_pairs(turns: list[_Turn]) -> None:
    """Each call is answered once, in the next user's turn, by its id. Raises RequestRefused."""
    issued: dict[str, None] = {}
    caller: _Turn | None = None
    for turn in turns:
        unanswered = dict(issued)
        for result in turn.pieces.results:
            if result.call_id not in issued:
                message = (
                    f"unexpected tool_use_id '{show(result.call_id)}': the previous assistant"
                    " message has no tool_use block with this id"
                )
                raise refuse(result.path, message)
            if result.call_id not in unanswered:
                message = f"a second tool_result for the id '{show(result.call_id)}'"
                raise refuse(result.path, message)
            del unanswered[result.call_id]
        if unanswered and caller is not None:
            raise _unanswered(caller, unanswered)
        issued, caller = _collect_calls(turn), turn
    if issued and caller is not None:
        raise _unanswered(caller, issued)


def _collect_calls(turn: _Turn) -> dict[str, None]:
    ids: dict[str, None] = {}
    for call, path in zip(turn.pieces.calls, turn.pieces.call_paths, strict=True):
        if call["id"] in ids:
            raise refuse(path, f"tool_use ids must be unique: '{show(call['id'])}' is repeated")
        ids[call["id"]] = None
    if len(ids) > MAX_CHAT_TOOL_CALL_COUNT:
        message = f"a message may hold at most {MAX_CHAT_TOOL_CALL_COUNT} tool_use blocks"
        raise unsupported(turn.path, message)
    return ids


def _unanswered(caller: _Turn, ids: dict[str, None]) -> RequestRefused:
    message = (
        "tool_use ids were found without tool_result blocks in the next user message:"
        f" {show(', '.join(ids))}"
    )
    return refuse(caller.path, message)


# --- turns as messages
# --------------------------------------------------------------------------------------


def _add_user(history: History, turn: _Turn) -> None:
    pieces = turn.pieces
    for result in pieces.results:
        history.add(
            {"role": "tool", "content": result.text, "tool_call_id": result.call_id}, result.path
        )
    parts: list[ContentPart] = [*pieces.images, *pieces.parts]
    if parts or not pieces.results:
        history.add({"role": "user", "content": _join_parts(parts)}, turn.path)


def _add_assistant(history: History, turn: _Turn) -> None:
    pieces = turn.pieces
    if not pieces.parts and not pieces.calls:
        return
    content = _join_parts(pieces.parts) if pieces.parts else None
    message: Message = {"role": "assistant", "content": content}
    if pieces.calls:
        message["tool_calls"] = pieces.calls
    history.add(message, turn.path)


def _join_parts(parts: list[ContentPart]) -> str | list[ContentPart]:
    """One text when there is nothing else."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(texts) if len(texts) == len(parts) else parts
