# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a route reads from the request at hand: its body within bounds, its key, its address and its
agent.
"""

from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import cast

from flask import current_app, g, request
from werkzeug.exceptions import UnsupportedMediaType

from horde.config import Config
from horde.exceptions import BadRequest, Forbidden, PayloadInvalid, RequestTooLarge
from horde.json_body import parse_json_body
from horde.return_codes import ReturnCode
from horde.settings import Network
from horde.text_work import POPPING_ADDRESS_HEADER, WAITING_POPS_HEADER

DEFAULT_BODY_BYTES = 10 * 1024 * 1024  # every native route but the chat submit
DEFAULT_CLIENT_AGENT = "unknown:0:unknown"
_POPPING_ADDRESS = f"HTTP_{POPPING_ADDRESS_HEADER.upper().replace('-', '_')}"
_LONGEST_ADDRESS = 64  # of what is an address at all
MISSING_HEADER = "Missing required parameter in the HTTP headers"

CONFIG_EXTENSION = "horde.config"
RESOLVER_EXTENSION = "horde.resolve_client_address"

type ResolveClientAddress = Callable[[str, str | None, str | None], str]
"""(peer address, Proxied-For, passkey) to the address of the client."""


def get_config() -> Config:
    """The settings of the application that serves this request."""
    return cast(Config, current_app.extensions[CONFIG_EXTENSION])


def read_json_body(
    limit_bytes: int = DEFAULT_BODY_BYTES,
    *,
    replace_unstorable_characters: bool = False,
    keeps_number_forms: bool = False,
) -> object:
    """The JSON value in the body, read no further than one byte past `limit_bytes`.

    Raises:
        UnsupportedMediaType: a type that is not JSON, or a content encoding; the body stays unread.
        RequestTooLarge: declared or found longer than the limit.
        BadRequest: no strict JSON, see `horde.json_body`.
    """
    _check_media_type()
    return parse_json_body(
        _read_body(limit_bytes),
        replace_unstorable_characters=replace_unstorable_characters,
        keeps_number_forms=keeps_number_forms,
    )


def read_json_object(
    limit_bytes: int = DEFAULT_BODY_BYTES, *, replace_unstorable_characters: bool = False
) -> dict[str, object]:
    """As `read_json_body`, for a route whose body is an object; raises PayloadInvalid when it is
    anything else.
    """
    body = read_json_body(limit_bytes, replace_unstorable_characters=replace_unstorable_characters)
    if not isinstance(body, dict):
        raise PayloadInvalid({"": "The body has to be a JSON object"})
    return body


def find_api_key() -> str | None:
    """The `apikey` header; None when it is missing, which is not the same as anonymous."""
    return request.environ.get("HTTP_APIKEY")


def require_api_key() -> str:
    """The `apikey` header; raises PayloadInvalid with `errors.apikey` when it is missing."""
    api_key = find_api_key()
    if api_key is None:
        raise PayloadInvalid({"apikey": MISSING_HEADER})
    return api_key


def get_client_agent() -> str:
    """The `Client-Agent` header as sent, in any form."""
    return request.environ.get("HTTP_CLIENT_AGENT") or DEFAULT_CLIENT_AGENT


def get_peer_address() -> str:
    """The address the request came from: the socket's peer, or what a trusted proxy forwarded.

    Pops are judged by it: a worker's address is never taken from `Proxied-For`.
    """
    if "peer_address" not in g:
        environ = request.environ  # the headers of werkzeug spell their names anew each time
        g.peer_address = resolve_peer_address(
            environ.get("REMOTE_ADDR") or "",
            environ.get("HTTP_X_FORWARDED_FOR", ""),
            get_config().trusted_proxies,
        )
    return cast(str, g.peer_address)


def get_client_address() -> str:
    """The address limits and countermeasures apply to: the peer, or `Proxied-For` under a known
    passkey.
    """
    if "client_address" not in g:
        resolve = cast(ResolveClientAddress, current_app.extensions[RESOLVER_EXTENSION])
        proxied_for, passkey = (
            request.environ.get("HTTP_PROXIED_FOR"),
            request.environ.get("HTTP_PROXY_AUTHORIZATION"),
        )
        g.client_address = resolve(get_peer_address(), proxied_for, passkey)
    return cast(str, g.client_address)


def is_passed_on_by_front() -> bool:
    """Whether a front passes a worker's pop on. Raises Forbidden when its word for the worker's
    address is not believed, or every worker behind it would have the address of the front.
    """
    address = request.environ.get(_POPPING_ADDRESS)
    if address is None:
        return False
    if str(_parse_address(address)) != get_peer_address():
        raise Forbidden(
            "This front is not trusted with the addresses of workers. Pop at the API itself, or ask"
            " the operator to name the front in HORDE_TRUSTED_PROXIES."
        )
    return True


def build_waiting_headers(front_url: str) -> dict[str, str]:
    """Where a worker that would wait for a job may do so, as a header of its pop's answer: the API
    itself answers at once. `front_url` is empty where no front is known.
    """
    if not front_url or "wait" not in request.headers.get("Prefer", "").lower():
        return {}
    return {WAITING_POPS_HEADER: f"{front_url.rstrip('/')}/api"}


def is_proxied() -> bool:
    """Whether a service asks on behalf of somebody else."""
    return get_client_address() != get_peer_address()


def resolve_peer_address(
    socket_address: str, forwarded_for: str, trusted_proxies: tuple[Network, ...]
) -> str:
    """The nearest address that is no trusted proxy, walking `X-Forwarded-For` from its end.

    Entries left of the first untrusted one were written by that party and are never believed.
    """
    address = _parse_address(socket_address)
    if address is None:
        return socket_address
    for entry in reversed(forwarded_for.split(",") if forwarded_for else []):
        if not _is_in(address, trusted_proxies):
            break
        forwarded = _parse_address(entry.strip())
        if forwarded is None:
            break
        address = forwarded
    return str(address)


def check_storable_request() -> None:
    """Refuse a NUL in the path, the query or a header before anything of them reaches the database.

    Surrogates cannot arrive this way: paths and queries are decoded with replacement, headers as
    Latin-1.
    """
    environ = request.environ
    if "\x00" in environ.get("PATH_INFO", "") or "%00" in environ.get("QUERY_STRING", ""):
        raise _nul_found("address")
    # What else the server put there has none: all texts at once are cheaper than to choose.
    if "\x00" in "".join([value for value in environ.values() if type(value) is str]):
        raise _nul_found("headers")


def _nul_found(place: str) -> BadRequest:
    return BadRequest(
        f"The {place} of the request holds a NUL character.", ReturnCode.NUL_BYTE_IN_PAYLOAD
    )


def _check_media_type() -> None:
    encoding = request.environ.get("HTTP_CONTENT_ENCODING", "").strip().lower()
    if encoding not in {"", "identity"}:
        raise UnsupportedMediaType("The body has to be sent without a Content-Encoding.")
    if request.environ.get("CONTENT_TYPE") == "application/json":
        return
    if request.mimetype != "application/json" and not request.mimetype.endswith("+json"):
        raise UnsupportedMediaType("The Content-Type has to be application/json.")


def _read_body(limit_bytes: int) -> bytes:
    too_large = RequestTooLarge(f"The body is larger than {limit_bytes} bytes.")
    if (request.content_length or 0) > limit_bytes:
        raise too_large
    # A chunked body declares no length, and werkzeug cuts it off silently at its own limit: one
    # byte more tells the two apart.
    request.max_content_length = limit_bytes + 1
    body = request.get_data(cache=False)
    if len(body) > limit_bytes:
        raise too_large
    return body


def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    return _parse_short_address(text) if len(text) <= _LONGEST_ADDRESS else None


@lru_cache(maxsize=4096)
def _parse_short_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_in(address: IPv4Address | IPv6Address, networks: tuple[Network, ...]) -> bool:
    return any(address in network for network in networks)
