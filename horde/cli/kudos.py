# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde kudos audit`: replay the ledger and compare it with the balances."""

import argparse
import json
import os
import sys
from dataclasses import asdict

from sqlalchemy.exc import DBAPIError

from horde import db
from horde.config import Config
from horde.database.kudos import audit_ledger
from horde.exceptions import ServiceUnavailable
from horde.logger import configure_logging

EXIT_DISCREPANCIES = 1
EXIT_REFUSED = 2  # the audit did not run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser(
        "audit",
        help="prove the balances; exit code 1 when something does not add up. Changes nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report as JSON; the exit code."""
    config = Config.from_environment(os.environ)
    configure_logging(config.log_level, config.log_json)
    try:
        db.connect(config)
        with db.transaction() as session:
            report = audit_ledger(session)
    except ServiceUnavailable as error:
        print(f"horde kudos: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except DBAPIError as error:
        print(f"horde kudos: {str(error.orig).strip()}", file=sys.stderr)
        return EXIT_REFUSED
    finally:
        db.disconnect()
    print(json.dumps(asdict(report), indent=2))
    return EXIT_DISCREPANCIES if report.discrepancies else 0
