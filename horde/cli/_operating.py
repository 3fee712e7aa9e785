# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the commands of operators share: settings, connections, and a failure in one sentence."""

import os
import sys
from collections.abc import Callable, Mapping

from sqlalchemy.exc import DBAPIError

from horde import db, r2, redis_ctrl
from horde.config import Config
from horde.database.migrate import SchemaError, check_secret_key, require_current_schema
from horde.exceptions import HordeError
from horde.logger import configure_logging
from horde.r2 import StoreUnavailable
from horde.redis_ctrl import RedisUnavailable

REFUSALS = (SchemaError, HordeError, StoreUnavailable, RedisUnavailable)
WRONG_SCHEMA_CODES = ("42P01", "42703")  # no such table, no such column


class CommandRefused(Exception):
    """What was asked for cannot be done; the message says why."""


def read_settings(environment: Mapping[str, str], *, uses_keys: bool) -> Config:
    """The settings of a command. One that makes and checks no key needs no `secret_key`.

    Raises ConfigError.
    """
    if not uses_keys and not environment.get("secret_key", "").strip():
        environment = {**environment, "secret_key": "not used by this command"}
    return Config.from_environment(environment)


def run_on_database(
    command: str, act: Callable[[Config], int], *, refused_code: int, uses_keys: bool = False
) -> int:
    """Connect, see that the schema is this version's, and act. The exit code of `act`, or
    `refused_code` after one sentence on stderr. Raises ConfigError.
    """
    config = read_settings(os.environ, uses_keys=uses_keys)
    configure_logging(config.log_level, config.log_json)
    try:
        engine = db.connect(config)
        require_current_schema(engine)
        if uses_keys:
            check_secret_key(engine, config.secret_key)
        return act(config)
    except (*REFUSALS, CommandRefused) as error:
        print(f"horde {command}: {error}", file=sys.stderr)
    except DBAPIError as error:
        print(f"horde {command}: {describe_database_error(error)}", file=sys.stderr)
    finally:
        r2.disconnect()
        redis_ctrl.disconnect()
        db.disconnect()
    return refused_code


def describe_database_error(error: DBAPIError) -> str:
    """One sentence of what the driver says over many lines, without the statement."""
    if getattr(error.orig, "pgcode", None) in WRONG_SCHEMA_CODES:
        return "The database lacks what this version needs: run `horde db migrate`."
    lines = str(error.orig).strip().splitlines()
    return lines[0].strip() if lines else type(error.orig).__name__
