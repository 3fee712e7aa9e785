# SPDX-License-Identifier: AGPL-3.0-or-later
"""Completions that are waited for, through a real front and a real API. Numbers are those of the
front's checklist.
"""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from devtools.services import ServiceAddresses
from horde.oai.mapping import build_system_fingerprint
from tests.integration._fake_chat_worker import MODEL, Body, build_call, build_tool, start_anew
from tests.integration.chat_front import (
    EXPECTED_COMPLETION_KEYS,
    PATIENCE_SECONDS,
    FrontStack,
    build_body,
    run_front_stack,
    wait_until,
)

COUNTS = {"prompt_tokens": 21, "completion_tokens": 3}
TOOLS_DECLARED: Body = {
    "chat_features": ["prompt_overflow_refused", "tools", "tool_choice_enforced"]
}
SEPARATORS = "line\nbreak\r\n\u2028\u2029\u0085 🌈 é \u0001"


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "front_completions") as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def take_payload(
    stack: FrontStack,
    *,
    pop: Body | None = None,
    headers: dict[str, str] | None = None,
    **changes: Any,
) -> Body:
    """The payload of the job that a completion becomes; the worker replies afterwards."""
    stack.horde.take_nothing(**(pop or {}))
    waiting = stack.ask(headers=headers, **changes)
    job = stack.await_job(**(pop or {}))
    stack.horde.reply(job["id"])
    answer = waiting.result(PATIENCE_SECONDS)
    assert answer.status_code == 200, answer.text
    return dict(job["payload"])


def test_1_a_completion_has_exactly_the_keys_of_the_reference(stack: FrontStack) -> None:
    completion = stack.complete(reply=COUNTS)
    assert set(completion) == EXPECTED_COMPLETION_KEYS
    assert completion["object"] == "chat.completion"
    [choice] = completion["choices"]
    assert set(choice) == {"index", "message", "finish_reason", "native_finish_reason", "logprobs"}
    assert choice["message"] == {"role": "assistant", "content": "Blue."}
    assert set(completion["x_horde"]) == {
        *(
            "request_id",
            "worker_id",
            "worker_name",
            "kudos",
            "charge_basis",
            "estimated_usage",
            "queue_wait_seconds",
        ),
    }


