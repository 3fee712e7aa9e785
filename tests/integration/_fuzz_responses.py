# SPDX-License-Identifier: AGPL-3.0-or-later
"""Responses as examples to attack, and what must hold of their streams."""

import json
from typing import Any

from tests.fuzz import MARKER, Example
from tests.integration._fuzz_horde import FULL_CHAT

PATH = "/v1/responses"
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {
    "type": "function",
    "name": "lookup_weather",
    "description": MARKER,
    "parameters": _SCHEMA,
    "strict": True,
}
_TEXT = {"type": "output_text", "text": MARKER, "annotations": [], "logprobs": []}
FULL_RESPONSE: dict[str, Any] = {
    "model": FULL_CHAT["model"],
    "instructions": MARKER,
    "input": [
        {"role": "developer", "content": MARKER},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": MARKER},
                {
                    "type": "input_image",
                    "image_url": "data:image/png;base64,AAAA",
                    "detail": "low",
                },
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": MARKER}],
            "encrypted_content": None,
            "status": "completed",
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [_TEXT],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": "lookup_weather",
            "arguments": "{}",
            "status": "completed",
        },
        {
            "type": "custom_tool_call",
            "call_id": "call_2",
            "name": "apply_patch",
            "input": MARKER,
        },
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": MARKER}],
        },
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": MARKER},
    ],
    "max_output_tokens": 16,
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["a"],
    "tools": [
        _FUNCTION,
        {
            "type": "custom",
            "name": "apply_patch",
            "description": MARKER,
            "format": {"type": "grammar", "syntax": "lark", "definition": MARKER},
        },
        {"type": "namespace", "name": "group", "description": MARKER, "tools": [_FUNCTION]},
        {"type": "web_search"},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "lookup_weather"}],
    },
    "parallel_tool_calls": True,
    "text": {
        "format": {"type": "json_schema", "name": "answer", "schema": _SCHEMA, "strict": False},
        "verbosity": "medium",
    },
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "truncation": "auto",
    "metadata": {"a": MARKER},
    "store": False,
    "background": False,
    "user": "a",
    "client_metadata": {"a": "b"},
    "top_logprobs": 0,
    "stream_options": {"include_obfuscation": False},
    "horde": {"dry_run": True, "conformance": "best_effort"},
}


def list_response_examples(key: str, stored: str | None = None) -> list[Example]:
    """Bodies and routes to attack; `stored` is the id of a response that is there."""
    plain = {"model": FULL_CHAT["model"], "input": MARKER, "max_output_tokens": 16}
    id_ = stored or "resp_00000000-0000-0000-0000-000000000001"
    return [
        *[Example("POST", PATH, FULL_RESPONSE, key=key)] * 8,
        Example("POST", PATH, plain, key=key),
        Example("POST", PATH, plain | {"stream": True}, key=key),
        *[Example("POST", PATH, plain | {"store": True}, key=key)] * 2,
        Example("POST", PATH, plain | {"background": True}, key=key),
        *[Example("POST", PATH, plain | {"previous_response_id": id_}, key=key)] * 2,
        Example("GET", f"{PATH}/{id_}", query={"include": "reasoning.encrypted_content"}, key=key),
        Example("GET", f"{PATH}/{id_}", query={"stream": "true", "starting_after": "1"}, key=key),
        Example(
            "GET",
            f"{PATH}/{id_}/input_items",
            query={"limit": "2", "order": "asc", "after": "msg_1"},
            key=key,
        ),
        Example("POST", f"{PATH}/{id_}/cancel", {}, key=key),
        Example("DELETE", f"{PATH}/*", key=key),
    ]


def list_response_stream_faults(body: bytes) -> list[str]:
    """What is wrong with a stream of a response."""
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in body.split(b"\n")
        if line.startswith(b"data: ")
    ]
    if not events:
        return []  # of one that had ended before what was asked for
    if events[-1]["type"] not in ("response.completed", "response.incomplete"):
        return [f"is a stream that ends with {events[-1]['type']}"]
    return []
