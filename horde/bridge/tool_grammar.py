# SPDX-License-Identifier: AGPL-3.0-or-later
"""A forced tool call as a JSON Schema.

Not every build and template of llama.cpp enforces ``tool_choice: required``: many answer with
prose. A JSON Schema is enforced by all of them, so the bridge asks for one object that is a call to
one of the offered functions, and makes the call out of it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Compact and with spaces alike: a grammar lets the model choose. The name is at most 64 characters
# of [A-Za-z0-9_-].
_CALL_PREFIX = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]+)"\s*,\s*"arguments"\s*:\s*')
_DECODER = json.JSONDecoder()


def build_tool_call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A schema that matches ``{"name": <an offered function>, "arguments": <matching its
    parameters>}`` and nothing else.

    Each function's parameters become a definition of the whole, and the references inside them are
    moved along.
    """
    calls, definitions = [], {}
    for index, tool in enumerate(tools):
        function = tool["function"]
        definition = f"arguments_{index}"
        parameters = function.get("parameters") or {}
        if "type" not in parameters:
            parameters = {"type": "object", **parameters}
        definitions[definition] = move_references(parameters, f"#/$defs/{definition}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": {"$ref": f"#/$defs/{definition}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls, "$defs": definitions}


def move_references(schema: Any, base: str) -> Any:
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
    """``{name, arguments}`` with the arguments as the model wrote them, from a reply to the schema
    above; None when it is no call.

    A reply that was cut at its length limit keeps the arguments as far as they go, as OpenAI's cut
    calls do.
    """
    prefix = _CALL_PREFIX.match(content)
    if prefix is None:
        return None
    try:
        _, end = _DECODER.raw_decode(content, prefix.end())
    except ValueError:
        end = len(content)
    return {"name": prefix[1], "arguments": content[prefix.end() : end]}
