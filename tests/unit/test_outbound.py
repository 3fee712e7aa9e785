# SPDX-License-Identifier: AGPL-3.0-or-later
"""Requests to addresses users name, against real servers on loopback; only the resolver and the
rule are replaced.
"""

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde import outbound
from horde.outbound import (
    AddressRefused,
    Network,
    OutboundFailed,
    PublicAnswer,
    fetch_text,
    is_public,
    resolve_host,
    send_public_request,
)

LOOPBACK = ip_address("127.0.0.1")
HOST = "hook.example"
# Some hosts are numbers, which are asked without being resolved.
NOBODY = Network(resolve=lambda _host, _port: [], is_allowed=lambda _address: False)


class Recorder(BaseHTTPRequestHandler):
    """Answers by its path, `/<status>`, and keeps what it was sent."""

    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.seen.append(
            {"host": self.headers["Host"], "path": self.path, "body": self.rfile.read(length)}
        )
        self.send_response(int(self.path.rpartition("/")[2]))
        self.send_header("Location", "/200")
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"12345")

    # The base class's own name.
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@contextmanager
def running_server(
    wrap: Callable[[socket.socket], socket.socket] = lambda listener: listener,
) -> Iterator[ThreadingHTTPServer]:
    """A server whose handler's `seen` the test reads."""
    handler = type("OwnRecorder", (Recorder,), {"seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.socket = wrap(server.socket)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with running_server() as started:
        yield started


def list_seen(server: ThreadingHTTPServer) -> list[dict[str, Any]]:
    return server.RequestHandlerClass.seen  # type: ignore[attr-defined]


def loopback_network(**changes: Any) -> Network:
    """A network on which every name is this machine, and that is allowed."""
    return Network(
        **{
            "resolve": lambda _host, _port: [LOOPBACK],
            "is_allowed": lambda address: address == LOOPBACK,
            **changes,
        }
    )


def ask(url: str, network: Network, **changes: Any) -> PublicAnswer:
    settings: dict[str, Any] = {"phase_seconds": 2, "total_seconds": 2, "max_bytes": 100} | changes
    return send_public_request("POST", url, content=b"hello", network=network, **settings)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "192.0.2.1",
        "::1",
        "::",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "fc00::1",
        "ff02::1",
        "2001:db8::1",
    ],
)
def test_an_address_that_is_not_of_the_internet_is_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "::ffff:1.1.1.1", "64:ff9b::101:101", "2606:4700:4700::1111"]
)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::1]", "[::ffff:127.0.0.1]"],
)
def test_a_private_address_is_refused_however_it_is_spelled(host: str) -> None:
    with pytest.raises(AddressRefused):
        ask(f"http://{host}:9/", Network(resolve=resolve_host))


def test_one_address_that_is_not_public_refuses_the_host(server: ThreadingHTTPServer) -> None:
    network = loopback_network(resolve=lambda _host, _port: [LOOPBACK, ip_address("10.0.0.1")])
    with pytest.raises(AddressRefused):
        ask(f"http://{HOST}:{server.server_port}/200", network)
    assert list_seen(server) == []


def test_the_checked_address_is_asked_under_the_name_of_the_url(
    server: ThreadingHTTPServer,
) -> None:
    lookups: list[tuple[str, int]] = []

    def resolve(host: str, port: int) -> list[Any]:
        lookups.append((host, port))
        return [LOOPBACK]

    answer = ask(f"http://{HOST}:{server.server_port}/a/200", loopback_network(resolve=resolve))
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"12345", "5")
    assert list_seen(server) == [
        {"host": f"{HOST}:{server.server_port}", "path": "/a/200", "body": b"hello"}
    ]
    assert lookups == [(HOST, server.server_port)]


def test_a_redirect_is_answered_and_not_followed(server: ThreadingHTTPServer) -> None:
    answer = ask(f"http://{HOST}:{server.server_port}/302", loopback_network())
    assert (answer.status, answer.headers["location"], len(list_seen(server))) == (302, "/200", 1)


def test_a_proxy_of_the_environment_is_not_used(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert ask(f"http://{HOST}:{server.server_port}/204", loopback_network()).status == 204


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://hook.example/",
        "file:///etc/passwd",
        "//hook.example",
        "http://",
        "http://[::1",
        "http://\0",
    ],
)
def test_an_address_of_another_form_fails(url: str) -> None:
    with pytest.raises(OutboundFailed):
        ask(url, loopback_network())


