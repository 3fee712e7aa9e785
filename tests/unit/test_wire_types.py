# SPDX-License-Identifier: AGPL-3.0-or-later
"""What travels as JSON has types: objects and arrays of `Any` stand where a library has none."""

import ast
from collections.abc import Iterator
from pathlib import Path

PRODUCT = Path(__file__).resolve().parents[2] / "horde"

# They hand values to and from libraries that have no types for them.
DRIVERS = {
    *("chat_progress.py", "db.py", "hot_session.py", "postgres.py", "r2.py", "redis_ctrl.py"),
    *("limiter.py", "outbound.py", "runtime.py", "server.py", "telemetry.py"),
}
CONTAINERS = {"dict", "list", "Mapping", "Sequence"}
MOST_UNTYPED = 60


def iter_untyped(module: ast.AST) -> Iterator[int]:
    """The lines with an object or array of `Any`."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            continue
        members = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        is_any = isinstance(members[-1], ast.Name) and members[-1].id == "Any"
        if node.value.id in CONTAINERS and is_any:
            yield node.lineno


def test_objects_and_arrays_of_the_wire_have_types() -> None:
    untyped = [
        f"{path.relative_to(PRODUCT)}:{line}"
        for path in sorted(PRODUCT.rglob("*.py"))
        if path.relative_to(PRODUCT).as_posix() not in DRIVERS
        for line in iter_untyped(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(untyped) < MOST_UNTYPED, untyped
