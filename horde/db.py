# SPDX-License-Identifier: AGPL-3.0-or-later
"""The database: engine, sessions, and the one way to open a transaction."""

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from sqlalchemy import Dialect, Engine, Table, Text, TypeDecorator, event, insert, inspect
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import DeclarativeBase, Session

from horde import metrics, postgres
from horde.config import Config
from horde.exceptions import ServiceUnavailable
from horde.hot_session import HotSession, keep_insert
from horde.json_text import read_json, write_document
from horde.logger import build_failure_fields
from horde.runtime import Part

logger = logging.getLogger(__name__)

DEADLOCK_ATTEMPTS = 5
# Connection exceptions, operator intervention, out of connections.
NOT_CONNECTED = "The database is not connected: call db.connect(config) first."
_AFTER_COMMIT = "horde.after_commit"
READS_ALONE = "horde_reads_alone"  # execution option of the connections that `reading` uses


class Base(DeclarativeBase):
    """Parent of every row class."""


class RowsLocked(ServiceUnavailable):
    """503: others held the rows for longer than the statement was allowed to wait."""


class TransactionLost(ServiceUnavailable):
    """503: the database ended the transaction so that others could go on; nothing of it is stored.

    `run_transaction` and `retry_deadlocks` run the work again, so a client sees it only after
    several attempts.
    """


