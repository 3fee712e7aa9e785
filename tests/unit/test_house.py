# SPDX-License-Identifier: AGPL-3.0-or-later
"""The rooms of the code hold what the page on its architecture says: statements in `database`,
transactions in `actions`, files that can be read at a sitting.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
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


# Bounds of the machine, which are one for the process whatever runs in it, and what modules
# declare when they are imported, which no configuration changes.
MODULE_STATE = {
    ("classes/kobold/reply_schema.py", "_pool"),  # helper processes
    ("hot_session.py", "_kept"),  # statements, compiled once
    ("image.py", "_decoders"),  # helper processes
    ("metrics.py", "DECLARATIONS"),
    ("metrics.py", "_gauge_sources"),  # the meter is the process's; the last one set is read
    ("outbound.py", "_resolving"),  # names looked up at a time
}
HOLDERS = frozenset(
    {"Condition", "Counter", "Event", "Lock", "RLock", "BoundedSemaphore", "Semaphore", "local"}
    | {"Thread", "ThreadPoolExecutor", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
    | {"OrderedDict", "bytearray", "count", "cycle", "defaultdict", "deque", "dict", "list", "set"}
)
# What they hold belongs to the runtime.
DECLARED = frozenset({"Part", "SharedAnswers", "TimedCache"})


def is_changing(made: ast.ClassDef) -> bool:
    """Whether an object of a class is one whose attributes are set after it was made."""
    decorators = [ast.unparse(decorator) for decorator in made.decorator_list]
    if any("dataclass" in decorator for decorator in decorators):
        return not any("frozen=True" in decorator for decorator in decorators)
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        for node in ast.walk(made)
    )


def list_classes(module: ast.Module, *, changing: bool) -> set[str]:
    """The names of a module's classes whose objects change, or of those whose objects do not."""
    classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    return {made.name for made in classes if is_changing(made) == changing}


CHANGING = HOLDERS.union(*(list_classes(module, changing=True) for _, module in MODULES)) - DECLARED


def holds_state(target: ast.expr, value: ast.expr, holders: AbstractSet[str]) -> bool:
    """Whether a module's assignment makes something that is changed later: an object that holds
    state, an empty collection, or one that is not named as a constant.
    """
    if isinstance(value, ast.Call):
        called = value.func.value if isinstance(value.func, ast.Subscript) else value.func
        return getattr(called, "id", getattr(called, "attr", "")) in holders
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        is_empty = not ast.unparse(value).strip("{}[]")
        return is_empty or not ast.unparse(target).isupper()
    return False


def test_a_module_holds_no_state_but_in_parts_of_a_runtime() -> None:
    """Two applications of one process would share it otherwise, whatever their configurations."""
    assert {"HelperPool", "_NeedsOfClasses", "_SeenQueue"} <= CHANGING
    held = {
        (path, ast.unparse(target))
        for path, module in MODULES
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if holds_state(target, node.value, CHANGING - list_classes(module, changing=False))
    }
    assert held == MODULE_STATE
    rebound = {
        path
        for path, module in MODULES
        for node in ast.walk(module)
        if isinstance(node, ast.Global)
    }
    assert rebound == set()


# `functools.cache` at a module keeps what its arguments alone decide: statements by the names of
# their columns, parsed texts, what files of the project say.
MEMOS = {
    ("apis/requests.py", "_parse_short_address"),
    ("database/check_ins.py", "build_worker_update"),
    ("database/moderation.py", "_list_plain_letters"),
    ("database/moderation.py", "list_nsfw_model_rules"),
    ("database/settlements.py", "_build_reply_of_fake"),
    ("database/text_requests.py", "_build_insert"),
    ("hot_session.py", "keep_insert"),
    ("ip_subject.py", "build_ip_subject"),
    ("limiter.py", "_parse_limits"),
    ("oai/mapping.py", "build_system_fingerprint"),
    ("outbound.py", "_get_tls_context"),
    ("redis_ctrl.py", "_name_script"),
    ("settings.py", "_build_reader"),
    ("settings.py", "describe_settings"),
}


def test_what_a_module_remembers_of_calls_is_decided_by_their_arguments() -> None:
    remembered = {
        (path, node.name)
        for path, module in MODULES
        for node in module.body
        if isinstance(node, ast.FunctionDef)
        and any(
            re.match(r"(functools\.)?(lru_)?cache\b", ast.unparse(decorator))
            for decorator in node.decorator_list
        )
    }
    assert remembered == MEMOS


def test_every_file_that_the_way_of_a_request_names_exists() -> None:
    page = ROOT / "docs/explanation/a-request-file-by-file.md"
    named = re.findall(r"`([\w/]+\.py|shapes/)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (PRODUCT / path).exists()] == []
