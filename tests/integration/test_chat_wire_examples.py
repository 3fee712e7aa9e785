# SPDX-License-Identifier: AGPL-3.0-or-later
"""The published examples of the native routes: each body is posted or produced, and compared key
for key.

`tests/data/native_wire_examples.json` holds the bodies as published; strings in angle brackets are
placeholders.
"""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devtools.services import ServiceAddresses
from horde import r2
from tests.integration._fake_chat_worker import (
    MODEL,
    ChatHorde,
    build_call,
    build_chat_submit_body,
    build_pop_body,
    build_tool,
    chat_horde,
    start_anew,
)
from tests.integration.stored_chats import build_jpeg, make_stored_chat
from tests.unit.test_image import RED, build_data_url, draw

EXAMPLES = Path(__file__).resolve().parents[1] / "data" / "native_wire_examples.json"
BODIES = {
    (row["name"], row["kind"]): row["body"]
    for row in json.loads(EXAMPLES.read_text(encoding="utf-8"))
}
EXACT_KEYS = {
    "rc",
    "code",
    "type",
    "object",
    "state",
    "finish_reason",
    "kind",
    "reason",
    "role",
    "charge_basis",
    "message",
}
PLACEHOLDER = re.compile(r"<[a-z0-9-]+>")
ALL_FEATURES = [
    "tools",
    "json_object",
    "tools_with_response_format",
    "tool_choice_enforced",
    "prompt_overflow_refused",
]


def request(name: str, **values: str) -> dict[str, Any]:
    """A published request with its placeholders filled in."""
    return dict(fill(BODIES[name, "request"], values))


def fill(value: Any, values: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: fill(child, values) for key, child in value.items()}
    if isinstance(value, list):
        return [fill(child, values) for child in value]
    return (
        values.get(value.strip("<>").replace("-", "_"), value) if isinstance(value, str) else value
    )


def check_like(name: str, actual: Any, **values: str) -> None:
    """The published answer and the one at hand have the same keys, types, words and booleans."""
    compare(fill(BODIES[name, "response"], values), actual, name)


def compare(expected: Any, actual: Any, path: str) -> None:
    if isinstance(expected, str) and PLACEHOLDER.fullmatch(expected):
        kinds = (int, float) if expected == "<kudos>" else (str,)
        assert type(actual) in kinds, path
        return
    assert type(actual) is type(expected), f"{path}: {actual!r}"
    if isinstance(expected, dict):
        assert set(actual) == set(expected), path
        for key, child in expected.items():
            compare(child, actual[key], f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), path
        for index, child in enumerate(expected):
            compare(child, actual[index], f"{path}[{index}]")
    elif isinstance(expected, bool) or path.rpartition(".")[2] in EXACT_KEYS:
        pattern = ".+".join(re.escape(part) for part in PLACEHOLDER.split(str(expected)))
        assert re.fullmatch(pattern, str(actual)), f"{path}: {actual!r}"


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "wire_examples") as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> ChatHorde:
    start_anew()
    return module_horde


def pop_as_published(horde: ChatHorde, **changes: Any) -> dict[str, Any]:
    body = (
        request(
            "Pop request",
            worker_name="example worker",
            model_name=MODEL,
            bridge_agent="Horde Bridge:1:here",
        )
        | changes
    )
    answer = horde.post("/generate/text/pop", body, horde.owner_key)
    assert answer.status_code == 200, answer.json
    return dict(answer.json)


def test_a_request_is_accepted(horde: ChatHorde) -> None:
    pop_as_published(horde)
    answer = horde.submit(request("Request", model_name=MODEL))
    assert answer.status_code == 202
    check_like("Request accepted", answer.json)


def test_a_dry_run(horde: ChatHorde) -> None:
    pop_as_published(horde)
    messages = BODIES["Request", "request"]["messages"]
    answer = horde.submit(messages=messages, max_tokens=64, horde={"dry_run": True})
    assert answer.status_code == 200
    check_like("Dry run", answer.json)
    expected = BODIES["Dry run", "response"]["resolved"] | {"models": [MODEL]}
    assert answer.json["resolved"] == expected


def test_a_status_while_waiting(horde: ChatHorde) -> None:
    pop_as_published(horde)
    status = horde.status(horde.queue(max_tokens=64))
    check_like("Status while waiting", status)
    kudos = status.pop("kudos")
    assert type(kudos) is int
    assert status == {
        key: value
        for key, value in BODIES["Status while waiting", "response"].items()
        if key != "kudos"
    }


def test_a_status_when_done(horde: ChatHorde) -> None:
    pop_as_published(horde)
    request_id = horde.queue(max_tokens=64)
    job = pop_as_published(horde)
    answer = horde.post(
        "/generate/text/submit",
        request("Reply", job_id=job["id"], model_name=MODEL),
        horde.owner_key,
    )
    assert answer.status_code == 200
    check_like("Reply response", answer.json)
    status = horde.status(request_id)
    check_like("Status when done", status)
    expected = BODIES["Status when done", "response"]["generations"][0]
    shown = status["generations"][0]
    free = {"queue_wait_seconds", "worker_id", "worker_name", "model"}
    assert {key: value for key, value in shown.items() if key not in free} == {
        key: value for key, value in expected.items() if key not in free
    }
    assert (shown["worker_name"], shown["model"]) == ("example worker", MODEL)


