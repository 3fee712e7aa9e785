# SPDX-License-Identifier: AGPL-3.0-or-later
"""Progress posts of one streamed job: when the next is due, what it says, and what follows from its
answer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from horde.bridge.horde_api import HordeRefusal, HordeUnavailable
from horde.bridge.lease import Lease
from horde.json_text import JsonObject
from horde.logger import get_logger

POST_SECONDS = 1.0
# A fast backend is read at a reader's pace; of a second's worth much more would come at once.
POST_TOKENS = 64
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0)  # after so many failures in a row; the last one stays

PostProgress = Callable[[JsonObject], bool]
"""Sends a post and tells whether the request was cancelled, as ``HordeApi.post_progress``."""

logger = get_logger(__name__)


class JobAbandoned(Exception):
    """Nobody waits for this job any more: stop generating and submit nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a job has written so far; each text only ever grows. ``token_count`` is near enough for
    pacing.
    """

    content: str
    reasoning: str
    token_count: int


@dataclass(frozen=True, slots=True)
class _Place:
    """How much of both texts the horde has, in characters."""

    content: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Post:
    """A post whose answer has not come. It is sent unchanged until one does, since the horde may
    have taken it.
    """

    body: JsonObject
    reaches: _Place
    token_count: int
    first_sent: float


class ProgressPoster:
    """One job's posts. Used by one thread; times are those of ``time.monotonic``.

    The first text is posted at once, for its reader to see that something comes; from then on a
    post is due each second, or sooner after 64 tokens.
    """

    def __init__(self, job_id: str, lease: Lease, send: PostProgress) -> None:
        self._job_id, self._lease, self._send = job_id, lease, send
        self._accepted = [_Place()]  # by seq
        self._pending: _Post | None = None
        self._posted_tokens = 0
        self._next_at = 0.0
        self._failures = 0
        self._is_stopped = False

    @property
    def has_begun(self) -> bool:
        """Whether the horde may have text of this job, which cannot be taken back."""
        return self._pending is not None or len(self._accepted) > 1

    def find_seconds_until_due(self, written: Written) -> float | None:
        """Seconds until ``post`` should be called, 0 for now; None when nothing is to be posted
        before more is written.
        """
        if self._is_stopped:
            return None
        if self._pending is None:
            place = self._accepted[-1]
            if len(written.content) <= place.content and len(written.reasoning) <= place.reasoning:
                return None
            if written.token_count - self._posted_tokens >= POST_TOKENS:
                return 0.0
        return max(self._next_at - time.monotonic(), 0.0)

    def post(self, written: Written) -> None:
        """Post what is not posted yet, or the last post again if its answer was lost.

        Raises ``JobAbandoned`` when the request was cancelled or the horde gave up on the job. Any
        other refusal ends the posting and leaves the job to its submit.
        """
        post = self._pending or self._build_post(written)
        self._pending = post
        try:
            is_cancelled = self._send(post.body)
        except HordeUnavailable as error:
            self._wait_for_horde(error)
            return
        except HordeRefusal as refusal:
            self._handle_refusal(refusal)
            return
        self._pending, self._failures = None, 0
        self._accepted.append(post.reaches)
        self._posted_tokens, self._next_at = post.token_count, time.monotonic() + POST_SECONDS
        if is_cancelled:
            raise JobAbandoned("cancelled")
        self._lease.renew(post.first_sent)

    def _build_post(self, written: Written) -> _Post:
        place = self._accepted[-1]
        delta = {"content": written.content[place.content :]}
        if reasoning := written.reasoning[place.reasoning :]:
            delta["reasoning_content"] = reasoning
        return _Post(
            body={"id": self._job_id, "seq": len(self._accepted), "delta": delta},
            reaches=_Place(len(written.content), len(written.reasoning)),
            token_count=written.token_count,
            first_sent=time.monotonic(),
        )

    def _wait_for_horde(self, error: HordeUnavailable) -> None:
        """The reply does not depend on its posts, so generation goes on; what is written meanwhile
        goes into the next post.
        """
        self._failures += 1
        seconds = (
            error.retry_after_seconds or RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS)) - 1]
        )
        self._next_at = time.monotonic() + seconds
        if self._failures == 1:
            logger.warning(
                "horde.bridge.progress_failed", extra={"job_id": self._job_id, "error": str(error)}
            )

    def _handle_refusal(self, refusal: HordeRefusal) -> None:
        if refusal.rc == "ChatJobAborted":
            raise JobAbandoned("aborted by the horde") from refusal
        expected = refusal.answer.get("expected_seq")
        if isinstance(expected, int) and 1 <= expected < len(self._accepted):
            # The horde forgot the latest posts, as a Redis does that was restored: they go out
            # again as one.
            del self._accepted[expected:]
            self._pending = None
            return
        # Of a post that the horde has otherwise than it was sent, nothing certain can follow.
        self._is_stopped = True
        fields = {
            "job_id": self._job_id,
            "status": refusal.status,
            "rc": refusal.rc,
            "reason": refusal.message,
        }
        logger.info("horde.bridge.progress_stopped", extra=fields)
