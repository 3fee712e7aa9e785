# SPDX-License-Identifier: AGPL-3.0-or-later
"""Apply the files of `sql_statements/` in order, and remember which ones ran.

A file `5.1.15.txt` is plain SQL. It runs as one transaction, up to a line `-- no-transaction`: the
statements after that line run one by one outside any transaction, as a concurrent index build must.
Such a file may be cut short between two statements, so each of its statements has to bear being run
again.

A file `functions/NAME.sql` creates or replaces the function NAME. It runs whenever its text is not
the one that the database's function was made of, which a comment on the function tells.

Source: docs/reference/schema.md.
"""

import hashlib
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError

from horde.classes.base.user import (
    ANONYMOUS_ID,
    ANONYMOUS_KEY,
    ANONYMOUS_OAUTH_ID,
    User,
    hash_api_key,
)
from horde.clock import utcnow
from horde.settings import ConfigError

logger = logging.getLogger(__name__)

SQL_FOLDER = Path(__file__).resolve().parents[2] / "sql_statements"
BASE_VERSION = "5.1.14"  # what an AI Horde without records of ours is taken for
NO_TRANSACTION = "-- no-transaction"
ANONYMOUS_CONCURRENCY = 500

# Of this database's advisory locks; any number nobody else uses.
MIGRATION_LOCK = 0x686F7264_64620001
LOCK_POLL_SECONDS = 0.2
# A live server's statements queue behind a waiting ALTER TABLE, so it gives up soon and tries
# again.
TABLE_LOCK_SECONDS = 3
TABLE_LOCK_ATTEMPTS = 20
RETRIED_CODES = frozenset({"55P03", "40P01"})  # lock not available, deadlock detected

_STATEMENT_END = re.compile(r";[ \t]*(?:\n|$)")
_CONCURRENT_INDEX = re.compile(
    r"CREATE\s+(?:UNIQUE\s+)?INDEX\s+CONCURRENTLY\s+(?:IF\s+NOT\s+EXISTS\s+)?(\w+)", re.IGNORECASE
)


class SchemaError(Exception):
    """The database's schema is not one this version can use; the message says what an operator can
    do.
    """


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: the SQL of its transaction, then the statements that run by themselves."""

    version: str
    transaction: str
    separate_statements: tuple[str, ...]
    checksum: str


@dataclass(frozen=True, slots=True)
class MigrationState:
    """What the database knows of one file; `applied` is None when it did not run here."""

    version: str
    applied: datetime | None
    is_edited: bool  # the file is no longer the one that ran
    is_present: bool  # it ran, or an AI Horde made what it makes


def parse_migration(version: str, sql: str) -> Migration:
    """Read one file's text."""
    transaction, _, rest = f"\n{sql}".partition(f"\n{NO_TRANSACTION}\n")
    statements = (statement.strip() for statement in _STATEMENT_END.split(rest))
    return Migration(
        version=version,
        transaction=transaction,
        separate_statements=tuple(statement for statement in statements if _has_code(statement)),
        checksum=hashlib.sha256(sql.encode()).hexdigest(),
    )


def list_migrations(folder: Path = SQL_FOLDER) -> list[Migration]:
    """Every file of the folder in version order. Raises SchemaError when there are none."""
    files = sorted(folder.glob("*.txt"), key=lambda path: _version_key(path.stem))
    if not files:
        raise SchemaError(
            f"There are no schema files in {folder}: the server has to be installed together with"
            " them."
        )
    return [parse_migration(path.stem, path.read_text(encoding="utf-8")) for path in files]


