# SPDX-License-Identifier: AGPL-3.0-or-later
"""Databases and poolers that cannot carry a horde are refused at the start, with the reason."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg2
import pytest
from sqlalchemy import text

from devtools.processes import find_free_ports, find_unprivileged_account
from devtools.services import ServiceAddresses
from horde import db, postgres
from horde.apis.v2 import kobold
from horde.app import create_app
from horde.background import ELECTION_SECONDS, Leadership, build_election_engine
from horde.classes.base.user import UserRoleTypes
from horde.cli.main import main
from horde.config import Config
from horde.database import users
from horde.database.fitness import DatabaseUnfit, check_database, open_session_engine
from horde.database.migrate import migrate
from horde.db import transaction
from tests.integration.lending_pooler import LendingPooler
from tests.integration.rows import SECRET, make_user
from tests.integration.text_horde import KNOWN, TextHorde, start_clean
from tests.services import make_database

POOLER_START_SECONDS = 20


def make_config(services: ServiceAddresses, url: str, direct: str = "") -> Config:
    return Config(
        database_url=name_driver(url),
        database_direct_url=name_driver(direct),
        redis_url=services.redis_url,
        secret_key=SECRET,
        rate_limits_enabled=False,
    )


def name_driver(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg2://", 1)


@pytest.fixture
def database(service_urls: ServiceAddresses) -> str:
    """The address of an empty database."""
    return make_database(service_urls.database_url, "fitness")


@contextmanager
def lending(server_url: str, *, size: int = 3) -> Iterator[LendingPooler]:
    pooler = LendingPooler(server_url, size=size)
    try:
        yield pooler
    finally:
        pooler.close()


# Encodings


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1", "EUC_JP"])
def test_a_database_that_loses_text_is_refused_by_name(
    service_urls: ServiceAddresses,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    encoding: str,
) -> None:
    name = f"encoded_{encoding.lower()}"
    with closing(psycopg2.connect(service_urls.database_url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {name}")
            cursor.execute(
                f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
                " TEMPLATE template0"
            )
    url = urlsplit(service_urls.database_url)._replace(path=f"/{name}").geturl()
    with pytest.raises(DatabaseUnfit, match=encoding):
        check_database(make_config(service_urls, url))
    monkeypatch.setenv("DATABASE_URL", url)
    monkeypatch.setenv("secret_key", SECRET)
    for command in (["db", "migrate"], ["serve", "--port", str(find_free_ports(1)[0])]):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert encoding in said
        assert "ENCODING 'UTF8'" in said


@pytest.mark.parametrize("way", ["database", "environment", "address"])
def test_a_client_encoding_from_outside_changes_no_text(
    service_urls: ServiceAddresses, database: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "database":
        with closing(psycopg2.connect(database)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                name = urlsplit(database).path.lstrip("/")
                cursor.execute(f"ALTER DATABASE {name} SET client_encoding = 'LATIN1'")
    if way == "environment":
        monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    if way == "address":
        database += "?client_encoding=latin1"
    config = make_config(service_urls, database)
    check_database(config)
    with open_session_engine(config) as engine, engine.connect() as connection:
        said = "naïve 漢字 🦙"
        assert connection.scalar(text("SELECT CAST(:said AS text)"), {"said": said}) == said
        assert connection.scalar(text("SELECT length(:said)"), {"said": said}) == len(said)


def test_a_database_in_another_time_zone_is_as_good(
    service_urls: ServiceAddresses, database: str
) -> None:
    with closing(psycopg2.connect(database)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            name = urlsplit(database).path.lstrip("/")
            cursor.execute(f"ALTER DATABASE {name} SET timezone = 'Pacific/Kiritimati'")
    config = make_config(service_urls, database)
    with horde_of(config) as horde:
        do_a_job(horde)


# Poolers


@contextmanager
def horde_of(config: Config) -> Iterator[TextHorde]:
    """The text routes on a database that is migrated through its session address."""
    before = db.state.get()
    app = create_app(config, resource_modules=(kobold,))
    with open_session_engine(config) as engine:
        migrate(engine, secret_key=SECRET)
    users.configure(config)
    try:
        start_clean()
        yield TextHorde(app)
    finally:
        db.disconnect()
        db.state.set(before)


def do_a_job(horde: TextHorde) -> None:
    _, key = make_user(UserRoleTypes.TRUSTED)
    horde.take(key)
    request_id = horde.queue(models=[KNOWN])
    assert horde.submit(key, horde.take_job(key), "naïve 漢字").status_code == 200
    status = horde.status(request_id)
    assert status["done"]
    assert [generation["text"] for generation in status["generations"]] == ["naïve 漢字"]


@pytest.mark.parametrize("size", [1, 3])
def test_a_pooler_that_lends_sessions_is_refused_without_a_direct_address(
    service_urls: ServiceAddresses,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: int,
) -> None:
    monkeypatch.setattr("horde.database.fitness.CHECK_SECONDS", 1.0)
    with lending(database, size=size) as pooler:
        with pytest.raises(DatabaseUnfit, match="DATABASE_URL lends sessions"):
            check_database(make_config(service_urls, pooler.url))
        with pytest.raises(DatabaseUnfit, match="HORDE_DATABASE_DIRECT_URL lends sessions"):
            check_database(make_config(service_urls, database, direct=pooler.url))
        monkeypatch.setenv("DATABASE_URL", pooler.url)
        monkeypatch.setenv("secret_key", SECRET)
        for command in (["db", "migrate"], ["serve", "--port", str(find_free_ports(1)[0])]):
            assert main(command) == 1
            assert "set HORDE_DATABASE_DIRECT_URL" in capsys.readouterr().err


def test_a_direct_address_of_another_database_is_refused(
    service_urls: ServiceAddresses, database: str
) -> None:
    other = make_database(service_urls.database_url, "another")
    with lending(database) as pooler:
        check_database(make_config(service_urls, pooler.url, direct=database))
        with pytest.raises(DatabaseUnfit, match="different databases"):
            check_database(make_config(service_urls, pooler.url, direct=other))


def test_a_horde_works_through_a_pooler_with_a_direct_address(
    service_urls: ServiceAddresses, database: str
) -> None:
    with lending(database) as pooler:
        config = make_config(service_urls, pooler.url, direct=database)
        check_database(config)
        with horde_of(config) as horde:
            do_a_job(horde)
            expect_one_leader(config)
        assert pooler.refused_options == []


def expect_one_leader(config: Config) -> None:
    now = [100.0]
    engine = build_election_engine(config)
    processes = [Leadership(engine, lambda: now[0]) for _ in range(3)]
    for _ in range(3):
        assert [process.refresh() for process in processes] == [True, False, False]
        now[0] += ELECTION_SECONDS
    for process in processes:
        process.resign()


def test_a_horde_works_through_pgbouncer_in_transaction_mode(
    service_urls: ServiceAddresses, database: str
) -> None:
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    with running_pgbouncer(program, database) as url:
        with pytest.raises(DatabaseUnfit, match="lends sessions"):
            check_database(make_config(service_urls, url))
        config = make_config(service_urls, url, direct=database)
        check_database(config)
        with horde_of(config) as horde:
            do_a_job(horde)
            expect_one_leader(config)


@contextmanager
def running_pgbouncer(program: str, server_url: str) -> Iterator[str]:
    """A pooler in transaction mode before a database. Yields its address."""
    server, port, account = urlsplit(server_url), find_free_ports(1)[0], find_unprivileged_account()
    # It refuses root as Postgres does, and another account cannot enter a test's own folder.
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    (folder / "users.txt").write_text(f'"{server.username}" "{server.password}"\n')
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = host={server.hostname} port={server.port}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        f"auth_type = plain\nauth_file = {folder}/users.txt\n"
        "pool_mode = transaction\ndefault_pool_size = 5\n"
    )
    if account:
        for path in (folder, *folder.iterdir()):
            os.chown(path, account.uid, account.gid)
    options = account.build_subprocess_options() if account else {}
    process = subprocess.Popen([program, str(settings)], stderr=subprocess.DEVNULL, **options)
    try:
        url = server._replace(netloc=f"{server.username}:{server.password}@127.0.0.1:{port}")
        wait_for_pooler(url.geturl(), process)
        yield url.geturl()
    finally:
        process.terminate()
        process.wait(POOLER_START_SECONDS)
        shutil.rmtree(folder)


def wait_for_pooler(url: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + POOLER_START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "pgbouncer ended"
        try:
            psycopg2.connect(url).close()
        except psycopg2.OperationalError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("pgbouncer takes no connections")


# Leaders


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


def test_a_leader_whose_server_stops_writing_leads_no_longer(
    service_urls: ServiceAddresses, database: str, clock: list[float]
) -> None:
    """The server that replaced it has locks of its own, so another process may lead there."""
    engine = build_election_engine(make_config(service_urls, database))
    leader = Leadership(engine, lambda: clock[0])
    assert leader.refresh()
    assert leader._connection is not None
    leader._connection.execute(text("SET default_transaction_read_only = on"))
    clock[0] += ELECTION_SECONDS
    assert not leader.refresh()
    clock[0] += ELECTION_SECONDS
    assert leader.refresh()  # on a new connection, to a server that writes
    leader.resign()


def test_a_process_whose_session_lost_the_lock_leads_no_longer(
    service_urls: ServiceAddresses, database: str, clock: list[float]
) -> None:
    engine = build_election_engine(make_config(service_urls, database))
    first, second = Leadership(engine, lambda: clock[0]), Leadership(engine, lambda: clock[0])
    assert first.refresh()
    assert first._connection is not None
    first._connection.execute(text("SELECT pg_advisory_unlock_all()"))
    assert second.refresh()
    clock[0] += ELECTION_SECONDS
    assert (first.refresh(), second.refresh()) == (False, True)
    for process in (first, second):
        process.resign()


# Hosts


def test_the_second_host_of_an_address_is_asked_when_the_first_is_away(
    service_urls: ServiceAddresses, database: str
) -> None:
    parts = urlsplit(database)
    nobody = find_free_ports(1)[0]
    hosts = f"host=127.0.0.1:{nobody}&host={parts.hostname}:{parts.port}"
    url = f"postgresql+psycopg2://{parts.username}:{parts.password}@{parts.path}?{hosts}"
    engine = postgres.build_engine(
        url + "&target_session_attrs=read-write", answer_seconds=5, name="hosts"
    )
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT 1")) == 1
    engine.dispose()


def test_what_takes_too_long_ends_for_a_request_and_goes_on_for_a_job(
    service_urls: ServiceAddresses, database: str
) -> None:
    engine = postgres.build_engine(name_driver(database), answer_seconds=0.2, name="slow")
    with engine.connect() as connection, pytest.raises(Exception, match="did not answer"):
        connection.execute(text("SELECT pg_sleep(5)"))
    with postgres.waiting_up_to(30), engine.connect() as connection:
        connection.execute(text("SELECT pg_sleep(0.5)"))
    engine.dispose()


def test_a_transaction_is_one_session_also_after_one_died(
    service_urls: ServiceAddresses, database: str
) -> None:
    with horde_of(make_config(service_urls, database)):
        with transaction() as session:
            first = session.scalar(text("SELECT pg_backend_pid()"))
        with closing(psycopg2.connect(database)) as other, other.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", (first,))
        with transaction() as session:
            pids = {session.scalar(text("SELECT pg_backend_pid()")) for _ in range(3)}
        assert len(pids) == 1
        assert first not in pids
