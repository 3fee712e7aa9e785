# SPDX-License-Identifier: AGPL-3.0-or-later
"""The frame of the API against services of its own, which it stops, freezes and starts again."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from flask_restx import Api, Resource
from sqlalchemy import Engine, NullPool, create_engine, text

from devtools.launcher import Launcher
from devtools.postgres import Postgres, remove_external_data
from devtools.processes import Child
from devtools.state import load_secrets
from devtools.valkey import Valkey
from horde import db, redis_ctrl
from horde.apis.requests import get_client_address, read_json_object
from horde.apis.v2 import heartbeat
from horde.app import create_app
from horde.background import ELECTION_SECONDS, Leadership
from horde.config import Config
from horde.database.migrate import migrate
from horde.limiter import (
    limit_chat_submit,
    limit_pop,
    limit_status_read,
    limit_text_submit,
    whitelist_address,
)
from horde.redis_ctrl import RedisUnavailable

PASSKEY = "a known passkey"
WAIT_SECONDS = 60
# So many calls would take longer than so many seconds if each of them waited for Redis.
MANY = 200
WAITING_SECONDS = 30


@dataclass(frozen=True)
class OwnServices:
    """A Postgres and a Valkey that one module may stop."""

    postgres: Child
    valkey: Child
    postgres_service: Postgres
    valkey_service: Valkey

    @property
    def environment(self) -> dict[str, str]:
        """The settings that point at them."""
        return {
            "DATABASE_URL": self.postgres_service.url,
            "REDIS_URL": self.valkey_service.url,
            "secret_key": "salt",
        }


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServices]:
    """Both, started."""
    state = tmp_path_factory.mktemp("frame")
    known = load_secrets(state)
    launcher = Launcher(state / "services.json")
    postgres = Postgres(
        state, password=known["postgres_password"], token=known["token"], durable=False
    )
    valkey = Valkey(state, password=known["redis_password"], durable=False)
    try:
        children = []
        for service in (postgres, valkey):
            launcher.launch_all([service])
            children.append(launcher.children[-1])
        yield OwnServices(children[0], children[1], postgres, valkey)
    finally:
        launcher.stop_all()
        remove_external_data(known["token"])


def start_again(child: Child, is_ready: Callable[[Child], bool]) -> None:
    """Start a stopped service on the port it had."""
    child.start()
    child.wait_until(is_ready, 30)


class TextRoute(Resource):
    """Counted as a text submit."""

    @limit_text_submit
    def post(self) -> dict[str, object]:
        body = read_json_object()
        if body.get("trusted"):
            whitelist_address(get_client_address())
        return {"address": get_client_address()}


class ChatRoute(Resource):
    """Counted as a chat submit."""

    @limit_chat_submit
    def post(self) -> dict[str, object]:
        return {}


class StatusRoute(Resource):
    """Two methods with limits of their own, and one with the default."""

    @limit_status_read
    def get(self, request_id: str) -> dict[str, str]:
        return {"id": request_id}

    @limit_pop
    def post(self, request_id: str) -> dict[str, str]:
        return {"id": request_id}

    def put(self, request_id: str) -> dict[str, str]:
        return {"id": request_id}


class RowRoute(Resource):
    """Asks the database."""

    @limit_pop
    def get(self) -> dict[str, object]:
        with db.transaction() as session:
            return {"one": session.scalar(text("SELECT 1"))}


def register_routes(api: Api) -> None:
    """Add them."""
    api.add_resource(TextRoute, "/text")
    api.add_resource(ChatRoute, "/chat")
    api.add_resource(StatusRoute, "/status/<string:request_id>")
    api.add_resource(RowRoute, "/row")


def resolve_with_one_passkey(peer: str, proxied_for: str | None, passkey: str | None) -> str:
    """The resolver of accounts, without accounts."""
    return proxied_for if proxied_for and passkey == PASSKEY else peer


@pytest.fixture(scope="module")
def app(own: OwnServices) -> Iterator[Flask]:
    """The frame around the routes above."""
    modules: Any = (heartbeat, SimpleNamespace(register=register_routes))
    app = create_app(
        Config.from_environment(own.environment),
        resource_modules=modules,
        resolve_client_address=resolve_with_one_passkey,
    )
    migrate(db.require_engine(), secret_key="salt")  # the document asks who serves chats
    yield app
    db.disconnect()
    redis_ctrl.disconnect()


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    """A client whose requests nobody counted yet."""
    redis_ctrl.call(redis_ctrl.limiter_db, lambda redis: redis.flushdb())
    return app.test_client()


@pytest.fixture
def burst_client(client: FlaskClient) -> FlaskClient:
    """The same at the beginning of a second."""
    wait_for_a_fresh_second()
    return client


def wait_for_a_fresh_second() -> None:
    """Fixed windows begin with the second: a burst must not straddle two."""
    time.sleep(1.02 - time.time() % 1)


def post(client: FlaskClient, path: str, **headers: str) -> Any:
    return client.post(
        path, json={}, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


# Limits


def test_the_third_submit_within_a_second_is_refused(burst_client: FlaskClient) -> None:
    answers = [post(burst_client, "/api/text", apikey="a key") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json == {"message": "2 per 1 second"}
    assert answers[2].headers["Content-Type"] == "application/json; charset=utf-8"
    assert answers[2].headers["Access-Control-Allow-Origin"] == "*"
    assert 0 <= int(answers[2].headers["Retry-After"]) <= 1
    assert answers[2].headers["X-RateLimit-Limit"] == "2"
    assert [answer.headers["X-RateLimit-Remaining"] for answer in answers] == ["1", "0", "0"]
    assert int(answers[2].headers["X-RateLimit-Reset"]) >= int(time.time())


def test_a_request_is_counted_whatever_is_wrong_with_its_body(burst_client: FlaskClient) -> None:
    broken = [
        burst_client.post(
            "/api/text", data=b"{", content_type="application/json", headers={"apikey": "a key"}
        ),
        burst_client.post(
            "/api/text", data=b"hello", content_type="text/plain", headers={"apikey": "a key"}
        ),
    ]
    assert [answer.status_code for answer in broken] == [400, 415]
    assert post(burst_client, "/api/text", apikey="a key").status_code == 429


def test_chat_is_counted_apart_from_text(burst_client: FlaskClient) -> None:
    assert [post(burst_client, "/api/chat", apikey="a key").status_code for _ in range(3)] == [
        200,
        200,
        429,
    ]
    assert post(burst_client, "/api/text", apikey="a key").status_code == 200


def test_an_address_is_counted_over_all_its_keys(burst_client: FlaskClient) -> None:
    assert [
        post(burst_client, "/api/text", apikey=f"key {number}").status_code for number in range(3)
    ] == [200, 200, 429]


def test_the_users_of_a_known_proxy_do_not_limit_each_other(burst_client: FlaskClient) -> None:
    answers = [
        post(
            burst_client,
            "/api/text",
            apikey=f"key {user}",
            Proxied_For=f"198.51.100.{user}",
            Proxy_Authorization=PASSKEY,
        )
        for user in (1, 2, 3)
        for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert answers[-1].json == {"address": "198.51.100.3"}


def test_a_made_up_forwarding_header_is_ignored(burst_client: FlaskClient) -> None:
    answers = [
        post(
            burst_client,
            "/api/text",
            apikey=f"key {user}",
            Proxied_For=f"198.51.100.{user}",
            X_Forwarded_For=f"198.51.100.{user}",
        )
        for user in (1, 2, 3)
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 429]


def test_a_whitelisted_address_has_wider_limits(burst_client: FlaskClient) -> None:
    headers = {"apikey": "a key", "Proxied-For": "198.51.100.77", "Proxy-Authorization": PASSKEY}
    assert (
        burst_client.post("/api/text", json={"trusted": True}, headers=headers).status_code == 200
    )
    assert [
        burst_client.post("/api/text", json={}, headers=headers).status_code for _ in range(11)
    ] == [200] * 10 + [429]


def test_every_id_has_its_own_budget_and_the_default_does_not_add_to_it(
    client: FlaskClient,
) -> None:
    assert {client.get("/api/status/1").status_code for _ in range(100)} == {200}
    assert client.get("/api/status/2").headers["X-RateLimit-Remaining"] == "599"


def test_a_method_without_a_limit_has_the_default(client: FlaskClient) -> None:
    assert client.get("/api/status/0").headers["X-RateLimit-Limit"] == "600"
    assert {client.put(f"/api/status/{number}").status_code for number in range(90)} == {200}
    answer = client.put("/api/status/0")
    assert (answer.status_code, answer.json) == (429, {"message": "90 per 1 minute"})


def test_preflights_and_heartbeats_are_not_counted(client: FlaskClient) -> None:
    assert {client.options("/api/text").status_code for _ in range(100)} == {204}
    assert {client.get("/api/v2/status/heartbeat").status_code for _ in range(100)} == {200}


def test_no_key_reaches_redis(client: FlaskClient) -> None:
    post(client, "/api/text", apikey="MARKER-7f3a")
    keys = redis_ctrl.call(redis_ctrl.limiter_db, lambda redis: redis.keys("*"))
    assert keys
    assert not any("MARKER-7f3a" in key for key in keys)


# Paths, methods, preflights


@pytest.mark.parametrize("path", ["/api//text", "//api/text", "/api/nope", "/api/status/1/2"])
def test_a_path_without_a_route_is_404_and_never_a_redirect(client: FlaskClient, path: str) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 404
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"


def test_a_trailing_slash_is_served(client: FlaskClient) -> None:
    assert client.get("/api/status/1/").json == {"id": "1"}


def test_a_preflight_needs_no_key(client: FlaskClient) -> None:
    headers = {
        "Origin": "https://example.org",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "apikey, client-agent, content-type",
    }
    answer = client.options("/api/chat", headers=headers)
    assert answer.status_code == 204
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    allowed = {name.lower() for name in answer.headers["Access-Control-Allow-Headers"].split(", ")}
    assert {"apikey", "client-agent", "content-type"} <= allowed


def test_the_document_describes_the_routes(client: FlaskClient) -> None:
    document = client.get("/api/swagger.json").json
    assert document is not None
    assert document["swagger"] == "2.0"
    assert document["basePath"] == "/api"
    assert "/v2/status/heartbeat" in document["paths"]


# Redis is away


def ask_often(client: FlaskClient) -> list[int]:
    """The status of many calls, each from an address of its own."""
    addresses = [{"REMOTE_ADDR": f"198.51.100.{number}"} for number in range(MANY)]
    return [client.get("/api/row", environ_base=one).status_code for one in addresses]


def test_a_stopped_redis_costs_milliseconds(client: FlaskClient, own: OwnServices) -> None:
    own.valkey.stop()
    try:
        started_at = time.monotonic()
        assert ask_often(client) == [200] * MANY
        wait_for_a_fresh_second()
        assert [post(client, "/api/text", apikey="a key").status_code for _ in range(3)] == [
            200,
            200,
            429,
        ]
        assert time.monotonic() - started_at < WAITING_SECONDS
        with pytest.raises(RedisUnavailable):
            redis_ctrl.get_json("anything")
        redis_ctrl.publish_chat_message("horde:chat:1", {"id": "1"})  # best effort: no error
        assert redis_ctrl.get_counter("anything") is None
    finally:
        start_again(own.valkey, own.valkey_service.is_ready)
    wait_until(lambda: redis_ctrl.get_counter("anything") == 0)


def test_a_hanging_redis_costs_a_fraction_of_a_second(
    client: FlaskClient, own: OwnServices
) -> None:
    os.kill(valkey_pid(own.valkey), signal.SIGSTOP)
    try:
        started_at = time.monotonic()
        assert ask_often(client) == [200] * MANY
        for _ in range(MANY):
            with pytest.raises(RedisUnavailable):
                redis_ctrl.get_json("anything")
        assert time.monotonic() - started_at < WAITING_SECONDS
    finally:
        os.kill(valkey_pid(own.valkey), signal.SIGCONT)
    wait_until(lambda: redis_ctrl.get_counter("anything") == 0)


def valkey_pid(child: Child) -> int:
    """The guard replaces itself by the server, so that the child's id is the server's."""
    assert child.pid is not None
    return child.pid


def test_a_subscription_survives_a_restart_and_tells_of_the_gap(
    app: Flask, own: OwnServices
) -> None:
    messages: list[str] = []
    gaps: list[None] = []
    stop = threading.Event()
    thread = threading.Thread(
        target=redis_ctrl.listen,
        args=("news", messages.append, lambda: gaps.append(None), stop),
        daemon=True,
    )
    thread.start()
    wait_until(lambda: len(gaps) == 1)
    redis_ctrl.publish("news", "before")
    wait_until(lambda: messages == ["before"])
    own.valkey.stop()
    start_again(own.valkey, own.valkey_service.is_ready)
    wait_until(lambda: len(gaps) == 2)
    wait_until(lambda: redis_ctrl.get_counter("anything") == 0)
    redis_ctrl.publish("news", "after")
    wait_until(lambda: messages == ["before", "after"])
    stop.set()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_values_in_redis_come_back_and_expire(client: FlaskClient) -> None:
    redis_ctrl.set_json("a key", {"a": [1, None]}, ttl_seconds=0.3)
    assert redis_ctrl.get_json("a key") == {"a": [1, None]}
    wait_until(lambda: redis_ctrl.get_json("a key") is None)
    redis_ctrl.set_json("a key", 1, ttl_seconds=None)
    redis_ctrl.delete("a key", "another")
    assert redis_ctrl.get_json("a key") is None


# Postgres is away


def test_a_restart_of_postgres_is_503_and_then_over(
    client: FlaskClient, own: OwnServices, caplog: pytest.LogCaptureFixture
) -> None:
    assert client.get("/api/row").json == {"one": 1}
    with caplog.at_level(logging.DEBUG, "horde"):
        own.postgres.stop()
        answers = [client.get("/api/row") for _ in range(3)]
        assert client.get("/api/v2/status/heartbeat").json["message"] == "DOWN"
        start_again(own.postgres, own.postgres_service.is_ready)
    assert [answer.status_code for answer in answers] == [503] * 3
    assert answers[0].json == {"message": "The database cannot be reached. Try again later."}
    wait_until(lambda: client.get("/api/row").status_code == 200)
    assert client.get("/api/v2/status/heartbeat").json["message"] == "OK"  # type: ignore[index]
    assert not any(record.getMessage() == "horde.request.failed" for record in caplog.records)


# Leadership


@pytest.fixture
def election_engine(app: Flask, own: OwnServices) -> Engine:
    config = Config.from_environment(own.environment)
    return create_engine(config.database_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_an_election(self) -> None:
        self.now += ELECTION_SECONDS


def test_one_process_leads_until_it_resigns(election_engine: Engine) -> None:
    clock = Clock()
    first, second = Leadership(election_engine, clock), Leadership(election_engine, clock)
    assert (first.refresh(), second.refresh()) == (True, False)
    clock.pass_an_election()
    assert (first.refresh(), second.refresh()) == (True, False)
    first.resign()
    # Postgres frees the lock when it notices the end of the session.
    wait_until(lambda: wins_an_election(second, clock))
    assert not first.refresh()
    second.resign()
    first.resign()


def wins_an_election(process: Leadership, clock: Clock) -> bool:
    clock.pass_an_election()
    return process.refresh()


def test_a_leader_whose_connection_dies_is_replaced_at_the_next_election(
    election_engine: Engine,
) -> None:
    clock = Clock()
    first, second = Leadership(election_engine, clock), Leadership(election_engine, clock)
    wait_until(lambda: wins_an_election(first, clock))
    assert not second.refresh()
    with election_engine.connect() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory'"
                " AND granted"
            )
        ).all()
    clock.pass_an_election()
    assert (second.refresh(), first.refresh()) == (True, False)
    second.resign()
    first.resign()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            if condition():
                return
        except RedisUnavailable:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)
