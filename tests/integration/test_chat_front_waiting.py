# SPDX-License-Identifier: AGPL-3.0-or-later
"""Waiting, giving up and failing, through a real front and a real API. Numbers are those of the
front's checklist.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import openai
import pytest

from devtools.services import ServiceAddresses
from horde.classes.base.waiting_prompt import TerminalOutcome, WaitingPrompt
from horde.db import transaction
from horde.oai import chat_service
from tests.integration._fake_chat_worker import MODEL, Body, start_anew
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    FrontStack,
    build_body,
    build_client,
    get_error,
    run_front,
    run_front_stack,
    run_native,
    wait_until,
)
from tests.integration.instruments import Counting
from tests.integration.text_horde import (
    change_worker,
    count_rows,
    get_request,
    require_worker,
)

EVENTS = (False, True)
ANONYMOUS_KEY = "0000000000"


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "front_waiting", no_worker_grace_seconds=0.5) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


@contextmanager
def hanging_up(stack: FrontStack, **changes: Any) -> Iterator[socket.socket]:
    """A client that has sent a completion and reads nothing; it hangs up when the block ends."""
    body = json.dumps(build_body(**changes)).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\nAuthorization: Bearer"
        f" {stack.horde.requester_key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    address = urlsplit(stack.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + body)
        yield client


def find_request_id() -> str | None:
    """The only request there is."""
    with transaction() as session:
        found = session.query(WaitingPrompt.id).filter(WaitingPrompt.active).first()
    return str(found[0]) if found else None


def await_request_id() -> str:
    return wait_until(find_request_id)


def await_cancelled(request_id: str, within_seconds: float = PATIENCE_SECONDS) -> None:
    wait_until(
        lambda: get_request(request_id).terminal_outcome == TerminalOutcome.CANCELLED,
        within_seconds,
    )


# --- clients that go away
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", EVENTS)
def test_75_closing_the_connection_cancels_a_queued_request(
    stack: FrontStack, stream: bool
) -> None:
    stack.horde.take_nothing()
    with hanging_up(stack, stream=stream):
        request_id = await_request_id()
    await_cancelled(request_id)


@pytest.mark.parametrize("stream", EVENTS)
def test_75_closing_the_connection_cancels_a_running_request(
    stack: FrontStack, stream: bool
) -> None:
    stack.horde.take_nothing()
    with hanging_up(stack, stream=stream):
        job = stack.await_job()
        request_id = await_request_id()
    await_cancelled(request_id)
    answer = stack.horde.reply(job["id"])
    assert answer.status_code in {200, 400}


def test_75_a_client_that_goes_while_its_body_is_read_leaves_nothing(stack: FrontStack) -> None:
    address = urlsplit(stack.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\nAuthorization: Bearer"
            b" k\r\nContent-Length: 9\r\n\r\n{"
        )
    assert stack.call("GET", "/health").status_code == 200
    assert count_rows(WaitingPrompt) == 0


@pytest.mark.parametrize("way", ["body", "header uuid", "header text"])
def test_76_a_key_of_the_client_keeps_the_request_for_when_it_comes_back(
    stack: FrontStack, way: str
) -> None:
    key = str(uuid4())
    changes: Body = {"horde": {"operation_key": key}} if way == "body" else {}
    headers = (
        {}
        if way == "body"
        else {"idempotency-key": key if way == "header uuid" else f"order {key}"}
    )
    stack.horde.take_nothing()
    with build_client(stack.url) as client, pytest.raises(Exception, match="timed out"):
        client.post(
            "/v1/chat/completions",
            json=build_body(**changes),
            headers={"authorization": f"Bearer {stack.horde.requester_key}", **headers},
            timeout=0.7,
        )
    job = stack.await_job()
    assert stack.horde.reply(job["id"], "Green.").status_code == 200
    answers = [
        stack.ask(headers=headers, **changes).result(PATIENCE_SECONDS).json() for _ in range(2)
    ]
    assert answers[0]["id"] == answers[1]["id"]
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == [
        "Green.",
        "Green.",
    ]
    assert count_rows(WaitingPrompt) == 1


def test_77_the_same_key_with_another_body_is_refused(stack: FrontStack) -> None:
    horde = {"operation_key": str(uuid4())}
    stack.complete(horde=horde)
    status, error = stack.refuse(horde=horde, max_tokens=65)
    assert (status, error["code"], error["param"]) == (
        400,
        "operation_key_conflict",
        "horde.operation_key",
    )
    assert error["metadata"] == {"rc": "OperationKeyConflict"}


# --- what no worker can do
# --------------------------------------------------------------------------------------------


def test_78_what_no_worker_declares_is_404_and_cancelled(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    answer = stack.post(build_body(reasoning_effort="low"))
    error = get_error(answer)
    assert (answer.status_code, error["type"], error["param"], error["code"]) == (
        404,
        "not_found_error",
        None,
        "no_worker_supports_features",
    )
    assert (
        error["message"]
        == "No worker can serve this request: no online worker serving the model declares"
        " reasoning_effort. The request was cancelled."
    )
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-horde-request-id"] == error["metadata"]["request_id"]
    assert set(error["metadata"]) == {"request_id"}
    assert stack.horde.status(error["metadata"]["request_id"])["done"]


def test_78_a_stream_is_refused_the_same_way(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    status, error = stack.refuse(seed=1, stream=True)
    assert (status, error["code"]) == (404, "no_worker_supports_features")
    assert "declares seed." in error["message"]


def test_79_a_context_that_no_worker_has_is_400(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    status, error = stack.refuse(
        messages=[{"role": "user", "content": "word " * 20000}], horde={"context_fit": "reject"}
    )
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


def test_79_a_context_limit_above_every_worker_is_400_after_queueing(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    status, error = stack.refuse(horde={"max_context_length": 16384})
    assert (status, error["type"], error["code"], error["param"]) == (
        400,
        "invalid_request_error",
        "context_length_exceeded",
        "messages",
    )
    assert "max_context_length" in error["message"]
    assert stack.horde.status(error["metadata"]["request_id"])["done"]


def test_82_fail_fast_without_a_free_worker_is_refused_at_once(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    stack.horde.pop(name="other", models=["other/model"], model_id="other/model")
    other = wait_until(lambda: find_worker_id("other"))
    status, error = stack.refuse(horde={"availability_mode": "fail_fast", "only": [other]})
    assert (status, error["code"], error["param"]) == (
        503,
        "no_worker_available",
        "horde.availability_mode",
    )
    assert stack.horde.status(error["metadata"]["request_id"])["done"]


def find_worker_id(name: str) -> str:
    return str(require_worker(name).id)


def test_the_grace_ends_a_request_that_no_worker_can_take(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    stack.horde.pop(name="other", models=["other/model"], model_id="other/model")
    answer = stack.post(build_body(horde={"only": [find_worker_id("other")]}))
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["param"]) == (503, "no_worker_available", None)
    assert answer.headers["x-should-retry"] == "false"
    assert stack.horde.status(error["metadata"]["request_id"])["done"]


# --- faults
# --------------------------------------------------------------------------------------------------


def fault_three_times(stack: FrontStack, **changes: Any) -> Any:
    stack.horde.take_nothing()
    waiting = stack.ask()
    for number in range(3):
        job = stack.await_job(name=f"worker {number}")
        stack.horde.fault(job["id"], **changes)
    return waiting.result(PATIENCE_SECONDS)


def test_83_three_faults_are_502_and_not_retried(stack: FrontStack) -> None:
    answer = fault_three_times(stack)
    error = get_error(answer)
    assert (answer.status_code, error["type"], error["code"]) == (
        502,
        "server_error",
        "generation_failed",
    )
    assert answer.headers["x-should-retry"] == "false"
    assert error["metadata"]["request_id"] == answer.headers["x-horde-request-id"]


@pytest.mark.parametrize(
    ("reason", "status", "code", "param"),
    [
        ("prompt_overflow", 400, "context_length_exceeded", "messages"),
        ("unbuildable_grammar", 400, "unbuildable_grammar", None),
        ("generation_error", 502, "generation_failed", None),
    ],
)
def test_84_the_reason_of_the_workers_decides(
    stack: FrontStack, reason: str, status: int, code: str, param: str | None
) -> None:
    answer = fault_three_times(stack, fault_reason=reason)
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["metadata"]["rc"] == "ChatWorkerFault"


def test_85_a_cancel_from_outside_ends_the_call(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = stack.ask()
    stack.horde.cancel(await_request_id())
    answer = waiting.result(PATIENCE_SECONDS)
    error = get_error(answer)
    assert (answer.status_code, error["code"]) == (502, "no_generation")
    assert error["metadata"]["rc"] == "ChatRequestNoGeneration"


def test_a_request_whose_row_is_gone_is_lost(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = stack.ask()
    await_request_id()
    with transaction() as session:
        session.query(WaitingPrompt).delete()
    answer = waiting.result(PATIENCE_SECONDS)
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["metadata"]["rc"]) == (
        502,
        "request_lost",
        "RequestNotFound",
    )


def test_88_a_reply_that_breaks_the_schema_is_not_delivered(stack: FrontStack) -> None:
    declared = {
        "chat_features": ["prompt_overflow_refused", "json_schema", "structured_output_enforced"]
    }
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }
    stack.horde.take_nothing(**declared)
    waiting = stack.ask(response_format=wanted)
    for number in range(3):
        job = stack.await_job(name=f"worker {number}", **declared)
        assert stack.horde.reply(job["id"], "prose").status_code == 400
        stack.horde.fault(job["id"], fault_reason="reply_refused")
    answer = waiting.result(PATIENCE_SECONDS)
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["metadata"]["rc"]) == (
        502,
        "nonconformant_reply",
        "ChatSubmitNonconformant",
    )


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("kind", ["json_object", "json_schema", "tools"])
def test_a_strict_reply_cut_at_its_limit_says_so_and_what_to_raise(
    stack: FrontStack, kind: str, key: str
) -> None:
    """Whatever the form it was to have."""
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    wanted = {
        "json_object": {"response_format": {"type": "json_object"}},
        "json_schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": schema},
            }
        },
        "tools": {"tools": [tool], "tool_choice": "required"},
    }[kind]
    declared = {
        "chat_features": [
            *("prompt_overflow_refused", "json_schema", "json_object", "tools"),
            *("structured_output_enforced", "tool_choice_enforced"),
        ]
    }
    stack.horde.take_nothing(**declared)
    waiting = stack.ask(**wanted, **({"max_tokens": ..., key: 16}))
    for number in range(3):
        job = stack.await_job(name=f"worker {number}", **declared)
        stack.horde.reply(job["id"], '{"a', finish_reason="length")
        stack.horde.fault(job["id"], fault_reason="reply_refused")
    error = get_error(waiting.result(PATIENCE_SECONDS))
    assert error["code"] == "nonconformant_reply"
    assert "cut at the limit of 16 tokens" in error["message"]
    assert f"Raise '{key}'" in error["message"]


@pytest.mark.parametrize("mode", ["wait", "fail_fast"])
def test_a_request_that_no_worker_is_fast_enough_for_is_told_the_length_that_is_served(
    stack: FrontStack, mode: str
) -> None:
    """Without it nobody would know that speed is the reason."""
    stack.horde.take_nothing()
    change_worker("chat worker", speed=2.0)
    changes: dict[str, Any] = {"max_tokens": ..., "max_completion_tokens": 512}
    changes["horde"] = {"availability_mode": mode}
    status, error = stack.refuse(**changes)
    assert (status, error["code"], error["param"]) == (
        503,
        "no_worker_available",
        "max_completion_tokens",
    )
    assert "'max_completion_tokens' to 240 or less" in error["message"]
    assert error["metadata"]["largest_max_length"] == 240


@pytest.mark.parametrize("levels", [11, 48, 100])
def test_a_schema_that_nests_too_deep_is_named_with_its_path(
    stack: FrontStack, levels: int
) -> None:
    """The bound of the body's own depth lies far above."""
    schema: Body = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    status, error = stack.refuse(tools=[tool])
    assert (status, error["code"], error["param"]) == (
        400,
        "unsupported_value",
        "tools[0].function.parameters",
    )


