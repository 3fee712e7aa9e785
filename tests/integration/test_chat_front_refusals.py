# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the front answers by itself or with the API's first word: routes, keys and bodies.

Numbers are those of the front's checklist.
"""

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from devtools.services import ServiceAddresses
from horde.classes.base.waiting_prompt import WaitingPrompt
from tests.integration._fake_chat_worker import MODEL, build_call, build_tool, start_anew
from tests.integration.chat_front import FrontStack, build_body, get_error, run_front_stack
from tests.integration.rows import make_chat_worker, make_user
from tests.integration.text_horde import count_rows

USER = {"role": "user", "content": "Name one colour."}


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "front_refusals") as stack:
        start_anew()
        yield stack


def list_names(rows: list[Any]) -> list[str]:
    """What the rows of a table are called."""
    return [row[0] for row in rows]


def count_requests() -> int:
    """How many requests the horde has."""
    return count_rows(WaitingPrompt)


# --- routes and headers
# -----------------------------------------------------------------------------------------------


def test_2_a_get_of_completions_is_405_with_the_allowed_methods(stack: FrontStack) -> None:
    answer = stack.call("GET", "/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST, OPTIONS"
    error = get_error(answer)
    assert (error["type"], error["code"]) == ("invalid_request_error", "method_not_supported")


def test_2_a_model_cannot_be_deleted(stack: FrontStack) -> None:
    answer = stack.call("DELETE", "/v1/models/a/b")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, OPTIONS")


@pytest.mark.parametrize(
    ("method", "path", "pointer"),
    [
        ("POST", "/v1/responses/compact", "does not offer"),
        ("POST", "/v1/conversations", "previous_response_id"),
        ("GET", "/v1/chat/completions/chatcmpl-1", "not stored"),
        ("POST", "/v1/embeddings", "does not offer"),
        ("POST", "/v1/images/generations", "does not offer"),
        ("POST", "/v1/audio/speech", "does not offer"),
        ("POST", "/v1/moderations", "does not offer"),
        ("POST", "/v1/files", "does not offer"),
        ("POST", "/v1/assistants", "does not offer"),
        ("POST", "/v1/threads/runs", "does not offer"),
        ("POST", "/v1/batches", "does not offer"),
        ("GET", "/v1/realtime", "does not offer"),
        ("POST", "/chat/completions", "end in /v1"),
        ("GET", "/models", "end in /v1"),
        ("POST", "/v1/v1/chat/completions", "end in /v1"),
        ("POST", "/v1/chat/completions/chat/completions", "end in /v1"),
        ("GET", "/v1/nope", "Unknown request URL: GET /v1/nope."),
    ],
)
def test_3_and_4_an_unknown_route_is_404_with_a_pointer(
    stack: FrontStack, method: str, path: str, pointer: str
) -> None:
    answer = stack.call(method, f"{path}?key=MARKER-7f3a")
    error = get_error(answer)
    assert (answer.status_code, error["type"], error["code"], error["param"]) == (
        404,
        "not_found_error",
        "unknown_url",
        None,
    )
    assert pointer in error["message"]
    assert f"{method} {path}" in error["message"]
    assert "MARKER" not in answer.text


@pytest.mark.parametrize(("path", "root"), [("/chta", "./"), ("/a/b/c", "../../")])
def test_a_mistyped_address_in_a_browser_is_a_page_with_the_way_to_the_chat(
    stack: FrontStack, path: str, root: str
) -> None:
    answer = stack.call("GET", path, headers={"accept": "text/html,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-request-id"].startswith("req_")
    assert f'href="{root}">To the chat</a>' in answer.text
    for method, other, accept in (
        ("GET", path, "*/*"),
        ("GET", path, "application/json, text/html"),
        ("POST", path, "text/html"),
        ("GET", "/v1/nope", "text/html"),
        ("GET", "/API/v2/nope", "text/html"),
    ):
        refused = stack.call(method, other, headers={"accept": accept})
        assert (refused.status_code, get_error(refused)["code"]) == (404, "unknown_url"), other


def test_5_every_response_has_a_request_id_of_its_own(stack: FrontStack) -> None:
    calls = [
        ("GET", "/health"),
        ("GET", "/v1/models"),
        ("GET", "/nope"),
        ("POST", "/v1/chat/completions"),
        ("OPTIONS", "/health"),
    ]
    ids = [stack.call(method, path).headers["x-request-id"] for method, path in calls]
    assert len(set(ids)) == len(calls)
    assert all(request_id.startswith("req_") and len(request_id) == 36 for request_id in ids)


def test_5_the_sdk_shows_the_request_id_of_an_error(stack: FrontStack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="nobody", max_retries=0)
    with client, pytest.raises(openai.AuthenticationError) as raised:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert raised.value.request_id
    assert raised.value.request_id.startswith("req_")


def test_7_health_needs_no_key(stack: FrontStack) -> None:
    answer = stack.call("GET", "/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    ready = stack.call("GET", "/health/ready")
    assert (ready.status_code, ready.json()) == (
        200,
        {"status": "ready", "native": True, "redis": False, "store": None},
    )
    assert stack.call("HEAD", "/health").content == b""


def test_8_a_preflight_allows_what_it_asks_for(stack: FrontStack) -> None:
    asked = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    for path in ("/v1/chat/completions", "/v1/models", "/v1/models/a/b"):
        answer = stack.call("OPTIONS", path, headers=asked)
        assert answer.status_code == 204
        assert answer.content == b""
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
        assert answer.headers["access-control-max-age"] == "86400"
        assert "access-control-allow-credentials" not in answer.headers


def test_8_errors_carry_the_origin_header(stack: FrontStack) -> None:
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/nope"),
        ("GET", "/v1/chat/completions"),
    ):
        answer = stack.call(method, path, headers={"origin": "https://page.example"})
        assert answer.status_code >= 400
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in stack.call("GET", "/health").headers


def test_a_trailing_slash_is_served_and_nothing_is_redirected(stack: FrontStack) -> None:
    answer = stack.call(
        "POST", "/v1/chat/completions/", content=b"{}", headers={"authorization": "Bearer k"}
    )
    assert (answer.status_code, get_error(answer)["code"]) == (400, "missing_required_parameter")


# --- keys
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Basic abc"},
        {"authorization": ""},
        {"apikey": ""},
    ],
)
def test_9_a_missing_key_is_401_before_the_body_is_read(
    stack: FrontStack, headers: dict[str, str]
) -> None:
    answer = stack.call("POST", "/v1/chat/completions", content=b"no json", headers=headers)
    error = get_error(answer)
    assert (answer.status_code, error["type"], error["code"], error["param"]) == (
        401,
        "authentication_error",
        "missing_api_key",
        None,
    )
    assert "0000000000" in error["message"]
    assert "metadata" not in error
    assert count_requests() == 0


@pytest.mark.parametrize("key", ["nobody", "EMPTY", "null", "sk-no-key-required"])
def test_10_an_unknown_key_is_401(stack: FrontStack, key: str) -> None:
    stack.horde.take_nothing()
    status, error = stack.refuse(key)
    assert (status, error["type"], error["code"]) == (
        401,
        "authentication_error",
        "invalid_api_key",
    )
    assert error["metadata"] == {"rc": "InvalidAPIKey"}


def test_10_the_sdk_does_not_retry_an_unknown_key(stack: FrontStack) -> None:
    calls: list[httpx.Request] = []
    http = httpx.Client(event_hooks={"request": [calls.append]}, trust_env=False)
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="nobody", http_client=http)
    with client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert len(calls) == 1


def test_12_models_need_no_key(stack: FrontStack) -> None:
    assert stack.call("GET", "/v1/models").status_code == 200
    assert (
        stack.call("GET", "/v1/models", headers={"authorization": "Bearer nobody"}).status_code
        == 200
    )


def test_13_the_scheme_is_read_in_any_case_and_a_native_key_header_counts(
    stack: FrontStack,
) -> None:
    for headers in (
        {"authorization": "bearer   nobody"},
        {"authorization": "BEARER nobody"},
        {"apikey": "nobody"},
    ):
        answer = stack.call("POST", "/v1/chat/completions", json=build_body(), headers=headers)
        assert get_error(answer)["code"] == "invalid_api_key"


# --- keys of the body
# -------------------------------------------------------------------------------------------------

REFUSED_BODIES: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("14 no model", {"model": ...}, "missing_required_parameter", "model"),
    ("14 null model", {"model": None}, "missing_required_parameter", "model"),
    ("14 empty model", {"model": ""}, "missing_required_parameter", "model"),
    ("14 no messages", {"messages": ...}, "missing_required_parameter", "messages"),
    ("16 model and models", {"models": ["a", "b"]}, "conflicting_parameters", "models"),
    ("models empty", {"model": None, "models": []}, "invalid_value", "models"),
    ("models six", {"model": None, "models": list("abcdef")}, "invalid_value", "models"),
    ("models twice", {"model": None, "models": ["a", "a"]}, "invalid_value", "models"),
    ("18 two choices", {"n": 2}, "unsupported_value", "n"),
    ("n as text", {"n": "1"}, "invalid_type", "n"),
    ("19 logprobs", {"logprobs": True}, "unsupported_parameter", "logprobs"),
    ("19 top_logprobs", {"top_logprobs": 3}, "unsupported_parameter", "top_logprobs"),
    ("19 logit_bias", {"logit_bias": {"1": 2}}, "unsupported_parameter", "logit_bias"),
    ("19 modalities", {"modalities": ["text", "audio"]}, "unsupported_value", "modalities"),
    ("verbosity", {"verbosity": "low"}, "unsupported_value", "verbosity"),
    ("20 store", {"store": "yes"}, "invalid_type", "store"),
    ("20 metadata", {"metadata": []}, "invalid_type", "metadata"),
    ("20 user", {"user": 3}, "invalid_type", "user"),
    ("21 unknown key", {"nonsense": 1}, "unsupported_parameter", "nonsense"),
    ("22 top_k", {"top_k": 40}, "unsupported_parameter", "top_k"),
    ("22 min_p", {"min_p": 0.05}, "unsupported_parameter", "min_p"),
    (
        "22 repetition_penalty",
        {"repetition_penalty": 1.1},
        "unsupported_parameter",
        "repetition_penalty",
    ),
    ("23 functions", {"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ("23 function_call", {"function_call": "auto"}, "unsupported_parameter", "function_call"),
    ("24 audio", {"audio": {}}, "unsupported_parameter", "audio"),
    ("24 prediction", {"prediction": {}}, "unsupported_parameter", "prediction"),
    (
        "24 web_search_options",
        {"web_search_options": {}},
        "unsupported_parameter",
        "web_search_options",
    ),
    ("24 moderation", {"moderation": {}}, "unsupported_parameter", "moderation"),
    ("25 two limits", {"max_completion_tokens": 65}, "conflicting_parameters", "max_tokens"),
    ("27 too few tokens", {"max_tokens": 8}, "integer_below_min_value", "max_tokens"),
    ("27 too many tokens", {"max_tokens": 20000}, "integer_above_max_value", "max_tokens"),
    (
        "27 under the other name",
        {"max_tokens": ..., "max_completion_tokens": 8},
        "integer_below_min_value",
        "max_completion_tokens",
    ),
    ("max_tokens as text", {"max_tokens": "64"}, "invalid_type", "max_tokens"),
    ("max_tokens as decimal", {"max_tokens": 64.0}, "invalid_type", "max_tokens"),
    ("28 temperature", {"temperature": 2.5}, "decimal_above_max_value", "temperature"),
    ("temperature below", {"temperature": -1}, "decimal_below_min_value", "temperature"),
    ("temperature boolean", {"temperature": True}, "invalid_type", "temperature"),
    ("top_p", {"top_p": 1.5}, "decimal_above_max_value", "top_p"),
    ("top_p of the API", {"top_p": 0}, "invalid_value", "top_p"),
    ("presence_penalty", {"presence_penalty": -2.1}, "decimal_below_min_value", "presence_penalty"),
    ("frequency_penalty", {"frequency_penalty": 3}, "decimal_above_max_value", "frequency_penalty"),
    ("seed", {"seed": 1.5}, "invalid_type", "seed"),
    ("stop empty string", {"stop": [""]}, "invalid_value", "stop"),
    ("stop too many", {"stop": [str(number) for number in range(129)]}, "invalid_value", "stop"),
    ("stop too long", {"stop": "x" * 2001}, "invalid_value", "stop"),
    ("stream", {"stream": 1}, "invalid_type", "stream"),
    (
        "stream_options",
        {"stream_options": {"nonsense": True}},
        "unsupported_parameter",
        "stream_options.nonsense",
    ),
    (
        "stream_options type",
        {"stream_options": {"include_usage": 1}},
        "invalid_type",
        "stream_options.include_usage",
    ),
    ("reasoning_effort", {"reasoning_effort": "huge"}, "invalid_value", "reasoning_effort"),
    (
        "include_reasoning",
        {"include_reasoning": True},
        "unsupported_parameter",
        "include_reasoning",
    ),
    ("32 horde", {"horde": {"nonsense": 1}}, "unsupported_parameter", "horde.nonsense"),
    ("horde type", {"horde": []}, "invalid_type", "horde"),
    ("horde member type", {"horde": {"max_kudos": "1"}}, "invalid_type", "horde.max_kudos"),
    (
        "horde member value",
        {"horde": {"context_fit": "ignore"}},
        "invalid_value",
        "horde.context_fit",
    ),
    (
        "horde conflict",
        {"horde": {"only": ["a"], "ignore": ["b"]}},
        "conflicting_parameters",
        "horde.only",
    ),
    (
        "horde operation key",
        {"horde": {"operation_key": "string"}},
        "invalid_value",
        "horde.operation_key",
    ),
    (
        "horde context of the API",
        {"horde": {"max_context_length": 8}},
        "invalid_value",
        "horde.max_context_length",
    ),
    (
        "dry run of a stream",
        {"stream": True, "horde": {"dry_run": True}},
        "conflicting_parameters",
        "horde.dry_run",
    ),
    ("44 tool_choice", {"tool_choice": "auto"}, "conflicting_parameters", "tool_choice"),
    (
        "44 no tools",
        {"tool_choice": "required", "tools": [], "stream": True},
        "conflicting_parameters",
        "tool_choice",
    ),
    (
        "parallel_tool_calls",
        {"parallel_tool_calls": False},
        "conflicting_parameters",
        "parallel_tool_calls",
    ),
    (
        "undeclared function",
        {
            "tools": [build_tool()],
            "tool_choice": {"type": "function", "function": {"name": "other"}},
        },
        "conflicting_parameters",
        "tool_choice",
    ),
    (
        "too many tools",
        {"tools": [build_tool(f"f{number}") for number in range(129)]},
        "unsupported_value",
        "tools",
    ),
    (
        "tool without name",
        {"tools": [{"type": "function", "function": {}}]},
        "missing_required_parameter",
        "tools[0].function.name",
    ),
    (
        "45 strict function",
        {
            "tools": [
                build_tool(),
                build_tool(
                    "strict_one", strict=True, parameters={"type": "object", "properties": {}}
                ),
            ]
        },
        "invalid_function_parameters",
        "tools[1].function.parameters",
    ),
    (
        "strict format",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "colour",
                    "strict": True,
                    "schema": {"type": "object", "properties": {}},
                },
            }
        },
        "invalid_json_schema",
        "response_format",
    ),
    (
        "unknown format",
        {"response_format": {"type": "xml"}},
        "invalid_value",
        "response_format.type",
    ),
    (
        "json guard",
        {"response_format": {"type": "json_object"}, "horde": {"openai_guards": True}},
        "conflicting_parameters",
        "messages",
    ),
]


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [row[1:] for row in REFUSED_BODIES],
    ids=[row[0] for row in REFUSED_BODIES],
)
def test_a_key_at_fault_is_named(
    stack: FrontStack, changes: dict[str, Any], code: str, param: str | None
) -> None:
    status, error = stack.refuse(**changes)
    assert (status, error["type"], error["code"], error["param"]) == (
        400,
        "invalid_request_error",
        code,
        param,
    )
    assert count_requests() == 0


REFUSED_MESSAGES: list[tuple[str, list[Any], str, str]] = [
    ("no messages", [], "invalid_value", "messages"),
    ("too many", [USER] * 1025, "unsupported_value", "messages"),
    ("no object", ["hi"], "invalid_type", "messages[0]"),
    (
        "43 function",
        [USER, {"role": "function", "content": "x"}],
        "unsupported_value",
        "messages[1].role",
    ),
    ("unknown role", [{"role": "banana", "content": "x"}], "unsupported_value", "messages[0].role"),
    ("no role", [{"content": "x"}], "missing_required_parameter", "messages[0].role"),
    ("no content", [{"role": "user"}], "missing_required_parameter", "messages[0].content"),
    (
        "null content",
        [{"role": "assistant", "content": None}],
        "missing_required_parameter",
        "messages[0].content",
    ),
    ("number", [{"role": "user", "content": 5}], "invalid_type", "messages[0].content"),
    (
        "calls of a user",
        [USER | {"tool_calls": [build_call()]}],
        "unsupported_parameter",
        "messages[0].tool_calls",
    ),
    (
        "refusal",
        [USER, {"role": "assistant", "content": "a", "refusal": "no"}],
        "unsupported_parameter",
        "messages[1].refusal",
    ),
    (
        "function_call",
        [
            USER,
            {"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": ""}},
        ],
        "unsupported_parameter",
        "messages[1].function_call",
    ),
    (
        "42 audio part",
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "input_audio", "input_audio": {}},
                ],
            }
        ],
        "unsupported_value",
        "messages[0].content[1].type",
    ),
    (
        "image of the system",
        [
            {
                "role": "system",
                "content": [
                    {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
                ],
            }
        ],
        "unsupported_value",
        "messages[0].content[0].type",
    ),
    (
        "image detail",
        [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image_url",
                        "image_url": {"url": "https://example.com/a.png", "detail": "x"},
                    }
                ],
            }
        ],
        "invalid_value",
        "messages[0].content[0].image_url.detail",
    ),
    (
        "too many images",
        [
            {
                "role": "user",
                "content": (
                    [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}] * 21
                ),
            }
        ],
        "too_many_images",
        "messages",
    ),
    (
        "too much text",
        [{"role": "user", "content": "x" * (1024 * 1024 + 1)}],
        "unsupported_value",
        "messages",
    ),
    (
        "40 unknown id",
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [build_call()]},
            {"role": "tool", "content": "x", "tool_call_id": "call_9"},
        ],
        "invalid_value",
        "messages[2].tool_call_id",
    ),
    (
        "41 unanswered",
        [USER, {"role": "assistant", "content": None, "tool_calls": [build_call()]}],
        "invalid_value",
        "messages",
    ),
    (
        "user in between",
        [USER, {"role": "assistant", "content": None, "tool_calls": [build_call()]}, USER],
        "invalid_value",
        "messages[2].role",
    ),
    (
        "answered twice",
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [build_call()]},
            {"role": "tool", "content": "x", "tool_call_id": "call_1"},
            {"role": "tool", "content": "x", "tool_call_id": "call_1"},
        ],
        "invalid_value",
        "messages[3].role",
    ),
    (
        "one id twice",
        [USER, {"role": "assistant", "content": None, "tool_calls": [build_call(), build_call()]}],
        "invalid_value",
        "messages[1].tool_calls",
    ),
]


@pytest.mark.parametrize(
    ("messages", "code", "param"),
    [row[1:] for row in REFUSED_MESSAGES],
    ids=list_names(REFUSED_MESSAGES),
)
def test_a_message_at_fault_is_named_with_its_path(
    stack: FrontStack, messages: list[Any], code: str, param: str
) -> None:
    status, error = stack.refuse(messages=messages)
    assert (status, error["type"], error["code"], error["param"]) == (
        400,
        "invalid_request_error",
        code,
        param,
    )


def test_41_the_missing_answer_is_named_in_the_message(stack: FrontStack) -> None:
    _, error = stack.refuse(
        messages=[
            USER,
            {"role": "assistant", "content": None, "tool_calls": [build_call(call_id="call_77")]},
        ]
    )
    assert "call_77" in error["message"]


def test_22_the_neutral_value_of_a_sampler_is_named(stack: FrontStack) -> None:
    assert "0 or -1" in stack.refuse(top_k=40)[1]["message"]
    assert "'tools'" in stack.refuse(functions=[{"name": "f"}])[1]["message"]
    assert "reasoning_effort" in stack.refuse(reasoning={"effort": "low"})[1]["message"]


@pytest.mark.parametrize(
    "data",
    [b"", b"hi", b"{", b"[]", b"null", b'"hi"', b"\xff\xfe{}", b'{"model": NaN}', b"[" * 100_000],
)
def test_31_a_body_that_is_no_json_object_is_refused(stack: FrontStack, data: bytes) -> None:
    answer = stack.post(data, **{"content-type": "text/plain"})
    assert (answer.status_code, get_error(answer)["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"model": "a\\u0000"}', "invalid_value"),
        (b'{"model": "\\ud800"}', "invalid_prompt_encoding"),
    ],
)
def test_characters_that_cannot_be_stored_are_refused(
    stack: FrontStack, data: bytes, code: str
) -> None:
    answer = stack.post(data)
    assert (answer.status_code, get_error(answer)["code"], get_error(answer)["param"]) == (
        400,
        code,
        None,
    )


def test_the_first_key_at_fault_in_body_order_is_reported(stack: FrontStack) -> None:
    for first, second in (("n", "temperature"), ("temperature", "n")):
        bad = {"n": 2, "temperature": 9}
        answer = stack.post({first: bad[first], "messages": "no", second: bad[second]})
        assert get_error(answer)["param"] == first


def test_the_last_of_a_repeated_key_counts(stack: FrontStack) -> None:
    answer = stack.post(b'{"n": 2, "n": 1, "model": "x", "messages": [], "model": 5}')
    assert (answer.status_code, get_error(answer)["param"]) == (400, "model")


def test_a_compressed_body_is_415_unread(stack: FrontStack) -> None:
    bomb = gzip.compress(b" " * (8 * 1024 * 1024))
    answer = stack.post(bomb, **{"content-encoding": "gzip"})
    assert (answer.status_code, get_error(answer)["code"]) == (415, "unsupported_content_encoding")
    assert (
        stack.post(
            json.dumps(build_body(n=2)).encode(), **{"content-encoding": "identity"}
        ).status_code
        == 400
    )


@pytest.mark.parametrize(
    "encodings", [("identity", "gzip"), ("gzip", "identity"), ("identity, br",)]
)
def test_every_line_of_encodings_is_read(stack: FrontStack, encodings: tuple[str, ...]) -> None:
    """A second `Content-Encoding` line counts like the first."""
    sent = [("authorization", f"Bearer {stack.horde.requester_key}")]
    sent += [("content-encoding", encoding) for encoding in encodings]
    data = json.dumps(build_body()).encode()
    answer = stack.call("POST", "/v1/chat/completions", content=data, headers=sent)
    assert (answer.status_code, get_error(answer)["code"]) == (415, "unsupported_content_encoding")


def test_a_body_over_the_bound_is_413(stack: FrontStack) -> None:
    data = b'{"model": "' + b"x" * (36 * 1024 * 1024) + b'"}'
    answer = stack.post(data)
    error = get_error(answer)
    assert (answer.status_code, error["type"], error["code"]) == (
        413,
        "invalid_request_error",
        "request_too_large",
    )
    chunked = (data[start : start + (1 << 20)] for start in range(0, len(data), 1 << 20))
    answer = stack.call(
        "POST", "/v1/chat/completions", content=chunked, headers={"authorization": "Bearer key"}
    )
    assert (answer.status_code, get_error(answer)["code"]) == (413, "request_too_large")


def test_80_an_unknown_model_is_404_and_not_retried(stack: FrontStack) -> None:
    status, error = stack.refuse(model="nobody/knows")
    assert (status, error["type"], error["code"], error["param"]) == (
        404,
        "not_found_error",
        "model_not_found",
        "model",
    )
    assert error["metadata"] == {"rc": "UnknownChatModel"}
    _, error = stack.refuse(model=None, models=["nobody/knows", "nobody/knows-b"])
    assert (error["code"], error["param"]) == ("model_not_found", "models[0]")


def test_81_a_known_model_that_nobody_serves_is_503_without_retries(stack: FrontStack) -> None:
    answer = stack.post(build_body(model="meta-llama/Llama-3.1-8B-Instruct"))
    error = get_error(answer)
    assert (answer.status_code, error["type"], error["code"], error["param"]) == (
        503,
        "server_error",
        "no_worker_available",
        "model",
    )
    assert answer.headers["x-should-retry"] == "false"
    assert error["metadata"] == {"rc": "NoEligibleWorker"}


def test_a_worker_of_an_allow_list_that_does_not_exist_is_404(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    status, error = stack.refuse(horde={"only": ["string"]})
    assert (status, error["code"], error["param"]) == (404, "worker_not_found", "horde.only")
    assert "string" in error["message"]


def test_72_a_stream_that_is_refused_is_an_ordinary_error(stack: FrontStack) -> None:
    status, error = stack.refuse(model="nobody/knows", stream=True)
    assert (status, error["code"]) == (404, "model_not_found")


def test_insufficient_kudos_are_403(stack: FrontStack) -> None:
    start_anew()
    # Fast by its record: one measured here might be too slow for so many tokens on a busy machine.
    make_chat_worker(
        stack.horde.owner_id,
        MODEL,
        speed=200.0,
        chat_max_length=8192,
        chat_max_context_length=16384,
        chat_features=["prompt_overflow_refused"],
    )
    _, poor_key = make_user(kudos=0)
    status, error = stack.refuse(poor_key, max_tokens=..., max_completion_tokens=8192)
    assert (status, error["type"], error["code"], error["param"]) == (
        403,
        "permission_error",
        "insufficient_kudos",
        "max_completion_tokens",
    )


def test_33_the_kudos_cap_names_both_numbers(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    status, error = stack.refuse(horde={"max_kudos": 1})
    assert (status, error["code"], error["param"]) == (400, "max_kudos_exceeded", "horde.max_kudos")
    metadata = error["metadata"]
    assert metadata["rc"] == "ChatKudosCapExceeded"
    assert metadata["max_kudos"] == 1
    assert metadata["kudos_estimate"] > 1
    assert str(metadata["kudos_estimate"]) in error["message"]
