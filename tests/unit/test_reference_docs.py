# SPDX-License-Identifier: AGPL-3.0-or-later
"""The reference pages say what the code does: settings with their defaults, instruments, return
codes.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from horde.config import VERSION, Config, FrontConfig
from horde.metrics import DECLARATIONS, Declaration
from horde.return_codes import ReturnCode

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
REQUIRED = {"DATABASE_URL": "postgresql://user:word@host/name", "secret_key": "salt"}


class RecordingEnvironment(dict[str, str]):
    """Notes the names that were asked for."""

    def __init__(self, values: dict[str, str]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, name: str, default: object = None) -> object:  # type: ignore[override]
        self.asked.add(name)
        return super().get(name, default)  # type: ignore[arg-type]


def read_rows(page: str) -> Iterator[list[str]]:
    """The cells of every table row of a page, headers and rules left out."""
    for line in (REFERENCE / page).read_text().splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def read_codes(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_setting_is_documented_and_no_other() -> None:
    documented = {name for row in read_rows("configuration.md") for name in read_codes(row[0])}
    asked: set[str] = set()
    without_address = {name: value for name, value in REQUIRED.items() if name != "DATABASE_URL"}
    for values in (REQUIRED, {**without_address, "POSTGRES_URL": "host/name"}):
        environment = RecordingEnvironment(values)
        Config.from_environment(environment)
        FrontConfig.from_environment(environment)
        asked |= environment.asked
    assert documented == asked


def list_documented_defaults() -> list[tuple[str, str]]:
    return [
        (name, default)
        for row in read_rows("configuration.md")
        for name, default in zip(read_codes(row[0]), read_codes(row[1]), strict=False)
        # Told in words.
        if name not in {"HORDE_LOG_FORMAT", "POSTGRES_URL", "HORDE_VALIDATED_BACKENDS"}
    ]


@pytest.mark.parametrize(("name", "default"), list_documented_defaults())
def test_a_documented_default_is_what_an_unset_variable_means(name: str, default: str) -> None:
    assert Config.from_environment({**REQUIRED, name: default}) == Config.from_environment(REQUIRED)
    assert FrontConfig.from_environment({name: default}) == FrontConfig.from_environment({})


def test_every_instrument_is_documented_as_it_is_declared() -> None:
    documented = {
        read_codes(row[0])[0]: Declaration(
            kind=row[1], unit=row[2], attributes=tuple(read_codes(row[3]))
        )
        for row in read_rows("metrics.md")
    }
    assert documented == DECLARATIONS


def test_every_return_code_is_documented_and_no_other() -> None:
    page = (REFERENCE / "errors.md").read_text()
    codes = page[page.index("## Codes") :]
    documented = [
        code
        for line in codes.splitlines()
        if line.startswith("| `")
        for code in read_codes(line.split(" | ")[0])
    ]
    # `rc` heads the column.
    assert sorted(documented) == sorted(["rc", *(str(code) for code in ReturnCode)])


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
