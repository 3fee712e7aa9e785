# SPDX-License-Identifier: AGPL-3.0-or-later
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from horde.background import RETRY_SECONDS, Background
from horde.exceptions import ServiceUnavailable

MARKER = "MARKER-7f3a"
WAIT_SECONDS = 5


@dataclass(frozen=True)
class FakeJob:
    name: str
    period_seconds: float
    run: Callable[[], object]
    leader_only: bool = True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Runs:
    """Counts runs, and waits for them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count, self._error = 0, error

    def __call__(self) -> None:
        self.count += 1
        if self._error is not None:
            raise self._error


class Scene:
    """A background whose clock and leadership the test sets; a tick returns when what it started
    has ended.
    """

    def __init__(self, *jobs: FakeJob) -> None:
        self.clock, self.is_leader = Clock(), True
        self.background = Background(jobs, lambda: self.is_leader, self.clock)

    def tick(self, seconds_later: float = 0) -> None:
        self.clock.now += seconds_later
        self.background.tick()
        deadline = time.monotonic() + WAIT_SECONDS
        while any(schedule.is_running for schedule in self.background._schedules):
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def scenes() -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(*jobs: FakeJob) -> Scene:
        made.append(Scene(*jobs))
        return made[-1]

    yield make
    for scene in made:
        scene.background.stop()


type MakeScene = Callable[..., Scene]


def test_a_job_runs_at_once_and_then_every_period(scenes: MakeScene) -> None:
    runs = Runs()
    scene = scenes(FakeJob("job", 60, runs))
    scene.tick()
    scene.tick(59)
    assert runs.count == 1
    scene.tick(2)
    assert runs.count == 2


def test_missed_periods_are_not_made_up_for(scenes: MakeScene) -> None:
    runs = Runs()
    scene = scenes(FakeJob("job", 60, runs))
    scene.tick()
    scene.tick(600)
    scene.tick(1)
    assert runs.count == 2


def test_only_the_leader_runs_the_jobs_of_the_leader(scenes: MakeScene) -> None:
    of_leader, of_all = Runs(), Runs()
    scene = scenes(
        FakeJob("leader's", 60, of_leader), FakeJob("everybody's", 60, of_all, leader_only=False)
    )
    scene.is_leader = False
    scene.tick()
    assert (of_leader.count, of_all.count) == (0, 1)
    scene.is_leader = True
    scene.tick(0.25)
    assert (of_leader.count, of_all.count) == (1, 1)


def test_a_job_that_raises_runs_again_after_ten_seconds(
    scenes: MakeScene, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs(ValueError(MARKER))
    scene = scenes(FakeJob("job", 3600, runs))
    with caplog.at_level(logging.DEBUG, "horde"):
        scene.tick()
        scene.tick(RETRY_SECONDS - 1)
        assert runs.count == 1
        scene.tick(2)
    assert runs.count == 2
    assert {record.getMessage() for record in caplog.records} == {"horde.background.job_failed"}
    assert not any(MARKER in str(vars(record)) for record in caplog.records)


def test_a_database_that_is_away_is_no_error_of_the_job(
    scenes: MakeScene, caplog: pytest.LogCaptureFixture
) -> None:
    scene = scenes(FakeJob("job", 1, Runs(ServiceUnavailable("The database cannot be reached."))))
    with caplog.at_level(logging.DEBUG, "horde"):
        scene.tick()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "horde.background.job_refused")
    ]


def test_a_job_never_overlaps_itself_nor_holds_up_another(scenes: MakeScene) -> None:
    release, slow_count, quick = threading.Event(), Runs(), Runs()

    def run_slowly() -> None:
        slow_count()
        release.wait(WAIT_SECONDS)

    scene = scenes(FakeJob("slow", 1, run_slowly), FakeJob("quick", 1, quick))
    for _ in range(3):
        scene.clock.now += 1
        scene.background.tick()
        time.sleep(0.05)
    release.set()
    assert slow_count.count == 1
    assert quick.count == 3
