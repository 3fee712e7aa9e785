# SPDX-License-Identifier: AGPL-3.0-or-later
"""A client of the front's streams that sees every byte, and may stop reading or hang up at any
moment.
"""

import contextlib
import http.client
import json
import socket
import struct
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any, Self

from sqlalchemy import select

from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.db import transaction
from tests.integration.chat_front import PATIENCE_SECONDS, FrontStack, build_body, wait_until

RECEIVE_BUFFER_BYTES = 64 * 1024  # so that a client that stops reading is felt soon

type Chunk = dict[str, Any]


class OpenStream:
    """One streamed call, read by a thread of its own from the first byte to the last."""

    def __init__(
        self,
        stack: FrontStack,
        *,
        url: str | None = None,
        headers: dict[str, str] | None = None,
        path: str = "/v1/chat/completions",
        body: Chunk | None = None,
        **changes: Any,
    ) -> None:
        self.lines: list[str] = []  # without their ends
        self.status: int | None = None  # once the answer has begun
        self.headers: dict[str, str] = {}
        self.body = b""  # of an answer that is no stream
        self.failure: Exception | None = None
        parts = urllib.parse.urlsplit(url or stack.url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        self._socket = self._connection.sock = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        self._socket.settimeout(PATIENCE_SECONDS)
        self._socket.connect((parts.hostname, parts.port))
        self._may_read = threading.Event()
        self._may_read.set()
        sent = {"authorization": f"Bearer {stack.horde.requester_key}", **(headers or {})}
        body = build_body(stream=True, **changes) if body is None else body
        self._connection.request("POST", path, json.dumps(body), sent)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with contextlib.closing(self._connection.getresponse()) as response:
                self._read_answer(response)
        except (OSError, http.client.HTTPException, ValueError) as failure:
            self.failure = failure.with_traceback(None)  # its frames would keep the socket

    def _read_answer(self, response: http.client.HTTPResponse) -> None:
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.status = response.status
        if not self.headers["content-type"].startswith("text/event-stream"):
            self.body = response.read()
            return
        while self._may_read.wait() and (line := response.readline()):
            self.lines.append(line.decode().removesuffix("\n"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection, as a client does that is gone."""
        self._may_read.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_SECONDS)
        self._connection.close()

    def reset(self) -> None:
        """Hang up so that the server hears of it at once, though it is waiting for room to send."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.hang_up()

    def stop_reading(self) -> None:
        """Leave the connection open and take nothing from it."""
        self._may_read.clear()

    def read_on(self) -> None:
        """Go on reading."""
        self._may_read.set()

    @property
    def data(self) -> list[str]:
        """What the events hold, as text."""
        return [
            line.removeprefix("data: ") for line in list(self.lines) if line.startswith("data: ")
        ]

    @property
    def comments(self) -> list[str]:
        """Comment lines."""
        return [line for line in list(self.lines) if line.startswith(":")]

    @property
    def chunks(self) -> list[Chunk]:
        """The events that are chunks."""
        bodies = [json.loads(text) for text in self.data if text != "[DONE]"]
        return [body for body in bodies if "error" not in body]

    @property
    def deltas(self) -> list[dict[str, Any]]:
        """The delta of each chunk that has one."""
        return [chunk["choices"][0]["delta"] for chunk in self.chunks if chunk["choices"]]

    def join(self, key: str = "content") -> str:
        """The text of all deltas so far."""
        return "".join(delta.get(key) or "" for delta in self.deltas)

    def await_text(self, text: str, key: str = "content") -> None:
        """Return once exactly this text is here."""
        wait_until(lambda: len(self.join(key)) >= len(text) or not self._thread.is_alive())
        assert self.join(key) == text, self.lines

    def await_that(self, holds: Callable[["OpenStream"], object]) -> None:
        """Return once something holds."""
        wait_until(lambda: holds(self))

    def finish(self) -> Self:
        """Read a stream to its proper end."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), self.lines
        assert self.failure is None, self.failure
        assert self.status == 200, self.body
        assert self.data[-1] == "[DONE]", self.lines
        assert self.data.count("[DONE]") == 1
        return self

    def finish_with_error(self) -> dict[str, Any]:
        """The error that ends a stream, which has no finish chunk."""
        self.finish()
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in self.chunks), (
            self.lines
        )
        body = json.loads(self.data[-2])
        assert set(body) == {"error"}, body
        return dict(body["error"])

    def refuse(self) -> tuple[int, dict[str, Any]]:
        """Status and error of a call that is no stream."""
        self._thread.join(PATIENCE_SECONDS)
        assert self.failure is None, self.failure
        assert self.headers["content-type"] == "application/json", self.lines
        body = json.loads(self.body)
        assert set(body) == {"error"}, body
        return self.status or 0, dict(body["error"])


def post_progress(
    stack: FrontStack, job_id: str, *texts: str, start: int = 1, **options: Any
) -> None:
    """Post pieces of a job's text as its worker does."""
    for seq, text in enumerate(texts, start):
        answer = stack.horde.post_progress(job_id, seq, text, **options)
        assert answer.status_code == 200, answer.json


def list_request_ids() -> list[str]:
    """The native requests there are, oldest first."""
    with transaction() as session:
        return [
            str(row)
            for row in session.scalars(select(WaitingPrompt.id).order_by(WaitingPrompt.created))
        ]
