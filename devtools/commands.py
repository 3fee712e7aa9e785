# SPDX-License-Identifier: AGPL-3.0-or-later
"""What each command of dev.py does once .venv is there."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from devtools import command_line, stack
from devtools.processes import CannotRun, StartFailed
from devtools.services import Services

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sys.executable).parent

# Set before any model class is made, it keeps logfire (through horde_sdk) from loading 500 modules
# into each process.
QUIET_PLUGINS = {"PYDANTIC_DISABLE_PLUGINS": "logfire-plugin"}

MOST_TEST_PROCESSES = 4  # each starts its own Redis and database; more gain little


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Returns its exit code."""
    os.environ.update(QUIET_PLUGINS)
    # Every start of a process would compile the whole project again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    command_line.keep_loopback_direct(os.environ)
    try:
        return run_command(arguments)
    except CannotRun as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 2


def run_command(arguments: argparse.Namespace) -> int:
    """As `run`. Raises CannotRun."""
    match arguments.command:
        case "run":
            return stack.run(arguments)
        case "stop":
            return stack.stop(Path(arguments.state))
        case "test":
            return run_tests(arguments.rest)
        case "check":
            return check()
        case "fmt":
            return format_code()
        case _:
            return run_benchmark(arguments.rest)


def run_tests(options: Sequence[str]) -> NoReturn:
    """pytest, one process per core unless the options say otherwise; the services come from
    tests/services.py.

    Does not return: this process becomes pytest, so that a signal sent to it reaches pytest, which
    cleans up.
    """
    command = [sys.executable, "-m", "pytest", *choose_process_count(options), *options]
    os.chdir(ROOT)
    os.execv(command[0], command)


def choose_process_count(options: Sequence[str]) -> list[str]:
    """``-n`` with its distribution by file, so that a file's fixtures are made once, in the order
    of ``tests/conftest.py``; nothing when it is chosen already.
    """
    if any(option.startswith(("-n", "--numprocesses", "--pdb", "--dist")) for option in options):
        return []
    count = min(MOST_TEST_PROCESSES, os.cpu_count() or 1)
    by_file = ["-n", str(count), "--dist", "loadfile", "--no-loadscope-reorder"]
    return by_file if count > 1 else []


@dataclass
class Step:
    """One check: a title and a command."""

    title: str
    command: Sequence[str]
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Begin; the output waits in a pipe."""
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> bool:
        """Wait, print one line, and the output too when it failed. Whether it passed."""
        assert self.process is not None
        output, _ = self.process.communicate()
        passed = self.process.returncode == 0
        print(f"{'ok  ' if passed else 'FAIL'} {self.title}", flush=True)
        if not passed:
            print(output, flush=True)
        return passed


def check() -> int:
    """Everything that passes before a commit. All checks run, so that one run shows all
    failures.
    """
    started = time.monotonic()
    typed = [
        name for name in ("horde", "devtools", "dev.py", "server.py") if (ROOT / name).exists()
    ]
    count = min(MOST_TEST_PROCESSES, os.cpu_count() or 1)
    # Unit tests share nothing that is dear to make, so whichever process is free takes the next.
    spread = ["-n", str(count), "--dist", "worksteal"] if count > 1 else ["-n", "0"]
    pytest = ["-q", *spread, "-p", "no:schemathesis", "-p", "no:cacheprovider"]
    steps = [
        Step("format", [str(SCRIPTS / "ruff"), "format", "--check", "."]),
        Step("lint", [str(SCRIPTS / "ruff"), "check", "."]),
        Step("layers", [str(SCRIPTS / "lint-imports")]),
        Step("types", [str(SCRIPTS / "mypy"), *typed]),
        Step("unit tests", [sys.executable, "-m", "pytest", *pytest, "tests/unit"]),
    ]
    for step in steps:
        step.start()
    passed = [step.finish() for step in steps]
    print(f"{sum(passed)} of {len(steps)} checks passed in {time.monotonic() - started:.0f} s")
    return 0 if all(passed) else 1


def format_code() -> int:
    """Fix what can be fixed, then format."""
    fixed = subprocess.call([str(SCRIPTS / "ruff"), "check", "--fix", "."], cwd=ROOT)
    return subprocess.call([str(SCRIPTS / "ruff"), "format", "."], cwd=ROOT) or fixed


def run_benchmark(words: Sequence[str]) -> int:
    """Run ``benchmarks/<name>.py`` against throw-away services; without a name, list what there
    is.
    """
    names = sorted(
        path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_")
    )
    if not words or words[0] not in names:
        print(
            "usage: dev.py bench NAME [option ...]\nbenchmarks: "
            + (", ".join(names) or "none yet"),
            file=sys.stderr,
        )
        return 0 if not words else 2
    with tempfile.TemporaryDirectory(prefix="horde-bench-") as folder:
        services = Services(Path(folder) / "state", os.environ)
        try:
            environment = {**os.environ, **services.start().build_environment()}
            return subprocess.call(
                [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]],
                cwd=ROOT,
                env=environment,
            )
        except StartFailed as error:
            print(f"dev.py: {error}", file=sys.stderr)
            return 1
        finally:
            services.stop()
            services.remove()
