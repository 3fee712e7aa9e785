# SPDX-License-Identifier: AGPL-3.0-or-later
"""A backend that asks to be asked again later: 429, or 503 with a time."""

import time
from collections.abc import Callable

from horde.bridge.backend import Backend
from horde.bridge.lease import Lease
from horde.bridge.refusals import BackendRefusal
from horde.logger import get_logger

FIRST_PAUSE_SECONDS = 2.0  # where the backend names no time; doubled each time
LEAST_PAUSE_SECONDS = 0.5
SERVING_SECONDS = 30.0  # what has to be left of the lease after the pause

logger = get_logger(__name__)


def wait_out_overload[Answer](ask: Callable[[], Answer], backend: Backend, lease: Lease) -> Answer:
    """What ``ask`` answers, asked again as long as the lease leaves time for a reply.

    No thread pops while the backend rests. Raises what ``ask`` raises.
    """
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return ask()
        except BackendRefusal as refusal:
            if not refusal.is_overloaded:
                raise
            asked = refusal.retry_after_seconds
            seconds = max(asked, LEAST_PAUSE_SECONDS) if asked else pause
            backend.rest(seconds)
            fields = {"status": refusal.status, "seconds": round(seconds, 1)}
            logger.warning("horde.bridge.backend_overloaded", extra=fields)
            if seconds + SERVING_SECONDS > lease.seconds_left:
                raise
        time.sleep(seconds)
        pause *= 2
