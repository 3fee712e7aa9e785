# SPDX-License-Identifier: AGPL-3.0-or-later
"""One connection of a client: uvicorn's, which also notices a hang-up behind early bytes and refuses in JSON.

The library stops reading a socket once bytes of a next request wait for the end of the present one, and so would never
see the client go. Line ends behind a body, and clients that pipeline, are enough for that.
Source: docs/reference/chat_front.md, "Waiting" and "Errors".
"""

import json
from typing import Final
from uuid import uuid4

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from horde import metrics
from horde.oai.errors import ErrorAnswer

MAX_EARLY_BYTES: Final = 64 * 1024  # of next requests, while one is served
_INVALID: Final = ErrorAnswer(status=400, code="invalid_http", message="This is not a valid HTTP request.")
_WHOLE: Final = frozenset({h11.DONE, h11.MUST_CLOSE})  # states of a client that has sent its request


class FrontConnection(H11Protocol):
    """HTTP/1.1 as `uvicorn.Config(http=...)` takes it."""

    _early = b""

    def data_received(self, data: bytes) -> None:
        """Take bytes; those behind a request that is still served wait here, and the socket goes on being read."""
        if not self._is_serving_a_whole_request():
            super().data_received(data)
            return
        self._early += data
        if len(self._early) > MAX_EARLY_BYTES:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Go on with what came early."""
        super().on_response_complete()
        early, self._early = self._early.lstrip(b"\r\n"), b""  # blank lines before a request mean nothing
        if early and not self.transport.is_closing():
            self.data_received(early)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read as HTTP; `msg` is the library's word for it, which is in its log."""
        metrics.oai_errors.add(1, {"code": _INVALID.code, "phase": "request"})
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:  # else an answer is out, or on its way
            body = json.dumps(_INVALID.build_body(), separators=(",", ":")).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"x-request-id", f"req_{uuid4().hex}".encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=_INVALID.status, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _is_serving_a_whole_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and self.conn.their_state in _WHOLE
