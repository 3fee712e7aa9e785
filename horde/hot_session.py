# SPDX-License-Identifier: AGPL-3.0-or-later
"""A session for the statements of a job: what was built once is sent as it is, and rows come back
plain.

A `Session` of SQLAlchemy spends more on a statement than the driver and the network together. This
one does without for statements that were kept (`keep`), and is an ordinary session for all others,
on the same connection and in the same transaction.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Self, cast

import psycopg2
from sqlalchemy import Connection, Engine, Insert, Table, bindparam, insert
from sqlalchemy.exc import DBAPIError, MultipleResultsFound, NoResultFound
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import PoolProxiedConnection

# What is sent, and its parameters as the driver takes them.
type _Sent = tuple[str, dict[str, Any] | None]

_BEGIN: _Sent = ("BEGIN", None)


class _Kept:
    """A statement as it is sent: its text, what becomes of its parameters and of its columns."""

    def __init__(self, statement: Any, dialect: Any) -> None:
        compiled: Any = statement.compile(dialect=dialect)
        known: dict[str, Any] = compiled.construct_params(_check=False, escape_names=False)
        self.text = str(compiled)
        literals = {parameter.key for parameter in compiled.literal_execute_params}
        if literals:  # constants that stand in the text itself, as the planner wants them
            self.text = compiled._process_parameters_for_postcompile(dict(known)).statement
        self._processors = {
            name: process
            for name, process in compiled._bind_processors.items()
            if process is not None
        }
        self._fixed = {
            name: self._process(name, value)
            for name, value in known.items()
            if name not in literals
        }
        self._made = {
            column.key: column.default.arg
            for column in (*compiled.insert_prefetch, *compiled.update_prefetch)
        }
        self._dialect = dialect
        self._columns = list(compiled._result_columns or ())
        self._make_row: Callable[[Any], Any] | None = None
        self._row_processors: list[tuple[int, Callable[[Any], Any]]] = []

    def _process(self, name: str, value: Any) -> Any:
        process = self._processors.get(name)
        return value if process is None else process(value)

    def build_parameters(self, values: Mapping[str, Any] | None) -> dict[str, Any]:
        """The parameters as the driver takes them."""
        parameters = dict(self._fixed)
        given = values or {}
        for name, default in self._made.items():  # columns whose default Python makes
            if name not in given:
                made = default(None) if callable(default) else default
                parameters[name] = self._process(name, made)
        for name, value in given.items():
            parameters[name] = self._process(name, value)
        return parameters

    def fetch_rows(self, cursor: Any) -> list[Any]:
        """All rows of the cursor; none of a statement that returns none."""
        if cursor.description is None:
            return []
        make = self._make_row or self._prepare_rows(cursor.description)
        if not self._row_processors:
            return [make(row) for row in cursor.fetchall()]
        rows = []
        for fetched in cursor.fetchall():
            values = list(fetched)
            for place, process in self._row_processors:
                values[place] = process(values[place])
            rows.append(make(values))
        return rows

    def _prepare_rows(self, description: Sequence[Any]) -> Callable[[Any], Any]:
        processors = []
        if len(self._columns) == len(description):
            for place, (column, told) in enumerate(zip(self._columns, description, strict=True)):
                kind = column.type.dialect_impl(self._dialect)
                process = kind.result_processor(self._dialect, told.type_code)
                if process is not None:
                    processors.append((place, process))
        names = [column.name for column in description]
        plain: Any = namedtuple("plain", names, rename=True)  # type: ignore[misc]
        row: Any = type("Row", (plain,), {"__slots__": (), "_mapping": property(plain._asdict)})
        self._row_processors = processors
        self._make_row = row._make
        return cast(Callable[[Any], Any], row._make)


_kept: dict[int, tuple[object, list[_Kept]]] = {}


def keep[S](statement: S) -> S:
    """The statement itself, to be compiled once and sent as it is from then on.

    For statements that are built once and whose text depends on no value: no list in an `IN`.
    """
    _kept[id(statement)] = (statement, [])
    return statement


@cache
def keep_insert(table: Table, names: tuple[str, ...]) -> Insert:
    """The insert of one row that names these columns."""
    values = {name: bindparam(name, type_=table.c[name].type) for name in names}
    return keep(insert(table).values(values))


def _find_kept(statement: object, engine: Engine) -> _Kept | None:
    known = _kept.get(id(statement))
    if known is None or known[0] is not statement:
        return None
    if not known[1]:
        known[1].append(_Kept(statement, engine.dialect))
    return known[1][0]


class Rows:
    """The rows of a kept statement, in the words of SQLAlchemy's results."""

    __slots__ = ("_rows", "rowcount")

    def __init__(self, rows: list[Any], rowcount: int) -> None:
        self._rows, self.rowcount = rows, rowcount

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def all(self) -> list[Any]:
        return self._rows

    def first(self) -> Any:
        return self._rows[0] if self._rows else None

    def one_or_none(self) -> Any:
        if len(self._rows) > 1:
            raise MultipleResultsFound("Multiple rows were found when one or none was required")
        return self.first()

    def one(self) -> Any:
        if not self._rows:
            raise NoResultFound("No row was found when one was required")
        return self.one_or_none()

    def scalars(self) -> "Rows":
        return Rows([row[0] for row in self._rows], self.rowcount)

    def scalar(self) -> Any:
        return self._rows[0][0] if self._rows else None

    def scalar_one(self) -> Any:
        return self.one()[0]


