# SPDX-License-Identifier: AGPL-3.0-or-later
"""Redis by purpose. Everything in it may be lost, so a failing server costs milliseconds and never
a request.

Callers see plain values and `RedisUnavailable`; no exception of the driver leaves this module.
"""

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha1
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import (
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from horde import metrics, tally
from horde.circuit_breaker import CircuitBreaker
from horde.config import Config
from horde.logger import get_logger
from horde.runtime import Part
from horde.setting_kinds import CHAT_SIGNAL_DATABASE, build_redis_url

logger = get_logger(__name__)

# Logical databases, as every horde uses them.
cache_db = 0
limiter_db = 1
address_safety_db = 2
address_suspicion_db = 4
address_timeout_db = 5
chat_signal_db = CHAT_SIGNAL_DATABASE

_PURPOSES = {
    cache_db: "cache",
    limiter_db: "limiter",
    address_safety_db: "address_safety",
    address_suspicion_db: "address_suspicion",
    address_timeout_db: "address_timeout",
    chat_signal_db: "chat",
}

TIMEOUT_SECONDS = 0.2
RETRY_AFTER_SECONDS = 1.0  # how long a failing server is left alone; then one call tries it
SUBSCRIPTION_POLL_SECONDS = 1.0
SILENT_POLLS = 5  # after so many a subscription asks whether anybody is there
UNANSWERED_POLLS = 2

# A server that follows another, has no room, loads its data, misses its replicas or its master,
# cannot save, is held up by a script, or does not know us.
_REASONS_TO_LEAVE = re.compile(
    r"(?:^|[\s-])(READONLY|OOM|LOADING|NOREPLICAS|MISCONF|MASTERDOWN|CLUSTERDOWN|BUSY|NOAUTH"
    r"|WRONGPASS)\b"
)


type Command = tuple[str | int | float, ...]


class RedisUnavailable(Exception):
    """Redis did not answer, or was not asked because it just failed."""


@dataclass(slots=True)
class RedisState:
    """What `connect` made for this runtime; a module opens nothing when it is imported."""

    url: str | None = None
    clients: Mapping[int, Redis] = field(default_factory=dict)
    # Connections that `ask` uses, by database, while nobody does.
    resting: Mapping[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(RETRY_AFTER_SECONDS))
    departures: int = 0  # how often this runtime left a server; subscriptions then start anew


state = Part(RedisState)


def connect(config: Config) -> None:
    """Make the clients of this runtime; connections open on first use."""
    disconnect()
    clients = {database: build_client(config.redis_url, database) for database in _PURPOSES}
    state.set(RedisState(config.redis_url, clients))


def disconnect() -> None:
    """Close every pooled connection, as after a fork or at shutdown."""
    held = state.get()
    state.set(RedisState())
    _close_resting(held)
    for client in held.clients.values():
        client.close()


def build_client(url: str, database: int) -> Redis:
    """A client for one logical database that fails fast."""
    return Redis.from_url(
        build_redis_url(url, database), decode_responses=True, **get_client_options()
    )


def get_client_options() -> dict[str, object]:
    """Options that keep a dead server cheap: without the explicit `retry` redis-py tries for four
    seconds.
    """
    return {
        "socket_timeout": TIMEOUT_SECONDS,
        "socket_connect_timeout": TIMEOUT_SECONDS,
        "retry": Retry(NoBackoff(), 0),
    }


def call[T](database: int, work: Callable[[Redis], T]) -> T:
    """Run `work` with the client of one logical database.

    Raises RedisUnavailable when the server fails, refuses, or is being left alone. A refusal that
    says that the server serves nobody now, as after a failover, counts as a failure; any other, as
    of a script, says nothing about its health.
    """
    held = state.get()
    client = held.clients.get(database)
    if client is None:
        raise RuntimeError("Redis is not connected: call redis_ctrl.connect(config) first.")
    if not held.breaker.admits():
        _count_failure(database, "skipped")
        raise RedisUnavailable("Redis is being left alone after a failure.")
    try:
        result = work(client)
    except ResponseError as error:
        if (reason := _find_reason_to_leave(error)) is None:
            held.breaker.record_success()
            _count_failure(database, "refused")
            raise RedisUnavailable("Redis refused a command.") from error
        _leave_server(database, reason)
        raise RedisUnavailable("Redis serves nobody now.") from error
    except RedisError as error:
        _leave_server(database, type(error).__name__)
        raise RedisUnavailable("Redis cannot be reached.") from error
    held.breaker.record_success()
    return result


def ask(database: int, *commands: Command) -> list[Any]:
    """The answers to some commands, which go in one round trip. Raises RedisUnavailable.

    For the paths of a job: a client spends three times as much on a command as its connection does.
    """
    return call(database, lambda client: _converse(client, database, commands))


def _converse(client: Redis, database: int, commands: Sequence[Command]) -> list[Any]:
    held = state.get()
    departures = held.departures
    connection = _take_connection(client, held.resting[database])
    try:
        connection.send_packed_command(connection.pack_commands(commands))
        answers = [connection.read_response() for _ in commands]
    except BaseException:
        connection.disconnect()  # answers may be on their way that nobody will read
        raise
    if held.departures == departures and held is state.get():
        held.resting[database].append(connection)
    else:
        connection.disconnect()  # it leads to a server that was left meanwhile
    return answers


def _take_connection(client: Redis, resting: list[Any]) -> Any:
    """A connection that connects by itself. One that the server closed meanwhile, or that holds
    what nobody asked for, does so anew.
    """
    try:
        connection = resting.pop()
    except IndexError:
        # Not by the pool, which counts what it makes, and makes no more after the hundredth.
        pool = client.connection_pool
        return pool.connection_class(**pool.connection_kwargs)
    try:
        is_stale = connection.can_read()
    except (RedisError, OSError):
        is_stale = True
    if is_stale:
        connection.disconnect()
    return connection


def _close_resting(held: RedisState) -> None:
    for connections in list(held.resting.values()):
        while connections:
            with suppress(IndexError):  # another thread took it
                connections.pop().disconnect()


def _find_reason_to_leave(error: ResponseError) -> str | None:
    """The word with which a server says that it serves nobody now; None for a refusal of this one
    command. A script's error has the word somewhere in its text.
    """
    if isinstance(error, ReadOnlyError):
        return "READONLY"
    if isinstance(error, OutOfMemoryError):
        return "OOM"
    found = _REASONS_TO_LEAVE.search(str(error))
    return None if found is None else found[1]


def _leave_server(database: int, reason: str) -> None:
    """Leave the server alone for a while, and every connection to it: after a failover they lead to
    the wrong one.
    """
    held = state.get()
    held.breaker.record_failure()
    held.departures += 1
    _close_resting(held)
    for client in held.clients.values():
        client.connection_pool.disconnect(inuse_connections=False)
    _count_failure(database, "failed")
    extra = {"purpose": _PURPOSES[database], "reason": reason}
    logger.warning("horde.redis.failed", extra=extra)


def get_text(key: str, database: int = cache_db) -> str | None:
    """The string at `key`, None when there is none. Raises RedisUnavailable."""
    value = ask(database, ("GET", key))[0]
    return value if isinstance(value, str) else None


def get_json(key: str, database: int = cache_db) -> object | None:
    """The value stored by `set_json`; None when there is none or it cannot be read. Raises
    RedisUnavailable.
    """
    text = get_text(key, database)
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None


def set_json(key: str, value: object, ttl_seconds: float | None, database: int = cache_db) -> None:
    """Store a JSON value for `ttl_seconds`, or until Redis loses it when None. Raises
    RedisUnavailable.
    """
    set_text(key, json.dumps(value), ttl_seconds, database)


def set_text(key: str, text: str, ttl_seconds: float | None, database: int = cache_db) -> None:
    """As `set_json`, of a text."""
    lifetime = () if ttl_seconds is None else ("PX", round(ttl_seconds * 1000))
    ask(database, ("SET", key, text, *lifetime))


def delete(*keys: str, database: int = cache_db) -> None:
    """Forget keys; missing ones are fine. Raises RedisUnavailable."""
    if keys:
        call(database, lambda client: client.delete(*keys))


def get_counter(key: str, database: int = cache_db) -> int | None:
    """What `increment_counter` counted, 0 when nothing did; None while Redis is away."""
    try:
        text = get_text(key, database)
    except RedisUnavailable:
        return None
    return int(text) if text is not None and text.isdecimal() else 0


def increment_counter(key: str, database: int = cache_db) -> None:
    """Count one. Best effort."""
    with suppress(RedisUnavailable):
        call(database, lambda client: client.incr(key))


def run_script(
    script: str, keys: Sequence[str], arguments: Sequence[str | int | float], database: int
) -> object:
    """Run a Lua script; the server keeps it, so only the first call carries its text. Raises
    RedisUnavailable.
    """
    rest = (len(keys), *keys, *arguments)

    def work(client: Redis) -> object:
        try:
            return _converse(client, database, [("EVALSHA", _name_script(script), *rest)])[0]
        except NoScriptError:
            return _converse(client, database, [("EVAL", script, *rest)])[0]

    return call(database, work)


@lru_cache(maxsize=100)
def _name_script(script: str) -> str:
    return sha1(script.encode(), usedforsecurity=False).hexdigest()


def publish(channel: str, payload: str, database: int = cache_db) -> None:
    """Send a message to whoever subscribes now. Raises RedisUnavailable."""
    ask(database, ("PUBLISH", channel, payload))


def publish_chat_message(channel: str, message: Mapping[str, object]) -> None:
    """Send a JSON message about a chat request. Best effort: a failure is logged and counted, never
    raised.
    """
    try:
        publish(channel, json.dumps(message), chat_signal_db)
    except RedisUnavailable:
        metrics.signal_failures.add(1)
        logger.warning("horde.chat_signal.failed", extra={"channel": channel})


def listen(
    channel: str,
    handle: Callable[[str], None],
    handle_gap: Callable[[], None],
    stop: threading.Event,
    database: int = cache_db,
) -> None:
    """Hand each message of `channel` to `handle` until `stop` is set; run it in a thread of its
    own.

    `handle_gap` is called whenever the subscription (re)starts, since messages before it may have
    been missed. When either raises, the subscription starts again.
    """
    url = state.get().url
    if url is None:
        raise RuntimeError("Redis is not connected: call redis_ctrl.connect(config) first.")
    client = build_client(url, database)
    try:
        while not stop.is_set():
            try:
                _listen_once(client, channel, handle, handle_gap, stop)
            # Whoever listens would be deaf until a restart.
            except Exception as error:  # noqa: BLE001
                logger.warning(
                    "horde.redis.subscription_lost", extra={"error_class": type(error).__name__}
                )
                stop.wait(RETRY_AFTER_SECONDS)
    finally:
        client.close()


def _listen_once(
    client: Redis,
    channel: str,
    handle: Callable[[str], None],
    handle_gap: Callable[[], None],
    stop: threading.Event,
) -> None:
    with client.pubsub() as subscription:  # type: ignore[no-untyped-call]
        subscription.subscribe(channel)
        handle_gap()
        held = state.get()
        departures, silent_polls = held.departures, 0
        while not stop.is_set():
            message = subscription.get_message(timeout=SUBSCRIPTION_POLL_SECONDS)
            silent_polls = silent_polls + 1 if message is None else 0
            if silent_polls == SILENT_POLLS:
                subscription.ping()
            if silent_polls > SILENT_POLLS + UNANSWERED_POLLS or departures != held.departures:
                raise RedisConnectionError("the subscription may lead to nobody")
            if message is not None and message["type"] == "message":
                handle(message["data"])


def _count_failure(database: int, outcome: str) -> None:
    tally.count(tally.REDIS_FAILED)
    metrics.redis_failures.add(1, {"horde.purpose": _PURPOSES[database], "horde.outcome": outcome})
