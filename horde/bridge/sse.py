# SPDX-License-Identifier: AGPL-3.0-or-later
"""Server-sent events out of a stream of bytes.

Lines are found in the bytes: a decoder's idea of a line may include U+2028 and others, which JSON
strings carry as they are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# A chunk holds a token, or a call's arguments; more is not a stream of chunks.
MAX_EVENT_BYTES = 4 * 1024 * 1024


class EventTooLong(Exception):
    """An event that does not end."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event's data. ``is_error`` when the sender marked it as an error, by the event's name or
    by the field's.
    """

    data: str
    is_error: bool = False


def iter_events(parts: Iterable[bytes]) -> Iterator[Event]:
    """The events with data, comments left out. The last one counts even if its blank line is
    missing.

    Raises ``EventTooLong``.
    """
    data: list[str] = []
    is_error = False
    for line in _iter_lines(parts):
        if not line:
            if data:
                yield Event("\n".join(data), is_error)
            data, is_error = [], False
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field in ("data", "error"):  # the second is how older llama.cpp servers spell an error
            data.append(value)
        is_error = is_error or field == "error" or (field == "event" and value == "error")
    if data:
        yield Event("\n".join(data), is_error)


def _iter_lines(parts: Iterable[bytes]) -> Iterator[str]:
    held = bytearray()
    for part in parts:
        start = len(held)
        held += part
        while (end := held.find(b"\n", start)) >= 0:
            yield held[:end].removesuffix(b"\r").decode("utf-8", "replace")
            del held[: end + 1]
            start = 0
        if len(held) > MAX_EVENT_BYTES:
            raise EventTooLong(f"more than {MAX_EVENT_BYTES} bytes without the end of a line")
    if held:
        yield held.decode("utf-8", "replace")
