# SPDX-License-Identifier: AGPL-3.0-or-later
"""How many machine instructions each route of a job executes: the same on any machine, however busy
it is.

Run by hand: `dev.py bench instructions [--calls 20] [--json]`. The application runs in one process
below valgrind's callgrind, without HTTP; what Postgres and Redis execute is in their processes.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks._calls import Route, build_callers, introduce_workers, list_routes
from benchmarks._stack import ROOT, make_account, own_database, season_workers

WARM_UP_CALLS: Final = 8
DUMP_NAME: Final = "callgrind"
STEPS: Final = ("async", "pop", "submit", "status")  # a job passes each of them once
MILLION: Final = 1_000_000


def control(*words: str) -> None:
    """Tell the callgrind around this process something. Raises CalledProcessError."""
    command = ["callgrind_control", *words, str(os.getpid())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_route(route: Route, calls: int) -> None:
    """Leave one dump that covers these calls of the route and nothing else."""
    for _ in range(WARM_UP_CALLS):
        route.call(route.prepare())
    arguments = [route.prepare() for _ in range(calls)]
    control("--zero")
    for argument in arguments:
        route.call(argument)
    control(f"--dump={route.name}")


def run_below_callgrind(calls: int, payer_key: str, owner_key: str) -> None:
    """In the process that is measured: call each route."""
    client, worker = build_callers(payer_key, owner_key, os.devnull)
    routes = list_routes(client, worker)
    control("--instr=on")
    for route in routes:
        run_route(route, calls)
    control("--instr=off")


def read_dumps(folder: Path, calls: int) -> dict[str, float]:
    """Millions of instructions a call, by route."""
    millions = {}
    dumps = folder.glob(f"{DUMP_NAME}.*")
    for path in sorted(dumps, key=lambda path: int(path.suffix[1:])):
        with path.open() as dump:
            text = "".join(line for line in dump if line.startswith(("desc: Trigger", "totals:")))
        name = re.search(r"^desc: Trigger: dump (.+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)$", text, re.MULTILINE)
        if name and total:
            millions[name[1].strip()] = int(total[1]) / calls / MILLION
    return millions


def count_instructions(environment: Mapping[str, str], calls: int) -> dict[str, float]:
    """Millions of instructions a call of each route, and of a whole job of each family."""
    owner = make_account(environment, "bench-owner", "--trusted")
    payer = make_account(environment, "bench-payer", "--kudos", "1000000000")
    keys = {"BENCH_PAYER_KEY": payer.api_key, "BENCH_OWNER_KEY": owner.api_key}
    module = [sys.executable, "-m", "benchmarks.instructions"]
    # The workers have to be known and older than half a minute before anything is counted.
    subprocess.run([*module, "--introduce"], cwd=ROOT, env={**environment, **keys}, check=True)
    season_workers(environment["DATABASE_URL"])

    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        valgrind.append(f"--callgrind-out-file={folder}/{DUMP_NAME}")
        command = [*valgrind, *module, "--below-callgrind", "--calls", str(calls)]
        done = subprocess.run(
            command, cwd=ROOT, env={**environment, **keys}, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"the measured process failed\n{done.stderr[-4000:]}")
        millions = read_dumps(Path(folder), calls)

    for family in ("text", "chat"):
        millions[f"{family} job"] = sum(millions[f"{family} {step}"] for step in STEPS)
    return millions


def read_keys() -> tuple[str, str]:
    """The keys of the payer and of the workers' owner, as the parent passes them on."""
    return os.environ["BENCH_PAYER_KEY"], os.environ["BENCH_OWNER_KEY"]


def main() -> None:
    """Print a table, or play a part in the process that is measured."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench instructions", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--calls", type=int, default=20, help="of each route (%(default)s)")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.add_argument("--introduce", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--below-callgrind", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.introduce:
        introduce_workers(build_callers(*read_keys(), os.devnull)[1])
        return
    if arguments.below_callgrind:
        run_below_callgrind(arguments.calls, *read_keys())
        return
    if shutil.which("callgrind_control") is None:
        sys.exit("valgrind is not installed: Debian's package `valgrind` brings it")

    with own_database(os.environ["DATABASE_URL"]) as environment:
        millions = count_instructions(environment, arguments.calls)
    if arguments.json:
        print(json.dumps(millions, indent=2))
        return
    print(f"{'route':16} {'M instructions':>14}")
    for name, figure in millions.items():
        print(f"{name:16} {figure:14.2f}")


if __name__ == "__main__":
    main()
