# SPDX-License-Identifier: AGPL-3.0-or-later
"""Every line of the front's checklist has a test that carries its number."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LAST_LINE = 95
NAMED = re.compile(r"def test_(\d+(?:_(?:and|to)_\d+)*)_")
TABLED = re.compile(r'\(\s*"(\d+) ')  # a row of a table of cases


def list_numbers(words: str) -> set[int]:
    """The lines of a name such as `20_and_26` or `89_to_94`."""
    numbers: set[int] = set()
    for joined in words.split("_and_"):
        first, _, last = joined.partition("_to_")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def test_every_line_has_a_test() -> None:
    covered: set[int] = set()
    for path in TESTS.glob("*/test_chat_front_*.py"):
        source = path.read_text(encoding="utf-8")
        covered |= {number for words in NAMED.findall(source) for number in list_numbers(words)}
        covered |= {int(number) for number in TABLED.findall(source)}
    assert sorted(set(range(1, LAST_LINE + 1)) - covered) == []