class WrittenJson(TypeDecorator[Any]):
    """JSON in a text column, where it keeps the order of its keys and the form of its numbers."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, _dialect: Dialect) -> str | None:
        """The text that is stored; None is NULL."""
        return None if value is None else write_document(value)

    def process_result_value(self, value: str | None, _dialect: Dialect) -> Any:
        """The value whose numbers know how they were written."""
        return None if value is None else read_json(value)


@dataclass(slots=True)
class DatabaseState:
    """What `connect` made for this runtime; a module opens nothing when it is imported."""

    engine: Engine | None = None
    sessions: Callable[[], HotSession] | None = None
    reading_sessions: Callable[[], HotSession] | None = None


state = Part(DatabaseState)


def connect(config: Config, *, answer_seconds: float | None = None) -> Engine:
    """Make the engine and session factory of this process; connections open on first use.

    `answer_seconds` bounds the wait for each answer of the database; commands have no bound.
    """
    engine = postgres.build_engine(
        config.database_url,
        answer_seconds=answer_seconds,
        name="horde",
        pool_size=config.db_pool_size,
        max_overflow=config.db_max_overflow,
        pool_timeout=config.db_pool_timeout_seconds,
        pool_use_lifo=True,  # idle connections close by age instead of being kept warm in turn
        executemany_mode="values_plus_batch",  # several rows in one round trip
    )
    reading_engine = engine.execution_options(**{READS_ALONE: True})
    event.listen(engine, "checkin", _switch_to_transactions)
    sessions = partial(HotSession, engine, begins=True)
    reading_sessions = partial(HotSession, reading_engine, begins=False)
    state.set(DatabaseState(engine, sessions, reading_sessions))
    return engine


def _switch_to_transactions(dbapi_connection: Any, _record: object) -> None:
    if dbapi_connection is not None and not dbapi_connection.closed and dbapi_connection.autocommit:
        dbapi_connection.autocommit = False


def watch_connections(engine: Engine, note: Callable[[bool], None]) -> None:
    """Tell `note` whether the database answers, by the connections that are made anyway; the
    periodic jobs make sure that there are some.
    """

    @event.listens_for(engine, "connect")
    def note_success(_connection: object, _record: object) -> None:
        note(True)

    @event.listens_for(engine, "handle_error")
    def note_failure(context: ExceptionContext) -> None:
        if context.is_disconnect or context.connection is None:  # lost, or never made
            note(False)


def require_engine() -> Engine:
    """The engine of this process; raises RuntimeError before `connect`."""
    engine = state.get().engine
    if engine is None:
        raise RuntimeError(NOT_CONNECTED)
    return engine


def disconnect() -> None:
    """Close every pooled connection, as after a fork or at shutdown."""
    engine = state.get().engine
    if engine is not None:
        engine.dispose()


@contextmanager
def transaction() -> Iterator[Session]:
    """A session whose work is committed when the block ends and rolled back when it raises.

    What `after_commit` gathered runs once the commit is real. Only routes, jobs and commands open
    one. Raises ServiceUnavailable when the database is away.
    """
    sessions = state.get().sessions
    if sessions is None:
        raise RuntimeError(NOT_CONNECTED)
    session = cast(Session, sessions())
    try:
        yield session
        session.commit()
    except PoolTimeoutError as error:
        session.rollback()
        raise ServiceUnavailable("The database is busy. Try again later.") from error
    except DBAPIError as error:
        _roll_back_quietly(session)
        if (unavailable := _find_unavailability(error)) is not None:
            raise unavailable from error
        raise
    except BaseException:
        _roll_back_quietly(session)
        raise
    finally:
        session.close()
    _run_after_commit(session)


def reading() -> AbstractContextManager[Session]:
    """A session for reads alone, each statement by itself: no BEGIN and no COMMIT go over the wire.

    What it loads belongs to no session afterwards. Raises ServiceUnavailable when the database is
    away.
    """
    return _without_transaction()


@contextmanager
def single_statement() -> Iterator[Session]:
    """A session for one conditional write that stands alone: it is its own transaction, so nothing
    but it goes over the wire. What `execute_later` sends before it belongs to the same transaction.

    What `after_commit` gathered runs at the end. Raises ServiceUnavailable when the database is
    away.
    """
    with _without_transaction(sends_once=True) as session:
        yield session
        # What a session of a test's own transaction needs; the driver has committed before.
        session.commit()


@contextmanager
def _without_transaction(*, sends_once: bool = False) -> Iterator[Session]:
    sessions = state.get().reading_sessions
    if sessions is None:
        raise RuntimeError(NOT_CONNECTED)
    hot = sessions()
    hot.sends_once = sends_once
    session = cast(Session, hot)
    try:
        yield session
    except PoolTimeoutError as error:
        raise ServiceUnavailable("The database is busy. Try again later.") from error
    except DBAPIError as error:
        if (unavailable := _find_unavailability(error)) is not None:
            raise unavailable from error
        raise
    finally:
        session.close()
    _run_after_commit(session)


def table_of(model: type[Base]) -> Table:
    """The table behind a row class. Statements of hot paths are built over it once, when their
    module is imported.

    A statement over the class itself is annotated anew at every call, which costs ten times what it
    asks of the database.
    """
    return cast(Table, model.__table__)


def build_detached[R: Base](model: type[R], values: Mapping[str, Any]) -> R:
    """An object of a row class that belongs to no session, with these columns as loaded.

    Its constructor would tell SQLAlchemy of each column, which costs ten times as much.
    """
    row = cast(R, inspect(model).class_manager.new_instance())
    vars(row).update(values)
    return row


def insert_rows(session: Session, table: Table, rows: Sequence[Mapping[str, object]]) -> None:
    """Insert rows that name the same columns, in one round trip."""
    if len(rows) == 1:
        session.execute(keep_insert(table, tuple(rows[0])), dict(rows[0]))
    elif rows:
        session.execute(insert(table), [dict(row) for row in rows])


def execute_later(session: Session, statement: Any, parameters: Mapping[str, Any]) -> None:
    """Send a kept statement in the round trip of the next one, or of the commit: for what nobody
    waits for the outcome of.
    """
    hot: object = session  # a test may have an ordinary one
    if isinstance(hot, HotSession):
        hot.execute_later(statement, parameters)
    else:
        session.execute(statement, dict(parameters))


def after_commit(session: Session, call: Callable[[], object]) -> None:
    """Run `call` once the session's transaction is committed; never when it is rolled back. Best
    effort.
    """
    session.info.setdefault(_AFTER_COMMIT, []).append(call)


def run_transaction[T](work: Callable[[Session], T]) -> T:
    """What `work` returns, once its transaction is committed; run again when a deadlock ended it.

    The way to write rows that others write too. `work` may run several times, each time on what is
    stored, so it changes nothing outside the session; what tells others goes through
    `after_commit`. Raises ServiceUnavailable when the database is away, or when deadlocks go on.
    """

    def attempt() -> T:
        with transaction() as session:
            return work(session)

    return retry_deadlocks(attempt)


def run_single_statement[T](work: Callable[[Session], T]) -> T:
    """As `run_transaction`, for work that writes with one statement: it needs no BEGIN and no
    COMMIT.
    """

    def attempt() -> T:
        with single_statement() as session:
            return work(session)

    return retry_deadlocks(attempt)


def retry_deadlocks[T](work: Callable[[], T]) -> T:
    """Run a whole transaction again when the database broke a deadlock by ending it.

    `work` opens its own transaction, so a retry starts from what is stored. Where the last attempt
    ends so too it raises ServiceUnavailable, which no retry around this one takes for its own.
    """
    for attempt in range(1, DEADLOCK_ATTEMPTS + 1):
        try:
            return work()
        except TransactionLost as lost:
            if attempt == DEADLOCK_ATTEMPTS:
                raise ServiceUnavailable(lost.message) from lost
            time.sleep(random.uniform(0.025, 0.1) * attempt)
    raise AssertionError("the last attempt returns or raises")


def _run_after_commit(session: Session) -> None:
    calls: list[Callable[[], object]] = session.info.pop(_AFTER_COMMIT, [])
    for call in calls:
        try:
            call()
        # The commit stands: what tells the world about it must not turn it into a failure.
        except Exception as error:  # noqa: BLE001
            metrics.after_commit_failures.add(1)
            logger.error("horde.after_commit.failed", extra=build_failure_fields(error))


def _roll_back_quietly(session: Session) -> None:
    """Roll back, tolerating a connection that is already gone."""
    try:
        session.rollback()
    except DBAPIError:
        session.invalidate()


def _find_unavailability(error: DBAPIError) -> ServiceUnavailable | None:
    """What a client is told of a failure that a later attempt may not meet; None for a defect."""
    code = getattr(error.orig, "pgcode", None)
    if code in postgres.DEADLOCKED:
        return TransactionLost("The database is busy. Try again.")
    if code == postgres.LOCK_NOT_AVAILABLE:
        return RowsLocked("The database is busy. Try again.")
    if postgres.is_overloaded(error):
        logger.error("horde.db.overloaded", extra={"sqlstate": code})
        return ServiceUnavailable("The database cannot do this now. Try again later.")
    if postgres.is_gone(error):
        return ServiceUnavailable("The database cannot be reached. Try again later.")
    return None
