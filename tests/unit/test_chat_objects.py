# SPDX-License-Identifier: AGPL-3.0-or-later
import base64
import copy
import gzip
import json
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.chat.stored_objects import (
    build_chat_image_key,
    build_chat_image_reference,
    build_inlined_messages,
    build_jpeg_url,
    count_inlined_bytes,
    list_stored_chat_object_keys,
    replace_stored_images,
)
from horde.classes.kobold.chat_request import build_chat_messages_offload, select_chat_transport

REQUEST = UUID("01234567-89ab-cdef-0123-456789abcdef")
KEYS = [build_chat_image_key(REQUEST, index) for index in range(3)]


def image(key: str, **extra: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": build_chat_image_reference(key), **extra}}


def say(*parts: dict[str, Any], text: str = "look") -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


def test_keys_and_references_are_those_of_the_contract() -> None:
    assert KEYS[1] == "01234567-89ab-cdef-0123-456789abcdef_chat_1.jpg"
    assert (
        build_chat_image_reference(KEYS[0])
        == "horde-r2://01234567-89ab-cdef-0123-456789abcdef_chat_0.jpg"
    )


def test_only_references_name_objects() -> None:
    urls = [
        build_chat_image_reference(KEYS[0]),
        "data:image/png;base64,AA",
        "https://example.com/horde-r2://x",
    ]
    assert list_stored_chat_object_keys(REQUEST, urls, is_offloaded=False) == [KEYS[0]]
    assert list_stored_chat_object_keys(REQUEST, urls, is_offloaded=True) == [
        KEYS[0],
        f"{REQUEST}_chat_messages.json",
    ]


def test_replacing_changes_urls_alone_and_copies() -> None:
    messages = [
        {"role": "system", "content": "text"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        say(image(KEYS[0], detail="high"), image(KEYS[1])),
        say({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}),
    ]
    before = copy.deepcopy(messages)
    replaced = replace_stored_images(messages, lambda key: f"https://store/{key}")
    assert messages == before
    assert replaced[2]["content"][1] == {
        "type": "image_url",
        "image_url": {"url": f"https://store/{KEYS[0]}", "detail": "high"},
    }
    assert replaced[2]["content"][2]["image_url"]["url"] == f"https://store/{KEYS[1]}"
    assert [replaced[0], replaced[1], replaced[3]] == [messages[0], messages[1], messages[3]]


@given(
    texts=st.lists(st.text(max_size=60), min_size=1, max_size=4),
    jpegs=st.lists(st.binary(max_size=50), min_size=3, max_size=3),
)
def test_inlined_messages_are_what_a_base64_worker_gets(
    texts: list[str], jpegs: list[bytes]
) -> None:
    stored = dict(zip(KEYS, jpegs, strict=True))
    hostile = f'"url":"{build_chat_image_reference(KEYS[2])}"'  # a text that looks like a reference
    messages = [
        *(say(text=text) for text in texts),
        say(image(KEYS[0]), text=hostile),
        say(image(KEYS[2], detail="low"), image(KEYS[1])),
    ]
    body = build_inlined_messages(messages, stored)
    expected = replace_stored_images(messages, lambda key: build_jpeg_url(stored[key]))
    assert json.loads(body) == expected
    assert body == json.dumps(expected, separators=(",", ":"), ensure_ascii=False).encode()
    assert count_inlined_bytes(messages, {key: len(jpeg) for key, jpeg in stored.items()}) == len(
        body
    )


def test_the_threshold_is_the_largest_size_that_stays_inline() -> None:
    messages = [say(text="ü" * 100)]
    size = len(json.dumps(messages, separators=(",", ":"), ensure_ascii=False).encode())
    assert (
        build_chat_messages_offload(REQUEST, messages, {}, largest_inline_bytes=size, packs=False)
        is None
    )
    offload = build_chat_messages_offload(
        REQUEST, messages, {}, largest_inline_bytes=size - 1, packs=False
    )
    assert offload is not None
    assert (offload.key, offload.is_gzipped) == (f"{REQUEST}_chat_messages.json", False)
    assert json.loads(offload.body) == messages


def test_images_count_as_base64() -> None:
    messages = [say(image(KEYS[0]))]
    jpeg = b"x" * 196_608  # 256 KiB as base64
    assert build_chat_messages_offload(
        REQUEST, messages, {KEYS[0]: jpeg}, largest_inline_bytes=262_144, packs=False
    )
    small = {KEYS[0]: jpeg[:190_000]}
    assert (
        build_chat_messages_offload(
            REQUEST, messages, small, largest_inline_bytes=262_144, packs=False
        )
        is None
    )


def test_a_body_is_packed_when_that_makes_it_smaller() -> None:
    messages = [say(text="long " * 1000)]
    packed = build_chat_messages_offload(REQUEST, messages, {}, largest_inline_bytes=0, packs=True)
    assert packed is not None
    assert packed.is_gzipped
    assert json.loads(gzip.decompress(packed.body)) == messages
    tiny = build_chat_messages_offload(
        REQUEST, [{"role": "user", "content": "a"}], {}, largest_inline_bytes=0, packs=True
    )
    assert tiny is not None
    assert (tiny.is_gzipped, tiny.body) == (False, b'[{"role":"user","content":"a"}]')


def test_a_data_url_is_base64() -> None:
    assert (
        build_jpeg_url(b"\xff\xd8")
        == "data:image/jpeg;base64," + base64.b64encode(b"\xff\xd8").decode()
    )


@pytest.mark.parametrize(
    ("declared", "has_images", "is_offloaded", "transport"),
    [
        ([], False, False, None),
        ([], False, True, None),
        (["url", "base64", "messages_url"], False, False, None),
        (["messages_url"], False, True, "messages_url"),
        (["url"], True, False, "url"),
        (["base64", "url"], True, False, "url"),
        (["base64"], True, False, "base64"),
        (["base64", "messages_url"], True, False, "base64"),
        (["base64", "messages_url"], True, True, "messages_url"),
        (["url", "messages_url"], True, True, "messages_url"),
        (["url"], True, True, "url"),
        (["base64"], True, True, "base64"),
        (["url", "base64"], False, True, None),
    ],
)
def test_transport(
    declared: list[str], has_images: bool, is_offloaded: bool, transport: str | None
) -> None:
    selected = select_chat_transport(declared, has_images=has_images, is_offloaded=is_offloaded)
    assert (None if selected is None else selected.value) == transport
