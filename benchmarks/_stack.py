# SPDX-License-Identifier: AGPL-3.0-or-later
"""A horde for a benchmark: a database of its own, two accounts, and the API as the processes an
operator runs.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psycopg2
from psycopg2 import sql

from devtools.processes import find_free_ports

ROOT = Path(__file__).resolve().parent.parent
DATABASE_SUFFIX = "benchmark"
START_SECONDS = 60
STOP_SECONDS = 40
# And request of one account: limits are no part of what is measured.
ROOM_FOR_EVERY_WORKER = 1_000_000


@dataclass(frozen=True)
class Account:
    """An account with its key."""

    id: int
    api_key: str


@dataclass(frozen=True)
class Api:
    """A running `horde serve`."""

    port: int
    process_id: int


def build_environment(database_url: str) -> dict[str, str]:
    """The settings of production on a database, without rate limits and with the log an operator
    has.
    """
    settings = {
        "DATABASE_URL": database_url,
        "HORDE_ENVIRONMENT": "production",
        "secret_key": "benchmark",
        "HORDE_TEST_RATELIMIT_DISABLED": "1",
        "PYDANTIC_DISABLE_PLUGINS": "logfire-plugin",
    }
    return {**os.environ, **settings}


def make_database(database_url: str) -> str:
    """An empty database beside the given one, which is never touched. Returns its address."""
    name = f"{urllib.parse.urlsplit(database_url).path.lstrip('/')}_{DATABASE_SUFFIX}"
    with contextlib.closing(psycopg2.connect(database_url)) as connection:
        connection.autocommit = True  # CREATE DATABASE refuses to run inside a transaction
        with connection.cursor() as cursor:
            cursor.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )
            cursor.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name))
            )
    return urllib.parse.urlsplit(database_url)._replace(path=f"/{name}").geturl()


def drop_database(database_url: str, made_url: str) -> None:
    """Remove what `make_database` made."""
    name = urllib.parse.urlsplit(made_url).path.lstrip("/")
    with contextlib.closing(psycopg2.connect(database_url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )


def run_horde(environment: Mapping[str, str], *words: str) -> str:
    """Run one of the project's commands to its end. Returns its stdout; raises
    CalledProcessError.
    """
    command = [sys.executable, "-m", "horde.cli.main", *words]
    return subprocess.run(
        command, cwd=ROOT, env=dict(environment), check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def make_account(environment: Mapping[str, str], username: str, *options: str) -> Account:
    """An account with room for everything a benchmark does."""
    made = json.loads(run_horde(environment, "user", "create", "--username", username, *options))
    account = Account(id=int(made["id"]), api_key=str(made["api_key"]))
    with (
        contextlib.closing(psycopg2.connect(environment["DATABASE_URL"])) as connection,
        connection,
    ):
        connection.cursor().execute(
            "UPDATE users SET concurrency = %(room)s, worker_invited = %(room)s WHERE id = %(id)s",
            {"room": ROOM_FOR_EVERY_WORKER, "id": account.id},
        )
    return account


def season_workers(database_url: str) -> None:
    """Make every worker an hour older: in the first half minute of its life it checks in at each
    pop.
    """
    with contextlib.closing(psycopg2.connect(database_url)) as connection, connection:
        connection.cursor().execute("UPDATE workers SET created = created - interval '1 hour'")


@contextlib.contextmanager
def own_database(database_url: str) -> Iterator[dict[str, str]]:
    """A migrated database of the benchmark's own. Yields the environment of a horde on it."""
    made = make_database(database_url)
    try:
        environment = build_environment(made)
        run_horde(environment, "db", "migrate")
        yield environment
    finally:
        drop_database(database_url, made)


@contextlib.contextmanager
def running_api(
    environment: Mapping[str, str], log: Path, *, processes: int, threads: int
) -> Iterator[Api]:
    """`horde serve` as an operator runs it, its log in a file. Raises RuntimeError when it does not
    come up.
    """
    port = find_free_ports(1)[0]
    words = [
        "serve",
        "--listen",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        str(processes),
        "--threads",
        str(threads),
    ]
    with log.open("wb") as output:
        command = [sys.executable, "-m", "horde.cli.main", *words]
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdout=output, stderr=output
        )
    try:
        wait_for_heartbeat(process, port, log)
        yield Api(port=port, process_id=process.pid)
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def wait_for_heartbeat(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the API answers; raises RuntimeError with the end of its log."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(
                f"http://127.0.0.1:{port}/api/v2/status/heartbeat", timeout=2
            ).close()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the API does not start\n{log.read_text()[-4000:]}")
        time.sleep(0.1)
