# SPDX-License-Identifier: AGPL-3.0-or-later
"""Addresses and keys as operators type them."""

from ipaddress import ip_address

import httpx


def parse_address(text: str, option: str, *endings: str) -> str:
    """An http address without a slash at its end, and without these endings, which name a route
    below it. One without a scheme is http.

    Raises ``ValueError`` with a sentence that names the option and not the address, which may hold
    a password.
    """
    address = text.strip()
    if "://" not in address:
        address = f"http://{address}"
    try:
        url = httpx.URL(address)
    except (httpx.InvalidURL, UnicodeError, ValueError):
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.raw_host or url.query or url.fragment:
        raise ValueError(f"{option} is an address such as http://127.0.0.1:8080.")
    address = address.rstrip("/")
    for ending in endings:
        address = address.removesuffix(ending)
    return address


def hide_password(address: str) -> str:
    """The address for the log."""
    return str(httpx.URL(address).copy_with(userinfo=b""))


def parse_key(text: str | None, option: str) -> str | None:
    """A key without the blanks around it; None for an empty one.

    Raises ``ValueError`` with a sentence that does not show the key.
    """
    key = (text or "").strip()
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(f"{option} holds a blank or a character that no key has.")
    return key or None


def trusts_environment(address: str) -> bool:
    """Whether a proxy of the environment is for this address: never for this machine itself."""
    host = httpx.URL(address).raw_host.decode("ascii")
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host != "localhost" and not host.endswith(".localhost")
