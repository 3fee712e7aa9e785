# SPDX-License-Identifier: AGPL-3.0-or-later
"""Requests to addresses that an operator or a user gave us. No proxy of the environment is used,
and no error of a client leaves.

`fetch_text` trusts the operator. `send_public_request` trusts nobody: whoever names the address may
aim it at this network.
"""

import socket
import ssl
import threading
import time
import unicodedata
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import unquote, urlsplit

import httpcore
import httpx

# As many as httpx reads; megabytes of a host cost minutes and gigabytes to normalise.
MAX_URL_CHARACTERS = 65_536
# Names looked up at a time; a name server that never answers holds a thread for a minute.
MAX_RESOLVING_COUNT = 32
MAX_LABEL_BYTES = 63  # of one part of a name
_NAT64 = IPv6Network("64:ff9b::/96")
# Special-purpose networks that the standard library calls global, or only newer releases of it do
# not.
_SPECIAL_NETWORKS = (
    IPv4Network("192.0.0.0/24"),  # protocol assignments
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
    IPv6Network("64:ff9b:1::/48"),  # NAT64 with a private prefix
    IPv6Network("2001::/23"),  # protocol assignments, ORCHID among them
    IPv6Network("3fff::/20"),  # documentation
    IPv6Network("5f00::/16"),  # segment routing
)

type Address = IPv4Address | IPv6Address


class OutboundFailed(Exception):
    """No answer: no connection, too slow, too long, or an address that cannot be asked."""


class AnswerTooLong(OutboundFailed):
    """The body is longer than the caller takes; it was not read to its end."""


class AddressRefused(OutboundFailed):
    """The host has an address that is not of the public internet; nothing was sent."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service said."""

    status: int
    text: str


@dataclass(frozen=True, slots=True)
class PublicAnswer:
    """What a host said: header names in lower case, of repeated ones the last; a redirect is an
    answer like any other.
    """

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


@contextmanager
def _translating_errors() -> Iterator[None]:
    """Make an OutboundFailed of whatever a library raises; its class is all that is told.

    A host that cannot be decoded is a UnicodeError, a name no certificate can have a ValueError,
    and where httpx looks at a redirect either may come out of it.
    """
    try:
        yield
    except OutboundFailed:
        raise
    # The address is a stranger's, and the libraries' errors are many.
    except Exception as error:  # noqa: BLE001
        raise OutboundFailed(type(error).__name__) from None


@_translating_errors()
def fetch_text(url: str, *, timeout_seconds: float, max_bytes: int) -> Answer:
    """GET a short text; redirects are an answer like any other.

    The time bounds each phase, and the body as a whole, so a server that trickles cannot hold the
    caller. Call it with no transaction open. Raises OutboundFailed.
    """
    deadline = time.monotonic() + timeout_seconds
    body = bytearray()
    with (
        httpx.Client(timeout=timeout_seconds, trust_env=False) as client,
        client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
    ):
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > max_bytes or time.monotonic() > deadline:
                raise OutboundFailed("The answer is too long or too slow.")
        return Answer(response.status_code, body.decode("utf-8", "replace"))


def post_json(url: str, body: Mapping[str, object], *, timeout_seconds: float) -> int:
    """POST a JSON object to an address the operator set; the status of the answer, whose body is
    left unread. Raises OutboundFailed.
    """
    try:
        with (
            httpx.Client(timeout=timeout_seconds, trust_env=False) as client,
            client.stream("POST", url, json=dict(body)) as response,
        ):
            return response.status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OutboundFailed(type(error).__name__) from error


def is_public(address: Address) -> bool:
    """Whether an address belongs to the public internet; an IPv4 address in IPv6 clothes is judged
    as IPv4.
    """
    if isinstance(address, IPv6Address):
        if address.sixtofour or address.teredo or address.is_site_local:
            # Transition leftovers that nobody serves from, with addresses of any kind inside.
            return False
        inner = IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address.ipv4_mapped
        if inner is not None:
            return is_public(inner)
    if any(
        address in network for network in _SPECIAL_NETWORKS if network.version == address.version
    ):
        return False
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_unspecified
    )


