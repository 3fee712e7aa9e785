# SPDX-License-Identifier: AGPL-3.0-or-later
"""A reply whose client chose no length is as long as the workers there are can write, be they slow
or their replies short.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest

from devtools.services import ServiceAddresses
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.db import transaction
from horde.oai.calls import Calls
from horde.oai.native import NativeClient, NativeUnavailable
from tests.integration._fake_chat_worker import MODEL, Body, start_anew
from tests.integration.chat_front import PATIENCE_SECONDS, FrontStack, run_front_stack, wait_until
from tests.integration.text_horde import change_worker

# What a client of each form sends that leaves the length to the horde.
OPEN: dict[str, Body] = {
    "/v1/responses": {"input": "Name one colour."},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Name one colour."}],
        "max_tokens": 32_000,  # what agents send
    },
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Name one colour."}]},
}
SLOW = 2.0  # tokens a second: 240 in a lease


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "front_lengths", no_worker_grace_seconds=0.5) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def post(stack: FrontStack, path: str, **changes: Any) -> Any:
    headers = {"authorization": f"Bearer {stack.horde.requester_key}"}
    body = {"model": MODEL, **OPEN[path], **changes}
    return stack.threads.submit(lambda: stack.call("POST", path, json=body, headers=headers))


def serve(stack: FrontStack, path: str, pop: Body, **changes: Any) -> tuple[int, str]:
    """How long the reply may be that a worker is asked for, and the answer's text."""
    waiting = post(stack, path, **changes)
    job = stack.await_job(**pop)
    assert stack.horde.reply(job["id"], "Blue.").status_code == 200
    answer = waiting.result(PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return job["payload"]["max_length"], answer.text


def count_requests() -> tuple[int, int]:
    """All that were queued, and those that still wait."""
    with transaction() as session:
        rows = session.query(TextWaitingPrompt.n, TextWaitingPrompt.faulted).all()
    return len(rows), sum(1 for n, faulted in rows if n and not faulted)


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("longest", [16, 64, 400])
def test_workers_of_short_replies_serve_an_open_length(
    stack: FrontStack, path: str, longest: int
) -> None:
    pop = {"chat_limits": {"max_context_length": 4096, "max_length": longest}}
    stack.horde.take_nothing(**pop)
    length, _ = serve(stack, path, pop)
    assert length == longest


@pytest.mark.parametrize("path", OPEN)
@pytest.mark.parametrize("is_stream", [False, True])
def test_slow_workers_serve_an_open_length(stack: FrontStack, path: str, is_stream: bool) -> None:
    stack.horde.take_nothing()
    change_worker("chat worker", speed=SLOW)
    length, text = serve(stack, path, {}, stream=is_stream)
    assert length == 240
    assert "Blue." in text
    assert count_requests()[1] == 0


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_workers_whose_speed_nobody_knows_yet_serve_an_open_length(
    stack: FrontStack, path: str
) -> None:
    pop = {"chat_limits": {"max_context_length": 8192, "max_length": 4096}}
    stack.horde.take_nothing(**pop)
    assert serve(stack, path, pop)[0] == 1200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
def test_a_length_that_was_chosen_is_kept(stack: FrontStack, path: str) -> None:
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    stack.horde.take_nothing()
    change_worker("chat worker", speed=SLOW)
    answer = post(stack, path, **{name: 512}).result(PATIENCE_SECONDS)
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["param"] == name
    assert count_requests()[0] == 1


def test_what_an_operation_key_stands_for_is_kept(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    change_worker("chat worker", speed=SLOW)
    answer = post(stack, "/v1/responses", horde={"operation_key": str(uuid4())})
    refused = answer.result(PATIENCE_SECONDS)
    assert refused.status_code == 503, refused.text
    assert "240 or less" in refused.json()["error"]["message"]
    assert count_requests()[0] == 1


def test_workers_that_are_too_slow_for_anything_are_said_to_be(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    change_worker("chat worker", speed=0.1)
    answer = post(stack, "/v1/responses").result(PATIENCE_SECONDS)
    assert answer.status_code == 503, answer.text
    assert count_requests()[0] == 1


def test_nobody_there_costs_no_second_request(stack: FrontStack) -> None:
    stack.horde.take_nothing(chat_features=[])
    answer = post(stack, "/v1/responses").result(PATIENCE_SECONDS)
    assert answer.status_code in {404, 503}, answer.text
    assert count_requests()[0] <= 1


def before_cancels(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Let the front do this in a thread before each cancel that it sends."""
    cancel = NativeClient.cancel

    async def act_and_cancel(*words: Any) -> Any:
        await asyncio.to_thread(act)
        return await cancel(*words)

    monkeypatch.setattr(NativeClient, "cancel", act_and_cancel)


def test_what_cannot_be_cancelled_is_not_queued_again(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_tried = threading.Event()

    def fail() -> None:
        is_tried.set()
        raise NativeUnavailable("away")

    before_cancels(monkeypatch, fail)
    stack.horde.take_nothing()
    change_worker("chat worker", speed=SLOW)
    waiting = post(stack, "/v1/responses")
    assert is_tried.wait(PATIENCE_SECONDS)
    change_worker("chat worker", speed=1000.0)
    assert stack.horde.reply(stack.await_job()["id"], "Blue.").status_code == 200
    answer = waiting.result(PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    assert "Blue." in answer.text
    assert count_requests() == (1, 0)


def test_a_reply_that_comes_before_the_cancel_is_delivered(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve_it() -> None:
        change_worker("chat worker", speed=1000.0)
        assert stack.horde.reply(stack.await_job()["id"], "Blue.").status_code == 200

    before_cancels(monkeypatch, serve_it)
    stack.horde.take_nothing()
    change_worker("chat worker", speed=SLOW)
    answer = post(stack, "/v1/responses").result(PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    assert "Blue." in answer.text
    assert count_requests() == (1, 0)


def test_a_client_that_leaves_while_its_request_is_shortened_leaves_nothing(
    stack: FrontStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_cancelling, is_client_gone = threading.Event(), threading.Event()
    abandon = Calls._abandon

    def wait_until_client_is_gone() -> None:
        is_cancelling.set()
        assert is_client_gone.wait(PATIENCE_SECONDS)

    async def tell_and_abandon(*words: Any) -> None:
        is_client_gone.set()
        await abandon(*words)

    before_cancels(monkeypatch, wait_until_client_is_gone)
    monkeypatch.setattr(Calls, "_abandon", tell_and_abandon)
    stack.horde.take_nothing()
    change_worker("chat worker", speed=SLOW)
    path = "/v1/chat/completions"
    body = json.dumps({"model": MODEL, **OPEN[path]})
    head = (
        f"POST {path} HTTP/1.1\r\nhost: front\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {stack.horde.requester_key}\r\ncontent-length: {len(body)}\r\n"
    )
    url = httpx.URL(stack.url)
    with socket.create_connection((url.host, url.port or 80)) as client:
        client.sendall(f"{head}\r\n{body}".encode())
        assert is_cancelling.wait(PATIENCE_SECONDS)
    wait_until(lambda: count_requests() == (1, 0) or None)
