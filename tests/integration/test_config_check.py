# SPDX-License-Identifier: AGPL-3.0-or-later
"""`horde config check`, and the starts that compare the secret with the database's."""

import json
from collections.abc import Callable

import psycopg2
import pytest
from psycopg2 import sql
from sqlalchemy import create_engine

from devtools.services import ServiceAddresses
from horde.cli.main import main
from horde.config import Config
from horde.database.migrate import migrate
from horde.server import check_start
from horde.settings import ConfigError
from tests.services import RUN_FOLDER_VARIABLE, RUN_OWNER_VARIABLE, make_database

SECRET = "salt of the check"

type Check = Callable[..., tuple[int, dict[str, tuple[bool | None, str]]]]


@pytest.fixture(scope="module")
def environment(service_urls: ServiceAddresses) -> dict[str, str]:
    """Settings that fit: a database with the present schema, made with the secret."""
    values = {
        **service_urls.build_environment(),
        "DATABASE_URL": make_database(service_urls.database_url, "config_check"),
        "secret_key": SECRET,
        "R2_SOURCE_IMAGE_BUCKET": service_urls.bucket,
    }
    engine = create_engine(Config.from_environment(values).database_url)
    migrate(engine, secret_key=SECRET)
    engine.dispose()
    return values


@pytest.fixture
def check(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Check:
    """The exit code and the findings by name, with some settings changed."""

    def run(*words: str, **changed: str) -> tuple[int, dict[str, tuple[bool | None, str]]]:
        for name in (RUN_FOLDER_VARIABLE, RUN_OWNER_VARIABLE):  # of the tests, no settings
            monkeypatch.delenv(name, raising=False)
        for name, value in {**environment, **changed}.items():
            monkeypatch.setenv(name, value)
        code = main(["config", "check", "--json", *words])
        report = json.loads(capsys.readouterr().out)
        assert report["fits"] is (code == 0)
        return code, {found["name"]: (found["fits"], found["detail"]) for found in report["checks"]}

    return run


def make_database_in_latin1(url: str) -> str:
    connection = psycopg2.connect(url)
    connection.autocommit = True
    with connection.cursor() as cursor:
        name = sql.Identifier("config_check_latin1")
        cursor.execute(sql.SQL("DROP DATABASE IF EXISTS {}").format(name))
        cursor.execute(
            sql.SQL("CREATE DATABASE {} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0").format(
                name
            )
        )
    connection.close()
    return url.rpartition("/")[0] + "/config_check_latin1"


def test_what_fits_is_said_to_fit(check: Check) -> None:
    code, found = check("--only", "server")
    assert code == 0
    assert {name for name, (fits, _) in found.items() if fits} == {
        "server settings",
        "database",
        "encoding",
        "sessions",
        "schema",
        "secret_key",
        "redis",
        "object store",
    }


def test_another_secret_key_than_the_databases_is_found_before_anything_starts(
    check: Check, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = check("--only", "server", secret_key="another")
    assert (code, found["secret_key"][0]) == (1, False)
    with pytest.raises(ConfigError, match=r"^secret_key is not the one"):
        check_start(Config.from_environment({**environment, "secret_key": "another"}))
    check_start(Config.from_environment(environment))
    assert main(["user", "create", "--username", "somebody"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("horde user: secret_key is not the one")
    assert "another" not in said.err


def test_a_database_of_another_encoding_is_found(
    check: Check, service_urls: ServiceAddresses
) -> None:
    url = make_database_in_latin1(service_urls.database_url)
    code, found = check("--only", "server", DATABASE_URL=url)
    assert code == 1
    assert found["encoding"][0] is False
    assert "stores text as LATIN1" in found["encoding"][1]
    assert found["schema"][0] is False


@pytest.mark.parametrize(
    ("name", "value", "finding"),
    [
        ("DATABASE_URL", "postgresql://nobody:secret@127.0.0.1:1/none", "database"),
        ("REDIS_URL", "redis://:secret@127.0.0.1:1", "redis"),
        ("S3_ENDPOINT", "http://127.0.0.1:1", "object store"),
        ("AWS_SECRET_ACCESS_KEY", "secret", "object store"),
        ("R2_SOURCE_IMAGE_BUCKET", "no-such-bucket", "object store"),
    ],
)
def test_a_service_that_does_not_fit_is_named(
    check: Check, name: str, value: str, finding: str
) -> None:
    code, found = check("--only", "server", **{name: value})
    assert (code, found[finding][0]) == (1, False)
    assert "secret" not in found[finding][1]


def test_a_setting_that_cannot_be_used_and_a_name_that_is_none_are_told(check: Check) -> None:
    code, found = check(HORDE_PORT="99999", HORDE_DEFUALT_LIMIT="9/minute")
    assert code == 2
    assert found["server settings"] == (
        False,
        "HORDE_PORT has to be a whole number from 1 to 65535.",
    )
    assert found["unknown setting"][1] == "HORDE_DEFUALT_LIMIT is no setting of this version"


def test_the_front_is_checked_for_itself(check: Check) -> None:
    code, found = check("--only", "front", HORDE_OAI_NATIVE_URL="http://127.0.0.1:1/api")
    assert code == 1
    assert found["front settings"][0] is True
    assert found["front's API"][0] is False
    assert found["front's redis"][0] is True


def test_the_findings_are_lines_for_people_too(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["config", "check", "--only", "server"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["ok", "redis"] for line in lines)
