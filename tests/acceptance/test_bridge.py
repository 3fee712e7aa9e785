# SPDX-License-Identifier: AGPL-3.0-or-later
"""The bridge as a process, a real llama.cpp behind it, and a horde that hands out scripted jobs in
front of it.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from horde.bridge.popping import EXIT_REFUSED

KEY = "a-key-of-the-owner"
WAIT_SECONDS = 180  # on a busy machine
NO_JOB = {
    "id": None,
    "ids": [],
    "payload": {},
    "skipped": {},
    "model": None,
    "messages": [],
    "ttl": None,
}
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "rep_pen": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Oslo", "Bergen"]}},
            },
        },
    }
]
COLOUR = {
    "type": "object",
    "properties": {"shade": {"enum": ["red", "blue"]}},
    "required": ["shade"],
    "additionalProperties": False,
}


class ScriptedHorde(ThreadingHTTPServer):
    """Answers pops from ``jobs`` and keeps what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.pops: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.submits: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.refuses_replies = False

    def list_pops(self) -> list[dict[str, Any]]:
        """What was popped with since the last look."""
        pops = []
        while not self.pops.empty():
            pops.append(self.pops.get())
        return pops

    def ask(self, **payload: Any) -> dict[str, Any]:
        """Hand out one chat job and return what is submitted for it."""
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Name one colour."},
        ]
        body = {
            "messages": messages,
            **SAMPLING,
            "n": 1,
            "max_length": 200,
            "max_context_length": 4096,
            **payload,
        }
        return self.hand_out({"chat": True, "payload": body})

    def hand_out(self, job: dict[str, Any]) -> dict[str, Any]:
        self.jobs.put({**NO_JOB, "id": "job-1", "ids": ["job-1"], "ttl": 150, **job})
        return self.submits.get(timeout=WAIT_SECONDS)


class Handler(BaseHTTPRequestHandler):
    server: ScriptedHorde

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["apikey"] != KEY:
            self.answer(401, {"rc": "InvalidAPIKey", "message": "No user."})
        elif self.path == "/api/v2/generate/text/pop":
            self.server.pops.put(body)
            try:
                job = {**self.server.jobs.get_nowait(), "model": body["models"][0]}
            except queue.Empty:
                job = NO_JOB
            self.answer(200, job)
        else:
            self.server.submits.put(body)
            if self.server.refuses_replies and "message" in body:
                self.answer(400, {"rc": "ChatSubmitNonconformant", "message": "No."})
            else:
                self.answer(200, {"reward": 0 if body.get("state") == "faulted" else 1.5})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@contextmanager
def start_horde() -> Iterator[ScriptedHorde]:
    with ScriptedHorde() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def horde() -> Iterator[ScriptedHorde]:
    with start_horde() as server:
        yield server


@contextmanager
def start_bridge(
    horde: ScriptedHorde, backend: str, *options: str, key: str = KEY
) -> Iterator[subprocess.Popen[str]]:
    address = f"http://127.0.0.1:{horde.server_address[1]}/api"
    command = [
        sys.executable,
        "-m",
        "horde.cli.main",
        "bridge",
        "--api",
        address,
        "--backend",
        f"{backend}/v1",
        "--name",
        "tester",
    ]
    environment = {**os.environ, "HORDE_BRIDGE_KEY": key}
    process = subprocess.Popen(
        [*command, *options], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def bridge(tiny_backend: str) -> Iterator[ScriptedHorde]:
    """A running bridge, seen from the horde it works for."""
    with start_horde() as horde, start_bridge(horde, tiny_backend, "--max-length", "1024"):
        horde.pops.get(timeout=WAIT_SECONDS)
        yield horde


def test_it_declares_what_llama_cpp_does(bridge: ScriptedHorde) -> None:
    pop = bridge.pops.get(timeout=WAIT_SECONDS)
    assert pop["chat_features"] == [
        "frequency_penalty",
        "json_object",
        "json_schema",
        "presence_penalty",
        "prompt_overflow_refused",
        "seed",
        "single_tool_call_enforced",
        "structured_output_enforced",
        "tool_choice_enforced",
        "tools",
        "tools_with_response_format",
    ]
    assert pop["chat_limits"] == {"max_context_length": 4096, "max_length": 1024}
    assert pop["bridge_agent"].startswith("Horde Bridge:")


def test_a_chat_is_answered(bridge: ScriptedHorde) -> None:
    reply = bridge.ask(max_length=32, seed=7)
    assert reply["message"]["content"]
    assert reply["finish_reason"] in ("stop", "length")
    assert 0 < reply["completion_tokens"] <= 32
    assert reply["prompt_tokens"] > 0


def test_the_same_seed_gives_the_same_reply(bridge: ScriptedHorde) -> None:
    first, second, third = (
        bridge.ask(seed=seed, max_length=64)["message"]["content"] for seed in (7, 7, 8)
    )
    assert first == second
    assert first != third


def test_a_strict_schema_is_kept(bridge: ScriptedHorde) -> None:
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "colour", "strict": True, "schema": COLOUR},
    }
    reply = bridge.ask(response_format=shape)
    Draft202012Validator(COLOUR).validate(json.loads(reply["message"]["content"]))


def test_a_keyword_the_grammar_drops_faults_the_job(bridge: ScriptedHorde) -> None:
    schema = {**COLOUR, "properties": {"shade": {"enum": ["red"], "not": {"const": "red"}}}}
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "colour", "strict": True, "schema": schema},
    }
    assert bridge.ask(response_format=shape)["fault_reason"] == "unbuildable_grammar"


