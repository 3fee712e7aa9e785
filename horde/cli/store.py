# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde store audit`: compare the object store with the rows that name its objects."""

import argparse
import json
import os
import sys
from dataclasses import asdict

from sqlalchemy.exc import DBAPIError

from horde import db, r2, redis_ctrl
from horde.config import Config
from horde.database.objects import audit_store
from horde.exceptions import ServiceUnavailable
from horde.logger import configure_logging
from horde.r2 import StoreUnavailable
from horde.redis_ctrl import RedisUnavailable

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
    config = Config.from_environment(os.environ)
    configure_logging(config.log_level, config.log_json)
    try:
        db.connect(config)
        redis_ctrl.connect(config)
        r2.connect(config)
        with db.reading() as session:
            report = audit_store(session)
    except (ServiceUnavailable, StoreUnavailable, RedisUnavailable) as error:
        print(f"horde store: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except DBAPIError as error:
        print(f"horde store: {str(error.orig).strip()}", file=sys.stderr)
        return EXIT_REFUSED
    finally:
        r2.disconnect()
        redis_ctrl.disconnect()
        db.disconnect()
    print(json.dumps(asdict(report), indent=2))
    return EXIT_DISCREPANCIES if report.has_discrepancies else 0
