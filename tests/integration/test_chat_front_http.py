# SPDX-License-Identifier: AGPL-3.0-or-later
"""The front's HTTP client on real sockets, before servers that answer byte for byte what a test
says.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from horde.oai import http
from horde.oai.http import HttpAnswer, HttpClient, HttpFailure

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-One: 1\r\n\r\n{}"
CLOSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
HALF_A_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 9"
UNTIL_THE_END = b"HTTP/1.0 200 OK\r\n\r\n{}"
ENDING = (CLOSE, HALF_A_HEAD, UNTIL_THE_END)  # behind these the connection closes
GET = ("GET", "/v2/thing", [(b"accept", b"application/json")])


class Server:
    """Answers each request with the next of its bytes; None closes the connection instead."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connection_count = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Server"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/api"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection_count += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(
                    head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0
                )
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                if answer in ENDING:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()


def play(
    scene: Callable[[Server, HttpClient], Awaitable[None]],
    *answers: bytes | None,
    connections: int = 4,
) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), Server(*answers).running() as server:
            client = HttpClient(server.url, connections)
            try:
                await scene(server, client)
            finally:
                await client.close()
                await asyncio.sleep(0.01)  # for the ends of the connections

    asyncio.run(run())


def test_calls_share_a_kept_connection() -> None:
    async def scene(server: Server, client: HttpClient) -> None:
        assert await client.call(*GET) == HttpAnswer(
            200, {"content-length": "2", "x-one": "1"}, b"{}"
        )
        await client.call("POST", "/v2/other", [], b"body")
        assert server.connection_count == 1
        host = server.url.removeprefix("http://").partition("/")[0].encode()
        first, second = server.requests
        assert first.startswith(b"GET /api/v2/thing HTTP/1.1\r\n")
        assert {b"host: " + host, b"accept: application/json"} <= set(first.lower().split(b"\r\n"))
        assert second.startswith(b"POST /api/v2/other HTTP/1.1\r\n")
        assert b"content-length: 4" in second.lower().split(b"\r\n")
        assert second.endswith(b"\r\n\r\nbody")

    play(scene, PLAIN, PLAIN)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
        UNTIL_THE_END,
        b"HTTP/1.1 102 Processing\r\n\r\n" + PLAIN,
    ],
    ids=["chunked", "until_the_end", "after_an_informational_one"],
)
def test_every_framing_is_read(answer: bytes) -> None:
    async def scene(_server: Server, client: HttpClient) -> None:
        answered = await client.call(*GET)
        assert (answered.status_code, answered.content) == (200, b"{}")

    play(scene, answer)


def test_a_connection_that_the_server_gives_up_is_not_kept() -> None:
    async def scene(server: Server, client: HttpClient) -> None:
        await client.call(*GET)
        await client.call(*GET)
        assert server.connection_count == 2

    play(scene, CLOSE, PLAIN)


def test_an_old_connection_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.0)

    async def scene(server: Server, client: HttpClient) -> None:
        await client.call(*GET)
        await client.call(*GET)
        assert server.connection_count == 2

    play(scene, PLAIN, PLAIN)


def test_a_call_without_content_is_repeated_when_the_kept_connection_has_ended() -> None:
    async def scene(server: Server, client: HttpClient) -> None:
        await client.call(*GET)
        assert (await client.call(*GET)).content == b"{}"
        assert (len(server.requests), server.connection_count) == (3, 2)

    play(scene, PLAIN, None, PLAIN)


def test_a_call_with_content_is_not() -> None:
    async def scene(server: Server, client: HttpClient) -> None:
        await client.call(*GET)
        with pytest.raises(HttpFailure):
            await client.call("POST", "/v2/other", [], b"body")
        assert len(server.requests) == 2

    play(scene, PLAIN, None, PLAIN)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        HALF_A_HEAD,
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
    ],
    ids=["nothing", "half_a_head", "another_protocol", "no_length"],
)
def test_what_is_no_whole_answer_is_a_failure(answer: bytes | None) -> None:
    async def scene(_server: Server, client: HttpClient) -> None:
        with pytest.raises(HttpFailure):
            await client.call(*GET)

    play(scene, answer)


def test_an_answer_without_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1)

    async def scene(_server: Server, client: HttpClient) -> None:
        with pytest.raises(HttpFailure):
            await client.call(*GET)

    play(scene, PLAIN)


def test_an_origin_where_nobody_listens_is_a_failure() -> None:
    async def scene(_server: Server, _client: HttpClient) -> None:
        client = HttpClient("http://127.0.0.1:1", 1)
        with pytest.raises(HttpFailure):
            await client.call(*GET)
        await client.close()

    play(scene)


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\x00"])
def test_a_header_that_would_be_two_is_not_sent(value: bytes) -> None:
    async def scene(server: Server, client: HttpClient) -> None:
        with pytest.raises(HttpFailure):
            await client.call("GET", "/", [(b"apikey", value)])
        assert server.requests == []

    play(scene)


@pytest.mark.parametrize(
    ("value", "sent"), [("naïve".encode(), "naïve".encode()), (b"na\xefve", "naïve".encode())]
)
def test_a_header_beyond_ascii_stays_as_it_is(value: bytes, sent: bytes) -> None:
    async def scene(server: Server, client: HttpClient) -> None:
        await client.call("GET", "/", [(b"client-agent", value)])
        assert b"client-agent: " + sent in server.requests[0].split(b"\r\n")

    play(scene, PLAIN)


def test_a_call_that_is_cut_short_takes_its_connection_with_it() -> None:
    async def scene(server: Server, client: HttpClient) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.call(*GET)
        assert (await client.call(*GET)).content == b"{}"
        assert server.connection_count == 2

    play(scene, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{", PLAIN)


def test_calls_wait_their_turn() -> None:
    async def scene(server: Server, client: HttpClient) -> None:
        answers: Sequence[HttpAnswer] = await asyncio.gather(
            *(client.call(*GET) for _ in range(10))
        )
        assert [answer.content for answer in answers] == [b"{}"] * 10
        assert server.connection_count == 2

    play(scene, *[PLAIN] * 10, connections=2)
