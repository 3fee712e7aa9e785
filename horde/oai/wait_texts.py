# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a client is told when a request that was queued gives no reply.

Source: docs/reference/chat_front.md, "Errors".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from horde_sdk.worker.chat_declaration import ChatFaultReason

from horde.chat_contract import WORKER_FAULT_MESSAGES
from horde.oai.errors import WaitFailure

CANCELLED_SENTENCE: Final = "The request was cancelled."

# Status, code, param and message of each way to fail.
WAIT_ROWS: Final[Mapping[WaitFailure, tuple[int, str, str | None, str]]] = MappingProxyType(
    {
        WaitFailure.FAIL_FAST_NOBODY: (
            503,
            "no_worker_available",
            "horde.availability_mode",
            (
                "No eligible worker is online, and horde.availability_mode is fail_fast. Choose"
                " another"
                f" model, or send wait to queue for one. {CANCELLED_SENTENCE}"
            ),
        ),
        WaitFailure.FAIL_FAST_WAIT: (
            503,
            "wait_exceeds_budget",
            "horde.availability_mode",
            (
                "The expected wait is longer than the front waits, and horde.availability_mode is"
                " fail_fast. Lower 'max_tokens', choose another model, or send wait to try all the"
                " same."
                f" {CANCELLED_SENTENCE}"
            ),
        ),
        WaitFailure.NO_WORKER_GRACE: (
            503,
            "no_worker_available",
            None,
            (
                "No online worker can take this request. Choose another model, leave out what"
                " limits the"
                f" workers, or come back later. {CANCELLED_SENTENCE}"
            ),
        ),
        WaitFailure.DEADLINE: (
            504,
            "wait_timeout",
            None,
            (
                "No reply within the time the front waits. Lower 'max_tokens', choose another"
                " model, or"
                f" come back later. {CANCELLED_SENTENCE}"
            ),
        ),
        WaitFailure.FAULTED: (
            502,
            "generation_failed",
            None,
            (
                "The request failed on the workers that tried it. Send it again, or choose another"
                " model."
            ),
        ),
        WaitFailure.NO_GENERATION: (
            502,
            "no_generation",
            None,
            (
                "The request ended without a reply: it was cancelled, or the horde went into"
                " maintenance. Send it again."
            ),
        ),
        WaitFailure.REQUEST_LOST: (
            502,
            "request_lost",
            None,
            "The horde no longer has this request. Send it again.",
        ),
        WaitFailure.STREAM_DIVERGED: (
            502,
            "stream_diverged",
            None,
            (
                "The final reply differs from the text that was streamed. It can be read natively"
                " under"
                " metadata.request_id."
            ),
        ),
        WaitFailure.GENERATION_RESTARTED: (
            502,
            "generation_restarted",
            None,
            (
                "The worker failed, and the next one wrote another text than was streamed. Send the"
                f" request again. {CANCELLED_SENTENCE}"
            ),
        ),
        WaitFailure.SHUTTING_DOWN: (
            503,
            "front_shutting_down",
            None,
            f"The front is shutting down. Send the request again in a moment. {CANCELLED_SENTENCE}",
        ),
    }
)
# What a fault's message is answered with: status, code, param, and what the message does not say.
FAULT_ROWS: Final[Mapping[str, tuple[int, str, str | None, str]]] = MappingProxyType(
    {
        WORKER_FAULT_MESSAGES[ChatFaultReason.PROMPT_OVERFLOW]: (
            400,
            "context_length_exceeded",
            "messages",
            " Shorten the messages, or lower 'max_tokens'.",
        ),
        WORKER_FAULT_MESSAGES[ChatFaultReason.UNBUILDABLE_GRAMMAR]: (
            400,
            "unbuildable_grammar",
            None,
            " Simplify the schema.",
        ),
    }
)
# They end as they do because nobody took the request, which speed alone may explain.
NOT_TAKEN: Final = frozenset(
    {
        WaitFailure.FAIL_FAST_NOBODY,
        WaitFailure.FAIL_FAST_WAIT,
        WaitFailure.NO_WORKER_GRACE,
        WaitFailure.DEADLINE,
    }
)
