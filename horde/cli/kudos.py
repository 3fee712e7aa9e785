# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde kudos audit`: replay the ledger and compare it with the balances."""

import argparse
import json
from dataclasses import asdict

from horde import db
from horde.cli._operating import run_on_database
from horde.config import Config
from horde.database.kudos import audit_ledger

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
    return run_on_database("kudos", audit, refused_code=EXIT_REFUSED)


def audit(_config: Config) -> int:
    """Replay the ledger in one transaction."""
    with db.transaction() as session:
        report = audit_ledger(session)
    print(json.dumps(asdict(report), indent=2))
    return EXIT_DISCREPANCIES if report.discrepancies else 0
