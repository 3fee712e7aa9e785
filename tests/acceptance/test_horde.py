# SPDX-License-Identifier: AGPL-3.0-or-later
"""The horde end to end: API, bridge and a real llama.cpp as processes, asked as clients ask."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from devtools.services import ServiceAddresses
from tests.acceptance._stack import (
    Account,
    Horde,
    ScriptedWorker,
    build_chat_request,
    build_shared_environment,
    running_bridge,
    running_horde,
    wait_until,
)
from tests.services import ROOT
from tests.services import TINY_MODEL_NAME as MODEL

pytestmark = pytest.mark.slow

BRIDGE = "tiny bridge"
THINKER = "tests/thinking-model"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "tell_time", "parameters": {"type": "object", "properties": {}}},
    },
]
COLOUR = {
    "type": "object",
    "properties": {"shade": {"enum": ["red", "blue"]}, "count": {"type": "integer"}},
    "required": ["shade", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def horde(
    service_urls: ServiceAddresses, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Horde]:
    """The API with two processes."""
    services = build_shared_environment(service_urls, "acceptance_horde")
    with running_horde(services, tmp_path_factory.mktemp("horde")) as horde:
        yield horde


@pytest.fixture(scope="module")
def owner(horde: Horde) -> Account:
    """Whose bridge it is."""
    return horde.create_account("owner")


@pytest.fixture(scope="module")
def client(horde: Horde) -> Account:
    """Who asks."""
    return horde.create_account("client")


@pytest.fixture(scope="module")
def served(horde: Horde, owner: Account, tiny_backend: str) -> Iterator[Horde]:
    """The horde with a bridge that serves the tiny model with two threads."""
    with running_bridge(
        horde, owner.key, tiny_backend, BRIDGE, "--threads", "2", "--max-length", "1024"
    ):
        yield horde


def ask(horde: Horde, client: Account, **more: Any) -> dict[str, Any]:
    """One chat, waited for: the generation of its status."""
    status = horde.api.wait_for_reply("chat", horde.api.queue_chat(client.key, MODEL, **more))
    assert not status["faulted"], status
    (generation,) = status["generations"]
    return dict(generation)


def test_a_chat_is_answered_and_paid(served: Horde, client: Account, owner: Account) -> None:
    quote = served.api.post(
        "/generate/chat/async", build_chat_request(MODEL, horde={"dry_run": True}), client.key
    )
    assert (quote.status_code, quote.json()["kudos"] > 0) == (200, True)
    paid_before = served.count_payments(owner)

    status = served.api.wait_for_reply("chat", served.api.queue_chat(client.key, MODEL))

    (reply,) = status["generations"]
    assert {
        name: status[name]
        for name in ("done", "faulted", "finished", "processing", "waiting", "restarted")
    } == {
        "done": True,
        "faulted": False,
        "finished": 1,
        "processing": 0,
        "waiting": 0,
        "restarted": 0,
    }
    assert reply["message"] == {"role": "assistant", "content": reply["text"]}
    assert reply["text"]
    assert reply["finish_reason"] in ("stop", "length")
    assert 0 < reply["completion_tokens"] <= 32
    assert reply["prompt_tokens"] > 0
    assert reply["queue_wait_seconds"] >= 0
    assert (reply["model"], reply["worker_name"], reply["state"]) == (MODEL, BRIDGE, "ok")
    assert status["kudos"] > 0
    assert served.count_payments(owner) == paid_before + 1


def test_a_text_is_continued(served: Horde, client: Account) -> None:
    status = served.api.wait_for_reply(
        "text", served.api.queue_text(client.key, MODEL, temperature=0.7)
    )
    (generation,) = status["generations"]
    assert generation["text"]
    assert (generation["model"], generation["state"], status["finished"]) == (MODEL, "ok", 1)
    assert status["kudos"] > 0


def test_two_generations_are_both_served(served: Horde, client: Account) -> None:
    status = served.api.wait_for_reply("text", served.api.queue_text(client.key, MODEL, n=2))
    assert (status["finished"], len(status["generations"])) == (2, 2)
    assert all(generation["text"] for generation in status["generations"])


def test_several_requests_at_once_are_all_served(served: Horde, client: Account) -> None:
    def run(number: int) -> tuple[bool, int]:
        kind = "chat" if number % 2 else "text"
        queue = served.api.queue_chat if kind == "chat" else served.api.queue_text
        status = served.api.wait_for_reply(kind, queue(client.key, MODEL))
        return status["faulted"], len(status["generations"])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(16))) == [(False, 1)] * 16


@pytest.mark.parametrize("strict", [True, False])
def test_a_json_schema_shapes_the_reply(served: Horde, client: Account, strict: bool) -> None:
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "colour", "strict": strict, "schema": COLOUR},
    }
    reply = ask(served, client, response_format=shape, max_tokens=400)
    Draft202012Validator(COLOUR).validate(json.loads(reply["message"]["content"]))


def test_json_object_gives_an_object(served: Horde, client: Account) -> None:
    # Nonsense may go on for ever inside an object, so several are asked for until one ends by
    # itself.
    for seed in range(8):
        reply = ask(
            served, client, response_format={"type": "json_object"}, seed=seed, max_tokens=600
        )
        if reply["finish_reason"] == "stop":
            assert isinstance(json.loads(reply["message"]["content"]), dict)
            return
    pytest.fail("no reply ended by itself")


def test_a_required_tool_is_called(served: Horde, client: Account) -> None:
    reply = ask(served, client, tools=TOOLS, tool_choice="required", max_tokens=200)
    assert (reply["finish_reason"], reply["message"]["content"]) == ("tool_calls", None)
    (call,) = reply["message"]["tool_calls"]
    assert call["function"]["name"] in ("lookup_weather", "tell_time")
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_a_named_tool_is_called_and_its_result_can_be_sent_back(
    served: Horde, client: Account
) -> None:
    choice = {"type": "function", "function": {"name": "lookup_weather"}}
    message = ask(served, client, tools=TOOLS, tool_choice=choice, max_tokens=200)["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "lookup_weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Bergen")

    turns = [
        {"role": "user", "content": "Weather?"},
        message,
        {"role": "tool", "tool_call_id": call["id"], "content": "Rain."},
    ]
    assert ask(served, client, messages=turns, tools=TOOLS, tool_choice="auto")[
        "finish_reason"
    ] in ("stop", "length")


def test_offered_tools_reach_the_prompt(served: Horde, client: Account) -> None:
    bare, offered = (
        ask(served, client, max_tokens=16, **more)["prompt_tokens"]
        for more in ({}, {"tools": TOOLS})
    )
    assert offered > bare


def test_the_same_seed_gives_the_same_reply(served: Horde, client: Account) -> None:
    texts = [ask(served, client, seed=seed, max_tokens=64)["text"] for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_penalties_change_the_reply(served: Horde, client: Account) -> None:
    calm = ask(
        served, client, seed=11, max_tokens=200, messages=[{"role": "user", "content": "Count."}]
    )["text"]
    for penalty in ("frequency_penalty", "presence_penalty"):
        changed = ask(
            served,
            client,
            seed=11,
            max_tokens=200,
            messages=[{"role": "user", "content": "Count."}],
            **{penalty: 2.0},
        )
        assert changed["text"] != calm, penalty


def test_a_stop_sequence_ends_the_reply(served: Horde, client: Account) -> None:
    whole = ask(served, client, seed=3, max_tokens=64)["text"]
    stop = whole.split()[2]
    cut = ask(served, client, seed=3, max_tokens=64, stop=[stop])["text"]
    assert stop not in cut
    assert whole.startswith(cut)


def test_a_request_nobody_can_serve_says_why(served: Horde, client: Account) -> None:
    body = build_chat_request(MODEL, reasoning_effort="low")
    answer = served.api.post("/generate/chat/async", body, client.key)
    assert answer.status_code == 202, answer.text
    status = served.api.get_status("chat", answer.json()["id"])
    assert (status["is_possible"], status["eligible_workers"]) == (False, 0)
    assert "reasoning_effort" in json.dumps(status["impossible_reason"])
    cancelled = served.api.http.delete(f"/generate/chat/status/{answer.json()['id']}")
    assert cancelled.status_code == 200
    assert served.api.get_status("chat", answer.json()["id"])["done"]


def test_a_prompt_over_every_context_is_refused(served: Horde, client: Account) -> None:
    long_prompt = [{"role": "user", "content": "the " * 40_000}]
    body = build_chat_request(MODEL, messages=long_prompt, horde={"context_fit": "reject"})
    answer = served.api.post("/generate/chat/async", body, client.key)
    assert (answer.status_code, answer.json()["rc"]) == (400, "PromptExceedsContext")


class ThinkingBackend(ThreadingHTTPServer):
    """An OpenAI-compatible server whose model thinks aloud before it answers; ``efforts`` is what
    it was asked for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ThinkingHandler)
        self.efforts: list[str | None] = []
        self.contents = ["<think>The user asks for one colour.</think>\n\nBlue."]