@pytest.mark.parametrize(
    "host", ["xn--a", "xn--", "xn--a.example", "xn--ls8h.xn--a", ".example", "a..b", "xn--0.com"]
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_host_that_no_library_can_decode_fails_like_any_other(scheme: str, host: str) -> None:
    with pytest.raises(OutboundFailed) as failed:
        ask(f"{scheme}://{host}/x.png", loopback_network())
    assert host not in str(failed.value)
    with pytest.raises(OutboundFailed):
        fetch_text(f"{scheme}://{host}:1/", timeout_seconds=2, max_bytes=100)


@given(
    host=st.one_of(
        st.text(max_size=20),
        st.text("xn-.a1%[]:@\\/?#😀é。", max_size=20),
        st.text(max_size=20).map("xn--".__add__),
    )
)
def test_no_host_raises_anything_but_a_failure(host: str) -> None:
    with pytest.raises(OutboundFailed):
        ask(f"http://{host}/x", NOBODY)


@pytest.mark.parametrize(
    ("host", "sent"),
    [
        ("xn--ls8h.example", "xn--ls8h.example"),
        ("xn--i-7iq.example", "xn--i-7iq.example"),
        ("💩.example", "xn--ls8h.example"),
        ("bücher.example", "xn--bcher-kva.example"),
    ],
)
def test_emoji_and_other_names_beyond_ascii_are_asked(
    server: ThreadingHTTPServer, host: str, sent: str
) -> None:
    asked: list[str] = []

    def resolve(name: str, _port: int) -> list[Any]:
        asked.append(name)
        return [LOOPBACK]

    url = f"http://{host}:{server.server_port}/200"
    assert ask(url, loopback_network(resolve=resolve)).status == 200
    assert asked == [sent]
    assert list_seen(server)[0]["host"] == f"{sent}:{server.server_port}"


def test_a_redirect_to_a_host_that_cannot_be_decoded_is_a_failure_of_the_fetch(
    server: ThreadingHTTPServer,
) -> None:
    """The library builds the next request of a redirect although it is not followed."""

    def do_get(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "http://xn--a/")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server.RequestHandlerClass.do_GET = do_get  # type: ignore[attr-defined]
    with pytest.raises(OutboundFailed):
        fetch_text(f"http://127.0.0.1:{server.server_port}/", timeout_seconds=2, max_bytes=100)


def test_an_address_of_megabytes_fails_before_its_host_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of these characters becomes eighteen, at a cost that grows faster still."""
    looked_at: list[str] = []
    monkeypatch.setattr(
        outbound, "_refuse_odd_spelling", lambda url, _network: looked_at.append(url)
    )
    with pytest.raises(OutboundFailed, match="too long"):
        ask("http://" + "\ufdfa" * 2_000_000, loopback_network())
    assert looked_at == []


def test_an_answer_over_the_bound_fails_and_an_unwanted_one_is_not_read(
    server: ThreadingHTTPServer,
) -> None:
    url = f"http://{HOST}:{server.server_port}/200"
    with pytest.raises(OutboundFailed):
        ask(url, loopback_network(), max_bytes=4)
    assert ask(url, loopback_network(), max_bytes=0).body == b""


def test_a_host_that_refuses_the_connection_fails_and_the_next_address_is_tried(
    server: ThreadingHTTPServer,
) -> None:
    other = ip_address("127.0.0.2")  # nothing listens there
    network = loopback_network(
        resolve=lambda _host, _port: [other, LOOPBACK], is_allowed=lambda _address: True
    )
    assert ask(f"http://{HOST}:{server.server_port}/200", network).status == 200
    with pytest.raises(OutboundFailed):
        ask(
            f"http://{HOST}:{server.server_port}/200",
            loopback_network(resolve=lambda _h, _p: [other], is_allowed=lambda _a: True),
        )


def test_a_host_that_trickles_its_header_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stopped = threading.Event()

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                while not stopped.wait(0.05):
                    try:
                        connection.sendall(b"a")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        started_at = time.monotonic()
        with pytest.raises(OutboundFailed):
            ask(
                f"http://{HOST}:{listener.getsockname()[1]}/",
                loopback_network(),
                phase_seconds=5,
                total_seconds=0.4,
            )
        assert time.monotonic() - started_at < 30
        stopped.set()
        thread.join()


def test_a_silent_host_is_given_up_after_the_time_of_a_phase() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started_at = time.monotonic()
        with pytest.raises(OutboundFailed):
            ask(
                f"http://{HOST}:{silent.getsockname()[1]}/",
                loopback_network(),
                phase_seconds=0.2,
                total_seconds=60,
            )
        assert time.monotonic() - started_at < 30


def test_a_resolver_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    released = threading.Event()

    def resolve(_host: str, _port: int) -> list[Any]:
        released.wait(60)
        return [LOOPBACK]

    started_at = time.monotonic()
    with pytest.raises(OutboundFailed):
        ask(f"http://{HOST}/", loopback_network(resolve=resolve), total_seconds=0.2)
    assert time.monotonic() - started_at < 30
    released.set()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of its own authority for HOST, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    key, crt, both = folder / "key.pem", folder / "crt.pem", folder / "both.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += [
        "-keyout",
        str(key),
        "-out",
        str(crt),
        "-subj",
        f"/CN={HOST}",
        "-addext",
        f"subjectAltName=DNS:{HOST}",
    ]
    subprocess.run(command, check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + crt.read_bytes())
    return both


def test_the_certificate_is_verified_against_the_name_of_the_url(certificate: Path) -> None:
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(certificate)
    names: list[str | None] = []
    server_context.sni_callback = lambda _socket, name, _context: names.append(name)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with running_server(
        lambda listener: server_context.wrap_socket(listener, server_side=True)
    ) as server:
        port = server.server_port
        assert (
            ask(
                f"https://{HOST}:{port}/200", loopback_network(get_tls_context=lambda: trusting)
            ).status
            == 200
        )
        with pytest.raises(OutboundFailed):
            ask(
                f"https://other.example:{port}/200",
                loopback_network(get_tls_context=lambda: trusting),
            )
        with pytest.raises(OutboundFailed):  # an authority nobody knows
            ask(f"https://{HOST}:{port}/200", loopback_network())
    assert names[:2] == [HOST, "other.example"]
