# SPDX-License-Identifier: AGPL-3.0-or-later
"""A tool call, or a call or an answer in a format, as a JSON Schema.

Not every build and template of llama.cpp enforces ``tool_choice: required``: many answer with
prose. A JSON Schema is enforced by all of them, so the bridge asks for one object that is a call to
one of the offered functions, and makes the call out of it. Beside a response format, which holds
for the answer and not for calls, the object may be the answer instead.
"""

import re
from collections.abc import Sequence
from typing import Any

from horde.bridge.refusals import parse_json
from horde.bridge.wire import OfferedTool
from horde.json_text import JsonObject

# Compact and with spaces alike: a grammar lets the model choose. The name is at most 64 characters
# of [A-Za-z0-9_-].
_CALL_PREFIX = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]+)"\s*,\s*"arguments"\s*:\s*')
_ANSWER_PREFIX = re.compile(r'\s*\{\s*"answer"\s*:\s*')


def build_tool_call_schema(tools: Sequence[OfferedTool], answer: object = None) -> JsonObject:
    """A schema that matches ``{"name": <an offered function>, "arguments": <matching its
    parameters>}`` and nothing else; with a schema for an answer ``{"answer": <matching it>}`` too.

    Each function's parameters become a definition of the whole, and the references inside them are
    moved along.
    """
    forms: list[JsonObject] = []
    definitions: JsonObject = {}
    for index, tool in enumerate(tools):
        function = tool["function"]
        definition = f"arguments_{index}"
        parameters = function.get("parameters") or {}
        if "type" not in parameters:
            parameters = {"type": "object", **parameters}
        definitions[definition] = move_references(parameters, f"#/$defs/{definition}")
        forms.append(
            _build_object(
                name={"const": function["name"]}, arguments={"$ref": f"#/$defs/{definition}"}
            )
        )
    if answer is not None:
        definitions["answer"] = move_references(answer, "#/$defs/answer")
        forms.append(_build_object(answer={"$ref": "#/$defs/answer"}))
    return {"anyOf": forms, "$defs": definitions}


def _build_object(**properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def move_references(schema: object, base: str) -> Any:
    """The same schema for a place deeper in a document: each ``#/...`` reference is prefixed with
    ``base``.
    """
    if isinstance(schema, dict):
        return {
            key: base + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else move_references(value, base)
            for key, value in schema.items()
        }
    return [move_references(item, base) for item in schema] if isinstance(schema, list) else schema


def parse_forced_call(content: str) -> dict[str, str] | None:
    """``{name, arguments}`` with the arguments as a string, from a reply to the schema above; None
    when it is no call.

    A reply that was cut at its length limit keeps the arguments as far as they go, as OpenAI's cut
    calls do.
    """
    prefix = _CALL_PREFIX.match(content)
    if prefix is None:
        return None
    return {"name": prefix[1], "arguments": _read_last_value(content, prefix.end())}


def parse_answer(content: str) -> str | None:
    """The answer's own text from a reply to the schema above, None when it is none.

    A reply that was cut at its length limit keeps what it has.
    """
    prefix = _ANSWER_PREFIX.match(content)
    return None if prefix is None else _read_last_value(content, prefix.end())


def _read_last_value(content: str, start: int) -> str:
    """The text of an object's last value, as the model wrote it."""
    value = content[start:]
    is_whole = parse_json(content) is not None
    return value.rstrip().removesuffix("}").rstrip() if is_whole else value
