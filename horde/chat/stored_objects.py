# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a chat request keeps in the object store: the keys, the references in its messages, and what
workers get for them.
"""

import base64
import gzip
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final
from uuid import UUID

from horde.chat.images import list_image_parts, rewrite_image_urls
from horde.chat.wire import Message
from horde.json_text import write_document

STORED_IMAGE_SCHEME: Final = "horde-r2://"
JPEG_URL_PREFIX: Final = "data:image/jpeg;base64,"
# Tells the messages of a request from its images, which lie in another bucket.
CHAT_MESSAGES_SUFFIX: Final = "_chat_messages.json"
# Base64 of images shrinks by a quarter at every level, and text by most of what it can.
GZIP_LEVEL: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessagesOffload:
    """The messages of a request as one object; the body is packed when `is_gzipped`."""

    key: str
    body: bytes | bytearray = field(repr=False)
    is_gzipped: bool


def build_chat_image_key(request_id: UUID, index: int) -> str:
    """The key of a request's image; the images of a request are counted from 0."""
    return f"{request_id}_chat_{index}.jpg"


def build_chat_image_reference(key: str) -> str:
    """What stands in a stored message instead of the image's URL."""
    return f"{STORED_IMAGE_SCHEME}{key}"


def build_chat_messages_key(request_id: UUID) -> str:
    """The key of a request's offloaded messages."""
    return f"{request_id}{CHAT_MESSAGES_SUFFIX}"


def list_stored_chat_object_keys(
    request_id: UUID, image_urls: Iterable[str], *, is_offloaded: bool
) -> list[str]:
    """Every key that a request names, by the URLs of its image parts as they are stored."""
    keys = [
        url.removeprefix(STORED_IMAGE_SCHEME)
        for url in image_urls
        if url.startswith(STORED_IMAGE_SCHEME)
    ]
    return [*keys, build_chat_messages_key(request_id)] if is_offloaded else keys


def list_image_urls(messages: Sequence[Message]) -> list[str]:
    """The URL of every image part, in order."""
    return [image.image_url["url"] for image in list_image_parts(messages)]


def replace_image_urls(messages: Sequence[Message], request_id: UUID) -> list[Message]:
    """Copies of the messages as they are stored: each image by the key it is stored under, counted
    from 0.

    No submitted URL is left in them.
    """
    counter = count()

    def refer(_url: str) -> str:
        return build_chat_image_reference(build_chat_image_key(request_id, next(counter)))

    return rewrite_image_urls(messages, refer)


def replace_stored_images(
    messages: Sequence[Message], build_url: Callable[[str], str]
) -> list[Message]:
    """Copies of the messages whose references became what `build_url` makes of their key."""

    def replace(url: str) -> str:
        if not url.startswith(STORED_IMAGE_SCHEME):
            return url
        return build_url(url.removeprefix(STORED_IMAGE_SCHEME))

    return rewrite_image_urls(messages, replace)


def build_jpeg_url(jpeg: bytes) -> str:
    """A stored image as workers without `url` get it."""
    return JPEG_URL_PREFIX + base64.b64encode(jpeg).decode("ascii")


def count_inlined_bytes(messages: Sequence[Message], image_sizes: Mapping[str, int]) -> int:
    """The bytes of `build_inlined_messages`, without making them. Sizes are those of the JPEGs by
    key.
    """
    text = len(write_document(messages).encode())
    for url in list_image_urls(messages):
        size = image_sizes[url.removeprefix(STORED_IMAGE_SCHEME)]
        text += len(JPEG_URL_PREFIX) + 4 * -(-size // 3) - len(url)
    return text


def build_inlined_messages(messages: Sequence[Message], jpegs: Mapping[str, bytes]) -> bytearray:
    """The messages as a base64 worker receives them, as compact JSON; `jpegs` are by key.

    The images are written between the pieces of the JSON, so that 25 MiB of them are held once and
    not as text as well.
    """
    text = write_document(messages).encode()
    body = bytearray()
    position = 0
    for url in list_image_urls(messages):
        # Quoted text of the requester cannot look like this: in it every quotation mark is escaped.
        reference = f'"url":"{url}"'.encode()
        found = text.index(reference, position)
        body += text[position:found]
        body += f'"url":"{JPEG_URL_PREFIX}'.encode()
        body += base64.b64encode(jpegs[url.removeprefix(STORED_IMAGE_SCHEME)])
        body += b'"'
        position = found + len(reference)
    body += text[position:]
    return body


def build_chat_messages_offload(
    request_id: UUID,
    messages: Sequence[Message],
    jpegs: Mapping[str, bytes],
    *,
    largest_inline_bytes: int,
    packs: bool,
) -> ChatMessagesOffload | None:
    """The messages as one object, when they are above the threshold as a base64 worker receives
    them; else None.

    `messages` are as stored, with references; `jpegs` are the stored images by key. Sizes are bytes
    of compact JSON.
    """
    if (
        count_inlined_bytes(messages, {key: len(jpeg) for key, jpeg in jpegs.items()})
        <= largest_inline_bytes
    ):
        return None
    body: bytes | bytearray = build_inlined_messages(messages, jpegs)
    packed = gzip.compress(body, GZIP_LEVEL, mtime=0) if packs else body
    is_gzipped = len(packed) < len(body)
    return ChatMessagesOffload(
        key=build_chat_messages_key(request_id),
        body=packed if is_gzipped else body,
        is_gzipped=is_gzipped,
    )
