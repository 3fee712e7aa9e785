# SPDX-License-Identifier: AGPL-3.0-or-later
"""Refusals in the words of Anthropic's API, and the checks of types that lead to them.

Paths are dotted with plain indices, such as `messages.2.content.0.type`. Source:
docs/reference/front_messages.md, "Errors".
"""

from collections.abc import Collection

from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused, shorten_param
from horde.oai.leniency import CACHE_HINT


def refuse(path: str, message: str, code: str = "invalid_value") -> RequestRefused:
    """400 of a value, whose path the message will begin with."""
    return RequestRefused(code, message, path)


def missing(path: str) -> RequestRefused:
    """400 of a key that has to be there."""
    return refuse(path, "Field required", "missing_required_parameter")


def extra(path: str) -> RequestRefused:
    """400 of a key that the form does not have."""
    return refuse(path, "Extra inputs are not permitted", "unsupported_parameter")


def wrong_type(path: str, expectation: str) -> RequestRefused:
    """400 of a value of another type."""
    return refuse(path, f"Input should be {expectation}", "invalid_type")


def unsupported(path: str, message: str) -> RequestRefused:
    """400 of what Anthropic's API has and the horde has not."""
    return refuse(path, message, "unsupported_value")


def require_string(value: object, path: str) -> str:
    """A string. Raises RequestRefused."""
    if value is None:
        raise missing(path)
    if not isinstance(value, str):
        raise wrong_type(path, "a valid string")
    return value


def require_object(value: object, path: str) -> JsonObject:
    """An object. Raises RequestRefused."""
    if value is None:
        raise missing(path)
    if not isinstance(value, dict):
        raise wrong_type(path, "a valid dictionary")
    return value


def require_list(value: object, path: str) -> list[object]:
    """An array. Raises RequestRefused."""
    if value is None:
        raise missing(path)
    if not isinstance(value, list):
        raise wrong_type(path, "a valid list")
    return value


def require_one_of(value: object, allowed: Collection[str], path: str) -> str:
    """One of a few words. Raises RequestRefused."""
    text = require_string(value, path)
    if text not in allowed:
        raise refuse(path, f"Input should be one of {', '.join(sorted(allowed))}")
    return text


def check_members(value: JsonObject, known: Collection[str], path: str) -> None:
    """Refuse members beyond those known; nulls and hints for caches ask for nothing."""
    for key, member in value.items():
        if member is not None and key not in known and key != CACHE_HINT:
            raise extra(f"{path}.{key}")


def show(text: str) -> str:
    """A value of the client for a message: of one that may be megabytes long the start alone."""
    return shorten_param(text)
