# SPDX-License-Identifier: AGPL-3.0-or-later
"""A Redis that fails over, freezes or refuses: no request suffers, and the next server is found.

Real servers are made read-only, filled up, frozen and replaced under requests from many threads,
with rate limits on.
"""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask
from flask_restx import Api, Resource
from redis import Redis
from redis.exceptions import ReadOnlyError, ResponseError

from horde import db, redis_ctrl
from horde.app import create_app
from horde.config import Config
from horde.limiter import limit_pop, limit_text_submit
from horde.redis_ctrl import RedisUnavailable
from tests.integration.own_redis import OwnRedis, own_redis
from tests.integration.tcp_gate import TcpGate

THREADS = 12
RECOVERY_SECONDS = 20


class PopLike(Resource):  # type: ignore[misc]
    """One window."""

    @limit_pop
    def get(self) -> dict[str, object]:
        return {}


class SubmitLike(Resource):  # type: ignore[misc]
    """Three windows."""

    @limit_text_submit
    def post(self, number: str) -> dict[str, object]:
        return {"number": number}


def register_routes(api: Api) -> None:
    """Add them."""
    api.add_resource(PopLike, "/pop")
    api.add_resource(SubmitLike, "/submit/<string:number>")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[OwnRedis]:
    with own_redis(tmp_path) as redis:
        yield redis


@pytest.fixture
def gate(redis: OwnRedis) -> Iterator[TcpGate]:
    """The address that the horde knows; what answers there may change."""
    gate = TcpGate(redis.url)
    yield gate
    gate.close()


@pytest.fixture
def app(gate: TcpGate) -> Iterator[Flask]:
    config = Config(
        database_url="postgresql+psycopg2://nobody@127.0.0.1:1/none",
        redis_url=f"redis://127.0.0.1:{gate.port}",
        secret_key="salt",
    )
    before = db.state.get()
    yield create_app(config, resource_modules=(SimpleNamespace(register=register_routes),))
    redis_ctrl.disconnect()
    db.disconnect()
    db.state.set(before)


