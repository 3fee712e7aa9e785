# SPDX-License-Identifier: AGPL-3.0-or-later
"""Keys, addresses and operation keys from headers."""

from ipaddress import ip_network
from uuid import UUID, uuid4

import pytest
from starlette.datastructures import Headers

from horde.oai.answers import build_cors_headers, build_preflight_headers
from horde.oai.callers import (
    build_caller,
    choose_operation_key,
    find_client_address,
    find_client_request_id,
    require_api_key,
)
from horde.oai.errors import RequestRefused
from horde.oai.unknown_routes import build_unknown_url_message

TRUSTED = (ip_network("10.0.0.0/8"), ip_network("::1/128"))
KEY = UUID("6f1f3f0e-5a53-4c3e-9d0a-0d6c7f9f0a11")


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer abc"}, "abc"),
        ({"authorization": "bearer abc"}, "abc"),
        ({"authorization": "  BEARER   abc  "}, "abc"),
        ({"authorization": "Bearer\tabc"}, "abc"),
        ({"authorization": "\tbearer \t abc\t"}, "abc"),
        ({"apikey": " abc "}, "abc"),
        ({"authorization": "Bearer abc", "apikey": "other"}, "abc"),
        ({"authorization": "Bearer 0000000000"}, "0000000000"),
    ],
)
def test_13_the_key(headers: dict[str, str], key: str) -> None:
    assert require_api_key(Headers(headers)) == key


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer\t"},
        {"authorization": "Bearerabc"},
        {"authorization": "Bearer   "},
        {"authorization": "Basic abc"},
        {"authorization": "abc"},
        {"apikey": "  "},
        {"authorization": "Basic abc", "apikey": "abc"},
    ],
)
def test_9_no_key(headers: dict[str, str]) -> None:
    with pytest.raises(RequestRefused) as raised:
        require_api_key(Headers(headers))
    assert (raised.value.status, raised.value.code) == (401, "missing_api_key")


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("198.51.100.1", ["203.0.113.9"], "198.51.100.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["1.2.3.4, 203.0.113.9, 10.0.0.2"], "203.0.113.9"),
        ("10.0.0.1", ["1.2.3.4", "203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["203.0.113.9, unknown"], "10.0.0.1"),
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.1"),
        ("::1", ["2001:db8::1"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        (None, ["203.0.113.9"], None),
    ],
)
def test_the_address(peer: str | None, forwarded: list[str], address: str | None) -> None:
    assert find_client_address(peer, forwarded, TRUSTED) == address


def test_only_the_client_s_own_agent_goes_along() -> None:
    headers = Headers(
        {"client-agent": "mine:1:me", "proxied-for": "1.2.3.4", "proxy-authorization": "x"}
    )
    caller = build_caller("key", headers, "198.51.100.1", TRUSTED)
    assert (caller.client_agent, caller.address) == ("mine:1:me", "198.51.100.1")
    assert "key" not in repr(caller)


def test_76_the_operation_key() -> None:
    assert choose_operation_key(
        KEY, Headers({"idempotency-key": str(uuid4())})
    ) == choose_operation_key(KEY, Headers({}))
    assert choose_operation_key(None, Headers({"idempotency-key": str(KEY)})).value == KEY
    text = choose_operation_key(None, Headers({"idempotency-key": "order 7"}))
    assert text == choose_operation_key(None, Headers({"idempotency-key": "order 7"}))
    assert text.value.version == 5
    assert text.is_from_client
    for headers in ({}, {"idempotency-key": ""}, {"idempotency-key": "x" * 256}):
        fresh = choose_operation_key(None, Headers(headers))
        assert not fresh.is_from_client
        assert fresh != choose_operation_key(None, Headers(headers))
    assert choose_operation_key(None, Headers({"idempotency-key": "x" * 255})).is_from_client


def test_the_client_s_name_of_a_request_is_taken_when_it_is_plain() -> None:
    assert find_client_request_id(Headers({"x-client-request-id": "mine"})) == "mine"
    for text in ("", "x" * 513, "naïve"):
        assert find_client_request_id(Headers({"x-client-request-id": text})) is None


def test_8_origins() -> None:
    assert build_cors_headers(("*",), None) == {}
    assert build_cors_headers(("*",), "https://a.example")["access-control-allow-origin"] == "*"
    listed = ("https://a.example",)
    allowed = build_cors_headers(listed, "https://a.example")
    assert (allowed["access-control-allow-origin"], allowed["vary"]) == (
        "https://a.example",
        "Origin",
    )
    assert build_cors_headers(listed, "https://b.example") == {"vary": "Origin"}
    assert build_preflight_headers(listed, Headers({"origin": "https://b.example"})) == {}


@pytest.mark.parametrize(
    "path", ["/v1/nope", "/", "/v1/", "/v1/responsesx", "/v1/completionsx", "/x" * 1000]
)
def test_a_path_nobody_knows_has_no_pointer(path: str) -> None:
    message = build_unknown_url_message("GET", path)
    assert message.startswith("Unknown request URL: GET /")
    assert len(message) < 260
    assert message.count(". ") == 0
