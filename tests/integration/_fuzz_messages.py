# SPDX-License-Identifier: AGPL-3.0-or-later
"""Messages of Anthropic's API as examples to attack, and what must hold of their answers."""

import json
from typing import Any

from tests.fuzz import MARKER, Example
from tests.integration._fuzz_horde import FULL_CHAT
from tests.integration.messages_front import IMAGE

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
_TOOL = {
    "name": "lookup_weather",
    "description": MARKER,
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
    "input_examples": [{"city": MARKER}],
    "cache_control": {"type": "ephemeral"},
    "allowed_callers": ["direct"],
    "defer_loading": True,
}
_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": IMAGE},
}
_PLAIN = {
    "model": FULL_CHAT["model"],
    "max_tokens": 16,
    "messages": [{"role": "user", "content": MARKER}],
}
_CALL = {"type": "tool_use", "id": "toolu_1", "name": "lookup_weather", "input": {"city": MARKER}}
FULL_MESSAGE: dict[str, Any] = {
    "model": FULL_CHAT["model"],
    "max_tokens": 16,
    "system": [{"type": "text", "text": MARKER, "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "system", "content": MARKER},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": MARKER, "citations": None},
                _IMAGE,
                {
                    "type": "document",
                    "source": {"type": "text", "media_type": "text/plain", "data": MARKER},
                    "title": MARKER,
                    "context": None,
                    "citations": {"enabled": False},
                },
                {
                    "type": "search_result",
                    "title": MARKER,
                    "source": MARKER,
                    "content": [{"type": "text", "text": MARKER}],
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": MARKER, "signature": "a"},
                {"type": "text", "text": MARKER},
                _CALL,
                _CALL | {"id": "toolu_2", "caller": {"type": "direct"}},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": MARKER}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [
                        {"type": "text", "text": MARKER},
                        _IMAGE,
                        {"type": "tool_reference", "tool_name": "lookup_weather"},
                    ],
                },
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
                {"type": "compaction", "content": MARKER},
                {"type": "text", "text": MARKER},
            ],
        },
    ],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 0,
    "stop_sequences": ["a", "bb"],
    "tools": [
        _TOOL,
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2048, "display": "summarized"},
    "output_config": {"effort": "low", "task_budget": {"type": "tokens", "total": 1000}},
    "metadata": {"user_id": "a"},
    "service_tier": "auto",
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    "mcp_servers": [],
    "horde": {"dry_run": True, "max_kudos": 100_000},
}
_SCHEMA = {"type": "json_schema", "schema": _TOOL["input_schema"]}


def list_message_examples(key: str) -> list[Example]:
    """Bodies that are served, and the routes beside them."""
    asked = FULL_MESSAGE | {"horde": {"slow_workers": True}}
    return [
        *[Example("POST", PATH, FULL_MESSAGE, key=key)] * 6,
        Example("POST", PATH, asked | {"output_config": {"effort": "max"}}, key=key),
        # What the worker writes does not follow a schema that was changed.
        Example(
            "POST",
            PATH,
            _PLAIN | {"output_config": {"format": _SCHEMA}, "horde": {"dry_run": True}},
            key=key,
        ),
        Example("POST", PATH, _PLAIN | {"stream": True}, key=key),
        Example("POST", PATH, asked | {"stream": True}, query={"beta": "true"}, key=key),
        *[Example("POST", COUNT_PATH, FULL_MESSAGE, key=key)] * 3,
        Example("POST", "/v1/messages/*", _PLAIN, key=key),
        Example("GET", PATH),
    ]


def is_message_path(path: str) -> bool:
    """Whether errors of a path have this form's shape."""
    return path.startswith(("/v1/messages", "/v1/v1/messages"))


def list_error_faults(said: dict[str, Any]) -> list[str]:
    """What is wrong with the body of an error."""
    error = said.get("error", {})
    if set(said) != {"type", "error", "request_id"} or said["type"] != "error":
        return ["has another shape"]
    if set(error) != {"type", "message", "details"}:
        return ["has an error of another shape"]
    if not isinstance(error["message"], str) or not isinstance(error["details"], dict):
        return ["has no message or details"]
    return []


def list_stream_faults(body: bytes) -> list[str]:
    """What is wrong with a stream of events."""
    events = [event.split(b"\n") for event in body.removesuffix(b"\n\n").split(b"\n\n")]
    if any(len(lines) != 2 for lines in events):
        return ["is a stream of other lines"]
    bodies = [json.loads(data.removeprefix(b"data: ")) for _, data in events]
    kinds = [line.removeprefix(b"event: ").decode() for line, _ in events]
    if kinds != [event["type"] for event in bodies]:
        return ["is a stream whose events are named otherwise"]
    if kinds[0] != "message_start" or kinds[-1] != "message_stop":
        return [f"is a stream from {kinds[0]} to {kinds[-1]}"]
    return []
