# SPDX-License-Identifier: AGPL-3.0-or-later
"""What strangers put on a socket of the front: bytes behind a request, what is no HTTP, and bodies
that never end.
"""

import itertools
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from devtools.services import ServiceAddresses
from horde.oai import connection
from horde.oai.connection import MAX_EARLY_BYTES, MAX_SMALL_PIECES
from tests.integration._fake_chat_worker import start_anew
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    FrontStack,
    build_body,
    run_front,
    run_front_stack,
    wait_until,
)
from tests.integration.test_chat_front_waiting import await_cancelled, await_request_id

CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\napikey: k\r\nTransfer-Encoding:"
    b" chunked\r\n\r\n"
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: front\r\n\r\n"


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "front_connections") as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), PATIENCE_SECONDS)


def build_post(key: str, **changes: Any) -> bytes:
    body = json.dumps(build_body(**changes)).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\nAuthorization: Bearer"
        b" %b\r\nContent-Length: %d\r\n\r\n"
    )
    return head % (key.encode(), len(body)) + body


def read_until(client: socket.socket, part: bytes) -> bytes:
    received = b""
    while part not in received:
        chunk = client.recv(65536)
        assert chunk, received
        received += chunk
    return received


def read_to_the_end(client: socket.socket) -> bytes:
    received = b""
    while chunk := client.recv(65536):
        received += chunk
    return received


@pytest.mark.parametrize("origin", [b"http://front", b"HTTPS://front:7010", b"http://[::1]:7010"])
def test_a_request_line_with_a_whole_url_is_that_of_its_path(
    stack: FrontStack, origin: bytes
) -> None:
    """Proxies and some clients write one."""
    with connect(stack.url) as client:
        for path, expected in (
            (b"/health?a=/b", b'{"status":"ok"}'),
            (b"/v1/models/a%2Fb", b'"code":"model_not_found"'),
            (b"/v1/nothing", b"GET /v1/nothing"),
            (b"", b"<!doctype html>"),
        ):
            client.sendall(b"GET %b%b HTTP/1.1\r\nHost: front\r\n\r\n" % (origin, path))
            read_until(client, expected)


# --- bytes behind a request
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_together", [True, False], ids=["in one packet", "later"])
@pytest.mark.parametrize("tail", [b"\r\n", HEALTH], ids=["a line end", "a next request"])
@pytest.mark.parametrize("stream", [False, True], ids=["waiting", "streaming"])
def test_75_a_hang_up_behind_early_bytes_is_noticed(
    stack: FrontStack, stream: bool, tail: bytes, is_together: bool
) -> None:
    stack.horde.take_nothing()
    with connect(stack.url) as client:
        client.sendall(
            build_post(stack.horde.requester_key, stream=stream) + (tail if is_together else b"")
        )
        request_id = await_request_id()
        if not is_together:
            client.sendall(tail)
    await_cancelled(request_id)


def test_a_next_request_is_answered_behind_the_first(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with connect(stack.url) as client:
        client.sendall(build_post(stack.horde.requester_key))
        job = stack.await_job()
        client.sendall(b"\r\n" + HEALTH[:10])
        client.sendall(HEALTH[10:].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        stack.horde.reply(job["id"], "Blue.")
        received = read_to_the_end(client)
    first, second = received.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert b'"content":"Blue."' in first
    assert second.endswith(b'{"status":"ok"}')


def test_more_early_bytes_than_are_kept_end_the_connection(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    with connect(stack.url) as client:
        client.sendall(build_post(stack.horde.requester_key))
        request_id = await_request_id()
        client.sendall(b"x" * (MAX_EARLY_BYTES + 1))
        await_cancelled(request_id)


# --- what is no request
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        "GET /v1/models/modèle HTTP/1.1\r\nHost: front\r\n\r\n".encode(),
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\nContent-Length: -5\r\n\r\n",
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\nContent-Length:"
            b" 4\r\nContent-Length: 5\r\n\r\n"
        ),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\napikey: k\r\nTransfer-Encoding:"
            b" chunked\r\n\r\nZ\r\n"
        ),
        b"GET /health HTTP/1.1\r\nHost: front\r\nX-" + b"a" * 100_000,
        CHUNKED.replace(b"Transfer", b"Content-Length: 3\r\nTransfer") + b"3\r\n{}\n\r\n0\r\n\r\n",
        CHUNKED + b"1\r\n \r\n" * (MAX_SMALL_PIECES + 1),
    ],
    ids=[
        *(
            "another protocol",
            "raw utf-8 path",
            "negative length",
            "two lengths",
            "no chunk",
            "endless header",
        ),
        *("a length and chunks", "crumbs"),
    ],
)
def test_what_is_no_http_is_refused_in_json(stack: FrontStack, sent: bytes) -> None:
    with connect(stack.url) as client:
        client.sendall(sent)
        head, _, body = read_to_the_end(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert b"x-request-id: req_" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "invalid_http",
        "invalid_request_error",
        None,
    )


