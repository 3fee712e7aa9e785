# SPDX-License-Identifier: AGPL-3.0-or-later
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from horde.bridge.schema_check import matches_schema
from horde.bridge.tool_grammar import build_tool_call_schema, parse_forced_call
from tests.unit.bridge.scripted import TOOLS


@pytest.mark.parametrize(
    ("call", "is_valid"),
    [
        ({"name": "lookup_weather", "arguments": {"city": "Oslo"}}, True),
        # The moved reference still resolves.
        ({"name": "lookup_weather", "arguments": {"city": 3}}, False),
        ({"name": "now", "arguments": {}}, True),
        ({"name": "now", "arguments": "{}"}, False),
        ({"name": "other", "arguments": {}}, False),
        ({"name": "now", "arguments": {}, "more": 1}, False),
    ],
)
def test_the_schema_matches_calls_to_offered_functions_only(
    call: dict[str, Any], is_valid: bool
) -> None:
    assert Draft202012Validator(build_tool_call_schema(TOOLS)).is_valid(call) is is_valid


@pytest.mark.parametrize(
    ("content", "call"),
    [
        ('{"name":"now","arguments":{}}', {"name": "now", "arguments": "{}"}),
        (
            ' { "name" : "now" , "arguments" : {"é": 1} } ',
            {"name": "now", "arguments": json.dumps({"é": 1}, ensure_ascii=False)},
        ),
        ('{"name":"now","arguments":{"a', {"name": "now", "arguments": '{"a'}),
        ('{"name":"no', None),
        ("prose", None),
        ("", None),
    ],
)
def test_a_reply_to_the_schema_is_read_as_a_call(content: str, call: dict[str, str] | None) -> None:
    assert parse_forced_call(content) == call


@pytest.mark.parametrize(
    ("content", "schema", "matches"),
    [
        ('{"a": 1}', {"type": "object"}, True),
        ("[]", {"type": "object"}, False),
        ('{"a": NaN}', {"type": "object"}, False),
        ('"x"', {"not": {"const": "x"}}, False),
        ("1", {"type": "no such type"}, False),
        ("1", {"$ref": "#/$defs/nowhere"}, False),
        ("1", {"$ref": "http://schema.test/never-fetched"}, False),
        ('"a"', {"type": "string", "pattern": "("}, False),
        ("1", True, True),
    ],
)
def test_a_reply_is_held_against_the_schema(content: str, schema: object, matches: bool) -> None:
    assert matches_schema(content, schema) is matches
