# SPDX-License-Identifier: AGPL-3.0-or-later
from ipaddress import ip_network

import pytest
from flask import Flask
from werkzeug.exceptions import UnsupportedMediaType

from horde.apis.requests import (
    check_storable_request,
    get_client_agent,
    read_json_body,
    read_json_object,
    require_api_key,
    resolve_peer_address,
)
from horde.exceptions import BadRequest, PayloadInvalid, RequestTooLarge
from horde.return_codes import ReturnCode

PROXIES = (ip_network("10.0.0.0/8"), ip_network("::1/128"))
JSON = "application/json"

app = Flask(__name__)


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "address"),
    [
        ("203.0.113.9", "", "203.0.113.9"),
        ("203.0.113.9", "198.51.100.1", "203.0.113.9"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "192.0.2.66, 198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "192.0.2.66, 198.51.100.1, 10.0.0.2", "198.51.100.1"),
        ("10.0.0.1", "198.51.100.1, unknown", "10.0.0.1"),
        ("10.0.0.1", " , ", "10.0.0.1"),
        ("::1", "2001:db8::1", "2001:db8::1"),
        ("::ffff:10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("::ffff:203.0.113.9", "198.51.100.1", "203.0.113.9"),
        ("", "198.51.100.1", ""),
    ],
)
def test_only_a_trusted_proxy_speaks_for_another_address(
    peer: str, forwarded_for: str, address: str
) -> None:
    assert resolve_peer_address(peer, forwarded_for, PROXIES) == address


def test_nobody_is_a_trusted_proxy_unless_configured() -> None:
    assert resolve_peer_address("127.0.0.1", "198.51.100.1", ()) == "127.0.0.1"


@pytest.mark.parametrize(
    "content_type",
    [JSON, "application/json; charset=utf-8", "Application/JSON", "application/ld+json"],
)
def test_json_types_are_read(content_type: str) -> None:
    with app.test_request_context(method="POST", data=b'{"a": 1}', content_type=content_type):
        assert read_json_body() == {"a": 1}


@pytest.mark.parametrize(
    "content_type",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"],
)
def test_other_types_are_refused(content_type: str | None) -> None:
    with (
        app.test_request_context(method="POST", data=b'{"a": 1}', content_type=content_type),
        pytest.raises(UnsupportedMediaType),
    ):
        read_json_body()


class UnreadableStream:
    def read(self, size: int = -1) -> bytes:
        raise AssertionError("the body was read")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip"])
def test_an_encoded_body_is_refused_unread(encoding: str) -> None:
    headers = {"Content-Encoding": encoding}
    with (
        app.test_request_context(
            method="POST",
            content_type=JSON,
            headers=headers,
            environ_overrides={"wsgi.input": UnreadableStream()},
        ),
        pytest.raises(UnsupportedMediaType),
    ):
        read_json_body()


def test_the_identity_encoding_is_none() -> None:
    with app.test_request_context(
        method="POST", data=b"1", content_type=JSON, headers={"Content-Encoding": "Identity"}
    ):
        assert read_json_body() == 1


def test_a_declared_length_over_the_limit_is_refused_unread() -> None:
    with (
        app.test_request_context(
            method="POST",
            content_type=JSON,
            environ_overrides={"wsgi.input": UnreadableStream(), "CONTENT_LENGTH": "101"},
        ),
        pytest.raises(RequestTooLarge),
    ):
        read_json_body(100)


class EndlessStream:
    """A chunked body without end, which notes how far it was read."""

    read_count = 0

    def read(self, size: int = -1) -> bytes:
        assert size >= 0
        self.read_count += size
        return b" " * size


def test_a_chunked_body_is_read_one_byte_past_the_limit() -> None:
    stream = EndlessStream()
    environ = {
        "wsgi.input": stream,
        "wsgi.input_terminated": True,
        "HTTP_TRANSFER_ENCODING": "chunked",
    }
    with (
        app.test_request_context(method="POST", content_type=JSON, environ_overrides=environ),
        pytest.raises(RequestTooLarge),
    ):
        read_json_body(1000)
    assert stream.read_count <= 1001


def test_a_body_of_exactly_the_limit_is_read() -> None:
    with app.test_request_context(method="POST", data=b"[" + b" " * 98 + b"]", content_type=JSON):
        assert read_json_body(100) == []


@pytest.mark.parametrize("body", [b"[]", b"null", b'"hi"', b"1"])
def test_a_route_that_takes_an_object_names_the_body(body: bytes) -> None:
    with (
        app.test_request_context(method="POST", data=body, content_type=JSON),
        pytest.raises(PayloadInvalid) as refusal,
    ):
        read_json_object()
    assert refusal.value.extra["errors"] == {"": "The body has to be a JSON object"}


@pytest.mark.parametrize("name", ["apikey", "Apikey", "APIKEY"])
def test_the_key_is_found_in_any_case(name: str) -> None:
    with app.test_request_context(headers={name: "0000000000"}):
        assert require_api_key() == "0000000000"


def test_a_missing_key_is_no_anonymous_key() -> None:
    with app.test_request_context(), pytest.raises(PayloadInvalid) as refusal:
        require_api_key()
    assert set(refusal.value.extra["errors"]) == {"apikey"}  # type: ignore[call-overload]


def test_any_client_agent_is_accepted() -> None:
    with app.test_request_context():
        assert get_client_agent() == "unknown:0:unknown"
    with app.test_request_context(headers={"Client-Agent": "KoboldCppEmbedWorker:2"}):
        assert get_client_agent() == "KoboldCppEmbedWorker:2"


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/a%00b", {}), ("/a?name=b%00c", {}), ("/a", {"Client-Agent": "a\x00b"})],
)
def test_a_nul_outside_the_body_is_refused(path: str, headers: dict[str, str]) -> None:
    with app.test_request_context(path, headers=headers), pytest.raises(BadRequest) as refusal:
        check_storable_request()
    assert refusal.value.rc is ReturnCode.NUL_BYTE_IN_PAYLOAD


def test_bytes_that_are_no_text_pass_outside_the_body() -> None:
    with app.test_request_context("/a%ED%A0%80?name=%FF", headers={"Client-Agent": "\xff"}):
        check_storable_request()
