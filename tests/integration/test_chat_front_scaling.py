# SPDX-License-Identifier: AGPL-3.0-or-later
"""Two fronts before one API and one Redis, as an operator scales them."""

from collections.abc import Iterator
from contextlib import ExitStack
from uuid import uuid4

import pytest

from devtools.services import ServiceAddresses
from tests.integration._fake_chat_worker import start_anew
from tests.integration.chat_front import FrontStack, run_front, run_front_stack
from tests.integration.front_streams import OpenStream, post_progress

STREAMS_OF_A_FRONT = 40  # more than one read of Redis waits for


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(
        service_urls, "front_scaling", redis_url=f"{service_urls.redis_url}/7"
    ) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


@pytest.fixture
def second_url(stack: FrontStack) -> Iterator[str]:
    """The address of another front."""
    with run_front(stack.config) as url:
        yield url


def test_a_request_is_followed_through_both_fronts(stack: FrontStack, second_url: str) -> None:
    stack.horde.take_nothing()
    key = {"idempotency-key": str(uuid4())}
    with (
        OpenStream(stack, headers=key) as first,
        OpenStream(stack, url=second_url, headers=key) as second,
    ):
        job = stack.await_job()
        post_progress(stack, job["id"], "Bl")
        for stream in (first, second):
            stream.await_text("Bl")
        first.hang_up()  # the client may come back, so the request goes on
        post_progress(stack, job["id"], "ue", start=2)
        second.await_text("Blue")
        stack.horde.reply(job["id"], "Blue.")
        assert second.finish().join() == "Blue."


def test_each_stream_of_either_front_brings_its_own_text(
    stack: FrontStack, second_url: str
) -> None:
    stack.horde.take_nothing(threads=30)
    with ExitStack() as streams:
        opened: list[tuple[OpenStream, str]] = []
        for number in range(STREAMS_OF_A_FRONT):
            for url in (stack.url, second_url):
                stream = streams.enter_context(OpenStream(stack, url=url))
                job = stack.await_job()
                post_progress(stack, job["id"], f"{len(opened)}:{number} ")
                opened.append((stream, job["id"]))
        for place, (stream, job_id) in enumerate(opened):
            stream.await_text(f"{place}:{place // 2} ")
            stack.horde.reply(job_id, f"{place}:{place // 2} and the end.")
        for place, (stream, _) in enumerate(opened):
            assert stream.finish().join() == f"{place}:{place // 2} and the end."
