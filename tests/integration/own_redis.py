# SPDX-License-Identifier: AGPL-3.0-or-later
"""A Redis of a test's own, to be killed, frozen and started again, and what the horde writes for
streaming clients.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from devtools.processes import find_free_ports
from devtools.valkey import find_valkey_server

START_SECONDS = 60


class OwnRedis:
    """One server on one port, empty whenever it starts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = find_free_ports(1)[0]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The database of the chat streams."""
        return f"redis://127.0.0.1:{self.port}/7"

    def start(self, *more: str) -> None:
        """Return once it answers; `more` are words of its command line."""
        words = [
            "--bind",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        with (self._folder / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(
                [find_valkey_server(), *words, *more], cwd=self._folder, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with Redis(port=self.port, socket_timeout=1) as client:
                return bool(client.ping())
        except RedisError:
            return False

    def run(self, *words: str | int) -> Any:
        """The answer of a command, as it is."""
        with Redis(port=self.port, socket_timeout=5, decode_responses=True) as client:
            return client.execute_command(*words)  # type: ignore[no-untyped-call]

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it answer nothing, with its connections open."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)


@contextmanager
def own_redis(folder: Path) -> Iterator[OwnRedis]:
    """A running server, gone at the end whatever a test did to it."""
    redis = OwnRedis(folder)
    redis.start()
    try:
        yield redis
    finally:
        redis.kill()


def add_entry(client: Redis, request_id: str, seq: int, content: str = "", **fields: Any) -> None:
    """An entry as an accepted post of a worker leaves it."""
    values = {
        "gen": "generation",
        "seq": seq,
        "content": content,
        "worker": "worker",
        "model": "a/model",
    } | fields
    client.xadd(
        f"horde:chat:stream:{request_id}",
        {key: value for key, value in values.items() if value is not None},
    )


def add_end(client: Redis, request_id: str, generation: str = "generation") -> None:
    """The end of a generation that brings no reply."""
    client.xadd(f"horde:chat:stream:{request_id}", {"gen": generation, "ended": 1})
