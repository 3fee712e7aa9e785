# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the front hears from a real Redis: at once, whole, and through every loss of the server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis

from devtools.services import ServiceAddresses
from horde.oai import hub as hub_module
from horde.oai.hub import MAX_WAITING_ENTRIES, STREAMS_PER_READ, RedisHub, RedisSubscription
from horde.oai.signals import ChatNotice, NoticeKind, ProgressEntry
from tests.integration.own_redis import OwnRedis, add_end, add_entry, own_redis

PATIENCE_SECONDS = 60.0


@pytest.fixture
def client(service_urls: ServiceAddresses) -> Iterator[Redis]:
    with Redis.from_url(f"{service_urls.redis_url}/7", decode_responses=True) as client:
        yield client


@pytest.fixture
def url(service_urls: ServiceAddresses) -> str:
    return f"{service_urls.redis_url}/7"


@asynccontextmanager
async def running_hub(url: str) -> AsyncIterator[RedisHub]:
    hub = RedisHub(url)
    await hub.start()
    try:
        yield hub
    finally:
        await hub.close()


def on_hub(url: str, play: Callable[[RedisHub], Awaitable[None]]) -> None:
    """Run a scene on a hub of its own."""

    async def run() -> None:
        async with asyncio.timeout(60), running_hub(url) as hub:
            await await_connection(hub)
            await play(hub)

    asyncio.run(run())


async def await_connection(hub: RedisHub) -> None:
    """The hub listens, or has found that it cannot."""
    while hub._signals._connection is None and await hub.is_reachable():
        await asyncio.sleep(0.01)


def publish(client: Redis, request_id: str, event: str, **more: Any) -> None:
    client.publish(
        f"horde:chat:{request_id}",
        json.dumps({"id": request_id, "event": event, "generations": 0} | more),
    )


async def take(subscription: RedisSubscription, count: int) -> list[ProgressEntry]:
    """The next entries, as many as given."""
    entries: list[ProgressEntry] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(entries) < count:
            entries += await subscription.next_entries(1.0)
    assert len(entries) == count
    return entries


async def hear(subscription: RedisSubscription) -> ChatNotice:
    notice = await subscription.next_notice(PATIENCE_SECONDS)
    assert notice is not None
    return notice


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


# Signals


def test_a_signal_is_heard_with_its_reason(url: str, client: Redis) -> None:
    async def play(hub: RedisHub) -> None:
        async with hub.subscribe("a", with_progress=False) as subscription:
            assert subscription.is_healthy
            publish(client, "a", "generation")
            publish(client, "a", "faulted", fault_reason="No.", fault_rc="Rc")
            assert await hear(subscription) == ChatNotice(NoticeKind.GENERATION)
            assert await hear(subscription) == ChatNotice(NoticeKind.FAULTED, "No.", "Rc")

    on_hub(url, play)


def test_signals_of_others_and_nonsense_are_not_heard(url: str, client: Redis) -> None:
    async def play(hub: RedisHub) -> None:
        async with (
            hub.subscribe("a", with_progress=False) as subscription,
            hub.subscribe("b", with_progress=False) as other,
        ):
            shapes = ("[]", "{}", '{"event": 1}', '{"event": []}', '{"event": {}}', "[" * 100_000)
            for text in ("no JSON", *shapes, '{"event": "reconnected"}', '{"event": "lost"}'):
                client.publish("horde:chat:a", text)
            publish(client, "b", "done")
            assert (await hear(other)).kind is NoticeKind.DONE
            assert await subscription.next_notice(0.05) is None

    on_hub(url, play)


