# SPDX-License-Identifier: AGPL-3.0-or-later
import json
from typing import Any

import httpx
import pytest
from horde_sdk.generation_parameters.text.chat_policy import ChatFeature

from horde.bridge.job import JobFault, parse_job
from horde.bridge.jobs import serve_job
from horde.bridge.refusals import BackendRefusal, find_error, parse_retry_after
from horde.bridge.refused_keys import RefusedKeys
from tests.unit.bridge.scripted import (
    Script,
    answer,
    build_backend,
    build_connections,
    build_plan,
    chat_answer,
    completion,
    llama_script,
    text_answer,
)

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "Input length (9000) exceeds model's maximum context length (8192)."),
        (400, "Requested token count exceeds the model's maximum context length of 8192 tokens."),
        (422, "`inputs` must have less than 4095 tokens. Given: 5000"),
        (500, "Reached context length of 4096 tokens with this model"),
        (400, "input is too large to process. increase the physical batch size"),
        (413, "Input is too long for requested model."),
        (400, "too many tokens: total size limit exceeded"),
        (400, "This model's maximum prompt length is 131072 but the request contains 140000."),
        (400, "The prompt exceeds the context window."),
        (404, "Prompt does not fit into the context"),
    ],
)
def test_a_prompt_that_is_too_long_is_seen_in_many_words(status: int, message: str) -> None:
    assert BackendRefusal(status, message).is_context_overflow


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (429, "Rate limit reached: tokens per minute. The prompt exceeds it."),
        (413, "Request too large on tokens per minute (TPM): Limit 6000, input tokens exceed it"),
        (400, "temperature: Input should be less than or equal to 2"),
        (400, "top_p must be greater than 0"),
        (401, "Invalid token: the signature is longer than expected"),
        (400, "stop sequence is too long"),
        (400, "max_tokens is too large: 5000. This model supports at most 4096 completion tokens"),
        (500, "out of memory"),
        (400, ""),
    ],
)
def test_other_refusals_are_not_taken_for_a_long_prompt(status: int, message: str) -> None:
    assert not BackendRefusal(status, message).is_context_overflow


@pytest.mark.parametrize(
    ("answered", "status"),
    [
        ({"error": "out of memory"}, 500),
        ({"error": {"message": "x", "code": "429"}}, 429),
        ({"object": "error", "message": "x", "code": 400}, 400),
        ({"type": "error", "error": {"type": "overloaded_error"}}, 500),
        ({"detail": "Not Found"}, 500),
        ({"detail": [{"loc": ["body", "top_k"]}]}, 500),
        ({"message": "no", "status": 503}, 503),
        ({"choices": [{"error": {"code": 502, "message": "x"}, "finish_reason": "error"}]}, 502),
        ({"error": {"message": "x"}, "choices": []}, 500),
    ],
)
def test_an_error_inside_a_success_is_found(answered: Any, status: int) -> None:
    found = find_error(answered)
    assert found is not None
    assert found.status == status


@pytest.mark.parametrize(
    "answered",
    [
        {"choices": [], "error": None},
        {"choices": [], "error": {}},
        {"id": "x", "object": "chat.completion.chunk"},
        {"message": {"content": "Ollama's own form"}, "done": False},
        {"choices": [{"delta": {}}], "message": "ok"},
        None,
        "text",
    ],
)
def test_what_is_no_error_is_none(answered: Any) -> None:
    assert find_error(answered) is None


def read_detail(message: str, **payload: Any) -> str:
    script = llama_script(chat=answer({"error": {"message": message}}, 500))
    plan = build_plan(script)
    with pytest.raises(JobFault) as caught:
        serve_job(parse_job(chat_answer(**payload), plan), build_connections(script), plan)
    return caught.value.detail


def test_the_backends_own_words_are_in_the_log_and_bounded() -> None:
    assert "CUDA out of memory" in read_detail("CUDA out of memory. " + "x" * 10_000)
    assert len(read_detail("CUDA out of memory. " + "x" * 10_000)) < 300


