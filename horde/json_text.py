# SPDX-License-Identifier: AGPL-3.0-or-later
"""JSON that is handed on as it was written: keys in their order, numbers in their form.

A JSON Schema means more than its values. Backends make a grammar of it, which enforces the order of
its properties and writes its constants as they stand. Python keeps the order of keys but not `1e2`,
and Postgres's jsonb keeps neither; so documents of clients are read and written here.
Source: docs/reference/chat_requests.md, "Form of what is sent".
"""

import json
from dataclasses import dataclass
from typing import Final

type Json = str | int | float | bool | list[Json] | dict[str, Json] | None
"""A value of JSON as it is read."""

type JsonObject = dict[str, object]
"""An object of JSON whose members are looked at where they are used, or put together here."""

# Stands for a ready document while the rest is written. No string that is read has a NUL in it.
_PLACE: Final = "\x00"
_WRITTEN_PLACE: Final = json.dumps(_PLACE)


class WrittenFloat(float):
    """A number with decimals or an exponent that Python would write in another form."""

    __slots__ = ("text",)
    text: str


class WrittenInteger(int):
    """An integer that Python would write in another form: `-0` is the only one."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonText:
    """A document as text, which `write_json` puts in as it stands."""

    text: str


def hold_float(value: float, text: str) -> float:
    """`value` together with the text it was read from, where Python would write another."""
    if repr(value) == text:
        return value
    held = WrittenFloat(value)
    held.text = text
    return held


def hold_integer(value: int, text: str) -> int:
    """As `hold_float`, for a number without decimals and exponent."""
    if value or text == "0":
        return value
    held = WrittenInteger(value)
    held.text = text
    return held


def read_json(text: str | bytes) -> Json:
    """The value of a JSON text of our own or of a worker's peer; raises ValueError for any other.

    Texts of clients go through `horde.json_body`, which bounds them.
    """
    value: Json = json.loads(
        text,
        parse_float=lambda number: hold_float(float(number), number),
        parse_int=lambda number: hold_integer(int(number), number),
    )
    return value


def write_json(value: object, *, ensure_ascii: bool = False) -> str:
    """JSON without spaces, with each `JsonText` in it as it stands.

    Numbers are written in Python's form: `write_document` keeps theirs and takes longer.
    """
    documents: list[str] = []

    def leave_place(part: object) -> str:
        if not isinstance(part, JsonText):
            raise TypeError(f"{type(part).__name__} is not JSON")
        documents.append(part.text)
        return _PLACE

    text = json.dumps(value, separators=(",", ":"), ensure_ascii=ensure_ascii, default=leave_place)
    if not documents:
        return text

    first, *others = text.split(_WRITTEN_PLACE)
    return first + "".join(map("".join, zip(documents, others, strict=True)))


def write_document(value: object) -> str:
    """JSON without spaces: keys in their order, each number as it was read, other letters as they
    are.
    """
    return write_json(_place_numbers(value))


def _place_numbers(value: object) -> object:
    if isinstance(value, WrittenFloat | WrittenInteger):
        return JsonText(value.text)
    if isinstance(value, dict):
        return {key: _place_numbers(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_place_numbers(child) for child in value]
    return value


def survives_jsonb(value: object) -> bool:
    """Whether jsonb gives a document back in the form it has.

    It sorts the keys of an object by their length in bytes, then by the bytes, and writes numbers
    that have decimals in a form of its own.
    """
    if isinstance(value, dict):
        keys = [key.encode() for key in value]
        is_sorted = keys == sorted(keys, key=lambda key: (len(key), key))
        return is_sorted and all(map(survives_jsonb, value.values()))
    if isinstance(value, list):
        return all(map(survives_jsonb, value))
    return not isinstance(value, float | WrittenInteger)
