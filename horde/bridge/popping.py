# SPDX-License-Identifier: AGPL-3.0-or-later
"""Asking the horde for jobs, and telling it that the worker leaves."""

import threading
import time
from collections.abc import Callable

from horde.bridge.config import BridgeConfig
from horde.bridge.horde_api import HordeApi, HordeRefusal, HordeUnavailable, WrongAddress
from horde.bridge.pace import MAINTENANCE_PAUSE_SECONDS, compute_retry_seconds
from horde.bridge.plan import ServingPlan
from horde.json_text import JsonObject
from horde.logger import get_logger

LEAVE_SECONDS = 5.0
WAIT_SECONDS = 20  # below the 30 s that hordes keep workers waiting, and what proxies mostly allow
WITHOUT_WAITING_SECONDS = 60.0  # after a pop that was to wait failed

EXIT_STOPPED, EXIT_REFUSED, EXIT_USAGE = 0, 1, 2

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

logger = get_logger(__name__)


class NotAsked(Exception):
    """A pop came to nothing, and what it says has been waited out."""


class Popper:
    """One worker's pops; safe for several threads.

    ``pause`` waits, or returns when all ends; ``end`` ends the bridge with an exit code.
    """

    def __init__(
        self,
        horde: HordeApi,
        config: BridgeConfig,
        pause: Callable[[float], None],
        end: Callable[[int], None],
    ) -> None:
        self._horde, self._config, self._pause, self._end = horde, config, pause, end
        self._accepted: JsonObject | None = None
        self._address_lock = threading.Lock()
        self._has_no_horde = False
        self._seen_messages: set[str] = set()
        self._plain_until = 0.0
        self._keeps_waiting = self._is_kept_waiting = False

    @property
    def is_let_in(self) -> bool:
        """Whether the horde has accepted a pop: the worker's settings are right then."""
        return self._accepted is not None

    @property
    def is_kept_waiting(self) -> bool:
        """Whether the horde kept the last pop waiting, so that a pause after it is of no use."""
        return self._is_kept_waiting

    def pop(self, plan: ServingPlan, failures: int) -> JsonObject | None:
        """A job, None when there is none.

        ``failures`` is how many pops in a row came to nothing. Raises ``NotAsked``.
        """
        body = plan.build_pop_body(self._config)
        try:
            answer = self._ask(body)
        except HordeUnavailable as error:
            if error.is_no_horde and not self.is_let_in:
                self._correct_address(failures + 1)
            else:
                self._wait(error, failures + 1)
            raise NotAsked from error
        except HordeRefusal as refusal:
            self._handle_refusal(refusal, failures + 1)
            raise NotAsked from refusal
        self._accepted = body
        if answer is not None:
            self._log_messages(answer)
        return answer

    def _ask(self, body: JsonObject) -> JsonObject | None:
        """A pop that waits where the horde offers it, and a plain one for a while after that
        failed: what keeps workers waiting may be full, or away, or behind a hasty proxy.
        """
        started = time.monotonic()
        if started < self._plain_until:
            return self._horde.pop(body)
        self._is_kept_waiting = False
        try:
            answer, self._keeps_waiting = self._horde.wait_for_job(body, WAIT_SECONDS)
        except HordeUnavailable as error:
            if self._horde.has_stopped_waiting:
                raise NotAsked from error
            self._plain_until = time.monotonic() + WITHOUT_WAITING_SECONDS
            if not (self._keeps_waiting or error.is_elsewhere):
                raise
            return self._horde.pop(body)
        # A front that is ending applies the preference and answers at once.
        has_waited = time.monotonic() - started > WAIT_SECONDS / 2
        self._is_kept_waiting = self._keeps_waiting and has_waited
        return answer

    def leave(self) -> JsonObject | None:
        """Take the worker offline, so that nobody waits for it. Best effort.

        A horde that does not know the key may hand out a job all the same.
        """
        if self._accepted is None:
            return None
        try:
            return self._horde.pop({**self._accepted, "leaving": True}, LEAVE_SECONDS)
        except (HordeUnavailable, HordeRefusal) as error:
            logger.warning("horde.bridge.leave_failed", extra={"error": str(error)})
            return None

    def _correct_address(self, failures: int) -> None:
        """Look for the horde where its address may have been meant to lead; end without one."""
        with self._address_lock:
            if self.is_let_in or self._has_no_horde:
                return
            try:
                self._horde.correct_address()
            except WrongAddress as wrong:
                self._has_no_horde = True
                logger.error("horde.bridge.api_unusable", extra={"reason": str(wrong)})
                self._end(EXIT_USAGE)
            except HordeUnavailable as unavailable:
                self._wait(unavailable, failures)

    def _wait(self, error: HordeUnavailable, failures: int) -> None:
        fields = {"error": str(error), "failures": failures}
        logger.warning("horde.bridge.pop_failed", extra=fields)
        self._pause(error.retry_after_seconds or compute_retry_seconds(failures))

    def _handle_refusal(self, refusal: HordeRefusal, failures: int) -> None:
        """End the bridge when it was never let in; otherwise wait. Maintenance has a pace of its
        own.
        """
        fields = {"status": refusal.status, "rc": refusal.rc, "reason": refusal.message}
        if refusal.rc == "WorkerMaintenance":
            logger.warning("horde.bridge.maintenance", extra=fields)
            self._pause(MAINTENANCE_PAUSE_SECONDS)
            return
        logger.error("horde.bridge.pop_refused", extra=fields)
        if refusal.rc in CONFIGURATION_REFUSALS and not self.is_let_in:
            self._end(EXIT_REFUSED)
            return
        self._pause(compute_retry_seconds(failures))

    def _log_messages(self, answer: JsonObject) -> None:
        """Show each message of the horde's operators to this worker's once."""
        messages = answer.get("messages")
        for message in messages if isinstance(messages, list) else ():
            text = str(message.get("message") if isinstance(message, dict) else message)
            if text not in self._seen_messages:
                self._seen_messages.add(text)
                logger.warning("horde.bridge.horde_message", extra={"text": text})
