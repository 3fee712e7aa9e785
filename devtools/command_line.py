# SPDX-License-Identifier: AGPL-3.0-or-later
"""The command line of dev.py. Runs on Python 3.8, before .venv exists."""

import argparse
import os
from typing import List, MutableMapping, NoReturn

DEFAULT_PORT = 7001
DEFAULT_FRONT_PORT = 7010
DEFAULT_STATE = os.path.join(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".dev", "run"
)

# What `horde bridge` has to be told of a backend that does not tell it itself. The lists repeat.
WORKER_OPTIONS = (
    "--backend-model",
    "--model",
    "--threads",
    "--max-length",
    "--max-context-length",
    "--count-tokens",
    "--tools-max-temperature",
)
WORKER_LISTS = ("--supports", "--exclude", "--image-transport")
WORKER_FLAGS = ("--no-chat", "--no-text")

# Everything behind these words belongs to pytest or to the benchmark, whatever it looks like.
PASS_THROUGH_COMMANDS = ("test", "bench")


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
LARGEST_PORT = 65535


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one sentence, and not how everything is spelt."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"dev.py: {message}; `{self.prog} --help` explains the options\n")


def parse(words: List[str]) -> argparse.Namespace:
    """Read the words after ``dev.py``. Exits with 2 and a usage line when they make no sense."""
    parser = build_parser()
    if words and words[0] in PASS_THROUGH_COMMANDS and words[1:2] not in (["-h"], ["--help"]):
        return argparse.Namespace(command=words[0], rest=words[1:])
    return parser.parse_args(words)


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options and help."""
    parser = Parser(prog="python3 dev.py", description="Run, test and check this project.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.required = True

    run = commands.add_parser(
        "run", help="start services, API, front, a small model and a worker; Ctrl-C stops them"
    )
    run.add_argument(
        "--port", type=parse_port, default=DEFAULT_PORT, help="port of the API (%(default)s)"
    )
    run.add_argument(
        "--front-port",
        type=parse_port,
        help=(
            f"port of the OpenAI-compatible front ({DEFAULT_FRONT_PORT}, or a free one if it is"
            " taken)"
        ),
    )
    add_state_option(run)
    run.add_argument(
        "--no-worker", action="store_true", help="start neither the model nor the worker"
    )
    run.add_argument(
        "--backend",
        metavar="URL",
        help="serve this OpenAI-compatible backend instead of the small model; its key comes from"
        " HORDE_BRIDGE_BACKEND_KEY",
    )
    run.add_argument(
        "--detach",
        action="store_true",
        help="return when everything answers; `dev.py stop` ends it",
    )

    add_worker_options(run)

    stop = commands.add_parser("stop", help="stop what `run --detach` started")
    add_state_option(stop)

    test = commands.add_parser(
        "test", help="run the tests with throw-away services; options go to pytest", add_help=True
    )
    test.add_argument("rest", nargs="*", metavar="pytest option")
    commands.add_parser("check", help="formatting, lint, types, import layers and unit tests")
    commands.add_parser("fmt", help="format and fix what can be fixed")
    bench = commands.add_parser("bench", help="run a benchmark, or list them")
    bench.add_argument("rest", nargs="*", metavar="name [option]")
    return parser


def add_worker_options(run: argparse.ArgumentParser) -> None:
    """The options that are handed on to the worker as they are."""
    group = run.add_argument_group("worker", "as `horde bridge --help` explains them")
    for option in WORKER_OPTIONS:
        group.add_argument(option, metavar="VALUE")
    for option in WORKER_LISTS:
        group.add_argument(option, metavar="VALUE", action="append")
    for option in WORKER_FLAGS:
        group.add_argument(option, action="store_true")


def list_worker_words(arguments: argparse.Namespace) -> List[str]:
    """The worker's options as words, again."""

    def get(option: str) -> object:
        return getattr(arguments, option[2:].replace("-", "_"), None)

    words = [f"{option}={get(option)}" for option in WORKER_OPTIONS if get(option) is not None]
    for option in WORKER_LISTS:
        values = get(option)
        words += [f"{option}={value}" for value in (values if isinstance(values, list) else [])]
    return words + [option for option in WORKER_FLAGS if get(option)]


def add_state_option(parser: argparse.ArgumentParser) -> None:
    """The folder that tells one stack from another."""
    parser.add_argument(
        "--state",
        metavar="DIR",
        type=os.path.abspath,
        default=DEFAULT_STATE,
        help="where data, logs and run.json live (.dev/run)",
    )


def parse_port(text: str) -> int:
    """A port to listen on."""
    try:
        port = int(text)
    except ValueError:
        port = 0
    if not 1 <= port <= LARGEST_PORT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no port: it has to be a number from 1 to {LARGEST_PORT}"
        )
    return port


def keep_loopback_direct(environment: MutableMapping[str, str]) -> None:
    """Name this machine among the hosts that no proxy is asked for.

    The services run here: a proxy for the way out cannot reach them. Programs read one spelling
    or the other.
    """
    for name in ("NO_PROXY", "no_proxy"):
        known = [word.strip() for word in environment.get(name, "").split(",") if word.strip()]
        missing = [host for host in LOOPBACK_NAMES if host not in known]
        environment[name] = ",".join(known + missing)


def needs_demo_model(arguments: argparse.Namespace) -> bool:
    """Whether the command serves the small model, which is a download of its own."""
    return bool(arguments.command == "run" and not arguments.no_worker and not arguments.backend)
