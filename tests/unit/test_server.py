# SPDX-License-Identifier: AGPL-3.0-or-later
import logging

import pytest

from horde import server
from horde.config import Config
from horde.database.migrate import SchemaError


def test_the_start_warns_of_settings_that_are_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_config: Config) -> None:
        raise SchemaError("old")

    monkeypatch.setattr(server, "check_start", refuse)
    with pytest.raises(SchemaError):
        server.serve(
            Config(
                database_url="postgresql://host/name",
                secret_key="salt",
                ignored_settings=("REDIS_SERVERS",),
            )
        )
    (record,) = [
        record for record in caplog.records if record.getMessage() == "horde.config.ignored"
    ]
    assert (record.levelno, record.__dict__["setting"]) == (logging.WARNING, "REDIS_SERVERS")


@pytest.mark.parametrize(("endpoint", "warnings"), [("", 1), ("http://store:8333", 0)])
def test_the_start_warns_of_a_missing_store(
    endpoint: str, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_config: Config) -> None:
        raise SchemaError("old")

    monkeypatch.setattr(server, "check_start", refuse)
    with pytest.raises(SchemaError):
        server.serve(
            Config(database_url="postgresql://host/name", secret_key="salt", s3_endpoint=endpoint)
        )
    assert [record.getMessage() for record in caplog.records].count(
        "horde.store.not_configured"
    ) == warnings
