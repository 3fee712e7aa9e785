# SPDX-License-Identifier: AGPL-3.0-or-later
"""What people reported about servers that do the same job, asked of the front. Names carry the
numbers of the reports.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from devtools.services import ServiceAddresses
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.logger import JsonFormatter
from horde.oai.forms import FormName
from tests.integration._fake_chat_worker import Body, build_call, build_tool, start_anew
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    FrontStack,
    build_body,
    build_client,
    get_error,
    run_front_stack,
    wait_until,
)
from tests.integration.front_streams import OpenStream
from tests.integration.instruments import Counting, read_figures
from tests.integration.text_horde import count_rows

MARKER = "MARKER-7f3a"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "front_fields") as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def serve(
    stack: FrontStack, data: bytes, *, pop: Body | None = None, **reply: Any
) -> tuple[Body, Body]:
    """The payload and the completion of a body of bytes."""
    stack.horde.take_nothing(**(pop or {}))
    waiting = stack.threads.submit(stack.post, data)
    job = stack.await_job(**(pop or {}))
    assert stack.horde.reply(job["id"], **reply).status_code == 200
    answer = waiting.result(PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return dict(job["payload"]), dict(answer.json())


def test_fr_03_stop_and_usage(stack: FrontStack) -> None:
    for stop, expected in (("\nuser:", ["\nuser:"]), (None, None), ([], None)):
        payload, completion = serve(stack, json.dumps(build_body(stop=stop)).encode())
        assert payload.get("stop_sequence") == expected
        assert set(completion["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        assert "kudos" in completion["x_horde"]
        assert "kudos" not in completion


@pytest.mark.parametrize("mode", ["wait", "fail_fast"])
def test_fr_04_a_busy_worker_is_no_dead_service(stack: FrontStack, mode: str) -> None:
    stack.horde.take_nothing()
    first = stack.ask()
    held = stack.await_job()
    second = stack.ask(horde={"availability_mode": mode})
    wait_until(lambda: count_rows(WaitingPrompt) == 2)
    time.sleep(0.3)
    assert not second.done()
    stack.horde.reply(held["id"])
    stack.horde.reply(stack.await_job()["id"], "Green.")
    assert [call.result(PATIENCE_SECONDS).status_code for call in (first, second)] == [200, 200]


def test_fr_10_a_model_id_stays_as_it_is_byte_for_byte(stack: FrontStack) -> None:
    name = "aphrodite/Org/Model-13b:Q4 K é"
    declared = {"models": [name], "model_id": name}
    stack.horde.take_nothing(**declared)
    for stream in (False, True):
        waiting = stack.ask(model=name, stream=stream)
        job = stack.await_job(**declared)
        assert job["model"] == name
        assert stack.horde.reply(job["id"], model=name).status_code == 200
        answer = waiting.result(PATIENCE_SECONDS)
        lines = answer.text.splitlines() if stream else [answer.text]
        bodies = [
            json.loads(line.removeprefix("data: "))
            for line in lines
            if line.startswith(("data: {", "{"))
        ]
        assert {body["model"] for body in bodies} == {name}


OPTIONAL_KEYS = (
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "presence_penalty",
    "frequency_penalty",
    "reasoning_effort",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "metadata",
)


def test_fr_17_null_is_as_absent(stack: FrontStack) -> None:
    nulls = dict.fromkeys(OPTIONAL_KEYS, None)
    pop = {"chat_features": ["prompt_overflow_refused"]}
    payload, _ = serve(stack, json.dumps(build_body(**nulls)).encode(), pop=pop)
    assert (payload["max_length"], payload["temperature"], payload["top_p"]) == (512, 1.0, 1.0)
    assert (payload["presence_penalty"], payload["frequency_penalty"]) == (0, 0)
    assert not {
        "seed",
        "stop_sequence",
        "reasoning_effort",
        "tools",
        "tool_choice",
        "stream_progress",
    } & set(payload)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        (
            {
                "tool_choice": {"type": "function", "function": {"name": "other"}},
                "tools": [build_tool("known")],
            },
            "tool_choice",
        ),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_fr_21_an_impossible_tool_choice_opens_no_stream(
    stack: FrontStack, changes: Body, param: str
) -> None:
    stack.horde.take_nothing()
    status, error = stack.refuse(stream=True, **changes)
    assert (status, error["code"], error["param"]) == (400, "conflicting_parameters", param)
    assert count_rows(WaitingPrompt) == 0


def test_fr_21_a_call_of_a_function_that_was_not_offered_does_not_reach_the_client(
    stack: FrontStack,
) -> None:
    pop = {"chat_features": ["prompt_overflow_refused", "tools"]}
    stack.horde.take_nothing(**pop)
    waiting = stack.ask(tools=[build_tool("known")])
    job = stack.await_job(**pop)
    calls = {"tool_calls": [build_call("unknown")], "finish_reason": "tool_calls"}
    refused = stack.horde.reply(job["id"], None, **calls)
    assert (refused.status_code, refused.json["rc"]) == (400, "ChatSubmitInvalid")
    assert not waiting.done()
    assert stack.horde.reply(job["id"], "Blue.").status_code == 200
    assert waiting.result(PATIENCE_SECONDS).json()["choices"][0]["message"]["content"] == "Blue."


@pytest.mark.parametrize("shows_reasoning", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_fr_29_reasoning_never_becomes_the_answer(
    stack: FrontStack, streams: bool, shows_reasoning: bool
) -> None:
    options = {"horde": {"include_reasoning": shows_reasoning}}
    reply = {"reasoning_content": "Let me think", "finish_reason": "length"}
    stack.horde.take_nothing()
    if streams:
        with OpenStream(stack, **options) as stream:
            job = stack.await_job()
            assert (
                stack.horde.post_progress(job["id"], 1, "", reasoning="Let me").status_code == 200
            )
            assert stack.horde.reply(job["id"], "", **reply).status_code == 200
            stream.finish()
        content, reasoning = stream.join(), stream.join("reasoning_content")
        finish = next(
            chunk["choices"][0]["finish_reason"]
            for chunk in stream.chunks
            if chunk["choices"][0]["finish_reason"]
        )
    else:
        waiting = stack.ask(**options)
        assert stack.horde.reply(stack.await_job()["id"], "", **reply).status_code == 200
        choice = waiting.result(PATIENCE_SECONDS).json()["choices"][0]
        content, reasoning = (
            choice["message"]["content"],
            choice["message"].get("reasoning_content", ""),
        )
        finish = choice["finish_reason"]
    assert (content, finish) == ("", "length")
    assert reasoning == ("Let me think" if shows_reasoning else "")


def test_fr_31_a_browser_may_call_and_reads_its_refusal(stack: FrontStack) -> None:
    asked = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    preflight = stack.call("OPTIONS", "/v1/chat/completions", headers=asked)
    assert preflight.is_success
    assert preflight.headers["access-control-allow-origin"] in {"*", "https://page.example"}
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(
        preflight.headers["access-control-allow-headers"].replace(" ", "").split(",")
    )
    refused = stack.call(
        "POST",
        "/v1/chat/completions",
        json=build_body(),
        headers={"origin": "https://page.example"},
    )
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] in {"*", "https://page.example"}


def test_35_stream_options_without_stream_are_accepted(stack: FrontStack) -> None:
    payload, completion = serve(
        stack, json.dumps(build_body(stream_options={"include_usage": True})).encode()
    )
    assert "stream_progress" not in payload
    assert completion["usage"]["total_tokens"] > 0


def test_fr_18_developer_and_system_are_one_operation(stack: FrontStack) -> None:
    horde = {"operation_key": str(uuid4())}
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    first = stack.complete(horde=horde, messages=messages)
    messages[0]["role"] = "system"
    second = stack.ask(horde=horde, messages=messages).result(PATIENCE_SECONDS).json()
    assert second["id"] == first["id"]
    assert second["x_horde"]["kudos"] == first["x_horde"]["kudos"]


def test_fr_19_text_parts_are_all_kept(stack: FrontStack) -> None:
    parts = [{"type": "text", "text": "ONE"}, {"type": "text", "text": "TWO"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [build_call()]},
        {"role": "tool", "content": parts, "tool_call_id": "call_1"},
    ]
    pop = {"chat_features": ["prompt_overflow_refused", "tools"]}
    payload, _ = serve(stack, json.dumps(build_body(messages=messages)).encode(), pop=pop)
    assert payload["messages"][0]["content"] == parts
    assert payload["messages"][2]["content"] == parts


def test_fr_19_a_mebibyte_of_text_is_counted_over_all_messages(stack: FrontStack) -> None:
    text = "é" * (1024 * 1024 // 50 // 2)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": text}] * 5} for _ in range(10)
    ]
    messages.append({"role": "user", "content": "x" * (1024 * 1024 - 50 * len(text.encode()) + 1)})
    status, error = stack.refuse(messages=messages)
    assert (status, error["code"], error["param"]) == (400, "unsupported_value", "messages")


def test_fr_20_what_was_returned_in_one_turn_is_accepted_in_the_next(stack: FrontStack) -> None:
    first = stack.complete("Blue.", reply={"reasoning_content": "hm"})
    turn = [
        {"role": "user", "content": "hi"},
        first["choices"][0]["message"],
        {"role": "user", "content": "and now?"},
    ]
    payload, _ = serve(stack, json.dumps(build_body(messages=turn)).encode())
    assert payload["messages"][1] == {"role": "assistant", "content": "Blue."}


def test_fr_27_a_completion_is_one_document_and_nothing_else(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = stack.ask()
    time.sleep(0.5)
    stack.horde.reply(stack.await_job()["id"])
    answer = waiting.result(PATIENCE_SECONDS)
    assert answer.headers["content-type"] == "application/json"
    assert answer.content.startswith(b"{")
    assert answer.content.endswith(b"}")
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_fr_32_the_content_type_is_ignored(stack: FrontStack) -> None:
    for content_type in ("", "text/plain", "application/x-www-form-urlencoded"):
        answer = stack.post(build_body(n=2), **{"content-type": content_type})
        assert (answer.status_code, get_error(answer)["param"]) == (400, "n")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def test_fr_33_keys_and_conversations_stay_private(stack: FrontStack) -> None:
    heard, own = _Lines(), logging.getLogger("horde")
    level = own.level
    own.addHandler(heard)
    own.setLevel(logging.INFO)
    secret_key = stack.horde.requester_key
    said = [{"role": "user", "content": MARKER}]
    private = {
        "messages": said,
        "user": MARKER,
        "metadata": {"a": MARKER},
        "safety_identifier": MARKER,
    }
    answers = []
    try:
        answers += [
            stack.post(build_body(**private | changes))
            for changes in ({"n": 2}, {"model": "nobody/knows"}, {"seed": True})
        ]
        answers.append(stack.post(build_body(**private), "KEYMARK-91c2"))
        answers.append(stack.call("GET", f"/v1/{MARKER}?{MARKER}"))
        stack.horde.take_nothing()
        answers.append(stack.post(build_body(**private, reasoning_effort="low")))
        waiting = stack.ask(**private)
        for number in range(3):
            stack.horde.fault(
                stack.await_job(name=f"worker {number}")["id"],
                fault_reason=f"disk full on {MARKER}",
            )
        answers.append(waiting.result(PATIENCE_SECONDS))
        stack.complete(f"{MARKER} too", **private)
        wait_until(
            lambda: (
                sum("horde.oai.request_done" in line for line in heard.lines) >= len(answers) + 1
            )
        )
    finally:
        own.removeHandler(heard)
        own.setLevel(level)
    for answer in answers:
        assert answer.status_code >= 400
        assert MARKER not in answer.text or answer.json()["error"]["code"] == "unknown_url"
        assert "KEYMARK" not in answer.text
    lines = "\n".join(heard.lines)
    assert "horde.oai.request_done" in lines
    for secret in (MARKER, "KEYMARK", secret_key):
        assert secret not in lines


def test_the_log_of_a_refusal_names_the_key_refused_and_never_its_value(stack: FrontStack) -> None:
    """Nor a key that is no name, since it may be a prompt."""
    heard, own = _Lines(), logging.getLogger("horde")
    level = own.level
    own.addHandler(heard)
    own.setLevel(logging.INFO)
    try:
        stack.post(build_body(grammar=MARKER))
        stack.post(build_body(messages=[{"role": MARKER, "content": "a"}]))
        stack.post(build_body(**{f"{MARKER} was said": 1}))
        wait_until(lambda: sum("request_done" in line for line in heard.lines) >= 3)
    finally:
        own.removeHandler(heard)
        own.setLevel(level)
    named = [json.loads(line).get("param") for line in heard.lines if "request_done" in line]
    assert named == ["grammar", "messages[0].role", None]
    assert MARKER not in "\n".join(heard.lines)


def test_a_client_s_own_name_of_its_request_is_logged_and_its_platform_s_headers_are_ignored(
    stack: FrontStack,
) -> None:
    heard, own = _Lines(), logging.getLogger("horde")
    level = own.level
    own.addHandler(heard)
    own.setLevel(logging.INFO)
    ignored = {
        "openai-organization": "org-MARK",
        "openai-project": "MARK",
        "openai-beta": "MARK=v2",
        "api-version": "MARK",
    }
    more = {
        "x-stainless-lang": "MARK",
        "http-referer": "https://MARK",
        "x-title": "MARK",
        "x-client-request-id": "trace-17",
    }
    try:
        answer = stack.post(build_body(model="nobody/knows"), **ignored, **more)
        lines = wait_until(lambda: [line for line in heard.lines if '"trace-17"' in line])
    finally:
        own.removeHandler(heard)
        own.setLevel(level)
    assert (answer.status_code, get_error(answer)["code"]) == (404, "model_not_found")
    assert answer.headers["x-request-id"] in lines[0]
    assert "MARK" not in "\n".join(heard.lines)


def test_fr_42_a_byte_order_mark_is_served_and_other_encodings_are_not(stack: FrontStack) -> None:
    _, completion = serve(stack, b"\xef\xbb\xbf" + json.dumps(build_body()).encode())
    assert completion["choices"][0]["message"]["content"] == "Blue."
    for data in (json.dumps(build_body()).encode("utf-16"), b'{"model": "\xff"}'):
        answer = stack.post(data)
        assert (answer.status_code, get_error(answer)["code"]) == (400, "invalid_json")


def test_fr_44_a_lost_answer_is_not_queued_and_paid_twice(stack: FrontStack) -> None:
    horde = {"operation_key": str(uuid4())}
    stack.horde.take_nothing()
    body = json.dumps(build_body(horde=horde)).encode()
    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer"
            f" {stack.horde.requester_key}\r\n"
        )
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: count_rows(WaitingPrompt) == 1)
    again = [
        stack.ask(horde=horde),
        stack.ask(horde=horde, stream=True),
        stack.ask(horde=horde | {"max_kudos": 100_000}),
    ]
    stack.horde.reply(stack.await_job()["id"])
    answers = [call.result(PATIENCE_SECONDS) for call in again]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    ids = {
        answers[0].json()["id"],
        answers[2].json()["id"],
        json.loads(answers[1].text.split("\n")[0].removeprefix("data: "))["id"],
    }
    assert len(ids) == 1
    assert count_rows(WaitingPrompt) == 1


# --- the process
# --------------------------------------------------------------------------------------------------


def run_process(environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "horde.cli.main", "front"],
        cwd=ROOT,
        env={**os.environ, "HORDE_LOG_FORMAT": "json", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_command_serves_drains_and_ends(stack: FrontStack) -> None:
    port = find_free_port()
    process = run_process(
        {
            "HORDE_OAI_PORT": str(port),
            "HORDE_OAI_NATIVE_URL": stack.native_url,
            "HORDE_OAI_REDIS_URL": "off",
            "HORDE_OAI_POLL_SECONDS": "1",
            "HORDE_OAI_SHUTDOWN_SECONDS": "3",
        }
    )
    try:
        with build_client(f"http://127.0.0.1:{port}") as client:
            wait_until(lambda: _is_up(client) or process.poll() is not None, 60)
            assert process.poll() is None
            stack.horde.take_nothing()
            headers = {"authorization": f"Bearer {stack.horde.requester_key}"}
            served = stack.threads.submit(
                client.post, "/v1/chat/completions", json=build_body(), headers=headers
            )
            job = stack.await_job()
            left = stack.threads.submit(
                client.post, "/v1/chat/completions", json=build_body(), headers=headers
            )
            wait_until(lambda: count_rows(WaitingPrompt) == 2)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            stack.horde.reply(job["id"])
            assert served.result(PATIENCE_SECONDS).status_code == 200
            answer = left.result(PATIENCE_SECONDS)
            assert (answer.status_code, get_error(answer)["code"]) == (503, "front_shutting_down")
            wait_until(
                lambda: stack.horde.status(get_error(answer)["metadata"]["request_id"])["done"]
            )
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        _, errors = process.communicate()
    events = [json.loads(line) for line in errors.splitlines()]
    assert {"horde.oai.started", "horde.oai.no_passkey", "horde.oai.shutting_down"} <= {
        event["event"] for event in events
    }
    assert stack.horde.requester_key not in errors


def _is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_the_command_refuses_what_it_cannot_read() -> None:
    process = run_process({"HORDE_OAI_TRUSTED_PROXIES": "x"})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("horde front: HORDE_OAI_TRUSTED_PROXIES ")
    assert "Traceback" not in errors


# --- figures
# --------------------------------------------------------------------------------------------------


def test_deliveries_and_errors_are_counted(stack: FrontStack) -> None:
    deliveries, errors, waits = (
        Counting(f"horde.oai.{name}") for name in ("completions", "errors", "wait_seconds")
    )
    stack.complete(max_tokens=4096)
    stack.refuse(n=2)
    stack.refuse(model="nobody/knows")
    assert wait_until(deliveries.read) == [
        ({"finish_reason": "stop", "lowered": True, "form": "chat"}, 1)
    ]
    assert waits.read() == [({"stream": False, "form": "chat"}, 1)]
    assert {(figures["code"], figures["phase"]): count for figures, count in errors.read()} == {
        ("model_not_found", "submit"): 1,
        ("unsupported_value", "request"): 1,
    }


def test_open_requests_are_shown(stack: FrontStack) -> None:
    assert set(read_figures("horde.oai.open_requests")) == {
        frozenset({("stream", is_stream), ("form", form.value)})
        for is_stream in (False, True)
        for form in FormName
    }
