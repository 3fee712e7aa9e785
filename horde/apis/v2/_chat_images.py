# SPDX-License-Identifier: AGPL-3.0-or-later
"""Taking the images of a chat request: fetched or decoded, checked against the requester's caps, encoded as they are stored."""

import time
from collections.abc import Sequence
from uuid import UUID

from horde.classes.kobold._chat_images import SubmittedImage, check_image_total, check_total_of_data_urls
from horde.classes.kobold._chat_objects import build_chat_image_key
from horde.image import ImageRefused, encode_chat_image, is_web_url, load_chat_image

FETCH_SECONDS_OF_A_REQUEST = 30.0  # the front waits a minute for the whole submit


def load_images(images: Sequence[SubmittedImage], wp_id: UUID, *, cap_bytes: int) -> dict[str, bytes]:
    """The images as JPEGs by their keys, one at a time and in order; their URLs are taken out of the messages.

    Call it with no transaction open. Raises ChatRequestRefused, ServiceUnavailable.
    """
    total = check_total_of_data_urls(images, cap_bytes)
    fetch_seconds_left = FETCH_SECONDS_OF_A_REQUEST
    stored_total = 0
    jpegs: dict[str, bytes] = {}
    for index, image in enumerate(images):
        is_fetched = is_web_url(image.image_url["url"])
        started_at = time.monotonic()
        try:
            data = load_chat_image(image.take_url(), deadline=started_at + fetch_seconds_left)
            if is_fetched:
                fetch_seconds_left -= time.monotonic() - started_at
                total += len(data)
                check_image_total(total, cap_bytes)
            jpeg = encode_chat_image(data)
        except ImageRefused as refused:
            raise image.build_refusal(refused) from None
        stored_total += len(jpeg)
        check_image_total(stored_total, cap_bytes, is_encoded=True)
        jpegs[build_chat_image_key(wp_id, index)] = jpeg
    return jpegs
