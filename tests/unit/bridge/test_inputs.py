# SPDX-License-Identifier: AGPL-3.0-or-later
import base64
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from horde.bridge import inputs
from horde.bridge.inputs import InputFetcher, InputUnavailable, leave_out_images
from horde.chat_contract import MAX_CHAT_BODY_BYTES, MAX_CHAT_IMAGE_TOTAL_BYTES

JPEG = b"\xff\xd8\xff\xe0 and so on"
PNG = b"\x89PNG\r\n\x1a\n and so on"
URL = "https://store.test/images/a_chat_0.jpg?signature=secret"
MESSAGES = [{"role": "user", "content": "Hello."}]

Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "RETRY_SECONDS", (0.0, 0.0))


def raw(content: bytes, status: int = 200, **headers: str) -> httpx.Response:
    """An answer whose body goes over the wire as it is, whatever its headers say."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=headers, stream=Pieces([content]))


class Pieces(httpx.SyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.taken = 0

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            self.taken += 1
            yield piece


def fetcher(*answers: httpx.Response | Exception) -> tuple[InputFetcher, list[httpx.Request]]:
    """A fetcher whose requests get these answers in turn, and what it asked."""
    waiting, asked = list(answers), []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        answer = waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return InputFetcher(httpx.MockTransport(handle)), asked


def image_message(*urls: str, **more: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url, **more}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]


def refuse(fetch: Callable[[], object]) -> str:
    with pytest.raises(InputUnavailable) as caught:
        fetch()
    assert "secret" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("image", "media_type"), [(JPEG, "image/jpeg"), (PNG, "image/png")])
def test_an_image_is_put_into_its_message(image: bytes, media_type: str) -> None:
    connection, asked = fetcher(raw(image))
    messages = image_message(URL, detail="low")
    (message,) = connection.inline_images(messages)
    expected = f"data:{media_type};base64,{base64.b64encode(image).decode()}"
    assert message["content"][1] == {
        "type": "image_url",
        "image_url": {"url": expected, "detail": "low"},
    }
    assert message["content"][0] == {"type": "text", "text": "What is it?"}
    assert str(asked[0].url) == URL
    assert messages == image_message(URL, detail="low")


def test_the_store_learns_nothing_of_the_worker() -> None:
    connection, (asked) = fetcher(raw(JPEG))
    connection.inline_images(image_message(URL))
    assert not {"apikey", "authorization", "cookie"} & set(asked[0].headers)


def test_only_what_is_unpacked_here_is_asked_for() -> None:
    connection, asked = fetcher(raw(JPEG))
    connection.inline_images(image_message(URL))
    assert asked[0].headers["accept-encoding"] == "gzip"


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(JPEG)))
            self.end_headers()
            self.wfile.write(JPEG)

        def log_message(self, *_: object) -> None:
            pass

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Store) as store:
        store.timeout = 10  # of a store that nobody asks
        thread = threading.Thread(target=store.handle_request, daemon=True)
        thread.start()
        fetching = InputFetcher()
        try:
            (message,) = fetching.inline_images(
                image_message(f"http://127.0.0.1:{store.server_port}/a.jpg")
            )
        finally:
            fetching.close()
            thread.join()
    assert message["content"][1]["image_url"]["url"].endswith(base64.b64encode(JPEG).decode())


def test_the_bounds_are_those_of_the_horde() -> None:
    """The bridge is installed without the horde's own constants."""
    assert inputs.MAX_IMAGES_BYTES == MAX_CHAT_IMAGE_TOTAL_BYTES
    assert inputs.MAX_MESSAGES_BYTES == MAX_CHAT_BODY_BYTES


def test_messages_without_images_and_images_that_came_inside_are_not_fetched() -> None:
    connection, asked = fetcher()
    inside = image_message("data:image/jpeg;base64,/9j/")
    assert connection.inline_images([*MESSAGES, *inside]) == [*MESSAGES, *inside]
    assert asked == []


def test_all_images_of_a_job_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_IMAGES_BYTES", 2 * len(JPEG))
    connection, _ = fetcher(raw(JPEG), raw(JPEG))
    connection.inline_images(image_message(URL, URL))
    connection, _ = fetcher(raw(JPEG), raw(JPEG), raw(JPEG))
    assert "more than 0 bytes" in refuse(
        lambda: connection.inline_images(image_message(URL, URL, URL))
    )


def test_a_body_over_the_bound_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_IMAGES_BYTES", 100)
    endless = Pieces([b"x" * 60] * 1000)
    connection, _ = fetcher(httpx.Response(200, stream=endless))
    refuse(lambda: connection.inline_images(image_message(URL)))
    assert endless.taken == 2


@pytest.mark.parametrize(
    "answer",
    [
        raw(b"<Error>AccessDenied</Error>", 403),
        raw(b"", 404),
        raw(b"no image at all"),
        raw(b"RIFF....WEBPVP8 "),
        raw(JPEG, Content_Encoding="br"),
        raw(b"", 302, Location="ftp://store.test/a.jpg"),
        raw(b"", 302, Location="http://store.test/a.jpg"),
        raw(b"", 302, Location="http://["),
    ],
)
def test_what_is_no_image_is_refused_at_once(answer: httpx.Response) -> None:
    connection, asked = fetcher(answer)
    refuse(lambda: connection.inline_images(image_message(URL)))
    assert len(asked) == 1


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "", "http://", "data:text/plain,x", None, 7, "//store/a"]
)
def test_only_http_addresses_are_fetched(url: Any) -> None:
    connection, asked = fetcher()
    refuse(lambda: connection.inline_images(image_message(url)))
    refuse(lambda: connection.fetch_messages(url))
    assert asked == []


