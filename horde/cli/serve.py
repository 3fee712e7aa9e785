# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde serve`: run the API."""

import argparse
import os
import sys

from sqlalchemy.exc import DBAPIError

from horde.cli._operating import describe_database_error
from horde.cli.options import read_with_options
from horde.config import Config
from horde.database.migrate import SchemaError
from horde.logger import configure_logging
from horde.server import serve

EXIT_REFUSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; each overrides a setting of the environment."""
    parser.add_argument(
        "--listen", metavar="ADDRESS", help="address to listen on (HORDE_LISTEN, 127.0.0.1)"
    )
    parser.add_argument("--port", metavar="N", help="port to listen on (HORDE_PORT, 7001)")
    parser.add_argument("--workers", metavar="N", help="processes (HORDE_SERVER_WORKERS, 2)")
    parser.add_argument(
        "--threads", metavar="N", help="threads of each process (HORDE_SERVER_THREADS, 16)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; 0 after a graceful end, 1 when it cannot start. Raises
    ConfigError.
    """
    options = {
        "--listen HORDE_LISTEN": args.listen,
        "--port HORDE_PORT": args.port,
        "--workers HORDE_SERVER_WORKERS": args.workers,
        "--threads HORDE_SERVER_THREADS": args.threads,
    }
    config = read_with_options(Config.from_environment, os.environ, options)
    configure_logging(config.log_level, config.log_json)
    try:
        serve(config)
    except (SchemaError, OSError) as error:
        print(f"horde serve: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except DBAPIError as error:
        print(f"horde serve: DATABASE_URL: {describe_database_error(error)}", file=sys.stderr)
        return EXIT_REFUSED
    return 0
