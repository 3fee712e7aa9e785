# SPDX-License-Identifier: AGPL-3.0-or-later
"""A chat generated while the horde is told about it.

One thread reads the backend and never waits for the horde; the job's own thread posts, watches the
clock and ends the stream when nobody waits for it any more.
"""

import threading
import time

from horde.bridge.chat_stream import ChatStream
from horde.bridge.lease import LEASE_MARGIN_SECONDS, MIN_BACKEND_SECONDS, Lease
from horde.bridge.progress import ProgressPoster, Written
from horde.bridge.refusals import BackendUnavailable
from horde.bridge.streamed_reply import StreamedReply

# Between two chunks once text has come; the prompt before it may take as long as the lease.
STALL_SECONDS = 60.0
# For the counts after a finish reason, from a backend that never ends its stream.
FINISH_SECONDS = 3.0


class StreamedGeneration:
    """One chat, read from its backend and posted. ``run`` is called once.

    ``posts_content`` is false when the content is not what the reader will get, such as the JSON
    that becomes a tool call.
    """

    def __init__(
        self,
        stream: ChatStream,
        reply: StreamedReply,
        poster: ProgressPoster | None,
        lease: Lease,
        *,
        posts_content: bool,
        may_fall_silent: bool = False,
    ) -> None:
        self._stream, self._reply, self._poster, self._lease = stream, reply, poster, lease
        self._posts_content, self._may_fall_silent = posts_content, may_fall_silent
        self._changed = threading.Condition()  # guards what follows, and the reply
        self._error: Exception | None = None
        self._is_complete = self._is_over = False
        self._started = self._last_chunk = self._last_byte = time.monotonic()

    def run(self) -> StreamedReply:
        """Generate; the finished reply.

        Raises ``JobAbandoned`` as the poster does, ``BackendRefusal``, and ``BackendUnavailable``
        for a stream that breaks off, stalls or outlasts the lease. However it ends, the backend
        stops generating.
        """
        thread = threading.Thread(
            target=self._read, name=f"{threading.current_thread().name}-reader", daemon=True
        )
        thread.start()
        try:
            while (written := self._wait_for_work()) is not None:
                if self._poster is not None:
                    self._poster.post(written)
        finally:
            self._stream.abort()
        with self._changed:
            self._reply.finish()
            return self._reply

    def _read(self) -> None:
        """Put every chunk into the reply. Runs in the reading thread."""
        error: Exception | None = None
        is_complete = False
        try:
            for chunk in self._stream.read_chunks(self._note_byte):
                with self._changed:
                    if self._is_over:
                        return
                    self._reply.add_chunk(chunk)
                    self._last_chunk = time.monotonic()
                    self._changed.notify()
            is_complete = True
        except Exception as caught:  # noqa: BLE001  whatever it was is raised in the job's thread
            error = caught
        finally:
            with self._changed:
                self._is_complete, self._error, self._is_over = is_complete, error, True
                self._changed.notify()

    def _wait_for_work(self) -> Written | None:
        """What to post now; None once the reply is complete. Raises what ended the stream."""
        with self._changed:
            while not self._is_over:
                now = time.monotonic()
                if self._reply.has_finish_reason and now >= self._last_chunk + FINISH_SECONDS:
                    self._is_over = self._is_complete = True
                    break
                patience_ends = self._find_end_of_patience()
                if now >= patience_ends:
                    self._is_over = True
                    raise BackendUnavailable(f"unfinished after {now - self._started:.0f} s")
                written = self._get_written()
                due = self._poster.find_seconds_until_due(written) if self._poster else None
                if due == 0.0:
                    return written
                self._changed.wait(
                    min(
                        due if due is not None else FINISH_SECONDS,
                        patience_ends - now,
                        FINISH_SECONDS,
                    )
                )
            if self._error is not None:
                raise self._error
            if not self._is_complete:
                raise BackendUnavailable("the stream could not be read")
            return None

    def _note_byte(self) -> None:
        """Any byte is a sign of life, such as a comment while the backend looks for a call."""
        with self._changed:
            self._last_byte = time.monotonic()

    def _find_end_of_patience(self) -> float:
        """When to give up on the backend: at the lease's end, or before it once the text has begun
        and nothing at all follows. A backend that may fall silent has the lease.
        """
        lease_ends = max(
            self._lease.ends - LEASE_MARGIN_SECONDS, self._started + MIN_BACKEND_SECONDS
        )
        if self._may_fall_silent or not self._reply.token_count:
            return lease_ends
        return min(lease_ends, self._last_byte + STALL_SECONDS)

    def _get_written(self) -> Written:
        reply = self._reply
        content = reply.content if self._posts_content else ""
        return Written(content=content, reasoning=reply.reasoning, token_count=reply.token_count)
