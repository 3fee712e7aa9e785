# SPDX-License-Identifier: AGPL-3.0-or-later
"""The items of a reply as they come to be, and the events that tell of it.

Items are opened, continued and closed one after the other, and both the object and the stream are
made of what is here, so that they agree. Source: docs/reference/front_responses.md, "Events".
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from horde.chat.wire import ToolCall
from horde.json_text import JsonObject
from horde.oai.mapping import CompletedReply
from horde.oai.relay import Delta, DeltaKind
from horde.oai.responses_form.tools import ToolSet

type Emit = Callable[[JsonObject], None]
"""Takes one event without its number."""

_PART_TYPES: Final = {DeltaKind.REASONING: "reasoning_text", DeltaKind.CONTENT: "output_text"}


def build_item_id(prefix: str, request_id: str, index: int) -> str:
    """An id that the same item has in the stream, in the object, and when it is referred to."""
    return f"{prefix}_{request_id.replace('-', '')}_{index}"


class OutputWriter:
    """The output of one response. `emit` is told of every event."""

    def __init__(self, request_id: str, tools: ToolSet, emit: Emit) -> None:
        self._request_id, self._tools, self._emit = request_id, tools, emit
        self.items: list[JsonObject] = []  # those that are closed
        self._open: _OpenText | None = None
        self._is_reasoning_over = False

    def add_delta(self, delta: Delta) -> None:
        """Continue a text; reasoning behind content cannot be shown any more."""
        self.add_text(delta.kind, delta.text)

    def add_text(self, kind: DeltaKind, text: str) -> None:
        """Continue the reasoning or the content, opening its item first."""
        if kind is DeltaKind.REASONING and self._is_reasoning_over:
            return
        item = self._require_open(kind)
        if not text:
            return
        item.texts.append(text)
        part = _PART_TYPES[kind]
        event = {"type": f"response.{part}.delta", **item.place, "delta": text}
        self._emit(event | ({"logprobs": []} if kind is DeltaKind.CONTENT else {}))

    def finish(self, reply: CompletedReply, reasoning: str, content: str) -> None:
        """Add what is missing of a reply and close every item."""
        if reasoning:
            self.add_text(DeltaKind.REASONING, reasoning)
        is_empty = reply.finish_reason == "content_filter" and not reply.content
        has_content = reply.content is not None and not (is_empty or reply.tool_calls)
        if content or has_content:
            self.add_text(DeltaKind.CONTENT, content)
        is_cut = reply.finish_reason == "length"
        self._close_text(is_cut=is_cut and not reply.tool_calls)
        for number, call in enumerate(reply.tool_calls, start=1):
            self._add_call(call, is_cut=is_cut and number == len(reply.tool_calls))

    def restore(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Take up what these events told. Calls come with the end, so there are none in them."""
        for event in events:
            kind = event["type"]
            if kind == "response.output_item.done":
                self.items.append(event["item"])
                self._open, self._is_reasoning_over = None, True
            elif kind == "response.output_item.added":
                item_kind = (
                    DeltaKind.REASONING
                    if event["item"]["type"] == "reasoning"
                    else DeltaKind.CONTENT
                )
                self._open = _OpenText(item_kind, self._request_id, event["output_index"])
                self._is_reasoning_over = item_kind is DeltaKind.CONTENT
            elif kind.endswith("_text.delta") and self._open is not None:
                self._open.texts.append(event["delta"])

    def get_text(self, kind: DeltaKind) -> str:
        """All text of a kind."""
        if self._open is not None and self._open.kind is kind:
            return self._open.text
        part = _PART_TYPES[kind]
        return "".join(
            str(entry["text"])
            for item in self.items
            for entry in cast(Sequence[JsonObject], item.get("content", ()))
            if entry["type"] == part
        )

    def list_items(self, status: str) -> list[JsonObject]:
        """All items so far, the open one with this status."""
        if self._open is None:
            return list(self.items)
        return [*self.items, self._open.build(status)]

    def list_incomplete(self) -> list[JsonObject]:
        """All items of a reply that broke off."""
        return [item | {"status": "incomplete"} for item in self.list_items("incomplete")]

    def _require_open(self, kind: DeltaKind) -> "_OpenText":
        if self._open is not None and self._open.kind is kind:
            return self._open
        self._close_text(is_cut=False)
        self._is_reasoning_over = kind is not DeltaKind.REASONING
        item = self._open = _OpenText(kind, self._request_id, len(self.items))
        self._emit(
            {
                "type": "response.output_item.added",
                "output_index": item.index,
                "item": item.build("in_progress", is_bare=True),
            }
        )
        self._emit(
            {"type": "response.content_part.added", **item.place, "part": item.build_part("")}
        )
        return item

    def _close_text(self, *, is_cut: bool) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        self._is_reasoning_over = True
        part, text = _PART_TYPES[item.kind], item.text
        done = {"type": f"response.{part}.done", **item.place, "text": text}
        self._emit(done | ({"logprobs": []} if item.kind is DeltaKind.CONTENT else {}))
        self._emit(
            {
                "type": "response.content_part.done",
                **item.place,
                "part": item.build_part(text),
            }
        )
        self._close(item.index, item.build("incomplete" if is_cut else "completed"))

    def _close(self, index: int, whole: JsonObject) -> None:
        self.items.append(whole)
        self._emit({"type": "response.output_item.done", "output_index": index, "item": whole})

    def _add_call(self, call: ToolCall, *, is_cut: bool) -> None:
        """A call, whose arguments come in one piece."""
        index = len(self.items)
        item, key, kind = self._build_call(call, index)
        bare = item | {"status": "in_progress", key: ""}
        place = {"item_id": item["id"], "output_index": index}
        self._emit({"type": "response.output_item.added", "output_index": index, "item": bare})
        if item[key]:
            self._emit({"type": f"response.{kind}.delta", **place, "delta": item[key]})
        # Older types of the SDK want the name, the newest do not know it.
        named = {"name": item["name"]} if key == "arguments" else {}
        self._emit({"type": f"response.{kind}.done", **place, key: item[key], **named})
        self._close(index, item | {"status": "incomplete" if is_cut else "completed"})

    def _build_call(self, call: ToolCall, index: int) -> tuple[JsonObject, str, str]:
        """The item without its status, the key of what was passed, and the name of its events."""
        function = call["function"]
        tool = self._tools.find(function["name"])
        name = function["name"] if tool is None else tool.name
        within: JsonObject = (
            {"namespace": tool.namespace} if tool is not None and tool.namespace else {}
        )
        common: JsonObject = {"call_id": call["id"], "name": name, **within}
        if tool is not None and tool.is_custom:
            id_ = build_item_id("ctc", self._request_id, index)
            text = parse_custom_input(function["arguments"])
            item: JsonObject = {
                "id": id_,
                "type": "custom_tool_call",
                "status": "",
                **common,
                "input": text,
            }
            return item, "input", "custom_tool_call_input"
        id_ = build_item_id("fc", self._request_id, index)
        arguments = function["arguments"]
        item = {"id": id_, "type": "function_call", "status": "", **common, "arguments": arguments}
        return item, "arguments", "function_call_arguments"


class _OpenText:
    """A reasoning or message item that grows."""

    def __init__(self, kind: DeltaKind, request_id: str, index: int) -> None:
        self.kind, self.index = kind, index
        self.texts: list[str] = []
        self._id = build_item_id("rs" if kind is DeltaKind.REASONING else "msg", request_id, index)
        self.place: JsonObject = {
            "item_id": self._id,
            "output_index": index,
            "content_index": 0,
        }

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def build_part(self, text: str) -> JsonObject:
        if self.kind is DeltaKind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def build(self, status: str, *, is_bare: bool = False) -> JsonObject:
        """The item as it is; a bare one has no content."""
        content = [] if is_bare else [self.build_part(self.text)]
        if self.kind is DeltaKind.REASONING:
            return {
                "id": self._id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
                "status": status,
            }
        return {
            "id": self._id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


def parse_custom_input(arguments: str) -> str:
    """The raw text that a model passed to a free-form tool; arguments of another shape as they are,
    so that the agent sees the fault.
    """
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, str):
        return value
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