def resolve_host(host: str, port: int) -> Sequence[Address]:
    """Every address of a host, as the system's resolver has it; odd spellings of numbers are
    resolved too. Raises OSError.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(entry[4][0]) for entry in found))


@cache
def _get_tls_context() -> ssl.SSLContext:
    return httpcore.default_ssl_context()


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What requests run on. The default is the internet; tests give their own, since theirs is all
    loopback.
    """

    resolve: Callable[[str, int], Sequence[Address]] = resolve_host
    is_allowed: Callable[[Address], bool] = is_public
    get_tls_context: Callable[[], ssl.SSLContext] = _get_tls_context


INTERNET = Network()


@_translating_errors()
def send_public_request(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    content: bytes | None = None,
    phase_seconds: float,
    total_seconds: float,
    max_bytes: int,
    wanted_statuses: Container[int] | None = None,
    network: Network = INTERNET,
) -> PublicAnswer:
    """Ask a host that a user named, for one http or https URL and without following redirects.

    The host is resolved once. Every address has to be public, and the connection goes to one of
    those that were checked, so a name that answers differently the second time leads nowhere. The
    URL's host is the Host header and the name the certificate is verified against. `phase_seconds`
    bounds the connecting and each read, `total_seconds` everything. With `max_bytes` 0 the body is
    left unread, as is one of a status outside `wanted_statuses`. The URL's user name and password
    are not sent. Call it with no transaction open.

    Raises AddressRefused for an address that is not public, AnswerTooLong, OutboundFailed for every
    other reason.
    """
    deadline = time.monotonic() + total_seconds
    if len(url) > MAX_URL_CHARACTERS:
        raise OutboundFailed("The address is too long.")
    _refuse_odd_spelling(url, network)
    target = _parse_url(url)
    addresses = _require_public_addresses(target, network, deadline)
    all_headers = {
        "Host": target.netloc.decode("ascii"),
        "Accept-Encoding": "identity",
        **(headers or {}),
    }
    backend = _CheckedBackend(addresses, phase_seconds, deadline)
    with (
        httpcore.ConnectionPool(
            ssl_context=network.get_tls_context(), network_backend=backend
        ) as pool,
        pool.stream(
            method, _build_target(target), headers=list(all_headers.items()), content=content
        ) as response,
    ):
        is_wanted = max_bytes and (wanted_statuses is None or response.status in wanted_statuses)
        body = _read_body(response, max_bytes) if is_wanted else b""
        return PublicAnswer(response.status, _decode_headers(response.headers), body)


def _parse_url(text: str) -> httpx.URL:
    """An absolute http or https address. Raises OutboundFailed, and what httpx does.

    The host is looked at as it is sent: not every one that is served can be decoded.
    """
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL(_encode_host(text))
    if url.scheme not in {"http", "https"} or not url.raw_host:
        raise OutboundFailed("The address is not an http or https URL.")
    if not all(map(_is_label, url.raw_host.rstrip(b".").split(b"."))):
        raise OutboundFailed("The host has a label that no name can have.")
    return url


def _is_label(label: bytes) -> bool:
    """Whether a name may have a part like this: not empty, and readable if it is encoded.

    More can be read than the newest rules for names allow, emoji for one, and it is served.
    """
    if not 1 <= len(label) <= MAX_LABEL_BYTES:
        return False
    if not label.lower().startswith(b"xn--"):
        return True
    try:
        decoded = label[4:].decode("punycode")
    except ValueError:
        return False
    return decoded.isprintable() and not decoded.isascii()


def _encode_host(text: str) -> str:
    """The address with its host in ASCII by the older rules for names, which know emoji. Raises
    ValueError.
    """
    parts = urlsplit(text)
    user, at, place = parts.netloc.rpartition("@")
    host, colon, port = place.partition(":")
    return parts._replace(netloc=f"{user}{at}{host.encode('idna').decode()}{colon}{port}").geturl()


def _refuse_odd_spelling(text: str, network: Network) -> None:
    """Refuse a host that any reader of URLs takes for an address that is not public, also one that
    httpx takes for none.
    """
    try:
        host = unquote(urlsplit(text).hostname or "")
    except ValueError:
        return
    host = unicodedata.normalize("NFKC", host).replace("\u3002", ".")
    address: Address | None = _read_as_number(host)
    if address is None:
        try:
            address = ip_address(host)
        except ValueError:
            return
    if not network.is_allowed(address):
        raise AddressRefused("The host is an address that is not public.")


