# SPDX-License-Identifier: AGPL-3.0-or-later
"""What every connection to Postgres is told, how long it may be waited for, and what its errors
mean.

libpq waits for a server that stopped answering as long as the kernel on the other side lives. The
wait callback of the driver puts a bound on every single answer instead.
"""

import logging
import select
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import psycopg2
from psycopg2 import extensions
from sqlalchemy import Dialect, Engine, create_engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, DisconnectionError

from horde.circuit_breaker import CircuitBreaker

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
SLOW_CONNECT_SECONDS = 1.0  # a failure that took longer is not waited for again at once
CONNECT_PAUSE_SECONDS = 1.0

# The server is going, is not the one that writes any more, or has ended this session: connection
# exceptions, operator intervention, a read-only transaction, ended idle and long transactions.
_GONE = ("08", "57P", "25006", "25P03", "25P04")
# The server answers and cannot serve now: out of disk, memory or connections, input or output
# failed, a statement cancelled for its time.
_OVERLOADED = ("53", "58", "57014")
DEADLOCKED = ("40P01", "40001")  # deadlock detected, serialization failure
LOCK_NOT_AVAILABLE = "55P03"

_CONNECTED = (
    extensions.STATUS_READY,
    extensions.STATUS_BEGIN,
    extensions.STATUS_PREPARED,
)

_wait_seconds: ContextVar[float | None] = ContextVar("horde_postgres_wait_seconds", default=None)


class AnswerTimeout(psycopg2.OperationalError):
    """The server did not answer in time; the connection is closed."""


class BoundedConnection(extensions.connection):
    """A connection whose every answer may take `answer_seconds`; None is no bound."""

    answer_seconds: float | None = None


def build_engine(
    url: str,
    *,
    answer_seconds: float | None,
    name: str,
    server_options: str | None = None,
    **options: Any,
) -> Engine:
    """An engine whose connections speak UTF-8 and notice a server that is gone.

    `answer_seconds` bounds the wait for each answer, None bounds only that for a connection. `name`
    is what the server lists its sessions under. `server_options` are settings of the session, which
    poolers refuse; `options` are SQLAlchemy's.
    """
    extensions.set_wait_callback(_wait_for_answer)
    arguments = {
        "connection_factory": BoundedConnection,
        "application_name": name,
        "client_encoding": "utf8",
        # A host that vanishes is noticed within half a minute, also by a connection nobody uses.
        "keepalives": 1,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 15_000,
        **({} if server_options is None else {"options": server_options}),
    }
    engine = create_engine(url, connect_args=arguments, hide_parameters=True, **options)
    breaker = CircuitBreaker(CONNECT_PAUSE_SECONDS, trial_seconds=2 * CONNECT_SECONDS)

    @event.listens_for(engine, "do_connect")
    def connect(dialect: Dialect, _record: object, words: Any, parameters: dict[str, Any]) -> Any:
        connection = _connect_guarded(dialect, words, parameters, breaker)
        connection.answer_seconds = answer_seconds
        return connection

    event.listen(engine, "handle_error", _note_lost_server)
    event.listen(engine, "checkout", _replace_if_dead)
    return engine


@contextmanager
def waiting_up_to(seconds: float) -> Iterator[None]:
    """Let each answer that this thread waits for take so long, whatever its connection says."""
    token = _wait_seconds.set(seconds)
    try:
        yield
    finally:
        _wait_seconds.reset(token)


def is_gone(error: DBAPIError) -> bool:
    """Whether the server or the session is gone, or the server has stopped being the one that
    writes.
    """
    code = getattr(error.orig, "pgcode", None)
    if error.connection_invalidated or (code is not None and code.startswith(_GONE)):
        return True
    # Without a code it is the driver that speaks: no connection, or one that broke.
    return code is None and type(error.orig) in {
        psycopg2.OperationalError,
        psycopg2.InterfaceError,
        psycopg2.DatabaseError,
        AnswerTimeout,
    }


def is_overloaded(error: DBAPIError) -> bool:
    """Whether the server answers and cannot do what it was asked just now."""
    code = getattr(error.orig, "pgcode", None)
    return code is not None and code.startswith(_OVERLOADED)


def _wait_for_answer(connection: Any) -> None:
    """The driver's wait callback: it raises instead of waiting longer than the connection may."""
    if connection.status in _CONNECTED:
        seconds = _wait_seconds.get() or getattr(connection, "answer_seconds", None)
    else:
        seconds = CONNECT_SECONDS
    deadline = None if seconds is None else time.monotonic() + seconds
    while (state := connection.poll()) != extensions.POLL_OK:
        poller = select.poll()
        direction = select.POLLIN if state == extensions.POLL_READ else select.POLLOUT
        poller.register(connection.fileno(), direction)
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not poller.poll(left):
            # The driver closes a connection whose callback raised.
            raise AnswerTimeout(f"the server did not answer within {seconds:g} seconds")


def _connect_guarded(
    dialect: Dialect, words: Any, parameters: dict[str, Any], breaker: CircuitBreaker
) -> Any:
    """Connect, unless connecting has just kept somebody waiting in vain."""
    if not breaker.admits():
        raise psycopg2.OperationalError("the server did not answer just now")
    started = time.monotonic()
    try:
        connection = _connect_to_first(dialect, words, parameters)
    except psycopg2.OperationalError:
        if time.monotonic() - started > SLOW_CONNECT_SECONDS:
            breaker.record_failure()
        else:
            breaker.record_success()
        raise
    breaker.record_success()
    return connection


def _connect_to_first(dialect: Dialect, words: Any, parameters: dict[str, Any]) -> Any:
    """Connect to the first host of the address that takes us, each within its own time.

    libpq's own list of hosts has one bound for all of them here, so a frozen first host would hide
    the second.
    """
    hosts = list(_list_hosts(parameters))
    for place, host in enumerate(hosts, start=1):
        try:
            return dialect.connect(*words, **{**parameters, **host})
        except psycopg2.OperationalError:
            if place == len(hosts):
                raise
    raise AssertionError("an address has at least one host")


def _list_hosts(parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The `host` and `port` of each host that an address lists; nothing to change for one."""
    hosts = str(parameters.get("host", "")).split(",")
    if len(hosts) == 1:
        yield {}
        return
    ports = str(parameters.get("port", "")).split(",")
    for place, host in enumerate(hosts):
        port = ports[place] if len(ports) == len(hosts) else ports[0]
        yield {"host": host, "port": port or None}


def _note_lost_server(context: ExceptionContext) -> None:
    """Have the connection of such an error closed, and all that are as old as it."""
    code = getattr(context.original_exception, "pgcode", None)
    if code is not None and code.startswith(_GONE):
        context.is_disconnect = True


def _replace_if_dead(connection: Any, _record: object, _proxy: object) -> None:
    """Refuse a pooled connection that the server has closed; the pool then makes a new one.

    A session at rest has nothing to say but its end.
    """
    if connection.closed:
        raise DisconnectionError("the connection is closed")
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLIN)
    if poller.poll(0):
        raise DisconnectionError("the server ended the session")
