# SPDX-License-Identifier: AGPL-3.0-or-later
"""The bridge's threads: pop, serve, submit, again; and how they stop.

Each thread has one job at a time. Threads share the serving plan, which is probed again after the
backend was gone, since it may have come back with another model. The main thread waits for a signal
and, after the grace period, gives back what still runs and takes the worker offline.
"""

import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from horde_sdk.worker.chat_declaration import ChatFaultReason

from horde.bridge.backend import Backend
from horde.bridge.config import BridgeConfig
from horde.bridge.horde_api import HordeApi
from horde.bridge.inputs import InputFetcher
from horde.bridge.job import Connections, Job, JobFault, parse_job
from horde.bridge.jobs import serve_job
from horde.bridge.pace import add_jitter, compute_idle_seconds, compute_retry_seconds
from horde.bridge.plan import ServingPlan
from horde.bridge.planner import Planner
from horde.bridge.popping import EXIT_REFUSED, EXIT_STOPPED, EXIT_USAGE, NotAsked, Popper
from horde.bridge.probe import ProbeError, WrongOption
from horde.bridge.progress import JobAbandoned
from horde.bridge.refusals import BackendUnavailable
from horde.bridge.submitting import RunningJob, Submitter
from horde.json_text import JsonObject
from horde.logger import get_logger

LAST_SUBMIT_SECONDS = 5.0  # for submits under way when the grace period ends

logger = get_logger(__name__)


@dataclass(slots=True)
class _Streaks:
    """How often in a row a thread met the same."""

    empty_pops: int = 0
    failures: int = 0
    troubles: int = 0


