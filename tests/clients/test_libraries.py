# SPDX-License-Identifier: AGPL-3.0-or-later
"""The libraries people use, each as a process of its own, against a whole horde: API, front and
worker.

A script under ``scripts`` runs all its scenarios and prints what it saw; the tests say what that
has to be.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance._stack import wait_until
from tests.clients._worker import MODEL, PERSON, PIECES, WEATHER
from tests.clients.conftest import Stack

SCRIPTS = Path(__file__).with_name("scripts")
SECONDS = 240  # a busy machine, and libraries without bytecode; an idle one needs five
REPLY = "".join(PIECES)
TOKENS = 26

type Seen = dict[str, Any]


def run_script(
    command: list[str], stack: Stack, folder: Path, environment: dict[str, str] | None = None
) -> Seen:
    """What a script printed last."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment or stack.build_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def run_python(python: Path, script: str, stack: Stack, folder: Path) -> Seen:
    return run_script([str(python), str(SCRIPTS / script)], stack, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scripts run: nothing is there that a library could read."""
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture(scope="module")
def newest_openai(stack: Stack, folder: Path) -> Seen:
    return run_python(Path(sys.executable), "openai_sdk.py", stack, folder)


@pytest.fixture(scope="module")
def older_openai(client_python: Path, stack: Stack, folder: Path) -> Seen:
    return run_python(client_python, "openai_sdk.py", stack, folder)


@pytest.fixture(scope="module", params=["newest", "older"])
def openai_python(request: pytest.FixtureRequest) -> Seen:
    """OpenAI's Python library: the newest, and the one that the frameworks still use."""
    seen: Seen = request.getfixturevalue(f"{request.param}_openai")
    return seen


@pytest.fixture(scope="module")
def langchain(client_python: Path, stack: Stack, folder: Path) -> Seen:
    return run_python(client_python, "langchain_chat.py", stack, folder)


@pytest.fixture(scope="module")
def litellm(client_python: Path, stack: Stack, folder: Path) -> Seen:
    return run_python(client_python, "litellm_chat.py", stack, folder)


@pytest.fixture(scope="module")
def pydantic_ai(client_python: Path, stack: Stack, folder: Path) -> Seen:
    return run_python(client_python, "pydantic_ai_agent.py", stack, folder)


@pytest.fixture(scope="module")
def instructor(client_python: Path, stack: Stack, folder: Path) -> Seen:
    return run_python(client_python, "instructor_models.py", stack, folder)


def run_javascript(node: tuple[Path, Path], script: str, stack: Stack) -> Seen:
    """Node looks for libraries beside the script, so it runs from a copy that lies beside them."""
    program, libraries = node
    beside = libraries / f"scripts-{os.environ.get('PYTEST_XDIST_WORKER', 'only')}"
    shutil.copytree(
        SCRIPTS, beside, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    try:
        return run_script([str(program), str(beside / script)], stack, beside)
    finally:
        shutil.rmtree(beside)


@pytest.fixture(scope="module")
def openai_javascript(node: tuple[Path, Path], stack: Stack) -> Seen:
    return run_javascript(node, "openai_sdk.mjs", stack)


@pytest.fixture(scope="module")
def vercel_ai(node: tuple[Path, Path], stack: Stack) -> Seen:
    return run_javascript(node, "vercel_ai.mjs", stack)


def require_content(seen: Seen, scenario: str, content: str = REPLY) -> Seen:
    """What a scenario saw, which has to be this reply."""
    assert seen[scenario].get("content") == content, seen[scenario].get("traceback", seen[scenario])
    return dict(seen[scenario])


# --- OpenAI's own libraries
# --------------------------------------------------------------------------------------------


def test_openai_python_gets_a_reply_with_all_its_fields(openai_python: Seen) -> None:
    reply = require_content(openai_python, "chat")
    assert reply == {
        "content": REPLY,
        "finish": "stop",
        "tokens": TOKENS,
        "model": MODEL,
        "worker": "answering worker",
        "has_request_id": True,
    }
    require_content(openai_python, "anonymous")


def test_openai_python_streams(openai_python: Seen) -> None:
    reply = require_content(openai_python, "stream")
    assert (reply["finish"], reply["tokens"], reply["pieces"] >= 1) == ("stop", TOKENS, True)
    require_content(openai_python, "asynchronous")
    assert "content.done" in require_content(openai_python, "stream_helper")["kinds"]


def test_openai_python_takes_a_call_and_brings_its_result(openai_python: Seen) -> None:
    reply = require_content(openai_python, "tools", WEATHER)
    assert (reply["finish"], reply["name"], reply["arguments"]) == (
        "tool_calls",
        "get_weather",
        {"city": "Paris"},
    )
    assert openai_python["stream_of_a_call"] == {"calls": [[0, "get_weather", {"city": "Paris"}]]}


def test_openai_python_parses_a_typed_reply(openai_python: Seen) -> None:
    assert openai_python["structured"] == PERSON


def test_openai_python_gets_the_reasoning(openai_python: Seen) -> None:
    assert (
        require_content(openai_python, "reasoning", "Blue.")["reasoning"]
        == "The sky comes to mind."
    )


def test_openai_python_lists_and_retrieves_models(openai_python: Seen) -> None:
    assert openai_python["models"] == {"is_listed": True, "retrieved": MODEL}


def test_openai_python_raises_its_errors_and_repeats_no_request_that_was_queued(
    openai_python: Seen,
) -> None:
    assert openai_python["errors"] == {
        "wrong_key": [401, "invalid_api_key", None, 1],
        "unknown_model": [404, "model_not_found", "model", 1],
        "unsupported": [400, "unsupported_parameter", "logprobs", 1],
        "failed": [502, "generation_failed", None, 1],
    }
    assert openai_python["error_in_a_stream"] == {"code": "generation_failed"}


@pytest.mark.parametrize("library", ["newest_openai", "older_openai", "openai_javascript"])
def test_leaving_a_stream_cancels_its_request(
    library: str, stack: Stack, request: pytest.FixtureRequest
) -> None:
    left = request.getfixturevalue(library)["cancel"]
    assert str(left["content"]).startswith("One,"), left
    wait_until(lambda: stack.is_cancelled(left["request_id"]))


def test_openai_javascript_gets_a_reply_with_all_its_fields(openai_javascript: Seen) -> None:
    reply = require_content(openai_javascript, "chat")
    assert reply == {
        "content": REPLY,
        "finish": "stop",
        "tokens": TOKENS,
        "worker": "answering worker",
        "has_request_id": True,
    }


def test_openai_javascript_streams(openai_javascript: Seen) -> None:
    reply = require_content(openai_javascript, "stream")
    assert (reply["finish"], reply["tokens"], reply["pieces"] >= 1) == ("stop", TOKENS, True)
    require_content(openai_javascript, "stream_helper")


def test_openai_javascript_takes_a_call_and_brings_its_result(openai_javascript: Seen) -> None:
    reply = require_content(openai_javascript, "tools", WEATHER)
    assert (reply["finish"], reply["name"], reply["arguments"]) == (
        "tool_calls",
        "get_weather",
        {"city": "Paris"},
    )
    assert require_content(openai_javascript, "tool_runner", WEATHER)["asked"] == ["Paris"]


def test_openai_javascript_parses_a_typed_reply(openai_javascript: Seen) -> None:
    assert openai_javascript["structured"] == PERSON


def test_openai_javascript_gets_the_reasoning(openai_javascript: Seen) -> None:
    assert (
        require_content(openai_javascript, "reasoning", "Blue.")["reasoning"]
        == "The sky comes to mind."
    )


def test_openai_javascript_lists_and_retrieves_models(openai_javascript: Seen) -> None:
    assert openai_javascript["models"] == {"is_listed": True, "retrieved": MODEL}


def test_openai_javascript_raises_its_errors_and_repeats_no_request_that_was_queued(
    openai_javascript: Seen,
) -> None:
    assert openai_javascript["errors"] == {
        "wrong_key": ["AuthenticationError", 401, "invalid_api_key", None, 1],
        "unknown_model": ["NotFoundError", 404, "model_not_found", "model", 1],
        "unsupported": ["BadRequestError", 400, "unsupported_parameter", "logprobs", 1],
        "failed": ["InternalServerError", 502, "generation_failed", None, 1],
    }


# --- frameworks
# --------------------------------------------------------------------------------------------------

FRAMEWORKS = ["langchain", "litellm", "pydantic_ai", "vercel_ai"]


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Seen:
    """What a framework saw."""
    seen: Seen = request.getfixturevalue(request.param)
    return seen


def test_a_framework_gets_a_reply(framework: Seen) -> None:
    assert require_content(framework, "chat")["tokens"] == TOKENS


def test_a_framework_streams(framework: Seen) -> None:
    reply = require_content(framework, "stream")
    assert reply["pieces"] >= 1
    assert reply.get("tokens", TOKENS) == TOKENS


def test_a_framework_calls_a_function_and_brings_its_result(framework: Seen) -> None:
    assert require_content(framework, "tools", WEATHER)["arguments"] == {"city": "Paris"}


def test_a_framework_parses_a_typed_reply(framework: Seen) -> None:
    assert framework["structured"] == PERSON


def test_a_framework_reports_a_wrong_key(framework: Seen) -> None:
    assert framework["errors"] in ({"wrong_key": 401}, {"wrong_key": "invalid_api_key"})


@pytest.mark.parametrize("library", ["langchain", "pydantic_ai", "instructor"])
def test_a_typed_reply_may_be_a_call(library: str, request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue(library)["structured_by_a_call"] == PERSON


def test_instructor_parses_typed_replies_whole_and_streamed(instructor: Seen) -> None:
    assert [instructor[name] for name in ("structured", "structured_by_an_object", "stream")] == [
        PERSON
    ] * 3
    assert instructor["errors"] == {"mentions_the_key": True}


@pytest.mark.parametrize("library", ["litellm", "vercel_ai"])
def test_a_framework_shows_the_reasoning(library: str, request: pytest.FixtureRequest) -> None:
    seen = request.getfixturevalue(library)
    assert require_content(seen, "reasoning", "Blue.")["reasoning"] == "The sky comes to mind."


@pytest.mark.parametrize("library", ["langchain", "litellm"])
def test_a_framework_works_asynchronously(library: str, request: pytest.FixtureRequest) -> None:
    require_content(request.getfixturevalue(library), "asynchronous")


def test_pydantic_ai_sends_its_history_back(pydantic_ai: Seen) -> None:
    require_content(pydantic_ai, "several_turns")


def test_vercel_ai_streams_over_a_call_and_stops_when_told(vercel_ai: Seen) -> None:
    require_content(vercel_ai, "tools_streamed", WEATHER)
    assert vercel_ai["cancel"]["content"].startswith("One,")
