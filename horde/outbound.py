# SPDX-License-Identifier: AGPL-3.0-or-later
"""Requests to addresses that an operator gave us. No proxy of the environment is used, and no error of the client leaves."""

import time
from dataclasses import dataclass

import httpx


class OutboundFailed(Exception):
    """No answer: no connection, too slow, too long, or an address that cannot be asked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service said."""

    status: int
    text: str


def fetch_text(url: str, *, timeout_seconds: float, max_bytes: int) -> Answer:
    """GET a short text; redirects are an answer like any other.

    The time bounds each phase, and the body as a whole, so a server that trickles cannot hold the caller. Call it with no
    transaction open. Raises OutboundFailed.
    """
    deadline = time.monotonic() + timeout_seconds
    body = bytearray()
    try:
        with (
            httpx.Client(timeout=timeout_seconds, trust_env=False) as client,
            client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
        ):
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > max_bytes or time.monotonic() > deadline:
                    raise OutboundFailed("The answer is too long or too slow.")
            return Answer(response.status_code, body.decode("utf-8", "replace"))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise OutboundFailed(type(error).__name__) from error
