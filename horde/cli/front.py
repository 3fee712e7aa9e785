# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde front`: run the OpenAI-compatible front."""

import argparse
import os
import sys

from horde.cli.options import read_with_options
from horde.front_config import FrontConfig
from horde.logger import configure_logging
from horde.oai.server import serve_front

EXIT_REFUSED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; each overrides a setting of the environment."""
    parser.add_argument(
        "--listen", metavar="ADDRESS", help="address to listen on (HORDE_OAI_HOST, 127.0.0.1)"
    )
    parser.add_argument("--port", metavar="N", help="port to listen on (HORDE_OAI_PORT, 7010)")
    parser.add_argument(
        "--native-url",
        metavar="URL",
        help="the API, without /v2 (HORDE_OAI_NATIVE_URL, http://127.0.0.1:7001/api)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; 0 after a graceful end, 1 when it cannot start. Raises
    ConfigError.
    """
    options = {
        "--listen HORDE_OAI_HOST": args.listen,
        "--port HORDE_OAI_PORT": args.port,
        "--native-url HORDE_OAI_NATIVE_URL": args.native_url,
    }
    config = read_with_options(FrontConfig.from_environment, os.environ, options)
    configure_logging(config.log_level, config.log_json)
    try:
        serve_front(config)
    except OSError as error:
        print(f"horde front: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0