def migrate(
    engine: Engine, *, secret_key: str, target: str | None = None, folder: Path = SQL_FOLDER
) -> list[str]:
    """Bring the database to `target` (default: the newest version) and seed it; the versions that
    this call applied.

    Of two calls at once one waits for the other and then finds nothing to do. A database with the
    tables of an AI Horde and no record of ours is taken over as version 5.1.14. Raises SchemaError
    when it is none, or when `target` is no version.
    """
    migrations = list_migrations(folder)
    wanted = _take_until(migrations, target)
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        _hold_migration_lock(connection),
    ):
        _make_record_table(connection)
        if not _read_records(connection) and _has_table(connection, "users"):
            check_adoptable(connection, migrations)
            _record(connection, migrations[0])
            logger.info("horde.db.schema_adopted", extra={"version": BASE_VERSION})
        records = _read_records(connection)
        applied = [migration for migration in wanted if migration.version not in records]
        for migration in applied:
            _apply(connection, migration)
        if len(wanted) == len(migrations):  # they call for the newest tables
            known = {migration.version for migration in migrations}
            _replace_functions(connection, folder, is_newest=records.keys() <= known)
        _seed(connection, secret_key)
    return [migration.version for migration in applied]


def list_migration_states(engine: Engine, folder: Path = SQL_FOLDER) -> list[MigrationState]:
    """What the database knows of each file, in version order."""
    with engine.connect() as connection:
        records = _read_records(connection) if _has_table(connection, "schema_migrations") else {}
        is_foreign = not records and _has_table(connection, "users")
    states = []
    for migration in list_migrations(folder):
        applied, checksum = records.get(migration.version, (None, migration.checksum))
        is_present = applied is not None or (is_foreign and migration.version == BASE_VERSION)
        states.append(
            MigrationState(migration.version, applied, checksum != migration.checksum, is_present)
        )
    return states


def require_current_schema(engine: Engine, folder: Path = SQL_FOLDER) -> None:
    """Raise SchemaError when a file has not run on this database.

    A database with newer versions is accepted: a schema change keeps the version before it working.
    """
    missing = [
        state.version for state in list_migration_states(engine, folder) if not state.is_present
    ]
    if not missing:
        with engine.connect() as connection:
            missing = sorted(_read_functions(folder).keys() - _read_stored_functions(connection))
    if missing:
        raise SchemaError(f"The database lacks {', '.join(missing)}: run `horde db migrate`.")


def check_secret_key(engine: Engine, secret_key: str) -> None:
    """Raise ConfigError when the database's keys were made with another salt: each of them would be
    unknown. The anonymous key, which everybody knows, tells.
    """
    with engine.connect() as connection:
        is_fitting = _fits_stored_keys(connection, secret_key)
    if not is_fitting:
        raise ConfigError(
            "secret_key",
            "is not the one that the keys of this database were made with: all would be unknown.",
        )


def _fits_stored_keys(connection: Connection, secret_key: str) -> bool:
    stored = connection.scalar(select(User.api_key).where(User.id == ANONYMOUS_ID))
    return stored is None or stored == hash_api_key(ANONYMOUS_KEY, secret_key)


def check_adoptable(connection: Connection, migrations: Sequence[Migration]) -> None:
    """Raise SchemaError unless the tables found are those of 5.1.14, naming each difference that
    would break a query.

    The files are played into a schema of their own and compared, in a transaction that is rolled
    back. Types are not compared: enumerations and widths differ between installations and convert
    by themselves.
    """
    base, *later = migrations
    if base.version != BASE_VERSION:
        raise SchemaError(
            f"The first schema file is {base.version}, not {BASE_VERSION}: nothing can be compared"
            " with it."
        )
    live = connection.scalar(text("SELECT current_schema()"))
    _execute(connection, "BEGIN")
    try:
        _execute(connection, "CREATE SCHEMA horde_expected; SET LOCAL search_path = horde_expected")
        _execute(connection, base.transaction)
        missing = connection.scalars(text(_MISSING_COLUMNS), {"live": live}).all()
        for migration in later:
            _execute(connection, migration.transaction)
        unknown = connection.scalars(text(_UNKNOWN_REQUIRED_COLUMNS), {"live": live}).all()
    finally:
        _execute(connection, "ROLLBACK")
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is unknown here and required, without a default" for name in unknown]
    if problems:
        raise SchemaError(
            f"This database is not at {BASE_VERSION}, nothing was changed: {'; '.join(problems)}."
        )


