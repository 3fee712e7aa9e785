# SPDX-License-Identifier: AGPL-3.0-or-later
"""Bytes into values: what is refused before any rule of a route is read."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.exceptions import BadRequest
from horde.json_body import MAX_JSON_DEPTH, MAX_JSON_VALUE_COUNT, _count_values, parse_json_body
from horde.return_codes import ReturnCode


def refusal_of(data: bytes) -> ReturnCode:
    with pytest.raises(BadRequest) as refused:
        parse_json_body(data)
    return refused.value.rc


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"a": 1}}',
        b"\xff\xfe{}",
        b'"\xed\xa0\x80"',  # a surrogate encoded as three bytes
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": -1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"9" * 310 + b"}",
        b'{"a": "\x00"}',
        b"[" * 100_000,
        b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1),
        b'{"a":' * (MAX_JSON_DEPTH + 1) + b"1" + b"}" * (MAX_JSON_DEPTH + 1),
        b"[" + b"0," * MAX_JSON_VALUE_COUNT + b"0]",
    ],
)
def test_malformed_bytes_are_a_bad_request(data: bytes) -> None:
    assert refusal_of(data) is ReturnCode.BAD_REQUEST


@pytest.mark.parametrize(
    "data", [b'{"a": "x\\u0000"}', b'{"\\u0000": 1}', b'[[{"a": ["\\u0000"]}]]']
)
def test_nul_is_refused_anywhere(data: bytes) -> None:
    assert refusal_of(data) is ReturnCode.NUL_BYTE_IN_PAYLOAD


@pytest.mark.parametrize("data", [b'{"a": "\\ud800"}', b'{"\\uDFFF": 1}', b'["\\udc00\\ud800"]'])
def test_unpaired_surrogate_is_refused_anywhere(data: bytes) -> None:
    assert refusal_of(data) is ReturnCode.INVALID_PROMPT_ENCODING


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\xef\xbb\xbf{}", {}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b'"\\ud83d\\ude00"', "😀"),
        (b'"\\\\u0000 \\\\ud800"', "\\u0000 \\ud800"),
        (
            b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH,
            json.loads("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH),
        ),
        (b'"' + b"[" * 500 + b'"', "[" * 500),
        (b"9007199254740993", 9007199254740993),
        (b"null", None),
    ],
)
def test_well_formed_bytes_are_read(data: bytes, value: object) -> None:
    assert parse_json_body(data) == value


def test_workers_text_keeps_everything_but_what_cannot_be_stored() -> None:
    data = b'{"k\\u0000": ["a\\ud800b", {"c": "\\u0000"}], "n": 1}'
    assert parse_json_body(data, replace_unstorable_characters=True) == {
        "k\ufffd": ["a\ufffdb", {"c": "\ufffd"}],
        "n": 1,
    }


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_refusal(data: bytes) -> None:
    with suppress(BadRequest):
        parse_json_body(data)


@pytest.mark.parametrize("filler", ["", '"x",' * 70_000])
@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[1,2,{}]", 4),
        ('["a,[{","b"]', 2),
        (r'["a\",[{\\",{}]', 3),
        (r'["\\\\",1]', 2),
        ("", 0),
    ],
)
def test_values_are_counted_outside_of_strings(filler: str, text: str, count: int) -> None:
    assert _count_values(filler + text) == count + filler.count(",")


@pytest.mark.parametrize(
    ("start", "mark", "count"),
    [
        ("", '"', 3_000_000),
        ('["', "", 0),
        ('["', '\\"', 60_000),
        ('["', '\\"', 1_100_000),
        ('["\\', "", 0),
    ],
    ids=["quotes", "open string", "escaped quotes", "many escaped quotes", "open escape"],
)
def test_quotes_without_end_are_refused(start: str, mark: str, count: int) -> None:
    with pytest.raises(BadRequest):
        parse_json_body(f"{start}{mark * count}{',[' * 600_000}".encode())
