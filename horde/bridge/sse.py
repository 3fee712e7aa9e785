# SPDX-License-Identifier: AGPL-3.0-or-later
"""Server-sent events out of a stream of bytes, also where the sender is not exact about them.

Lines are found in the bytes: a decoder's idea of a line may include U+2028 and others, which JSON
strings carry as they are.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# A chunk holds a token, or a call's arguments, or a whole reply; more is not a stream of chunks.
MAX_EVENT_BYTES = 16 * 1024 * 1024

MAX_EVENT_LINES = 10_000  # of an indented answer; JSON needs one

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FIELDS = frozenset({"data", "error", "event", "id", "retry"})


class EventTooLong(Exception):
    """An event that does not end."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event's data.

    ``is_error`` when the sender marked it as an error, by the event's name or by the field's.
    """

    data: str
    is_error: bool = False


class _Assembler:
    """Puts the lines of one event together."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0
        self._is_error = False

    def add(self, text: str) -> None:
        self._lines.append(text)
        self._size += len(text)
        if self._size > MAX_EVENT_BYTES or len(self._lines) > MAX_EVENT_LINES:
            raise EventTooLong(f"more than {MAX_EVENT_BYTES} bytes without the end of an event")

    def mark_error(self) -> None:
        self._is_error = True

    def is_whole(self) -> bool:
        """Whether a further line would begin the next event: some senders end events by one line
        break instead of two.
        """
        if not self._lines or not self._lines[-1].endswith(("}", "]", "E")):
            return False
        return is_json("\n".join(self._lines))

    def take(self) -> Iterator[Event]:
        """The event, if it has data."""
        if self._lines:
            yield Event("\n".join(self._lines), self._is_error)
        self._lines, self._size, self._is_error = [], 0, False


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, or the mark at the end of OpenAI's streams."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return is_done(text)
    return True


def is_done(data: str) -> bool:
    """Whether an event says that the stream is over."""
    return data.strip(' "[]').upper() == "DONE"


def iter_events(parts: Iterable[bytes]) -> Iterator[Event]:
    """The events with data, comments left out. The last one counts even if its blank line is
    missing.

    A line that is an object of JSON is an event of its own, as in streams of JSON lines. Other
    lines without a field belong to no stream: when no event comes, they are the data of the only
    one, which is how an error page or an indented answer is seen. Raises ``EventTooLong``.
    """
    event, stray = _Assembler(), _Assembler()
    has_events = False
    for line in _iter_lines(parts):
        field, _, value = line.partition(":")
        if not line:
            yield from event.take()
        elif field in _FIELDS:
            if field in ("data", "error"):  # older llama.cpp servers spell an error like this
                if event.is_whole():
                    yield from event.take()
                event.add(value.removeprefix(" "))
                has_events = True
            if field == "error" or (field == "event" and value.strip() == "error"):
                event.mark_error()
        elif line.startswith("{") and is_json(line):
            has_events = True
            yield Event(line)
        elif field and not has_events:
            stray.add(line)
    yield from event.take() if has_events else stray.take()


def _iter_lines(parts: Iterable[bytes]) -> Iterator[str]:
    """The lines, which may end in a line feed, in a carriage return or in both."""
    held = bytearray()
    is_first = True
    for part in parts:
        searched = max(len(held) - 1, 0)  # a carriage return at the end may be half of a line end
        held += part
        start = 0
        while (end := _LINE_END.search(held, max(start, searched))) is not None:
            if end[0] == b"\r" and end.end() == len(held):
                break
            yield _decode(held[start : end.start()], is_first)
            start, is_first = end.end(), False
        del held[:start]
        if len(held) > MAX_EVENT_BYTES:
            raise EventTooLong(f"more than {MAX_EVENT_BYTES} bytes without the end of a line")
    if held:
        yield _decode(held.removesuffix(b"\r"), is_first)


def _decode(line: bytes | bytearray, is_first: bool) -> str:
    if is_first:
        line = line.removeprefix(_BYTE_ORDER_MARK)
    return line.decode("utf-8", "replace")
