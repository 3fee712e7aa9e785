# SPDX-License-Identifier: AGPL-3.0-or-later
"""Claude Code, as people install it, doing a task with its tools on a horde: front, API and a
worker whose replies are scripted. It is given an address and a key, and reaches nothing else.
"""

import itertools
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from devtools import clients
from tests.acceptance._stack import Account
from tests.clients._worker import SteppingWorker, run_worker
from tests.clients.conftest import Stack, require

SECONDS = 240
AGENT_MODEL = "tests/agents-model"
TASK = "How many lines has fruits.txt? Write the number into count.txt."
DONE = "fruits.txt has 3 lines."


class AgentWorker(SteppingWorker):
    """Reads a file, writes another, and says so."""

    def __init__(self, api_url: str, key: str, folder: Path) -> None:
        steps = [
            ("Read", {"file_path": str(folder / "fruits.txt")}),
            ("Write", {"file_path": str(folder / "count.txt"), "content": "3\n"}),
        ]
        super().__init__(api_url, key, AGENT_MODEL, steps, DONE)


class ClosedDoor:
    """A proxy that lets nothing through and counts who knocked."""

    def __init__(self, listener: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.asked: list[bytes] = []
        self._listener = listener

    def run(self) -> None:
        """Refuse until the listener is closed."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                self.asked.append(connection.recv(1024).split(b"\r\n")[0])
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


@contextmanager
def closed_door() -> Iterator[ClosedDoor]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = ClosedDoor(listener)
        thread = threading.Thread(target=door.run, daemon=True)
        thread.start()
        try:
            yield door
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def build_environment(stack: Stack, door: ClosedDoor, home: Path) -> dict[str, str]:
    """An address, a key and a model; nothing of the machine's own settings."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home / "settings"),
        "ANTHROPIC_BASE_URL": stack.front.url,
        "ANTHROPIC_AUTH_TOKEN": stack.client.key,
        "ANTHROPIC_MODEL": AGENT_MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": AGENT_MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": AGENT_MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "HTTP_PROXY": door.url,
        "HTTPS_PROXY": door.url,
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture(scope="module")
def program() -> Path:
    return require(clients.require_claude_code)


@pytest.fixture(scope="module")
def owner(stack: Stack) -> Account:
    return stack.horde.create_account("agents' owner")


def run_agent(
    program: Path, stack: Stack, folder: Path, *words: str
) -> tuple[list[dict[str, Any]], ClosedDoor]:
    """What it printed, event by event, and who was asked beside the front."""
    home = folder / "home"
    home.mkdir()
    with closed_door() as door:
        done = subprocess.run(
            [
                *(str(program), "-p", TASK, "--output-format", "stream-json", "--verbose"),
                *("--allowedTools", "Read,Write", "--max-turns", "8"),
                *words,
            ],
            cwd=folder,
            env=build_environment(stack, door, home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines()], door


def test_claude_code_does_a_task_with_its_tools(
    program: Path, stack: Stack, owner: Account, tmp_path: Path
) -> None:
    (tmp_path / "fruits.txt").write_text("apple\npear\nplum\n")
    with run_worker(AgentWorker(stack.horde.api.url, owner.key, tmp_path)) as worker:
        events, door = run_agent(program, stack, tmp_path)
    assert (tmp_path / "count.txt").read_text() == "3\n"
    result = events[-1]
    assert (result["type"], result["is_error"], result["result"]) == ("result", False, DONE)
    assert door.asked == []
    last = [payload for payload in worker.payloads if payload.get("tools")][-1]
    roles = [message["role"] for message in last["messages"]]
    assert roles.count("tool") == 2
    assert roles[0] == "system"
    # Neighbours of one role were joined, whatever the agent put between them.
    assert all(one != other or one == "tool" for one, other in itertools.pairwise(roles))
    assert "apple" in next(m["content"] for m in last["messages"] if m["role"] == "tool")
    assert "x-anthropic-billing-header" not in json.dumps(worker.payloads)
