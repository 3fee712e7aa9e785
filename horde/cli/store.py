# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde store audit`: compare the object store with the rows that name its objects."""

import argparse
import json
from dataclasses import asdict

from horde import db, r2, redis_ctrl
from horde.cli._operating import run_on_database
from horde.config import Config
from horde.database.objects import audit_store

EXIT_DISCREPANCIES = 1
EXIT_REFUSED = 2  # the audit did not run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser(
        "audit",
        help="prove that every object belongs to a request; exit code 1 if not. Changes nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report as JSON; the exit code."""
    return run_on_database("store", audit, refused_code=EXIT_REFUSED)


def audit(config: Config) -> int:
    """List the objects and look each up."""
    redis_ctrl.connect(config)
    r2.connect(config)
    with db.reading() as session:
        report = audit_store(session)
    print(json.dumps(asdict(report), indent=2))
    return EXIT_DISCREPANCIES if report.has_discrepancies else 0
