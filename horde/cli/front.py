# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde front`: run the OpenAI-compatible front."""

import argparse
import os
import sys

from horde.config import ConfigError, FrontConfig
from horde.logger import configure_logging
from horde.oai.server import serve_front

EXIT_REFUSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; each overrides a setting of the environment."""
    parser.add_argument(
        "--listen", metavar="ADDRESS", help="address to listen on (HORDE_OAI_HOST, 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port to listen on (HORDE_OAI_PORT, 7010)"
    )
    parser.add_argument(
        "--native-url",
        metavar="URL",
        help="the API, without /v2 (HORDE_OAI_NATIVE_URL, http://127.0.0.1:7001/api)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; 0 after a graceful end, 1 when it cannot start."""
    given = {
        "HORDE_OAI_HOST": args.listen,
        "HORDE_OAI_PORT": args.port,
        "HORDE_OAI_NATIVE_URL": args.native_url,
    }
    environment = {
        **os.environ,
        **{name: str(value) for name, value in given.items() if value is not None},
    }
    try:
        config = FrontConfig.from_environment(environment)
        configure_logging(config.log_level, config.log_json)
        serve_front(config)
    except (ConfigError, OSError, OverflowError) as error:
        print(f"horde front: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0
