# SPDX-License-Identifier: AGPL-3.0-or-later
"""JSON that is handed on as it was written."""

import json

import pytest
from hypothesis import given

from horde.chat.submission import parse_reply_message
from horde.json_body import parse_json_body
from horde.json_text import JsonText, read_json, survives_jsonb, write_document, write_json
from tests.json_documents import describe, documents

FORMS = ["1.0", "1e2", "1E+2", "-0", "-0.0", "0.10", "1e-400", "9007199254740993", "1" + "0" * 30]


@given(documents)
def test_a_document_is_written_as_it_was_read(text: str) -> None:
    assert describe(write_document(read_json(text))) == describe(text)
    body = parse_json_body(text.encode(), keeps_number_forms=True)
    assert describe(write_document(body)) == describe(text)


@given(documents)
def test_the_form_of_a_number_changes_no_value(text: str) -> None:
    assert read_json(text) == json.loads(text) == parse_json_body(text.encode())


@pytest.mark.parametrize("number", FORMS)
def test_a_number_keeps_its_form(number: str) -> None:
    text = '{"multipleOf":' + number + ',"enum":[' + number + "]}"
    assert write_document(read_json(text)) == text


def test_of_a_repeated_key_the_last_value_is_written() -> None:
    assert write_document(read_json('{"a": 1, "b": 2, "a": 1e1}')) == '{"a":1e1,"b":2}'


def test_a_ready_document_is_put_in_as_it_stands() -> None:
    ready = JsonText('{"b": 1e2}')
    odd = '"\\u0000"'  # as text, what a place looks like
    assert write_json({"é": [ready, odd], "z": ready}) == (
        '{"é":[{"b": 1e2},' + json.dumps(odd) + '],"z":{"b": 1e2}}'
    )
    assert write_json(["é"], ensure_ascii=True) == '["\\u00e9"]'


def test_what_is_no_json_is_not_written() -> None:
    with pytest.raises(TypeError, match="object is not JSON"):
        write_json([object()])


def test_what_jsonb_would_change_is_told_apart() -> None:
    assert survives_jsonb({"role": "user", "content": [{"text": "a", "type": "text"}]})
    assert survives_jsonb(None)
    assert not survives_jsonb([{"content": "a", "role": "user"}])
    assert not survives_jsonb({"minimum": read_json("1.0")})
    assert not survives_jsonb({"minimum": read_json("-0")})


def test_a_stored_reply_has_the_order_that_jsonb_gives_it() -> None:
    """A reply needs no text beside its column."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply = {"reasoning_content": "r", "tool_calls": [call], "content": "c", "role": "assistant"}
    assert survives_jsonb(parse_reply_message(reply))