@contextmanager
def crowd(app: Flask) -> Iterator[Counter[int]]:
    """Clients that ask all the time; how often they were answered with each status."""
    statuses: Counter[int] = Counter()
    stop = threading.Event()

    def keep_asking(thread: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            client = app.test_client()
            answers = [client.get("/api/pop"), client.post(f"/api/submit/{thread}-{number}")]
            for answer in answers:
                assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
                assert "X-RateLimit-Remaining" in answer.headers
                statuses[answer.status_code] += 1
            time.sleep(0.02)

    with ThreadPoolExecutor(THREADS) as pool:
        asking = [pool.submit(keep_asking, thread) for thread in range(THREADS)]
        try:
            time.sleep(0.3)
            yield statuses
            time.sleep(0.3)
        finally:
            stop.set()
        for one in asking:
            one.result(60)
    assert set(statuses) <= {200, 429}, statuses
    assert statuses[200]


def count_windows(redis: OwnRedis) -> int:
    with Redis(port=redis.port, db=redis_ctrl.limiter_db) as client:
        return int(client.dbsize())


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + RECOVERY_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_served() -> bool:
    """Whether a write succeeds."""
    with suppress(RedisUnavailable):
        redis_ctrl.set_json("probe", 1, ttl_seconds=1)
        return True
    return False


TROUBLES: dict[str, tuple[tuple[str | int, ...], tuple[str | int, ...]]] = {
    "read-only": (("REPLICAOF", "127.0.0.1", 1), ("REPLICAOF", "NO", "ONE")),
    "out of memory": (("CONFIG", "SET", "maxmemory", 1), ("CONFIG", "SET", "maxmemory", 0)),
    "without replicas": (
        ("CONFIG", "SET", "min-replicas-to-write", 1),
        ("CONFIG", "SET", "min-replicas-to-write", 0),
    ),
}


@pytest.mark.parametrize("trouble", list(TROUBLES))
def test_a_server_that_refuses_writes_costs_no_request(
    app: Flask, redis: OwnRedis, trouble: str
) -> None:
    begin, end = TROUBLES[trouble]
    with crowd(app):
        wait_until(is_served)
        redis.run(*begin)
        time.sleep(2.5)  # several attempts, some of them reads that succeed
        assert not is_served()
        redis.run(*end)
        wait_until(is_served)
        redis.run("FLUSHALL")
        wait_until(lambda: count_windows(redis))


def test_a_server_that_cannot_save_costs_no_request(
    app: Flask, redis: OwnRedis, tmp_path: Path
) -> None:
    redis.kill()
    folder = tmp_path / "gone"
    folder.mkdir()
    redis.start("--dir", str(folder), "--save", "3600 1")
    folder.rmdir()
    with crowd(app):
        wait_until(is_served)
        with suppress(ResponseError):
            redis.run("BGSAVE")
        wait_until(lambda: not is_served())
        time.sleep(1.5)
        redis.run("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")
        wait_until(is_served)


def test_a_frozen_server_costs_no_request_and_is_used_again(app: Flask, redis: OwnRedis) -> None:
    with crowd(app):
        wait_until(is_served)
        redis.freeze()
        time.sleep(2.5)
        redis.thaw()
        wait_until(is_served)


def test_a_restart_costs_no_request(app: Flask, redis: OwnRedis) -> None:
    with crowd(app):
        wait_until(is_served)
        redis.kill()
        time.sleep(1.5)
        redis.start()
        wait_until(is_served)
        wait_until(lambda: count_windows(redis))


def test_a_server_that_loads_its_data_costs_no_request(app: Flask, gate: TcpGate) -> None:
    """One that answers everything so: a real one loads too little to be met while it does."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []

    def answer(client: socket.socket) -> None:
        with suppress(OSError):
            while client.recv(65536):
                client.sendall(b"-LOADING Valkey is loading the dataset in memory\r\n")

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                opened.append(client)
                threading.Thread(target=answer, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        with crowd(app):
            wait_until(is_served)
            gate.lead_to(f"redis://127.0.0.1:{listener.getsockname()[1]}")
            redis_ctrl._leave_server(redis_ctrl.cache_db, "moved")
            time.sleep(2)
            assert not is_served()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for client in opened:
            client.close()


def test_after_a_failover_the_new_server_is_used_while_the_old_one_lives(
    app: Flask, redis: OwnRedis, gate: TcpGate, tmp_path: Path
) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    with own_redis(folder) as second, crowd(app):
        wait_until(is_served)
        redis.run("REPLICAOF", "127.0.0.1", second.port)
        gate.lead_to(second.url)
        wait_until(lambda: count_windows(second))
        wait_until(is_served)
        with Redis(port=redis.port) as old, pytest.raises(ReadOnlyError):
            old.set("anything", 1)


def test_a_refused_script_says_nothing_about_the_server(app: Flask) -> None:
    with pytest.raises(RedisUnavailable):
        redis_ctrl.run_script("return redis.call('NOPE')", [], [], redis_ctrl.cache_db)
    assert is_served()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("READONLY You can't write against a read only replica.", "READONLY"),
        ("Error running script: @user_script:1: -READONLY You can't write", "READONLY"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "OOM"),
        ("NOREPLICAS Not enough good replicas to write.", "NOREPLICAS"),
        ("MISCONF Errors writing to disk", "MISCONF"),
        ("MASTERDOWN Link with MASTER is down", "MASTERDOWN"),
        ("BUSY Valkey is busy running a script.", "BUSY"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", None),
        ("unknown command 'NOPE'", None),
        ("value is not an integer or out of range", None),
        ("a BUSYBODY is no reason", None),
    ],
)
def test_which_refusals_count_as_being_away(text: str, reason: str | None) -> None:
    assert redis_ctrl._find_reason_to_leave(ResponseError(text)) == reason


def test_a_subscription_to_a_frozen_server_starts_anew_and_a_quiet_one_does_not(
    app: Flask, redis: OwnRedis, gate: TcpGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_ctrl, "SUBSCRIPTION_POLL_SECONDS", 0.1)
    gaps: list[None] = []
    heard: list[str] = []
    stop = threading.Event()
    listening = threading.Thread(
        target=redis_ctrl.listen,
        args=("news", heard.append, lambda: gaps.append(None), stop),
        daemon=True,
    )
    listening.start()
    try:
        wait_until(lambda: gaps)
        time.sleep(3)  # many polls without a word, each answered when asked
        assert len(gaps) == 1
        redis_ctrl.publish("news", "one")
        wait_until(lambda: heard == ["one"])
        redis.freeze()
        time.sleep(1.5)
        redis.thaw()
        wait_until(lambda: len(gaps) > 1)
        wait_until(lambda: try_publish("two") and "two" in heard)
    finally:
        stop.set()
        listening.join(30)


def try_publish(word: str) -> bool:
    with suppress(RedisUnavailable):
        redis_ctrl.publish("news", word)
    return True


def test_limits_are_counted_in_one_round_trip(app: Flask, redis: OwnRedis) -> None:
    app.test_client().post("/api/submit/1")  # the server keeps the script from now on
    redis.run("CONFIG", "RESETSTAT")
    answer: Any = app.test_client().post("/api/submit/1")
    assert answer.status_code == 200
    statistics = redis.run("INFO", "commandstats")
    calls = {
        name.removeprefix("cmdstat_"): values["calls"]
        for name, values in statistics.items()
        if name in {"cmdstat_evalsha", "cmdstat_get", "cmdstat_incrby", "cmdstat_ttl"}
    }
    assert calls == {"evalsha": 1}
