# SPDX-License-Identifier: AGPL-3.0-or-later
"""How fast text or chat jobs pass the queue, beside the floor of their bare SQL, with more and more
requests in the way.

Run by hand: `dev.py bench queue`. Source of the figures' meaning: docs/explanation/performance.md.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks import _backlog
from benchmarks._backlog import Backlog
from benchmarks._counters import Meter, track_planning
from benchmarks._floor import Floor, measure_floor
from benchmarks._load import Load, Parties, Result, introduce_workers, run_alone
from benchmarks._stack import make_account, own_database, running_api, season_workers

# The last two only where nothing else goes on.
ROUTES = ("async", "pop", "submit", "status", "idle", "beat")
BACKLOGS = (Backlog.MODEL, Backlog.TRUST, Backlog.LENGTH, Backlog.CLOSE_LENGTH, Backlog.DECLARATION)
FUNDS = 1_000_000_000  # kudos, so that no request waits for any
THREAD_SWITCH_SECONDS = 0.0005  # a tenth of the usual: many threads measure short waits


@dataclass(frozen=True)
class Options:
    """What to measure."""

    workers: Sequence[int]
    depths: Sequence[int]
    backlogs: Sequence[Backlog]
    seconds: float
    warm_up_seconds: float
    alone_jobs: int
    idle_pops: int
    processes: int
    threads: int
    is_chat: bool
    heaviest: int  # statements listed below each row


@dataclass(frozen=True)
class Row:
    """One line of the table. Milliseconds are p50 and p99 by route; CPU and counts are for each
    job, all included.
    """

    backlog: str
    depth: int
    workers: int  # 0: one call after the other
    jobs_per_second: float | None
    floor_ratio: float | None  # jobs a second as a share of the floor's
    api_cpu_ms: float | None
    cpu_ratio: float | None  # as a multiple of what the floor's client spends
    postgres_cpu_ms: float | None
    client_cpu_ms: float | None
    statements: float | None
    commits: float | None
    milliseconds: dict[str, tuple[float, float]]


def parse_options(words: Sequence[str]) -> tuple[Options, bool]:
    """The options, and whether JSON is wanted."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench queue", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--workers", type=parse_numbers, default=[4, 16, 64], metavar="N,N")
    parser.add_argument("--depths", type=parse_numbers, default=[0, 1000, 10_000], metavar="N,N")
    names = [backlog.value.replace(" ", "-") for backlog in Backlog if backlog is not Backlog.NONE]
    parser.add_argument(
        "--backlogs",
        default=None,
        metavar="NAME,NAME",
        help=f"of {', '.join(names)}; all but the last",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="measured in each row")
    parser.add_argument("--chat", action="store_true", help="chat jobs instead of text jobs")
    parser.add_argument("--processes", type=int, default=2, help="of the API")
    parser.add_argument("--threads", type=int, default=16, help="of each of them")
    parser.add_argument(
        "--quick", action="store_true", help="one small row of each kind, to see that it runs"
    )
    parser.add_argument(
        "--statements",
        type=int,
        default=0,
        metavar="N",
        help="list the N statements heaviest for Postgres",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="the figures as JSON on standard output, the table on standard error",
    )
    arguments = parser.parse_args(words)
    backlogs = BACKLOGS
    if arguments.backlogs:
        backlogs = tuple(Backlog(name.replace("-", " ")) for name in arguments.backlogs.split(","))
    options = Options(
        workers=arguments.workers,
        depths=arguments.depths,
        backlogs=backlogs,
        seconds=arguments.seconds,
        warm_up_seconds=1.5,
        alone_jobs=60,
        idle_pops=200,
        processes=arguments.processes,
        threads=arguments.threads,
        is_chat=arguments.chat,
        heaviest=arguments.statements,
    )
    if arguments.quick:
        options = dataclasses.replace(
            options,
            workers=[2],
            depths=[0, 20],
            backlogs=[Backlog.MODEL],
            seconds=0.5,
            warm_up_seconds=0.2,
            alone_jobs=2,
            idle_pops=2,
            processes=1,
            threads=4,
        )
    return options, arguments.json


def parse_numbers(text: str) -> list[int]:
    """Numbers with commas between."""
    return [int(word) for word in text.split(",")]


