# SPDX-License-Identifier: AGPL-3.0-or-later
"""The bridge's threads: pop, serve, submit, again; and how they stop.

Each thread has one job at a time. Threads share the serving plan, which is probed again after the
backend was gone, since it may have come back with another model. The main thread waits for a signal
and, after the grace period, gives back what still runs.
"""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from horde_sdk.worker.chat_declaration import ChatFaultReason

from horde.bridge.backend import Backend, BackendRefusal, BackendUnavailable, JsonObject
from horde.bridge.config import BridgeConfig
from horde.bridge.horde_api import HordeApi, HordeRefusal, HordeUnavailable
from horde.bridge.inputs import InputFetcher
from horde.bridge.jobs import Connections, Job, JobFault, parse_job, serve_job
from horde.bridge.probe import ProbeError, ServingPlan, build_serving_plan
from horde.bridge.progress import JobAbandoned
from horde.bridge.streaming import UNREADABLE_ERRORS
from horde.logger import get_logger

# After so many empty pops, seconds between two; the pace of other text workers.
IDLE_STEPS = ((25, 3.0), (10, 2.0), (0, 1.0))
JITTER_SHARE = 0.2  # keeps threads and workers from popping in step
FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
MAX_SUBMIT_RETRY_SECONDS = 15.0
SUBMIT_GIVE_UP_SECONDS = 60.0  # past the lease: the pass that aborts lapsed jobs runs once a minute
MAINTENANCE_PAUSE_SECONDS = 30.0
LAST_SUBMIT_SECONDS = 5.0  # for submits under way when the grace period ends

EXIT_STOPPED, EXIT_REFUSED = 0, 1

# Refusals that waiting does not cure. Before the first successful pop they end the bridge: its
# operator is watching.
CONFIGURATION_REFUSALS = frozenset(
    {
        "AnonForbiddenWorker",
        "BadRequest",
        "ChatDeclarationInvalid",
        "InvalidAPIKey",
        "PolymorphicNameConflict",
        "ProfaneBridgeAgent",
        "ProfaneWorkerName",
        "WrongCredentials",
    }
)
# The job is settled already: by an earlier submit whose answer was lost, or by the horde, which
# gave up on it.
SETTLED_REFUSALS = frozenset({"AbortedGen", "DuplicateGen", "InvalidJobID"})

logger = get_logger(__name__)


def compute_idle_seconds(empty_pop_count: int) -> float:
    """Seconds to wait after so many empty pops in a row, before jitter."""
    return next(seconds for least, seconds in IDLE_STEPS if empty_pop_count >= least)


def compute_retry_seconds(failure_count: int, ceiling_seconds: float = MAX_RETRY_SECONDS) -> float:
    """Seconds to wait after so many failures in a row (at least one), before jitter."""
    return min(FIRST_RETRY_SECONDS * 2.0 ** min(failure_count - 1, 16), ceiling_seconds)


@dataclass(eq=False, slots=True)
class RunningJob:
    """A job in a thread's hands. Only who claims its outcome may submit for it."""

    job: Job
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_claimed: bool = False

    def claim(self) -> bool:
        """Whether the caller is the first."""
        with self._lock:
            is_first, self._is_claimed = not self._is_claimed, True
            return is_first


