# SPDX-License-Identifier: AGPL-3.0-or-later
"""The rooms of the code hold what the page on its architecture says: statements in `database`,
transactions in `actions`, files that can be read at a sitting.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ROOT / "horde"
BUILDERS = frozenset({"select", "insert", "update", "delete"})
RUNNERS = frozenset({"execute", "scalar", "scalars"})
OPENERS = frozenset({"transaction", "run_transaction", "reading", "single_statement"})

# The two ways to reach a driver; statements are built and run with them in `database`.
DRIVERS = frozenset({"db.py", "hot_session.py"})
# The code map defines these beside the rows they change.
MAPPED_STATEMENTS = {
    ("classes/base/processing_generation.py", "fault_and_restart"),
    ("classes/base/waiting_prompt.py", "mark_faulted_after_repeated_faults"),
    ("classes/kobold/processing_generation.py", "_RENEW"),
    ("classes/kobold/processing_generation.py", "renew_text_job_ttl"),
    ("classes/kobold/processing_generation.py", "renew_text_job_lease"),
    ("classes/kobold/waiting_prompt.py", "_activate"),
}
# Edges of their own: commands, the clock, the server's start, and the bodies of periodic jobs.
EDGES = ("actions/", "cli/", "background.py", "server.py", "db.py")
JOBS_IN_DATABASE = {
    "database/kudos.py",  # the fold of the ledger
    "database/samples.py",
    "database/suspects.py",  # runs after the commit of what gave rise to it
    "database/threads.py",
    "database/passkeys.py",  # read for a request, before its transaction
}
MAX_LINES = 600
MAX_COLUMNS = 100
# Longer today; a file leaves the list when it is split by topic, and none joins it.
LONG_FILES = {}


def list_modules() -> list[tuple[str, ast.Module]]:
    """(path below horde/, syntax tree) of every module."""
    return [
        (path.relative_to(PRODUCT).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(PRODUCT.rglob("*.py"))
    ]


MODULES = list_modules()


def iter_parts(module: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(name, tree) of each function, method and assignment of a module."""
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                yield getattr(inner, "name", node.name), inner
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node
        else:
            yield getattr(node, "name", ""), node


def find_sqlalchemy_names(module: ast.Module) -> set[str]:
    """The names of statement builders that a module has imported."""
    return {
        alias.asname or alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sqlalchemy")
        for alias in node.names
        if alias.name in BUILDERS
    }


def touches_statements(part: ast.AST, builders: set[str]) -> bool:
    """Whether a part builds a statement, or sends one on a session or a connection."""
    for call in ast.walk(part):
        if not isinstance(call, ast.Call):
            continue
        if isinstance(call.func, ast.Name) and call.func.id in builders:
            return True
        if isinstance(call.func, ast.Attribute) and call.func.attr in RUNNERS:
            owner = call.func.value
            if isinstance(owner, ast.Name | ast.Attribute):
                name = owner.id if isinstance(owner, ast.Name) else owner.attr
                if name.lstrip("_") in {"session", "connection"}:
                    return True
    return False


def list_statement_parts(module: ast.Module) -> list[str]:
    """The names of the parts of a module that build or send statements."""
    builders = find_sqlalchemy_names(module)
    return [name for name, part in iter_parts(module) if touches_statements(part, builders)]


def test_statements_are_built_and_sent_in_database_alone() -> None:
    elsewhere = {
        (path, name)
        for path, module in MODULES
        if not path.startswith("database/") and path not in DRIVERS
        for name in list_statement_parts(module)
    }
    assert elsewhere == MAPPED_STATEMENTS


def test_transactions_are_opened_in_actions_and_at_the_edges_alone() -> None:
    opening = {
        path
        for path, module in MODULES
        if not path.startswith(EDGES)
        for call in ast.walk(module)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", getattr(call.func, "attr", "")) in OPENERS
    }
    assert opening == JOBS_IN_DATABASE


@pytest.mark.parametrize("path", [path for path, _ in MODULES])
def test_a_file_is_short_enough_to_be_read(path: str) -> None:
    count = len((PRODUCT / path).read_text(encoding="utf-8").splitlines())
    assert (count > MAX_LINES) == (path in LONG_FILES)


# The migrations before this one ran on databases that keep their checksums.
FIRST_FILE_OF_SHORT_LINES = "5.1.24"


def test_no_line_is_longer_than_a_screen_is_wide() -> None:
    """Ruff lets a long line pass that ends with an address or a pragma, and knows no SQL."""
    sources = [
        path
        for folder in ("horde", "tests", "devtools", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    statements = [
        path
        for path in (ROOT / "sql_statements").glob("*.txt")
        if parse_version(path.stem) >= parse_version(FIRST_FILE_OF_SHORT_LINES)
    ]
    statements += (ROOT / "sql_statements" / "functions").glob("*.sql")
    assert statements
    assert [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*sources, *statements, ROOT / "dev.py", ROOT / "server.py"]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > MAX_COLUMNS
    ] == []


def parse_version(name: str) -> list[int]:
    """A version as the numbers it is compared by."""
    return [int(part) for part in name.split(".")]


def test_what_is_named_a_check_returns_nothing() -> None:
    """A name that promises a refusal alone hides the value that the caller goes on with."""
    returning = {
        (path, node.name)
        for path, module in MODULES
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and re.match(r"_?(check|verify)_(?!in\b)", node.name)
        and ast.unparse(node.returns or ast.Constant(None)) != "None"
    }
    # The code map fixes the name.
    assert returning == {("classes/kobold/chat_request.py", "verify_chat_reply")}


def test_no_test_is_named_or_explained_by_a_number_of_a_list() -> None:
    numbered = {
        path.relative_to(ROOT).as_posix()
        for folder in ("horde", "tests", "devtools", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\b[UF]-[0-9]{1,2}\b|_[uf][0-9]{2}_", path.read_text(encoding="utf-8"))
    }
    assert numbered == set()


def test_no_import_hides_the_name_of_a_module_of_this_project() -> None:
    """`from horde.x import y as z` sends readers looking for a file that does not exist."""
    hidden = {
        (path, alias.asname)
        for path, module in MODULES
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horde")
        for alias in node.names
        if alias.asname not in {None, alias.name} and is_module(node.module or "", alias.name)
    }
    # Two modules of one name, in files that need both.
    assert hidden == {
        ("app.py", "user_routes"),
        ("database/user_details.py", "shapes"),
        ("oai/app.py", "anthropic_errors"),
    }


def is_module(package: str, name: str) -> bool:
    """Whether a name of a package is a file or folder of this project."""
    place = ROOT / package.replace(".", "/") / name
    return place.is_dir() or place.with_suffix(".py").is_file()


def test_the_table_of_layers_is_that_of_the_imports() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [
        {name.strip().strip("()") for name in layer.split("|")}
        for layer in contracts["contracts"][0]["layers"]
    ]
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    table = page.partition("| Layer |")[2].partition("\n\n")[0]
    rows = [set(re.findall(r"`(\w+)`", line.split(" | ")[0])) for line in table.splitlines()[2:]]
    assert rows[:-1] == layers[:-1]
    assert rows[-1] <= layers[-1]  # small modules, of which it names some


def test_every_file_that_the_way_of_a_request_names_exists() -> None:
    page = ROOT / "docs/explanation/a-request-file-by-file.md"
    named = re.findall(r"`([\w/]+\.py|shapes/)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (PRODUCT / path).exists()] == []
