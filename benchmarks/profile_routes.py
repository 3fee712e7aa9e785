# SPDX-License-Identifier: AGPL-3.0-or-later
"""Where the API's CPU goes, route by route: one thread calls the application in this process,
without HTTP.

Run by hand: `dev.py bench profile_routes [--route pop] [--depth 10000] [--functions 40] [--calls
300]`. CPU of this process only: what Postgres and Redis spend is in their own processes.
"""

import argparse
import collections
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from benchmarks._calls import Route, build_callers, introduce_workers, list_routes
from benchmarks._stack import make_account, own_database, season_workers

SAMPLE_SECONDS = 0.001  # of CPU time
WARM_UP_CALLS = 20
ROOT = str(Path(__file__).resolve().parent.parent) + "/"

PACKAGES = (
    ("sqlalchemy/sql/compiler", "sqlalchemy: compile"),
    ("sqlalchemy/sql/", "sqlalchemy: build and cache keys"),
    ("sqlalchemy/orm/", "sqlalchemy: orm"),
    ("sqlalchemy/engine/", "sqlalchemy: engine"),
    ("sqlalchemy/", "sqlalchemy: rest"),
    ("opentelemetry/", "opentelemetry"),
    ("flask_restx/", "flask-restx"),
    ("limits/", "limits"),
    ("flask/", "flask"),
    ("werkzeug/", "werkzeug"),
    ("redis/", "redis"),
    ("pydantic", "pydantic"),
    ("logging/", "logging"),
    ("horde/", "horde"),
)


@dataclass
class Samples:
    """Counts of CPU samples: by the function that ran, by any function on the stack, by package."""

    total: int = 0
    own: collections.Counter[str] = field(default_factory=collections.Counter)
    within: collections.Counter[str] = field(default_factory=collections.Counter)
    packages: collections.Counter[str] = field(default_factory=collections.Counter)

    def add(self, frame: FrameType | None) -> None:
        """One sample."""
        self.total += 1
        names = []
        package = None
        while frame is not None:
            names.append(describe_function(frame))
            package = package or find_package(frame.f_code.co_filename)
            frame = frame.f_back
        self.own[names[0]] += 1
        self.packages[package or "standard library"] += 1
        self.within.update(set(names))


def describe_function(frame: FrameType) -> str:
    """`file:function`, short enough for a table."""
    path = frame.f_code.co_filename.removeprefix(ROOT).rpartition("site-packages/")[2]
    return f"{path}:{frame.f_code.co_qualname}"


def find_package(path: str) -> str | None:
    """The package that a frame belongs to; the standard library belongs to whoever calls it, except
    logging.
    """
    short = path.removeprefix(ROOT).rpartition("site-packages/")[2].rpartition("lib/python3.12/")[2]
    return next((name for part, name in PACKAGES if short.startswith(part)), None)


@dataclass
class Sampler:
    """Takes the main thread's stack for each millisecond of CPU, and keeps it while a call is
    measured.

    The timer runs on between the calls: one that is set anew for a call shorter than its period
    would hardly ever ring.
    """

    samples: Samples
    is_measuring: bool = False

    def __enter__(self) -> "Sampler":
        signal.signal(signal.SIGPROF, self._take)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _take(self, _signal: int, frame: FrameType | None) -> None:
        if self.is_measuring:
            self.samples.add(frame)


def measure(route: Route, calls: int) -> tuple[float, float, Samples]:
    """CPU and wall milliseconds a call, and where the CPU went."""
    for _ in range(WARM_UP_CALLS):
        route.call(route.prepare())
    samples = Samples()
    cpu = wall = 0.0
    # Not sampled: a signal costs some tens of microseconds itself.
    for _ in range(calls):
        argument = route.prepare()
        # Exact also beside the sampling timer.
        cpu_before, wall_before = time.thread_time(), time.perf_counter()
        route.call(argument)
        cpu += time.thread_time() - cpu_before
        wall += time.perf_counter() - wall_before
    with Sampler(samples) as sampler:
        for _ in range(calls):
            argument = route.prepare()
            sampler.is_measuring = True
            route.call(argument)
            sampler.is_measuring = False
    return cpu / calls * 1000, wall / calls * 1000, samples


def print_samples(samples: Samples, cpu_ms: float, count: int) -> None:
    """Shares of a route's CPU, in milliseconds a call."""
    scale = cpu_ms / max(samples.total, 1)
    print("  by package (the innermost on the stack)")
    for name, number in samples.packages.most_common():
        print(f"    {number * scale:7.3f} ms  {name}")
    print("  by function, with what it calls")
    for name, number in samples.within.most_common(count):
        print(f"    {number * scale:7.3f} ms  {name}")


def main() -> None:
    """Print a table, and for each route asked for the places."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench profile_routes", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--route", action="append", default=[], help="part of a route's name; may be given again"
    )
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument(
        "--functions", type=int, default=0, help="rows of the list of functions; 0 leaves it out"
    )
    parser.add_argument("--log", default="/dev/null", help="where the application's log goes")
    arguments = parser.parse_args()
    with own_database(os.environ["DATABASE_URL"]) as environment:
        owner = make_account(environment, "bench-owner", "--trusted")
        payer = make_account(environment, "bench-payer", "--kudos", "1000000000")
        os.environ.update(environment)
        client, worker = build_callers(payer.api_key, owner.api_key, arguments.log)
        introduce_workers(worker)
        season_workers(environment["DATABASE_URL"])
        print(f"{'route':16} {'CPU ms':>8} {'wall ms':>8}")
        for route in list_routes(client, worker):
            if arguments.route and not any(part in route.name for part in arguments.route):
                continue
            cpu_ms, wall_ms, samples = measure(route, arguments.calls)
            print(f"{route.name:16} {cpu_ms:8.3f} {wall_ms:8.3f}", flush=True)
            if arguments.functions:
                print_samples(samples, cpu_ms, arguments.functions)


if __name__ == "__main__":
    main()
