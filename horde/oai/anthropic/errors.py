# SPDX-License-Identifier: AGPL-3.0-or-later
"""Errors and headers as clients of Anthropic's API read them. Pure.

Source: docs/reference/front_messages.md, "Errors".
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final

from horde.json_text import JsonObject
from horde.oai.errors import ErrorAnswer

VERSION_HEADER: Final = "anthropic-version"
OVERLOADED_STATUS: Final = 529
THREADS_UNSUPPORTED: Final = "thread_unsupported_request"  # Anthropic's own code
PROMPT_TOO_LONG: Final = "prompt is too long"
_PATHS: Final = ("/v1/messages", "/v1/v1/messages")
_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        OVERLOADED_STATUS: "overloaded_error",
    }
)
# As the horde words it for a prompt whose size it knows.
_SIZES: Final = re.compile(
    r"estimated at (\d+) tokens\. With the (\d+) tokens of output .* context of (\d+) tokens"
)
_RATE_LIMITS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "x-ratelimit-limit-requests": "anthropic-ratelimit-requests-limit",
        "x-ratelimit-remaining-requests": "anthropic-ratelimit-requests-remaining",
    }
)
_RESET: Final = "x-ratelimit-reset-requests"


def is_spoken(path: str, version: str | None) -> bool:
    """Whether errors of a call have Anthropic's shape: by its path, or by a client that says so."""
    return version is not None or path.startswith(_PATHS)


def get_status(error: ErrorAnswer) -> int:
    """The status of an error; Anthropic's own number for a front that is full."""
    return OVERLOADED_STATUS if error.code == "front_overloaded" else error.status


def build_error_body(error: ErrorAnswer, front_id: str) -> JsonObject:
    """The body of an error, in a response or in a stream."""
    status = get_status(error)
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    details: JsonObject = {"error_code": error.code}
    if error.param is not None:
        details["param"] = error.param
    if error.code == THREADS_UNSUPPORTED:
        details["unsupported"] = ["thread"]
    if error.metadata:
        details["metadata"] = dict(error.metadata)
    return {
        "type": "error",
        "error": {"type": kind, "message": _build_text(error), "details": details},
        "request_id": front_id,
    }


def _build_text(error: ErrorAnswer) -> str:
    """The message, which begins with the path at fault. Agents read the beginnings of those about
    the context: they shorten their history at one, and the reply at the other.
    """
    if error.code == "context_length_exceeded":
        return f"{_describe_overflow(error)}. {error.message}"
    if error.param is None or error.message.startswith(f"{error.param}:"):
        return error.message
    return f"{error.param}: {error.message}"


def _describe_overflow(error: ErrorAnswer) -> str:
    sizes = _SIZES.search(error.message)
    if sizes is None:
        if error.param == "max_tokens":
            return "input length and `max_tokens` exceed context limit"
        return PROMPT_TOO_LONG
    estimate, output, limit = map(int, sizes.groups())
    if estimate > limit:
        return f"{PROMPT_TOO_LONG}: {estimate} tokens > {limit} maximum"
    return f"input length and `max_tokens` exceed context limit: {estimate} + {output} > {limit}"


def build_headers(headers: Mapping[str, str], front_id: str) -> dict[str, str]:
    """What an answer with these headers has beside them."""
    named = {"request-id": front_id}
    named |= {name: headers[sent] for sent, name in _RATE_LIMITS.items() if sent in headers}
    reset = headers.get(_RESET, "").removesuffix("s")
    if reset.isdigit():
        moment = datetime.now(UTC) + timedelta(seconds=int(reset))
        named["anthropic-ratelimit-requests-reset"] = write_time(moment)
    return named


def write_time(moment: datetime) -> str:
    """RFC 3339, to the second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
