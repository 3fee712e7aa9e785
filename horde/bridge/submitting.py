# SPDX-License-Identifier: AGPL-3.0-or-later
"""Handing in what came of a job."""

import threading
import time
from dataclasses import dataclass, field

from horde_sdk.worker.chat_declaration import ChatFaultReason

from horde.bridge.horde_api import HordeApi, HordeRefusal, HordeUnavailable
from horde.bridge.job import Job
from horde.bridge.pace import MAX_SUBMIT_RETRY_SECONDS, add_jitter, compute_retry_seconds
from horde.json_text import JsonObject
from horde.logger import get_logger

# Past the lease: the pass that aborts lapsed jobs runs once a minute.
SUBMIT_GIVE_UP_SECONDS = 60.0

# The job is settled already: by an earlier submit whose answer was lost, or by the horde, which
# gave up on it.
SETTLED_REFUSALS = frozenset({"AbortedGen", "DuplicateGen", "InvalidJobID"})

logger = get_logger(__name__)


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


class Submitter:
    """Submits to one horde; safe for several threads."""

    def __init__(self, horde: HordeApi) -> None:
        self._horde = horde

    def submit(self, job: Job, body: JsonObject, started: float) -> None:
        """Hand in a body; the same one again while the horde is unavailable, until the lease is
        certainly over. ``started`` is when the job began.
        """
        fields = {"job_id": job.job_id, "chat": job.is_chat, "state": body.get("state", "ok")}
        failures = 0
        while True:
            try:
                kudos = self._horde.submit(body)
            except HordeRefusal as refusal:
                self._handle_refusal(job, body, refusal, started)
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
                own_pause = compute_retry_seconds(failures, MAX_SUBMIT_RETRY_SECONDS)
                time.sleep(add_jitter(error.retry_after_seconds or own_pause))
                continue
            seconds = round(time.monotonic() - started, 1)
            logger.info(
                "horde.bridge.job_done", extra={**fields, "kudos": kudos, "seconds": seconds}
            )
            return

    def give_back(self, running: RunningJob) -> None:
        """Fault a job that its thread will not finish. Best effort: the process is about to end."""
        if running.claim():
            self.fault(running.job, ChatFaultReason.GENERATION_ERROR)

    def fault(self, job: Job, reason: ChatFaultReason | None = None) -> None:
        """Fault a job, trying once."""
        try:
            self._horde.submit(job.build_fault(reason))
            logger.info("horde.bridge.job_given_back", extra={"job_id": job.job_id})
        except (HordeUnavailable, HordeRefusal) as error:
            logger.warning(
                "horde.bridge.give_back_failed",
                extra={"job_id": job.job_id, "error": str(error)},
            )

    def _handle_refusal(
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
            self.submit(job, job.build_fault(ChatFaultReason.REPLY_REFUSED), started)
