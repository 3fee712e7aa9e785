# SPDX-License-Identifier: AGPL-3.0-or-later
"""Bytes of a request body into plain values, refusing everything that could not be stored or
measured later.

Every native route and the front read bodies through this module, so that one set of rules holds:
UTF-8, finite numbers, bounded depth, and no character that Postgres cannot keep. Source:
docs/reference/chat_requests.md, "Request body"; rulings on encodings.
"""

import json
import re
from collections.abc import Iterator
from typing import Final, NoReturn

from horde.exceptions import BadRequest
from horde.json_text import hold_float, hold_integer
from horde.return_codes import ReturnCode

# So far above any accepted shape that what is wrong with a deep one is said by the rule it breaks,
# and half of what Python's recursion limit allows.
MAX_JSON_DEPTH: Final = 512
# A value of two bytes takes sixty in memory and a microsecond of the whole process. A request of
# 1024 messages with every tool it may carry has some ten thousand; a pop has one for each model.
MAX_JSON_VALUE_COUNT: Final = 512 * 1024
# Two of a key and two of a string for each value; so many inside of strings is no text that anybody
# writes.
MAX_QUOTE_COUNT: Final = 4 * MAX_JSON_VALUE_COUNT
# Above it, strings are too short to be worth a search each.
MAX_SEARCHED_QUOTE_COUNT: Final = 64 * 1024
# A double has at most 309 digits before the point; more is refused without converting it.
MAX_NUMBER_CHARACTERS: Final = 400

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
# Raw NULs and surrogates are no JSON and no UTF-8, so they reach a parsed string through an escape
# that starts so.
_UNSTORABLE_ESCAPES: Final = ("\\u0000", "\\ud", "\\uD")
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
# Possessive, and content with the end of the text: one pass, whatever comes. An open string full of
# escaped quotes would else be searched to the end from each of them.
_STRING: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_REPLACEMENT: Final = "\ufffd"


def parse_json_body(
    data: bytes,
    *,
    replace_unstorable_characters: bool = False,
    keeps_number_forms: bool = False,
) -> object:
    """The value a body holds; of a repeated key the last value counts.

    With `replace_unstorable_characters` NULs and unpaired surrogates become U+FFFD, because one odd
    character must not cost a worker its reply; without it they are refused, keys included.
    With `keeps_number_forms` a number knows how it was written, for `json_text.write_document`.

    Raises:
        BadRequest: not UTF-8, not JSON, too deep, too many values, or a number no double holds.
        BadRequest with NulByteInPayload or InvalidPromptEncoding: a character that cannot be
        stored.
    """
    text = _decode(data)
    # A body of images is tens of megabytes: held as bytes, text and values it would be there three
    # times.
    del data
    container_count = text.count("[") + text.count("{")
    if (
        container_count + text.count(",") > MAX_JSON_VALUE_COUNT
        and _count_values(text) > MAX_JSON_VALUE_COUNT
    ):
        raise BadRequest("The body holds too many values.")
    try:
        value: object = (_FORM_DECODER if keeps_number_forms else _DECODER).decode(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise BadRequest(
            f"The body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})."
        ) from None
    if container_count > MAX_JSON_DEPTH and _is_too_deep(value):
        raise _too_deep()
    if "\\u" not in text or not any(escape in text for escape in _UNSTORABLE_ESCAPES):
        return value
    if replace_unstorable_characters:
        return _replace_in_strings(value)
    _check_strings(value)
    return value


def replace_unstorable(text: str) -> str:
    """The text with every NUL and unpaired surrogate as U+FFFD."""
    return _UNSTORABLE.sub(_REPLACEMENT, text)


def _decode(data: bytes) -> str:
    try:
        return data.removeprefix(_BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest("The body is not UTF-8.") from None


def _count_values(text: str) -> int:
    """What `parse_json_body` bounds, without the commas and brackets that stand in strings."""
    quote_count = text.count('"')
    if quote_count > MAX_QUOTE_COUNT:
        return quote_count  # no search through them: it would take seconds in one call
    if quote_count > MAX_SEARCHED_QUOTE_COUNT:
        bare = _STRING.sub("", text)
        return bare.count("[") + bare.count("{") + bare.count(",")
    # String by string: long ones are many times faster to skip than to take out, and other threads
    # run in between.
    count = position = 0
    while True:
        start = text.find('"', position)
        end = len(text) if start < 0 else start
        count += sum(text.count(mark, position, end) for mark in "[{,")
        if start < 0:
            return count
        position = _find_string_end(text, start)


def _find_string_end(text: str, start: int) -> int:
    """The place after the string that begins at `start`, or the end of the text when it does not
    end.
    """
    end = text.find('"', start + 1)
    if end > start and text[end - 1] != "\\":
        return end + 1
    found = _STRING.match(text, start)
    assert found is not None
    return found.end()


def _too_deep() -> BadRequest:
    return BadRequest(f"The body nests deeper than {MAX_JSON_DEPTH} levels.")


def _is_too_deep(value: object) -> bool:
    """Whether containers nest past the bound; walks level by level, so that depth costs no
    stack.
    """
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for container in level
            for child in (
                container.values()
                if isinstance(container, dict)
                else container
                if isinstance(container, list)
                else ()
            )
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _iter_strings(value: object) -> Iterator[str]:
    pending = [value]
    while pending:
        current = pending.pop()
        if isinstance(current, str):
            yield current
        elif isinstance(current, list):
            pending.extend(current)
        elif isinstance(current, dict):
            yield from current
            pending.extend(current.values())


def _check_strings(value: object) -> None:
    for text in _iter_strings(value):
        found = None if text.isascii() and "\x00" not in text else _UNSTORABLE.search(text)
        if found is None:
            continue
        if found.group() == "\x00":
            raise BadRequest(
                "The body holds a NUL character, which cannot be stored.",
                ReturnCode.NUL_BYTE_IN_PAYLOAD,
            )
        raise BadRequest(
            "The body holds an unpaired UTF-16 surrogate.", ReturnCode.INVALID_PROMPT_ENCODING
        )


def _replace_in_strings(value: object) -> object:
    if isinstance(value, str):
        return replace_unstorable(value)
    if isinstance(value, list):
        return [_replace_in_strings(child) for child in value]
    if isinstance(value, dict):
        return {replace_unstorable(key): _replace_in_strings(child) for key, child in value.items()}
    return value


def _parse_integer(text: str) -> int:
    # Python itself refuses conversions of thousands of digits with a ValueError; this bound comes
    # first.
    if len(text) > MAX_NUMBER_CHARACTERS:
        _refuse_number()
    value = int(text)
    if len(text) > 300:
        _require_double(value)
    return value


def _require_double(value: int) -> None:
    try:
        float(value)
    except OverflowError:
        _refuse_number()


def _parse_decimal(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        _refuse_number()
    return value


def _refuse_constant(_name: str) -> NoReturn:
    raise BadRequest("The body holds NaN or Infinity, which are not JSON.")


def _refuse_number() -> NoReturn:
    raise BadRequest("The body holds a number beyond a double.")


_DECODER: Final = json.JSONDecoder(
    parse_int=_parse_integer, parse_float=_parse_decimal, parse_constant=_refuse_constant
)
_FORM_DECODER: Final = json.JSONDecoder(
    parse_int=lambda text: hold_integer(_parse_integer(text), text),
    parse_float=lambda text: hold_float(_parse_decimal(text), text),
    parse_constant=_refuse_constant,
)