class Bridge:
    """One worker: ``run`` blocks until stopped and returns the process's exit code."""

    def __init__(
        self, config: BridgeConfig, horde: HordeApi, backend: Backend, inputs: InputFetcher
    ) -> None:
        self._config, self._horde, self._backend = config, horde, backend
        self._connections = Connections(
            backend=backend, inputs=inputs, post_progress=horde.post_progress
        )
        # A SimpleQueue may be filled from a signal handler; an Event set from one can deadlock with
        # its waiter.
        self._stops: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._plan: ServingPlan | None = None
        self._plan_lock = threading.Lock()
        self._running: set[RunningJob] = set()
        self._has_popped = False
        self._seen_messages: set[str] = set()

    def stop(self, exit_code: int = EXIT_STOPPED) -> None:
        """Ask the bridge to end; safe in a signal handler. A second call ends the grace period."""
        self._stops.put(exit_code)

    def run(self) -> int:
        """Serve until ``stop``: pops end at once, running jobs get the grace period and are then
        given back.
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
        logger.info("horde.bridge.stopping", extra={"running_jobs": len(self._running)})
        if not self._join(threads, self._config.grace_seconds):
            for running in list(self._running):
                self._give_back(running)
            self._join(threads, LAST_SUBMIT_SECONDS)
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

    def _give_back(self, running: RunningJob) -> None:
        """Fault a job that its thread will not finish. Best effort: the process is about to end."""
        if not running.claim():
            return
        try:
            self._horde.submit(running.job.build_fault(ChatFaultReason.GENERATION_ERROR))
            logger.info("horde.bridge.job_given_back", extra={"job_id": running.job.job_id})
        except (HordeUnavailable, HordeRefusal) as error:
            logger.warning(
                "horde.bridge.give_back_failed",
                extra={"job_id": running.job.job_id, "error": str(error)},
            )

    # What follows runs in the serving threads.

    def _serve(self) -> None:
        """Pop and serve until the bridge stops. A thread that dies of a bug ends the bridge, for
        its supervisor to restart.
        """
        try:
            self._pop_and_serve()
        finally:
            if not self._stopping.is_set():
                self.stop(EXIT_REFUSED)

    def _pop_and_serve(self) -> None:
        empty_pops = failures = troubles = 0
        while not self._stopping.is_set():
            plan = self._require_plan()
            if plan is None:
                return
            try:
                answer = self._horde.pop(plan.build_pop_body(self._config))
            except HordeUnavailable as error:
                failures += 1
                logger.warning(
                    "horde.bridge.pop_failed", extra={"error": str(error), "failures": failures}
                )
                self._pause(error.retry_after_seconds or compute_retry_seconds(failures))
                continue
            except HordeRefusal as refusal:
                failures += 1
                self._handle_pop_refusal(refusal, failures)
                continue
            failures, self._has_popped = 0, True
            if answer is None:
                empty_pops += 1
                self._pause(compute_idle_seconds(empty_pops))
                continue
            empty_pops = 0
            self._log_messages(answer)
            if self._serve_popped(parse_job(answer, plan), plan):
                troubles += 1
                self._forget_plan(plan)
                self._pause(compute_retry_seconds(troubles))
            else:
                troubles = 0

    def _handle_pop_refusal(self, refusal: HordeRefusal, failures: int) -> None:
        """End the bridge when it was never let in; otherwise wait. Maintenance has a pace of its
        own.
        """
        fields = {"status": refusal.status, "rc": refusal.rc, "reason": refusal.message}
        if refusal.rc == "WorkerMaintenance":
            logger.warning("horde.bridge.maintenance", extra=fields)
            self._pause(MAINTENANCE_PAUSE_SECONDS)
            return
        logger.error("horde.bridge.pop_refused", extra=fields)
        if refusal.rc in CONFIGURATION_REFUSALS and not self._has_popped:
            self.stop(EXIT_REFUSED)
            self._stopping.set()
            return
        self._pause(compute_retry_seconds(failures))

    def _serve_popped(self, job: Job, plan: ServingPlan) -> bool:
        """Serve one job and submit what came of it. True when the backend is in trouble."""
        running = RunningJob(job)
        self._running.add(running)
        started = time.monotonic()
        try:
            body, is_backend_trouble = self._run_job(job, plan)
            if running.claim() and body is not None:
                self._submit(job, body, started)
        finally:
            self._running.discard(running)
        return is_backend_trouble

    def _run_job(self, job: Job, plan: ServingPlan) -> tuple[JsonObject | None, bool]:
        """The body to submit, None for a job nobody waits for, and whether the backend is in
        trouble.
        """
        fields = {"job_id": job.job_id, "chat": job.is_chat}
        try:
            return serve_job(job, self._connections, plan), False
        except JobAbandoned as error:
            logger.info("horde.bridge.job_abandoned", extra={**fields, "reason": str(error)})
            return None, False
        except JobFault as fault:
            logger.warning(
                "horde.bridge.job_faulted",
                extra={**fields, "reason": fault.reason, "detail": fault.detail},
            )
            return job.build_fault(fault.reason), fault.is_backend_trouble
        except BackendUnavailable as error:
            logger.error("horde.bridge.backend_failed", extra={**fields, "error": str(error)})
            return job.build_fault(ChatFaultReason.GENERATION_ERROR), True
        except UNREADABLE_ERRORS as error:
            # A payload or an answer of a shape nobody foresaw. Only the kind is logged: the message
            # may quote the request.
            logger.error(
                "horde.bridge.job_unreadable", extra={**fields, "error": type(error).__name__}
            )
            return job.build_fault(ChatFaultReason.GENERATION_ERROR), False

    def _submit(self, job: Job, body: JsonObject, started: float) -> None:
        """Hand in a body; the same one again while the horde is unavailable, until the lease is
        certainly over.
        """
        fields = {"job_id": job.job_id, "chat": job.is_chat, "state": body.get("state", "ok")}
        failures = 0
        while True:
            try:
                kudos = self._horde.submit(body)
            except HordeRefusal as refusal:
                self._handle_submit_refusal(job, body, refusal, started)
                return
            except HordeUnavailable as error:
                failures += 1
                logger.warning(
                    "horde.bridge.submit_failed",
                    extra={**fields, "error": str(error), "failures": failures},
                )
                if time.monotonic() > job.lease.ends + SUBMIT_GIVE_UP_SECONDS:
                    logger.error("horde.bridge.submit_given_up", extra=fields)
                    return
                # Not cut short by a stop: a finished reply is worth the grace period.
                time.sleep(
                    _add_jitter(
                        error.retry_after_seconds
                        or compute_retry_seconds(failures, MAX_SUBMIT_RETRY_SECONDS)
                    )
                )
                continue
            seconds = round(time.monotonic() - started, 1)
            logger.info(
                "horde.bridge.job_done", extra={**fields, "kudos": kudos, "seconds": seconds}
            )
            return

    def _handle_submit_refusal(
        self, job: Job, body: JsonObject, refusal: HordeRefusal, started: float
    ) -> None:
        """Drop a job that is settled; give back one whose reply was refused; a refused fault is
        only logged.
        """
        fields = {
            "job_id": job.job_id,
            "status": refusal.status,
            "rc": refusal.rc,
            "reason": refusal.message,
        }
        if refusal.rc in SETTLED_REFUSALS or refusal.status == 404:
            logger.info("horde.bridge.job_settled_elsewhere", extra=fields)
            return
        logger.warning("horde.bridge.submit_refused", extra=fields)
        is_reply = body.get("state", "ok") != "faulted"
        if is_reply and refusal.status in (400, 413):
            self._submit(job, job.build_fault(ChatFaultReason.REPLY_REFUSED), started)

    def _require_plan(self) -> ServingPlan | None:
        """The plan, probing the backend until it answers; None once the bridge stops. One thread
        probes, the others wait.
        """
        with self._plan_lock:
            failures = 0
            while self._plan is None and not self._stopping.is_set():
                try:
                    self._plan = build_serving_plan(self._backend, self._config)
                except ProbeError as error:
                    logger.error("horde.bridge.backend_unusable", extra={"reason": str(error)})
                    self.stop(EXIT_REFUSED)
                    self._stopping.set()
                except (BackendUnavailable, BackendRefusal) as error:
                    failures += 1
                    logger.warning(
                        "horde.bridge.backend_waiting",
                        extra={"error": str(error), "failures": failures},
                    )
                    self._pause(compute_retry_seconds(failures))
                else:
                    _log_plan(self._plan)
            return self._plan if not self._stopping.is_set() else None

    def _forget_plan(self, plan: ServingPlan) -> None:
        """Have the backend probed before the next pop: popping without one would only fault
        jobs.
        """
        with self._plan_lock:
            if self._plan is plan:
                self._plan = None

    def _pause(self, seconds: float) -> None:
        """Wait, but no longer than until the bridge stops."""
        self._stopping.wait(_add_jitter(seconds))

    def _log_messages(self, answer: JsonObject) -> None:
        """Show each message of the horde's operators to this worker's once."""
        for message in answer.get("messages") or ():
            text = str(message.get("message") if isinstance(message, dict) else message)
            if text not in self._seen_messages:
                self._seen_messages.add(text)
                logger.warning("horde.bridge.horde_message", extra={"text": text})


def _log_plan(plan: ServingPlan) -> None:
    logger.info(
        "horde.bridge.serving",
        extra={
            "backend": plan.profile.kind.value,
            "model": plan.model,
            "max_length": plan.max_length,
            "max_context_length": plan.profile.context_tokens,
            "declares": ",".join(sorted(plan.declaration.features)),
        },
    )


def _add_jitter(seconds: float, draw: Callable[[], float] = random.random) -> float:
    return seconds * (1 + JITTER_SHARE * (2 * draw() - 1))