@pytest.mark.parametrize(
    "echo",
    [
        "Tell me about my secret illness, please.",
        json.dumps('A "quoted" secret\nover two lines that is long.'),
        "A secret over   two lines.",
        "пароль мой секрет, никому",
    ],
)
def test_what_the_backend_repeats_of_a_prompt_is_not_in_the_log(echo: str) -> None:
    prompts = [
        "Tell me about my secret illness, please.",
        'A "quoted" secret\nover two lines that is long.',
        "A secret over\ntwo lines.",
        "пароль мой секрет, никому",
    ]
    messages = [{"role": "user", "content": prompt} for prompt in prompts]
    detail = read_detail(f"cannot serve {echo} sorry", messages=messages)
    assert "cannot serve" in detail
    assert "secret" not in detail
    assert "секрет" not in detail


def test_a_prompt_at_the_end_of_what_is_logged_is_not_in_the_log() -> None:
    messages = [{"role": "user", "content": "secretsecretsecretsecret"}]
    for size in range(150, 205):
        assert "secr" not in read_detail("x" * size + "secretsecretsecretsecret", messages=messages)


def test_a_short_prompt_is_not_in_the_log_either() -> None:
    messages = [{"role": "user", "content": "my pin 42"}]
    assert "pin" not in read_detail("cannot serve my pin 42 now", messages=messages)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), ("0.5", 0.5), (None, None), ("soon", None), ("-1", None), ("inf", None)],
)
def test_the_time_to_wait_is_read_from_seconds(header: str | None, seconds: float | None) -> None:
    assert parse_retry_after(header) == seconds


def refusing(*refused: str, message: str = "Unsupported parameter: '{key}'") -> Any:
    """A backend that refuses the first of these keys that it meets."""

    def chat(body: dict[str, Any]) -> httpx.Response:
        met = [key for key in refused if key in body]
        if met:
            return answer({"error": {"message": message.format(key=met[0])}}, 400)
        return completion()

    return chat


def unknown_server(chat: Any) -> Script:
    return Script({"/v1/models": answer({"data": [{"id": "m"}]}), CHAT: chat})


def serve(script: Script, **payload: Any) -> tuple[dict[str, Any], Any]:
    """Serve a job twice with one connection; the second reply, and the connection."""
    plan = build_plan(script, max_context_length=4096)
    connections = build_connections(script)
    for _ in range(2):
        reply = serve_job(parse_job(chat_answer(**payload), plan), connections, plan)
    return reply, connections.backend


def test_an_unknown_backend_is_not_sent_neutral_values() -> None:
    script = unknown_server(refusing("top_k", "min_p", "repeat_penalty", "repetition_penalty"))
    serve(script)
    (first, second) = script.bodies(CHAT)
    assert first == second
    assert set(first) == {"model", "messages", "max_tokens", "temperature", "top_p", "stream"}


@pytest.mark.parametrize(
    "message",
    [
        "Unsupported parameter: '{key}'",
        "{key}: Extra inputs are not permitted",
        'Unknown name "{key}": Cannot find field.',
        "got an unexpected keyword argument '{key}'",
        "Bad request",
        "",
    ],
)
def test_keys_that_a_backend_refuses_fault_no_job_and_are_remembered(message: str) -> None:
    keys = ("top_k", "min_p", "repeat_penalty", "repetition_penalty")
    script = unknown_server(refusing(*keys, message=message))
    reply, _ = serve(script, top_k=40, min_p=0.1, rep_pen=1.1)
    assert reply["message"]["content"] == "Blue."
    *_, before_last, last = script.bodies(CHAT)
    assert not set(keys) & set(last)
    assert before_last == last  # the second job was not refused again


def test_a_value_out_of_range_is_left_out_of_its_own_job_alone() -> None:
    def chat(body: dict[str, Any]) -> httpx.Response:
        if body.get("temperature", 0) > 1:
            return answer({"error": {"message": "temperature must be at most 1"}}, 400)
        return completion()

    script = unknown_server(chat)
    _, backend = serve(script, temperature=1.5)
    assert backend.refused_keys.send({"temperature": 0.5}, lambda body: body) == {
        "temperature": 0.5
    }


def test_a_newer_name_of_a_key_is_used() -> None:
    message = "Unsupported parameter: '{key}'. Use 'max_completion_tokens' instead."
    script = unknown_server(refusing("max_tokens", message=message))
    serve(script)
    assert [body.get("max_completion_tokens") for body in script.bodies(CHAT)] == [None, 64, 64]


