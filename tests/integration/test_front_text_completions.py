# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text completions through a real front and a real API, with workers played by the tests."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from devtools.services import ServiceAddresses
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.db import transaction
from horde.oai import text_service
from tests.integration._fake_chat_worker import MODEL, start_anew
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    FrontStack,
    build_client,
    get_error,
    run_front,
    run_front_stack,
    wait_until,
)
from tests.integration.text_horde import TextHorde, change_worker, count_rows, require_worker

KEYS = {
    *("id", "object", "created", "model", "choices"),
    *("usage", "system_fingerprint", "x_horde"),
}


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(
        service_urls, "front_text", no_worker_grace_seconds=0.5, models_cache_seconds=0.0
    ) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()
    declare(stack)


def declare(stack: FrontStack, **changes: Any) -> None:
    """A text worker that is online and finds nothing."""
    answer = TextHorde(stack.horde.app).take(stack.horde.owner_key, models=[MODEL], **changes)
    assert answer["id"] is None


def post(stack: FrontStack, **changes: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "The sky is", "max_tokens": 64} | changes
    body = {key: value for key, value in body.items() if value is not ...}
    headers = {"authorization": f"Bearer {stack.horde.requester_key}"}
    return stack.call("POST", "/v1/completions", json=body, headers=headers)


def ask(stack: FrontStack, **changes: Any) -> "Future[httpx.Response]":
    return stack.threads.submit(post, stack, **changes)


def take(stack: FrontStack, name: str = "a worker") -> dict[str, Any]:
    """The job of a worker that polls until there is one."""

    def find() -> dict[str, Any] | None:
        popped = TextHorde(stack.horde.app).take(stack.horde.owner_key, name, models=[MODEL])
        return popped if popped["id"] is not None else None

    return wait_until(find)


def reply(stack: FrontStack, text: str, job: dict[str, Any] | None = None, **body: Any) -> None:
    """Serve the next job with a text."""
    job = job or take(stack)
    answer = TextHorde(stack.horde.app).submit(stack.horde.owner_key, job["id"], text, **body)
    assert answer.status_code == 200, answer.json


