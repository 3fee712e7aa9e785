# SPDX-License-Identifier: AGPL-3.0-or-later
"""Short notices to moderators, posted to web addresses that the operator set. Best effort.

They carry ids and never a prompt, a key or an address. A process without a sender, such as a
command, sends none; what does not fit the queue is dropped and logged.
"""

import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum

from horde.logger import get_logger, surviving
from horde.outbound import OutboundFailed, post_json
from horde.runtime import Part

logger = get_logger(__name__)

QUEUE_LENGTH = 100
POST_SECONDS = 2.0
STOP_SECONDS = 5.0
MAX_CONTENT_LENGTH = 2000  # what the usual receiver takes


class NoticeKind(StrEnum):
    """Who has to look: at a paused worker, or at an account or a service that makes trouble."""

    PAUSED_WORKER = "paused_worker"
    PROBLEM_USER = "problem_user"


class NoticeSender:
    """A bounded queue and the thread that empties it."""

    def __init__(self, addresses: Mapping[NoticeKind, str]) -> None:
        self._addresses = {kind: address for kind, address in addresses.items() if address}
        self._waiting: queue.Queue[tuple[NoticeKind, str] | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = threading.Thread(
            target=self._send_until_stopped, name="horde-notices", daemon=True
        )

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def queue(self, kind: NoticeKind, content: str) -> None:
        """Add a notice, where the operator wants notices of its kind."""
        if kind not in self._addresses:
            return
        try:
            self._waiting.put_nowait((kind, content[:MAX_CONTENT_LENGTH]))
        except queue.Full:
            logger.warning("horde.notice.dropped", extra={"kind": kind.value})

    def stop(self) -> None:
        """Send what is queued while there is time, then let the thread end with the process."""
        with suppress(queue.Full):  # then it is busy for longer than anybody waits
            self._waiting.put_nowait(None)
        self._thread.join(STOP_SECONDS)

    def _send_until_stopped(self) -> None:
        while (notice := self._waiting.get()) is not None:
            with surviving("notices"):
                self._send(*notice)

    def _send(self, kind: NoticeKind, content: str) -> None:
        try:
            status = post_json(
                self._addresses[kind], {"content": content}, timeout_seconds=POST_SECONDS
            )
            reason = None if 200 <= status < 300 else f"status {status}"
        except OutboundFailed as error:
            reason = str(error)
        if reason is not None:
            logger.warning("horde.notice.failed", extra={"kind": kind.value, "reason": reason})


_sender: Part[NoticeSender | None] = Part(lambda: None)


def start_notices(addresses: Mapping[NoticeKind, str]) -> NoticeSender:
    """Send this process's notices from now on; the caller stops the sender at the end."""
    sender = NoticeSender(addresses)
    sender.start()
    _sender.set(sender)
    return sender


def queue_notice(kind: NoticeKind, content: str) -> None:
    """Tell the moderators, soon and best effort. Call it after the commit."""
    sender = _sender.get()
    if sender is not None:
        sender.queue(kind, content)
