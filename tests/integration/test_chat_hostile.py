# SPDX-License-Identifier: AGPL-3.0-or-later
"""No value at any place of a chat body is answered with a 5xx, and no refused one leaves a row."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text

from devtools.services import ServiceAddresses
from horde.db import transaction
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

DEEP: Any = 1
for _ in range(60):
    DEEP = {"a": [DEEP]}
HOSTILE: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    -(10**30),
    1e308,
    "",
    "x" * 70_000,
    "\U0001f600\u202e\ufeff",
    "%s{}'\";--",
    [],
    {},
    [None],
    [[]],
    {"": None},
    DEEP,
]
FULL_REQUEST: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "Be brief.", "name": "a"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [build_call()]},
        {"role": "tool", "content": "Rain", "tool_call_id": "call_1"},
    ],
    "max_tokens": 64,
    "max_completion_tokens": 64,
    "temperature": 0.5,
    "top_p": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "seed": 1,
    "reasoning_effort": "low",
    "stop": ["a"],
    "n": 1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "user": "u",
    "metadata": {"a": "b"},
    "tools": [build_tool(description="d", strict=False)],
    "tool_choice": {"type": "function", "function": {"name": "lookup_weather"}},
    "parallel_tool_calls": True,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": False},
    },
    "horde": {
        "trusted_workers": False,
        "validated_backends": False,
        "slow_workers": True,
        "max_context_length": 4096,
        "context_fit": "grow",
        "conformance": "strict",
        "openai_guards": False,
        "include_reasoning": True,
        "availability_mode": "wait",
        "max_kudos": 1000,
        "only": None,
        "ignore": None,
        "operation_key": None,
        "dry_run": True,
    },
}


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, child in value.items():
            yield from list_paths(child, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from list_paths(child, (*path, index))


def replace_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = replace_at(value[path[0]], path[1:], new)
    return copied


def list_variants(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in list_paths(body):
        for number, value in enumerate(HOSTILE):
            yield f"{path} {number}", replace_at(body, path, value)
        if isinstance(path[-1], str):
            parent = body
            for step in path[:-1]:
                parent = parent[step]
            without = {key: child for key, child in parent.items() if key != path[-1]}
            yield f"{path} missing", replace_at(body, path[:-1], without)
            yield (
                f"{path} beside an unknown key",
                replace_at(body, path[:-1], parent | {"x\ud83d\ude00": 1}),
            )


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "chat_hostile") as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> ChatHorde:
    start_anew()
    return module_horde


def check_refusal(name: str, answer: Any) -> None:
    assert answer.status_code < 500, name
    assert answer.content_type.startswith("application/json"), name
    if answer.status_code >= 400:
        assert answer.json["message"], name
        assert answer.json["rc"], name
        assert len(answer.data) < 20_000, name


def test_no_chat_request_is_answered_with_a_server_error(horde: ChatHorde) -> None:
    horde.take_nothing()
    for name, body in list_variants(FULL_REQUEST):
        check_refusal(name, horde.submit(body))
    held = "SELECT count(*) FROM kudos_reservations WHERE active"
    orphaned = f"{held} AND business_id NOT IN (SELECT 'upfront:' || id FROM waiting_prompts)"
    with transaction() as session:
        assert session.scalar(text(orphaned)) == 0


def test_no_pop_is_answered_with_a_server_error(horde: ChatHorde) -> None:
    body = build_pop_body(
        prompt_jobs=True,
        nsfw=True,
        threads=1,
        priority_usernames=["a#1"],
        chat_limits={"max_context_length": 8192, "max_length": 1024, "tools_max_temperature": 1},
    )
    for name, variant in list_variants(body):
        answer = horde.post("/generate/text/pop", variant, horde.owner_key)
        check_refusal(name, answer)


def test_no_submit_is_answered_with_a_server_error(horde: ChatHorde) -> None:
    declared = {"chat_features": ["prompt_overflow_refused", "tools"]}
    horde.take_nothing(**declared)
    horde.queue(tools=[build_tool()])
    job_id = horde.take(**declared)["id"]
    body = build_chat_submit_body(
        job_id,
        "Blue.",
        tool_calls=[build_call()],
        reasoning_content="r",
        finish_reason="tool_calls",
        native_finish_reason="n",
        prompt_tokens=1,
        completion_tokens=1,
        reasoning_tokens=1,
    )
    for name, variant in list_variants(body):
        answer = horde.post("/generate/text/submit", variant, horde.owner_key)
        check_refusal(name, answer)
        if answer.status_code == 200:
            horde.queue(tools=[build_tool()])
            body["id"] = job_id = horde.take(**declared)["id"]
    for path in ("async", "pop", "submit"):
        family = "chat" if path == "async" else "text"
        for data in (
            b"",
            b"\xff",
            b"{",
            b"[" * 5000,
            b'{"a": ' + b"9" * 5000 + b"}",
            json.dumps(DEEP).encode(),
        ):
            answer = horde.client.post(
                f"/api/v2/generate/{family}/{path}",
                data=data,
                content_type="application/json",
                headers={"apikey": horde.owner_key},
            )
            assert answer.status_code in (400, 415), (path, data[:10])