@pytest.mark.parametrize(
    "trouble", [httpx.ConnectError("no"), httpx.ReadTimeout("slow"), raw(b"", 503), raw(b"", 429)]
)
def test_a_store_in_trouble_is_asked_again(trouble: Any) -> None:
    connection, asked = fetcher(trouble, raw(JPEG))
    connection.inline_images(image_message(URL))
    assert len(asked) == 2


def test_a_store_that_stays_away_is_given_up() -> None:
    connection, asked = fetcher(*[httpx.ConnectError(URL)] * 3)
    assert refuse(lambda: connection.inline_images(image_message(URL))) == "ConnectError"
    assert len(asked) == 3


def test_redirects_are_followed_a_few_times() -> None:
    hops = [raw(b"", 307, Location=f"/hop-{n}") for n in range(4)]
    connection, asked = fetcher(*hops[:3], raw(JPEG))
    connection.inline_images(image_message(URL))
    assert str(asked[-1].url) == "https://store.test/hop-2"
    connection, asked = fetcher(*hops)
    assert refuse(lambda: connection.inline_images(image_message(URL))) == "too many redirects"


def test_a_store_that_trickles_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 1000, 10))
    monkeypatch.setattr(inputs.time, "monotonic", lambda: next(times))
    trickle = Pieces([b"x"] * 1000)
    connection, _ = fetcher(httpx.Response(200, stream=trickle))
    assert refuse(lambda: connection.inline_images(image_message(URL))) == "too slow"
    assert trickle.taken < 10


def test_a_store_whose_header_trickles_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "FETCH_SECONDS", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))

    def trickle() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            for _ in range(400):
                connection.sendall(b"a: b\r\n")
                time.sleep(0.02)
            connection.sendall(b"Content-Length: 2\r\n\r\n[]")

    store = threading.Thread(target=trickle)
    store.start()
    fetching = InputFetcher()
    try:
        with pytest.raises(InputUnavailable):
            fetching.fetch_messages(f"http://127.0.0.1:{listener.getsockname()[1]}/")
    finally:
        store.join()
        listener.close()
        fetching.close()


def gzipped(content: bytes) -> httpx.Response:
    return raw(content, Content_Encoding="gzip", Content_Type="application/json")


@pytest.mark.parametrize("compresses", [True, False])
def test_messages_are_read_as_the_header_says(compresses: bool) -> None:
    body = json.dumps(MESSAGES).encode()
    connection, _ = fetcher(gzipped(gzip.compress(body)) if compresses else raw(body))
    assert connection.fetch_messages(URL) == MESSAGES


@pytest.mark.parametrize("extra_bytes", [0, 1])
def test_the_bound_is_of_the_decompressed_messages(
    extra_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps(MESSAGES).encode()
    monkeypatch.setattr(inputs, "MAX_MESSAGES_BYTES", len(body) - extra_bytes)
    connection, _ = fetcher(gzipped(gzip.compress(body)))
    if extra_bytes:
        assert "more than" in refuse(lambda: connection.fetch_messages(URL))
    else:
        assert connection.fetch_messages(URL) == MESSAGES


def test_a_bomb_does_not_unfold() -> None:
    bomb = gzip.compress(b"[" + b" " * (64 * 1024 * 1024))
    connection, _ = fetcher(gzipped(bomb))
    assert "more than" in refuse(lambda: connection.fetch_messages(URL))


@pytest.mark.parametrize(
    "answer",
    [
        raw(b"{}"),
        raw(b'["x"]'),
        raw(b"[{]"),
        raw(b"[" * 100_000),
        raw(b"\xff\xfe[]"),
        gzipped(b"no gzip"),
        gzipped(gzip.compress(b"[]")[:-4]),
        gzipped(gzip.compress(b"[]") + b"more"),
        raw(gzip.compress(b"[]")),
        raw(b"", 403),
    ],
)
def test_what_are_no_messages_is_refused(answer: httpx.Response) -> None:
    connection, _ = fetcher(answer)
    refuse(lambda: connection.fetch_messages(URL))


def test_images_are_left_out_of_what_is_counted() -> None:
    assert leave_out_images([*MESSAGES, *image_message(URL)]) == [
        *MESSAGES,
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}]},
    ]


@pytest.mark.parametrize("url", ["http://xn--a/a.jpg", "https://xn--/a.jpg", "http://a..b:1/x"])
def test_a_host_that_cannot_be_decoded_is_an_input_that_cannot_be_had(url: str) -> None:
    fetching = InputFetcher()
    with pytest.raises(InputUnavailable) as refused:
        fetching.fetch_messages(url)
    fetching.close()
    assert "xn--" not in str(refused.value)


def test_a_redirect_to_such_a_host_is_one_too() -> None:
    fetching, asked = fetcher(httpx.Response(302, headers={"Location": "https://xn--a/"}))
    with pytest.raises(InputUnavailable):
        fetching.fetch_messages(URL)
    assert len(asked) == 1
