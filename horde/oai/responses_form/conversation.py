# SPDX-License-Identifier: AGPL-3.0-or-later
"""Items in their order become messages, in the order that chat asks for.

Chat answers each call at once behind the message that made it; items may come in any order that
agents produce. Each message keeps the path of its item, so that what the horde says about a message
is said about the item. Source: docs/reference/front_responses.md, "Order".
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused
from horde.oai.responses_form.items import (
    CallItem,
    Item,
    MessageItem,
    OutputItem,
    ReferenceItem,
)

MAX_SHOWN_IDS: Final = 10  # of calls without an output


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of chat, and the client's path of each; of one that is made of parts of several
    items, by its place, also the path of each part.
    """

    messages: list[JsonObject]
    paths: tuple[str, ...]
    part_paths: Mapping[int, Sequence[str]]


def build_conversation(instructions: str | None, items: Iterable[Item | None]) -> Conversation:
    """The messages of an input whose references were resolved. Raises RequestRefused for a call or
    an output that stands alone.
    """
    writer = _Writer()
    if instructions:
        writer.put("instructions", {"role": "system", "content": instructions})
    for item in items:
        match item:
            case MessageItem():
                writer.add_message(item)
            case CallItem():
                writer.add_call(item)
            case OutputItem():
                writer.add_output(item)
            case ReferenceItem():
                raise AssertionError("a reference was not resolved")
            case None:
                pass
    writer.close_group()
    return Conversation(writer.messages, tuple(writer.paths), writer.part_paths)


@dataclass(slots=True)
class _Group:
    """Calls of one message and what they brought; what came between waits behind them."""

    calls: dict[str, CallItem] = field(default_factory=dict)  # by their id
    outputs: dict[str, OutputItem] = field(default_factory=dict)  # the same
    deferred: list[MessageItem] = field(default_factory=list)

    @property
    def is_answered(self) -> bool:
        return len(self.outputs) == len(self.calls)


class _Writer:
    def __init__(self) -> None:
        self.messages: list[JsonObject] = []
        self.paths: list[str] = []
        self.part_paths: dict[int, list[str]] = {}
        self._group: _Group | None = None

    def put(self, path: str, message: JsonObject) -> None:
        self.messages.append(message)
        self.paths.append(path)

    def add_message(self, item: MessageItem) -> None:
        """A message, or one that waits for the outputs of calls before it."""
        if self._group is not None and not self._group.is_answered:
            self._group.deferred.append(item)
            return
        self.close_group()
        self.put(item.path, {"role": item.role, "content": item.content})

    def add_call(self, item: CallItem) -> None:
        """One more call of the assistant's message, or the first of another one."""
        if self._group is not None and self._group.is_answered:
            self.close_group()
        if self._group is None:
            self._group = _Group()
        if item.call_id in self._group.calls:
            raise _mismatch(item.path, f"the call id '{item.call_id}' is there twice")
        self._group.calls[item.call_id] = item

    def add_output(self, item: OutputItem) -> None:
        """What a call of the open message brought."""
        group = self._group or _Group()
        if item.call_id not in group.calls:
            raise _mismatch(item.path, f"no call before it has the id '{item.call_id}'")
        if item.call_id in group.outputs:
            raise _mismatch(item.path, f"the call '{item.call_id}' has an output already")
        group.outputs[item.call_id] = item

    def close_group(self) -> None:
        """Write the open calls with their outputs. Raises RequestRefused for one without."""
        group, self._group = self._group, None
        if group is None:
            return
        if not group.is_answered:
            raise _unanswered([id_ for id_ in group.calls if id_ not in group.outputs])
        self._put_calls(list(group.calls.values()))
        outputs = [group.outputs[call_id] for call_id in group.calls]
        for output in outputs:
            self.put(
                output.path,
                {"role": "tool", "tool_call_id": output.call_id, "content": output.text},
            )
        self._put_images([output for output in outputs if output.images])
        for message in group.deferred:
            self.put(message.path, {"role": message.role, "content": message.content})

    def _put_calls(self, calls: Sequence[CallItem]) -> None:
        """On the assistant's message right before them, else on one of their own."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or "tool_calls" in last:
            last = {"role": "assistant", "content": None}
            self.put(calls[0].path, last)
        last["content"] = last["content"] or None
        last["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]

    def _put_images(self, outputs: Sequence[OutputItem]) -> None:
        """A tool's message holds text only, so its images follow in one of the user."""
        if not outputs:
            return
        parts: list[JsonObject] = []
        paths = self.part_paths[len(self.messages)] = []
        for output in outputs:
            text = f"Images of the output of call {output.call_id}:"
            parts += [{"type": "text", "text": text}, *output.images.values()]
            paths += [output.path, *output.images]
        self.put(outputs[0].path, {"role": "user", "content": parts})


def _unanswered(call_ids: Sequence[str]) -> RequestRefused:
    shown = ", ".join(call_ids[:MAX_SHOWN_IDS])
    message = f"Invalid value: 'input' has no output for the calls {shown}."
    return RequestRefused("invalid_value", message, "input")


def _mismatch(path: str, reason: str) -> RequestRefused:
    return RequestRefused(
        "invalid_value", f"Invalid value: '{path}.call_id': {reason}.", f"{path}.call_id"
    )