def list_fillings(options: Options) -> Iterator[tuple[Backlog, int]]:
    """Each backlog at each depth; without one first."""
    if 0 in options.depths:
        yield Backlog.NONE, 0
    for depth in options.depths:
        for backlog in options.backlogs:
            if depth:
                yield backlog, depth


class Benchmark:
    """One run against one API."""

    def __init__(self, options: Options, database_url: str, parties: Parties, meter: Meter) -> None:
        self.options, self.database_url, self.parties, self.meter = (
            options,
            database_url,
            parties,
            meter,
        )
        self.floors: dict[int, Floor] = {}

    def run(self) -> Iterator[Row]:
        """Every row as it is measured."""
        self.warm_up()
        for workers in self.options.workers:
            yield self.measure_floor(workers)
        for backlog, depth in list_fillings(self.options):
            filler = self.parties.connect_stranger()
            _backlog.fill(self.database_url, filler, backlog, depth)
            filler.close()
            yield self.measure_alone(backlog, depth)
            for workers in self.options.workers:
                yield self.measure_load(backlog, depth, workers)
            _backlog.clear(self.database_url)

    def warm_up(self) -> None:
        """Let the workers be known, which a chat request asks for, and every process meet every
        route.
        """
        introduce_workers(self.parties, max(self.options.workers))
        run_alone(self.parties, jobs=2, idle_pops=1)
        Load(self.parties, max(self.options.workers)).run(
            self.meter, warm_up_seconds=0, seconds=self.options.warm_up_seconds
        )
        season_workers(self.database_url)

    def measure_floor(self, workers: int) -> Row:
        """The bare SQL on as many connections as there are workers."""
        floor = measure_floor(
            self.database_url,
            user_id=self.parties.payer.id,
            threads=workers,
            seconds=self.options.seconds,
        )
        self.floors[workers] = floor
        return Row(
            backlog="floor",
            depth=0,
            workers=workers,
            jobs_per_second=floor.jobs_per_second,
            floor_ratio=1.0,
            api_cpu_ms=None,
            cpu_ratio=1.0,
            postgres_cpu_ms=None,
            client_cpu_ms=floor.client_cpu_ms,
            statements=5,
            commits=4,
            milliseconds={},
        )

    def measure_alone(self, backlog: Backlog, depth: int) -> Row:
        """The times of each route with nothing else going on."""
        timings = run_alone(
            self.parties, jobs=self.options.alone_jobs, idle_pops=self.options.idle_pops
        )
        return Row(
            backlog=backlog.value,
            depth=depth,
            workers=0,
            jobs_per_second=None,
            floor_ratio=None,
            api_cpu_ms=None,
            cpu_ratio=None,
            postgres_cpu_ms=None,
            client_cpu_ms=None,
            statements=None,
            commits=None,
            milliseconds=summarize(timings),
        )

    def measure_load(self, backlog: Backlog, depth: int, workers: int) -> Row:
        """Jobs a second and what each costs."""
        load = Load(self.parties, workers)
        result = load.run(
            self.meter, warm_up_seconds=self.options.warm_up_seconds, seconds=self.options.seconds
        )
        return build_row(backlog, depth, workers, result, self.floors[workers])


def build_row(backlog: Backlog, depth: int, workers: int, result: Result, floor: Floor) -> Row:
    """The figures of a stretch under load."""
    jobs, costs = max(result.jobs, 1), result.costs
    rate, api_cpu_ms = result.jobs / result.seconds, costs.api_cpu / jobs * 1000
    return Row(
        backlog=backlog.value,
        depth=depth,
        workers=workers,
        jobs_per_second=rate,
        floor_ratio=rate / floor.jobs_per_second,
        api_cpu_ms=api_cpu_ms,
        cpu_ratio=api_cpu_ms / floor.client_cpu_ms if floor.client_cpu_ms else None,
        postgres_cpu_ms=costs.postgres_cpu / jobs * 1000,
        client_cpu_ms=costs.client_cpu / jobs * 1000,
        statements=None if costs.statements is None else costs.statements / jobs,
        commits=None if costs.commits is None else costs.commits / jobs,
        milliseconds=summarize(result.timings),
    )


