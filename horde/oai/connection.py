# SPDX-License-Identifier: AGPL-3.0-or-later
"""One connection of a client: uvicorn's, which also notices a hang-up behind early bytes and
refuses in JSON.

The library stops reading a socket once bytes of a next request wait for the end of the present one,
and so would never see the client go. Line ends behind a body, and clients that pipeline, are enough
for that. Nor does it bound how slowly headers may come: a byte now and then would hold a connection
for ever. Source: docs/reference/chat_front.md, "Connections", "Waiting" and "Errors".
"""

import asyncio
import json
from typing import Final
from uuid import uuid4

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from horde import metrics
from horde.oai.errors import ErrorAnswer

MAX_EARLY_BYTES: Final = 64 * 1024  # of next requests, while one is served
MAX_SMALL_PIECES: Final = 4096  # of a body, while they hold less than the following on average
SMALL_PIECE_BYTES: Final = 32
# For whole headers, and for what a client still sends of a body that was answered.
HEAD_SECONDS: Final = 20.0
_INVALID: Final = ErrorAnswer(
    status=400,
    code="invalid_http",
    message="This is not a valid HTTP request. Send HTTP/1.1 with one length of the body.",
)
_INCOMPLETE: Final = ErrorAnswer(
    status=400,
    code="incomplete_headers",
    message="The headers of the request did not arrive in time. Send the request again.",
)
# States of a client that has sent its request.
_WHOLE: Final = frozenset({h11.DONE, h11.MUST_CLOSE})


class _StrictReader(h11.Connection):
    """Refuses what costs far more to read than to send, and a body of two lengths, which a proxy
    may read differently.
    """

    _pieces = _bytes = 0  # of the present body

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("a body of two lengths")
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._bytes += len(event.data)
            if self._pieces > MAX_SMALL_PIECES and self._bytes < self._pieces * SMALL_PIECE_BYTES:
                raise h11.RemoteProtocolError("a body in crumbs")
        return event


class FrontConnection(H11Protocol):
    """HTTP/1.1 as `uvicorn.Config(http=...)` takes it."""

    _early = b""
    _timer: asyncio.TimerHandle | None = None  # runs while a part of a request is waited for
    # That part, as the parser's state: headers, or the rest of a body that nobody reads any more.
    _awaited: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        self.conn = _StrictReader(h11.SERVER)
        super().connection_made(transport)
        self._hold_to_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._wait_for(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those behind a request that is still served wait here, and the socket goes on
        being read.
        """
        if not self._is_serving_a_whole_request():
            super().data_received(data)
            self._hold_to_time()
            return
        self._early += data
        if len(self._early) > MAX_EARLY_BYTES:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Go on with what came early."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._hold_to_time()
        # Blank lines before a request mean nothing.
        early, self._early = self._early.lstrip(b"\r\n"), b""
        if early and not self.transport.is_closing():
            self.data_received(early)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read as HTTP; `msg` is the library's word for it, which is in its
        log.
        """
        self._refuse(_INVALID)

    def _refuse(self, error: ErrorAnswer) -> None:
        metrics.oai_errors.add(1, {"code": error.code, "phase": "request", "form": "none"})
        # Else an answer is out, or on its way.
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            body = json.dumps(error.build_body(), separators=(",", ":")).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"x-request-id", f"req_{uuid4().hex}".encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(
                status_code=error.status, headers=headers, reason=b"Bad Request"
            )
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _is_serving_a_whole_request(self) -> bool:
        return (
            self.cycle is not None
            and not self.cycle.response_complete
            and self.conn.their_state in _WHOLE
        )

    def _hold_to_time(self) -> None:
        """Bound the time in which the part of a request that has to come now is complete; its bytes
        give it no more. Between two requests the library ends a silence.
        """
        theirs = self.conn.their_state
        is_answered = self.cycle is not None and self.cycle.response_complete
        is_awaited = theirs is h11.IDLE or (theirs is h11.SEND_BODY and is_answered)
        self._wait_for(theirs if is_awaited and not self.transport.is_closing() else None)

    def _wait_for(self, part: object) -> None:
        """Start the time for another part; None waits for nothing."""
        if part is self._awaited:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._awaited, self._timer = (
            part,
            None if part is None else self.loop.call_later(HEAD_SECONDS, self._stop_waiting),
        )

    def _stop_waiting(self) -> None:
        """End the connection; with a word, if the client had begun to ask."""
        if self._awaited is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(_INCOMPLETE)
        self.transport.close()
