# SPDX-License-Identifier: AGPL-3.0-or-later
"""The lists on a large horde: what each costs when nothing is cached, beside its own statements.

Run by hand: `dev.py bench lists [--users 50000] [--workers 2000] [--statistics 1000000]`. The
application is called in this process, without HTTP. `query` sends the statements of the route again
by the bare driver, so the difference is what the API adds.
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import psycopg2
from flask.testing import FlaskClient
from sqlalchemy import event

from benchmarks._stack import own_database
from horde import db, redis_ctrl
from horde.actions.statistics import compile_text_stats
from horde.app import create_app
from horde.config import Config
from horde.database import caches

ROUTES = {
    "users by kudos": "/users",
    "users by age": "/users?sort=age",
    "users, page 2000": "/users?page=2000",
    "workers": "/workers",
    "models": "/status/models?type=text",
    "stats totals": "/stats/text/totals",
    "stats models": "/stats/text/models",
    "teams": "/teams",
}

type Sent = list[tuple[str, Any]]


@dataclass(frozen=True)
class Row:
    """One route: its statements, and milliseconds of a call; `packed_kilobytes` go to a client that
    accepts gzip.
    """

    route: str
    statements: int
    fresh_ms: float
    query_ms: float
    cached_ms: float
    kilobytes: float
    packed_kilobytes: float


def fill(environment: dict[str, str], users: int, workers: int, recorded: int) -> None:
    """A horde of this size. The statistics lie in the last hundred days."""
    connection = psycopg2.connect(environment["DATABASE_URL"])
    with connection, connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO users (username, oauth_id, api_key, kudos, created)"
            " SELECT 'user ' || n, 'bench_' || n, 'hash ' || n, (n * 7919) %% 1000003,"
            "  timezone('utc', now()) - n * interval '1 minute' FROM generate_series(1, %s) AS n",
            (users,),
        )
        cursor.execute(
            "INSERT INTO user_stats (user_id, action, value)"
            " SELECT id, 'accumulated', 5 FROM users WHERE id > 0"
        )
        cursor.execute(
            "INSERT INTO user_records (user_id, record_type, record, value)"
            " SELECT id, 'REQUEST', 'text', 5 FROM users WHERE id > 0"
        )
        cursor.execute(
            "INSERT INTO workers (worker_type, user_id, name, threads, max_length,"
            "  max_context_length)"
            " SELECT 'text_worker', 1 + n %% %s, 'worker ' || n, 2, 512, 4096"
            " FROM generate_series(1, %s) AS n",
            (users, workers),
        )
        cursor.execute(
            "INSERT INTO worker_models (worker_id, model)"
            " SELECT id, 'vendor/model-' || (row_number() OVER (ORDER BY name) %% 200)"
            " FROM workers".replace("%%", "%")
        )
        cursor.execute(
            "INSERT INTO teams (name, owner_id) SELECT 'team ' || n, n"
            " FROM generate_series(1, least(200, %s)) AS n",
            (users,),
        )
        cursor.execute(
            "INSERT INTO text_gen_stats (finished, model, max_length, max_context_length,"
            "  prompt_length)"
            " SELECT timezone('utc', now()) - n * (interval '100 days' / %s),"
            "  'vendor/model-' || (n %% 200), 80, 2048, 100 FROM generate_series(1, %s) AS n",
            (max(recorded, 1), recorded),
        )
        # Filling takes minutes, after which nobody would be online.
        cursor.execute(
            "UPDATE workers SET last_check_in = timezone('utc', now()) + interval '1 hour'"
        )
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    connection.close()


@contextmanager
def noting_statements() -> Iterator[Sent]:
    """What is sent to Postgres meanwhile."""
    sent: Sent = []

    def note(_connection: object, _cursor: object, statement: str, values: Any, *_: object) -> None:
        sent.append((statement, values))

    engine = db.require_engine()
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


def forget() -> None:
    """As a process that was just started, whose horde has shared nothing."""
    redis_ctrl.call(redis_ctrl.cache_db, lambda client: client.flushdb())
    caches.clear_all()


def call(client: FlaskClient, path: str, accepted: str = "identity") -> int:
    """Ask a route; the bytes of its answer."""
    answer = client.get(f"/api/v2{path}", headers={"Accept-Encoding": accepted})
    if answer.status_code != 200:
        raise RuntimeError(f"{path} answers {answer.status_code}")
    return len(answer.data)


def measure_ms(
    work: Callable[[], object], calls: int, prepare: Callable[[], object] = lambda: None
) -> float:
    """Median milliseconds of a call."""
    taken = []
    for _ in range(calls):
        prepare()
        started = time.perf_counter()
        work()
        taken.append((time.perf_counter() - started) * 1000)
    return statistics.median(taken)


def measure(client: FlaskClient, connection: Any, name: str, path: str, calls: int) -> Row:
    """A route without caches, its statements alone, and the route from its caches."""
    forget()
    with noting_statements() as sent:
        size = call(client, path)

    def query() -> None:
        with connection.cursor() as cursor:
            for statement, values in sent:
                cursor.execute(statement, values)
                cursor.fetchall()

    return Row(
        route=name,
        statements=len(sent),
        fresh_ms=measure_ms(lambda: call(client, path), calls, forget),
        query_ms=measure_ms(query, calls),
        cached_ms=measure_ms(lambda: call(client, path), calls),
        kilobytes=size / 1024,
        packed_kilobytes=call(client, path, "gzip") / 1024,
    )


def parse_options(name: str, description: str) -> argparse.Namespace:
    """How large the horde is, and how often each route is called."""
    parser = argparse.ArgumentParser(
        prog=f"dev.py bench {name}", description=description.partition("\n")[0]
    )
    parser.add_argument("--users", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=2_000)
    parser.add_argument("--statistics", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Print a table."""
    arguments = parse_options("lists", __doc__)
    with own_database(os.environ["DATABASE_URL"]) as environment:
        fill(environment, arguments.users, arguments.workers, arguments.statistics)
        config = Config.from_environment({**environment, "HORDE_LOG_LEVEL": "WARNING"})
        client = create_app(config).test_client()
        compile_text_stats()
        connection = psycopg2.connect(environment["DATABASE_URL"])
        connection.autocommit = True
        try:
            rows = [
                measure(client, connection, name, path, arguments.calls)
                for name, path in ROUTES.items()
            ]
        finally:
            connection.close()
            db.disconnect()
    peak_megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if arguments.json:
        figures = {"rows": [asdict(row) for row in rows], "peak_megabytes": peak_megabytes}
        print(json.dumps(figures))
        return
    print(
        f"{'route':18} {'SQL':>4} {'fresh':>9} {'query':>9} {'cached':>9} {'KiB':>8} {'packed':>8}"
    )
    for row in rows:
        print(
            f"{row.route:18} {row.statements:4} {row.fresh_ms:9.2f} {row.query_ms:9.2f}"
            f" {row.cached_ms:9.2f} {row.kilobytes:8.1f} {row.packed_kilobytes:8.1f}"
        )
    print(f"peak memory {peak_megabytes:.0f} MB")


if __name__ == "__main__":
    main()
