# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a chat job keeps elsewhere: its images, or all of its messages, behind signed URLs of the
horde's object store.

A store may be slow, away or broken, and a horde may name any address. So each fetch is bounded in
bytes and time, follows few redirects, sends nothing of this worker's, and uses no proxy of the
environment. URLs are secrets and never logged.
"""

import base64
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import httpx

from horde.bridge.connections import WITHOUT_KEEP_ALIVE, ending_at
from horde.json_text import JsonObject

MAX_IMAGES_BYTES = 25 * 1024 * 1024  # the contract's bound of a request's stored images
# The contract's bound of a request, which the decoded array stays under.
MAX_MESSAGES_BYTES = 36 * 1024 * 1024
MAX_REDIRECTS = 3
# For all inputs of a job, with retries: most of the lease belongs to the backend.
FETCH_SECONDS = 45.0
PHASE_SECONDS = 10.0  # to connect, and between two reads
RETRY_SECONDS = (0.5, 2.0)

_SIGNATURES = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG\r\n\x1a\n": "image/png"}


class InputUnavailable(Exception):
    """An input cannot be had. The sentence is for the worker's log and names no URL."""


class _Unavailable(Exception):
    """A fetch failed in a way that another try may not."""


class InputFetcher:
    """Fetches the inputs of jobs; safe for several threads. Every call raises
    ``InputUnavailable``.
    """

    def __init__(self, transport: httpx.BaseTransport | None = None) -> None:
        self._client = httpx.Client(
            transport=transport,
            trust_env=False,
            timeout=PHASE_SECONDS,
            limits=WITHOUT_KEEP_ALIVE,
        )

    def fetch_messages(self, url: object) -> list[JsonObject]:
        """The messages array behind a job's ``messages_url``."""
        body = self._fetch(_require_url(url), MAX_MESSAGES_BYTES, time.monotonic() + FETCH_SECONDS)
        try:
            messages = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputUnavailable("the messages are not JSON") from error
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) for message in messages
        ):
            raise InputUnavailable("the messages are no array of objects")
        return messages

    def inline_images(self, messages: Sequence[Mapping[str, object]]) -> list[JsonObject]:
        """The messages with each image as a data URL, which every backend reads; what is not an
        image is kept as it is.
        """
        deadline = time.monotonic() + FETCH_SECONDS
        room = MAX_IMAGES_BYTES
        inlined = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                parts = []
                for part in content:
                    if is_image_part(part) and not _is_data_url(part["image_url"].get("url")):
                        image = self._fetch(
                            _require_url(part["image_url"].get("url")), room, deadline
                        )
                        room -= len(image)
                        part = {
                            **part,
                            "image_url": {**part["image_url"], "url": _build_data_url(image)},
                        }
                    parts.append(part)
                message = {**message, "content": parts}
            inlined.append(dict(message))
        return inlined

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _fetch(self, url: httpx.URL, max_bytes: int, deadline: float) -> bytes:
        """The decoded body of a URL, tried again where that may help."""
        failures = 0
        while True:
            try:
                return self._follow(url, max_bytes, deadline)
            except _Unavailable as error:
                if (
                    failures == len(RETRY_SECONDS)
                    or time.monotonic() + RETRY_SECONDS[failures] >= deadline
                ):
                    raise InputUnavailable(str(error)) from error
            time.sleep(RETRY_SECONDS[failures])
            failures += 1

    def _follow(self, url: httpx.URL, max_bytes: int, deadline: float) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            try:
                # Only gzip is decoded here. A header of one's own is no part of what a presigned
                # URL signs.
                headers = {"Accept-Encoding": "gzip"}
                with (
                    ending_at(deadline) as trace,
                    self._client.stream(
                        "GET", url, headers=headers, extensions={"trace": trace}
                    ) as response,
                ):
                    if not response.is_redirect:
                        return _read_body(response, max_bytes, deadline)
                    url = _require_next_url(url, response)
            except httpx.HTTPError as error:
                raise _Unavailable(type(error).__name__) from error
            # The library looks at where a redirect leads, and cannot decode every host.
            except (httpx.InvalidURL, ValueError) as error:
                raise InputUnavailable(f"no usable address: {type(error).__name__}") from None
        raise InputUnavailable("too many redirects")


def is_image_part(part: object) -> bool:
    """Whether a part of a message's content is an image."""
    return (
        isinstance(part, dict)
        and part.get("type") == "image_url"
        and isinstance(part.get("image_url"), dict)
    )


def leave_out_images(messages: Iterable[Mapping[str, object]]) -> list[JsonObject]:
    """The messages with their text alone, for what has to be counted."""
    bare = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [part for part in content if not is_image_part(part)]}
        bare.append(dict(message))
    return bare


def _read_body(response: httpx.Response, max_bytes: int, deadline: float) -> bytes:
    if response.status_code >= 500 or response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        raise _Unavailable(f"HTTP {response.status_code}")
    if response.status_code != httpx.codes.OK:
        raise InputUnavailable(f"HTTP {response.status_code}")
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip"):
        raise InputUnavailable("an unknown content encoding")
    parts = _iter_in_time(response.iter_raw(), deadline)
    return _join(_decompress(parts, max_bytes) if encoding == "gzip" else parts, max_bytes)


def _iter_in_time(parts: Iterable[bytes], deadline: float) -> Iterator[bytes]:
    """The parts, for as long as there is time: a store that trickles never meets a client's own
    time-out.
    """
    for part in parts:
        if time.monotonic() > deadline:
            raise InputUnavailable("too slow")
        yield part


def _join(parts: Iterable[bytes], max_bytes: int) -> bytes:
    body = bytearray()
    for part in parts:
        body += part
        if len(body) > max_bytes:
            raise InputUnavailable(f"more than {max_bytes} bytes")
    return bytes(body)


def _decompress(parts: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """The decompressed parts, each no larger than the bound: a few kilobytes can unfold into
    gigabytes.
    """
    decompressor = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        for part in parts:
            yield decompressor.decompress(part, max_bytes + 1)
            if decompressor.unconsumed_tail:
                raise InputUnavailable(f"more than {max_bytes} bytes")
    except zlib.error as error:
        raise InputUnavailable("broken gzip") from error
    if not decompressor.eof or decompressor.unused_data:
        raise InputUnavailable("broken gzip")


def _require_url(url: object) -> httpx.URL:
    try:
        parsed = httpx.URL(url if isinstance(url, str) else "")
    except (httpx.InvalidURL, UnicodeError, ValueError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.raw_host:
        raise InputUnavailable("no http address")
    return parsed


def _require_next_url(url: httpx.URL, response: httpx.Response) -> httpx.URL:
    """Where a redirect leads; never from https to http, where the signature could be read on its
    way.
    """
    try:
        next_url = _require_url(str(url.join(response.headers.get("Location", ""))))
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise InputUnavailable("a redirect to nowhere") from error
    if url.scheme == "https" and next_url.scheme != "https":
        raise InputUnavailable("a redirect from https to http")
    return next_url


def _is_data_url(url: object) -> bool:
    return isinstance(url, str) and url.startswith("data:image/")


def _build_data_url(image: bytes) -> str:
    media_type = next(
        (name for signature, name in _SIGNATURES.items() if image.startswith(signature)), None
    )
    if media_type is None:
        raise InputUnavailable("the image is neither JPEG nor PNG")
    return f"data:{media_type};base64,{base64.b64encode(image).decode('ascii')}"
