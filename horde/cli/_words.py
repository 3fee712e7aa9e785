# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the operator's words share: connections, and answers as JSON or as lines for people."""

import argparse
import json
from collections.abc import Callable, Sequence

from pydantic import BaseModel

from horde import r2, redis_ctrl
from horde.cli._operating import run_on_database
from horde.config import Config
from horde.database import users

EXIT_REFUSED = 1
MOST_SHOWN_CHARACTERS = 60

type Facts = dict[str, object]
type Found = Facts | Sequence[Facts]


def add_json_option(*parsers: argparse.ArgumentParser) -> None:
    """Let words print JSON."""
    for parser in parsers:
        parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_reason_option(*parsers: argparse.ArgumentParser) -> None:
    """Let words say why; it is kept in the list of acts."""
    for parser in parsers:
        parser.add_argument("--reason", metavar="TEXT", help="why; kept in the list of acts")


def run_word(
    command: str, args: argparse.Namespace, act: Callable[[], Found], *, uses_keys: bool = False
) -> int:
    """Connect, act as the operator, and print what came of it; the exit code."""

    def work(config: Config) -> int:
        # Running servers learn of a change through it; without it within seconds.
        redis_ctrl.connect(config)
        r2.connect(config)
        users.configure(config)
        found = act()
        print(json.dumps(found) if args.json else describe(found))
        return 0

    return run_on_database(command, work, refused_code=EXIT_REFUSED, uses_keys=uses_keys)


def to_facts(answer: BaseModel) -> Facts:
    """An answer of the API as plain values."""
    return dict(answer.model_dump(mode="json"))


def describe(found: Found) -> str:
    """One line a fact, or one line an entry below the names of the columns."""
    if isinstance(found, dict):
        return "\n".join(f"{name + ':':<18}{_describe_value(found[name])}" for name in found)
    if not found:
        return "none"
    columns = list(found[0])
    cells = [columns, *([_shorten(entry.get(name)) for name in columns] for entry in found)]
    widths = [max(len(row[number]) for row in cells) for number in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _shorten(value: object) -> str:
    text = " ".join(_describe_value(value).split())
    return text if len(text) <= MOST_SHOWN_CHARACTERS else f"{text[: MOST_SHOWN_CHARACTERS - 1]}…"


def _describe_value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_describe_value, value)) or "-"
    return json.dumps(value) if isinstance(value, dict) else str(value)