_MISSING_COLUMNS = """
    SELECT table_name || '.' || column_name AS name
    FROM information_schema.columns AS expected
    WHERE table_schema = 'horde_expected'
      AND NOT EXISTS (
          SELECT FROM information_schema.columns AS found
          WHERE found.table_schema = :live
            AND (found.table_name, found.column_name) = (expected.table_name, expected.column_name)
      )
    ORDER BY name
"""

# Rows of ours would be refused: nothing fills these columns.
_UNKNOWN_REQUIRED_COLUMNS = """
    SELECT table_name || '.' || column_name AS name
    FROM information_schema.columns AS found
    WHERE table_schema = :live AND is_nullable = 'NO' AND column_default IS NULL
      AND is_identity = 'NO'
      AND table_name IN (SELECT table_name FROM information_schema.tables
          WHERE table_schema = 'horde_expected')
      AND NOT EXISTS (
          SELECT FROM information_schema.columns AS expected
          WHERE expected.table_schema = 'horde_expected'
            AND (expected.table_name, expected.column_name) = (found.table_name, found.column_name)
      )
    ORDER BY name
"""


@contextmanager
def _hold_migration_lock(connection: Connection) -> Iterator[None]:
    """Be the only migrator of this database while the block runs.

    The lock is polled: a statement that waits for it would hold a snapshot, for which the other
    migrator's concurrent index build waits in turn, and both would be stuck.
    """
    while not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": MIGRATION_LOCK}):
        time.sleep(LOCK_POLL_SECONDS)
    _execute(connection, "SET statement_timeout = 0")  # an index build takes as long as it takes
    try:
        yield
    finally:
        with suppress(DBAPIError):  # a lost connection released it
            _execute(connection, "RESET statement_timeout")
            connection.scalar(text("SELECT pg_advisory_unlock(:key)"), {"key": MIGRATION_LOCK})


def _apply(connection: Connection, migration: Migration) -> None:
    """Run one file and record it; a file without separate statements is recorded in its own
    transaction.
    """
    record_with_transaction = not migration.separate_statements
    _run_transaction(connection, migration, record=record_with_transaction)
    for statement in migration.separate_statements:
        _drop_invalid_index(connection, statement)
        _execute(connection, statement)
    if not record_with_transaction:
        _record(connection, migration)
    logger.info("horde.db.migration_applied", extra={"version": migration.version})


def _run_transaction(connection: Connection, migration: Migration, *, record: bool) -> None:
    """Run the transaction of one file, again when it could not get its table locks between a live
    server's statements.
    """
    for attempt in range(1, TABLE_LOCK_ATTEMPTS + 1):
        _execute(connection, f"BEGIN; SET LOCAL lock_timeout = '{TABLE_LOCK_SECONDS}s'")
        try:
            _execute(connection, migration.transaction)
            if record:
                _record(connection, migration)
            _execute(connection, "COMMIT")
            return
        except DBAPIError as error:
            _execute(connection, "ROLLBACK")
            if (
                getattr(error.orig, "pgcode", None) not in RETRIED_CODES
                or attempt == TABLE_LOCK_ATTEMPTS
            ):
                raise
            logger.warning(
                "horde.db.migration_waits_for_locks",
                extra={"version": migration.version, "attempt": attempt},
            )
            time.sleep(1)


def _replace_functions(connection: Connection, folder: Path, *, is_newest: bool) -> None:
    """Create or replace each function whose text is another than the database's.

    Unless this is the newest version that the database knows, its texts may be older than those
    that are there: then only what is missing is created.
    """
    stored = _read_stored_functions(connection)
    for name, sql in _read_functions(folder).items():
        checksum = hashlib.sha256(sql.encode()).hexdigest()
        if stored.get(name) == checksum or (name in stored and not is_newest):
            continue
        comment = f"COMMENT ON FUNCTION {name} IS '{checksum}'"
        migration = Migration(
            version=name,
            transaction=f"{sql}\n;{comment}",
            separate_statements=(),
            checksum=checksum,
        )
        _run_transaction(connection, migration, record=False)
        logger.info("horde.db.function_replaced", extra={"function": name})