class Bridge:
    """One worker: ``run`` blocks until stopped and returns the process's exit code."""

    def __init__(
        self, config: BridgeConfig, horde: HordeApi, backend: Backend, inputs: InputFetcher
    ) -> None:
        self._config, self._horde, self._backend = config, horde, backend
        self._connections = Connections(
            backend=backend, inputs=inputs, post_progress=horde.post_progress
        )
        self._submitter = Submitter(horde)
        # A SimpleQueue may be filled from a signal handler; an Event set from one can deadlock with
        # its waiter.
        self._stops: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._planner = Planner(backend, config, self._pause, self._leave)
        self._popper = Popper(horde, config, self._pause, self._end)
        self._running: set[RunningJob] = set()
        self._has_served = False

    def stop(self, exit_code: int = EXIT_STOPPED) -> None:
        """Ask the bridge to end; safe in a signal handler. A second call ends the grace period."""
        self._stops.put(exit_code)

    def run(self) -> int:
        """Serve until ``stop``: pops end at once, running jobs get the grace period and are then
        given back. At last the horde is told that the worker leaves.
        """
        # Daemons, so that a thread stuck in a backend's answer does not keep the process.
        threads = [
            threading.Thread(target=self._serve, name=f"bridge-{n}", daemon=True)
            for n in range(self._config.threads)
        ]
        for thread in threads:
            thread.start()
        exit_code = self._stops.get()
        self._stopping.set()
        self._horde.stop_waiting()
        logger.info("horde.bridge.stopping", extra={"running_jobs": len(self._running)})
        if not self._join(threads, self._config.grace_seconds):
            for running in list(self._running):
                self._submitter.give_back(running)
            self._join(threads, LAST_SUBMIT_SECONDS)
        self._leave()
        logger.info("horde.bridge.stopped", extra={"exit_code": exit_code})
        return exit_code

    def _join(self, threads: Iterable[threading.Thread], seconds: float) -> bool:
        """Wait for the threads to end; false when the time is up or ``stop`` was called again."""
        ends = time.monotonic() + seconds
        while any(thread.is_alive() for thread in threads):
            try:
                self._stops.get(timeout=min(0.1, max(ends - time.monotonic(), 0.0)))
            except queue.Empty:
                if time.monotonic() < ends:
                    continue
            return False
        return True

    def _leave(self) -> None:
        """Say goodbye, and give back what the horde may hand out on that occasion."""
        answer = self._popper.leave()
        if answer is not None and (plan := self._planner.latest) is not None:
            self._submitter.fault(parse_job(answer, plan))

    # What follows runs in the serving threads.

    def _serve(self) -> None:
        """Pop and serve until the bridge stops, whatever goes wrong on the way."""
        streaks = _Streaks()
        while not self._stopping.is_set():
            try:
                self._serve_once(streaks)
            except Exception as error:  # noqa: BLE001  an answer of a shape nobody foresaw
                streaks.failures += 1
                name = type(error).__name__
                logger.error("horde.bridge.answer_unreadable", extra={"error": name})
                self._pause(compute_retry_seconds(streaks.failures))

    def _serve_once(self, streaks: _Streaks) -> None:
        """One pop, and the job if there is one."""
        plan = self._require_plan()
        if plan is None:
            return
        if (rest := self._backend.rest_seconds) > 0:
            self._pause(rest)
            return

        plan = plan.withhold(
            self._backend.refused_keys.features, takes_text=self._backend.continues_texts
        )
        try:
            answer = self._popper.pop(plan, streaks.failures)
        except NotAsked:
            streaks.failures += 1
            return
        streaks.failures = 0
        self._planner.announce(plan)
        if answer is None:
            streaks.empty_pops += 1
            if not self._popper.is_kept_waiting:
                self._pause(compute_idle_seconds(streaks.empty_pops))
            return

        streaks.empty_pops = 0
        if self._serve_popped(parse_job(answer, plan), plan):
            streaks.troubles += 1
            self._planner.forget(plan)
            self._pause(compute_retry_seconds(streaks.troubles))
        else:
            streaks.troubles = 0

    def _serve_popped(self, job: Job, plan: ServingPlan) -> bool:
        """Serve one job and submit what came of it. True when the backend is in trouble."""
        running = RunningJob(job)
        self._running.add(running)
        started = time.monotonic()
        try:
            body, is_backend_trouble = self._run_job(job, plan)
            if running.claim() and body is not None:
                self._submitter.submit(job, body, started)
        finally:
            self._running.discard(running)
        return is_backend_trouble

    def _run_job(self, job: Job, plan: ServingPlan) -> tuple[JsonObject | None, bool]:
        """The body to submit, None for a job nobody waits for, and whether the backend is in
        trouble.
        """
        fields = {"job_id": job.job_id, "chat": job.is_chat}
        try:
            body = serve_job(job, self._connections, plan)
        except JobAbandoned as error:
            logger.info("horde.bridge.job_abandoned", extra={**fields, "reason": str(error)})
            return None, False
        except JobFault as fault:
            reasons = {"reason": fault.reason, "detail": fault.detail}
            logger.warning("horde.bridge.job_faulted", extra={**fields, **reasons})
            if fault.is_key_refused and not self._has_served:
                reason = "The backend refuses the key of --backend-key, or wants one (401)."
                logger.error("horde.bridge.backend_unusable", extra={"reason": reason})
                self._end(EXIT_USAGE)
            return job.build_fault(fault.reason), fault.is_backend_trouble
        except BackendUnavailable as error:
            logger.error("horde.bridge.backend_failed", extra={**fields, "error": str(error)})
            return job.build_fault(ChatFaultReason.GENERATION_ERROR), True
        except Exception as error:  # noqa: BLE001
            # A payload or an answer of a shape nobody foresaw. Only the kind is logged: the message
            # may quote the request.
            logger.error(
                "horde.bridge.job_unreadable", extra={**fields, "error": type(error).__name__}
            )
            return job.build_fault(ChatFaultReason.GENERATION_ERROR), False
        self._has_served = True
        return body, False

    def _require_plan(self) -> ServingPlan | None:
        """The plan, once the backend answers; None when the bridge stops."""
        try:
            return self._planner.require(
                self._stopping,
                is_first=not self._popper.is_let_in,
                is_idle=not self._running,
            )
        except ProbeError as error:
            logger.error("horde.bridge.backend_unusable", extra={"reason": str(error)})
            self._end(EXIT_USAGE if isinstance(error, WrongOption) else EXIT_REFUSED)
            return None

    def _end(self, exit_code: int) -> None:
        """End the bridge for a reason that its operator has to remove."""
        self.stop(exit_code)
        self._stopping.set()

    def _pause(self, seconds: float) -> None:
        """Wait, but no longer than until the bridge stops."""
        self._stopping.wait(add_jitter(seconds))