class ThinkingHandler(BaseHTTPRequestHandler):
    server: ThinkingBackend

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, {"data": [{"id": "thinker", "max_model_len": 4096}]})
        else:
            self.answer(404, {"error": "no such route"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self.answer(404, {"error": "no such route"})
            return
        self.server.efforts.append(body.get("reasoning_effort"))
        message = {"role": "assistant", "content": self.server.contents[0]}
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": 12,
            "completion_tokens_details": {"reasoning_tokens": 8},
        }
        self.answer(
            200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        )

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
def running_thinker() -> Iterator[ThinkingBackend]:
    with ThinkingBackend() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("mode", ["wait", "fail_fast"])
def test_chats_for_a_model_whose_only_worker_was_stopped_are_refused_at_once(
    horde: Horde, client: Account, owner: Account, mode: str
) -> None:
    model = f"tests/leaving-{mode}"
    chat = build_chat_request(model, horde={"availability_mode": mode})
    with running_thinker() as backend:
        address = f"http://127.0.0.1:{backend.server_address[1]}"
        with running_bridge(
            horde, owner.key, address, f"leaver {mode}", "--model", model
        ) as bridge:
            bridge.terminate()
            assert bridge.wait(60) == 0
    answer = horde.api.post("/generate/chat/async", chat, client.key)
    assert (answer.status_code, answer.json()["rc"]) == (404, "UnknownChatModel")


def test_reasoning_is_told_apart_from_the_answer(
    horde: Horde, client: Account, owner: Account
) -> None:
    options = [
        "--model",
        THINKER,
        "--supports",
        "reasoning_effort",
        "--supports",
        "prompt_overflow_refused",
    ]
    with running_thinker() as backend:
        address = f"http://127.0.0.1:{backend.server_address[1]}"
        with running_bridge(horde, owner.key, address, "thinking bridge", *options):
            request_id = horde.api.queue_chat(client.key, THINKER, reasoning_effort="low")
            (reply,) = horde.api.wait_for_reply("chat", request_id)["generations"]
    assert backend.efforts == ["low"]
    assert reply["message"] == {
        "role": "assistant",
        "content": "Blue.",
        "reasoning_content": "The user asks for one colour.",
    }
    assert (reply["text"], reply["reasoning_tokens"], reply["completion_tokens"]) == (
        "Blue.",
        8,
        12,
    )


def run_sdk(horde: Horde, *words: str) -> dict[str, Any]:
    """What the published library says as a process."""
    command = [sys.executable, "-m", "tests.acceptance._sdk_client", *words]
    environment = {**horde.environment, "AI_HORDE_URL": f"{horde.api.url}/", "AI_HORDE_DEV_URL": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def test_the_published_library_requests_texts(served: Horde, client: Account) -> None:
    said = run_sdk(served, "request", client.key, MODEL)
    assert (said["done"], said["models"], said["states"]) == (True, [MODEL], ["ok"])
    assert all(said["texts"])
    assert (said["resolved_length"], said["quote"] > 0, said["kudos"] > 0) == (24, True, True)
    assert said["unknown"] == []


def test_the_published_library_serves_texts(horde: Horde, client: Account, owner: Account) -> None:
    model = "tests/library-model"
    request_id = horde.api.queue_text(client.key, model)
    said = run_sdk(horde, "worker", owner.key, model, "library worker")
    assert (said["prompt"], said["length"], said["ttl"]) == ("Once upon a time", 24, 150)
    assert said["reward"] > 0
    assert (
        horde.api.wait_for_reply("text", request_id)["generations"][0]["text"]
        == "there was a horde."
    )


def test_the_lists_show_what_is_served(served: Horde) -> None:
    def find_model() -> dict[str, Any] | None:
        models = served.api.http.get("/status/models", params={"type": "text"}).json()
        return next((model for model in models if model["name"] == MODEL), None)

    model = wait_until(find_model)
    assert (model["count"], model["type"]) == (2, "text")  # threads
    workers = wait_until(lambda: served.api.http.get("/workers", params={"type": "text"}).json())
    assert BRIDGE in [worker["name"] for worker in workers]


def test_a_late_reply_is_told_its_deadline(horde: Horde, client: Account, owner: Account) -> None:
    worker = ScriptedWorker(
        horde.api, owner.key, "late worker", "tests/late-model", takes_chat=True
    )
    assert worker.pop() is None
    request_id = horde.api.queue_chat(client.key, worker.model)
    job = worker.require_job()
    assert job["ttl"] == 150
    horde.end_leases(job["id"])
    horde.clean_up()
    late = worker.post_reply(job)
    assert (late.status_code, late.json()["rc"]) == (400, "AbortedGen")
    assert "150 seconds" in late.json()["message"]
    assert (
        horde.api.get_status("chat", request_id)["waiting"],
        worker.require_job()["id"] != job["id"],
    ) == (1, True)


def test_a_slow_worker_gets_no_chat_it_cannot_finish(
    horde: Horde, client: Account, owner: Account
) -> None:
    worker = ScriptedWorker(
        horde.api, owner.key, "slow worker", "tests/slow-model", takes_chat=True
    )
    assert worker.pop() is None
    horde.database.rows("UPDATE workers SET speed = 4 WHERE name = %s", worker.name)
    too_long = horde.api.queue_chat(client.key, worker.model, max_tokens=512)
    assert worker.pop() is None
    horde.api.queue_chat(client.key, worker.model, max_tokens=480)
    assert worker.require_job()["payload"]["max_length"] == 480
    assert horde.api.get_status("chat", too_long)["waiting"] == 1


def test_every_kudos_is_accounted_for(served: Horde, client: Account, owner: Account) -> None:
    """Last: the ledger of all of the above adds up, and what was held is free again."""
    assert served.audit()["discrepancies"] == []
    held = served.database.value(
        "SELECT count(*) FROM kudos_reservations r JOIN waiting_prompts w ON r.business_id ="
        " 'upfront:' || w.id WHERE r.active AND w.terminal_outcome IS NOT NULL"
    )
    assert held == 0
    earned = served.api.http.get(f"/users/{owner.id}", headers={"apikey": owner.key}).json()
    assert earned["kudos"] > 100_000
    spent = served.api.http.get(f"/users/{client.id}", headers={"apikey": client.key}).json()
    assert spent["kudos"] < 100_000
