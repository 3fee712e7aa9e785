# SPDX-License-Identifier: AGPL-3.0-or-later
"""OpenAI's rules for schemas that ask for `strict`.

Source: docs/reference/chat_requests.md, "Tools".
"""

from collections.abc import Iterator, Sequence
from typing import Final

from horde.chat.wire import JsonSchema, NamedSchema, ResponseFormat, Tool
from horde.chat_contract import ChatRequestRefused, RefusalKind
from horde.return_codes import ReturnCode

_SUBSCHEMA_KEYWORDS: Final = frozenset(
    {
        *(
            "items",
            "additionalItems",
            "unevaluatedItems",
            "contains",
            "not",
            "if",
            "then",
            "else",
            "contentSchema",
        ),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    }
)
_SUBSCHEMA_LIST_KEYWORDS: Final = frozenset({"anyOf", "allOf", "oneOf", "prefixItems", "items"})
_SUBSCHEMA_MAP_KEYWORDS: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


def find_strict_schema(response_format: ResponseFormat | None) -> NamedSchema | None:
    """The schema that a reply has to match; None where the format asks for less."""
    json_schema = None if response_format is None else response_format.get("json_schema")
    return json_schema if json_schema is not None and json_schema.get("strict") is True else None


def check_strict_schemas(tools: Sequence[Tool], response_format: ResponseFormat | None) -> None:
    """Hold every schema that asks for `strict` to OpenAI's structural rules, with OpenAI's
    messages.
    """
    for index, tool in enumerate(tools):
        function = tool["function"]
        if function.get("strict") is True:
            _check_strict_schema(
                function.get("parameters"),
                f"function '{function['name']}'",
                f"tools[{index}].function.parameters",
            )
    json_schema = find_strict_schema(response_format)
    if json_schema is not None:
        _check_strict_schema(
            json_schema["schema"], f"response_format '{json_schema['name']}'", "response_format"
        )


def obeys_strict_rules(schema: JsonSchema) -> bool:
    """Whether an object's schema may ask for `strict`."""
    return schema.get("type") == "object" and next(_iter_broken_rules(schema, ()), None) is None


def _check_strict_schema(schema: object, subject: str, path: str) -> None:
    broken = next(_iter_broken_rules(schema, ()), None)
    if broken is not None:
        context, rule = broken
        message = f"Invalid schema for {subject}: In context={context!r}, {rule}"
        raise ChatRequestRefused(
            path, message, ReturnCode.UNSUPPORTED_CHAT_PARAMETER, kind=RefusalKind.SCHEMA
        )


def _iter_broken_rules(
    schema: object, context: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every broken rule with its place, parents before children. The depth is bounded by the
    nesting limit.
    """
    if not isinstance(schema, dict):
        return
    rule = _find_broken_rule(schema)
    if rule is not None:
        yield context, rule
    for keyword, value in schema.items():
        if keyword in _SUBSCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            for name, child in value.items():
                yield from _iter_broken_rules(child, (*context, keyword, name))
        elif keyword in _SUBSCHEMA_LIST_KEYWORDS and isinstance(value, list):
            for index, child in enumerate(value):
                yield from _iter_broken_rules(child, (*context, keyword, str(index)))
        elif keyword in _SUBSCHEMA_KEYWORDS:
            yield from _iter_broken_rules(value, (*context, keyword))


def _find_broken_rule(schema: JsonSchema) -> str | None:
    kinds = schema.get("type")
    is_object = (
        kinds == "object"
        or (isinstance(kinds, list) and "object" in kinds)
        or "properties" in schema
    )
    if not is_object:
        return None
    if schema.get("additionalProperties") is not False:
        return "'additionalProperties' is required to be supplied and to be false."
    properties, required = schema.get("properties"), schema.get("required")
    listed = (
        {name for name in required if isinstance(name, str)}
        if isinstance(required, list)
        else set()
    )
    missing = (
        next((name for name in properties if name not in listed), None)
        if isinstance(properties, dict)
        else None
    )
    if missing is None:
        return None
    return (
        "'required' is required to be supplied and to be an array including every key in"
        f" properties. Missing '{missing}'."
    )
