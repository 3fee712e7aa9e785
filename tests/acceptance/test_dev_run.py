# SPDX-License-Identifier: AGPL-3.0-or-later
"""``dev.py run`` and ``stop`` as a newcomer types them: from a clone, and two stacks side by
side.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools.processes import find_free_ports, read_start_stamp
from devtools.services import Services
from tests.acceptance._stack import wait_until

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
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"apikey": key}), timeout=30
    ) as answer:
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
    assert [
        model["name"]
        for model in get(f"{first['api_url']}/v2/status/models?type=text", first["key"])
    ] == [first["model"]]
    assert get(f"{second['api_url']}/v2/status/models?type=text", second["key"]) == []
    assert get(f"{first['api_url']}/v2/find_user", first["key"])["trusted"] is True
    assert first["processes"].keys() == {"weed", "valkey", "postgres", "api", "front", "worker"}
    assert first["front_url"] != second["front_url"]
    assert first["front_url"].endswith("/v1")  # what OpenAI's clients take as their address
    with urllib.request.urlopen(first["page_url"], timeout=30) as page:
        assert b"<!doctype html>" in page.read()
    with urllib.request.urlopen(first["api_url"].removesuffix("api"), timeout=30) as site:
        assert f'href="{first["page_url"].rstrip("/")}"'.encode() in site.read()
    assert [model["id"] for model in get(f"{first['front_url']}/models", "")["data"]] == [
        first["model"]
    ]
    assert get(f"{second['front_url']}/models", "")["data"] == []

    # The worker knows the API's address alone, and waits at the front.
    worker_log = Path(first["logs"]) / "worker.log"
    wait_until(lambda: "horde.bridge.waits_at" in worker_log.read_text(), SECONDS, log=worker_log)

    # One supervisor for a state.
    assert dev("run", "--state", str(states[0]), "--port", "7999").returncode == 1

    assert dev("stop", "--state", str(states[0])).returncode == 0
    assert not (states[0] / "run.json").exists()
    assert [
        name for name, pid in first["processes"].items() if read_start_stamp(pid) is not None
    ] == []
    assert get(f"{second['api_url']}/v2/status/heartbeat", second["key"])

    again, _ = start(states[0], "--no-worker")
    assert again["key"] == first["key"]
    assert get(f"{again['api_url']}/v2/find_user", again["key"])["username"] == first["user"]


CLONE_SECONDS = 600  # without a cache of packages they are downloaded
# Of this run and its environment, which a newcomer has not.
OUR_VARIABLES = (
    "VIRTUAL_ENV",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHON_DOTENV_DISABLED",
    "PYDANTIC_DISABLE_PLUGINS",
)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="nothing to clone")
@pytest.mark.skipif(
    not all(map(shutil.which, ("git", "curl", "python3"))),
    reason="a newcomer has git, curl and python3",
)
def test_a_clone_answers_its_printed_requests_and_leaves_nothing_running(tmp_path: Path) -> None:
    clone, port = tmp_path / "clone", find_free_ports(1)[0]
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True, timeout=SECONDS)
    environment = {name: value for name, value in os.environ.items() if name not in OUR_VARIABLES}
    environment["PATH"] = os.pathsep.join(
        folder
        for folder in environment["PATH"].split(os.pathsep)
        if Path(folder) != Path(sys.executable).parent
    )

    def run(*words: str) -> str:
        done = subprocess.run(
            words,
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            timeout=CLONE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    state = clone / ".dev" / "state"
    try:
        said = run(
            "python3", "dev.py", "run", "--detach", "--port", str(port), "--state", str(state)
        )
        processes = json.loads((state / "run.json").read_text())["processes"]
        python = said[
            said.index(".venv/bin/python <<") : said.index("END\n", said.index("\nEND\n")) + 4
        ]
        assert run("sh", "-c", python).strip()
        ask, follow = [
            line.strip() for line in said.splitlines() if line.strip().startswith("curl ")
        ]
        accepted = json.loads(run("sh", "-c", ask))
        deadline = time.monotonic() + SECONDS
        while not (
            status := json.loads(run("sh", "-c", follow.replace("ID", shlex.quote(accepted["id"]))))
        )["done"]:
            assert time.monotonic() < deadline, status
            time.sleep(0.5)
        assert status["generations"][0]["text"]
    finally:
        run("python3", "dev.py", "stop", "--state", str(state))
        Services(state, {}).remove()
    assert [name for name, pid in processes.items() if read_start_stamp(pid) is not None] == []
    assert find_processes_of(clone) == []


def find_processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that name a folder (where the system tells)."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        if any(str(folder) in word for word in words):
            lines.append(" ".join(words))
    return lines