def test_a_strict_request_without_a_worker_names_best_effort(stack: FrontStack) -> None:
    """Before it is queued, for want of kudos, and after."""
    promising_less = {"chat_features": ["tools"]}
    stack.horde.take_nothing(**promising_less)
    status, error = stack.refuse()
    assert (status, error["code"]) == (404, "no_worker_supports_features")
    assert 'horde.conformance: "best_effort"' in error["message"]
    refused = stack.refuse(key=ANONYMOUS_KEY, max_tokens=1024)[1]
    assert refused["metadata"]["rc"] == "NoEligibleWorker"
    assert 'horde.conformance: "best_effort"' in refused["message"]
    served = stack.complete(pop=promising_less, horde={"conformance": "best_effort"})
    assert served["choices"][0]["message"]["content"] == "Blue."


# --- budgets
# --------------------------------------------------------------------------------------------------


def test_the_deadline_cancels_and_answers_504(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with (
        run_front(replace(stack.config, completion_budget_seconds=1.0)) as url,
        build_client(url) as client,
    ):
        answer = client.post(
            "/v1/chat/completions",
            json=build_body(),
            headers={"authorization": f"Bearer {stack.horde.requester_key}"},
        )
    error = get_error(answer)
    assert (answer.status_code, error["type"], error["code"]) == (
        504,
        "timeout_error",
        "wait_timeout",
    )
    assert answer.headers["x-should-retry"] == "false"
    assert {"request_id", "queue_position", "wait_time"} <= set(error["metadata"])
    assert stack.horde.status(error["metadata"]["request_id"])["done"]


def test_too_many_open_requests_are_503(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with run_front(replace(stack.config, max_open_requests=1)) as url, build_client(url) as client:
        headers = {"authorization": f"Bearer {stack.horde.requester_key}"}
        first = stack.threads.submit(
            client.post, "/v1/chat/completions", json=build_body(), headers=headers
        )
        job = stack.await_job()
        answer = client.post("/v1/chat/completions", json=build_body(), headers=headers)
        error = get_error(answer)
        assert (answer.status_code, error["type"], error["code"]) == (
            503,
            "server_error",
            "front_overloaded",
        )
        assert answer.headers["retry-after"] == "5"
        assert "x-should-retry" not in answer.headers
        assert client.get("/health").status_code == 200
        stack.horde.reply(job["id"])
        assert first.result(PATIENCE_SECONDS).status_code == 200


# --- an API in trouble
# ------------------------------------------------------------------------------------------------


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_an_api_that_restarts_does_not_end_waiting_calls(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    port = find_free_port()
    headers = {"authorization": f"Bearer {stack.horde.requester_key}"}
    config = replace(stack.config, native_url=f"http://127.0.0.1:{port}/api", poll_seconds=0.1)
    with run_front(config) as url, build_client(url) as client:
        with run_native(stack.horde.app, port):
            waiting = [
                stack.threads.submit(
                    client.post, "/v1/chat/completions", json=build_body(), headers=headers
                )
                for _ in range(3)
            ]
            jobs = [stack.await_job() for _ in waiting]
            time.sleep(0.3)
        for job in jobs:
            assert stack.horde.reply(job["id"]).status_code == 200
        time.sleep(0.3)
        assert not any(call.done() for call in waiting)
        with run_native(stack.horde.app, port):
            assert [call.result(PATIENCE_SECONDS).status_code for call in waiting] == [
                200,
                200,
                200,
            ]


def test_an_api_that_cannot_be_reached_is_502(stack: FrontStack) -> None:
    config = replace(
        stack.config, native_url=f"http://127.0.0.1:{find_free_port()}/api", submit_attempts=1
    )
    with run_front(config) as url, build_client(url) as client:
        answer = client.post(
            "/v1/chat/completions", json=build_body(), headers={"authorization": "Bearer k"}
        )
        error = get_error(answer)
        assert (answer.status_code, error["type"], error["code"]) == (
            502,
            "server_error",
            "upstream_unavailable",
        )
        assert "x-should-retry" not in answer.headers
        models = client.get("/v1/models")
        assert (models.status_code, get_error(models)["code"]) == (502, "upstream_unavailable")
        ready = client.get("/health/ready")
        assert (ready.status_code, ready.json()["status"], ready.json()["native"]) == (
            503,
            "not_ready",
            False,
        )
        assert client.get("/health").status_code == 200


class ScriptedApi(BaseHTTPRequestHandler):
    """Answers each call with the next of `answers`: (status, body), or None to hang up without
    one.
    """

    answers: ClassVar[list[tuple[int, bytes] | None]] = []
    seen: ClassVar[list[tuple[str, str, dict[str, str], bytes]]] = []
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        type(self).seen.append(
            (
                self.command,
                self.path,
                {name.lower(): value for name, value in self.headers.items()},
                body,
            )
        )
        scripted = self.answers.pop(0) if self.answers else (500, b"<html>nothing left</html>")
        if scripted is None:
            self.close_connection = True
            return
        status, data = scripted
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET = do_DELETE = answer  # noqa: N815  the names the library calls them by

    # The name the library calls it by.
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing."""


@contextmanager
def scripted_api(*answers: tuple[int, bytes] | None) -> Iterator[tuple[str, type[ScriptedApi]]]:
    """An API that gives these answers; its address and what it saw."""
    handler = type("Handler", (ScriptedApi,), {"answers": list(answers), "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/api", handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def post_before(
    stack: FrontStack, native_url: str, headers: dict[str, str] | None = None, **settings: Any
) -> httpx.Response:
    """The answer of a front of its own before another API."""
    config = replace(stack.config, native_url=native_url, **settings)
    with run_front(config) as url, build_client(url) as client:
        return client.post(
            "/v1/chat/completions",
            json=build_body(),
            headers=headers or {"authorization": "Bearer k"},
        )


ACCEPTED = (202, b'{"id": "00000000-0000-0000-0000-00000000000a", "kudos": 1}')
DONE = (
    200,
    json.dumps(
        {
            "generations": [
                {
                    "message": {"role": "assistant", "content": "Blue."},
                    "finish_reason": "stop",
                    "worker_id": "00000000-0000-0000-0000-000000000001",
                    "worker_name": "w",
                    "model": MODEL,
                    "state": "ok",
                }
            ],
            "done": True,
            "kudos": 1,
        }
    ).encode(),
)
HTML = b"<html><body>Bad Gateway</body></html>"


@pytest.mark.parametrize("lost", [None, (502, HTML), (503, b'{"message": "no rc"}'), (504, b"")])
def test_a_submit_whose_answer_is_lost_is_repeated_with_the_same_key(
    stack: FrontStack, lost: tuple[int, bytes] | None
) -> None:
    retries = Counting("horde.oai.submit_retries")
    with scripted_api(lost, ACCEPTED, DONE) as (native_url, api):
        answer = post_before(stack, native_url)
    assert answer.status_code == 200, answer.text
    assert retries.read() == [({"outcome": "recovered"}, 1)]
    submits = [body for method, _, _, body in api.seen if method == "POST"]
    assert len(submits) == 2
    assert submits[0] == submits[1]
    assert json.loads(submits[0])["horde"]["operation_key"]


def test_a_submit_that_is_never_answered_is_given_up_after_three_attempts(
    stack: FrontStack,
) -> None:
    retries = Counting("horde.oai.submit_retries")
    with scripted_api(None, (504, HTML), None, ACCEPTED) as (native_url, api):
        answer = post_before(stack, native_url)
    assert (answer.status_code, get_error(answer)["code"]) == (502, "upstream_unavailable")
    submits = [body for *_, body in api.seen]
    assert len(submits) == 3
    assert len(set(submits)) == 1
    assert retries.read() == [({"outcome": "failed"}, 1)]


def test_a_definite_refusal_is_not_repeated(stack: FrontStack) -> None:
    for status, body, code in (
        (503, b'{"message": "m", "rc": "ChatAdmissionDisabled"}', "admission_disabled"),
        (500, b'{"message": "Internal Server Error"}', "upstream_error"),
        (500, HTML, "upstream_unavailable"),
        (200, HTML, "upstream_unavailable"),
        (302, b"", "upstream_unavailable"),
        (429, HTML, "rate_limit_exceeded"),
        (418, b'{"message": "m", "rc": "InvalidPromptEncoding"}', "invalid_prompt_encoding"),
    ):
        with scripted_api((status, body)) as (native_url, api):
            answer = post_before(stack, native_url)
        assert get_error(answer)["code"] == code
        assert len(api.seen) == 1


def test_a_defect_while_waiting_cancels_and_is_not_retried(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(chat_service, "wait_for_reply", fail)
    stack.horde.take_nothing()
    answer = stack.post(build_body())
    request_id = answer.headers["x-horde-request-id"]
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["metadata"]) == (
        500,
        "internal_error",
        {"request_id": request_id},
    )
    assert answer.headers["x-should-retry"] == "false"
    await_cancelled(request_id)


def test_statuses_that_make_no_sense_are_read_again(stack: FrontStack) -> None:
    nonsense = [
        (500, HTML),
        (200, b"[]"),
        (404, HTML),
        (429, b'{"message": "slow down"}'),
        None,
        (200, b"{"),
    ]
    with scripted_api(ACCEPTED, *nonsense, DONE) as (native_url, api):
        answer = post_before(stack, native_url, poll_seconds=0.05)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "Blue."
    assert len(api.seen) == 8


def test_a_client_that_goes_during_the_submit_has_its_request_cancelled(stack: FrontStack) -> None:
    slow = threading.Event()

    class Slow(ScriptedApi):
        def answer(self) -> None:
            if self.command == "POST":
                slow.wait(5)
            super().answer()

        do_POST = do_GET = do_DELETE = answer  # noqa: N815  the names the library calls them by

    Slow.answers, Slow.seen = [ACCEPTED, DONE], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        native_url = f"http://127.0.0.1:{server.server_port}/api"
        with run_front(replace(stack.config, native_url=native_url)) as url:
            with hanging_up(replace(stack, url=url)):
                time.sleep(0.3)
            slow.set()
            wait_until(lambda: any(method == "DELETE" for method, *_ in Slow.seen))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_headers_of_the_native_calls(stack: FrontStack) -> None:
    sent = {
        "authorization": "Bearer my key",
        "client-agent": "mine:1:me",
        "proxied-for": "198.51.100.66",
        "proxy-authorization": "stolen",
        "x-forwarded-for": "203.0.113.9, 198.51.100.7",
    }
    loopback = (ip_network("127.0.0.0/8"),)
    for passkey, trusted, expected in (
        ("", (), None),
        ("pass", (), "127.0.0.1"),
        ("pass", loopback, "198.51.100.7"),
    ):
        with scripted_api(ACCEPTED, DONE) as (native_url, api):
            answer = post_before(
                stack, native_url, sent, proxy_passkey=passkey, trusted_proxies=trusted
            )
            assert answer.status_code == 200
        for _, _, headers, _ in api.seen:
            assert headers["apikey"] == "my key"
            assert headers["client-agent"] == "mine:1:me"
            assert headers.get("proxy-authorization") == (passkey or None)
            assert headers.get("proxied-for") == expected


def test_the_model_list_is_read_for_nobody_in_particular(stack: FrontStack) -> None:
    with scripted_api((200, b"[]")) as (native_url, api):
        config = replace(
            stack.config, native_url=native_url, proxy_passkey="pass", client_agent="front:1:me"
        )
        with run_front(config) as url, build_client(url) as client:
            listed = client.get(
                "/v1/models?limit=1",
                headers={"authorization": "Bearer k", "client-agent": "mine:1:me"},
            )
    assert listed.json() == {"object": "list", "data": []}
    ((method, path, headers, _),) = api.seen
    assert (method, path) == ("GET", "/api/v2/status/models?type=text&chat=true")
    assert (headers["client-agent"], headers["proxy-authorization"]) == ("front:1:me", "pass")
    assert not {"apikey", "proxied-for", "authorization"} & headers.keys()


def test_a_front_that_is_ended_says_so_and_cancels(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    headers = {"authorization": f"Bearer {stack.horde.requester_key}"}
    with build_client("http://front") as client:
        with run_front(stack.config) as url:
            waiting = stack.threads.submit(
                client.post, f"{url}/v1/chat/completions", json=build_body(), headers=headers
            )
            request_id = await_request_id()
            time.sleep(0.3)
        # Leaving the block ended the front, which tells open calls that their time is over.
        answer = waiting.result(PATIENCE_SECONDS)
    error = get_error(answer)
    assert (answer.status_code, error["code"]) == (503, "front_shutting_down")
    assert error["metadata"]["request_id"] == request_id
    assert stack.horde.status(request_id)["done"]


def test_the_sdk_does_not_retry_what_would_queue_again(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.horde.requester_key)
    with client, pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], seed=1
        )
    assert raised.value.code == "no_worker_supports_features"
    assert count_rows(WaitingPrompt) == 1
