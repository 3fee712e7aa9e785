# SPDX-License-Identifier: AGPL-3.0-or-later
"""The URL of an image as it was submitted: its form, and how large what it holds is.

Source: docs/reference/chat_requests.md, "Images".
"""

import re
from typing import Final

from horde.chat_contract import MAX_CHAT_IMAGE_BYTES
from horde.return_codes import ReturnCode

MAX_IMAGE_URL_CHARACTERS: Final = 65_536  # as many as `horde.outbound` asks for
_DATA_URL: Final = re.compile(r"data:image/[^,]{1,200};base64,", re.IGNORECASE)
_WEB_URL: Final = re.compile(r"https?://[^/?#\s]", re.IGNORECASE)


class ImageRefused(Exception):
    """An image that cannot be taken; `expectation` completes "'path' ..."."""

    def __init__(self, expectation: str, rc: ReturnCode) -> None:
        super().__init__(expectation)
        self.expectation, self.rc = expectation, rc


def is_web_url(url: str) -> bool:
    """Whether an image has to be fetched."""
    return _WEB_URL.match(url) is not None


def estimate_data_url_bytes(url: str) -> int | None:
    """The size of a data URL's content once decoded, by its length; None for a web address.

    Raises ImageRefused with SourceImageUrlInvalid for a URL of another form, and for a web address
    that nobody could ask.
    """
    if is_web_url(url):
        if len(url) > MAX_IMAGE_URL_CHARACTERS:
            raise build_url_refusal(f"is a URL of more than {MAX_IMAGE_URL_CHARACTERS} characters")
        return None
    prefix = _DATA_URL.match(url)
    if prefix is None:
        expectation = "has to be an http or https URL, or a data URL of an image in base64"
        raise build_url_refusal(expectation)
    padding = 2 if url.endswith("==") else 1 if url.endswith("=") else 0
    return max((len(url) - prefix.end()) * 3 // 4 - padding, 0)


def check_image_bytes(size: int) -> None:
    """Raises ImageRefused for an image over 5 MiB."""
    if size > MAX_CHAT_IMAGE_BYTES:
        raise build_size_refusal(f"of {size} bytes")


def build_url_refusal(expectation: str) -> ImageRefused:
    """An image whose URL has another form or does not give it."""
    return ImageRefused(expectation, ReturnCode.SOURCE_IMAGE_URL_INVALID)


def build_size_refusal(size: str) -> ImageRefused:
    """An image that is too large; `size` is told as "of 12 bytes"."""
    message = f"is an image {size}, above the cap of {MAX_CHAT_IMAGE_BYTES} bytes"
    return ImageRefused(message, ReturnCode.SOURCE_IMAGE_SIZE_EXCEEDED)
