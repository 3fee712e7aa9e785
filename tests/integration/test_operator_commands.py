# SPDX-License-Identifier: AGPL-3.0-or-later
"""The `horde` commands of operators on real databases: of this version, an older one, and none."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
from sqlalchemy import create_engine, text

from devtools.processes import find_free_ports
from devtools.services import ServiceAddresses
from horde.cli import _operating, db
from horde.cli.main import main
from horde.config import VERSION
from horde.database.migrate import migrate
from tests.integration.tcp_gate import TcpGate
from tests.services import make_database

type Run = Callable[..., tuple[int, str, str]]

SECRET = "salt of the tests"
READ_ONLY = (["user", "list"], ["user", "show", "0"], ["kudos", "audit"], ["store", "audit"])


@pytest.fixture(scope="module")
def databases(service_urls: ServiceAddresses) -> dict[str, str]:
    """Addresses of databases: of this version, of the one before chat, and an empty one."""
    urls = {
        name: make_database(service_urls.database_url, f"commands_{name}")
        for name in ("present", "foreign", "old", "empty")
    }
    for name, target in (("present", None), ("foreign", "5.1.14"), ("old", "5.1.15")):
        engine = create_engine(urls[name].replace("postgresql://", "postgresql+psycopg2://", 1))
        migrate(engine, secret_key=SECRET, target=target)
        if name == "foreign":  # as an AI Horde leaves it
            with engine.begin() as connection:
                connection.execute(text("DROP TABLE schema_migrations"))
        engine.dispose()
    return urls


@pytest.fixture
def run(
    service_urls: ServiceAddresses,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Run]:
    """Run a command on a database without `secret_key`: exit code, stdout, stderr."""
    monkeypatch.setattr(_operating, "configure_logging", lambda _level, _is_json: None)
    monkeypatch.setattr(db, "configure_logging", lambda _level, _is_json: None)
    for name, value in service_urls.build_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("secret_key", raising=False)
    monkeypatch.delenv("HORDE_ENVIRONMENT", raising=False)

    def run(database_url: str, *words: str, **settings: str) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setenv("DATABASE_URL", database_url)
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            code = main(words)
        return code, *capsys.readouterr()

    logging.disable(logging.WARNING)
    yield run
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("words", READ_ONLY, ids=" ".join)
def test_commands_that_touch_no_key_need_no_secret_key(
    run: Run, databases: dict[str, str], words: list[str]
) -> None:
    """An audit from a machine of the operator does not need the salt of all keys."""
    # The bucket of the tests holds objects of rows in their databases; nobody has made this one.
    code, output, errors = run(
        databases["present"], *words, R2_SOURCE_IMAGE_BUCKET="made-by-nobody"
    )
    assert (code, errors) == (0, "")
    assert output


def test_a_command_that_makes_a_key_needs_the_secret_key(
    run: Run, databases: dict[str, str]
) -> None:
    code, output, errors = run(databases["present"], "user", "create", "--username", "x")
    assert (code, output) == (2, "")
    assert "secret_key" in errors
    assert run(databases["empty"], "db", "migrate")[0] == 2


@pytest.mark.parametrize("database", ["foreign", "old", "empty"])
@pytest.mark.parametrize("words", READ_ONLY, ids=" ".join)
def test_an_older_schema_is_one_sentence_without_sql(
    run: Run, databases: dict[str, str], words: list[str], database: str
) -> None:
    code, output, errors = run(databases[database], *words)
    assert code != 0
    assert output == ""
    assert errors.count("\n") == 1
    assert "run `horde db migrate`" in errors
    assert "SELECT" not in errors


@pytest.mark.parametrize("words", [*READ_ONLY, ["db", "status"]], ids=" ".join)
def test_a_database_that_is_away_is_one_sentence(run: Run, words: list[str]) -> None:
    port = find_free_ports(1)[0]
    code, output, errors = run(f"postgresql://horde@127.0.0.1:{port}/horde", *words)
    assert code in (1, 2)
    assert output == ""
    assert errors.count("\n") == 1
    assert "refused" in errors


def test_the_version_that_an_ai_horde_brings_is_called_present(
    run: Run, databases: dict[str, str]
) -> None:
    """It was listed as not applied, beside tables that it had made."""
    code, output, _ = run(databases["foreign"], "db", "status")
    first, *others = output.splitlines()
    assert (code, first) == (3, "5.1.14  present before this server")
    assert all(line.endswith("not applied") for line in others)
    assert others


def test_what_ran_here_is_listed_with_its_moment(run: Run, databases: dict[str, str]) -> None:
    code, output, _ = run(databases["present"], "db", "status")
    assert code == 0
    assert "not applied" not in output
    assert "present before" not in output


def test_accounts_are_listed_and_shown(run: Run, databases: dict[str, str]) -> None:
    url = databases["present"]
    made = json.loads(
        run(url, "user", "create", "--username", "Ada", "--trusted", secret_key=SECRET)[1]
    )
    listed = json.loads(run(url, "user", "list", "--json")[1])
    assert listed[0] == {
        "id": made["id"],
        "alias": made["alias"],
        "kudos": 25,
        "roles": ["trusted"],
    }
    assert [row["id"] for row in listed] == sorted((row["id"] for row in listed), reverse=True)
    assert len(json.loads(run(url, "user", "list", "--json", "--limit", "1")[1])) == 1
    trusted = json.loads(run(url, "user", "list", "--json", "--role", "trusted")[1])
    assert [row["alias"] for row in trusted] == [made["alias"]]
    shown = json.loads(run(url, "user", "show", made["alias"], "--json")[1])
    assert (shown["roles"], shown["is_pseudonymous"]) == (["trusted"], False)
    for words in (["user", "list"], ["user", "show", str(made["id"])]):
        code, output, _ = run(url, *words)
        assert code == 0
        assert made["alias"] in output
        assert "trusted" in output
    for output in (json.dumps(shown), json.dumps(listed)):
        assert made["api_key"] not in output


def test_an_account_that_is_not_there_is_one_sentence(run: Run, databases: dict[str, str]) -> None:
    assert run(databases["present"], "user", "show", "Nobody#99") == (
        1,
        "",
        "horde user: there is no user Nobody#99\n",
    )


def test_the_version_is_told(run: Run, databases: dict[str, str]) -> None:
    assert run(databases["present"], "--version")[:2] == (0, f"horde {VERSION}\n")
    told = run(databases["present"], "--version", "--json")[1]
    assert json.loads(told) == {"version": VERSION}


def test_a_migration_waits_for_a_database_that_is_starting(
    run: Run, service_urls: ServiceAddresses
) -> None:
    """The container of the database is there before the database is."""
    url = make_database(service_urls.database_url, "commands_starting")
    gate = TcpGate(url)
    gate.close()
    through_gate = url.replace(f":{urlsplit(url).port}/", f":{gate.port}/")
    timer = threading.Timer(1, gate.open)
    timer.start()
    started = time.monotonic()
    code, output, errors = run(through_gate, "db", "migrate", "--wait", "60", secret_key=SECRET)
    timer.join()
    gate.close()
    assert (code, errors) == (0, "")
    assert output.startswith("applied 5.1.14")
    assert time.monotonic() - started >= 1