def summarize(timings: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """p50 and p99 in milliseconds of each route."""
    return {
        route: (pick(values, 0.5), pick(values, 0.99))
        for route, values in timings.items()
        if values
    }


def pick(values: Sequence[float], share: float) -> float:
    """The value, in milliseconds, that this share of seconds does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000


HEADER = (
    f"{'backlog':12} {'depth':>6} {'workers':>7} {'jobs/s':>7} {'floor':>6} "
    f"{'API ms':>7} {'x floor':>7} {'PG ms':>6} {'SQL':>5} {'commits':>7}  "
    + " ".join(f"{route + ' p50/p99':>15}" for route in ROUTES)
)


def format_row(row: Row) -> str:
    """A line of the table; a dash where something is not measured."""
    cells = [
        f"{row.backlog:12} {row.depth:6} {row.workers or 'alone':>7}",
        show(row.jobs_per_second, 7, 1),
        "     -" if row.floor_ratio is None else f"{row.floor_ratio:6.1%}",
        show(row.api_cpu_ms, 7, 2),
        show(row.cpu_ratio, 7, 1),
        show(row.postgres_cpu_ms, 6, 2),
        show(row.statements, 5, 1),
        show(row.commits, 7, 1) + " ",
    ]
    for route in ROUTES:
        pair = row.milliseconds.get(route)
        cells.append(f"{'-' if pair is None else f'{pair[0]:.1f}/{pair[1]:.1f}':>15}")
    return " ".join(cells)


def show(value: float | None, width: int, digits: int) -> str:
    """A number, or a dash."""
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def print_heaviest(meter: Meter, count: int, table: TextIO) -> None:
    """What Postgres spent its time on since the last row."""
    for found in meter.list_heaviest(count):
        print(
            f"    {found.calls:6} calls {found.plan_ms:8.3f} ms plan {found.execution_ms:8.3f} ms"
            f" run  {found.text}",
            file=table,
        )
    meter.forget_statements()


def compare_depths(rows: Sequence[Row]) -> list[str]:
    """How much slower a pop is behind each backlog than with none, as ratios of p50."""
    lines = []
    base = {row.workers: row for row in rows if row.backlog == Backlog.NONE}
    for row in rows:
        before = base.get(row.workers)
        if row.backlog in {Backlog.NONE.value, "floor"} or before is None:
            continue
        ratios = [
            f"{route} {row.milliseconds[route][0] / before.milliseconds[route][0]:.2f}"
            for route in ("pop", "idle")
            if route in row.milliseconds and route in before.milliseconds
        ]
        lines.append(
            f"{row.backlog:12} {row.depth:6} {row.workers or 'alone':>7}  p50 against depth 0:"
            f" {', '.join(ratios)}"
        )
    return lines


def main(words: Sequence[str]) -> None:
    """Print the table while it is measured."""
    options, is_json = parse_options(words)
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    table = sys.stderr if is_json else sys.stdout
    rows: list[Row] = []
    started = time.monotonic()
    with (
        own_database(os.environ["DATABASE_URL"]) as environment,
        tempfile.TemporaryDirectory() as folder,
    ):
        # untrusted, so that requests for trusted workers pass it by.
        owner = make_account(environment, "bench-owner", "--trusted")
        payer, stranger = (
            make_account(environment, name, "--kudos", str(FUNDS))
            for name in ("bench-payer", "bench-stranger")
        )
        log = Path(folder) / "api.log"
        if options.heaviest:
            track_planning(environment["DATABASE_URL"])
        with running_api(
            environment, log, processes=options.processes, threads=options.threads
        ) as api:
            meter = Meter(environment["DATABASE_URL"], api.process_id)
            parties = Parties(api.port, payer, owner, stranger, is_chat=options.is_chat)
            print(
                f"{parties.family} jobs, API: {options.processes} processes of {options.threads}"
                " threads",
                file=table,
            )
            print(HEADER, file=table, flush=True)
            try:
                for row in Benchmark(options, environment["DATABASE_URL"], parties, meter).run():
                    rows.append(row)
                    print(format_row(row), file=table, flush=True)
                    if options.heaviest:
                        print_heaviest(meter, options.heaviest, table)
            finally:
                meter.close()
    for line in compare_depths(rows):
        print(line, file=table)
    print(f"measured in {time.monotonic() - started:.0f} s", file=table)
    if is_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
