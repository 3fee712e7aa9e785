# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde db migrate` and `horde db status`."""

import argparse
import os
import sys
from collections.abc import Sequence

from sqlalchemy.exc import DBAPIError

from horde import db
from horde.config import Config
from horde.database.migrate import MigrationState, SchemaError, list_migration_states, migrate
from horde.logger import configure_logging

EXIT_REFUSED = 1
EXIT_BEHIND = 3  # `status` of a database on which a file has still to run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", required=True)
    migrating = actions.add_parser("migrate", help="apply the schema changes that have not run yet")
    migrating.add_argument(
        "--to", metavar="VERSION", help="stop after this version instead of the newest"
    )
    actions.add_parser(
        "status", help="list the schema versions; exit code 3 when some have not run"
    )


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    config = Config.from_environment(os.environ)
    configure_logging(config.log_level, config.log_json)
    try:
        engine = db.connect(config)
        if args.action == "status":
            return print_states(list_migration_states(engine))
        applied = migrate(engine, secret_key=config.secret_key, target=args.to)
    except SchemaError as error:
        print(f"horde db: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except DBAPIError as error:
        print(f"horde db: {str(error.orig).strip()}", file=sys.stderr)
        return EXIT_REFUSED
    finally:
        db.disconnect()
    print(f"applied {', '.join(applied)}" if applied else "nothing to apply")
    return 0


def print_states(states: Sequence[MigrationState]) -> int:
    """One line a version, `5.1.15  2026-01-31 12:00:00  edited since`; the exit code of
    `status`.
    """
    for state in states:
        moment = (
            state.applied.isoformat(sep=" ", timespec="seconds") if state.applied else "not applied"
        )
        print(f"{state.version}  {moment}{'  edited since' if state.is_edited else ''}")
    return EXIT_BEHIND if any(state.applied is None for state in states) else 0
