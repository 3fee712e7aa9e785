# SPDX-License-Identifier: AGPL-3.0-or-later
"""The tiny model is a real backend: what tests of the bridge rely on."""

import json
import urllib.request
from typing import Any

import pytest

from tests.tiny_gguf import TURN_END

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def ask(base: str, path: str, body: dict[str, Any]) -> Any:
    """POST and read the JSON answer."""
    request = urllib.request.Request(
        base + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_replies_are_words(tiny_backend: str) -> None:
    answer = ask(
        tiny_backend,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40},
    )
    text = answer["choices"][0]["message"]["content"]
    assert text.isascii()
    assert answer["usage"]["completion_tokens"] <= 40


def test_the_models_end_token_ends_a_reply(tiny_backend: str) -> None:
    (end,) = ask(
        tiny_backend,
        "/tokenize",
        {"content": TURN_END, "parse_special": True, "add_special": False},
    )["tokens"]
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 3000,
        "logit_bias": [[end, 6.0]],
    }
    answer = ask(tiny_backend, "/v1/chat/completions", body)
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_schema_is_followed(tiny_backend: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "Where?"}],
        "max_tokens": 500,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": schema},
        },
    }
    answer = ask(tiny_backend, "/v1/chat/completions", body)
    assert list(json.loads(answer["choices"][0]["message"]["content"])) == ["city"]


def test_the_template_knows_tools(tiny_backend: str) -> None:
    with urllib.request.urlopen(f"{tiny_backend}/props", timeout=10) as answer:
        capabilities = json.load(answer)["chat_template_caps"]
    assert capabilities["supports_tools"]
    assert capabilities["supports_tool_calls"]
    assert capabilities["supports_system_role"]


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', "{}"])
def test_calls_and_their_results_reach_the_prompt(tiny_backend: str, arguments: str) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    prompt = ask(tiny_backend, "/apply-template", {"messages": messages, "tools": [TOOL]})["prompt"]
    assert '<tool_call>\n{"name": "get_weather", "arguments": ' + arguments.replace(
        " ", ""
    ) in prompt.replace('": "O', '":"O')
    assert "<tool_response>\nsunny\n</tool_response>" in prompt
    assert prompt.endswith("<|turn|>assistant\n")
