# SPDX-License-Identifier: AGPL-3.0-or-later
"""The object store behind `horde.r2`, against a real S3 server.

With HORDE_TEST_S3_ENDPOINT, HORDE_TEST_S3_BUCKET, HORDE_TEST_S3_ACCESS_KEY and
HORDE_TEST_S3_SECRET_KEY in the environment these tests run against that store instead, for example
a bucket of R2.
"""

import gzip
import http.client
import http.server
import os
import threading
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from devtools.services import ServiceAddresses
from horde import r2
from horde.config import Config
from horde.r2 import ObjectMissing, StoreUnavailable
from tests.integration.instruments import Counting
from tests.integration.tcp_gate import TcpGate
from tests.unit.test_image import Door

JPEG = bytes(range(256)) * 40


def build_config(endpoint: str, bucket: str, keys: tuple[str, str], **settings: str) -> Config:
    named = {
        "source_image_bucket": bucket,
        "chat_messages_bucket": bucket,
        "s3_access_key": keys[0],
        "s3_secret_key": keys[1],
    }
    return Config(
        database_url="unused", secret_key="unused", s3_endpoint=endpoint, **named | settings
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def store_config(request: pytest.FixtureRequest) -> Config:
    given = os.environ.get("HORDE_TEST_S3_ENDPOINT")
    if given:
        keys = (os.environ["HORDE_TEST_S3_ACCESS_KEY"], os.environ["HORDE_TEST_S3_SECRET_KEY"])
        return build_config(given, os.environ["HORDE_TEST_S3_BUCKET"], keys)
    addresses: ServiceAddresses = request.getfixturevalue("service_urls")
    return build_config(
        addresses.s3_endpoint, addresses.bucket, (addresses.s3_access_key, addresses.s3_secret_key)
    )


@pytest.fixture
def store(store_config: Config) -> Iterator[Config]:
    r2.connect(store_config)
    yield store_config
    r2.disconnect()


@pytest.fixture
def gate(store_config: Config) -> Iterator[TcpGate]:
    """The store behind a gate, and `r2` connected through it."""
    if store_config.s3_endpoint.startswith("https"):
        pytest.skip("the gate cannot forward TLS under another name")
    gate = TcpGate(store_config.s3_endpoint)
    keys = (store_config.s3_access_key, store_config.s3_secret_key)
    r2.connect(build_config(gate.url, store_config.source_image_bucket, keys))
    yield gate
    r2.disconnect()
    gate.close()


def new_key(ending: str = "_chat_0.jpg") -> str:
    return f"{uuid4()}{ending}"


def fetch(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """GET as a worker does that decodes nothing. Returns status, headers by lower-case name, body
    as sent.
    """
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=10)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
        answer = connection.getresponse()
        return (
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read(),
        )
    finally:
        connection.close()


def test_an_object_is_read_as_it_was_stored_until_it_is_deleted(store: Config) -> None:
    key = new_key()
    r2.upload_source_image(key, JPEG)
    assert r2.get_object(key) == JPEG
    assert r2.delete_objects([key]) == []
    with pytest.raises(ObjectMissing):
        r2.get_object(key)


def test_a_signed_url_needs_no_key_and_gives_the_bytes_with_their_type(store: Config) -> None:
    key = new_key()
    r2.upload_source_image(key, JPEG)
    status, headers, body = fetch(r2.sign_download_url(key, 600))
    assert (status, body) == (200, JPEG)
    assert headers["content-type"] == "image/jpeg"
    r2.delete_objects([key])
    assert fetch(r2.sign_download_url(key, 600))[0] == 404


def test_signing_asks_nobody(store_config: Config, gate: TcpGate) -> None:
    gate.close()
    url = r2.sign_download_url("a_chat_0.jpg", 777)
    parts = urllib.parse.urlsplit(url)
    query = urllib.parse.parse_qs(parts.query)
    assert query["X-Amz-Expires"] == ["777"]
    assert query["X-Amz-SignedHeaders"] == ["host"]
    assert query["X-Amz-Credential"][0].endswith("/auto/s3/aws4_request")
    assert parts.path == f"/{store_config.source_image_bucket}/a_chat_0.jpg"
    assert store_config.s3_secret_key not in url
    assert gate.connection_count == 0


def test_a_url_that_was_tampered_with_or_is_over_opens_nothing(store: Config) -> None:
    key, other = new_key(), new_key()
    r2.upload_source_image(key, JPEG)
    r2.upload_source_image(other, JPEG)
    url = r2.sign_download_url(key, 600)
    assert fetch(url.replace(key, other))[0] == 403
    assert fetch(url.replace("X-Amz-Expires=600", "X-Amz-Expires=6000"))[0] == 403
    assert fetch(url.partition("?")[0])[0] == 403
    short = r2.sign_download_url(key, 1)
    assert fetch(short)[0] == 200
    time.sleep(2.1)  # stores count in whole seconds
    assert fetch(short)[0] == 403
    r2.delete_objects([key, other])


def test_packed_messages_come_packed_whatever_the_client_accepts(store: Config) -> None:
    key = new_key("_chat_messages.json")
    document = b'[{"role": "user", "content": "' + b"long " * 5000 + b'"}]'
    r2.upload_chat_messages(key, gzip.compress(document), is_gzipped=True)
    for accepted in ("gzip", "identity"):
        status, headers, body = fetch(
            r2.sign_download_url(key, 120), **{"Accept-Encoding": accepted}
        )
        assert status == 200
        assert (headers["content-type"], headers["content-encoding"]) == (
            "application/json",
            "gzip",
        )
        assert headers["cache-control"] == "no-transform"
        assert gzip.decompress(body) == document
    r2.upload_chat_messages(key, document, is_gzipped=False)
    _, headers, body = fetch(r2.sign_download_url(key, 120))
    assert "content-encoding" not in headers
    assert body == document
    r2.delete_objects([key])


def test_many_objects_go_in_one_call_and_missing_ones_count_as_gone(store: Config) -> None:
    keys = [new_key() for _ in range(3)]
    for key in keys:
        r2.upload_source_image(key, JPEG)
    assert r2.delete_objects([*keys, new_key(), keys[0], *(new_key() for _ in range(1200))]) == []
    for key in keys:
        with pytest.raises(ObjectMissing):
            r2.get_object(key)
    assert r2.delete_objects([]) == []


def test_the_ending_of_a_key_names_its_bucket(store_config: Config) -> None:
    settings = {"source_image_bucket": "images", "chat_messages_bucket": "messages"}
    r2.connect(build_config("http://store.example", "-", ("key", "secret"), **settings))
    assert r2.get_bucket("a_chat_0.jpg") == "images"
    assert r2.get_bucket("a_chat_messages.json") == "messages"
    assert "/messages/a_chat_messages.json?" in r2.sign_download_url("a_chat_messages.json", 120)
    r2.disconnect()


def test_urls_are_signed_for_the_name_that_workers_know(store_config: Config) -> None:
    given = {"s3_public_endpoint": "https://images.example"}
    r2.connect(build_config("http://store:8333", "images", ("key", "secret"), **given))
    assert r2.sign_download_url("a_chat_0.jpg", 600).startswith(
        "https://images.example/images/a_chat_0.jpg?"
    )
    r2.disconnect()


def test_a_store_that_is_away_is_one_kind_of_error_and_back_when_it_is_back(gate: TcpGate) -> None:
    key = new_key()
    r2.upload_source_image(key, JPEG)
    gate.close()
    with pytest.raises(StoreUnavailable):
        r2.upload_source_image(key, JPEG)
    with pytest.raises(StoreUnavailable) as caught:
        r2.get_object(key)
    assert not isinstance(caught.value, ObjectMissing)
    assert r2.delete_objects([key]) == [key]
    gate.open()
    r2.state.get().breaker.record_success()
    assert r2.get_object(key) == JPEG
    assert r2.delete_objects([key]) == []


def test_a_kept_connection_that_the_store_closed_is_not_an_error(gate: TcpGate) -> None:
    key = new_key()
    r2.upload_source_image(key, JPEG)
    gate.close()
    gate.open()
    assert r2.get_object(key) == JPEG
    assert r2.delete_objects([key]) == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is left alone for half a second, and silence is borne for less."""
    monkeypatch.setattr(r2, "READ_SECONDS", 0.1)
    monkeypatch.setattr(r2, "RETRY_AFTER_SECONDS", 0.5)


@contextmanager
def answering(status: int, error_code: str) -> Iterator[tuple[str, list[str]]]:
    """The address of a store that refuses everything, and the methods it was asked by."""
    seen: list[str] = []

    class Refusing(http.server.BaseHTTPRequestHandler):
        def refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append(self.command)
            body = f"<Error><Code>{error_code}</Code></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET = refuse  # noqa: N815  the names the library calls them by

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


def put_fails(key: str) -> None:
    with pytest.raises(StoreUnavailable):
        r2.upload_source_image(key, JPEG)


@pytest.mark.usefixtures("impatient")
def test_a_silent_store_holds_one_caller_and_no_other() -> None:
    silent = Door()
    r2.connect(build_config(f"http://127.0.0.1:{silent.port}", "images", ("key", "secret")))
    counting = Counting("horde.store.failures")
    try:
        put_fails("a_chat_0.jpg")
        assert silent.count_knocks() == r2.ATTEMPTS
        put_fails("b_chat_0.jpg")
        with pytest.raises(StoreUnavailable):
            r2.get_object("a_chat_0.jpg")
        assert r2.delete_objects(["a_chat_0.jpg", "a_chat_messages.json"]) == [
            "a_chat_0.jpg",
            "a_chat_messages.json",
        ]
        assert r2.sign_download_url("a_chat_0.jpg", 600)
        assert r2.is_circuit_open()
        assert silent.count_knocks() == 0
    finally:
        r2.disconnect()
        silent.listener.close()
    assert {
        tuple(attributes[name] for name in sorted(attributes)): count
        for attributes, count in counting.read()
    } == {
        ("put", "failed"): 1,
        ("put", "skipped"): 1,
        ("get", "skipped"): 1,
        ("delete", "skipped"): 1,
    }


@pytest.mark.usefixtures("impatient")
def test_after_the_pause_one_call_tries_and_its_success_lets_all_through(
    gate: TcpGate, store_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    gate.close()
    put_fails(key)
    gate.open()
    put_fails(key)
    assert r2.delete_objects([key]) == [key]
    while r2.is_circuit_open():
        time.sleep(0.05)
    meanwhile: list[list[str]] = []
    put = r2._get_client().put_object

    def put_slowly(**options: Any) -> None:
        meanwhile.append(r2.delete_objects([key]))
        put(**options)

    with monkeypatch.context() as slow:
        slow.setattr(r2._get_client(), "put_object", put_slowly)
        r2.upload_source_image(key, JPEG)
    assert meanwhile == [[key]], "one at a time"
    assert r2.get_object(key) == JPEG
    assert r2.delete_objects([key]) == []


@pytest.mark.parametrize(
    ("status", "error_code", "is_circuit_open"),
    [
        (403, "AccessDenied", False),
        (404, "NoSuchKey", False),
        (500, "InternalError", True),
        (503, "SlowDown", True),
    ],
)
def test_an_answer_leaves_the_store_alone_only_when_it_is_in_trouble(
    status: int, error_code: str, is_circuit_open: bool
) -> None:
    with answering(status, error_code) as (address, seen):
        r2.connect(build_config(address, "images", ("key", "secret")))
        for call in (
            lambda: r2.get_object("a_chat_0.jpg"),
            lambda: r2.upload_source_image("a_chat_0.jpg", JPEG),
        ):
            with pytest.raises(StoreUnavailable):
                call()
        assert r2.is_circuit_open() == is_circuit_open
        assert ("PUT" in seen) != is_circuit_open
        r2.disconnect()


def test_wrong_keys_and_a_missing_bucket_are_refusals(store_config: Config) -> None:
    keys = (store_config.s3_access_key, store_config.s3_secret_key)
    for config in (
        build_config(
            store_config.s3_endpoint, store_config.source_image_bucket, (keys[0], "another secret")
        ),
        build_config(store_config.s3_endpoint, f"missing-{uuid4()}", keys),
    ):
        r2.connect(config)
        with pytest.raises(StoreUnavailable) as caught:
            r2.get_object("a_chat_0.jpg")
        assert keys[1] not in str(caught.value)
        assert not isinstance(caught.value, ObjectMissing)
        r2.disconnect()


def test_without_a_store_every_call_says_so(store_config: Config) -> None:
    r2.connect(Config(database_url="unused", secret_key="unused"))
    assert not r2.is_configured()
    with pytest.raises(StoreUnavailable):
        r2.upload_source_image("a_chat_0.jpg", JPEG)
    with pytest.raises(StoreUnavailable):
        r2.sign_download_url("a_chat_0.jpg", 600)
    assert r2.delete_objects(["a_chat_0.jpg"]) == ["a_chat_0.jpg"]
    r2.disconnect()


def test_threads_share_the_client(store: Config) -> None:
    keys = [new_key() for _ in range(24)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: r2.upload_source_image(key, key.encode()), keys))
        assert list(threads.map(r2.get_object, keys)) == [key.encode() for key in keys]
    assert r2.delete_objects(keys) == []


def test_every_object_is_listed_page_by_page(store: Config) -> None:
    keys = {new_key() for _ in range(2)} | {new_key("_chat_messages.json")}
    for key in keys:
        r2.put_object(key, b"x", content_type="image/jpeg")
    listed = [key for _, key in r2.list_objects()]
    assert keys <= set(listed)
    assert len(listed) == len(set(listed)), "one bucket for both kinds is listed once"
    assert r2.delete_objects(sorted(keys)) == []


def test_a_bucket_that_nobody_made_yet_is_empty(store: Config) -> None:
    names = ("source_image_bucket", "chat_messages_bucket", "evidence_bucket")
    missing = replace(store, **{name: f"{name.replace('_', '-')}-not-made" for name in names})
    r2.connect(missing)
    try:
        assert list(r2.list_objects()) == []
    finally:
        r2.connect(store)


def test_proxies_of_the_environment_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, store_config: Config
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    r2.connect(store_config)
    key = new_key()
    r2.upload_source_image(key, JPEG)
    assert r2.delete_objects([key]) == []
    r2.disconnect()
