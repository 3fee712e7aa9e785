# SPDX-License-Identifier: AGPL-3.0-or-later
from horde.circuit_breaker import CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


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


def test_a_trial_that_takes_long_is_the_only_one() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, clock, trial_seconds=30.0)
    breaker.record_failure()
    clock.now += 1.1
    assert breaker.admits()
    clock.now += 29.0
    assert not breaker.admits()
    breaker.record_failure()  # the pause after it is the short one again
    clock.now += 1.1
    assert breaker.admits()
    clock.now += 30.1
    assert breaker.admits()  # the one before never came back


def test_asking_whether_it_is_open_takes_nobodys_turn() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1.0, clock)
    assert not breaker.is_open()
    breaker.record_failure()
    assert breaker.is_open()
    clock.now += 1.1
    assert not breaker.is_open()
    assert breaker.admits()
    assert breaker.is_open(), "somebody is trying"
    breaker.record_success()
    assert not breaker.is_open()
