# SPDX-License-Identifier: AGPL-3.0-or-later
"""Putting into the object store what a chat request keeps there: its images, and its messages where
they are large.
"""

from collections.abc import Mapping
from functools import partial
from uuid import UUID

from horde.chat.stored_objects import ChatMessagesOffload, build_chat_messages_offload
from horde.chat.wire import Message
from horde.config import Config
from horde.database.text_requests import mark_messages_offloaded
from horde.db import run_transaction
from horde.exceptions import ServiceUnavailable
from horde.r2 import StoreCircuitOpen, StoreUnavailable, upload_chat_messages, upload_source_image
from horde.return_codes import ReturnCode

STORE_AWAY = (
    "The images or messages of the request could not be stored. Nothing was charged. Try again"
    " later."
)


def store_objects(
    wp_id: UUID,
    messages: list[Message],
    jpegs: Mapping[str, bytes],
    sent: list[str],
    config: Config,
) -> None:
    """Put the images and the offloaded messages of an inactive request into the store, and note in
    `sent` each key that was sent.

    `messages` are as stored, `jpegs` by key. Raises ServiceUnavailable when the store is away.
    """
    offload = prepare_messages_offload(wp_id, messages, jpegs, config)
    try:
        upload_source_images(jpegs, sent)
        if offload is not None:
            sent.append(offload.key)
            upload_chat_messages(offload.key, offload.body, is_gzipped=offload.is_gzipped)
    except StoreUnavailable as error:
        if isinstance(error, StoreCircuitOpen):
            sent.pop()
        raise ServiceUnavailable(STORE_AWAY, ReturnCode.CHAT_IMAGE_STORAGE_UNAVAILABLE) from error


def prepare_messages_offload(
    wp_id: UUID, messages: list[Message], jpegs: Mapping[str, bytes], config: Config
) -> ChatMessagesOffload | None:
    """The messages as one object, when the horde is set so and they are large; the row says so
    before it is stored.
    """
    if not config.chat_messages_offload_enabled:
        return None
    offload = build_chat_messages_offload(
        wp_id,
        messages,
        jpegs,
        largest_inline_bytes=config.chat_messages_offload_bytes,
        packs=config.chat_messages_offload_gzip,
    )
    if offload is not None:
        run_transaction(partial(mark_messages_offloaded, wp_id=wp_id))
    return offload


def upload_source_images(jpegs: Mapping[str, bytes], sent: list[str]) -> None:
    """Store the images of a request, by key, and note in `sent` each that is tried. Raises
    StoreUnavailable at the first that fails.
    """
    for key, jpeg in jpegs.items():
        sent.append(key)
        upload_source_image(key, jpeg)
