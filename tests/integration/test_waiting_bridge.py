# SPDX-License-Identifier: AGPL-3.0-or-later
"""The bridge waits for jobs where the horde lets it, and polls where it does not."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from devtools.services import ServiceAddresses
from horde.bridge import popping
from horde.bridge.horde_api import HordeApi
from horde.bridge.loop import Bridge
from tests.integration._fake_chat_worker import build_pop_body
from tests.integration.chat_front import FrontStack, run_front_stack, wait_until
from tests.integration.own_redis import own_redis
from tests.unit.bridge.scripted import (
    build_backend,
    build_config,
    build_inputs,
    llama_script,
)

POP_PATH = "/api/v2/generate/text/pop"


@dataclass
class Proxy(httpx.BaseTransport):
    """What stands before a horde: its pops go where a test says, everything else to the API."""

    stack: FrontStack
    pops_go_to: str
    pops: list[tuple[str | None, int]] = field(default_factory=list)  # preference and status
    at_front: int = 0  # calls to the address that the API announces

    def __post_init__(self) -> None:
        self._network = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        is_pop = request.url.path == POP_PATH
        is_at_front = request.url.host == "front.test"
        to = self.stack.url if is_at_front else self.pops_go_to
        place = httpx.URL(to if is_pop else self.stack.native_url)
        request.url = request.url.copy_with(host=place.host, port=place.port)
        response = self._network.handle_request(request)
        if is_at_front:
            self.at_front += 1
        if is_pop:
            self.pops.append((request.headers.get("prefer"), response.status_code))
        return response

    def close(self) -> None:
        """The bridge's clients share the connections, which outlive each of them."""

    def hang_up(self) -> None:
        """Close the connections."""
        self._network.close()


@contextmanager
def running_stack(
    service_urls: ServiceAddresses, tmp_path: Path, name: str, **native: str
) -> Iterator[FrontStack]:
    with (
        own_redis(tmp_path) as redis,
        run_front_stack(
            service_urls,
            name,
            native=native,
            redis_url=redis.url,
            poll_seconds=0.2,
            max_waiting_pops_per_caller=1,
        ) as stack,
    ):
        yield stack


@pytest.fixture
def stack(
    service_urls: ServiceAddresses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FrontStack]:
    monkeypatch.setattr(popping, "WITHOUT_WAITING_SECONDS", 600.0)
    with running_stack(service_urls, tmp_path, "waiting_bridge") as stack:
        yield stack


@pytest.fixture
def announcing(service_urls: ServiceAddresses, tmp_path: Path) -> Iterator[FrontStack]:
    """One whose API says where its front is."""
    announced = {"front_url": "http://front.test/"}
    with running_stack(service_urls, tmp_path, "announcing", **announced) as stack:
        yield stack


@contextmanager
def running_bridge(stack: FrontStack, proxy: Proxy) -> Iterator[threading.Thread]:
    horde = HordeApi("http://horde.test/api", stack.horde.owner_key, "a:1:u", transport=proxy)
    bridge = Bridge(build_config(), horde, build_backend(llama_script()), build_inputs())
    thread = threading.Thread(target=bridge.run)
    thread.start()
    try:
        yield thread
    finally:
        bridge.stop()
        thread.join(60)
        horde.close()
        proxy.hang_up()
        assert not thread.is_alive()


def queue_text(stack: FrontStack) -> str:
    body = {"prompt": "Once", "params": {"max_length": 64}}
    answer = stack.horde.post("/generate/text/async", body, stack.horde.requester_key)
    assert answer.status_code == 202, answer.json
    return str(answer.json["id"])


def is_done(stack: FrontStack, request_id: str) -> bool:
    answer = stack.horde.get(f"/generate/text/status/{request_id}")
    return bool(answer.json and answer.json["done"])


def test_a_bridge_waits_where_it_may_and_stops_at_once(stack: FrontStack) -> None:
    proxy = Proxy(stack, stack.url)
    with running_bridge(stack, proxy):
        time.sleep(2)
        assert proxy.pops == []  # its first pop waits
        for _ in range(2):
            request_id = queue_text(stack)
            wait_until(lambda found=request_id: is_done(stack, found))  # type: ignore[misc]
        assert proxy.pops[:2] == [("wait=20", 200)] * 2
        stopped = time.monotonic()
    assert time.monotonic() - stopped < popping.WAIT_SECONDS / 2


def test_a_bridge_polls_where_nobody_keeps_it_waiting(stack: FrontStack) -> None:
    proxy = Proxy(stack, stack.native_url)
    with running_bridge(stack, proxy):
        wait_until(lambda: len(proxy.pops) >= 3)
        request_id = queue_text(stack)
        wait_until(lambda: is_done(stack, request_id))
    assert {status for _, status in proxy.pops} == {200}


def test_a_bridge_that_is_one_too_many_polls_instead(stack: FrontStack) -> None:
    first, second = Proxy(stack, stack.url), Proxy(stack, stack.url)
    with running_bridge(stack, first):
        time.sleep(1)
        with running_bridge(stack, second):
            wait_until(lambda: len(second.pops) >= 3)
            assert second.pops[0] == ("wait=20", 429)
            assert set(second.pops[1:]) == {(None, 200)}


def test_a_bridge_that_is_told_of_the_api_alone_finds_where_it_may_wait(
    announcing: FrontStack,
) -> None:
    proxy = Proxy(announcing, announcing.native_url)
    with running_bridge(announcing, proxy):
        wait_until(lambda: proxy.pops)
        for _ in range(2):
            request_id = queue_text(announcing)
            wait_until(lambda found=request_id: is_done(announcing, found))  # type: ignore[misc]
        wait_until(lambda: proxy.at_front)
    assert proxy.pops[0] == ("wait=20", 200)


def test_no_address_is_announced_to_who_did_not_ask(announcing: FrontStack) -> None:
    url = announcing.native_url.removesuffix("/api") + POP_PATH
    for preference, announced in (
        ({"Prefer": "wait=20"}, "http://front.test/api"),
        ({"Prefer": "respond-async"}, None),
        ({}, None),
    ):
        headers = {"apikey": announcing.horde.owner_key, **preference}
        answer = httpx.post(url, json=build_pop_body(), headers=headers)
        assert (answer.status_code, answer.headers.get("horde-waiting-pops")) == (200, announced)
