# SPDX-License-Identifier: AGPL-3.0-or-later
"""A chat body at every cap is in memory twice at most while it is read, and once from then on."""

import io
import json
import tracemalloc

from flask import Flask

from horde.apis.requests import read_json_body
from horde.chat.images import list_image_parts
from horde.chat_contract import MAX_CHAT_BODY_BYTES
from horde.classes.kobold.chat_request import build_operation_fingerprint, parse_chat_request

MEBIBYTE = 1024 * 1024
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 6_900_000}}


def test_a_body_of_images_is_held_twice_at_most() -> None:
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": [IMAGE] * 5}]}
    ).encode()
    size, stream = len(body), io.BytesIO(body)
    assert size > 32 * MEBIBYTE
    with Flask("memory").test_request_context(
        "/",
        method="POST",
        input_stream=stream,
        content_length=size,
        content_type="application/json",
    ):
        tracemalloc.start()
        try:
            chat = parse_chat_request(read_json_body(MAX_CHAT_BODY_BYTES))
            held, peak = tracemalloc.get_traced_memory()
            assert held < size + MEBIBYTE
            assert peak < 2 * size + 4 * MEBIBYTE
            tracemalloc.reset_peak()
            build_operation_fingerprint(chat)
            assert tracemalloc.get_traced_memory()[1] < 1.5 * size
            for image in list_image_parts(chat.messages):
                image.take_url()
            assert tracemalloc.get_traced_memory()[0] < MEBIBYTE
        finally:
            tracemalloc.stop()