@pytest.mark.parametrize("name", ["parse_notice", "parse_progress_entry"])
def test_what_nobody_foresaw_ends_no_listener(
    url: str, client: Redis, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    request_id = str(uuid4())
    parse, failed = getattr(hub_module, name), []

    def fail_once(received: Any) -> Any:
        if not failed:
            failed.append(received)
            raise RuntimeError("nobody foresaw this")
        return parse(received)

    monkeypatch.setattr(hub_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(hub_module, name, fail_once)

    async def play(hub: RedisHub) -> None:
        async with hub.subscribe(request_id, with_progress=True) as subscription:
            publish(client, request_id, "generation")
            add_entry(client, request_id, 1, "Blue")
            if name == "parse_notice":
                assert (await hear(subscription)).kind is NoticeKind.LOST
                assert (await hear(subscription)).kind is NoticeKind.RECONNECTED
                publish(client, request_id, "done")
                assert (await hear(subscription)).kind is NoticeKind.DONE
            assert [entry.content for entry in await take(subscription, 1)] == ["Blue"]
        assert failed

    on_hub(url, play)


def test_two_that_wait_for_one_request_hear_the_same(url: str, client: Redis) -> None:
    async def play(hub: RedisHub) -> None:
        async with hub.subscribe("a", with_progress=True) as first:
            async with hub.subscribe("a", with_progress=True) as second:
                publish(client, "a", "generation")
                assert await hear(first) == await hear(second)
                add_entry(client, "a", 1, "Blue")
                assert await take(first, 1) == await take(second, 1)
            publish(client, "a", "done")  # the first one is still subscribed
            assert (await hear(first)).kind is NoticeKind.DONE
        assert client.pubsub_numsub("horde:chat:a") == [("horde:chat:a", 0)]

    client.delete("horde:chat:stream:a")
    on_hub(url, play)


def test_a_wait_for_a_notice_ends_in_time(url: str) -> None:
    async def play(hub: RedisHub) -> None:
        async with hub.subscribe("a", with_progress=False) as subscription:
            assert await subscription.next_notice(0.01) is None

    on_hub(url, play)


# Progress


def test_a_stream_is_read_from_its_beginning(url: str, client: Redis) -> None:
    request_id = str(uuid4())
    for seq in range(1, 101):
        add_entry(client, request_id, seq, f"{seq} ")

    async def play(hub: RedisHub) -> None:
        async with hub.subscribe(request_id, with_progress=True) as subscription:
            assert [entry.sequence for entry in await take(subscription, 100)] == list(
                range(1, 101)
            )

    on_hub(url, play)


def test_an_entry_arrives_whole(url: str, client: Redis) -> None:
    request_id, text = str(uuid4()), "Zeile\nzwei\u2028drei 🫐\u0085"

    async def play(hub: RedisHub) -> None:
        async with hub.subscribe(request_id, with_progress=True) as subscription:
            add_entry(client, request_id, 1, text, reasoning_content="Hm.")
            add_entry(client, request_id, 2, "", model=None)
            add_end(client, request_id)
            assert await take(subscription, 3) == [
                ProgressEntry("generation", 1, text, "Hm.", "worker", "a/model"),
                ProgressEntry("generation", 2, worker_id="worker"),
                ProgressEntry("generation", 0, has_ended=True),
            ]

    on_hub(url, play)


def test_a_stream_that_joins_a_blocked_read_is_noticed_at_once(
    url: str, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "BLOCK_SECONDS", 60.0)
    ids = [str(uuid4()) for _ in range(STREAMS_PER_READ)]

    async def play(hub: RedisHub) -> None:
        async with AsyncExitStack() as stack:
            for request_id in ids:
                subscription = await stack.enter_async_context(
                    hub.subscribe(request_id, with_progress=True)
                )
                add_entry(client, request_id, 1, request_id)
                assert [entry.content for entry in await take(subscription, 1)] == [request_id]
            assert len(hub._groups) == 1

    on_hub(url, play)


def test_reads_that_cannot_be_ended_from_outside_are_short(
    url: str, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def know_no_id(_connection: Any) -> None:
        return None

    monkeypatch.setattr(hub_module, "_ask_connection_id", know_no_id)
    ids = [str(uuid4()) for _ in range(3)]

    async def play(hub: RedisHub) -> None:
        async with AsyncExitStack() as stack:
            for request_id in ids:
                subscription = await stack.enter_async_context(
                    hub.subscribe(request_id, with_progress=True)
                )
                add_entry(client, request_id, 1)
                await take(subscription, 1)

    on_hub(url, play)


def test_many_streams_share_few_connections(url: str, client: Redis) -> None:
    ids = [str(uuid4()) for _ in range(STREAMS_PER_READ * 2 + 1)]

    async def play(hub: RedisHub) -> None:
        async with AsyncExitStack() as stack:
            subscriptions = [
                await stack.enter_async_context(hub.subscribe(name, with_progress=True))
                for name in ids
            ]
            assert [len(group) for group in hub._groups] == [STREAMS_PER_READ, STREAMS_PER_READ, 1]
            for seq in (1, 2, 3):
                for request_id in ids:
                    add_entry(client, request_id, seq, request_id)
            for request_id, subscription in zip(ids, subscriptions, strict=True):
                assert [
                    (entry.sequence, entry.content) for entry in await take(subscription, 3)
                ] == [(seq, request_id) for seq in (1, 2, 3)]
        assert [len(group) for group in hub._groups] == [0]

    on_hub(url, play)


def test_a_reader_that_does_not_read_holds_up_nobody_and_is_kept_little_for(
    url: str, client: Redis
) -> None:
    slow_id, fast_id = str(uuid4()), str(uuid4())

    async def play(hub: RedisHub) -> None:
        async with (
            hub.subscribe(slow_id, with_progress=True) as slow,
            hub.subscribe(fast_id, with_progress=True) as fast,
        ):
            for seq in range(1, 501):
                add_entry(client, slow_id, seq, "word " * 10)
                if seq % 50 == 0:
                    add_entry(client, fast_id, seq)
                    await take(fast, 1)
            assert MAX_WAITING_ENTRIES <= len(slow._entries) < 2 * MAX_WAITING_ENTRIES
            assert [entry.sequence for entry in await take_slowly(slow, 500)] == list(range(1, 501))

    on_hub(url, play)


async def take_slowly(subscription: RedisSubscription, count: int) -> list[ProgressEntry]:
    entries: list[ProgressEntry] = []
    while len(entries) < count:
        entries += await subscription.next_entries(PATIENCE_SECONDS)
    return entries


def test_a_wake_ends_the_wait_for_entries_whenever_it_comes(url: str) -> None:
    async def play(hub: RedisHub) -> None:
        async with hub.subscribe("woken", with_progress=True) as subscription:
            subscription.wake()
            assert await subscription.next_entries(PATIENCE_SECONDS) == []
            asyncio.get_running_loop().call_later(0.01, subscription.wake)
            assert await subscription.next_entries(PATIENCE_SECONDS) == []
            assert await subscription.next_entries(0.01) == []

    on_hub(url, play)


# Losing the server


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[OwnRedis]:
    with own_redis(tmp_path) as redis:
        yield redis


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_SECONDS", "PING_SECONDS", "REPLY_SECONDS", "BLOCK_SECONDS"):
        monkeypatch.setattr(hub_module, name, 0.1)


@pytest.mark.usefixtures("quick")
def test_a_lost_server_is_told_and_told_when_it_is_back(redis: OwnRedis) -> None:
    async def play(hub: RedisHub) -> None:
        async with hub.subscribe("a", with_progress=True) as subscription:
            with Redis.from_url(redis.url) as before:
                add_entry(before, "a", 1, "One")
            await take(subscription, 1)
            redis.kill()
            assert (await hear(subscription)).kind is NoticeKind.LOST
            assert not subscription.is_healthy
            assert not await hub.is_reachable()
            redis.start()  # empty
            assert (await hear(subscription)).kind is NoticeKind.RECONNECTED
            assert subscription.is_healthy
            with Redis.from_url(redis.url) as after:
                publish(after, "a", "done")
                assert (await hear(subscription)).kind is NoticeKind.DONE
                add_entry(after, "a", 2, ", two")
            assert [entry.content for entry in await take(subscription, 1)] == [", two"]

    on_hub(redis.url, play)


@pytest.mark.usefixtures("quick")
def test_a_server_that_hangs_is_lost(redis: OwnRedis) -> None:
    async def play(hub: RedisHub) -> None:
        async with hub.subscribe("a", with_progress=True) as subscription:
            redis.freeze()
            assert (await hear(subscription)).kind is NoticeKind.LOST
            assert not await hub.is_reachable()
            # Within a second, and without an error.
            async with hub.subscribe("b", with_progress=True) as late:
                assert not late.is_healthy
                redis.thaw()
                assert (await hear(subscription)).kind is NoticeKind.RECONNECTED
                assert (await hear(late)).kind is NoticeKind.RECONNECTED

    on_hub(redis.url, play)


@pytest.mark.usefixtures("quick")
def test_a_server_that_is_away_at_the_start_is_found_later(redis: OwnRedis) -> None:
    redis.kill()

    async def play(hub: RedisHub) -> None:
        async with hub.subscribe("a", with_progress=True) as subscription:
            assert not subscription.is_healthy
            redis.start()
            assert (await hear(subscription)).kind is NoticeKind.RECONNECTED
            with Redis.from_url(redis.url) as after:
                add_entry(after, "a", 1, "One")
            await take(subscription, 1)

    on_hub(redis.url, play)


@pytest.mark.usefixtures("quick")
def test_a_subscription_that_is_not_confirmed_in_time_is_told_when_it_is(
    redis: OwnRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "CONFIRM_SECONDS", 0.05)
    monkeypatch.setattr(hub_module, "PING_SECONDS", 30.0)

    async def play(hub: RedisHub) -> None:
        redis.freeze()
        async with hub.subscribe("a", with_progress=False) as subscription:
            assert not subscription.is_healthy
            redis.thaw()
            assert (await hear(subscription)).kind is NoticeKind.RECONNECTED

    on_hub(redis.url, play)


def test_a_hub_closes_while_somebody_is_subscribed(url: str) -> None:
    async def run() -> None:
        hub = RedisHub(url)
        await hub.start()
        async with hub.subscribe("a", with_progress=True):
            await hub.close()

    asyncio.run(run())


def test_a_wrong_password_is_a_server_that_is_away(service_urls: ServiceAddresses) -> None:
    scheme, _, rest = service_urls.redis_url.partition("://")
    wrong = f"{scheme}://:wrong@{rest.rpartition('@')[2]}/7"

    async def run() -> None:
        async with (
            running_hub(wrong) as hub,
            hub.subscribe("a", with_progress=True) as subscription,
        ):
            assert not subscription.is_healthy
            assert not await hub.is_reachable()

    asyncio.run(run())