class HotSession:
    """As a `Session`, over one connection of an engine that it takes at its first statement.

    `begins` makes all statements one transaction, which is begun together with the first of them.
    `sends_once` refuses a second round trip: what goes in one is a transaction without being begun.
    Whatever is no kept statement goes to a session of SQLAlchemy on the same connection.
    """

    def __init__(self, engine: Engine, *, begins: bool) -> None:
        self.info: dict[str, Any] = {}
        self.sends_once = False
        self._engine, self._begins = engine, begins
        self._pooled: PoolProxiedConnection | None = None
        self._driver: Any = None
        self._connection: Connection | None = None
        self._session: Session | None = None
        self._is_open = False  # whether BEGIN was sent
        self._has_sent = False
        self._waiting: list[_Sent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._require_session(), name)

    def execute(self, statement: Any, parameters: Any = None, **options: Any) -> Any:
        """As of a session; rows of a kept statement are plain."""
        kept = None if options else _find_kept(statement, self._engine)
        if kept is not None and (parameters is None or isinstance(parameters, Mapping)):
            return self._send(kept, parameters)
        if options or _needs_session(statement):
            return self._require_session().execute(statement, parameters, **options)
        self._prepare()
        return self._require_connection().execute(statement, parameters)

    def execute_later(self, statement: Any, parameters: Mapping[str, Any]) -> None:
        """Send a kept statement in the same round trip as whatever comes next, the commit at the
        latest. Its rows are never seen, and what it fails with is raised then.
        """
        kept = _find_kept(statement, self._engine)
        if kept is None:
            raise ValueError("only a kept statement can be sent later")
        if self._session is not None:
            self._session.flush()
        self._waiting.append((kept.text, kept.build_parameters(parameters)))

    def scalar(self, statement: Any, parameters: Any = None, **options: Any) -> Any:
        """The first value of the first row."""
        return self.execute(statement, parameters, **options).scalar()

    def scalars(self, statement: Any, parameters: Any = None, **options: Any) -> Any:
        """The first value of each row."""
        return self.execute(statement, parameters, **options).scalars()

    def begin_nested(self) -> SessionTransaction:
        """A savepoint, as of a session."""
        session = self._require_session()
        nested = session.begin_nested()
        # SQLAlchemy sets it at the next statement that it sees, and kept ones pass it by.
        session.connection()
        return nested

    def commit(self) -> None:
        """Make what was done real. Raises RuntimeError where a statement of it had failed: Postgres
        answers such a commit with a rollback, which the driver takes for a success.
        """
        if self._session is not None:
            self._session.flush()
        if self._waiting and not self._begins:
            self._say()
        elif self._waiting or self._is_open:
            outcome = self._say("COMMIT")
            self._is_open = False
            if outcome != "COMMIT":
                raise RuntimeError("a statement had failed, so nothing was committed")

    def rollback(self) -> None:
        """Undo what was done."""
        self._waiting.clear()
        if self._session is not None:
            self._session.expunge_all()
        is_lost = self._connection is not None and self._connection.invalidated
        if self._is_open and not is_lost:
            self._say("ROLLBACK")
            self._is_open = False

    def invalidate(self) -> None:
        """Have the connection closed instead of given back."""
        if self._driver is not None and not self._require_connection().invalidated:
            self._require_connection().invalidate()

    def close(self) -> None:
        """Give the connection back, in no transaction."""
        if self._is_open:
            try:
                self.rollback()
            except DBAPIError:
                self.invalidate()
        if self._session is not None:
            self._session.close()
        if self._connection is not None:
            self._connection.close()
        elif self._pooled is not None:
            self._pooled.close()

    def _require_driver(self) -> Any:
        """The driver's connection, taken from the pool at the first statement."""
        if self._driver is None:
            self._pooled = _take_from_pool(self._engine)
            self._driver = self._pooled.dbapi_connection
            # The driver would send BEGIN by itself, as a round trip of its own.
            self._driver.autocommit = True
            if self._engine._has_events:
                self._require_connection()  # somebody wants to know what SQLAlchemy begins
        return self._driver

    def _require_connection(self) -> Connection:
        """SQLAlchemy's connection around the driver's, for what is no kept statement and for
        failures: it costs as much as a statement.
        """
        if self._connection is None:
            self._require_driver()
            self._connection = Connection(self._engine, connection=self._pooled)
            if self._begins:
                self._connection.begin()
        return self._connection

    def _require_session(self) -> Session:
        if self._session is None:
            self._session = Session(self._require_connection(), expire_on_commit=False)
        self._prepare()
        return self._session

    def _prepare(self) -> None:
        """What has to have happened before a statement that is not sent by us."""
        if self._session is not None:
            self._session.flush()
        if self._waiting or (self._begins and not self._is_open):
            self._run().close()

    def _send(self, kept: _Kept, values: Mapping[str, Any] | None) -> Rows:
        if self._session is not None:
            self._session.flush()
        cursor = self._run((kept.text, kept.build_parameters(values)))
        rows = Rows(kept.fetch_rows(cursor), cursor.rowcount)
        cursor.close()
        return rows

    def _say(self, *words: str) -> str:
        """What the server calls what it did."""
        cursor = self._run(*((word, None) for word in words))
        cursor.close()
        return str(cursor.statusmessage)

    def _run(self, *sent: _Sent) -> Any:
        """The cursor of what was sent, behind the statements that waited for it, in one round trip;
        failures are those of SQLAlchemy.
        """
        if self.sends_once and self._has_sent:
            raise RuntimeError("a second round trip would be a transaction of its own")
        self._has_sent = True
        sent = (*self._waiting, *sent)
        self._waiting = []
        cursor = self._require_driver().cursor()
        if self._engine._has_events:
            self._note_statements(cursor, sent)
        if self._begins and not self._is_open:
            sent, self._is_open = (_BEGIN, *sent), True
        try:
            # The server runs them one after the other, and answers with the last one's rows.
            cursor.execute(b"; ".join([cursor.mogrify(*each) for each in sent]))
        except psycopg2.Error as error:
            # Without the parameters, which are nobody's business: errors are logged.
            words = "; ".join(text for text, _ in sent)
            self._require_connection()._handle_dbapi_exception(error, words, {}, cursor, None)
        return cursor

    def _note_statements(self, cursor: Any, sent: Iterable[_Sent]) -> None:
        connection = self._require_connection()
        for text, parameters in sent:
            if parameters is not None:
                for note in self._engine.dispatch.before_cursor_execute:
                    note(connection, cursor, text, parameters, None, False)


def _take_from_pool(engine: Engine) -> PoolProxiedConnection:
    """A connection of the pool; failures are those of SQLAlchemy."""
    try:
        return engine.raw_connection()
    except psycopg2.Error as error:
        Connection._handle_dbapi_exception_noconnection(error, engine.dialect, engine)
        raise


def _needs_session(statement: Any) -> bool:
    """Whether a statement is about mapped classes, which only a session understands."""
    attributes = getattr(statement, "_propagate_attrs", None) or {}
    return attributes.get("compile_state_plugin") == "orm"
