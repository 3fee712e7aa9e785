# SPDX-License-Identifier: AGPL-3.0-or-later
"""The ``horde`` command: ``horde <command> [...]``.

Each command is the module ``horde.cli.<command>`` with ``add_arguments(parser)`` and ``run(args) ->
int`` (the exit code). Only the module of the chosen command is imported, so ``horde bridge`` runs
where only the bridge's dependencies are installed.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# Imported for what it does to loguru, which has to come before any command imports the SDK.
import horde.logger  # noqa: F401  imported for its effect
from horde.settings import ConfigError

COMMANDS = {
    "serve": "run the API",
    "front": "run the OpenAI-compatible front",
    "bridge": "run the reference worker for an OpenAI-compatible backend",
    "db": "apply the schema changes",
    "user": "create users and change their roles and kudos",
    "kudos": "audit the kudos ledger",
    "store": "audit the object store",
    "config": "check the settings, and whether the services fit them",
}

EXIT_MISSING_DEPENDENCY = 1
EXIT_USAGE = 2  # as argparse's

# Set before the libraries are imported, and inherited by the processes a command starts.
LIBRARY_SETTINGS = {
    # Importing the SDK reads a `.env` of the working directory into the environment: a stray file
    # must not change settings.
    "PYTHON_DOTENV_DISABLED": "1",
    # The SDK's dependency on logfire registers a pydantic plugin of 500 modules that nothing here
    # uses.
    "PYDANTIC_DISABLE_PLUGINS": "logfire-plugin",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``arguments`` are those of the process unless
    given.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Only the first word is read here: `horde bridge --help` belongs to the command.
    command: str = build_parser().parse_args(given[:1]).command
    for name, value in LIBRARY_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
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
        exit_code: int = module.run(parser.parse_args(given[1:]))
    except ConfigError as error:
        print(f"horde {command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    return exit_code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the first word."""
    listing = "\n".join(f"  {name:<8} {summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="horde",
        usage="horde <command> [options]",
        epilog=f"commands:\n{listing}\n\n`horde <command> --help` lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "command", choices=COMMANDS, metavar="command", help="one of the commands below"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
