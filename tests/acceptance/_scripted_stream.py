# SPDX-License-Identifier: AGPL-3.0-or-later
"""A horde that takes progress posts and a backend that streams, both as a test scripts them, over
real sockets.
"""

import contextlib
import json
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAIT_SECONDS = 180  # on a busy machine
KEY, MODEL, JOB_ID = "a-key-of-the-owner", "scripted", "job-1"
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "rep_pen": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}
NO_JOB = {
    "id": None,
    "ids": [],
    "payload": {},
    "skipped": {},
    "model": None,
    "messages": [],
    "ttl": None,
}

type Post = dict[str, Any]
type Answer = tuple[int, dict[str, Any] | bytes] | None
"""Status and body, bytes for a page that is no JSON; None hangs up without an answer."""


class Server(ThreadingHTTPServer):
    """A server on a free port of loopback, in threads of its own while the block runs."""

    daemon_threads = True
    block_on_close = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Any]:
        with self:
            thread = threading.Thread(target=lambda: self.serve_forever(poll_interval=0.02))
            thread.start()
            try:
                yield self
            finally:
                self.shutdown()
                thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read_json(self) -> dict[str, Any]:
        return dict(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}"))

    def answer(self, status: int, body: dict[str, Any] | bytes) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "text/html" if isinstance(body, bytes) else "application/json"
        )
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


class StreamingHorde(Server):
    """Hands out jobs and accepts progress as the contract says, unless ``answer_post`` has another
    answer.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HordeHandler)
        self.jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.submits: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.posts: list[Post] = []
        """Every post as it came, repeated ones too."""
        self.post_times: list[float] = []
        self.accepted: list[Post] = []
        self.answer_post: Callable[[Post], Answer | bool] = lambda _: True
        """True for the usual answer; anything else is sent as it is, None after having taken the
        post.
        """
        self.lock = threading.Lock()

    def hand_out(self, *, ttl: int = 150, **payload: Any) -> None:
        """Queue a streamed chat job."""
        messages = [{"role": "user", "content": "Name one colour."}]
        body = {
            "messages": messages,
            **SAMPLING,
            "n": 1,
            "max_length": 200,
            "max_context_length": 4096,
        }
        body |= {"stream_progress": True, **payload}
        self.jobs.put(
            {**NO_JOB, "id": JOB_ID, "ids": [JOB_ID], "ttl": ttl, "chat": True, "payload": body}
        )

    def wait_for_submit(self) -> dict[str, Any]:
        return self.submits.get(timeout=WAIT_SECONDS)

    def has_accepted(self, count: int) -> Callable[[], bool]:
        """A step of a backend: go on once so many posts were accepted."""
        return lambda: len(self.accepted) >= count

    def post_each(self, *chunks: bytes) -> list["Step"]:
        """Steps of a backend that sends each of these chunks once the text of the one before was
        accepted.
        """
        return [
            step
            for count, piece in enumerate(chunks, 1)
            for step in (piece, self.has_accepted(count))
        ]

    def wait_for_posts(self, count: int) -> None:
        wait_until(lambda: len(self.posts) >= count)

    def join(self, key: str = "content") -> str:
        """The text of the accepted posts."""
        return "".join(post["delta"].get(key, "") for post in self.accepted)

    def take(self, post: Post) -> Answer:
        """What the contract answers."""
        expected = len(self.accepted) + 1
        if post["seq"] == expected:
            self.accepted.append(post)
        elif not (self.accepted and post == self.accepted[-1]):
            return 409, {
                "rc": "ChatProgressOutOfSequence",
                "message": f"Expected seq {expected}.",
                "expected_seq": expected,
            }
        return 200, {"accepted_seq": post["seq"], "cancelled": False}


class HordeHandler(Handler):
    server: StreamingHorde

    def do_POST(self) -> None:
        body = self.read_json()
        assert self.headers["apikey"] == KEY
        if self.path == "/api/v2/generate/text/pop":
            try:
                self.answer(200, {**self.server.jobs.get_nowait(), "model": body["models"][0]})
            except queue.Empty:
                self.answer(200, NO_JOB)
        elif self.path == "/api/v2/generate/text/progress":
            with self.server.lock:
                self.server.posts.append(body)
                self.server.post_times.append(time.monotonic())
                scripted = self.server.answer_post(body)
                answer = (
                    self.server.take(body) if scripted is True or scripted is None else scripted
                )
            if scripted is None:  # taken, and the answer is lost
                self.close_connection = True
                return
            assert isinstance(answer, tuple)
            self.answer(*answer)
        else:
            self.server.submits.put(body)
            self.answer(200, {"reward": 1.5})


Step = bytes | float | threading.Event | Callable[[], object]


class StreamingBackend(Server):
    """Answers each chat with the steps of its script: bytes are sent, seconds slept, events and
    conditions waited for.
    """

    def __init__(
        self,
        steps: Sequence[Step] = (),
        *,
        content_type: str = "text/event-stream",
        status: int = 200,
        context_tokens: int = 4096,
    ) -> None:
        super().__init__(("127.0.0.1", 0), BackendHandler)
        self.context_tokens = context_tokens
        self.steps, self.content_type, self.status = steps, content_type, status
        self.requests: list[dict[str, Any]] = []
        self.was_hung_up = threading.Event()
        """The bridge closed the connection before the script was over."""


class BackendHandler(Handler):
    server: StreamingBackend

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, {"data": [{"id": MODEL, "max_model_len": self.server.context_tokens}]})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        self.server.requests.append(self.read_json())
        self.close_connection = True
        self.send_response(self.server.status)
        self.send_header("Content-Type", self.server.content_type)
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for step in self.server.steps:
                self.take(step)
        except (ConnectionError, TimeoutError):
            self.server.was_hung_up.set()

    def take(self, step: Step) -> None:
        if isinstance(step, bytes):
            self.wfile.write(step)
            self.wfile.flush()
            return
        is_met = step.is_set if isinstance(step, threading.Event) else step
        ends = time.monotonic() + (WAIT_SECONDS if callable(is_met) else is_met)
        while time.monotonic() < ends and not (callable(is_met) and is_met()):
            if select.select([self.connection], [], [], 0.01)[0]:
                # Nothing more is sent on this connection, so this is its end.
                raise ConnectionResetError


def chunk(finish_reason: str | None = None, **delta: Any) -> bytes:
    """One chunk as backends send it."""
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def event(body: object) -> bytes:
    return (
        b"data: " + json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n\n"
    )


USAGE = event({"choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": 5}})
DONE = b"data: [DONE]\n\n"
END = chunk("stop") + USAGE + DONE


def wait_until(condition: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
