# SPDX-License-Identifier: AGPL-3.0-or-later
"""The images of a chat request as they were submitted: where they stand, how many and how large
they may be.

Source: docs/reference/chat_requests.md, "Images".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from horde.chat.flattening import list_parts
from horde.chat.image_urls import ImageRefused, check_image_bytes, estimate_data_url_bytes
from horde.chat.wire import ContentPart, ImageUrl, Message
from horde.chat_contract import (
    MAX_CHAT_IMAGE_COUNT,
    ChatRequestRefused,
)
from horde.return_codes import ReturnCode


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedImage:
    """One image part of a message; `path` is that of its URL in the request."""

    path: str
    image_url: ImageUrl = field(repr=False)

    def take_url(self) -> str:
        """The submitted URL, out of the message: whoever takes it alone decides how long megabytes
        of it are held.
        """
        url = self.image_url["url"]
        self.image_url["url"] = ""
        return url

    def build_refusal(self, refused: ImageRefused) -> ChatRequestRefused:
        """What the requester is told, with the path of the image."""
        return ChatRequestRefused(self.path, f"'{self.path}' {refused.expectation}.", refused.rc)


def list_image_parts(messages: Sequence[Message]) -> list[SubmittedImage]:
    """Every image of the messages, in order."""
    return [
        SubmittedImage(
            path=f"messages[{index}].content[{place}].image_url.url", image_url=part["image_url"]
        )
        for index, message in enumerate(messages)
        for place, part in enumerate(list_parts(message))
        if part["type"] == "image_url"
    ]


def rewrite_image_urls(messages: Sequence[Message], rewrite: Callable[[str], str]) -> list[Message]:
    """Copies of the messages with another URL for each image, in order; texts are shared."""
    return [_rewrite_message(message, rewrite) for message in messages]


def _rewrite_message(message: Message, rewrite: Callable[[str], str]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": [_rewrite_part(part, rewrite) for part in content]}


def _rewrite_part(part: ContentPart, rewrite: Callable[[str], str]) -> ContentPart:
    if part["type"] != "image_url":
        return part
    image_url = part["image_url"]
    return {**part, "image_url": {**image_url, "url": rewrite(image_url["url"])}}


def list_kept_images(submitted: Sequence[Message], kept: Sequence[Message]) -> list[SubmittedImage]:
    """The images of the messages that stay, with their paths among all that were submitted.

    Moderation and trimming make new messages of the same image parts.
    """
    kept_parts = {id(image.image_url) for image in list_image_parts(kept)}
    return [image for image in list_image_parts(submitted) if id(image.image_url) in kept_parts]


def estimate_image_bytes(image: SubmittedImage) -> int | None:
    """The size of an image whose bytes came with the request, None for a web address. Raises
    ChatRequestRefused.
    """
    try:
        size = estimate_data_url_bytes(image.image_url["url"])
        check_image_bytes(size or 0)
    except ImageRefused as refused:
        raise image.build_refusal(refused) from None
    return size


def check_image_count(images: Sequence[SubmittedImage]) -> None:
    """Hold the images to the number that everybody may send."""
    if len(images) > MAX_CHAT_IMAGE_COUNT:
        message = f"'messages' may hold at most {MAX_CHAT_IMAGE_COUNT} images."
        raise ChatRequestRefused("messages", message, ReturnCode.TOO_MANY_EXTRA_SOURCE_IMAGES)


def measure_data_urls(images: Sequence[SubmittedImage], cap_bytes: int) -> int:
    """The bytes of the images that came with the request; raises ChatRequestRefused for more than
    `cap_bytes`.
    """
    total = sum(estimate_image_bytes(image) or 0 for image in images)
    check_image_total(total, cap_bytes)
    return total


def check_image_total(total_bytes: int, cap_bytes: int, *, is_encoded: bool = False) -> None:
    """Hold all images together to a cap, as they were sent or as the JPEGs they are stored as."""
    if total_bytes <= cap_bytes:
        return
    if is_encoded:
        message = (
            f"Encoded as JPEG for storage the images take {total_bytes} bytes: the encoded size"
            f" passed the cap of {cap_bytes}."
        )
    else:
        message = f"The images take {total_bytes} bytes in all, above the cap of {cap_bytes} bytes."
    raise ChatRequestRefused("messages", message, ReturnCode.SOURCE_IMAGE_SIZE_EXCEEDED)
