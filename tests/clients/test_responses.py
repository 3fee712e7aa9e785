# SPDX-License-Identifier: AGPL-3.0-or-later
"""The Responses form with the libraries people use, and agents at their tasks: Codex CLI and the
Agents SDK, each against a whole horde with a worker that takes one step after the other.

Numbers are those of the form's checklist.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from devtools import clients
from tests.acceptance._stack import Account, wait_until
from tests.clients._worker import MODEL, PERSON, PIECES, WEATHER, SteppingWorker, run_worker
from tests.clients.conftest import Stack, require
from tests.clients.test_libraries import (
    REPLY,
    SECONDS,
    TOKENS,
    Seen,
    require_content,
    run_javascript,
    run_python,
    run_script,
)

LIFECYCLE = ["response.created", "response.in_progress"]
ITEM = [
    *("response.output_item.added", "response.content_part.added", "response.output_text.done"),
    *("response.content_part.done", "response.output_item.done", "response.completed"),
]
AGENTS_MODEL = "tests/agents-sdk-model"
CODEX_MODEL = "tests/codex-model"
ANSWER = "It is 21 degrees in Paris at noon."
DONE = "fruits.txt has 3 lines."
PATCH = "*** Begin Patch\n*** Add File: count.txt\n+3\n*** End Patch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scripts run: nothing is there that a library could read."""
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def openai_python(client_python: Path, stack: Stack, folder: Path) -> Seen:
    return run_python(client_python, "openai_responses.py", stack, folder)


@pytest.fixture(scope="module")
def openai_javascript(node: tuple[Path, Path], stack: Stack) -> Seen:
    return run_javascript(node, "openai_responses.mjs", stack)


@contextmanager
def stepping_worker(
    stack: Stack, model: str, steps: list[tuple[str, dict[str, Any]]], last: str
) -> Iterator[SteppingWorker]:
    """A worker of its own for an agent, with a context that holds what agents say at first."""
    owner: Account = stack.horde.create_account(model.replace("/", " "))
    with run_worker(SteppingWorker(stack.horde.api.url, owner.key, model, steps, last)) as worker:
        yield worker


def test_openai_python_responds_with_all_fields(openai_python: Seen) -> None:
    reply = require_content(openai_python, "create")
    assert reply == {
        "content": REPLY,
        "status": "completed",
        "tokens": TOKENS,
        "model": MODEL,
        "worker": "answering worker",
        "has_request_id": True,
    }


def test_openai_python_streams_a_response(openai_python: Seen) -> None:
    reply = require_content(openai_python, "stream")
    assert (reply["kinds"], reply["tokens"]) == ([*LIFECYCLE, *ITEM], TOKENS)
    require_content(openai_python, "asynchronous")
    assert "response.completed" in require_content(openai_python, "stream_helper")["kinds"]


def test_openai_python_brings_the_output_of_a_call(openai_python: Seen) -> None:
    reply = require_content(openai_python, "tools", WEATHER)
    assert (reply["name"], reply["arguments"]) == ("get_weather", {"city": "Paris"})


def test_openai_python_parses_a_typed_response(openai_python: Seen) -> None:
    assert openai_python["structured"] == openai_python["structured_stream"] == PERSON


def test_openai_python_sends_reasoning_back(openai_python: Seen) -> None:
    reply = require_content(openai_python, "reasoning", "Blue.")
    assert (reply["reasoning"], reply["again"]) == ("The sky comes to mind.", REPLY)


def test_openai_python_raises_the_errors_of_responses(openai_python: Seen) -> None:
    assert openai_python["errors"] == {
        "wrong_key": [401, "invalid_api_key", None],
        "unknown_model": [404, "model_not_found", "model"],
        "unsupported": [400, "unsupported_parameter", "top_logprobs"],
        "failed": [502, "generation_failed", None],
        "lost": [503, "response_store_unavailable", "previous_response_id"],
    }


def test_leaving_a_streamed_response_cancels_its_request(openai_python: Seen, stack: Stack) -> None:
    left = openai_python["cancel"]
    assert str(left["content"]).startswith(PIECES[0][0]) or left["content"] == "One,"
    wait_until(lambda: stack.is_cancelled(left["request_id"]))


def test_openai_javascript_responds_and_streams(openai_javascript: Seen) -> None:
    reply = require_content(openai_javascript, "create")
    assert reply == {
        "content": REPLY,
        "status": "completed",
        "tokens": TOKENS,
        "worker": "answering worker",
        "has_request_id": True,
    }
    assert require_content(openai_javascript, "stream")["kinds"] == [*LIFECYCLE, *ITEM]
    require_content(openai_javascript, "stream_helper")