def test_a_schema_that_cannot_be_built_faults_the_job(bridge: ScriptedHorde) -> None:
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "colour", "schema": {"type": "no such type"}},
    }
    assert bridge.ask(response_format=shape)["fault_reason"] == "unbuildable_grammar"


def test_a_forced_tool_is_called(bridge: ScriptedHorde) -> None:
    reply = bridge.ask(tools=TOOLS, tool_choice="required")
    (call,) = reply["message"]["tool_calls"]
    assert call["function"]["name"] == "lookup_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Bergen")
    assert (reply["message"]["content"], reply["finish_reason"]) == (None, "tool_calls")


def test_tools_beside_a_strict_format_bring_a_call_or_an_answer_in_the_format(
    bridge: ScriptedHorde,
) -> None:
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "colour", "strict": True, "schema": COLOUR},
    }
    for seed in range(4):
        message = bridge.ask(tools=TOOLS, response_format=shape, seed=seed)["message"]
        if message["content"] is None:
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Bergen")
        else:
            assert "tool_calls" not in message
            Draft202012Validator(COLOUR).validate(json.loads(message["content"]))


def test_offered_tools_and_their_turns_are_rendered(bridge: ScriptedHorde) -> None:
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "lookup_weather", "arguments": '{"city": "Oslo"}'},
    }
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "a"},
    ]
    bare, offered = (
        bridge.ask(messages=turns, max_length=16, **more)["prompt_tokens"]
        for more in ({}, {"tools": TOOLS})
    )
    assert offered > bare


def test_a_prompt_over_the_context_faults_the_job(bridge: ScriptedHorde) -> None:
    long_prompt = [{"role": "user", "content": "the " * 4090}]
    assert bridge.ask(messages=long_prompt) == {
        "id": "job-1",
        "state": "faulted",
        "model_id": bridge.pops.get(timeout=WAIT_SECONDS)["model_id"],
        "fault_reason": "prompt_overflow",
    }


def test_the_bridge_counts_a_prompt_as_the_backend_does(bridge: ScriptedHorde) -> None:
    """The largest reply that still fits is served, one token more is not."""
    messages = [{"role": "user", "content": "the " * 1980}]
    served = bridge.ask(messages=messages, max_length=16)
    assert "message" in served
    prompt_tokens = served["prompt_tokens"]
    room = 4096 - prompt_tokens
    assert "message" in bridge.ask(messages=messages, max_length=room)
    assert bridge.ask(messages=messages, max_length=room + 1)["fault_reason"] == "prompt_overflow"


def test_a_refused_reply_is_given_back(bridge: ScriptedHorde) -> None:
    bridge.refuses_replies = True
    try:
        assert "message" in bridge.ask(max_length=16)
        assert bridge.submits.get(timeout=WAIT_SECONDS)["fault_reason"] == "reply_refused"
    finally:
        bridge.refuses_replies = False


@pytest.mark.parametrize("prompt", ["Once upon a time", "the " * 5000, ""])
def test_a_text_is_continued_even_when_its_beginning_has_to_go(
    bridge: ScriptedHorde, prompt: str
) -> None:
    payload = {
        "prompt": prompt,
        "max_length": 24,
        "max_context_length": 2048,
        "n": 1,
        "temperature": 0.8,
        "rep_pen": 1.1,
    }
    submit = bridge.hand_out({"payload": payload})
    assert (submit["id"], submit["state"], isinstance(submit["generation"], str)) == (
        "job-1",
        "ok",
        True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_its_log_keeps_the_secrets(
    horde: ScriptedHorde, tiny_backend: str, number: int
) -> None:
    with start_bridge(horde, tiny_backend, "--threads", "2", "--log-format", "json") as process:
        reply = horde.ask(
            max_length=400, messages=[{"role": "user", "content": "a prompt to keep"}]
        )
        horde.pops.get(timeout=WAIT_SECONDS)
        process.send_signal(number)
        _, log = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
    events = [json.loads(line) for line in log.splitlines()]
    assert horde.list_pops()[-1]["leaving"] is True
    assert {"horde.bridge.serving", "horde.bridge.job_done", "horde.bridge.stopped"} <= {
        event["event"] for event in events
    }
    assert not any(
        secret in log for secret in (KEY, "a prompt to keep", reply["message"]["content"])
    )


def test_a_wrong_key_ends_it_with_1(horde: ScriptedHorde, tiny_backend: str) -> None:
    with start_bridge(horde, tiny_backend, key="wrong-key") as process:
        _, log = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == EXIT_REFUSED
    assert "InvalidAPIKey" in log
    assert "wrong-key" not in log


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api", "ftp://h.test/api"], "--api is an address"),
        (["--backend", "http://"], "--backend is an address"),
        (["--max-length", "0"], "max-length"),
        (["--key", "two words"], "--key"),
    ],
)
def test_wrong_options_are_one_sentence_and_end_it_with_2(
    horde: ScriptedHorde, options: list[str], words: str
) -> None:
    with start_bridge(horde, "http://127.0.0.1:1", *options) as process:
        _, log = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2
    assert words in log
    assert len(log.splitlines()) == 1


def test_it_waits_for_a_backend_that_is_not_there_yet(horde: ScriptedHorde) -> None:
    with ScriptedHorde() as nobody:  # bound, so the port stays free of others; nobody answers on it
        address = f"http://127.0.0.1:{nobody.server_address[1]}"
    with start_bridge(horde, address, "--log-format", "json") as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "horde.bridge.backend_waiting"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
