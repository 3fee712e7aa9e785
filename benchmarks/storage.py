# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a job costs the database: CPU, write-ahead log, and how each table is written.

Run by hand: `dev.py bench storage [--chat] [--jobs 500] [--statements 12]`. One caller in this
process sends job after job, and the ledger is folded along the way, so nothing waits for locks.
"""

import argparse
import os
from dataclasses import dataclass
from typing import Any, Final

from benchmarks._bodies import build_chat_request, build_pop, build_submit, build_text_request
from benchmarks._calls import Caller, build_callers, introduce_workers
from benchmarks._counters import Costs, Meter, track_planning
from benchmarks._stack import make_account, own_database, season_workers
from horde.database.kudos import fold_postings

WARM_UP_JOBS: Final = 200  # every page was written since the checkpoint, and plans are kept
JOBS_A_FOLD: Final = 50

_WAL = "SELECT wal_records, wal_fpi, wal_bytes FROM pg_stat_wal"
_TABLES = """
    SELECT relname, n_tup_ins, n_tup_upd, n_tup_hot_upd, n_tup_del, seq_scan
    FROM pg_stat_user_tables
"""
_INDEXES = "SELECT relname, indexrelname, idx_scan FROM pg_stat_user_indexes"


@dataclass(frozen=True)
class Stored:
    """What the database had done by one moment."""

    costs: Costs
    wal: tuple[int, ...]  # records, whole pages, bytes
    tables: dict[str, tuple[int, ...]]
    index_scans: dict[str, int]


def run_job(client: Caller, worker: Caller, family: str) -> None:
    """One job from request to read reply."""
    body = build_chat_request("tag") if family == "chat" else build_text_request("tag")
    accepted = client.call("POST", f"/generate/{family}/async", body)
    pop = build_pop(f"{family} worker", is_chat=family == "chat")
    job = worker.call("POST", "/generate/text/pop", pop)
    worker.call("POST", "/generate/text/submit", build_submit(job))
    client.call("GET", f"/generate/{family}/status/{accepted['id']}")


def run_jobs(client: Caller, worker: Caller, family: str, count: int) -> None:
    """So many jobs, their postings folded."""
    for number in range(count):
        run_job(client, worker, family)
        if number % JOBS_A_FOLD == JOBS_A_FOLD - 1:
            fold_postings()


def read_stored(meter: Meter) -> Stored:
    """The database's own counters, all of what was done included."""
    ask(meter, "SELECT pg_stat_force_next_flush()")
    ask(meter, "SELECT pg_sleep(1.5)")  # sessions tell of their work once a second
    return Stored(
        costs=meter.read(),
        wal=tuple(int(value) for value in ask(meter, _WAL)[0]),
        tables={row[0]: tuple(row[1:]) for row in ask(meter, _TABLES)},
        index_scans={f"{row[0]}.{row[1]}": row[2] or 0 for row in ask(meter, _INDEXES)},
    )


def ask(meter: Meter, statement: str) -> list[tuple[Any, ...]]:
    """All rows."""
    with meter.connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


def print_difference(before: Stored, after: Stored, jobs: int) -> None:
    """The figures of a job, then the tables it writes."""
    costs = after.costs.since(before.costs)
    records, pages, size = (now - then for now, then in zip(after.wal, before.wal, strict=True))
    print(f"Postgres CPU {costs.postgres_cpu / jobs * 1000:.2f} ms a job")
    print(f"WAL {size / jobs / 1024:.1f} KiB and {records / jobs:.0f} records a job", end="")
    print(f", {pages} whole pages in all")
    if costs.statements is not None:
        print(f"{costs.statements / jobs:.1f} statements, {(costs.commits or 0) / jobs:.1f} COMMIT")
    print(f"\n{'a job':26} {'inserted':>8} {'updated':>8} {'HOT':>5} {'deleted':>8} {'scans':>6}")
    for name in sorted(after.tables):
        now, then = after.tables[name], before.tables.get(name, (0,) * 5)
        inserted, updated, hot, deleted, scans = (
            (value - earlier) / jobs for value, earlier in zip(now, then, strict=True)
        )
        if inserted or updated or deleted or scans:
            share = f"{hot / updated:.0%}" if updated else "-"
            print(
                f"{name:26} {inserted:8.2f} {updated:8.2f} {share:>5} {deleted:8.2f} {scans:6.2f}"
            )
    written = {name for name in after.tables if after.tables[name] != before.tables.get(name)}
    idle = [
        name
        for name, scans in sorted(after.index_scans.items())
        if name.partition(".")[0] in written and scans == before.index_scans.get(name, 0)
    ]
    print("\nIndexes of these tables that no job read:", ", ".join(idle))


def main() -> None:
    """Print the figures of one family."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench storage", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--chat", action="store_true", help="chat jobs instead of text jobs")
    parser.add_argument("--jobs", type=int, default=500, help="(%(default)s)")
    parser.add_argument(
        "--statements", type=int, default=0, help="list the heaviest, planning included"
    )
    arguments = parser.parse_args()
    family = "chat" if arguments.chat else "text"

    with own_database(os.environ["DATABASE_URL"]) as environment:
        owner = make_account(environment, "bench-owner", "--trusted")
        payer = make_account(environment, "bench-payer", "--kudos", "1000000000")
        os.environ.update(environment)
        if arguments.statements:
            track_planning(environment["DATABASE_URL"])
        client, worker = build_callers(payer.api_key, owner.api_key, os.devnull)
        introduce_workers(worker)
        season_workers(environment["DATABASE_URL"])
        meter = Meter(environment["DATABASE_URL"], os.getpid())
        try:
            ask(meter, "CHECKPOINT; SELECT 1")
            run_jobs(client, worker, family, WARM_UP_JOBS)
            before = read_stored(meter)
            if arguments.statements:
                meter.forget_statements()
                before = read_stored(meter)
            run_jobs(client, worker, family, arguments.jobs)
            after = read_stored(meter)
            print_difference(before, after, arguments.jobs)
            for each in meter.list_heaviest(arguments.statements):
                share = each.calls / arguments.jobs
                print(f"{share:6.2f} x {each.plan_ms:.3f} + {each.execution_ms:.3f} ms {each.text}")
        finally:
            meter.close()


if __name__ == "__main__":
    main()
