# SPDX-License-Identifier: AGPL-3.0-or-later
"""Every line of the messages form's checklist has a test that carries its number, and the table of
its keys is the code's.
"""

import re
from pathlib import Path

from horde.oai.anthropic.keys import READERS
from tests.unit.test_chat_front_checklist import NAMED, TESTS, list_numbers

LAST_LINE = 80
PAGE = Path(__file__).resolve().parents[2] / "docs/reference/front_messages.md"


def test_every_line_has_a_test() -> None:
    covered: set[int] = set()
    for path in TESTS.glob("*/test_messages_front_*.py"):
        source = path.read_text(encoding="utf-8")
        covered |= {number for words in NAMED.findall(source) for number in list_numbers(words)}
    assert sorted(set(range(1, LAST_LINE + 1)) - covered) == []


def test_the_table_of_keys_is_that_of_the_code() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n### Keys\n")[1].split("\n### ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    assert sorted(documented) == sorted(READERS)
