# SPDX-License-Identifier: AGPL-3.0-or-later
"""How many machine instructions each route of a job executes: the same on any machine, however busy
it is.

Run by hand: `dev.py bench instructions [--calls 20] [--route pop] [--functions 60] [--json]`. The
application runs in one process below valgrind's callgrind, without HTTP; what Postgres and Redis
execute is in their processes.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks._calls import Route, build_callers, introduce_workers, list_routes
from benchmarks._stack import ROOT, make_account, own_database, season_workers

WARM_UP_CALLS: Final = 8
DUMP_NAME: Final = "callgrind"
STEPS: Final = ("async", "pop", "submit", "status")  # a job passes each of them once
MILLION: Final = 1_000_000
CALL_OFFSET: Final = 4  # of CPython's trampoline, from its beginning to its call
# Does nothing: what the measuring itself executes, which is taken off the others.
EMPTY: Final = Route("nothing", lambda: None, lambda _: None)


@dataclass(frozen=True)
class Measured:
    """Millions of instructions a call, by route; and by function with all that it calls."""

    routes: dict[str, float]
    functions: dict[str, dict[str, float]]


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


def run_below_callgrind(calls: int, payer_key: str, owner_key: str, names: Sequence[str]) -> None:
    """In the process that is measured: call each route."""
    client, worker = build_callers(payer_key, owner_key, os.devnull)
    routes = [EMPTY, *list_routes(client, worker)]
    control("--instr=on")
    for route in routes:
        if route is EMPTY or not names or any(name in route.name for name in names):
            run_route(route, calls)
    control("--instr=off")


def read_dumps(folder: Path, calls: int, functions: Mapping[int, str]) -> Measured:
    """What the dumps of a process say. `functions` are the addresses of functions of Python."""
    measured = Measured({}, {})
    dumps = folder.glob(f"{DUMP_NAME}.*")
    for path in sorted(dumps, key=lambda path: int(path.suffix[1:])):
        text = path.read_text()
        name = re.search(r"^desc: Trigger: dump (.+)$", text, re.MULTILINE)
        # Not `totals`: what was executed before the figures were set to zero is in there in part.
        total = re.search(r"^summary: (\d+)$", text, re.MULTILINE)
        if name and total:
            measured.routes[name[1].strip()] = int(total[1]) / calls / MILLION
            measured.functions[name[1].strip()] = read_functions(text, calls, functions)

    nothing = measured.routes.pop(EMPTY.name)
    for name in measured.routes:
        measured.routes[name] -= nothing
    return measured


def read_functions(text: str, calls: int, functions: Mapping[int, str]) -> dict[str, float]:
    """Millions of instructions a call of each function of Python that a dump has, most first.

    Each of them has a few bytes of code of its own with one call in them, of the interpreter: what
    that call cost is what the function cost.
    """
    millions: dict[str, float] = {}
    for address, cost in re.findall(r"^calls=.*\n0x([0-9a-f]+) \d+ (\d+)$", text, re.MULTILINE):
        # The call stands a fixed way behind the beginning.
        name = functions.get(int(address, 16) - CALL_OFFSET)
        if name is not None:
            millions[name] = millions.get(name, 0) + int(cost) / calls / MILLION
    return dict(sorted(millions.items(), key=lambda item: -item[1]))


def read_function_map(process_id: int) -> dict[int, str]:
    """Where the interpreter put the code of each function, which it writes down with `-X perf`."""
    path = Path(f"/tmp/perf-{process_id}.map")
    functions = {}
    for line in path.read_text().splitlines():
        address, _, name = line.split(" ", 2)
        function, _, file = name.removeprefix("py::").rpartition(":")
        short = file.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
        functions[int(address, 16)] = f"{short}:{function}"
    path.unlink()
    return functions


def count_instructions(
    environment: Mapping[str, str], calls: int, names: Sequence[str], *, by_function: bool
) -> Measured:
    """Count those routes whose names have one of `names` in them, all without any."""
    owner = make_account(environment, "bench-owner", "--trusted")
    payer = make_account(environment, "bench-payer", "--kudos", "1000000000")
    keys = {"BENCH_PAYER_KEY": payer.api_key, "BENCH_OWNER_KEY": owner.api_key}
    module = ["-m", "benchmarks.instructions"]
    # The workers have to be known and older than half a minute before anything is counted.
    introduce = [sys.executable, *module, "--introduce"]
    subprocess.run(introduce, cwd=ROOT, env={**environment, **keys}, check=True)
    season_workers(environment["DATABASE_URL"])

    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command.append(f"--callgrind-out-file={folder}/{DUMP_NAME}")
        if by_function:
            command += ["--dump-instr=yes", "--compress-pos=no", sys.executable, "-X", "perf"]
        else:
            command.append(sys.executable)
        command += [*module, "--below-callgrind", "--calls", str(calls)]
        command += [word for name in names for word in ("--route", name)]
        with subprocess.Popen(
            command, cwd=ROOT, env={**environment, **keys}, stderr=subprocess.PIPE, text=True
        ) as process:
            errors = process.communicate()[1]
        if process.returncode != 0:
            raise RuntimeError(f"the measured process failed\n{errors[-4000:]}")
        functions = read_function_map(process.pid) if by_function else {}
        measured = read_dumps(Path(folder), calls, functions)

    for family in ("text", "chat"):
        steps = [f"{family} {step}" for step in STEPS]
        if set(steps) <= set(measured.routes):
            measured.routes[f"{family} job"] = sum(measured.routes[step] for step in steps)
    return measured


def read_keys() -> tuple[str, str]:
    """The keys of the payer and of the workers' owner, as the parent passes them on."""
    return os.environ["BENCH_PAYER_KEY"], os.environ["BENCH_OWNER_KEY"]


def main() -> None:
    """Print a table, or play a part in the process that is measured."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench instructions", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--calls", type=int, default=20, help="of each route (%(default)s)")
    parser.add_argument(
        "--route", action="append", default=[], help="part of a route's name; may be given again"
    )
    parser.add_argument(
        "--functions",
        type=int,
        default=0,
        help="rows of the list of functions; 0 leaves it out. Counting them adds a tenth",
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.add_argument("--introduce", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--below-callgrind", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.introduce:
        introduce_workers(build_callers(*read_keys(), os.devnull)[1])
        return
    if arguments.below_callgrind:
        run_below_callgrind(arguments.calls, *read_keys(), arguments.route)
        return
    if shutil.which("callgrind_control") is None:
        sys.exit("valgrind is not installed: Debian's package `valgrind` brings it")

    with own_database(os.environ["DATABASE_URL"]) as environment:
        measured = count_instructions(
            environment, arguments.calls, arguments.route, by_function=arguments.functions > 0
        )
    if arguments.json:
        print(json.dumps(measured.routes, indent=2))
        return
    print(f"{'route':16} {'M instructions':>14}")
    for name, figure in measured.routes.items():
        print(f"{name:16} {figure:14.2f}")
        for function in list(measured.functions.get(name, {}))[: arguments.functions]:
            print(f"{measured.functions[name][function]:9.3f}  {function}")


if __name__ == "__main__":
    main()
