# SPDX-License-Identifier: AGPL-3.0-or-later
"""A database that fails over, hangs, runs full or ends sessions: 503 in JSON, and over in seconds.

A Postgres of this module's own is frozen, restarted, made read-only and replaced by its promoted
standby under requests from many threads.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from sqlalchemy import text

from devtools.services import ServiceAddresses
from horde import db
from horde.apis.v2 import heartbeat, kobold
from horde.app import create_app
from horde.config import Config
from horde.database import users
from horde.database.caches import clear_all
from horde.database.migrate import migrate
from horde.db import transaction
from horde.postgres import waiting_up_to
from tests.integration.own_postgres import OwnPostgres, own_postgres
from tests.integration.rows import SECRET, make_user
from tests.integration.tcp_gate import TcpGate
from tests.integration.text_horde import TextHorde

ANSWER_SECONDS = 1.0
RECOVERY_SECONDS = 30
THREADS = 12

# A statement may break in any way that Postgres knows, so a trigger makes it break.
BREAKING = """
CREATE TABLE breaking (sqlstate text);
CREATE FUNCTION break_down() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE code text;
BEGIN
    SELECT sqlstate INTO code FROM breaking;
    IF code IS NOT NULL THEN
        RAISE EXCEPTION 'broken on purpose' USING ERRCODE = code;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER break_down BEFORE INSERT ON waiting_prompts
    FOR EACH ROW EXECUTE FUNCTION break_down();
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPostgres]:
    with own_postgres(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture(scope="module")
def gate(server: OwnPostgres) -> Iterator[TcpGate]:
    """The address that the horde knows; what answers there may change."""
    gate = TcpGate(server.url)
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def app(server: OwnPostgres, gate: TcpGate, service_urls: ServiceAddresses) -> Iterator[Flask]:
    port = server.service.port
    address = server.url.replace("postgresql://", "postgresql+psycopg2://")
    config = Config(
        database_url=address.replace(f":{port}/", f":{gate.port}/"),
        database_answer_seconds=ANSWER_SECONDS,
        redis_url=service_urls.redis_url,
        secret_key=SECRET,
        text_request_2sec_limit="10000/second",  # limits are on, and wide
        text_request_90min_limit="100000/minute",
    )
    before = db.state.get()
    app = create_app(config, resource_modules=(heartbeat, kobold))
    with waiting_up_to(60):  # no single answer of a request takes as long as the schema
        migrate(db.require_engine(), secret_key=SECRET)
    users.configure(config)
    with transaction() as session:
        session.execute(text(BREAKING))
    yield app
    db.disconnect()
    db.state.set(before)


@pytest.fixture(scope="module")
def key(app: Flask) -> str:
    return make_user(concurrency=10_000)[1]


@pytest.fixture
def horde(app: Flask, server: OwnPostgres, gate: TcpGate, key: str) -> Iterator[TextHorde]:
    clear_all()
    horde = TextHorde(app)
    yield horde
    server.thaw()
    server.reset()
    server.run("UPDATE breaking SET sqlstate = NULL")
    gate.lead_to(server.url)
    wait_until_served(horde, key)


def ask(horde: TextHorde, key: str) -> Any:
    """Queue a request."""
    return horde.ask(key, models=["a/model"])


def wait_until_served(horde: TextHorde, key: str) -> float:
    """Seconds until a request is taken again."""
    started = time.monotonic()
    while (answer := ask(horde, key)).status_code != 202:
        expect_unavailable(answer)
        assert time.monotonic() - started < RECOVERY_SECONDS
        time.sleep(0.1)
    return time.monotonic() - started


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RECOVERY_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def expect_unavailable(answer: Any) -> None:
    assert answer.status_code == 503, answer.data
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert set(answer.json) == {"message"}


def list_sessions(server: OwnPostgres) -> set[int]:
    """The process of each pooled connection."""
    return set(
        server.run(
            "SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity"
            " WHERE application_name = 'horde'"
        )
    )


@contextmanager
def crowd(horde: TextHorde, key: str) -> Iterator[Counter[int]]:
    """Clients that ask all the time; how often they were answered with each status."""
    statuses: Counter[int] = Counter()
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            answer = ask(horde, key)
            assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
            statuses[answer.status_code] += 1
            time.sleep(0.02)

    with ThreadPoolExecutor(THREADS) as pool:
        asking = [pool.submit(keep_asking) for _ in range(THREADS)]
        try:
            time.sleep(0.5)
            yield statuses
            time.sleep(0.5)
        finally:
            stop.set()
        for one in asking:
            one.result(60)
    assert set(statuses) <= {202, 503}, statuses


KEPT = ["53100", "53200", "53400", "57014", "58030", "55P03"]
DISCARDED = ["25006", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04", "08006"]


@pytest.mark.parametrize("sqlstate", [*KEPT, *DISCARDED, "53300", "40P01", "40001"])
def test_whatever_the_database_cannot_do_now_is_503_and_soon_over(
    horde: TextHorde, server: OwnPostgres, key: str, sqlstate: str
) -> None:
    wait_until_served(horde, key)
    before = list_sessions(server)
    server.run("DELETE FROM breaking")
    server.run("INSERT INTO breaking VALUES (%s)", sqlstate)
    expect_unavailable(ask(horde, key))
    server.run("UPDATE breaking SET sqlstate = NULL")
    assert wait_until_served(horde, key) < 5
    if sqlstate in KEPT:
        assert before & list_sessions(server)
    if sqlstate in DISCARDED:
        assert not before & list_sessions(server)


def test_a_defect_is_still_500(horde: TextHorde, server: OwnPostgres, key: str) -> None:
    server.run("DELETE FROM breaking")
    server.run("INSERT INTO breaking VALUES ('22012')")
    assert ask(horde, key).status_code == 500


@pytest.mark.parametrize("setting", ["statement_timeout = '50ms'", "lock_timeout = '50ms'"])
def test_a_statement_that_the_server_gives_up_is_503(
    horde: TextHorde, server: OwnPostgres, key: str, setting: str
) -> None:
    request_id = horde.queue(key, models=["a/model"])
    server.set(setting)
    with db.require_engine().connect() as other:
        other.execute(
            text("SELECT FROM waiting_prompts WHERE id = :id FOR UPDATE"), {"id": request_id}
        )
        expect_unavailable(horde.cancel(request_id))
    assert horde.cancel(request_id).status_code == 200


@pytest.mark.parametrize("way", ["idle_session_timeout", "terminated", "gate"])
def test_a_pooled_connection_that_died_at_rest_costs_no_request(
    horde: TextHorde, server: OwnPostgres, gate: TcpGate, key: str, way: str
) -> None:
    wait_until_served(horde, key)
    if way == "idle_session_timeout":
        server.set("idle_session_timeout = '100ms'")
        wait_until_served(horde, key)
        time.sleep(0.5)
    elif way == "terminated":
        server.run(
            "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
            " WHERE application_name = 'horde'"
        )
    else:
        gate.close()
        gate.open()
    assert [ask(horde, key).status_code for _ in range(3)] == [202] * 3


def test_a_frozen_server_is_503_within_seconds_and_served_again_once_it_goes_on(
    horde: TextHorde, server: OwnPostgres, key: str
) -> None:
    wait_until_served(horde, key)
    with crowd(horde, key) as statuses:
        assert statuses[202]
        server.freeze()
        try:
            wait_for(lambda: statuses[503] >= THREADS)  # nobody waits for ever
            started = time.monotonic()
            expect_unavailable(ask(horde, key))
            assert time.monotonic() - started < RECOVERY_SECONDS
            beat = horde.app.test_client().get("/api/v2/status/heartbeat")
            assert beat.json is not None
            assert beat.json["message"] == "DOWN"
        finally:
            server.thaw()
        assert wait_until_served(horde, key) < 10


def test_a_restart_under_load_is_503_and_then_over(
    horde: TextHorde, server: OwnPostgres, key: str
) -> None:
    with crowd(horde, key) as statuses:
        server.stop()
        time.sleep(0.5)
        server.start()
        assert wait_until_served(horde, key) < 10
        statuses.clear()
        time.sleep(0.5)
        assert set(statuses) == {202}


def test_a_server_that_takes_no_writes_is_503_and_reads_go_on(
    horde: TextHorde, server: OwnPostgres, key: str
) -> None:
    request_id = horde.queue(key, models=["a/model"])
    server.set("default_transaction_read_only = on")
    with crowd(horde, key) as statuses:
        statuses.clear()
        time.sleep(0.5)
        assert set(statuses) == {503}
        assert horde.status(request_id)["waiting"] == 1
        server.reset()
        assert wait_until_served(horde, key) < 5


def test_after_a_failover_requests_reach_the_server_that_writes(
    horde: TextHorde, server: OwnPostgres, gate: TcpGate, key: str, tmp_path: Path
) -> None:
    """Its old connections lead to the server that was demoted; they are left at its first word."""
    standby = server.make_standby(tmp_path)
    try:
        with crowd(horde, key) as statuses:
            server.set("default_transaction_read_only = on")  # demoted; its sessions live on
            standby.run("SELECT pg_promote()")
            gate.lead_to(standby.url)
            assert wait_until_served(horde, key) < 10
            time.sleep(0.5)
            statuses.clear()
            time.sleep(0.5)
            assert set(statuses) == {202}
        assert list_sessions(standby)
    finally:
        gate.lead_to(server.url)
        standby.close()
        db.disconnect()


def test_a_password_of_the_database_reaches_no_log_and_no_answer(
    horde: TextHorde, server: OwnPostgres, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        server.stop()
        try:
            answer = ask(horde, key)
        finally:
            server.start()
    expect_unavailable(answer)
    assert server.service.password not in caplog.text + answer.text
