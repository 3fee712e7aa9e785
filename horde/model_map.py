# SPDX-License-Identifier: AGPL-3.0-or-later
"""An operator's table of model names: what programs ask for, and what is served instead.

Agents ask for models that no worker of a horde has. Source: docs/reference/front_messages.md,
"Model names".
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

MAX_TARGET_COUNT: Final = 5  # as many models as one request may list
MAX_ENTRY_COUNT: Final = 1000
MAX_NAME_CHARACTERS: Final = 255
ANY: Final = "*"  # any run of characters


@dataclass(frozen=True, slots=True)
class ModelMap:
    """Patterns and their targets, in order: the first pattern that matches a whole name counts."""

    entries: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """A table from JSON, `[["claude-haiku-*", "small/model"], …]`, or from the file whose path
        stands behind an `@`. Raises ValueError, also for a file that cannot be read.
        """
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text(encoding="utf-8")
            except OSError:
                raise ValueError from None
        try:
            rows = json.loads(text)
        except RecursionError:
            raise ValueError from None
        if not isinstance(rows, list) or len(rows) > MAX_ENTRY_COUNT:
            raise ValueError
        return cls(tuple(map(_parse_entry, rows)))

    def find(self, name: str) -> tuple[str, ...] | None:
        """The targets of a name; None when no pattern matches."""
        return next((targets for pattern, targets in self.entries if _matches(pattern, name)), None)

    def find_exactly(self, name: str) -> tuple[str, ...] | None:
        """The targets of the first entry that is this very name."""
        return next((targets for pattern, targets in self.entries if pattern == name), None)

    def iter_aliases(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The entries that stand for one name each, of a repeated one the first."""
        seen: set[str] = set()
        for pattern, _ in self.entries:
            found = self.find(pattern)
            if ANY not in pattern and pattern not in seen and found is not None:
                seen.add(pattern)
                yield pattern, found


NO_NAMES: Final = ModelMap()


def _parse_entry(row: object) -> tuple[str, tuple[str, ...]]:
    if not isinstance(row, list) or len(row) != 2:
        raise ValueError
    pattern, target = row
    targets = target if isinstance(target, list) else [target]
    if not all(map(_is_name, [pattern, *targets])):
        raise ValueError
    if not 1 <= len(targets) <= MAX_TARGET_COUNT or len(set(targets)) != len(targets):
        raise ValueError
    return pattern, tuple(targets)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME_CHARACTERS and value.isprintable()


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a whole name. Name by name from the left, so that no name takes
    long, whatever it is.
    """
    head, *rest = pattern.split(ANY)
    if not rest:
        return pattern == name
    *middle, tail = rest
    if not name.startswith(head):
        return False
    place = len(head)
    for piece in middle:
        place = name.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return name.endswith(tail) and len(name) - len(tail) >= place
