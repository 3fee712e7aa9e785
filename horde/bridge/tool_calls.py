# SPDX-License-Identifier: AGPL-3.0-or-later
"""Tool calls, put together from what a backend sends of them.

OpenAI sends each call's id and name once, then its arguments in pieces under the call's ``index``.
Others give every call the same index, or none; repeat the name with each piece, or the whole
arguments at the end; send the arguments as an object; or leave the id out.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from horde.bridge.reasoning import clean_text
from horde.bridge.refusals import UnreadableAnswer, parse_json
from horde.bridge.wire import ToolCall
from horde.json_text import JsonObject, write_document

CALL_ID_CHARACTERS = 256  # the horde's bound, in requests and replies
MAX_CALLS = 128  # the horde's bound


@dataclass(slots=True)
class _Call:
    index: int | None
    call_id: str | None
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are all there, as far as they show it."""
        if not self.pieces or not self.pieces[-1].rstrip().endswith("}"):
            return False  # which spares reading all of it at each piece
        return isinstance(parse_json("".join(self.pieces)), dict)

    def build_arguments(self) -> str:
        """The arguments as a string of JSON; what the model wrote, if it is none."""
        joined = "".join(self.pieces)
        if not joined.strip():
            return "{}"
        value = parse_json(joined)
        if value is None and isinstance(parse_json(self.pieces[-1]), dict):
            return self.pieces[-1]  # each piece, or the last, had all that came before
        if isinstance(value, str) and isinstance(parse_json(value), dict):
            return value  # encoded twice
        return joined


class CallCollector:
    """The calls of one reply, in the order of their indexes.

    ``offered`` are the functions' names.
    """

    def __init__(self, offered: frozenset[str] = frozenset()) -> None:
        self._calls: list[_Call] = []
        self._offered = offered

    def add(self, pieces: tuple[JsonObject, ...]) -> None:
        """Take the calls of one chunk, or pieces of them. Raises ``UnreadableAnswer``."""
        taken: list[_Call] = []
        for piece in pieces:
            function = piece.get("function")
            if function is None:
                function = piece  # flat, as the models write it
            if not isinstance(function, dict):
                raise UnreadableAnswer(f"the function of a call is {type(function).__name__}")
            self._add(piece, function, taken)

    def build_calls(self, *, is_cut: bool) -> list[ToolCall]:
        """The calls in OpenAI's shape, with ids that differ.

        ``is_cut`` when the reply ended at its length: a call whose name never came is then left
        out. Raises ``UnreadableAnswer`` for one that never had a
        name.
        """
        calls = self._calls
        if calls and all(call.index is not None for call in calls):
            calls = sorted(calls, key=lambda call: call.index or 0)
        if is_cut and calls and not calls[-1].name:
            calls = calls[:-1]
        if not all(call.name for call in calls):
            raise UnreadableAnswer("a call without a name")
        built: list[ToolCall] = []
        seen: set[str | None] = set()
        for call in calls:
            call_id = None if call.call_id in seen else call.call_id
            built.append(build_tool_call(clean_text(call.name), call.build_arguments(), call_id))
            seen.add(built[-1]["id"])
        return built

    def _add(
        self, piece: Mapping[str, object], function: Mapping[str, object], taken: list[_Call]
    ) -> None:
        index, call_id = _read_index(piece.get("index")), _read_id(piece)
        name, arguments = function.get("name") or "", _read_arguments(function)
        if not isinstance(name, str):
            raise UnreadableAnswer(f"the name of a call is {type(name).__name__}")
        if not (call_id or name or arguments):
            return

        call = self._find(index, call_id)
        # Of two in one chunk without an index, the second is another call.
        is_next = index is None and any(call is one for one in taken)
        if call is None or is_next or self._begins_another(call, index, call_id, name, arguments):
            if len(self._calls) == MAX_CALLS:
                raise UnreadableAnswer(f"more than {MAX_CALLS} calls")
            call = _Call(index, call_id)
            self._calls.append(call)
        call.call_id = call.call_id or call_id
        if not call.name or (name.startswith(call.name) and not call.pieces):
            call.name = name
        elif name and name != call.name and not call.pieces:
            call.name += name
        if arguments:
            call.pieces.append(arguments)
        taken.append(call)

    def _find(self, index: int | None, call_id: str | None) -> _Call | None:
        """The call that a piece may belong to: that of its id, else the last of its index, else
        the last of all.
        """
        latest = self._calls[::-1]
        of_id = (call for call in latest if call_id is not None and call.call_id == call_id)
        of_index = (call for call in latest if index is None or call.index == index)
        return next(of_id, None) or next(of_index, None)

    def _begins_another(
        self, call: _Call, index: int | None, call_id: str | None, name: str, arguments: str
    ) -> bool:
        """Whether a piece that might go on with this call begins the next one.

        An id of its own does so, but not together with arguments alone that this call still lacks:
        some servers make a new id for every piece. Without ids a name does so, once this call has
        its arguments, or when this call's own name is known to be whole.
        """
        if call_id is not None and call.call_id is not None:
            return call_id != call.call_id and (bool(name) or not arguments or call.is_complete)
        if not name or not call.name:
            return False
        if name == call.name:
            return call.is_complete and bool(arguments)
        return bool(call.pieces) or index is None or call.name in self._offered


def build_tool_call(name: str, arguments: str, call_id: str | None = None) -> ToolCall:
    """A call in OpenAI's shape, with an id of its own unless one is given."""
    return {
        "id": call_id or f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": name, "arguments": clean_text(arguments)},
    }


def _read_index(index: object) -> int | None:
    if isinstance(index, bool):
        return None
    if isinstance(index, float) and index.is_integer():
        return int(index)
    if isinstance(index, str) and index.isdecimal() and len(index) < 10:
        return int(index)
    return index if isinstance(index, int) else None


def _read_id(piece: Mapping[str, object]) -> str | None:
    """The id, if it is one that the horde takes."""
    call_id = piece.get("id")
    if isinstance(call_id, int) and not isinstance(call_id, bool):
        call_id = str(call_id)
    if not isinstance(call_id, str) or not 0 < len(call_id) <= CALL_ID_CHARACTERS:
        return None
    return clean_text(call_id)


def _read_arguments(function: Mapping[str, object]) -> str:
    """The arguments of a piece as text; models also call them parameters or input."""
    keys = ("arguments", "parameters", "input")
    arguments = next((function[key] for key in keys if function.get(key) is not None), "")
    if isinstance(arguments, dict | list):
        return write_document(arguments)
    if not isinstance(arguments, str):
        raise UnreadableAnswer(f"the arguments of a call are {type(arguments).__name__}")
    return arguments
