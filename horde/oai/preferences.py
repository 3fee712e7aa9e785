# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a client prefers, from its `Prefer` headers. Pure. Source: RFC 7240."""

import re
from collections.abc import Sequence
from typing import Final

_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED: Final = r'"(?:[^"\\]|\\.)*"'
# One preference: its name, its value, and parameters, which nothing here has a use for.
_PREFERENCE: Final = re.compile(
    rf"[ \t,]*({_TOKEN})[ \t]*(?:=[ \t]*({_TOKEN}|{_QUOTED}))?"
    rf"[ \t]*((?:;[^,\"]*(?:{_QUOTED}[^,\"]*)*)?)(?:,|$)"
)
_MAX_DIGITS: Final = 9  # a longer number is cut to the ceiling all the same


def parse_wait_seconds(values: Sequence[str], ceiling_seconds: int) -> int | None:
    """Whole seconds that the client would wait, at most the ceiling; None for no such preference.

    `values` are those of all `Prefer` lines, in their order. Of several waits the first counts, as
    the RFC has it. What cannot be read is ignored, since a preference is never an error.
    """
    text = next((value for value in map(_find_wait, values) if value is not None), None)
    if text is None or not text.isascii() or not text.isdigit():
        return None
    digits = text.lstrip("0") or "0"
    seconds = ceiling_seconds if len(digits) > _MAX_DIGITS else int(digits)
    return min(seconds, ceiling_seconds) or None


def _find_wait(line: str) -> str | None:
    """The value of the first `wait` of a line, without its quotes; None without one."""
    place = 0
    while (found := _PREFERENCE.match(line, place)) is not None and found.end() > place:
        name, value = found[1], found[2] or ""
        if name.lower() == "wait":
            return value[1:-1] if value.startswith('"') else value
        place = found.end()
    return None