def test_a_status_with_context_adjustments(horde: ChatHorde) -> None:
    pop_as_published(horde)
    turns = [
        {"role": role, "content": "word " * 800} for _ in range(7) for role in ("user", "assistant")
    ]
    status = horde.status(
        horde.queue(messages=[*turns, {"role": "user", "content": "And now?"}], max_tokens=64)
    )
    check_like("Status with context adjustments", status)
    grown, trimmed = status["context_adjustments"]
    assert grown == {"from": 2048, "to": 8192, "reason": "grow"}
    assert trimmed["to"] + 64 <= 8192 < trimmed["from"]


def build_image_messages() -> list[dict[str, Any]]:
    """The conversation of the published job with an image, as its requester sent it."""
    messages = json.loads(
        json.dumps(BODIES["Chat job with an image", "response"]["payload"]["messages"])
    )
    messages[1]["content"][1]["image_url"]["url"] = build_data_url(draw("RGB", "PNG", RED))
    return list(messages)


def test_no_eligible_worker_in_place_of_a_kudos_refusal(horde: ChatHorde) -> None:
    horde.take_nothing(chat_features=["prompt_overflow_refused"])
    answer = horde.submit(key="0000000000", max_tokens=1024, messages=build_image_messages())
    assert answer.status_code == 403
    assert answer.json == BODIES["NoEligibleWorker", "response"]


def test_a_job_with_an_image_from_its_request(horde: ChatHorde) -> None:
    sees = {"chat_features": ["prompt_overflow_refused", "vision"], "image_transports": ["base64"]}
    horde.take_nothing(**sees)
    request_id = horde.queue(messages=build_image_messages(), max_tokens=64)
    job = horde.take(**sees)
    jpeg = base64.b64encode(r2.get_object(f"{request_id}_chat_0.jpg")).decode()
    published = fill(BODIES["Chat job with an image", "response"]["payload"], {})
    published["messages"][1]["content"][1]["image_url"]["url"] = f"data:image/jpeg;base64,{jpeg}"
    assert job["payload"] == published


def test_an_unsupported_parameter(horde: ChatHorde) -> None:
    answer = horde.submit(logprobs=True)
    assert answer.status_code == 400
    assert answer.json == BODIES["UnsupportedChatParameter", "response"]


def test_the_chat_model_list(horde: ChatHorde) -> None:
    pop_as_published(horde)
    answer = horde.get("/status/models?type=text&chat=true")
    assert answer.status_code == 200
    check_like("Chat model list", answer.json)
    expected = BODIES["Chat model list", "response"][0]["chat"]
    assert {key: value for key, value in answer.json[0]["chat"].items() if key != "created"} == {
        key: value for key, value in expected.items() if key != "created"
    }


def test_a_pop_without_a_job(horde: ChatHorde) -> None:
    assert pop_as_published(horde) == BODIES["No job", "response"]


def test_a_chat_job(horde: ChatHorde) -> None:
    pop_as_published(horde)
    published = BODIES["Chat job", "response"]
    horde.queue(messages=published["payload"]["messages"], temperature=0.5, stop="\nuser:")
    job = pop_as_published(horde)
    check_like("Chat job", job)
    assert job["payload"] == published["payload"]


def test_a_chat_job_with_an_image(horde: ChatHorde) -> None:
    features = ["prompt_overflow_refused", "vision"]
    make_stored_chat(horde.requester_id, detail=None)
    job = horde.take(chat_features=features, image_transports=["base64"])
    check_like("Chat job with an image", job, model_name=MODEL)
    url = job["payload"]["messages"][1]["content"][1]["image_url"]["url"]
    assert base64.b64decode(
        url.removeprefix("data:image/jpeg;base64,"), validate=True
    ) == build_jpeg(0)


def test_a_chat_job_with_offloaded_messages(horde: ChatHorde) -> None:
    make_stored_chat(horde.requester_id, image_count=0, is_offloaded=True)
    job = horde.take(image_transports=["url", "base64", "messages_url"])
    check_like("Chat job with offloaded messages", job, model_name=MODEL)


def test_a_chat_job_with_tools(horde: ChatHorde) -> None:
    pop_as_published(horde, chat_features=ALL_FEATURES)
    payload = BODIES["Chat job with tools", "response"]["payload"]
    forwarded = ("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format")
    horde.queue(**{key: payload[key] for key in forwarded}, temperature=0.5, stop="\nuser:")
    job = pop_as_published(horde, chat_features=ALL_FEATURES)
    check_like("Chat job with tools", job)
    assert job["payload"] == payload
    reply = request("Tool-call reply", job_id=job["id"], model_name=MODEL)
    answer = horde.post("/generate/text/submit", reply, horde.owner_key)
    assert answer.status_code == 200
    check_like("Reply response", answer.json)


