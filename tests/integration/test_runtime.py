# SPDX-License-Identifier: AGPL-3.0-or-later
"""Two applications with different configurations in one process."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from flask.testing import FlaskClient

from devtools.services import ServiceAddresses
from horde import db, r2, redis_ctrl
from horde.app import create_app
from horde.clock import utcnow
from horde.config import Config
from horde.database import text_queue, users
from horde.database.migrate import migrate
from horde.runtime import Runtime
from tests.integration.own_redis import own_redis
from tests.services import make_database


@dataclass(frozen=True)
class Served:
    """One application, and an account that it alone knows."""

    runtime: Runtime
    client: FlaskClient
    alias: str
    key: str

    def find_alias(self, key: str) -> tuple[int, str | None]:
        answer = self.client.get("/api/v2/find_user", headers={"apikey": key})
        return answer.status_code, answer.json.get("username")  # type: ignore[union-attr]


def serve(service_urls: ServiceAddresses, name: str, redis_url: str, **settings: Any) -> Served:
    runtime = Runtime()
    url = make_database(service_urls.database_url, f"runtime_{name}")
    config = Config(
        database_url=url.replace("postgresql://", "postgresql+psycopg2://", 1),
        redis_url=redis_url,
        secret_key=f"salt of {name}",
        admins=(f"{name}#1",),
        title=f"Horde {name}",
        **settings,
    )
    with runtime.entered():
        app = create_app(config)
        migrate(db.require_engine(), secret_key=config.secret_key)
        with db.transaction() as session:
            made = users.create_user(session, username=name, oauth_id=uuid4().hex, now=utcnow())
        return Served(runtime, app.test_client(), made.user.alias, made.api_key)


@pytest.fixture(scope="module")
def served(
    service_urls: ServiceAddresses, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Served]]:
    with own_redis(tmp_path_factory.mktemp("redis")) as redis:
        both = (
            serve(service_urls, "one", service_urls.redis_url, rate_limits_enabled=False),
            serve(service_urls, "two", redis.url, default_limit="100/minute"),
        )
        yield both
        for each in both:
            with each.runtime.entered():
                db.require_engine().dispose()
                redis_ctrl.disconnect()
                r2.disconnect()


def test_each_knows_its_own_accounts_alone(served: tuple[Served, Served]) -> None:
    one, two = served
    for _ in range(2):  # the second time from what is remembered
        assert one.find_alias(one.key) == (200, one.alias)
        assert two.find_alias(two.key) == (200, two.alias)
        assert one.find_alias(two.key)[0] == 404
        assert two.find_alias(one.key)[0] == 404


def test_they_answer_at_the_same_time(served: tuple[Served, Served]) -> None:
    def ask(number: int) -> bool:
        each = served[number % 2]
        return each.find_alias(each.key) == (200, each.alias)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(80)))


def test_a_mode_of_one_is_none_of_the_other(served: tuple[Served, Served]) -> None:
    one, two = served
    for each in served:  # both remember the modes
        assert each.client.get("/api/v2/status/modes").json["maintenance_mode"] is False
    for is_on in (True, False):
        answer = one.client.put(
            "/api/v2/status/modes", json={"maintenance_mode": is_on}, headers={"apikey": one.key}
        )
        assert answer.status_code == 200, answer.json
        assert one.client.get("/api/v2/status/modes").json["maintenance_mode"] is is_on
        assert two.client.get("/api/v2/status/modes").json["maintenance_mode"] is False


def test_the_queue_of_one_is_none_of_the_other(
    served: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_queue, "COPY_SECONDS", 3600.0)  # what is kept is kept for the test
    one, two = served
    body = {"prompt": "Hello", "models": ["nobody-serves-it"], "params": {"max_length": 16}}
    asked = one.client.post("/api/v2/generate/text/async", json=body, headers={"apikey": one.key})
    assert asked.status_code == 202, asked.json

    def list_waiting(each: Served) -> list[str]:
        with each.runtime.entered(), db.transaction() as session:
            return list(text_queue.get_queue_snapshot(session).places)

    with one.runtime.entered():
        text_queue.forget_queue_snapshot()
    assert list_waiting(one) == [asked.json["id"]]  # type: ignore[index]
    assert list_waiting(two) == []


def test_the_limits_of_one_are_none_of_the_other(served: tuple[Served, Served]) -> None:
    one, two = served
    for each, statuses in ((one, {200}), (two, {200, 429})):
        answers = [each.client.get("/api/v2/status/modes").status_code for _ in range(110)]
        assert set(answers) == statuses


def test_what_runs_in_no_runtime_of_its_own_has_none_of_their_parts(
    served: tuple[Served, Served],
) -> None:
    engine = db.state.get().engine
    for each in served:
        with each.runtime.entered():
            assert db.state.get().engine is not engine
    assert db.state.get().engine is engine
