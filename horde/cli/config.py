# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde config check`: whether the settings can be used, and whether the services fit them."""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass

from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from horde import r2
from horde.cli.bridge import BACKEND_KEY_VARIABLE, KEY_VARIABLE
from horde.config import Config
from horde.database.fitness import (
    NEEDED_ENCODING,
    check_encoding,
    check_sessions,
    open_session_engine,
    read_server_version,
)
from horde.database.migrate import SchemaError, check_secret_key, require_current_schema
from horde.front_config import FrontConfig
from horde.outbound import OutboundFailed, fetch_text
from horde.r2 import StoreUnavailable
from horde.redis_ctrl import build_client, cache_db
from horde.setting_kinds import DatabaseParts, RedisParts
from horde.settings import ConfigError, iter_settings

EXIT_MISFIT = 1  # the settings can be used, and a service does not fit them
EXIT_UNUSABLE = 2
CONNECT_SECONDS = 5
ANSWER_SECONDS = 30.0
PROBE_KEY = "horde:config_check"
PROBE_MILLISECONDS = 1000
MAX_ANSWER_BYTES = 64 * 1024
SETTINGS = (Config, FrontConfig, DatabaseParts, RedisParts)
"""Every dataclass of settings that the server and the front read."""
# Read by other programs of this project.
OTHER_NAMES = frozenset({KEY_VARIABLE, BACKEND_KEY_VARIABLE, "HORDE_PYTHON"})

type Probe = Callable[[], str]
"""Looks at one thing and says what it found; raises for what does not fit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; `fits` is None where there was nothing to check."""

    name: str
    fits: bool | None
    detail: str


class Misfit(Exception):
    """Something does not fit the settings; the message says what, and shows no value of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions."""
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser(
        "check",
        help="exit code 2 when a setting cannot be used, 1 when a service does not fit."
        " Changes nothing",
    )
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.add_argument(
        "--only", choices=("server", "front"), help="the settings of one program (both)"
    )


def run(args: argparse.Namespace) -> int:
    """Print what was found; the exit code."""
    findings = list(check(os.environ, args.only))
    unusable = any(found.fits is False and "settings" in found.name for found in findings)
    misfit = any(found.fits is False for found in findings)
    if args.json:
        report = {"fits": not misfit, "checks": [asdict(found) for found in findings]}
        print(json.dumps(report, indent=2))
    else:
        for found in findings:
            word = {True: "ok", False: "FAIL", None: "-"}[found.fits]
            print(f"{word:<4}  {found.name:<16}  {found.detail}")
    return EXIT_UNUSABLE if unusable else EXIT_MISFIT if misfit else 0


def check(environment: Mapping[str, str], only: str | None) -> Iterator[Finding]:
    """Every finding, those of the settings first."""
    yield from list_unknown_names(environment)
    if only != "front":
        yield from list_server_findings(environment)
    if only != "server":
        yield from list_front_findings(environment)


def list_unknown_names(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Names that look like a setting and are none: a typing error leaves the default in place."""
    known = {name for name, _ in iter_settings(*SETTINGS)} | OTHER_NAMES
    for name in sorted(environment):
        if name.startswith("HORDE_") and name not in known:
            yield Finding("unknown setting", None, f"{name} is no setting of this version")


def list_server_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The settings of the API and its commands, and the services they name."""
    try:
        config = Config.from_environment(environment)
    except ConfigError as error:
        yield Finding("server settings", False, str(error))
        return
    yield Finding("server settings", True, "can be used")
    with open_session_engine(config, answer_seconds=ANSWER_SECONDS) as engine:
        database = probe("database", lambda: describe_database(engine))
        yield database
        if database.fits:
            yield probe("encoding", lambda: describe_encoding(engine))
            yield probe("sessions", lambda: describe_sessions(engine, config))
            yield probe("schema", lambda: describe_schema(engine))
            yield probe("secret_key", lambda: describe_secret_key(engine, config.secret_key))
    yield probe("redis", lambda: describe_redis(config.redis_url))
    if config.s3_endpoint:
        yield probe("object store", lambda: describe_store(config))
    else:
        yield Finding("object store", None, "S3_ENDPOINT is not set: no images, no offload")


def list_front_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The settings of the front, and the API and the Redis they name."""
    try:
        config = FrontConfig.from_environment(environment)
    except ConfigError as error:
        yield Finding("front settings", False, str(error))
        return
    yield Finding("front settings", True, "can be used")
    yield probe("front's API", lambda: describe_api(config.native_url))
    redis_url = config.redis_url
    if redis_url is None:
        yield Finding("front's redis", None, "HORDE_OAI_REDIS_URL is off")
    else:
        yield probe("front's redis", lambda: describe_redis(redis_url))


def probe(name: str, look: Probe) -> Finding:
    """One finding. Of what failed only what the service said, or the kind of the failure."""
    try:
        return Finding(name, True, look())
    except (Misfit, SchemaError, ConfigError) as error:
        return Finding(name, False, str(error))
    except DBAPIError as error:
        said = " ".join(str(error.orig).split())
        return Finding(name, False, f"DATABASE_URL: {said or type(error.orig).__name__}")


def describe_database(engine: Engine) -> str:
    """The server's version. Raises DBAPIError."""
    return f"Postgres {read_server_version(engine)}"


def describe_encoding(engine: Engine) -> str:
    """The encoding, which has to be able to write every text. Raises DatabaseUnfit."""
    check_encoding(engine)
    return NEEDED_ENCODING


def describe_sessions(engine: Engine, config: Config) -> str:
    """That the election and migrations have sessions of their own. Raises DatabaseUnfit."""
    check_sessions(engine, config)
    return "are not lent"


def describe_schema(engine: Engine) -> str:
    """That nothing is missing. Raises SchemaError."""
    require_current_schema(engine)
    return "current"


def describe_secret_key(engine: Engine, secret_key: str) -> str:
    """That the stored keys can be used. Raises ConfigError."""
    check_secret_key(engine, secret_key)
    return "is the one of the database's keys"


def describe_redis(url: str) -> str:
    """That it takes a write, which one that is read-only or full refuses."""
    try:
        with closing(build_client(url, cache_db)) as client:
            client.set(PROBE_KEY, "1", px=PROBE_MILLISECONDS)
    except RedisError as error:
        raise Misfit(f"no write: {type(error).__name__}") from error
    return "takes writes"


def describe_store(config: Config) -> str:
    """That the buckets can be read."""
    r2.connect(config)
    try:
        r2.check_buckets()
    except StoreUnavailable as error:
        raise Misfit(f"a bucket cannot be read: {type(error.__cause__).__name__}") from error
    finally:
        r2.disconnect()
    return "has its buckets"


def describe_api(native_url: str) -> str:
    """That it answers its heartbeat."""
    url = f"{native_url}/v2/status/heartbeat"
    try:
        answer = fetch_text(url, timeout_seconds=CONNECT_SECONDS, max_bytes=MAX_ANSWER_BYTES)
    except OutboundFailed as error:
        raise Misfit(f"HORDE_OAI_NATIVE_URL: no answer ({error})") from error
    if answer.status != 200:
        raise Misfit(f"HORDE_OAI_NATIVE_URL: the heartbeat answers {answer.status}")
    return "answers"
