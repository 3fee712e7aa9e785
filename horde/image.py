# SPDX-License-Identifier: AGPL-3.0-or-later
"""Images that requesters send: read from a data URL or fetched from a public host, and encoded as
plain JPEG.

Nothing of the library that decodes them runs in this process: `encode_chat_image` asks one of two
helpers, which a hostile image may fill or hang. Callers get `ImageRefused` for what the requester
can mend. No transaction may be open. Source: docs/reference/chat_requests.md, "Images".
"""

import binascii
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urljoin

from horde import metrics
from horde.chat.image_urls import (
    ImageRefused,
    build_size_refusal,
    build_url_refusal,
    check_image_bytes,
    estimate_data_url_bytes,
)
from horde.chat_contract import MAX_CHAT_IMAGE_BYTES
from horde.exceptions import ServiceUnavailable
from horde.helper_process import HelperPool, HelperUnavailable
from horde.outbound import (
    INTERNET,
    AddressRefused,
    AnswerTooLong,
    Network,
    OutboundFailed,
    send_public_request,
)
from horde.return_codes import ReturnCode
from horde.runtime import Part

MAX_REDIRECT_COUNT: Final = 3
PHASE_SECONDS: Final = 2.0  # connecting, and each read
FETCH_SECONDS: Final = 10.0  # one URL with its redirects
MAX_DECODING_COUNT: Final = 2  # images decoded at a time, per process
MAX_WAITING_COUNT: Final = 32  # images that wait for that; a request has two of them at most
DECODE_WAIT_SECONDS: Final = 20.0
# The helper's own bound is in processor time; this one is for a machine that is stuck.
DECODE_SECONDS: Final = 20.0
FETCH_WAIT_SECONDS: Final = 2.0
DEFAULT_FETCHING_COUNT: Final = 8

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_FETCH_OUTCOMES: Final = {
    ReturnCode.SOURCE_IMAGE_URL_REFUSED: "address_refused",
    ReturnCode.SOURCE_IMAGE_SIZE_EXCEEDED: "too_large",
    ReturnCode.SOURCE_IMAGE_URL_INVALID: "failed",
}
_HEADERS: Final = {"User-Agent": "Horde image fetch", "Accept": "image/*"}


@dataclass(slots=True)
class FetchState:
    """What `configure` noted for this runtime."""

    network: Network = INTERNET
    fetching: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(DEFAULT_FETCHING_COUNT)
    )


state = Part(FetchState)


def configure(*, server_threads: int, network: Network = INTERNET) -> None:
    """Let half of a process's threads fetch at a time: hosts that answer slowly must not hold them
    all.
    """
    state.get().fetching = threading.BoundedSemaphore(max(server_threads // 2, 1))
    state.get().network = network


def load_chat_image(url: str, *, deadline: float) -> bytes:
    """The bytes behind a URL of either form, as they were sent: at most 5 MiB, and not known to be
    an image yet.

    `deadline` is on the monotonic clock and bounds a fetch. The caller keeps no reference to a data
    URL it wants freed. Raises ImageRefused.
    """
    size = estimate_data_url_bytes(url)
    if size is None:
        return fetch_public_image(url, deadline=deadline)
    check_image_bytes(size)
    payload = url[url.index(",") + 1 :]
    del url
    try:
        return binascii.a2b_base64(payload, strict_mode=True)
    except ValueError:  # also of a character beyond ASCII
        raise ImageRefused("is not valid base64", ReturnCode.SOURCE_IMAGE_UNREADABLE) from None


def fetch_public_image(url: str, *, deadline: float) -> bytes:
    """Fetch a URL that a requester named, following three redirects at most, each to a public host
    again.

    Raises:
        ImageRefused: SourceImageUrlRefused for an address that is not public, on any hop;
        SourceImageSizeExceeded for a
            body over 5 MiB; SourceImageUrlInvalid for every other way not to get a 200.
        ServiceUnavailable: as many threads of this process as may fetch already do.
    """
    with _fetching():
        started_at = time.monotonic()
        outcome = "failed"
        try:
            body = _follow(url, min(deadline, started_at + FETCH_SECONDS))
            outcome = "fetched"
        except ImageRefused as refused:
            outcome = _FETCH_OUTCOMES[refused.rc]
            raise
        finally:
            metrics.image_fetch_seconds.record(
                time.monotonic() - started_at, {"horde.outcome": outcome}
            )
    return body


def _follow(url: str, deadline: float) -> bytes:
    for _ in range(MAX_REDIRECT_COUNT + 1):
        found = _ask(url, deadline)
        if isinstance(found, bytes):
            return found
        url = found
    raise build_url_refusal("redirects more than three times")


def _ask(url: str, deadline: float) -> bytes | str:
    """The body of a 200, or where a redirect leads."""
    try:
        answer = send_public_request(
            "GET",
            url,
            headers=_HEADERS,
            phase_seconds=PHASE_SECONDS,
            total_seconds=deadline - time.monotonic(),
            max_bytes=MAX_CHAT_IMAGE_BYTES,
            wanted_statuses={200},
            network=state.get().network,
        )
    except AddressRefused:
        raise ImageRefused(
            "leads to an address that is not public", ReturnCode.SOURCE_IMAGE_URL_REFUSED
        ) from None
    except AnswerTooLong:
        raise build_size_refusal(f"of more than {MAX_CHAT_IMAGE_BYTES} bytes") from None
    except OutboundFailed:
        raise build_url_refusal("did not answer, or not in time") from None
    location = answer.headers.get("location")
    if answer.status in _REDIRECTS and location is not None:
        try:
            return urljoin(url, location)
        except ValueError:
            raise build_url_refusal("redirects to no URL") from None
    if answer.status != 200:
        raise build_url_refusal(f"answered with {answer.status}")
    return answer.body


@contextmanager
def _fetching() -> Iterator[None]:
    places = state.get().fetching
    if not places.acquire(timeout=FETCH_WAIT_SECONDS):
        raise ServiceUnavailable("Too many images are being fetched at the moment. Try again.")
    try:
        yield
    finally:
        places.release()


_decoders: Final = HelperPool(
    Path(__file__).with_name("_image_helper.py"),
    max_count=MAX_DECODING_COUNT,
    max_waiting_count=MAX_WAITING_COUNT,
    wait_seconds=DECODE_WAIT_SECONDS,
    answer_seconds=DECODE_SECONDS,
)


def encode_chat_image(data: bytes) -> bytes:
    """An image of any common format as the JPEG that is stored: first frame, upright, on white, at
    most 2048 pixels a side.

    Raises:
        ImageRefused: SourceImageResolutionExceeded for more than 3072 * 3072 pixels by its header,
        SourceImageUnreadable. ServiceUnavailable: too many images wait to be decoded.
    """
    started_at = time.monotonic()
    try:
        answer = _decoders.ask(data)
    except HelperUnavailable:
        raise ServiceUnavailable(
            "Too many images are being read at the moment. Try again."
        ) from None
    verdict = b"" if answer is None else answer[:1]
    outcome = {b"J": "encoded", b"P": "too_many_pixels"}.get(verdict, "unreadable")
    metrics.image_encode_seconds.record(time.monotonic() - started_at, {"horde.outcome": outcome})
    if answer is not None and outcome == "encoded":
        return answer[1:]
    if outcome == "too_many_pixels":
        raise ImageRefused(
            "has more than 3072 * 3072 pixels", ReturnCode.SOURCE_IMAGE_RESOLUTION_EXCEEDED
        )
    raise ImageRefused("is not readable as an image", ReturnCode.SOURCE_IMAGE_UNREADABLE)
