# SPDX-License-Identifier: AGPL-3.0-or-later
"""What stands around a front in a benchmark: a native API that says what it is told, and clients
that read streams.

All of it runs on one loop of this process; the front is a process of its own, so that its figures
are its own.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from benchmarks._bodies import MODEL
from benchmarks._stack import ROOT, START_SECONDS, STOP_SECONDS, build_environment
from devtools.processes import find_free_ports

WORKER_ID = "00000000-0000-0000-0000-000000000001"
WAITING = {
    "finished": 0,
    "processing": 1,
    "restarted": 0,
    "waiting": 0,
    "done": False,
    "faulted": False,
    "wait_time": 1,
    "queue_position": 0,
    "kudos": 10,
    "is_possible": True,
    "eligible_workers": 1,
    "eligible_worker_threads": 1,
    "might_stall": False,
    "generations": [],
}


@contextlib.asynccontextmanager
async def serving(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """A server on loopback that many may connect to at once. Yields its port."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0.1)  # for the ends of connections whose client is gone


@dataclass
class ScriptedApi:
    """The calls of the native API that a front makes, answered from memory: a request is done once
    it has a text.
    """

    texts: dict[str, str | None] = field(default_factory=dict)  # by request id
    port: int = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedApi"]:
        """Serve on loopback."""
        async with serving(self._serve) as self.port:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, path, _ = head.split(" ", 2)
                length = next(
                    (
                        int(line[15:])
                        for line in head.split("\r\n")
                        if line.lower().startswith("content-length:")
                    ),
                    0,
                )
                await reader.readexactly(length)
                status, body = self._answer(method, path)
                data = json.dumps(body).encode()
                answer = (
                    f"HTTP/1.1 {status} OK\r\nContent-Type: application/json\r\nContent-Length:"
                    f" {len(data)}\r\n\r\n"
                )
                writer.write(answer.encode() + data)
        writer.close()

    def _answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        if method == "POST":
            request_id = str(uuid4())
            self.texts[request_id] = None
            return 202, {"id": request_id, "kudos": 10}
        request_id = path.rpartition("/")[2]
        text = self.texts.get(request_id)
        if method == "DELETE":
            self.texts.pop(request_id, None)
        return 200, WAITING if text is None else build_done(text)


def build_done(text: str) -> dict[str, Any]:
    """The status of a request with its reply."""
    generation = {
        "text": text,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "native_finish_reason": None,
        "prompt_tokens": 20,
        "completion_tokens": 20,
        "reasoning_tokens": None,
        "charge_basis": "output_estimate",
        "queue_wait_seconds": 0.1,
        "worker_id": WORKER_ID,
        "worker_name": "scripted",
        "model": MODEL,
        "state": "ok",
        "seed": 0,
        "gen_metadata": [],
    }
    return WAITING | {"finished": 1, "processing": 0, "done": True, "generations": [generation]}


@contextlib.contextmanager
def running_front(
    native_url: str,
    redis_url: str,
    log: Path,
    *,
    streams: int,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[int, int]]:
    """`horde front` as an operator runs it. Yields its port and process id; raises RuntimeError
    when it does not start.
    """
    port = find_free_ports(1)[0]
    own = {
        "HORDE_OAI_PORT": str(port),
        "HORDE_OAI_NATIVE_URL": native_url,
        "HORDE_OAI_REDIS_URL": redis_url,
        "HORDE_OAI_MAX_OPEN_REQUESTS": str(2 * streams + 100),
        "HORDE_OAI_SHUTDOWN_SECONDS": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "horde.cli.main", "front"],
            cwd=ROOT,
            env=build_environment(os.environ["DATABASE_URL"]) | own | dict(settings),
            stdout=output,
            stderr=output,
        )
    try:
        wait_for_health(process, port, log)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def wait_for_health(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the front answers; raises RuntimeError with the end of its log."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the front does not start\n{log.read_text()[-4000:]}")
        time.sleep(0.1)


def read_memory_kib(process_id: int) -> int:
    """What a process alone would give back, in KiB."""
    for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1])
    return 0


@dataclass(frozen=True)
class FormOfStreams:
    """A form of the front as a benchmark speaks it: what comes before a chunk's text, and with what
    its last line begins.
    """

    name: str
    path: str
    text_mark: bytes
    end_mark: bytes
    messages_key: str = "messages"
    length_key: str = "max_tokens"

    def build_body(self, *, is_stream: bool) -> dict[str, Any]:
        """The plainest call."""
        return {
            "model": MODEL,
            self.messages_key: [{"role": "user", "content": "Count."}],
            self.length_key: 64,
            "stream": is_stream,
        }


CHAT = FormOfStreams("chat", "/v1/chat/completions", b'"content":"', b"data: [DONE]")
MESSAGES = FormOfStreams("messages", "/v1/messages", b'"text":"', b"event: message_stop")
RESPONSES = FormOfStreams(
    *("responses", "/v1/responses", b'"delta":"', b"event: response.completed"),
    messages_key="input",
    length_key="max_output_tokens",
)


class StreamClient:
    """One client that reads a stream and notes when each chunk that names its moment of posting
    came.
    """

    def __init__(self, port: int, form: FormOfStreams = CHAT) -> None:
        self.port, self.form = port, form
        self.request_id = ""
        self.delays: list[float] = []  # seconds from post to chunk
        self.has_finished = False

    async def run(self, is_open: asyncio.Event) -> None:
        """Ask, and read to the end. `is_open` is set once the answer has begun."""
        body = json.dumps(self.form.build_body(is_stream=True)).encode()
        head = (
            f"POST {self.form.path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer"
            " 0000000000\r\nContent-Type: application/json\r\nContent-Length:"
            f" {len(body)}\r\nConnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024 * 1024)
        try:
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
            if " 200 " not in answer.partition("\r\n")[0]:
                raise RuntimeError(answer)
            self.request_id = answer.partition("x-horde-request-id: ")[2].partition("\r\n")[0]
            is_open.set()
            while line := await reader.readline():
                self._take(line)
        finally:
            writer.close()

    def _take(self, line: bytes) -> None:
        now = time.perf_counter()
        _, found, text = line.partition(self.form.text_mark + b"@")
        if found:
            # Entries read in one go share a chunk.
            stamps = text.partition(b'"')[0].split(b"@")
            self.delays += [now - float(stamp) for stamp in stamps if stamp]
        self.has_finished |= line.startswith(self.form.end_mark)
