# SPDX-License-Identifier: AGPL-3.0-or-later
"""Finished text generations, told to the address their requester named. Best effort: nothing waits
for it or depends on it.

Each API process sends for itself, from threads that `WebhookSender.start` begins. What does not fit
the queue is dropped and counted. Source: docs/reference/text_requests.md, "Webhook".
"""

import json
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from horde import metrics
from horde.logger import get_logger, surviving
from horde.outbound import INTERNET, AddressRefused, Network, OutboundFailed, send_public_request
from horde.runtime import Part

logger = get_logger(__name__)

QUEUE_LENGTH = 256
SENDER_COUNT = 2  # one receiver that does not answer must not hold up all others
ATTEMPT_COUNT = 3
ATTEMPT_SECONDS = 3.0
STOP_SECONDS = 5.0  # what is still queued at the end of a process may take that long

HEADERS = {"Content-Type": "application/json", "User-Agent": "Horde webhook"}


class WebhookOutcome(StrEnum):
    """What became of a delivery."""

    DELIVERED = "delivered"
    FAILED = "failed"
    REFUSED = "refused"  # the address is not public
    DROPPED = "dropped"  # the queue was full, or the process ended


@dataclass(frozen=True, slots=True)
class Delivery:
    """One body for one address; neither is ever logged."""

    url: str = field(repr=False)
    body: bytes = field(repr=False)


class WebhookSender:
    """A bounded queue and the threads that empty it."""

    def __init__(self, network: Network = INTERNET) -> None:
        self._network = network
        self._waiting: deque[Delivery] = deque()
        self._changed = threading.Condition()
        self._stop_at: float | None = None
        self._threads = [
            threading.Thread(
                target=self._send_until_stopped, name=f"horde-webhook-{number}", daemon=True
            )
            for number in range(SENDER_COUNT)
        ]

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def queue(self, delivery: Delivery) -> None:
        """Add a delivery, or drop it when there is no room."""
        with self._changed:
            has_room = len(self._waiting) < QUEUE_LENGTH and self._stop_at is None
            if has_room:
                self._waiting.append(delivery)
                self._changed.notify()
        if not has_room:
            count(WebhookOutcome.DROPPED)

    def stop(self) -> None:
        """Send what is queued while there is time, then end the threads."""
        with self._changed:
            self._stop_at = time.monotonic() + STOP_SECONDS
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for _ in self._waiting:
            count(WebhookOutcome.DROPPED)
        self._waiting.clear()

    def _send_until_stopped(self) -> None:
        while (delivery := self._take()) is not None:
            outcome = WebhookOutcome.FAILED
            with surviving("webhook"):
                outcome = deliver(delivery, self._network)
            count(outcome)

    def _take(self) -> Delivery | None:
        """The next delivery, waiting for one; None when it is time to end."""
        with self._changed:
            while not self._waiting and self._stop_at is None:
                self._changed.wait()
            if not self._waiting or (
                self._stop_at is not None and time.monotonic() >= self._stop_at
            ):
                return None
            return self._waiting.popleft()


def deliver(delivery: Delivery, network: Network) -> WebhookOutcome:
    """POST a body until an answer of 2xx or 3xx, three times at most and without a pause. A
    redirect is not followed.
    """
    for _ in range(ATTEMPT_COUNT):
        try:
            answer = send_public_request(
                "POST",
                delivery.url,
                headers=HEADERS,
                content=delivery.body,
                phase_seconds=ATTEMPT_SECONDS,
                total_seconds=ATTEMPT_SECONDS,
                max_bytes=0,
                network=network,
            )
        except AddressRefused:
            return WebhookOutcome.REFUSED
        except OutboundFailed as error:
            logger.debug("horde.webhook.attempt_failed", extra={"reason": str(error)})
            continue
        if 200 <= answer.status < 400:
            return WebhookOutcome.DELIVERED
    return WebhookOutcome.FAILED


def count(outcome: WebhookOutcome) -> None:
    """Count a delivery by what became of it."""
    metrics.webhook_deliveries.add(1, {"horde.outcome": outcome.value})


@dataclass(slots=True)
class SenderState:
    """The sender of this runtime; None where none was started, as in commands and most tests."""

    sender: WebhookSender | None = None


state = Part(SenderState)


def start_webhooks(network: Network = INTERNET) -> WebhookSender:
    """Send this process's webhooks from now on; the caller stops the sender at the end."""
    sender = WebhookSender(network)
    sender.start()
    state.get().sender = sender
    return sender


def queue_webhook(url: str, body: Mapping[str, object]) -> None:
    """Tell an address of a generation, soon and best effort; dropped where no sender was started.
    Call it after the commit.
    """
    sender = state.get().sender
    if sender is not None:
        sender.queue(Delivery(url, json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")))