def finish(waiting: "Future[httpx.Response]") -> dict[str, Any]:
    answer = waiting.result(PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def count_left() -> int:
    """Native requests that neither ended nor were cancelled."""
    with transaction() as session:
        return sum(prompt.n > 0 and not prompt.faulted for prompt in session.query(WaitingPrompt))


def read_chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "event:" not in answer.text
    return [json.loads(event) for event in events[:-1]]


# --- the object
# ------------------------------------------------------------------------------------------


def test_a_prompt_is_completed_as_it_stands(stack: FrontStack) -> None:
    waiting = ask(stack)
    job = take(stack)
    assert job["payload"]["prompt"] == "The sky is"
    assert job["payload"]["max_length"] == 64
    reply(stack, " blue.", job)
    answer = waiting.result(PATIENCE_SECONDS)
    completion = finish(waiting)
    assert set(completion) == KEYS
    assert completion["object"] == "text_completion"
    assert completion["model"] == MODEL
    assert completion["choices"] == [
        {"text": " blue.", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]
    assert completion["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    (request,) = completion["x_horde"]["requests"]
    assert completion["id"] == f"cmpl-{request['request_id']}"
    assert answer.headers["x-horde-request-id"] == request["request_id"]
    assert int(answer.headers["openai-processing-ms"]) >= 0
    assert request["kudos"] > 0
    assert request["generations"][0]["worker_name"] == "a worker"
    assert completion["x_horde"]["estimated_usage"] is True


def test_prompts_and_samples_give_a_choice_each(stack: FrontStack) -> None:
    waiting = ask(stack, prompt=["One", "Two"], n=2)
    jobs = [take(stack) for _ in range(4)]
    assert len({job["id"] for job in jobs}) == 4
    for number, job in enumerate(jobs):
        reply(stack, f"{job['payload']['prompt']} {number}", job)
    completion = finish(waiting)
    assert [choice["index"] for choice in completion["choices"]] == [0, 1, 2, 3]
    told = [choice["text"].split()[0] for choice in completion["choices"]]
    assert told == ["One", "One", "Two", "Two"]
    assert len({choice["text"] for choice in completion["choices"]}) == 4
    assert len(completion["x_horde"]["requests"]) == 2
    assert count_rows(WaitingPrompt) == 2


def test_the_length_that_is_absent_is_the_least(stack: FrontStack) -> None:
    waiting = ask(stack, max_tokens=...)
    job = take(stack)
    assert job["payload"]["max_length"] == 16
    reply(stack, "x" * 64, job)
    assert finish(waiting)["choices"][0]["finish_reason"] == "length"


def test_samplers_reach_the_worker_under_their_native_names(stack: FrontStack) -> None:
    waiting = ask(
        stack, top_k=-1, min_p=0.1, repetition_penalty=1.2, tfs_z=0.9, typical_p=0.8, top_a=0.5
    )
    job = take(stack)
    expected = {"top_k": 0, "min_p": 0.1, "rep_pen": 1.2, "tfs": 0.9, "typical": 0.8, "top_a": 0.5}
    assert {key: job["payload"].get(key) for key in expected} == expected
    reply(stack, "a", job)
    finish(waiting)
    plain = ask(stack)
    job = take(stack)
    assert not {"top_k", "rep_pen", "temperature", "top_p", "seed"} & set(job["payload"])
    reply(stack, "a", job)
    finish(plain)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_that_the_worker_left_in_is_cut_with_all_behind_it(
    stack: FrontStack, stream: bool
) -> None:
    waiting = ask(stack, stop=["END", "\n\n"], stream=stream)
    job = take(stack)
    assert job["payload"]["stop_sequence"] == ["END", "\n\n"]
    reply(stack, " blue\n\nEND " + "x" * 300, job)
    answer = waiting.result(PATIENCE_SECONDS)
    chunks = read_chunks(answer) if stream else [answer.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " blue"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("state", ["censored", "csam"])
def test_a_withheld_text_says_so(stack: FrontStack, state: str) -> None:
    waiting = ask(stack)
    reply(stack, "withheld", state=state)
    (choice,) = finish(waiting)["choices"]
    assert choice["finish_reason"] == "content_filter"
    assert choice["text"] == ("" if state == "csam" else "withheld")


def test_options_of_the_horde_become_keys_of_the_text_request(stack: FrontStack) -> None:
    declare(stack, name="other")
    other = str(require_worker("other").id)
    waiting = ask(stack, horde={"ignore": [other], "max_context_length": 1024})
    job = take(stack)
    assert job["payload"]["max_context_length"] == 1024
    reply(stack, "a", job)
    finish(waiting)


def test_a_dry_run_adds_the_prices_and_queues_nothing(stack: FrontStack) -> None:
    one = post(stack, horde={"dry_run": True}).json()
    two = post(stack, prompt=["The sky is", "The sky is"], horde={"dry_run": True}).json()
    assert (one["choices"], two["choices"]) == ([], [])
    assert two["x_horde"]["kudos"] == 2 * one["x_horde"]["kudos"] > 0
    assert two["usage"]["prompt_tokens"] == 2 * one["usage"]["prompt_tokens"] > 0
    assert count_rows(WaitingPrompt) == 0


# --- streams
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("echo", [False, True])
def test_choices_are_streamed_as_they_come(stack: FrontStack, echo: bool) -> None:
    waiting = ask(
        stack,
        prompt=["One", "Two"],
        echo=echo,
        stream=True,
        stream_options={"include_usage": True},
    )
    jobs = {job["payload"]["prompt"]: job for job in (take(stack), take(stack))}
    reply(stack, " second", jobs["Two"])
    reply(stack, " first", jobs["One"])
    chunks = read_chunks(waiting.result(PATIENCE_SECONDS))
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in chunks)
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all("delta" not in choice for choice in choices)
    texts = {
        index: "".join(choice["text"] for choice in choices if choice["index"] == index)
        for index in (0, 1)
    }
    echoed = ("One", "Two") if echo else ("", "")
    assert texts == {0: f"{echoed[0]} first", 1: f"{echoed[1]} second"}
    finished = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(finished) == [0, 1]
    assert ["x_horde" in chunk for chunk in chunks].index(True) == len(chunks) - 1


def test_echo_puts_the_prompt_first_and_does_not_count_it_again(stack: FrontStack) -> None:
    waiting = ask(stack, echo=True)
    reply(stack, " blue.")
    completion = finish(waiting)
    assert completion["choices"][0]["text"] == "The sky is blue."
    assert completion["usage"]["completion_tokens"] == 2


def test_silence_is_filled_and_a_failure_is_an_event(stack: FrontStack) -> None:
    config = replace(
        stack.config,
        stream_open_seconds=0.1,
        keepalive_seconds=0.1,
        stream_budget_seconds=1.5,
    )
    with run_front(config) as url, build_client(url) as client:
        answer = client.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": ["a", "b"], "stream": True},
            headers={"authorization": f"Bearer {stack.horde.requester_key}"},
        )
    assert answer.text.count(": keep-alive") > 2
    *_, error, done = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(error[6:])["error"]["code"] == "wait_timeout"
    assert done == "data: [DONE]"
    assert count_left() == 0


# --- failing
# ------------------------------------------------------------------------------------------


def test_the_first_failure_cancels_the_other_prompts_and_is_the_answer(stack: FrontStack) -> None:
    waiting = ask(stack, prompt=["One", "Two"])
    first = take(stack)
    failing = first["payload"]["prompt"]
    left = None
    for number in range(3):
        job = first if number == 0 else take(stack, f"worker {number}")
        while job["payload"]["prompt"] != failing:
            left, job = job, take(stack, f"worker {number}")
        TextHorde(stack.horde.app).fault(stack.horde.owner_key, job["id"])
    error = get_error(waiting.result(PATIENCE_SECONDS))
    assert (error["code"], "request_id" in error["metadata"]) == ("generation_failed", True)
    assert left is None or left["payload"]["prompt"] != failing
    assert count_left() == 0


def test_a_refusal_of_a_later_prompt_cancels_the_earlier(stack: FrontStack) -> None:
    answer = post(stack, prompt=["short", "long " * 20000])
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "prompt",
    )
    assert count_left() == 0


def test_an_unknown_model_is_404_though_the_horde_would_queue_it(stack: FrontStack) -> None:
    answer = post(stack, model="nobody/serves")
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert count_rows(WaitingPrompt) == 0
    served = ask(stack, model=..., models=["nobody/serves", MODEL])
    reply(stack, "a")
    finish(served)


def test_a_request_that_no_worker_can_take_is_given_up(stack: FrontStack) -> None:
    declare(stack, name="elsewhere")
    change_worker("elsewhere", maintenance=True)
    only = [str(require_worker("elsewhere").id)]
    for mode in ("wait", "fail_fast"):
        answer = post(stack, horde={"availability_mode": mode, "only": only})
        error = get_error(answer)
        assert (answer.status_code, error["code"]) == (503, "no_worker_available")
        assert answer.headers["x-should-retry"] == "false"
    assert count_left() == 0


def test_a_native_refusal_names_the_client_s_own_key(stack: FrontStack) -> None:
    answer = post(stack, top_p=0)
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", "top_p")
    tight = {"max_context_length": 100, "context_fit": "reject"}
    answer = post(stack, max_tokens=64, prompt="a " * 200, horde=tight)
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "prompt",
    )
    answer = post(stack, max_tokens=128, horde=tight | {"context_fit": "ignore"})
    error = get_error(answer)
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "max_tokens",
    )
    assert "'max_tokens'" in error["message"]
    assert "'horde.max_context_length'" in error["message"]