def test_a_body_in_some_small_chunks_is_read(stack: FrontStack) -> None:
    with connect(stack.url) as client:
        client.sendall(CHUNKED + b"1\r\n \r\n" * 1000 + b"2\r\n{}\r\n0\r\n\r\n")
        assert b'"param":"model","code":"missing_required_parameter"' in read_until(client, b"}}")


def test_what_is_no_chunk_behind_an_answer_ends_the_connection(
    stack: FrontStack, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(stack.url) as client:
        client.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: front\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        received = b""
        while b"unknown_url" not in received:
            received += client.recv(65536)
        client.sendall(b"ZZZ\r\n")
        received += read_to_the_end(client)
    assert received.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "path", ["/health%0A", "/v1/models%0A", "/v1/models/x%0A", "/v1/chat/completions%0A"]
)
def test_a_path_with_a_line_end_is_another_path(stack: FrontStack, path: str) -> None:
    answer = stack.call("GET", path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_9_who_asks_before_sending_is_refused_without_being_told_to_go_on(
    stack: FrontStack,
) -> None:
    with connect(stack.url) as client:
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\nExpect:"
            b" 100-continue\r\nContent-Length: 999999\r\n\r\n"
        )
        received = read_until(client, b"}}")
    assert received.startswith(b"HTTP/1.1 401 ")


# --- headers that do not end
# ------------------------------------------------------------------------------------------


def drip(client: socket.socket, piece: bytes) -> bytes:
    """Send one byte of a piece after the other, again and again, until the front ends the
    connection; what it said.
    """
    client.settimeout(0.05)
    received = b""
    for byte in itertools.cycle(piece):
        try:
            client.sendall(bytes([byte]))
            chunk = client.recv(65536)
        except TimeoutError:
            continue
        except OSError:  # it hung up, and the byte came too late
            break
        if not chunk:
            break
        received += chunk
    return received


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.4)


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("before", [b"", HEALTH], ids=["of a first request", "of a next one"])
def test_headers_that_drip_are_refused_in_json(stack: FrontStack, before: bytes) -> None:
    with connect(stack.url) as client:
        if before:
            client.sendall(before)
            read_until(client, b'{"status":"ok"}')
        client.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        head, _, body = drip(client, b"x").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: req_" in head
    error = json.loads(body)["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "incomplete_headers",
        "invalid_request_error",
        None,
    )


@pytest.mark.usefixtures("_hasty")
def test_a_connection_that_asks_nothing_is_closed_without_a_word(stack: FrontStack) -> None:
    with connect(stack.url) as client:
        assert read_to_the_end(client) == b""


@pytest.mark.usefixtures("_hasty")
def test_a_body_that_drips_on_behind_its_answer_ends_the_connection(stack: FrontStack) -> None:
    with connect(stack.url) as client:
        client.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: front\r\nContent-Length: 999999\r\n\r\n"
        )
        received = drip(client, b"x")
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"unknown_url" in received


@pytest.mark.usefixtures("_hasty")
def test_a_request_that_came_in_time_may_wait_for_its_answer(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    post = build_post(stack.horde.requester_key)
    with connect(stack.url) as client:
        client.sendall(post[:20])
        client.sendall(post[20:])
        job = stack.await_job()
        time.sleep(0.6)  # longer than headers have
        stack.horde.reply(job["id"], "Blue.")
        read_until(client, b'"content":"Blue."')


# --- bodies that do not end
# -------------------------------------------------------------------------------------------


def test_a_body_that_drips_is_ended_with_the_budget(stack: FrontStack) -> None:
    config = replace(stack.config, completion_budget_seconds=1.0, max_open_requests=1)
    with run_front(config) as url, connect(url) as client:
        client.settimeout(0.1)
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: front\r\nAuthorization: Bearer"
            b" k\r\nContent-Length: 999999\r\n\r\n"
        )

        def drip() -> bytes | None:
            client.sendall(b" ")
            try:
                return client.recv(65536)
            except TimeoutError:
                return None

        answer = wait_until(drip)
        while b"}}" not in answer:  # the head may come before the body
            answer += client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"incomplete_body"' in answer
