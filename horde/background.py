# SPDX-License-Identifier: AGPL-3.0-or-later
"""The clock that runs the periodic jobs, and the election of the process that runs those only one
may run.

The leader holds a session lock of Postgres on a connection of its own: when the process or the
connection dies, the lock is free and another process takes it at its next tick. Between a broken
connection and the leader's notice two processes may run the same job, so jobs bear that.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.metrics import Observation
from sqlalchemy import Connection, Engine
from sqlalchemy.pool import NullPool

from horde import metrics, postgres
from horde.config import Config
from horde.database.leadership import holds_leader_lock, take_leader_lock
from horde.exceptions import HordeError
from horde.logger import build_failure_fields, get_logger, surviving
from horde.runtime import in_this_runtime

logger = get_logger(__name__)

TICK_SECONDS = 0.25
ELECTION_SECONDS = 1.0  # how often the lock is tried, or found to be still held
RETRY_SECONDS = 10.0  # after a job raised
JOB_THREADS = 4  # a slow clean-up must not hold up the others

# A host that dies sends no goodbye: without these the database would keep its lock for two hours.
_SERVER_OPTIONS = "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3"
ELECTION_ANSWER_SECONDS = 5.0
# A job may fold or delete for long; a frozen server ends it all the same.
JOB_ANSWER_SECONDS = 300.0


class Job(Protocol):
    """What the clock needs to know of a periodic job; `database.threads` lists them."""

    @property
    def name(self) -> str: ...

    @property
    def period_seconds(self) -> float: ...

    @property
    def run(self) -> Callable[[], object]: ...

    @property
    def leader_only(self) -> bool: ...


class Leadership:
    """This process's claim to run the leader's jobs. Used by one thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        """`engine` must not pool: its one connection is the lock."""
        self._engine, self._clock = engine, clock
        self._connection: Connection | None = None
        self._asked_at = float("-inf")
        self.is_leader = False

    def refresh(self) -> bool:
        """Whether this process leads, asked anew at most once a second."""
        if self._clock() - self._asked_at < ELECTION_SECONDS:
            return self.is_leader
        self._asked_at = self._clock()
        was_leader = self.is_leader
        try:
            self.is_leader = self._hold_lock()
        # Whoever cannot prove that it leads gives the lock back.
        except Exception as error:  # noqa: BLE001
            self.resign()
            logger.warning(
                "horde.background.election_failed", extra={"error_class": type(error).__name__}
            )
        if self.is_leader != was_leader:
            logger.info(
                "horde.background.leader_changed",
                extra={"is_leader": self.is_leader, "pid": os.getpid()},
            )
        return self.is_leader

    def resign(self) -> None:
        """Give the lock back by closing the connection."""
        connection, self._connection, self.is_leader = self._connection, None, False
        if connection is not None:
            connection.invalidate()
            connection.close()

    def _hold_lock(self) -> bool:
        if self._connection is None:
            self._connection = self._engine.connect()
        ask = holds_leader_lock if self.is_leader else take_leader_lock
        is_leader = ask(self._connection)
        if self.is_leader and not is_leader:
            self.resign()  # whatever this session leads to, it is not the lock
        return is_leader


@dataclass(slots=True)
class _Schedule:
    """When a job runs next, and whether it runs now."""

    job: Job
    due_at: float
    is_running: bool = False


class Background:
    """Runs jobs when they are due: never one twice at a time, and the leader's only where the lock
    is held.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        refresh_leadership: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`refresh_leadership` answers whether this process leads; it is called at every tick."""
        self._refresh_leadership, self._clock = refresh_leadership, clock
        self._schedules = [_Schedule(job, due_at=clock()) for job in jobs]
        self._executor = ThreadPoolExecutor(JOB_THREADS, thread_name_prefix="horde-job")

    def tick(self) -> None:
        """Start what is due."""
        is_leader = self._refresh_leadership()
        for schedule in self._schedules:
            if (
                schedule.is_running
                or schedule.due_at > self._clock()
                or (schedule.job.leader_only and not is_leader)
            ):
                continue
            schedule.is_running = True
            try:
                self._executor.submit(in_this_runtime(self._run), schedule)
            except RuntimeError:  # no thread can be started now
                schedule.is_running = False
                raise

    def stop(self) -> None:
        """Let running jobs end and start no more."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, schedule: _Schedule) -> None:
        started_at = self._clock()
        pause = schedule.job.period_seconds
        try:
            with postgres.waiting_up_to(JOB_ANSWER_SECONDS):
                schedule.job.run()
        except HordeError as error:  # the database is away, which says nothing about the job
            pause = RETRY_SECONDS
            metrics.job_failures.add(1, {"horde.job": schedule.job.name})
            logger.warning(
                "horde.background.job_refused",
                extra={"job": schedule.job.name, "reason": error.message},
            )
        except Exception as error:  # noqa: BLE001  a job that fails once must run again
            pause = RETRY_SECONDS
            metrics.job_failures.add(1, {"horde.job": schedule.job.name})
            logger.error(
                "horde.background.job_failed",
                extra={"job": schedule.job.name, **build_failure_fields(error)},
            )
        finally:
            ended_at = self._clock()
            metrics.job_seconds.record(ended_at - started_at, {"horde.job": schedule.job.name})
            schedule.due_at = max(started_at + pause, ended_at)
            schedule.is_running = False


class BackgroundThread:
    """The clock's thread and all that it holds."""

    def __init__(self, config: Config, jobs: Sequence[Job]) -> None:
        self._leadership = Leadership(build_election_engine(config))
        self._background = Background(jobs, self._leadership.refresh)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=in_this_runtime(self._tick_until_stopped), name="horde-background", daemon=True
        )
        metrics.set_gauge_source(
            "horde.background.leader", lambda: [Observation(int(self.is_leader))]
        )

    @property
    def is_leader(self) -> bool:
        """Whether this process leads, as found at the last election."""
        return self._leadership.is_leader

    def start(self) -> None:
        """Begin; the jobs are due at once."""
        self._thread.start()

    def stop(self) -> None:
        """Let running jobs end, then give the lock back, so that the next leader starts after
        them.
        """
        self._stop.set()
        self._thread.join()
        self._background.stop()
        self._leadership.resign()

    def _tick_until_stopped(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            with surviving("background"):
                self._background.tick()


def start_background(config: Config, jobs: Sequence[Job]) -> BackgroundThread:
    """Run the periodic jobs in this process from now on."""
    thread = BackgroundThread(config, jobs)
    thread.start()
    return thread


def build_election_engine(config: Config) -> Engine:
    """The engine of `Leadership`: one connection past any pooler, whose host is noticed when it
    dies.
    """
    return postgres.build_engine(
        config.session_url,
        answer_seconds=ELECTION_ANSWER_SECONDS,
        name="horde election",
        server_options=_SERVER_OPTIONS,
        poolclass=NullPool,
        isolation_level="AUTOCOMMIT",
    )
