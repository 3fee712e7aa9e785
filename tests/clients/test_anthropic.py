# SPDX-License-Identifier: AGPL-3.0-or-later
"""Anthropic's own libraries, each as a process of its own, against a whole horde."""

import sys
from pathlib import Path

import pytest

from tests.acceptance._stack import wait_until
from tests.clients._worker import MODEL, WEATHER
from tests.clients.conftest import Stack
from tests.clients.test_libraries import (
    REPLY,
    TOKENS,
    Seen,
    require_content,
    run_javascript,
    run_python,
)

KINDS = [
    *("content_block_delta", "content_block_start", "content_block_stop"),
    *("message_delta", "message_start", "message_stop"),
]
LIBRARIES = ["python", "javascript"]


@pytest.fixture(scope="module")
def python(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("anthropic")
    return run_python(Path(sys.executable), "anthropic_sdk.py", stack, folder)


@pytest.fixture(scope="module")
def javascript(node: tuple[Path, Path], stack: Stack) -> Seen:
    return run_javascript(node, "anthropic_sdk.mjs", stack)


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Seen:
    seen: Seen = request.getfixturevalue(request.param)
    return seen


def test_a_library_gets_a_message_with_all_its_fields(library: Seen) -> None:
    reply = require_content(library, "chat")
    assert reply.pop("model", MODEL) == MODEL
    assert reply == {
        "content": REPLY,
        "stop": "end_turn",
        "tokens": TOKENS,
        "worker": "answering worker",
        "has_request_id": True,
    }
    require_content(library, "bearer")


def test_a_library_streams(library: Seen) -> None:
    reply = require_content(library, "stream")
    assert reply["pieces"] >= 1
    assert [kind for kind in reply["kinds"] if kind != "ping"] == KINDS
    helped = require_content(library, "stream_helper")
    assert (helped["tokens"], helped.get("joined", REPLY)) == (TOKENS, REPLY)


def test_python_streams_asynchronously(python: Seen) -> None:
    require_content(python, "asynchronous")


def test_a_library_takes_a_call_and_brings_its_result(library: Seen) -> None:
    reply = require_content(library, "tools", WEATHER)
    told = (reply["stop"], reply["name"], reply["arguments"])
    assert told == ("tool_use", "get_weather", {"city": "Paris"})
    streamed = library["stream_of_a_call"]
    assert streamed.pop("has_json", True) is True
    assert streamed == {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert require_content(library, "tool_runner", WEATHER)["asked"] == ["Paris"]


def test_a_library_gets_the_thoughts(library: Seen) -> None:
    reply = require_content(library, "reasoning", "Blue.")
    assert (reply["reasoning"], reply["signed"]) == ("The sky comes to mind.", True)


def test_a_library_counts_and_lists(library: Seen) -> None:
    assert library["count"]["tokens"] > 20
    assert library["models"] == {"is_listed": True, "retrieved": MODEL}


def test_a_library_raises_its_errors_and_repeats_no_request_that_was_queued(library: Seen) -> None:
    assert library["errors"] == {
        "wrong_key": ["AuthenticationError", 401, "authentication_error", True, 1],
        "unknown_model": ["NotFoundError", 404, "not_found_error", True, 1],
        "unsupported": ["BadRequestError", 400, "invalid_request_error", True, 1],
        "failed": ["InternalServerError", 502, "api_error", True, 1],
    }
    assert library.get("error_in_a_stream", {"type": "api_error"}) == {"type": "api_error"}


def test_leaving_a_stream_cancels_its_request(library: Seen, stack: Stack) -> None:
    left = library["cancel"]
    assert str(left["content"]).startswith("One,"), left
    wait_until(lambda: stack.is_cancelled(left["request_id"]))
