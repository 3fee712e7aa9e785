# SPDX-License-Identifier: AGPL-3.0-or-later
"""Completion events of chat requests on Redis: hints without text. Whoever waits re-reads the
status.
"""

from enum import StrEnum
from uuid import UUID

from horde.redis_ctrl import publish_chat_message


class ChatEvent(StrEnum):
    """What happened to a chat request."""

    GENERATION = "generation"
    DONE = "done"
    CANCELLED = "cancelled"
    FAULTED = "faulted"


def publish_chat_event(
    request_id: UUID,
    event: ChatEvent,
    generations: int,
    *,
    fault_reason: str | None = None,
    fault_rc: str | None = None,
) -> None:
    """Tell whoever waits for a request. Best effort: a failure is logged, counted and never reaches
    the caller.

    Shape: `{"id", "event", "generations"}` on `horde:chat:<request id>`, with `fault_reason` and
    `fault_rc` on a faulted event when the horde knows why. Never any generated text. Call it after
    the commit it reports.
    """
    message: dict[str, object] = {
        "id": str(request_id),
        "event": event.value,
        "generations": generations,
    }
    if event is ChatEvent.FAULTED and fault_rc is not None:
        message |= {"fault_reason": fault_reason, "fault_rc": fault_rc}
    publish_chat_message(f"horde:chat:{request_id}", message)
