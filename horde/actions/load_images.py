# SPDX-License-Identifier: AGPL-3.0-or-later
"""Loading the images of a chat request: fetched or decoded, held to the requester's bounds, encoded
as they are stored.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from uuid import UUID

from horde.chat.image_urls import ImageRefused, is_web_url
from horde.chat.images import (
    SubmittedImage,
    check_image_total,
    measure_data_urls,
)
from horde.chat.stored_objects import build_chat_image_key, count_inlined_bytes
from horde.chat.wire import Message
from horde.chat_contract import MAX_CHAT_BODY_BYTES
from horde.exceptions import RequestTooLarge
from horde.image import (
    MAX_DECODING_COUNT,
    encode_chat_image,
    load_chat_image,
)

FETCH_SECONDS_OF_A_REQUEST = 30.0  # the front waits a minute for the whole submit


def load_chat_images(
    wp_id: UUID, images: Sequence[SubmittedImage], messages: Sequence[Message], cap_bytes: int
) -> dict[str, bytes]:
    """The images of an inactive request as they will be stored, by key.

    `messages` are as stored. It takes seconds, so no transaction may be open. Raises
    ChatRequestRefused, RequestTooLarge, ServiceUnavailable.
    """
    jpegs = load_images(images, wp_id, cap_bytes=cap_bytes)
    check_inlined_size(messages, jpegs)
    return jpegs


def load_images(
    images: Sequence[SubmittedImage], wp_id: UUID, *, cap_bytes: int
) -> dict[str, bytes]:
    """The images as JPEGs by their keys, in order; their URLs are taken out of the messages.

    They are read one after the other, while those before are encoded, as many at a time as a
    process decodes. Call it with no transaction open. Raises ChatRequestRefused for the first image
    that cannot be taken, ServiceUnavailable.
    """
    reading = _Reading(images, cap_bytes)
    encoded = _Encoded(wp_id, cap_bytes)
    with ThreadPoolExecutor(MAX_DECODING_COUNT, thread_name_prefix="horde-image") as encoders:
        for image in images:
            encoded.make_room()
            try:
                data = reading.read(image)
            except Exception:
                encoded.finish()  # what is wrong with an image before is told first
                raise
            encoded.add(image, encoders.submit(encode_chat_image, data))
        return encoded.finish()


def check_inlined_size(messages: Sequence[Message], jpegs: Mapping[str, bytes]) -> None:
    """Hold the messages with their images inside to the bound of a body, which is what workers read
    at most.

    `messages` are as stored. Images at their cap leave room for all text that may be sent, but not
    for any amount of escapes and of parts without text. Raises RequestTooLarge.
    """
    if not jpegs:
        return  # what is stored without images is no larger than what was sent
    size = count_inlined_bytes(messages, {key: len(jpeg) for key, jpeg in jpegs.items()})
    if size > MAX_CHAT_BODY_BYTES:
        message = (
            f"The messages take {size} bytes with their images inside, above the bound of"
            f" {MAX_CHAT_BODY_BYTES} bytes."
        )
        raise RequestTooLarge(message)


class _Reading:
    """The bytes of a request's images as they were sent, in all and in time bounded."""

    def __init__(self, images: Sequence[SubmittedImage], cap_bytes: int) -> None:
        self._cap_bytes = cap_bytes
        self._total_bytes = measure_data_urls(images, cap_bytes)
        self._fetch_seconds_left = FETCH_SECONDS_OF_A_REQUEST

    def read(self, image: SubmittedImage) -> bytes:
        """One image. Raises ChatRequestRefused, ServiceUnavailable."""
        is_fetched = is_web_url(image.image_url["url"])
        started_at = time.monotonic()
        try:
            data = load_chat_image(image.take_url(), deadline=started_at + self._fetch_seconds_left)
        except ImageRefused as refused:
            raise image.build_refusal(refused) from None
        if is_fetched:
            self._fetch_seconds_left -= time.monotonic() - started_at
            self._total_bytes += len(data)
            check_image_total(self._total_bytes, self._cap_bytes)
        return data


class _Encoded:
    """The images of a request that are encoded, or being encoded, in order."""

    def __init__(self, wp_id: UUID, cap_bytes: int) -> None:
        self._wp_id, self._cap_bytes = wp_id, cap_bytes
        self._running: deque[tuple[SubmittedImage, Future[bytes]]] = deque()
        self._jpegs: dict[str, bytes] = {}
        self._total_bytes = 0

    def add(self, image: SubmittedImage, encoding: Future[bytes]) -> None:
        """The next image."""
        self._running.append((image, encoding))

    def make_room(self) -> None:
        """Wait until one more may be encoded. Raises ChatRequestRefused, ServiceUnavailable."""
        if len(self._running) >= MAX_DECODING_COUNT:
            self._take_first()

    def finish(self) -> dict[str, bytes]:
        """All JPEGs by their keys. Raises ChatRequestRefused, ServiceUnavailable."""
        while self._running:
            self._take_first()
        return self._jpegs

    def _take_first(self) -> None:
        image, encoding = self._running.popleft()
        try:
            jpeg = encoding.result()
        except ImageRefused as refused:
            raise image.build_refusal(refused) from None
        self._total_bytes += len(jpeg)
        check_image_total(self._total_bytes, self._cap_bytes, is_encoded=True)
        self._jpegs[build_chat_image_key(self._wp_id, len(self._jpegs))] = jpeg
