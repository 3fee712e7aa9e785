# SPDX-License-Identifier: AGPL-3.0-or-later
"""The plan that a bridge's threads share: probed by one of them, forgotten when the backend is in
trouble, and told to the operator.
"""

import threading
import time
from collections.abc import Callable

from horde.bridge.backend import Backend
from horde.bridge.config import BridgeConfig
from horde.bridge.declaration import describe_refusing, explain_gaps
from horde.bridge.pace import compute_retry_seconds
from horde.bridge.plan import ServingPlan
from horde.bridge.probe import ProbeError, WrongOption, build_serving_plan
from horde.bridge.refusals import BackendRefusal, BackendUnavailable
from horde.logger import get_logger

LOST_FAILURES = 5  # some 15 s; a restart with a small model is over by then
PROBE_AGAIN_SECONDS = 60.0  # an idle backend that was restarted is noticed within a minute

logger = get_logger(__name__)


class Planner:
    """Holds the plan; safe for several threads.

    ``pause`` waits, or returns when all ends; ``on_lost`` is called when a backend that was served
    does not come back soon.
    """

    def __init__(
        self,
        backend: Backend,
        config: BridgeConfig,
        pause: Callable[[float], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._backend, self._config = backend, config
        self._pause, self._on_lost = pause, on_lost
        self._lock = threading.Lock()  # held while the backend is waited for
        self._announcing = threading.Lock()
        self._plan: ServingPlan | None = None
        self._announced: ServingPlan | None = None
        self._probed = 0.0
        self.latest: ServingPlan | None = None
        """The plan last made, also when it was forgotten."""

    def require(
        self, stopping: threading.Event, *, is_first: bool, is_idle: bool
    ) -> ServingPlan | None:
        """The plan, probing the backend until it answers; None once the bridge stops.

        One thread probes, the others wait. An address or a key that turns wrong only later may be
        put right at the backend, so it is waited for unless ``is_first``. When ``is_idle`` a plan
        does not last: the backend may have been restarted with another model. Raises
        ``ProbeError``.
        """
        with self._lock:
            failures = 0
            if is_idle and time.monotonic() > self._probed + PROBE_AGAIN_SECONDS:
                self._plan = None
            while self._plan is None and not stopping.is_set():
                try:
                    self._plan = build_serving_plan(self._backend, self._config)
                except WrongOption as error:
                    if is_first:
                        raise
                    failures += 1
                    self._wait(str(error), failures)
                except ProbeError:
                    raise
                except BackendRefusal as refusal:
                    failures += 1
                    words = refusal.describe(self._backend.secrets)
                    self._wait(words, failures, refusal.retry_after_seconds)
                except BackendUnavailable as error:
                    failures += 1
                    self._wait(str(error), failures)
                except Exception as error:  # noqa: BLE001  a shape nobody foresaw
                    failures += 1
                    self._wait(f"an unreadable answer: {type(error).__name__}", failures)
                else:
                    self._probed = time.monotonic()
                    if self._plan != self.latest:
                        self.latest = self._plan
                        self._backend.forget_refusals()
                        self._log_backend(self._plan)
            return self._plan if not stopping.is_set() else None

    def forget(self, plan: ServingPlan) -> None:
        """Have the backend probed before the next pop: popping without one would only fault
        jobs.
        """
        with self._lock:
            if self._plan is not None and self._plan.profile is plan.profile:
                self._plan = None

    def announce(self, plan: ServingPlan) -> None:
        """Say what is served, once the horde has accepted it."""
        with self._announcing:
            if self._announced == plan:
                return
            self._announced = plan
        limits = plan.declaration.limits
        logger.info(
            "horde.bridge.serving",
            extra={
                "backend": plan.profile.kind.value,
                "model": plan.model,
                "max_length": plan.max_length,
                "max_context_length": plan.profile.context_tokens,
                "chat_context_length": limits.max_context_length if limits else None,
                "declares": ",".join(sorted(plan.declaration.features)),
            },
        )

    def _wait(self, words: str, failures: int, asked_seconds: float | None = None) -> None:
        fields = {"error": words, "failures": failures}
        logger.warning("horde.bridge.backend_waiting", extra=fields)
        if failures == LOST_FAILURES and self.latest is not None:
            self._on_lost()
        self._pause(asked_seconds or compute_retry_seconds(failures))

    def _log_backend(self, plan: ServingPlan) -> None:
        """What was found, and which chats go to other workers for what is not declared."""
        profile = plan.profile
        logger.info(
            "horde.bridge.backend_found",
            extra={
                "backend": profile.kind.value,
                "model": profile.backend_model,
                "context": profile.context_tokens,
                "long_prompts": describe_refusing(profile),
            },
        )
        for gap in explain_gaps(profile, self._config, plan.declaration):
            is_default = gap["value"] == "prompt_overflow_refused"
            log = logger.warning if is_default else logger.info
            log("horde.bridge.not_declared", extra=gap)