def test_closing_the_connection_cancels_every_prompt(stack: FrontStack) -> None:
    body = json.dumps({"model": MODEL, "prompt": ["One", "Two"]}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: front\r\nAuthorization: Bearer"
        f" {stack.horde.requester_key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    address = urlsplit(stack.url)
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: count_left() == 2)
    wait_until(lambda: count_left() == 0)


def test_a_front_that_ends_takes_every_prompt_back(stack: FrontStack) -> None:
    with run_front(stack.config) as url:
        waiting = stack.threads.submit(
            httpx.post,
            f"{url}/v1/completions",
            json={"model": MODEL, "prompt": ["One", "Two"]},
            headers={"authorization": f"Bearer {stack.horde.requester_key}"},
            timeout=PATIENCE_SECONDS,
            trust_env=False,
        )
        wait_until(lambda: count_left() == 2)
    answer = waiting.result(PATIENCE_SECONDS)
    assert (answer.status_code, get_error(answer)["code"]) == (503, "front_shutting_down")
    assert count_left() == 0


def test_prompts_beyond_the_rate_limit_wait_for_their_turn(
    service_urls: ServiceAddresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[str | None] = []

    def note_pause(retry_after: str | None) -> float:
        asked_for.append(retry_after)
        return 0.3

    monkeypatch.setattr(text_service, "_parse_pause", note_pause)
    limited = {"rate_limits_enabled": True, "text_request_2sec_limit": "2/second"}
    with run_front_stack(service_urls, "front_text_limits", native=limited) as stack:
        declare(stack)
        prompts = [f"prompt {number}" for number in range(4)]
        waiting = ask(stack, prompt=prompts)
        for _ in prompts:
            reply(stack, "a")
        assert len(finish(waiting)["choices"]) == 4
    assert asked_for
    assert all(seconds is not None and int(seconds) >= 1 for seconds in asked_for)


def test_no_key_is_401_and_other_methods_405(stack: FrontStack) -> None:
    answer = stack.call("POST", "/v1/completions", json={"model": MODEL, "prompt": "a"})
    assert (answer.status_code, get_error(answer)["code"]) == (401, "missing_api_key")
    answer = stack.call("GET", "/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST, OPTIONS")


# --- OpenAI's library
# ------------------------------------------------------------------------------------------


def test_the_library_reads_objects_and_streams(stack: FrontStack) -> None:
    with openai.OpenAI(
        base_url=f"{stack.url}/v1", api_key=stack.horde.requester_key, max_retries=0
    ) as client:
        waiting = stack.threads.submit(
            client.completions.create, model=MODEL, prompt="The sky is", max_tokens=16
        )
        reply(stack, " blue.")
        assert waiting.result(PATIENCE_SECONDS).choices[0].text == " blue."
        streaming = stack.threads.submit(
            lambda: [
                chunk.choices[0].text
                for chunk in client.completions.create(
                    model=MODEL, prompt="The sky is", max_tokens=16, stream=True
                )
            ]
        )
        reply(stack, " grey.")
        assert "".join(streaming.result(PATIENCE_SECONDS)) == " grey."
