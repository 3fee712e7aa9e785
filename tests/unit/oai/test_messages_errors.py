# SPDX-License-Identifier: AGPL-3.0-or-later
"""Errors and headers in Anthropic's shape."""

from datetime import UTC, datetime

import pytest

from horde.oai.anthropic.errors import build_error_body, build_headers, get_status, is_spoken
from horde.oai.errors import ErrorAnswer


def build(status: int = 400, message: str = "a", **more: object) -> ErrorAnswer:
    return ErrorAnswer(status=status, message=message, **({"code": "a_code"} | more))


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_each_status_has_its_type(status: int, kind: str) -> None:
    error = build(status)
    assert get_status(error) == status
    assert build_error_body(error, "req_1") == {
        "type": "error",
        "error": {"type": kind, "message": "a", "details": {"error_code": "a_code"}},
        "request_id": "req_1",
    }


def test_a_front_that_is_full_has_a_status_of_its_own() -> None:
    full = build(503, code="front_overloaded")
    assert get_status(full) == 529
    assert build_error_body(full, "")["error"]["type"] == "overloaded_error"


def test_the_path_comes_first_once() -> None:
    error = build(param="max_tokens", metadata={"rc": "A"})
    body = build_error_body(error, "")["error"]
    assert body["message"] == "max_tokens: a"
    assert body["details"] == {
        "error_code": "a_code",
        "param": "max_tokens",
        "metadata": {"rc": "A"},
    }
    named = build(message="model: a", param="model", code="model_not_found", status=404)
    assert build_error_body(named, "")["error"]["message"] == "model: a"


@pytest.mark.parametrize(
    ("param", "message", "told"),
    [
        (
            "messages",
            (
                "The messages are estimated at 900 tokens. With the 64 tokens of output that were"
                " requested they need 964 tokens, which do not fit the context of 512 tokens."
            ),
            "prompt is too long: 900 tokens > 512 maximum. The messages",
        ),
        (
            "messages",
            (
                "The messages are estimated at 500 tokens. With the 64 tokens of output that were"
                " requested they need 564 tokens, which do not fit the context of 512 tokens."
            ),
            "input length and `max_tokens` exceed context limit: 500 + 64 > 512. The messages",
        ),
        ("messages", "The worker could not.", "prompt is too long. The worker could not."),
        ("max_tokens", "No.", "input length and `max_tokens` exceed context limit. No."),
    ],
)
def test_words_about_the_context_are_those_that_agents_read(
    param: str, message: str, told: str
) -> None:
    error = build(code="context_length_exceeded", param=param, message=message)
    assert build_error_body(error, "")["error"]["message"].startswith(told)


def test_native_rate_limits_have_names_of_their_own() -> None:
    limits = {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "12s",
    }
    named = build_headers(limits, "req_1")
    reset = datetime.fromisoformat(named.pop("anthropic-ratelimit-requests-reset"))
    assert -1 < (reset - datetime.now(UTC)).total_seconds() < 13
    assert named == {
        "request-id": "req_1",
        "anthropic-ratelimit-requests-limit": "10",
        "anthropic-ratelimit-requests-remaining": "3",
    }
    assert build_headers({}, "req_1") == {"request-id": "req_1"}


def test_who_speaks_this_form() -> None:
    assert is_spoken("/v1/messages/batches", None)
    assert is_spoken("/v1/chat/completions", "2023-06-01")
    assert not is_spoken("/v1/chat/completions", None)
