# SPDX-License-Identifier: AGPL-3.0-or-later
"""The ``horde`` command: ``horde <command> [...]``.

Each command is the module ``horde.cli.<command>`` with ``add_arguments(parser)`` and ``run(args) ->
int`` (the exit code). Only the module of the chosen command is imported, so ``horde bridge`` runs
where only the bridge's dependencies are installed.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Collection, Iterator, MutableMapping, Sequence

# Imported for what it does to loguru, which has to come before any command imports the SDK.
import horde.logger  # noqa: F401  imported for its effect
from horde.config import VERSION
from horde.settings import ConfigError

COMMANDS = {
    "serve": "run the API",
    "front": "run the OpenAI-compatible front",
    "bridge": "run the reference worker for an OpenAI-compatible backend",
    "db": "apply the schema changes",
    "user": "create, list and show users; change their roles and kudos",
    "worker": "list workers; pause them, put them into maintenance, and write to them",
    "kudos": "audit the kudos ledger, and move kudos between accounts",
    "block": "refuse addresses and networks",
    "filter": "keep the rules for prompts",
    "evidence": "read prompts that were refused or reported, and note things on them",
    "mode": "show or set the switches of the whole horde",
    "acts": "list what moderators and operators did",
    "store": "audit the object store",
    "config": "check the settings, and whether the services fit them",
}

EXIT_MISSING_DEPENDENCY = 1
EXIT_USAGE = 2  # as argparse's

# Set before the libraries are imported, and inherited by the processes a command starts.
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
LIBRARY_SETTINGS = {
    # Importing the SDK reads a `.env` of the working directory into the environment: a stray file
    # must not change settings.
    "PYTHON_DOTENV_DISABLED": "1",
    # The SDK's dependency on logfire registers a pydantic plugin of 500 modules that nothing here
    # uses.
    "PYDANTIC_DISABLE_PLUGINS": "logfire-plugin",
}

# Settings of ours that libraries of the SDK read under the same names when they are imported. They
# end the process with a traceback when they cannot use a value, an empty one too.
SHARED_NAMES = ("HORDE_URL",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``arguments`` are those of the process unless
    given.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:
        return print_version(given[1:])
    # Only the first word is read here: `horde bridge --help` belongs to the command.
    command: str = build_parser().parse_args(given[:1]).command
    for name, value in LIBRARY_SETTINGS.items():
        os.environ.setdefault(name, value)
    keep_loopback_direct(os.environ)
    try:
        with hidden_from_libraries(os.environ):
            module = importlib.import_module(f"horde.cli.{command}")
    except ModuleNotFoundError as error:
        print(
            f"horde {command}: {error.name} is not installed; install this command's dependencies.",
            file=sys.stderr,
        )
        return EXIT_MISSING_DEPENDENCY
    parser = argparse.ArgumentParser(prog=f"horde {command}", description=COMMANDS[command])
    module.add_arguments(parser)
    try:
        words = join_keys(given[1:], getattr(module, "KEY_OPTIONS", ()))
        exit_code: int = module.run(parser.parse_args(words))
    except ConfigError as error:
        print(f"horde {command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    return exit_code


def print_version(options: Sequence[str]) -> int:
    """Print the version of the API and its schema, which are one."""
    parser = argparse.ArgumentParser(prog="horde --version")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    wants_json: bool = parser.parse_args(options).json
    print(json.dumps({"version": VERSION}) if wants_json else f"horde {VERSION}")
    return 0


def keep_loopback_direct(environment: MutableMapping[str, str]) -> None:
    """Name this machine among the hosts that no proxy is asked for: a proxy for the way out cannot
    reach a service that runs here. Libraries read one spelling or the other.
    """
    for name in ("NO_PROXY", "no_proxy"):
        known = [word.strip() for word in environment.get(name, "").split(",") if word.strip()]
        missing = [host for host in LOOPBACK_NAMES if host not in known]
        environment[name] = ",".join(known + missing)


def join_keys(words: Sequence[str], options: Collection[str]) -> list[str]:
    """The words with the key after each of these options joined to it: one key in sixty-four begins
    with a dash, and would be taken for an option.
    """
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in options:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


@contextlib.contextmanager
def hidden_from_libraries(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Take the shared names away while libraries are imported: our own code judges their values."""
    hidden = {name: environment.pop(name) for name in SHARED_NAMES if name in environment}
    try:
        yield
    finally:
        environment.update(hidden)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the first word."""
    listing = "\n".join(f"  {name:<8} {summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="horde",
        usage="horde <command> [options]",
        epilog=f"commands:\n{listing}\n\n`horde <command> --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # Read by `main` before; named here for the help.
    parser.add_argument("--version", action="store_true", help="print the version (--json)")
    parser.add_argument(
        "command", choices=COMMANDS, metavar="command", help="one of the commands below"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