def test_a_refused_feature_is_not_declared_any_more() -> None:
    script = unknown_server(refusing("seed"))
    supports = frozenset({ChatFeature.SEED, ChatFeature.PRESENCE_PENALTY})
    plan = build_plan(script, max_context_length=4096, supports=supports)
    connections = build_connections(script)
    serve_job(parse_job(chat_answer(seed=7), plan), connections, plan)
    features = connections.backend.refused_keys.features
    left = plan.withhold(features, takes_text=True).declaration
    assert left.features == {ChatFeature.PRESENCE_PENALTY}


def test_a_stream_that_may_not_be_asked_for_counts_is_read_without_them() -> None:
    script = unknown_server(refusing("stream_options"))
    plan = build_plan(script, max_context_length=4096)
    connections = build_connections(script, post_progress=lambda _: False)
    job = parse_job(chat_answer(stream_progress=True), plan)
    assert serve_job(job, connections, plan)["message"]["content"] == "Blue."


def test_a_refusal_that_is_about_no_key_is_given_back() -> None:
    script = unknown_server(answer({"error": {"message": "messages: roles must alternate"}}, 400))
    plan = build_plan(script, max_context_length=4096)
    with pytest.raises(JobFault) as caught:
        serve_job(parse_job(chat_answer(top_k=3), plan), build_connections(script), plan)
    assert caught.value.reason == "generation_error"
    assert len(script.bodies(CHAT)) == 3


def test_keys_of_text_jobs_are_left_out_too() -> None:
    def complete(body: dict[str, Any]) -> httpx.Response:
        if "top_k" in body:
            return answer({"error": {"message": "unknown field `top_k`"}}, 422)
        return answer({"choices": [{"text": " and then"}]})

    script = unknown_server(completion())
    script.answers["/v1/completions"] = complete
    plan = build_plan(script, max_context_length=4096)
    job = parse_job(text_answer(top_k=40), plan)
    assert serve_job(job, build_connections(script), plan)["generation"] == " and then"


def test_what_was_guessed_in_vain_is_not_remembered() -> None:
    keys = RefusedKeys()

    def attempt(body: dict[str, Any]) -> dict[str, Any]:
        if "temperature" in body:
            raise BackendRefusal(400, "")
        return body

    assert keys.send({"temperature": 2.0, "top_k": 1}, attempt) == {}
    assert keys.send({"top_k": 1}, attempt) == {"top_k": 1}


@pytest.mark.parametrize(
    ("answers", "waited"),
    [
        ([httpx.Response(429, headers={"Retry-After": "3"}), completion()], [3.0]),
        ([httpx.Response(503, headers={"Retry-After": "1.5"}), completion()], [1.5]),
        ([answer({}, 429), answer({}, 529), completion()], [2.0, 4.0]),
    ],
)
def test_a_backend_that_is_overloaded_is_asked_again_when_it_says(
    answers: list[Any], waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("horde.bridge.overload.time.sleep", pauses.append)
    script = llama_script(chat=answers)
    plan, connections = build_plan(), build_connections(script)
    reply = serve_job(parse_job(chat_answer(), plan), connections, plan)
    assert (reply["message"]["content"], pauses) == ("Blue.", waited)
    assert connections.backend.rest_seconds > 0


def test_a_backend_that_rests_longer_than_the_lease_gives_the_job_back() -> None:
    script = llama_script(chat=httpx.Response(429, headers={"Retry-After": "900"}))
    plan, connections = build_plan(), build_connections(script)
    with pytest.raises(JobFault) as caught:
        serve_job(parse_job(chat_answer(), plan), connections, plan)
    assert caught.value.is_backend_trouble
    assert connections.backend.rest_seconds > 800


@pytest.mark.parametrize("status", [404, 405, 501])
def test_only_these_say_that_there_is_no_such_route(status: int) -> None:
    assert build_backend(Script({"/props": answer({}, status)})).find("/props") is None


@pytest.mark.parametrize("status", [400, 401, 403, 408, 429, 500, 502, 503, 504])
def test_any_other_status_is_waited_out(status: int) -> None:
    with pytest.raises(BackendRefusal):
        build_backend(Script({"/props": answer({}, status)})).find("/props")