def _read_as_number(host: str) -> IPv4Address | None:
    """The address a host spells in any of C's ways, a dot at its end included; None for a name."""
    try:
        return IPv4Address(socket.inet_aton(host.rstrip(".")))
    except (OSError, ValueError):
        return None


def _build_target(url: httpx.URL) -> httpcore.URL:
    return httpcore.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )


def _require_public_addresses(
    url: httpx.URL, network: Network, deadline: float
) -> Sequence[Address]:
    port = url.port or (443 if url.scheme == "https" else 80)
    host = url.raw_host.decode("ascii")
    if host.rstrip(".").rpartition(".")[2] == "localhost":  # whatever a name server makes of it
        raise AddressRefused("The host is this machine.")
    number = _read_as_number(host)
    addresses = (
        _resolve_until(lambda: network.resolve(host, port), deadline)
        if number is None
        else [number]
    )
    if not addresses:
        raise OutboundFailed("The host has no address.")
    if not all(network.is_allowed(address) for address in addresses):
        raise AddressRefused("The host has an address that is not public.")
    return addresses


_resolving = threading.BoundedSemaphore(MAX_RESOLVING_COUNT)


def _resolve_until(resolve: Callable[[], Sequence[Address]], deadline: float) -> Sequence[Address]:
    """The resolver's answer; given up at the deadline, since the resolver itself has no time
    limit.
    """
    answers: list[Sequence[Address]] = []

    def look_up() -> None:
        try:
            answers.append(resolve())
        # A label that no name server can be asked for is a ValueError.
        except Exception:  # noqa: BLE001
            answers.append(())
        finally:
            _resolving.release()

    if not _resolving.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise OutboundFailed("Too many names are being looked up.")
    thread = threading.Thread(target=look_up, name="horde-resolve", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if not answers:
        raise OutboundFailed("The host's name was not found in time.")
    return answers[0]


def _read_body(response: httpcore.Response, max_bytes: int) -> bytes:
    declared = _decode_headers(response.headers).get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise AnswerTooLong("The answer is too long.")
    body = bytearray()
    for chunk in response.iter_stream():
        body += chunk
        if len(body) > max_bytes:
            raise AnswerTooLong("The answer is too long.")
    return bytes(body)


def _decode_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


class _CheckedBackend(httpcore.NetworkBackend):
    """Connects to the checked addresses, whatever host it is asked for, and watches the clock at
    every step.
    """

    def __init__(self, addresses: Sequence[Address], phase_seconds: float, deadline: float) -> None:
        self._addresses, self._phase_seconds, self._deadline = addresses, phase_seconds, deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """A connection to the first checked address that takes one; raises OSError."""
        failure = OSError("no address")
        for address in self._addresses:
            try:
                connection = socket.create_connection(
                    (str(address), port), _compute_timeout(self._phase_seconds, self._deadline)
                )
            except OSError as error:
                failure = error
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _BoundedStream(connection, self._phase_seconds, self._deadline)
        raise failure


class _BoundedStream(httpcore.NetworkStream):
    """A socket whose every step ends by the deadline: httpcore alone would grant each byte a time
    of its own.
    """

    def __init__(self, connection: socket.socket, phase_seconds: float, deadline: float) -> None:
        self._connection, self._phase_seconds, self._deadline = connection, phase_seconds, deadline

    def _set_timeout(self) -> None:
        self._connection.settimeout(_compute_timeout(self._phase_seconds, self._deadline))

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """The next bytes; empty at the end. Raises OSError."""
        self._set_timeout()
        return self._connection.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all. Raises OSError."""
        rest = memoryview(buffer)
        while rest:
            self._set_timeout()
            rest = rest[self._connection.send(rest) :]

    def close(self) -> None:
        """Let go of the socket."""
        self._connection.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """The same connection under TLS, verified against the name. Raises OSError."""
        self._set_timeout()
        try:
            secure = ssl_context.wrap_socket(self._connection, server_hostname=server_hostname)
        except OSError:
            self.close()
            raise
        return _BoundedStream(secure, self._phase_seconds, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        """Nothing: only HTTP/1.1 is offered, so there is no protocol to tell."""
        return None


def _compute_timeout(phase_seconds: float, deadline: float) -> float:
    """Seconds the next step may take; raises TimeoutError when there are none left."""
    left = min(phase_seconds, deadline - time.monotonic())
    if left <= 0:
        raise TimeoutError
    return left
