# SPDX-License-Identifier: AGPL-3.0-or-later
"""The reference pages say what the code does: settings with their defaults, instruments, return
codes.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from horde.cli.config import SETTINGS
from horde.config import VERSION, Config
from horde.database.addresses import build_timeout_message
from horde.front_config import FrontConfig
from horde.metrics import DECLARATIONS, Declaration
from horde.remedies import REMEDIES, add_remedy
from horde.return_codes import ReturnCode
from horde.settings import iter_settings

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
REQUIRED = {"DATABASE_URL": "postgresql://user:word@host/name", "secret_key": "salt"}


def read_rows(page: str) -> Iterator[list[str]]:
    """The cells of every table row of a page, headers and rules left out."""
    for line in (REFERENCE / page).read_text().splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def read_codes(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def test_every_setting_is_documented_with_its_bounds_and_no_other() -> None:
    documented = {
        name: row[2] for row in read_rows("configuration.md") for name in read_codes(row[0])
    }
    settings = dict(iter_settings(*SETTINGS))
    assert documented.keys() == settings.keys()
    for row in read_rows("configuration.md"):
        bounds = dict.fromkeys(settings[name] for name in read_codes(row[0]))
        assert row[2] == "; ".join(bounds)


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


def test_every_return_code_says_what_to_do_in_the_table_and_in_its_message() -> None:
    """A refusal names the remedy."""
    rows = [row for row in read_rows("errors.md") if not row[0].startswith("`message`")]
    remedies = {code: row[3] for row in rows if len(row) == 4 for code in read_codes(row[0])}
    assert set(remedies) - {"rc"} == {str(code) for code in ReturnCode}
    for code in ReturnCode:
        told = add_remedy("No.", code).removeprefix("No.").strip().rstrip(".")
        assert re.sub(r"'(\w+)'", r"`\1`", told) in remedies[code]
        assert len(remedies[code]) > 4


# What the messages of codes without a common sentence have to say by themselves.
TOLD_BY_MESSAGES = {
    ReturnCode.FORBIDDEN: "Delete one|Use the key|Register an account|moderator",
    ReturnCode.MAINTENANCE_MODE: "try again later",
    ReturnCode.TIMEOUT_IP: "",  # held below, since its text has a function of its own
    ReturnCode.UNSAFE_IP: "Connect without it",
    ReturnCode.TOO_MANY_NEW_IPS: "Try again later",
    ReturnCode.INVALID_PRIORITY_USERNAME: "name#id",
    ReturnCode.LOCKED: "maintenance and try again",
    ReturnCode.UNSUPPORTED_CHAT_PARAMETER: "",  # each names the key and the rule
    ReturnCode.CHAT_REQUEST_CONFLICT: "cannot be combined|only allowed|have to|has to|must",
    ReturnCode.CHAT_KUDOS_CAP_EXCEEDED: "horde.max_kudos.*max_tokens",
    ReturnCode.NO_ELIGIBLE_WORKER: "the model|any of the models|allow slow workers",
    ReturnCode.CHAT_DECLARATION_INVALID: "has to|have to|needs|cannot|only on",
    ReturnCode.CHAT_SUBMIT_INVALID: "needs|has to|have|not among|cannot carry|may hold",
    ReturnCode.CHAT_SUBMIT_NONCONFORMANT: "Raise|has to|needs|cannot|does not match",
    ReturnCode.CHAT_MODEL_MISMATCH: "'model_id' has to be",
    ReturnCode.CHAT_JOB_ABORTED: "Stop generating",
    ReturnCode.CHAT_PROGRESS_NOT_STREAMING: "submit the reply",
    ReturnCode.CHAT_PROGRESS_OUT_OF_SEQUENCE: "Expected seq",
    ReturnCode.CHAT_PROGRESS_CAP_REACHED: "submit the reply",
    ReturnCode.CHAT_PROGRESS_UNAVAILABLE: "Submit the reply",
}


def collect_text(function: ast.FunctionDef) -> str:
    """Every string of a function but its docstring."""
    texts = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\n".join(text for text in texts if text != ast.get_docstring(function, clean=False))


def list_functions_that_refuse() -> Iterator[tuple[ReturnCode, str, str]]:
    """(code, name, its strings) of each function that names the code of a refusal.

    A helper that is given its message stands for those that call it.
    """
    functions = [
        (path, node, [call for call in ast.walk(node) if isinstance(call, ast.Call)])
        for path in sorted((ROOT / "horde").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    callers: dict[str, list[tuple[Path, ast.FunctionDef]]] = {}
    for path, function, calls in functions:
        for name in {getattr(call.func, "id", "") for call in calls}:
            callers.setdefault(name, []).append((path, function))
    for path, function, calls in functions:
        codes = {
            ReturnCode[argument.attr]
            for call in calls
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]
            if isinstance(argument, ast.Attribute)
            and getattr(argument.value, "id", "") == "ReturnCode"
        }
        is_helper = bool({"message", "detail"} & {given.arg for given in function.args.args})
        tellers = [
            other
            for other_path, other in callers.get(function.name, [])
            if is_helper and (path == other_path or not function.name.startswith("_"))
        ]
        for code in codes:
            yield from (
                (code, teller.name, collect_text(teller)) for teller in tellers or [function]
            )


def test_messages_of_codes_without_a_common_sentence_say_what_to_do_by_themselves() -> None:
    assert set(TOLD_BY_MESSAGES) | set(REMEDIES) == set(ReturnCode) - {
        ReturnCode.BAD_REQUEST,  # each names what is wrong with the body
        ReturnCode.CHAT_WORKER_FAULT,  # no refusal
    }
    told = [
        (code, name, text)
        for code, name, text in list_functions_that_refuse()
        if code in TOLD_BY_MESSAGES
    ]
    assert {code for code, _, _ in told} >= set(TOLD_BY_MESSAGES) - {ReturnCode.FORBIDDEN}
    silent = [
        (str(code), name)
        for code, name, text in told
        if not re.search(TOLD_BY_MESSAGES[code], text, re.DOTALL)
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("seconds", "advice"), [(30, "another 30 seconds"), (10**7, "Contact the operators")]
)
def test_an_address_in_timeout_is_told_how_long_or_whom_to_ask(seconds: int, advice: str) -> None:
    assert advice in build_timeout_message(seconds, for_worker=False)


def test_every_error_of_the_front_says_what_to_do() -> None:
    page = (REFERENCE / "chat_front.md").read_text()
    tables = page[page.index("### Before queueing") : page.index("## Models")]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in tables.splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) > 50
    assert [row[0] for row in rows if len(row) != 4 or len(row[3]) < 5] == []
