# SPDX-License-Identifier: AGPL-3.0-or-later
"""Every row of the code map resolves: its symbols are defined in the files it lists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "code-map.md"
ROW = re.compile(
    r"^\| (?P<concept>[^|]+) \| (?P<files>`[^|]+`) \| (?P<symbols>[^|]*) \|$", re.MULTILINE
)
CODE = re.compile(r"`([^`]+)`")


def list_rows() -> list[tuple[str, list[str], list[str]]]:
    """(concept, files or SDK module, symbols) of each row."""
    rows = ROW.finditer(PAGE.read_text(encoding="utf-8"))
    return [
        (row["concept"], CODE.findall(row["files"]), CODE.findall(row["symbols"])) for row in rows
    ]


def names_in(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Names that a block defines, each with its own body when it is a class."""
    found: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = []
        elif isinstance(node, ast.Assign):
            found.update({target.id: [] for target in node.targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = []
    return found


@cache
def read_names(path: Path) -> dict[str, list[ast.stmt]]:
    """Names that a file defines."""
    return names_in(ast.parse(path.read_text(encoding="utf-8")).body)


def defines(path: Path, symbol: str) -> bool:
    names = read_names(path)
    head, _, member = symbol.partition(".")
    return head in names and (not member or member in names_in(names[head]))


@cache
def list_sdk_imports() -> set[tuple[str, str]]:
    """(module, name) of what the project imports from the SDK."""
    found: set[tuple[str, str]] = set()
    for path in (ROOT / "horde").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horde_sdk"):
                found.update((node.module or "", alias.name) for alias in node.names)
    return found


def test_the_page_has_rows() -> None:
    assert len(list_rows()) > 40


@pytest.mark.parametrize(("concept", "files", "symbols"), list_rows())
def test_a_row_resolves(concept: str, files: list[str], symbols: list[str]) -> None:
    if files[0].startswith("horde_sdk"):
        imported = list_sdk_imports()
        missing = [symbol for symbol in symbols if (files[0], symbol) not in imported]
    else:
        paths = [ROOT / name for name in files]
        assert all(path.is_file() for path in paths), concept
        modules = [path for path in paths if path.suffix == ".py"]
        missing = [
            symbol for symbol in symbols if not any(defines(path, symbol) for path in modules)
        ]
    assert missing == [], concept
