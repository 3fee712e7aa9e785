# SPDX-License-Identifier: AGPL-3.0-or-later
"""Every line of the checklist of Responses has a test that carries its number, and the table of its
keys is the code's.
"""

import re
from pathlib import Path

from horde.oai.responses_form.schema import READERS
from tests.unit.test_chat_front_checklist import NAMED, TABLED, TESTS, list_numbers

# Those of text completions have tests of their own.
LINES = {*range(1, 78), 88, 89, 90}
PAGE = Path(__file__).resolve().parents[2] / "docs/reference/front_responses.md"


def test_every_line_has_a_test() -> None:
    covered: set[int] = set()
    paths = [
        *TESTS.glob("*/test_responses*.py"),
        *TESTS.glob("*/oai/test_responses_*.py"),
        TESTS / "integration/test_chat_front_fuzz.py",
    ]
    for path in paths:
        source = path.read_text(encoding="utf-8")
        covered |= {number for words in NAMED.findall(source) for number in list_numbers(words)}
        covered |= {int(number) for number in TABLED.findall(source)}
    assert sorted(LINES - covered) == []


def test_the_table_of_keys_is_that_of_the_code() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## Request\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    assert sorted(documented) == sorted(READERS)