def test_6_and_46_and_54_ids_and_headers_of_a_completion(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = stack.ask()
    stack.horde.reply(stack.await_job()["id"])
    answer = waiting.result(PATIENCE_SECONDS)
    completion = answer.json()
    request_id = completion["x_horde"]["request_id"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["openai-processing-ms"].isdigit()
    assert answer.headers["x-horde-request-id"] == request_id
    assert completion["id"] == f"chatcmpl-{request_id}"
    [generation] = stack.horde.status(request_id)["generations"]
    assert generation["message"]["content"] == completion["choices"][0]["message"]["content"]
    assert completion["system_fingerprint"] == build_system_fingerprint(
        generation["worker_id"], MODEL
    )
    assert completion["x_horde"]["kudos"] == stack.horde.status(request_id)["kudos"]


def test_11_the_anonymous_key_is_served(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = stack.ask("0000000000")
    stack.horde.reply(stack.await_job()["id"])
    assert waiting.result(PATIENCE_SECONDS).status_code == 200


def test_15_a_list_of_models_is_served_by_any_and_names_the_one(stack: FrontStack) -> None:
    completion = stack.complete(model=None, models=["elinas/chronos-70b-v2", MODEL])
    assert completion["model"] == MODEL


def test_17_and_26_and_30_a_plain_request_carries_only_the_defaults(stack: FrontStack) -> None:
    optional = (
        *(
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "n",
            "seed",
            "stop",
            "stream",
            "stream_options",
        ),
        *(
            "presence_penalty",
            "frequency_penalty",
            "reasoning_effort",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
        ),
        *("response_format", "metadata"),
    )
    payload = take_payload(stack, **dict.fromkeys(optional))
    assert payload["max_length"] == 512
    assert (payload["temperature"], payload["top_p"]) == (1.0, 1.0)
    assert (payload["frequency_penalty"], payload["presence_penalty"]) == (0.0, 0.0)
    assert payload.keys().isdisjoint(
        {"seed", "stop_sequence", "reasoning_effort", "tools", "tool_choice", "response_format"}
    )


def test_20_and_26_and_29_and_30_what_reaches_the_worker(stack: FrontStack) -> None:
    payload = take_payload(
        stack,
        pop={"chat_features": ["prompt_overflow_refused", "seed"]},
        max_tokens=...,
        max_completion_tokens=64,
        stop="\nuser:",
        seed=7,
        store=True,
        metadata={"a": "b"},
        user="me",
        safety_identifier="me",
        prompt_cache_key="k",
        service_tier="auto",
    )
    assert (payload["max_length"], payload["stop_sequence"], payload["seed"]) == (
        64,
        ["\nuser:"],
        7,
    )
    assert payload.keys().isdisjoint(
        {"store", "metadata", "user", "safety_identifier", "prompt_cache_key", "service_tier"}
    )


def test_34_a_dry_run_quotes_and_queues_nothing(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    answer = stack.post(build_body(horde={"dry_run": True}))
    completion = answer.json()
    assert answer.status_code == 200
    assert set(completion) == EXPECTED_COMPLETION_KEYS
    assert completion["id"].startswith("chatcmpl-dryrun-")
    assert completion["choices"] == []
    assert completion["x_horde"]["kudos"] > 0
    assert completion["x_horde"]["dry_run"] is True
    assert "prompt" not in completion["x_horde"]["resolved"]
    assert (
        completion["usage"]["prompt_tokens"]
        == completion["x_horde"]["resolved"]["estimated_prompt_tokens"]
        > 0
    )
    assert "x-horde-request-id" not in answer.headers
    stack.horde.take_nothing()


def test_36_developer_reaches_the_worker_as_system(stack: FrontStack) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert take_payload(stack, messages=messages)["messages"][0] == {
        "role": "system",
        "content": "Be brief.",
    }


def test_37_and_38_and_39_what_the_front_returned_is_accepted_in_the_next_turn(
    stack: FrontStack,
) -> None:
    asked = {"role": "user", "content": "Weather in Oslo?"}
    first = stack.complete(
        None,
        pop=TOOLS_DECLARED,
        reply={"tool_calls": [build_call()], "finish_reason": "tool_calls"},
        messages=[asked],
        tools=[build_tool()],
    )
    [choice] = first["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"] == [build_call()]
    echoed = choice["message"] | {
        "refusal": None,
        "annotations": [],
        "reasoning_content": "hm",
        "audio": None,
    }
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "Rain", "name": "lookup_weather"}
    payload = take_payload(
        stack, pop=TOOLS_DECLARED, messages=[asked, echoed, answer], tools=[build_tool()]
    )
    assert payload["messages"] == [
        asked,
        {"role": "assistant", "content": None, "tool_calls": [build_call()]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain"},
    ]


def test_47_and_48_usage_is_the_worker_s_or_estimated(stack: FrontStack) -> None:
    counted = stack.complete(reply=COUNTS)
    assert counted["usage"] == {"prompt_tokens": 21, "completion_tokens": 3, "total_tokens": 24}
    assert counted["x_horde"]["estimated_usage"] is False
    estimated = stack.complete()
    assert estimated["usage"] == {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}
    assert estimated["x_horde"]["estimated_usage"] is True


def test_49_and_51_reasoning_is_separate_and_can_be_hidden(stack: FrontStack) -> None:
    reply = {
        "reasoning_content": "Let me think",
        "reasoning_tokens": 2,
        **COUNTS,
        "finish_reason": "length",
    }
    shown = stack.complete("", reply=dict(reply))
    assert shown["choices"][0]["message"] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Let me think",
    }
    assert shown["choices"][0]["finish_reason"] == "length"
    assert shown["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    hidden = stack.complete("", reply=dict(reply), horde={"include_reasoning": False})
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert hidden["usage"] == shown["usage"]
    [generation] = stack.horde.status(hidden["x_horde"]["request_id"])["generations"]
    assert generation["message"]["reasoning_content"] == "Let me think"


def test_50_reasons_to_finish_pass_through(stack: FrontStack) -> None:
    completion = stack.complete(
        reply={"finish_reason": "length", "native_finish_reason": "max_new_tokens"}
    )
    [choice] = completion["choices"]
    assert (choice["finish_reason"], choice["native_finish_reason"]) == ("length", "max_new_tokens")


def test_53_a_forced_function_ends_with_stop_and_a_call(stack: FrontStack) -> None:
    completion = stack.complete(
        None,
        pop=TOOLS_DECLARED,
        reply={"tool_calls": [build_call()], "finish_reason": "tool_calls"},
        tools=[build_tool()],
        tool_choice={"type": "function", "function": {"name": "lookup_weather"}},
    )
    assert completion["choices"][0]["finish_reason"] == "stop"
    assert completion["choices"][0]["message"]["tool_calls"] == [build_call()]


def test_55_an_empty_reply_is_an_empty_string(stack: FrontStack) -> None:
    completion = stack.complete("")
    assert completion["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert completion["usage"]["completion_tokens"] == 0


def test_56_a_lowered_limit_is_reported(stack: FrontStack) -> None:
    completion = stack.complete(max_tokens=4096)
    reasons = [entry["reason"] for entry in completion["x_horde"]["context_adjustments"]]
    assert "worker_max_length" in reasons


def test_95_separators_and_emoji_arrive_as_they_are(stack: FrontStack) -> None:
    completion = stack.complete(SEPARATORS, messages=[{"role": "user", "content": SEPARATORS}])
    assert completion["choices"][0]["message"]["content"] == SEPARATORS


def test_the_sdk_reads_a_completion(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with openai.OpenAI(
        base_url=f"{stack.url}/v1", api_key=stack.horde.requester_key, max_retries=0
    ) as client:
        waiting = stack.threads.submit(
            client.chat.completions.create,
            model=MODEL,
            messages=[{"role": "user", "content": "Name one colour."}],
        )
        stack.horde.reply(stack.await_job()["id"])
        completion = waiting.result(PATIENCE_SECONDS)
        listed = client.models.list().data
    assert completion.choices[0].message.content == "Blue."
    assert completion._request_id.startswith("req_")
    assert [model.id for model in listed] == [MODEL]


# --- models
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_models(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "front_models", models_cache_seconds=0.0) as fresh:
        start_anew()
        yield fresh


def require_cards(listed: Body, count: int) -> Body | None:
    return listed if len(listed["data"]) == count else None


def test_89_to_94_models(fresh_models: FrontStack) -> None:
    stack = fresh_models
    assert stack.call("GET", "/v1/models").json() == {"object": "list", "data": []}
    name = "aphrodite/Org/Model-13b:Q4 K é"
    for model, features in (
        (name, ["vision", "prompt_overflow_refused"]),
        (name.lower(), []),
        ("a/b", ["seed"]),
    ):
        stack.horde.pop(
            name=f"worker of {model[:8]} {len(features)}",
            models=[model],
            model_id=model,
            chat_features=features,
        )
    # The API remembers its own list for a moment.
    listed = wait_until(lambda: require_cards(stack.call("GET", "/v1/models").json(), 3))
    assert [card["id"] for card in listed["data"]] == sorted([name, name.lower(), "a/b"])
    card = next(card for card in listed["data"] if card["id"] == name)
    assert set(card) == {
        *(
            "id",
            "object",
            "created",
            "owned_by",
            "context_length",
            "architecture",
            "top_provider",
            "supported_parameters",
        ),
        "x_horde",
    }
    assert (card["context_length"], card["top_provider"]) == (
        8192,
        {"context_length": 8192, "max_completion_tokens": 1024},
    )
    assert card["architecture"]["modality"] == "text+image->text"
    for path in ("/v1/models/a/b", "/v1/models/a%2Fb"):
        answer = stack.call("GET", path)
        assert (answer.status_code, answer.json()["id"]) == (200, "a/b")
        assert answer.json()["architecture"]["modality"] == "text->text"
    encoded = "aphrodite%2FOrg%2FModel-13b%3AQ4%20K%20%C3%A9"
    assert stack.call("GET", f"/v1/models/{encoded}").json()["id"] == name
    for path in ("/v1/models/x/y", "/v1/models/A/b", "/v1/models/a%252Fb", "/v1/models/a/b%20"):
        answer = stack.call("GET", path)
        error = answer.json()["error"]
        assert answer.status_code == 404
        assert (error["type"], error["param"], error["code"]) == (
            "not_found_error",
            "model",
            "model_not_found",
        )
    assert (
        stack.call("GET", "/v1/models/x/y").json()["error"]["message"]
        == "The model 'x/y' does not exist or no online worker serves it."
    )
