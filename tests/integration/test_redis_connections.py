# SPDX-License-Identifier: AGPL-3.0-or-later
"""Connections to Redis that rest between two commands: nobody gets what another asked for, and one
that the server closed is no failure.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from select import select

import pytest

from horde import redis_ctrl
from horde.config import Config
from horde.redis_ctrl import RedisUnavailable, ask, cache_db, run_script
from tests.integration.chat_front import wait_until
from tests.integration.own_redis import OwnRedis, own_redis

PATIENCE_SECONDS = 60


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnRedis]:
    monkeypatch.setattr(redis_ctrl, "TIMEOUT_SECONDS", PATIENCE_SECONDS)
    before = redis_ctrl.state.get()
    with own_redis(tmp_path) as redis:
        redis_ctrl.state.set(redis_ctrl.RedisState())  # that of other tests stays open
        redis_ctrl.connect(Config(database_url="", secret_key="", redis_url=redis.url))
        yield redis
        redis_ctrl.disconnect()
    redis_ctrl.state.set(before)


def count_resting() -> int:
    return len(redis_ctrl.state.get().resting[cache_db])


def test_one_connection_serves_one_thread(redis: OwnRedis) -> None:
    for number in range(5):
        assert ask(cache_db, ("SET", "key", number), ("GET", "key")) == ["OK", str(number)]
    assert count_resting() == 1


def test_a_connection_that_the_server_closed_is_made_anew(redis: OwnRedis) -> None:
    ask(cache_db, ("SET", "key", "value"))
    (connection,) = redis_ctrl.state.get().resting[cache_db]
    assert redis.run("CLIENT", "KILL", "SKIPME", "yes") == 1
    assert select([connection._sock], [], [], PATIENCE_SECONDS)[0]  # the news is here
    assert ask(cache_db, ("GET", "key")) == ["value"]


def test_what_was_refused_leaves_no_answer_to_the_next(redis: OwnRedis) -> None:
    ask(cache_db, ("SET", "key", "value"))
    with pytest.raises(RedisUnavailable):
        ask(cache_db, ("HGET", "key", "field"), ("GET", "key"))
    assert count_resting() == 0
    assert ask(cache_db, ("GET", "nothing")) == [None]


def test_a_script_is_sent_again_to_a_server_that_lost_it(redis: OwnRedis) -> None:
    script = "return {KEYS[1], ARGV[1]}"
    assert run_script(script, ["key"], [1], cache_db) == ["key", "1"]
    redis.run("SCRIPT", "FLUSH")
    assert run_script(script, ["key"], [2], cache_db) == ["key", "2"]


def test_however_many_connections_were_lost_another_is_made(redis: OwnRedis) -> None:
    ask(cache_db, ("SET", "key", "value"))
    most = redis_ctrl.state.get().clients[cache_db].connection_pool.max_connections
    for _ in range(most + 1):
        with pytest.raises(RedisUnavailable):
            ask(cache_db, ("HGET", "key", "field"))
    assert ask(cache_db, ("GET", "key")) == ["value"]


def test_what_was_asked_while_the_server_was_left_rests_no_more(redis: OwnRedis) -> None:
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, cache_db, ("BLPOP", "list", 0))
        wait_until(lambda: "blpop" in str(redis.run("CLIENT", "LIST")) or None)
        redis_ctrl._leave_server(cache_db, "moved")
        redis.run("RPUSH", "list", "value")
        assert asking.result(PATIENCE_SECONDS) == [["list", "value"]]
    assert count_resting() == 0


def test_what_was_asked_before_a_disconnect_does_not_rest_after_it(redis: OwnRedis) -> None:
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, cache_db, ("BLPOP", "list", 0))
        wait_until(lambda: "blpop" in str(redis.run("CLIENT", "LIST")) or None)
        redis_ctrl.connect(Config(database_url="", secret_key="", redis_url=redis.url))
        redis.run("RPUSH", "list", "value")
        assert asking.result(PATIENCE_SECONDS) == [["list", "value"]]
    assert count_resting() == 0


def test_threads_get_their_own_answers(redis: OwnRedis) -> None:
    def ask_often(thread: int) -> None:
        for number in range(200):
            word = f"{thread} {number}"
            assert ask(cache_db, ("ECHO", word)) == [word]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask_often, range(8)))
    assert 1 <= count_resting() <= 8


def test_disconnecting_closes_what_rests(redis: OwnRedis) -> None:
    ask(cache_db, ("PING",))
    held = redis_ctrl.state.get()
    (connection,) = held.resting[cache_db]
    redis_ctrl.disconnect()
    assert not connection.is_connected
    assert held.resting[cache_db] == []
