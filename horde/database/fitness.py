# SPDX-License-Identifier: AGPL-3.0-or-later
"""Whether a database can carry a horde, asked once at the start of the server and of a migration.

Source: docs/how-to/deploy.md, "The database".
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, NullPool, text
from sqlalchemy.exc import DBAPIError

from horde import postgres
from horde.config import Config
from horde.database.migrate import SchemaError

NEEDED_ENCODING = "UTF8"
CHECK_SECONDS = 10.0
LENDING_ROUNDS = 3  # a busy pooler may give two clients different servers by chance

_NEEDS_SESSIONS = (
    "lends sessions of the server for a transaction, as a pooler in transaction mode does. The"
    " election of the leader and migrations need a session of their own: set"
    " HORDE_DATABASE_DIRECT_URL to an address of the server itself."
)


class DatabaseUnfit(SchemaError):
    """The database or the way to it cannot carry a horde; the message says what to change."""


@contextmanager
def open_session_engine(config: Config, *, answer_seconds: float | None = None) -> Iterator[Engine]:
    """An engine without a pool on the address that gives sessions of their own, closed at the
    end.
    """
    engine = postgres.build_engine(
        config.session_url,
        answer_seconds=answer_seconds,
        name="horde session",
        poolclass=NullPool,
    )
    try:
        yield engine
    finally:
        engine.dispose()


def check_database(config: Config) -> None:
    """Raise DatabaseUnfit for an encoding that loses text, for a session address that lends its
    sessions, or for two addresses of different databases; a driver's error when there is none.
    """
    with open_session_engine(config, answer_seconds=CHECK_SECONDS) as engine:
        check_encoding(engine)
        check_sessions(engine, config)


def check_sessions(engine: Engine, config: Config) -> None:
    """Raise DatabaseUnfit where the session address lends its sessions or leads to another
    database than the ordinary one; `engine` is on the session address.
    """
    if lends_sessions(engine):
        setting = "HORDE_DATABASE_DIRECT_URL" if config.database_direct_url else "DATABASE_URL"
        raise DatabaseUnfit(f"The address in {setting} {_NEEDS_SESSIONS}")
    if config.database_direct_url:
        check_same_database(engine, config)


def check_encoding(engine: Engine) -> None:
    """Raise DatabaseUnfit unless the database stores any text."""
    with _open(engine) as connection:
        encoding = connection.scalar(text("SHOW server_encoding"))
    if encoding != NEEDED_ENCODING:
        raise DatabaseUnfit(
            f"The database stores text as {encoding}, which holds not every character. Make one"
            " with ENCODING 'UTF8' TEMPLATE template0, and load your data into it."
        )


def lends_sessions(engine: Engine) -> bool:
    """Whether two connections may have one session of the server in turn.

    A server tells a new connection the number of its own process. Where something else stands
    between, another client may be given that process while the first one is still connected.
    """
    with _open(engine) as first, _open(engine) as second:
        if _get_announced_process(first) == _get_process(first):
            return False
        try:
            for _ in range(LENDING_ROUNDS):
                lent = _get_process(first)
                second.execute(text("BEGIN"))
                if _get_process(second) == lent or _get_process(first) != lent:
                    return True
                second.execute(text("COMMIT"))
        except DBAPIError:  # it knows no transactions, or has one server process for both
            return True
    return False


def check_same_database(engine: Engine, config: Config) -> None:
    """Raise DatabaseUnfit when the direct address leads elsewhere than the ordinary one."""
    key = secrets.randbits(62)
    ordinary = postgres.build_engine(
        config.database_url, answer_seconds=CHECK_SECONDS, name="horde", poolclass=NullPool
    )
    seen = text(
        """
        SELECT EXISTS (
            SELECT FROM pg_locks
            WHERE locktype = 'advisory' AND granted AND objsubid = 1
                AND (classid::bigint << 32) | objid::bigint = :key
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        )
        """
    )
    try:
        with _open(engine) as direct, _open(ordinary) as other:
            direct.execute(text("SELECT pg_advisory_lock(:key)"), {"key": key})
            is_same = other.scalar(seen, {"key": key})
    finally:
        ordinary.dispose()
    if not is_same:
        raise DatabaseUnfit(
            "HORDE_DATABASE_DIRECT_URL and DATABASE_URL lead to different databases."
        )


def _open(engine: Engine) -> Connection:
    return engine.connect().execution_options(isolation_level="AUTOCOMMIT")


def _get_process(connection: Connection) -> int:
    return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())


def _get_announced_process(connection: Connection) -> int:
    return int(connection.connection.dbapi_connection.info.backend_pid)  # type: ignore[union-attr]


def read_server_version(engine: Engine) -> str:
    """The version of Postgres. Raises DBAPIError."""
    with engine.connect() as connection:
        return str(connection.scalar(text("SHOW server_version")))