def test_openai_javascript_calls_and_parses(openai_javascript: Seen) -> None:
    reply = require_content(openai_javascript, "tools", WEATHER)
    assert (reply["name"], reply["arguments"]) == ("get_weather", {"city": "Paris"})
    assert openai_javascript["structured"] == PERSON
    assert openai_javascript["errors"] == {
        "wrong_key": ["AuthenticationError", 401, "invalid_api_key", None],
        "unknown_model": ["NotFoundError", 404, "model_not_found", "model"],
        "unsupported": ["BadRequestError", 400, "unsupported_parameter", "top_logprobs"],
        "failed": ["InternalServerError", 502, "generation_failed", None],
    }
    assert openai_javascript["cancel"]["content"] == "One,"


def test_89_the_agents_sdk_finishes_a_run(client_python: Path, stack: Stack, folder: Path) -> None:
    steps = [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {"city": "Paris"}),
        ("transfer_to_writer", {}),
    ]
    with stepping_worker(stack, AGENTS_MODEL, steps, ANSWER):
        script = Path(__file__).with_name("scripts") / "openai_agents.py"
        environment = stack.build_environment() | {"HORDE_MODEL": AGENTS_MODEL}
        seen = run_script([str(client_python), str(script)], stack, folder, environment)
    for scenario in ("whole", "streamed"):
        run = require_content(seen, scenario, ANSWER)
        assert run["asked"] == [["get_weather", "Paris"], ["get_time", "Paris"]]
        assert (run["agent"], run["tokens"]) == ("Writer", 4 * TOKENS)


# What Codex has to be told of a model that it does not know, so that it offers its patch tool.
CATALOG_ENTRY = {
    "slug": CODEX_MODEL,
    "display_name": CODEX_MODEL,
    "base_instructions": "You are a coding agent. Edit files with apply_patch.",
    "apply_patch_tool_type": "freeform",
    "shell_type": "unified_exec",
    "context_window": 32768,
    "truncation_policy": {"mode": "tokens", "limit": 10000},
    "supported_reasoning_levels": [],
    "support_verbosity": False,
    "experimental_supported_tools": [],
    "visibility": "list",
    "supported_in_api": True,
    "priority": 1,
}


def write_settings(home: Path, stack: Stack) -> None:
    """An address, a model, what Codex has to know of it, and the name of the variable with the
    key.
    """
    home.mkdir()
    (home / "models.json").write_text(json.dumps({"models": [CATALOG_ENTRY]}))
    (home / "config.toml").write_text(
        f"""
model = "{CODEX_MODEL}"
model_provider = "horde"
model_catalog_json = "{home / "models.json"}"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.horde]
name = "AI Horde"
base_url = "{stack.front.url}/v1"
env_key = "HORDE_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
    )


def test_88_codex_finishes_a_task(stack: Stack, tmp_path: Path) -> None:
    codex = require(clients.require_codex)
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    (work / "fruits.txt").write_text("apple\npear\nplum\n")
    write_settings(home, stack)
    steps = [
        ("exec_command", {"cmd": "wc -l fruits.txt"}),
        ("apply_patch", {"input": PATCH}),
    ]
    task = "How many lines has fruits.txt? Write the number into count.txt."
    words = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    words += ["--output-last-message", str(tmp_path / "last.txt"), task]
    nobody = "http://127.0.0.1:9"  # a proxy that is not there: nothing else is reached
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "CODEX_HOME": str(home),
        "HORDE_KEY": stack.client.key,
        "HTTP_PROXY": nobody,
        "HTTPS_PROXY": nobody,
        "NO_PROXY": "127.0.0.1,localhost",
    }
    with stepping_worker(stack, CODEX_MODEL, steps, DONE) as worker:
        done = subprocess.run(
            [*map(str, codex), *words],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (work / "count.txt").read_text() == "3\n", done.stderr[-4000:]
    assert (tmp_path / "last.txt").read_text().strip() == DONE
    first, *_, last = worker.payloads
    tools = {tool["function"]["name"]: tool["function"] for tool in first["tools"]}
    assert {"exec_command", "multi_agent_v1__spawn_agent", "apply_patch"} <= tools.keys()
    assert "Grammar (lark):" in tools["apply_patch"]["description"]
    assert "metadata for" not in done.stderr
    outputs = [message for message in last["messages"] if message["role"] == "tool"]
    assert "3 fruits.txt" in json.dumps(outputs[0])
    assert "count.txt" in json.dumps(outputs[1])
