# SPDX-License-Identifier: AGPL-3.0-or-later
import pytest

from horde.redis_ctrl import CircuitBreaker, build_database_url


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("url", "database_url"),
    [
        ("redis://127.0.0.1:6379", "redis://127.0.0.1:6379/7"),
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/7"),
        (
            "rediss://user:p%2Fw@redis.example:6380/3?ssl_cert_reqs=none",
            "rediss://user:p%2Fw@redis.example:6380/7?ssl_cert_reqs=none",
        ),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=7"),
    ],
)
def test_the_purpose_decides_on_the_database(url: str, database_url: str) -> None:
    assert build_database_url(url, 7) == database_url


def test_a_failing_server_is_left_alone_for_a_while() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, clock)
    assert breaker.admits()
    breaker.record_failure()
    clock.now += 0.9
    assert not breaker.admits()


def test_one_caller_tries_when_the_pause_is_over() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, clock)
    breaker.record_failure()
    clock.now += 1.1
    assert [breaker.admits() for _ in range(3)] == [True, False, False]
    clock.now += 1.1
    assert breaker.admits()  # the first one never came back


def test_a_success_lets_everybody_through() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, clock)
    breaker.record_failure()
    clock.now += 1.1
    assert breaker.admits()
    breaker.record_success()
    assert all(breaker.admits() for _ in range(3))