def test_a_reply_with_reasoning(horde: ChatHorde) -> None:
    pop_as_published(horde)
    request_id = horde.queue()
    job = pop_as_published(horde)
    reply = request("Reply with reasoning", job_id=job["id"], model_name=MODEL)
    answer = horde.post("/generate/text/submit", reply, horde.owner_key)
    assert answer.status_code == 200
    check_like("Reply response", answer.json)
    shown = horde.status(request_id)["generations"][0]
    assert (shown["message"], shown["text"], shown["reasoning_tokens"]) == (
        reply["message"],
        "Blue.",
        37,
    )


def test_a_fault(horde: ChatHorde) -> None:
    pop_as_published(horde)
    horde.queue()
    job = pop_as_published(horde)
    fault = request("Fault", job_id=job["id"], model_name=MODEL)
    answer = horde.post("/generate/text/submit", fault, horde.owner_key)
    assert answer.status_code == 200
    assert answer.json == BODIES["Fault response", "response"]


def test_progress(horde: ChatHorde) -> None:
    pop_as_published(horde)
    request_id = horde.queue(stream=True)
    job_id = pop_as_published(horde)["id"]

    def post(**changes: Any) -> Any:
        return horde.post(
            "/generate/text/progress",
            request("Progress post", job_id=job_id) | changes,
            horde.owner_key,
        )

    accepted = post()
    assert (accepted.status_code, accepted.json) == (200, BODIES["Progress accepted", "response"])
    skipping = post(seq=3)
    published = fill_text(BODIES["Progress out of sequence", "response"], "<job-id>", job_id)
    assert (skipping.status_code, skipping.json) == (409, published)
    assert horde.cancel(request_id).status_code == 200
    told = post(seq=2)
    assert (told.status_code, told.json) == (200, BODIES["Progress after a cancel", "response"])


def test_a_cancel_answers_with_the_status_before_it(horde: ChatHorde) -> None:
    pop_as_published(horde)
    request_id = horde.queue(max_tokens=64)
    before = horde.status(request_id)
    answer = horde.cancel(request_id)
    assert answer.status_code == 200
    check_like("Status while waiting", answer.json)
    assert answer.json == before


def fill_text(body: dict[str, Any], placeholder: str, value: str) -> dict[str, Any]:
    """A published body with a placeholder inside its texts replaced."""
    return dict(json.loads(json.dumps(body).replace(placeholder, value)))


def test_an_invalid_declaration(horde: ChatHorde) -> None:
    answer = horde.post(
        "/generate/text/pop", build_pop_body(model_id="koboldcpp/model_Q4"), horde.owner_key
    )
    assert answer.status_code == 400
    assert answer.json == BODIES["ChatDeclarationInvalid", "response"]


def test_an_invalid_submit(horde: ChatHorde) -> None:
    pop_as_published(horde)
    horde.queue()
    job = pop_as_published(horde)
    body = build_chat_submit_body(job["id"])
    del body["finish_reason"]
    answer = horde.post("/generate/text/submit", body, horde.owner_key)
    assert answer.status_code == 400
    assert answer.json == BODIES["ChatSubmitInvalid", "response"]


def test_a_nonconformant_submit(horde: ChatHorde) -> None:
    pop_as_published(horde, chat_features=ALL_FEATURES)
    horde.queue(tools=[build_tool()], tool_choice="required")
    job = pop_as_published(horde, chat_features=ALL_FEATURES)
    answer = horde.reply(job["id"])
    assert answer.status_code == 400
    assert answer.json == BODIES["ChatSubmitNonconformant", "response"]
    assert (
        horde.reply(
            job["id"], None, tool_calls=[build_call()], finish_reason="tool_calls"
        ).status_code
        == 200
    )


def test_a_model_mismatch(horde: ChatHorde) -> None:
    pop_as_published(horde)
    horde.queue()
    job = pop_as_published(horde)
    answer = horde.reply(job["id"], model="another/model")
    assert answer.status_code == 400
    check_like("ChatModelMismatch", answer.json)
    assert (
        answer.json["message"]
        == f"'model_id' has to be '{MODEL}', the model this job was assigned."
    )


def test_worker_details(horde: ChatHorde) -> None:
    limits = {"max_context_length": 8192, "max_length": 1024, "tools_max_temperature": 0.7}
    pop_as_published(horde, chat_limits=limits)
    answer = horde.get("/workers/name/example%20worker")
    assert answer.status_code == 200
    published = BODIES["Worker details", "response"]
    shown = dict(answer.json)
    assert shown["chat"] == published["chat"] | {"model_id": MODEL}
    compare(without_chat(published), without_chat(shown), "Worker details")


def without_chat(details: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in details.items() if key != "chat"}
