# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde serve`: run the API."""

import argparse
import dataclasses
import os
import sys

from sqlalchemy.exc import DBAPIError

from horde.config import Config, ConfigError
from horde.database.migrate import SchemaError
from horde.logger import configure_logging
from horde.server import serve

EXIT_REFUSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; each overrides a setting of the environment."""
    parser.add_argument(
        "--listen", metavar="ADDRESS", help="address to listen on (HORDE_LISTEN, 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port to listen on (HORDE_PORT, 7001)"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes (HORDE_SERVER_WORKERS, 2)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of each process (HORDE_SERVER_THREADS, 16)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; 0 after a graceful end, 1 when it cannot start."""
    try:
        config = override_settings(Config.from_environment(os.environ), args)
        configure_logging(config.log_level, config.log_json)
        serve(config)
    except (ConfigError, SchemaError, OSError) as error:
        print(f"horde serve: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except DBAPIError as error:
        print(f"horde serve: {str(error.orig).strip()}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def override_settings(config: Config, args: argparse.Namespace) -> Config:
    """The settings with what the command line says."""
    given = {
        "listen": args.listen,
        "port": args.port,
        "server_workers": args.workers,
        "server_threads": args.threads,
    }
    return dataclasses.replace(
        config, **{name: value for name, value in given.items() if value is not None}
    )
