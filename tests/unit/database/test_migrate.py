# SPDX-License-Identifier: AGPL-3.0-or-later
"""Reading the schema files."""

import re
from pathlib import Path

import pytest

from horde.database.migrate import SQL_FOLDER, SchemaError, list_migrations, parse_migration

SQL = """-- A comment.
CREATE TABLE a (id int);
INSERT INTO a VALUES (1);

-- no-transaction
-- Why this index.
CREATE INDEX CONCURRENTLY one
    ON a (id);

CREATE INDEX CONCURRENTLY two ON a (id) WHERE id > 0;
-- The end.
"""


def test_statements_behind_the_marker_stand_alone() -> None:
    migration = parse_migration("5.1.15", SQL)
    assert (
        migration.transaction.strip()
        == "-- A comment.\nCREATE TABLE a (id int);\nINSERT INTO a VALUES (1);"
    )
    assert migration.separate_statements == (
        "-- Why this index.\nCREATE INDEX CONCURRENTLY one\n    ON a (id)",
        "CREATE INDEX CONCURRENTLY two ON a (id) WHERE id > 0",
    )


def test_without_a_marker_all_is_one_transaction() -> None:
    assert parse_migration("5.1.15", "SELECT 1;\nSELECT 2;\n").separate_statements == ()


def test_files_are_ordered_as_versions(tmp_path: Path) -> None:
    for version in ("5.1.9", "5.1.10", "5.2"):
        (tmp_path / f"{version}.txt").write_text("SELECT 1;\n")
    assert [migration.version for migration in list_migrations(tmp_path)] == [
        "5.1.9",
        "5.1.10",
        "5.2",
    ]


@pytest.mark.parametrize("names", [(), ("later.txt",)])
def test_a_folder_without_versions_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text("SELECT 1;\n")
    with pytest.raises(SchemaError):
        list_migrations(tmp_path)


def test_concurrent_builds_stand_behind_the_marker_and_nothing_else_does() -> None:
    for migration in list_migrations():
        assert "CONCURRENTLY" not in migration.transaction
        assert all(
            re.search(r"CREATE .*CONCURRENTLY IF NOT EXISTS|DROP INDEX CONCURRENTLY IF EXISTS", sql)
            for sql in migration.separate_statements
        )


def test_every_table_is_in_the_reference() -> None:
    reference = (SQL_FOLDER.parent / "docs" / "reference" / "schema.md").read_text()
    for migration in list_migrations():
        for table in re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+)", migration.transaction):
            assert f"`{table}`" in reference
