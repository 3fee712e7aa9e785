# SPDX-License-Identifier: AGPL-3.0-or-later
"""The schema files on a real database: what they make, what they leave alone, and what happens when
they are cut short.
"""

import importlib
import json
import logging
import os
import pkgutil
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, Engine, create_engine, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

import horde.classes
from devtools.services import ServiceAddresses
from horde.classes.base.kudos import KudosBalanceSnapshot
from horde.classes.base.user import ANONYMOUS_ID, User, hash_api_key
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt, select_as_sent
from horde.classes.kobold.worker import TextWorker
from horde.database import migrate as migrations
from horde.database.migrate import SchemaError, list_migrations, migrate, require_current_schema
from horde.db import Base
from tests.services import ROOT, make_database

for module in pkgutil.walk_packages(horde.classes.__path__, "horde.classes."):
    importlib.import_module(module.name)

SECRET = "salt of the tests"
VERSIONS = [migration.version for migration in list_migrations()]
AFTER_BASE = VERSIONS[1:]
MODELLED_TABLES = sorted(Base.metadata.tables)
CHANGED_TABLES = ("waiting_prompts", "workers", "processing_gens", "kudos_ledger", "users")

type NewDatabase = Callable[[str], Engine]


@pytest.fixture(scope="module")
def new_database(service_urls: ServiceAddresses) -> Iterator[NewDatabase]:
    """Engines on empty databases, named by the caller."""
    engines: list[Engine] = []

    def make(name: str) -> Engine:
        url = make_database(service_urls.database_url, f"migrations_{name}")
        engines.append(create_engine(url.replace("postgresql://", "postgresql+psycopg2://", 1)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.dispose()


@pytest.fixture(scope="module")
def migrated(new_database: NewDatabase) -> Engine:
    """A database made by the files. Tests only read it."""
    engine = new_database("files")
    migrate(engine, secret_key=SECRET)
    return engine


@pytest.fixture(scope="module")
def modelled(new_database: NewDatabase) -> Engine:
    """A database made from the row classes. Tests only read it."""
    engine = new_database("classes")
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def engine(new_database: NewDatabase) -> Engine:
    """An empty database of the test's own."""
    return new_database("one")


def describe_table(engine: Engine, table: str) -> dict[str, set[tuple[str, ...]]]:
    """Columns with type and nullability, indexes and constraints, as Postgres itself prints them.
    Defaults are left out.
    """
    queries = {
        "columns": """
            SELECT attname, format_type(atttypid, atttypmod), attnotnull::text
            FROM pg_attribute WHERE attrelid = to_regclass(:table) AND attnum > 0
                AND NOT attisdropped
        """,
        "indexes": """
            SELECT indexrelid::regclass::text, pg_get_indexdef(indexrelid), indisvalid::text
            FROM pg_index WHERE indrelid = to_regclass(:table)
        """,
        "constraints": """
            SELECT conname, pg_get_constraintdef(oid)
            FROM pg_constraint WHERE conrelid = to_regclass(:table) AND contype <> 'n'
        """,
        "enumerations": """
            SELECT typname, enumlabel, enumsortorder::text
            FROM pg_attribute JOIN pg_enum ON enumtypid = atttypid JOIN pg_type
                ON pg_type.oid = atttypid
            WHERE attrelid = to_regclass(:table)
        """,
    }
    with engine.connect() as connection:
        return {
            name: {tuple(row) for row in connection.execute(text(sql), {"table": table})}
            for name, sql in queries.items()
        }


@pytest.mark.parametrize("table", MODELLED_TABLES)
def test_a_table_is_what_its_row_class_says(migrated: Engine, modelled: Engine, table: str) -> None:
    assert describe_table(migrated, table) == describe_table(modelled, table)


def test_every_required_column_of_a_live_table_fills_itself(migrated: Engine) -> None:
    with migrated.connect() as connection:
        unfilled = connection.scalars(
            text(
                "SELECT table_name || '.' || column_name FROM information_schema.columns WHERE"
                " table_schema = 'public'"
                " AND table_name IN ('waiting_prompts', 'workers', 'processing_gens')"
                " AND is_nullable = 'NO' AND column_default IS NULL"
            )
        )
        assert set(unfilled) == {
            "waiting_prompts.wp_type",
            "waiting_prompts.prompt",
            "waiting_prompts.user_id",
            "workers.worker_type",
            "workers.user_id",
            "workers.name",
            "processing_gens.procgen_type",
            "processing_gens.wp_id",
            "processing_gens.worker_id",
        }


def test_an_empty_database_is_brought_to_the_newest_version_and_seeded(engine: Engine) -> None:
    assert migrate(engine, secret_key=SECRET) == VERSIONS
    with Session(engine) as session:
        anonymous = session.get_one(User, ANONYMOUS_ID)
        assert (anonymous.alias, anonymous.oauth_id, anonymous.concurrency) == (
            "Anonymous#0",
            "anon",
            500,
        )
        assert anonymous.api_key == hash_api_key("0000000000", SECRET)
        assert session.execute(
            text("SELECT raid, invite_only, maintenance FROM settings")
        ).all() == [(False, False, False)]
        assert session.execute(text("SELECT id, mode FROM kudos_ledger_control")).all() == [
            (1, "ledger")
        ]


def test_a_second_run_changes_nothing(engine: Engine) -> None:
    migrate(engine, secret_key=SECRET)
    before = count_rows(engine)
    assert migrate(engine, secret_key=SECRET) == []
    assert count_rows(engine) == before


def test_another_secret_key_is_reported_and_changes_no_key(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    migrate(engine, secret_key=SECRET)
    with caplog.at_level(logging.WARNING):
        migrate(engine, secret_key="another")
    assert "horde.db.secret_key_differs" in caplog.messages
    with Session(engine) as session:
        assert session.get_one(User, ANONYMOUS_ID).api_key == hash_api_key("0000000000", SECRET)


def test_a_live_horde_before_chat_is_upgraded_in_place(engine: Engine) -> None:
    make_horde_before_chat(engine)
    with engine.begin() as connection:
        live = insert_live_rows(connection)
    files_before = read_table_files(engine)

    assert migrate(engine, secret_key=SECRET) == AFTER_BASE

    with Session(engine) as session:
        request = session.get_one(TextWaitingPrompt, live.request)
        assert (
            request.is_chat,
            request.messages,
            request.chat_conformance,
            request.queue_class,
        ) == (False, None, "strict", None)
        assert (request.n, request.extra_priority, request.params) == (2, 50, {"n": 2})
        worker = session.get_one(TextWorker, live.worker)
        assert (
            worker.accepts_chat_jobs,
            worker.accepts_prompt_jobs,
            worker.nonconformant_replies,
        ) == (False, True, 0)
        job = session.get_one(TextProcessingGeneration, live.job)
        assert (job.message, job.over_capacity_at_assignment, job.wp_id) == (
            None,
            False,
            live.request,
        )
        assert session.get_one(User, live.user).kudos == 5000
    require_current_schema(engine)
    assert read_table_files(engine) == files_before, "a table was rewritten"


def test_an_older_server_keeps_inserting_after_the_upgrade(engine: Engine) -> None:
    make_horde_before_chat(engine)
    migrate(engine, secret_key=SECRET)
    with engine.begin() as connection:
        live = insert_live_rows(connection)
    with Session(engine) as session:
        assert not session.get_one(TextWaitingPrompt, live.request).is_chat
        assert session.get_one(TextWorker, live.worker).accepts_prompt_jobs
        assert not session.get_one(TextProcessingGeneration, live.job).over_capacity_at_assignment


def test_a_chat_request_of_the_version_before_is_served_as_it_was_stored(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Name one colour."}]
    extras = {"tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "auto"}
    migrate(engine, secret_key=SECRET, target="5.1.16")
    insert = text(
        "INSERT INTO waiting_prompts (id, wp_type, prompt, user_id, is_chat, messages, chat_extras)"
        " VALUES (:id, 'text', '', 0, true, CAST(:messages AS jsonb), CAST(:extras AS jsonb))"
    )
    values = {"messages": json.dumps(messages), "extras": json.dumps(extras)}
    before, after = uuid4(), uuid4()
    with engine.begin() as connection:
        connection.execute(insert, {"id": before, **values})

    assert migrate(engine, secret_key=SECRET)[0] == "5.1.17"

    with engine.begin() as connection:
        connection.execute(insert, {"id": after, **values})
        columns = TextWaitingPrompt.__table__.c
        as_sent = select_as_sent(columns, "messages"), select_as_sent(columns, "chat_extras")
        rows = connection.execute(select(*as_sent).where(columns.id.in_([before, after]))).all()
    assert [tuple(row) for row in rows] == [(messages, extras)] * 2


def test_balances_open_with_what_no_applied_posting_explains(engine: Engine) -> None:
    make_horde_before_chat(engine)
    with engine.begin() as connection:
        posted, unposted = (
            insert_user(connection, "posted", kudos=5000),
            insert_user(connection, "unposted", kudos=70),
        )
        connection.execute(
            text(
                "INSERT INTO kudos_ledger (event_id, entry_type, user_id, account, amount,"
                " applied) VALUES"
                " (gen_random_uuid(), 'GENERATION', :id, 'balance', -10.25, true),"
                " (gen_random_uuid(), 'GENERATION', :id, 'escrow', 3, true),"
                " (gen_random_uuid(), 'TRANSFER', :id, 'balance', 40, false)"
            ),
            {"id": posted},
        )
        stale = insert_user(connection, "stale", kudos=9)
        connection.execute(
            text("INSERT INTO kudos_balance_snapshots (user_id, balance) VALUES (:id, 1)"),
            {"id": stale},
        )

    migrate(engine, secret_key=SECRET)

    with Session(engine) as session:
        snapshots = {row.user_id: row for row in session.scalars(select(KudosBalanceSnapshot))}
        assert set(snapshots) == {posted, stale}, (
            f"user {unposted} has no postings and needs no row"
        )
        assert (snapshots[posted].balance, snapshots[posted].opening_balance) == (
            Decimal(5000),
            Decimal("5010.25"),
        )
        assert (snapshots[posted].escrow, snapshots[posted].opening_escrow) == (
            Decimal(0),
            Decimal(-3),
        )
        assert (snapshots[stale].balance, snapshots[stale].opening_balance) == (
            Decimal(9),
            Decimal(9),
        )


def test_a_database_that_lacks_a_column_is_refused_by_name_and_left_alone(engine: Engine) -> None:
    make_horde_before_chat(engine)
    with engine.begin() as connection:
        connection.execute(
            text(
                "ALTER TABLE users DROP COLUMN contact; ALTER TABLE workers ADD COLUMN shoe_size"
                " int NOT NULL"
            )
        )
    with pytest.raises(SchemaError) as refusal:
        migrate(engine, secret_key=SECRET)
    assert "users.contact is missing" in str(refusal.value)
    assert "workers.shoe_size is unknown here and required" in str(refusal.value)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT to_regnamespace('horde_expected')")) is None
        assert not has_column(connection, "waiting_prompts", "is_chat")


def test_a_database_with_chat_but_without_records_is_taken_over(engine: Engine) -> None:
    Base.metadata.create_all(engine)
    create_unmodelled_tables(engine)
    assert migrate(engine, secret_key=SECRET) == AFTER_BASE
    require_current_schema(engine)


@pytest.mark.race
def test_of_two_migrators_at_once_each_version_is_applied_by_one(engine: Engine) -> None:
    start = threading.Barrier(2)

    def run() -> list[str]:
        start.wait()
        return migrate(engine, secret_key=SECRET)

    with ThreadPoolExecutor(2) as pool:
        first, second = (future.result() for future in [pool.submit(run), pool.submit(run)])
    assert sorted([first, second]) == [[], VERSIONS]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM users")) == 1
        assert connection.scalar(text("SELECT count(*) FROM settings")) == 1


def test_an_index_that_failed_to_build_is_built_on_the_next_run(engine: Engine) -> None:
    migrate(engine, secret_key=SECRET, target="5.1.14")
    chat = next(migration for migration in list_migrations() if migration.version == "5.1.15")
    with engine.begin() as connection:
        connection.exec_driver_sql(chat.transaction)
        duplicates = [insert_request(connection, ANONYMOUS_ID) for _ in range(2)]
        connection.execute(
            text("UPDATE waiting_prompts SET operation_key = :key"), {"key": uuid4()}
        )
    with pytest.raises(IntegrityError):
        migrate(engine, secret_key=SECRET)
    assert is_index_valid(engine, "ix_waiting_prompts_user_operation_key") is False
    with pytest.raises(SchemaError, match=r"lacks 5\.1\.15"):
        require_current_schema(engine)

    with engine.begin() as connection:
        connection.execute(
            text("UPDATE waiting_prompts SET operation_key = NULL WHERE id = :id"),
            {"id": duplicates[0]},
        )
    assert migrate(engine, secret_key=SECRET) == AFTER_BASE
    assert is_index_valid(engine, "ix_waiting_prompts_user_operation_key") is True


def test_a_file_that_fails_leaves_nothing_of_itself(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = migrations.parse_migration("5.1.17", "CREATE TABLE half (id int);\nSELECT 1 / 0;\n")
    monkeypatch.setattr(
        migrations, "list_migrations", lambda folder: [*list_migrations(folder), broken]
    )
    with pytest.raises(Exception, match="division by zero"):
        migrate(engine, secret_key=SECRET)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT to_regclass('half')")) is None
        assert (
            connection.scalars(text("SELECT version FROM schema_migrations ORDER BY version")).all()
            == VERSIONS
        )


@pytest.mark.race
def test_readers_go_on_while_a_migration_waits_for_a_table(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "TABLE_LOCK_SECONDS", 0.1)
    migrate(engine, secret_key=SECRET, target="5.1.14")
    with ThreadPoolExecutor(1) as pool, engine.connect() as reader:
        # Keeps its lock until its transaction ends.
        reader.execute(text("SELECT 1 FROM waiting_prompts"))
        running = pool.submit(migrate, engine, secret_key=SECRET)
        with engine.connect() as other:
            other.execute(text("SET lock_timeout = '5s'"))
            for _ in range(20):
                other.execute(text("SELECT count(*) FROM waiting_prompts, pg_sleep(0.02)"))
                other.rollback()
        assert not running.done()
        reader.rollback()
        assert running.result(timeout=60) == AFTER_BASE


def test_a_database_behind_the_files_is_refused(engine: Engine) -> None:
    with pytest.raises(SchemaError, match="horde db migrate"):
        require_current_schema(engine)
    migrate(engine, secret_key=SECRET, target="5.1.15")
    with pytest.raises(SchemaError, match=r"lacks 5\.1\.16"):
        require_current_schema(engine)
    migrate(engine, secret_key=SECRET)
    require_current_schema(engine)


def test_a_database_ahead_of_the_files_is_accepted(engine: Engine) -> None:
    migrate(engine, secret_key=SECRET)
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO schema_migrations VALUES ('9.0.0', now(), repeat('0', 64))")
        )
    require_current_schema(engine)


def test_an_unknown_target_is_refused(engine: Engine) -> None:
    with pytest.raises(SchemaError, match="no schema version 4"):
        migrate(engine, secret_key=SECRET, target="4")


def test_the_queue_is_read_in_the_order_of_its_indexes(migrated: Engine) -> None:
    rank = "extra_priority - 5 * date_part('epoch', created)"
    live = "active AND NOT faulted AND n > 0"
    by_class = (
        f"SELECT id FROM waiting_prompts WHERE {live} AND wp_type = 'text' AND queue_class = 1"
        f" ORDER BY {rank} DESC, created, id"
    )
    by_user = f"SELECT id FROM waiting_prompts WHERE {live} AND user_id = 1 ORDER BY {rank} DESC"
    with migrated.connect() as connection:
        connection.execute(
            text("SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_sort = off")
        )
        for sql, index in [(by_class, "queue_class"), (by_user, "queue_user")]:
            plan = "\n".join(connection.scalars(text(f"EXPLAIN {sql}")))
            assert f"ix_waiting_prompts_{index}" in plan, plan
            assert "Sort" not in plan, plan


@pytest.fixture
def sql_folder(tmp_path: Path) -> Path:
    """A copy of the files that a test may change."""
    return Path(shutil.copytree(migrations.SQL_FOLDER, tmp_path / "sql_statements"))


def test_a_function_is_replaced_when_its_text_changes_and_only_then(
    engine: Engine, sql_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    migrate(engine, secret_key=SECRET, folder=sql_folder)
    file = sql_folder / "functions" / "list_queue_classes.sql"
    found = file.read_text()
    file.write_text(found.replace("RETURN found;", "RETURN '{7}';"))
    with caplog.at_level(logging.INFO, logger="horde.database.migrate"):
        assert migrate(engine, secret_key=SECRET, folder=sql_folder) == []
        assert migrate(engine, secret_key=SECRET, folder=sql_folder) == []
    replaced = [record for record in caplog.records if "function_replaced" in record.message]
    assert [vars(record)["function"] for record in replaced] == ["list_queue_classes"]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT list_queue_classes()")) == [7]


def test_a_version_that_is_not_the_newest_replaces_no_function(
    engine: Engine, sql_folder: Path
) -> None:
    (sql_folder / "9.9.9.txt").write_text("SELECT 1;")
    file = sql_folder / "functions" / "list_queue_classes.sql"
    file.write_text(file.read_text().replace("RETURN found;", "RETURN '{7}';"))
    migrate(engine, secret_key=SECRET, folder=sql_folder)
    with engine.begin() as connection:
        connection.execute(text("DROP FUNCTION find_job"))
    assert migrate(engine, secret_key=SECRET) == []
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT list_queue_classes()")) == [7]
    require_current_schema(engine)


def test_a_database_that_lacks_a_function_is_refused(engine: Engine) -> None:
    migrate(engine, secret_key=SECRET)
    with engine.begin() as connection:
        connection.execute(text("DROP FUNCTION find_job"))
    with pytest.raises(SchemaError, match="lacks find_job: run `horde db migrate`"):
        require_current_schema(engine)
    migrate(engine, secret_key=SECRET)
    require_current_schema(engine)


def test_functions_wait_for_the_tables_they_call_for(engine: Engine) -> None:
    migrate(engine, secret_key=SECRET, target="5.1.15")
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT to_regproc('find_job')")) is None


def test_each_function_is_named_as_its_file_and_told_of() -> None:
    told = (ROOT / "docs" / "reference" / "schema.md").read_text()
    for file in (migrations.SQL_FOLDER / "functions").glob("*.sql"):
        assert f"CREATE OR REPLACE FUNCTION {file.stem}(" in file.read_text()
        assert f"| `{file.stem}` |" in told


@pytest.mark.parametrize(
    "ahead",
    [
        pytest.param({"queue_class": "2"}, id="another class"),
        pytest.param({"queue_class": "1", "created": "now() + interval '1 hour'"}, id="behind"),
        pytest.param({"queue_class": "1", "max_length": "500"}, id="too long"),
        pytest.param({"queue_class": "2 + number"}, id="many classes"),
    ],
)
def test_a_claim_visits_no_row_that_it_cannot_take(engine: Engine, ahead: dict[str, str]) -> None:
    migrate(engine, secret_key=SECRET)
    columns = {"wp_type": "'text'", "prompt": "''", "user_id": "0", "n": "1", "jobs": "1"}
    columns |= {"active": "true", "max_length": "80", "max_context_length": "1024"}

    def insert(connection: Connection, count: int, others: dict[str, str]) -> None:
        values = columns | others
        connection.execute(
            text(
                f"INSERT INTO waiting_prompts ({', '.join(values)})"
                f" SELECT {', '.join(values.values())} FROM generate_series(1, {count}) AS number"
            )
        )

    claim = text("""
        SELECT id FROM claim_request(
            classes => ARRAY[1], max_lengths => ARRAY[100], max_context_lengths => ARRAY[2048],
            models => ARRAY['m'], lease_capacity => 80, only_user => NULL,
            preferred_users => ARRAY[5, 6], contested => NULL, wait => '1', wanted => 1,
            job_ids => ARRAY[gen_random_uuid()], worker => :worker_id,
            chat_max_context_length => NULL, chat_max_length => NULL, transports => NULL,
            ttl => 150, moment => now()::timestamp, new_expiry => now()::timestamp
        )
        """)
    visits = text(
        "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables"
        " WHERE relname = 'waiting_prompts'"
    )
    with engine.begin() as connection:
        worker_id = connection.scalar(
            text(
                "INSERT INTO workers (worker_type, user_id, name)"
                " VALUES ('text_worker', 0, 'worker') RETURNING id"
            )
        )
        insert(connection, 1, {"queue_class": "1"})
    with engine.connect() as connection:
        # Planned for this queue, and kept for the next.
        assert connection.scalar(claim, {"worker_id": worker_id}) is not None
        connection.commit()
        insert(connection, 2000, ahead)
        insert(connection, 1, {"queue_class": "1"})
        connection.commit()
        connection.execute(text("ANALYZE waiting_prompts"))
        connection.commit()
        taken = connection.scalar(claim, {"worker_id": worker_id})
        assert connection.scalar(visits) <= 60
        length = "SELECT max_length FROM waiting_prompts WHERE id = :id"
        assert connection.scalar(text(length), {"id": taken}) == 80


@pytest.mark.slow
def test_the_command_migrates_and_tells_what_ran(engine: Engine) -> None:
    before = run_command(engine, "status")
    assert (before.returncode, before.stdout.splitlines()[0]) == (3, "5.1.14  not applied")
    assert run_command(engine, "migrate").stdout == f"applied {', '.join(VERSIONS)}\n"
    after = run_command(engine, "status")
    assert (after.returncode, "not applied" in after.stdout) == (0, False)


# Rows as a server of the version before writes them: every column of 5.1.14 named that it had no
# default for.


class LiveRows:
    """The ids of one running job and what it hangs from."""

    def __init__(self, user: int, worker: UUID, request: UUID, job: UUID) -> None:
        self.user, self.worker, self.request, self.job = user, worker, request, job


def make_horde_before_chat(engine: Engine) -> None:
    """The tables of 5.1.14 as an older server leaves them: no record table, and no defaults in the
    columns.
    """
    base = list_migrations()[0]
    with engine.begin() as connection:
        connection.exec_driver_sql(base.transaction)
        drop_defaults = connection.scalars(
            text(
                "SELECT format('ALTER TABLE %I ALTER %I DROP DEFAULT', table_name, column_name)"
                " FROM information_schema.columns"
                " WHERE table_schema = 'public' AND table_name IN ('users', 'workers',"
                " 'waiting_prompts', 'processing_gens')"
                " AND column_default IS NOT NULL AND column_default NOT LIKE 'nextval%'"
            )
        ).all()
        connection.exec_driver_sql(";".join(drop_defaults))


def create_unmodelled_tables(engine: Engine) -> None:
    """Add the tables of 5.1.14 that no row class stands for, empty of meaning but with their
    columns.
    """
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA source; SET LOCAL search_path = source")
        connection.exec_driver_sql(list_migrations()[0].transaction)
        names = connection.scalars(
            text("SELECT tablename FROM pg_tables WHERE schemaname = 'source'")
        ).all()
        for name in set(names) - set(MODELLED_TABLES):
            connection.exec_driver_sql(
                f"CREATE TABLE public.{name} (LIKE source.{name} INCLUDING DEFAULTS INCLUDING"
                " INDEXES)"
            )


def insert_live_rows(connection: Connection) -> LiveRows:
    """A user whose request has one job running at its worker and two to hand out."""
    user = insert_user(connection, f"user{uuid4().hex[:8]}", kudos=5000)
    worker = connection.scalar(
        text(
            """
            INSERT INTO workers (
                id, worker_type, user_id, name, ipaddr, created, last_check_in, last_aborted_job,
                    kudos, contributions, uptime,
                last_reward_uptime, fulfilments, aborted_jobs, uncompleted_jobs, threads,
                bridge_agent, max_power,
                extra_slow_worker, paused, maintenance, maintenance_msg, allow_unsafe_ipaddr,
                speed, nsfw, max_length,
                max_context_length
            ) VALUES (
                gen_random_uuid(), 'text_worker', :user, :name, '127.0.0.1', now(), now(), now(),
                    0, 0, 0,
                0, 0, 0, 0, 1, 'old:1:url', 20, false, false, false, '', true, 1.0, false, 512, 4096
            ) RETURNING id
            """
        ),
        {"user": user, "name": uuid4().hex},
    )
    request = insert_request(connection, user)
    job = connection.scalar(
        text(
            """
            INSERT INTO processing_gens (
                id, procgen_type, model, seed, start_time, created, cancelled, faulted, fake,
                    censored, job_ttl, wp_id, worker_id
            ) VALUES (
                gen_random_uuid(), 'text', 'some model', 1, now(), now(), false, false, false,
                    false, 150, :request, :worker
            ) RETURNING id
            """
        ),
        {"request": request, "worker": worker},
    )
    assert worker is not None
    assert job is not None
    return LiveRows(user, worker, request, job)


def insert_user(connection: Connection, name: str, *, kudos: int) -> int:
    """An account, as an older server makes it."""
    user: int | None = connection.scalar(
        text(
            """
            INSERT INTO users (
                username, oauth_id, api_key, client_id, created, last_active, kudos, monthly_kudos,
                    evaluating_kudos,
                usage_multiplier, worker_invited, public_workers, concurrency
            ) VALUES (:name, :name, :name, :name, now(), now(), :kudos, 0, 0, 1.0, 0, false,
                30) RETURNING id
            """
        ),
        {"name": name, "kudos": kudos},
    )
    assert user is not None
    return user


def insert_request(connection: Connection, user: int) -> UUID:
    """A waiting text request, as an older server makes it."""
    request: UUID | None = connection.scalar(
        text(
            """
            INSERT INTO waiting_prompts (
                id, wp_type, prompt, user_id, params, gen_payload, nsfw, ipaddr, safe_ip,
                    trusted_workers, validated_backends,
                slow_workers, extra_slow_workers, worker_blacklist, faulted, active,
                consumed_kudos, kudos, n, jobs, things,
                total_usage, extra_priority, client_agent, disable_batching, expiry, created,
                max_length, max_context_length
            ) VALUES (
                gen_random_uuid(), 'text', 'Once upon a time', :user, '{"n": 2}', '{}', false,
                    '127.0.0.1', true, false, false,
                true, false, false, false, true, 0, 0, 2, 3, 80, 240, 50, 'old:1:url', false,
                now() + interval '20 minutes', now(), 80, 1024
            ) RETURNING id
            """
        ),
        {"user": user},
    )
    assert request is not None
    return request


# Questions about a database


def count_rows(engine: Engine) -> dict[str, int]:
    """Rows by table."""
    with engine.connect() as connection:
        tables = connection.scalars(
            text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        ).all()
        return {
            table: connection.scalar(text(f'SELECT count(*) FROM "{table}"')) or 0
            for table in tables
        }


def read_table_files(engine: Engine) -> dict[str, int]:
    """Which file holds a table: another one after a rewrite."""
    with engine.connect() as connection:
        return {
            table: connection.scalar(text(f"SELECT pg_relation_filenode('{table}')")) or 0
            for table in CHANGED_TABLES
        }


def is_index_valid(engine: Engine, name: str) -> bool | None:
    """Whether an index is complete; None when there is none."""
    with engine.connect() as connection:
        return connection.scalar(
            text("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)"),
            {"name": name},
        )


def has_column(connection: Connection, table: str, column: str) -> bool:
    """Whether a table has a column."""
    sql = (
        "SELECT EXISTS (SELECT FROM information_schema.columns"
        " WHERE table_name = :table AND column_name = :column)"
    )
    return connection.scalar(text(sql), {"table": table, "column": column}) is True


def run_command(engine: Engine, action: str) -> subprocess.CompletedProcess[str]:
    """`horde db <action>` in a process of its own, as operators start it."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "DATABASE_URL": engine.url.render_as_string(hide_password=False),
        "secret_key": SECRET,
    }
    command = [sys.executable, "-m", "horde.cli.main", "db", action]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
