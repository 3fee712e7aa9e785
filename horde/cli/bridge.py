# SPDX-License-Identifier: AGPL-3.0-or-later
"""``horde bridge``: serve a horde's chat and text jobs with an OpenAI-compatible backend.

The two secrets may come from the environment instead of the command line, where every user of the
machine can read them. They are read here and not in ``horde.config``, which belongs to the server
and may not be installed beside a bridge.
"""

import argparse
import os
import signal
import sys

from horde_sdk.generation_parameters.text.chat_policy import (
    KNOWN_CHAT_DECLARATIONS,
    parse_chat_declaration,
)
from horde_sdk.worker.chat_declaration import ChatImageTransport

from horde.bridge.addresses import parse_address, parse_key
from horde.bridge.backend import Backend
from horde.bridge.config import (
    DEFAULT_BRIDGE_AGENT,
    DEFAULT_GRACE_SECONDS,
    DEFAULT_MAX_LENGTH_TOKENS,
    BridgeConfig,
    Declared,
    TokenCounting,
)
from horde.bridge.horde_api import HordeApi
from horde.bridge.inputs import InputFetcher
from horde.bridge.loop import Bridge
from horde.logger import configure_logging

KEY_VARIABLE = "HORDE_BRIDGE_KEY"
BACKEND_KEY_VARIABLE = "HORDE_BRIDGE_BACKEND_KEY"
KEY_OPTIONS = ("--key", "--backend-key")
EXIT_USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``horde bridge``."""
    features = ", ".join(sorted(KNOWN_CHAT_DECLARATIONS))
    parser.epilog = f"FEATURE is one of: {features}. See docs/how-to/serve-jobs-with-the-bridge.md."

    horde = parser.add_argument_group("horde")
    horde.add_argument(
        "--api", required=True, metavar="URL", help="the horde's API, ending in /api"
    )
    horde.add_argument(
        "--key", metavar="KEY", help=f"API key of the worker's owner (or {KEY_VARIABLE})"
    )
    horde.add_argument("--name", required=True, help="the worker's name, unique in the horde")
    horde.add_argument(
        "--bridge-agent",
        default=DEFAULT_BRIDGE_AGENT,
        metavar="AGENT",
        help="name:version:url (%(default)s)",
    )

    backend = parser.add_argument_group("backend")
    backend.add_argument(
        "--backend", required=True, metavar="URL", help="the backend's OpenAI routes, ending in /v1"
    )
    backend.add_argument(
        "--backend-key",
        metavar="KEY",
        help=f"bearer token for the backend (or {BACKEND_KEY_VARIABLE})",
    )
    backend.add_argument(
        "--backend-model", metavar="NAME", help="the model as the backend calls it (its first)"
    )

    jobs = parser.add_argument_group("jobs")
    jobs.add_argument(
        "--model", metavar="NAME", help="the model as the horde calls it (as the backend does)"
    )
    jobs.add_argument(
        "--threads", type=int, default=1, metavar="N", help="jobs at a time (%(default)s)"
    )
    jobs.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=(
            f"longest reply in tokens ({DEFAULT_MAX_LENGTH_TOKENS}, or half of a context under"
            " twice that)"
        ),
    )
    jobs.add_argument(
        "--max-context-length",
        type=int,
        metavar="N",
        help="context in tokens (what the backend reports)",
    )
    jobs.add_argument("--no-chat", action="store_true", help="take text jobs only")
    jobs.add_argument("--no-text", action="store_true", help="take chat jobs only")
    jobs.add_argument(
        "--supports",
        action="append",
        default=[],
        type=parse_declared,
        metavar="FEATURE",
        help="declare a FEATURE that the backend has and the probe cannot see (repeatable)",
    )
    jobs.add_argument(
        "--exclude",
        action="append",
        default=[],
        type=parse_declared,
        metavar="FEATURE",
        help="withhold a FEATURE from the declaration (repeatable)",
    )
    jobs.add_argument(
        "--count-tokens",
        type=TokenCounting,
        choices=list(TokenCounting),
        default=TokenCounting.BACKEND,
        metavar="HOW",
        help="refuse prompts that a backend would cut: by its tokeniser where it has a route for it"
        " (backend), else by an estimate (estimate), or not (off) (%(default)s)",
    )
    jobs.add_argument(
        "--tools-max-temperature",
        type=float,
        metavar="F",
        help="highest temperature the backend applies beside tools (any)",
    )

    jobs.add_argument(
        "--image-transport",
        action="append",
        type=ChatImageTransport,
        choices=list(ChatImageTransport),
        metavar="TRANSPORT",
        help="how images may come: url, base64 or messages_url (repeatable; all)",
    )

    process = parser.add_argument_group("process")
    process.add_argument(
        "--grace-seconds",
        type=float,
        default=DEFAULT_GRACE_SECONDS,
        metavar="S",
        help="time for running jobs on SIGTERM or SIGINT (%(default)s)",
    )
    process.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="(%(default)s)",
    )
    process.add_argument(
        "--log-format", choices=("text", "json"), help="(text on a terminal, else json)"
    )


def parse_declared(value: str) -> Declared:
    """Read a feature or guarantee by its name on the wire. Raises argparse's error for an unknown
    one.
    """
    declared = parse_chat_declaration(value)
    if declared is None:
        raise argparse.ArgumentTypeError(f"unknown feature {value!r}")
    return declared


def build_config(
    args: argparse.Namespace, api_key: str | None, backend_key: str | None
) -> BridgeConfig:
    """Turn parsed arguments and the keys into a configuration.

    Raises ``ValueError`` with a sentence for the operator.
    """
    api_key = parse_key(api_key, f"--key or {KEY_VARIABLE}")
    if api_key is None:
        raise ValueError(f"an API key is needed: --key or {KEY_VARIABLE}.")
    return BridgeConfig(
        api_url=parse_address(args.api, "--api", "/v2"),
        api_key=api_key,
        backend_url=parse_address(args.backend, "--backend", "/chat/completions", "/models"),
        backend_key=parse_key(backend_key, f"--backend-key or {BACKEND_KEY_VARIABLE}"),
        worker_name=args.name,
        model=args.model,
        backend_model=args.backend_model,
        threads=args.threads,
        max_length=args.max_length,
        max_context_length=args.max_context_length,
        serves_chat=not args.no_chat,
        serves_text=not args.no_text,
        supports=frozenset(args.supports),
        exclude=frozenset(args.exclude),
        token_counting=args.count_tokens,
        tools_max_temperature=args.tools_max_temperature,
        image_transports=frozenset(args.image_transport or ChatImageTransport),
        bridge_agent=args.bridge_agent,
        grace_seconds=args.grace_seconds,
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT: 0. 1 when the horde or the backend rules the bridge out, 2 for
    wrong options.
    """
    log_format = args.log_format or ("text" if sys.stderr.isatty() else "json")
    configure_logging(args.log_level, json=log_format == "json")
    try:
        config = build_config(
            args,
            args.key or os.environ.get(KEY_VARIABLE),
            args.backend_key or os.environ.get(BACKEND_KEY_VARIABLE),
        )
    except ValueError as error:
        print(f"horde bridge: {error}", file=sys.stderr)
        return EXIT_USAGE
    horde = HordeApi(config.api_url, config.api_key, config.bridge_agent)
    backend = Backend(config.backend_url, config.backend_key)
    inputs = InputFetcher()
    bridge = Bridge(config, horde, backend, inputs)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: bridge.stop())
    exit_code = bridge.run()
    for connection in (horde, backend, inputs):
        connection.close()
    return exit_code