def _read_functions(folder: Path) -> dict[str, str]:
    """The text of each function of this version, by its name."""
    files = sorted((folder / "functions").glob("*.sql"))
    return {path.stem: path.read_text(encoding="utf-8") for path in files}


def _read_stored_functions(connection: Connection) -> dict[str, str | None]:
    """The checksum of the text that each function of the database was made of, by its name."""
    rows = connection.execute(
        text("""
            SELECT proname, obj_description(oid, 'pg_proc') AS checksum FROM pg_proc
            WHERE pronamespace = quote_ident(current_schema())::regnamespace
            """)
    )
    return {row.proname: row.checksum for row in rows}


def _drop_invalid_index(connection: Connection, statement: str) -> None:
    """Remove what a failed concurrent build left: an index that is never read, and that `IF NOT
    EXISTS` takes for ours.
    """
    found = _CONCURRENT_INDEX.search(statement)
    if not found:
        return
    invalid = text("SELECT NOT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)")
    if connection.scalar(invalid, {"name": found[1]}):
        logger.warning("horde.db.invalid_index_dropped", extra={"index": found[1]})
        _execute(connection, f"DROP INDEX CONCURRENTLY {found[1]}")


def _make_record_table(connection: Connection) -> None:
    _execute(
        connection,
        """
        CREATE TABLE IF NOT EXISTS schema_migrations (
            version varchar(32) PRIMARY KEY,
            applied timestamp NOT NULL,
            checksum char(64) NOT NULL
        )
        """,
    )


def _read_records(connection: Connection) -> dict[str, tuple[datetime, str]]:
    """When each version ran, and the checksum of the file that did."""
    rows = connection.execute(text("SELECT version, applied, checksum FROM schema_migrations"))
    return {version: (applied, checksum) for version, applied, checksum in rows}


def _record(connection: Connection, migration: Migration) -> None:
    connection.execute(
        text(
            "INSERT INTO schema_migrations (version, applied, checksum) VALUES (:version, :applied,"
            " :checksum)"
        ),
        {"version": migration.version, "applied": utcnow(), "checksum": migration.checksum},
    )


def _seed(connection: Connection, secret_key: str) -> None:
    """Add the two rows nothing works without, unless they are there: the anonymous account and the
    horde's switches.
    """
    anonymous = insert(User).values(
        id=ANONYMOUS_ID,
        username="Anonymous",
        oauth_id=ANONYMOUS_OAUTH_ID,
        api_key=hash_api_key(ANONYMOUS_KEY, secret_key),
        public_workers=True,
        concurrency=ANONYMOUS_CONCURRENCY,
    )
    connection.execute(anonymous.on_conflict_do_nothing())
    _execute(
        connection,
        "INSERT INTO settings (raid, invite_only, maintenance)"
        " SELECT false, false, false WHERE NOT EXISTS (SELECT FROM settings)",
    )
    if not _fits_stored_keys(connection, secret_key):
        # No stored key can be used with this secret_key.
        logger.warning("horde.db.secret_key_differs")


def _execute(connection: Connection, sql: str) -> None:
    """Send SQL as it stands, several statements if there are."""
    connection.exec_driver_sql(sql, execution_options={"no_parameters": True})


def _has_table(connection: Connection, name: str) -> bool:
    return connection.scalar(text("SELECT to_regclass(:name) IS NOT NULL"), {"name": name}) is True


def _take_until(migrations: Sequence[Migration], target: str | None) -> list[Migration]:
    if target is None:
        return list(migrations)
    if target not in {migration.version for migration in migrations}:
        raise SchemaError(f"There is no schema version {target}.")
    return [
        migration
        for migration in migrations
        if _version_key(migration.version) <= _version_key(target)
    ]


def _version_key(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.split("."))
    except ValueError:
        raise SchemaError(f"{version}.txt is not named after a version.") from None


def _has_code(statement: str) -> bool:
    return any(
        line.strip() and not line.lstrip().startswith("--") for line in statement.splitlines()
    )
