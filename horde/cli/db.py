# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde db migrate` and `horde db status`."""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, OperationalError

from horde.cli._operating import describe_database_error, read_settings
from horde.database.fitness import check_database, open_session_engine
from horde.database.migrate import MigrationState, SchemaError, list_migration_states, migrate
from horde.logger import configure_logging

EXIT_REFUSED = 1
WAIT_PAUSE_SECONDS = 0.5
EXIT_BEHIND = 3  # `status` of a database on which a file has still to run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", required=True)
    migrating = actions.add_parser("migrate", help="apply the schema changes that have not run yet")
    migrating.add_argument(
        "--to", metavar="VERSION", help="stop after this version instead of the newest"
    )
    migrating.add_argument(
        "--wait",
        type=float,
        default=0,
        metavar="SECONDS",
        help="how long to try to reach a database that is starting (%(default)s)",
    )
    actions.add_parser(
        "status", help="list the schema versions; exit code 3 when some have not run"
    )


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code. Raises ConfigError."""
    # Only a migration stores a key, that of the anonymous account.
    config = read_settings(os.environ, uses_keys=args.action == "migrate")
    configure_logging(config.log_level, config.log_json)
    try:
        with open_session_engine(config) as engine:
            if args.action == "status":
                return print_states(list_migration_states(engine))
            wait_for_database(engine, args.wait)
            check_database(config)
            applied = migrate(engine, secret_key=config.secret_key, target=args.to)
    except SchemaError as error:
        print(f"horde db: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except DBAPIError as error:
        print(f"horde db: {describe_database_error(error)}", file=sys.stderr)
        return EXIT_REFUSED
    print(f"applied {', '.join(applied)}" if applied else "nothing to apply")
    return 0


def wait_for_database(engine: Engine, seconds: float) -> None:
    """Return once the database accepts connections, or when the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with engine.connect():
                return
        except OperationalError:
            time.sleep(WAIT_PAUSE_SECONDS)


def print_states(states: Sequence[MigrationState]) -> int:
    """One line a version, `5.1.15  2026-01-31 12:00:00  edited since`; the exit code of
    `status`.
    """
    for state in states:
        print(f"{state.version}  {describe_state(state)}")
    return EXIT_BEHIND if any(not state.is_present for state in states) else 0


def describe_state(state: MigrationState) -> str:
    """When a version was applied, or what is known of it instead."""
    if state.applied is None:
        return "present before this server" if state.is_present else "not applied"
    moment = state.applied.isoformat(sep=" ", timespec="seconds")
    return f"{moment}  edited since" if state.is_edited else moment
