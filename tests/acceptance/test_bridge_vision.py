# SPDX-License-Identifier: AGPL-3.0-or-later
"""Images and large conversations end to end: the API and a bridge as processes, a real object
store, and a backend that looks.

The backend is scripted, since no small model here sees: it keeps what it was sent, and the test
reads the images in it.
"""

import base64
import io
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from PIL import Image

from devtools.services import ServiceAddresses
from tests.acceptance._scripted_stream import END, MODEL, StreamingBackend, chunk
from tests.acceptance._stack import (
    Account,
    Horde,
    build_shared_environment,
    running_bridge,
    running_horde,
    wait_until,
)

pytestmark = pytest.mark.slow

COLOURS = [(200, 30, 40), (20, 60, 220)]
SIZE = (96, 64)
OFFLOAD = {
    "HORDE_CHAT_MESSAGES_OFFLOAD_ENABLED": "true",
    "HORDE_CHAT_MESSAGES_OFFLOAD_GZIP": "true",
    "HORDE_CHAT_MESSAGES_OFFLOAD_BYTES": "20000",  # the two small images stay below it
}
LONG_TEXT = "The same words again and again. " * 1000


@pytest.fixture(scope="module")
def horde(
    service_urls: ServiceAddresses, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Horde]:
    """The API with two processes and an object store."""
    services = build_shared_environment(service_urls, "acceptance_vision")
    with running_horde(services, tmp_path_factory.mktemp("vision"), **OFFLOAD) as horde:
        yield horde


@pytest.fixture(scope="module")
def owner(horde: Horde) -> Account:
    return horde.create_account("seeing owner")


@pytest.fixture(scope="module")
def client(horde: Horde) -> Account:
    return horde.create_account("seeing client")


@contextmanager
def serving(
    horde: Horde, owner: Account, *options: str
) -> Iterator[tuple[StreamingBackend, subprocess.Popen[bytes]]]:
    """A bridge whose backend sees, as its operator says, and the bridge's process."""
    supports = [
        word for name in ("vision", "prompt_overflow_refused") for word in ("--supports", name)
    ]
    # Room for the long text: nothing here counts tokens.
    with StreamingBackend(
        [chunk(content="Two colours."), END], context_tokens=32768
    ).running() as backend:
        name = "-".join(("seer", *options[1:]))
        with running_bridge(
            horde, owner.key, backend.url, name, *supports, "--max-length", "64", *options
        ) as process:
            yield backend, process


def build_png(colour: tuple[int, int, int]) -> str:
    """An image of one colour as a data URL."""
    content = io.BytesIO()
    Image.new("RGB", SIZE, colour).save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def build_messages(text: str) -> list[dict[str, Any]]:
    images = [
        {"type": "image_url", "image_url": {"url": build_png(colour), "detail": "low"}}
        for colour in COLOURS
    ]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *images]}]


def assert_saw_the_images(request: dict[str, Any], text: str) -> None:
    """The backend got the words, and after them each image inside its part, as JPEG of the right
    size and colour.
    """
    (message,) = request["messages"]
    words, *images = message["content"]
    assert words == {"type": "text", "text": text}
    assert len(images) == len(COLOURS)
    for part, colour in zip(images, COLOURS, strict=True):
        assert part["image_url"]["detail"] == "low"
        media_type, _, content = part["image_url"]["url"].partition(",")
        assert media_type == "data:image/jpeg;base64"
        image = Image.open(io.BytesIO(base64.b64decode(content, validate=True)))
        assert (image.format, image.size) == ("JPEG", SIZE)
        seen = image.convert("RGB").getpixel((SIZE[0] // 2, SIZE[1] // 2))
        assert isinstance(seen, tuple)
        assert all(abs(have - want) < 8 for have, want in zip(seen, colour, strict=True))


@pytest.mark.parametrize(
    ("options", "text", "transport"),
    [
        ((), "What do you see?", "url"),
        (("--image-transport", "base64"), "What do you see?", "base64"),
        ((), LONG_TEXT, "messages_url"),
        (("--image-transport", "url"), LONG_TEXT, "url"),
    ],
    ids=["signed", "inline", "offloaded", "offloaded for others"],
)
def test_the_backend_sees_what_the_client_sent(
    horde: Horde,
    owner: Account,
    client: Account,
    options: tuple[str, ...],
    text: str,
    transport: str,
) -> None:
    with serving(horde, owner, *options) as (backend, _):
        context = {"max_context_length": 16384}
        request_id = horde.api.queue_chat(
            client.key, MODEL, messages=build_messages(text), stream=True, horde=context
        )
        status = horde.api.wait_for_reply("chat", request_id)
        used = horde.database.value(
            "SELECT image_transport FROM processing_gens WHERE wp_id = %s", request_id
        )
    (generation,) = status["generations"]
    assert generation["message"]["content"] == "Two colours."
    assert used == transport
    (request,) = backend.requests
    assert_saw_the_images(request, text)


def test_an_image_that_is_gone_faults_the_job_without_a_reason(
    horde: Horde, owner: Account, client: Account, service_urls: ServiceAddresses
) -> None:
    with serving(horde, owner) as (_, bridge):
        bridge.kill()  # it says no goodbye, so that its model may still be asked for
    request_id = horde.api.queue_chat(
        client.key, MODEL, messages=build_messages("What do you see?")
    )
    delete_object(service_urls, f"{request_id}_chat_1.jpg")
    with serving(horde, owner) as (backend, _):
        status = wait_until(lambda: find_faulted(horde, request_id), log=horde.api.log)
    assert (status["fault_reason"], status["fault_rc"], status["generations"]) == (None, None, [])
    assert backend.requests == []


def find_faulted(horde: Horde, request_id: str) -> dict[str, Any] | None:
    status = horde.api.get_status("chat", request_id)
    return status if status["faulted"] else None


def delete_object(addresses: ServiceAddresses, key: str) -> None:
    """Take an object away behind the horde's back."""
    store = boto3.client(
        "s3",
        endpoint_url=addresses.s3_endpoint,
        aws_access_key_id=addresses.s3_access_key,
        aws_secret_access_key=addresses.s3_secret_key,
        region_name="auto",
    )
    try:
        store.head_object(Bucket=addresses.bucket, Key=key)
        store.delete_object(Bucket=addresses.bucket, Key=key)
    finally:
        store.close()
