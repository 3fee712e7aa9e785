# SPDX-License-Identifier: AGPL-3.0-or-later
"""``dev.py run`` and ``stop`` as a newcomer types them: two stacks side by side, stopped and started again."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools.processes import find_free_ports, read_start_stamp
from devtools.services import Services

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 180  # a busy machine; an idle one needs fifteen


def dev(*words: str) -> subprocess.CompletedProcess[str]:
    """Run dev.py to its end."""
    command = [sys.executable, str(ROOT / "dev.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)


def start(state: Path, *words: str) -> tuple[dict[str, Any], str]:
    """Start a stack in the background. Returns run.json and what was printed."""
    port = str(find_free_ports(1)[0])
    answer = dev("run", "--detach", "--state", str(state), "--port", port, *words)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return json.loads((state / "run.json").read_text()), answer.stdout


def get(url: str, key: str) -> Any:
    """The JSON of a GET."""
    with urllib.request.urlopen(urllib.request.Request(url, headers={"apikey": key}), timeout=30) as answer:
        return json.load(answer)


@pytest.fixture
def states(tmp_path: Path) -> Iterator[list[Path]]:
    """Two state folders, whose stacks are stopped at the end."""
    folders = [tmp_path / "first", tmp_path / "second"]
    yield folders
    for folder in folders:
        dev("stop", "--state", str(folder))
        Services(folder, {}).remove()


@pytest.mark.slow
def test_two_stacks_run_side_by_side_and_start_again(states: list[Path], tiny_backend: str) -> None:
    first, said = start(states[0], "--backend", tiny_backend)
    second, _ = start(states[1], "--no-worker")

    # The printed request is whole, and the stacks do not know each other.
    assert f"{first['api_url']}/v2/generate/chat/async" in said
    assert first["api_url"].endswith("/api")
    assert [model["name"] for model in get(f"{first['api_url']}/v2/status/models?type=text", first["key"])] == [first["model"]]
    assert get(f"{second['api_url']}/v2/status/models?type=text", second["key"]) == []
    assert get(f"{first['api_url']}/v2/find_user", first["key"])["trusted"] is True
    assert first["processes"].keys() == {"weed", "valkey", "postgres", "api", "worker"}

    assert dev("run", "--state", str(states[0]), "--port", "1").returncode == 1  # one supervisor for a state

    assert dev("stop", "--state", str(states[0])).returncode == 0
    assert not (states[0] / "run.json").exists()
    assert [name for name, pid in first["processes"].items() if read_start_stamp(pid) is not None] == []
    assert get(f"{second['api_url']}/v2/status/heartbeat", second["key"])

    again, _ = start(states[0], "--no-worker")
    assert again["key"] == first["key"]
    assert get(f"{again['api_url']}/v2/find_user", again["key"])["username"] == first["user"]
