# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a stretch of work cost: CPU of process trees, statements and commits of the database."""

import os
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2
from psycopg2 import sql

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# Utility statements are told apart by their text, which pg_stat_statements keeps as the driver sent
# it.
_COUNTS = """
    SELECT
        coalesce(sum(calls) FILTER (
            WHERE upper(query) NOT IN ('COMMIT', 'ROLLBACK') AND upper(query) NOT LIKE 'BEGIN%'
        ), 0)::bigint,
        coalesce(sum(calls) FILTER (WHERE upper(query) = 'COMMIT'), 0)::bigint,
        coalesce(sum(calls) FILTER (WHERE upper(query) = 'ROLLBACK'), 0)::bigint
    FROM pg_stat_statements
    WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND toplevel
"""


_HEAVIEST = """
    SELECT calls, mean_plan_time, mean_exec_time, left(regexp_replace(query, '\\s+', ' ', 'g'), 100)
    FROM pg_stat_statements
    WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()) AND toplevel
    ORDER BY total_plan_time + total_exec_time DESC LIMIT %s
"""


@dataclass(frozen=True)
class Statement:
    """A statement's figures; times in milliseconds of Postgres, the planner's zero unless it was
    asked for.
    """

    calls: int
    plan_ms: float
    execution_ms: float
    text: str


@dataclass(frozen=True)
class Costs:
    """Totals since the start; the difference of two is what happened between. CPU in seconds of all
    cores.
    """

    api_cpu: float
    postgres_cpu: float
    client_cpu: float
    statements: int | None
    commits: int | None
    rollbacks: int | None

    def since(self, earlier: "Costs") -> "Costs":
        """What was added after `earlier`."""

        def subtract(now: int | None, then: int | None) -> int | None:
            return None if now is None or then is None else now - then

        return Costs(
            api_cpu=self.api_cpu - earlier.api_cpu,
            postgres_cpu=self.postgres_cpu - earlier.postgres_cpu,
            client_cpu=self.client_cpu - earlier.client_cpu,
            statements=subtract(self.statements, earlier.statements),
            commits=subtract(self.commits, earlier.commits),
            rollbacks=subtract(self.rollbacks, earlier.rollbacks),
        )


class Meter:
    """Reads the totals. Its own statements are not counted."""

    def __init__(self, database_url: str, api_process_id: int) -> None:
        self.api_process_id = api_process_id
        self.connection = psycopg2.connect(database_url)
        self.connection.autocommit = True
        self.counts_statements = self._prepare()
        self.postgres_process_id = get_parent(self._ask("SELECT pg_backend_pid()")[0])

    def read(self) -> Costs:
        """The totals now. Statements are None where pg_stat_statements is not loaded."""
        statements, commits, rollbacks = (
            self._ask(_COUNTS) if self.counts_statements else (None, None, None)
        )
        own = os.times()
        return Costs(
            api_cpu=read_tree_cpu(self.api_process_id),
            postgres_cpu=read_tree_cpu(self.postgres_process_id)
            if self.postgres_process_id
            else 0.0,
            client_cpu=own.user + own.system,
            statements=statements,
            commits=commits,
            rollbacks=rollbacks,
        )

    def forget_statements(self) -> None:
        """Begin the figures of `list_heaviest` anew."""
        self._ask("SELECT pg_stat_statements_reset()")

    def list_heaviest(self, limit: int) -> list[Statement]:
        """The statements that Postgres spent most time on."""
        with self.connection.cursor() as cursor:
            cursor.execute(_HEAVIEST, (limit,))
            return [Statement(*row) for row in cursor.fetchall()]

    def close(self) -> None:
        """Let go of the connection."""
        self.connection.close()

    def _prepare(self) -> bool:
        try:
            with self.connection.cursor() as cursor:
                cursor.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
                cursor.execute("SET pg_stat_statements.track = 'none'")
                cursor.execute(_COUNTS)
        except psycopg2.Error:
            return False
        return True

    def _ask(self, statement: str) -> tuple[Any, ...]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)
            return tuple(cursor.fetchone() or ())


def track_planning(database_url: str) -> None:
    """Let connections opened from now on measure the planner too, which costs some time itself."""
    name = urllib.parse.urlsplit(database_url).path.lstrip("/")
    connection = psycopg2.connect(database_url)
    try:
        connection.autocommit = True
        connection.cursor().execute(
            sql.SQL("ALTER DATABASE {} SET pg_stat_statements.track_planning = on").format(
                sql.Identifier(name)
            )
        )
    finally:
        connection.close()


def get_parent(process_id: int) -> int | None:
    """The parent of a process of this machine; None when there is no such process, as with a
    database elsewhere.
    """
    fields = read_stat(process_id)
    return None if fields is None else int(fields[1])


def read_tree_cpu(process_id: int) -> float:
    """Seconds of CPU that a process, its living descendants and all collected ones used."""
    ticks = 0
    for member in list_tree(process_id):
        fields = read_stat(member)
        if fields is not None:
            # utime, stime, cutime, cstime.
            ticks += sum(int(fields[place]) for place in (11, 12, 13, 14))
    return ticks / TICKS_PER_SECOND


def list_tree(process_id: int) -> Iterator[int]:
    """A process and its descendants."""
    yield process_id
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):
        try:
            words = children.read_text().split()
        except OSError:
            continue
        for child in words:
            yield from list_tree(int(child))


def read_stat(process_id: int) -> list[str] | None:
    """The fields of /proc/<id>/stat from the state on; the name before them may hold spaces."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
