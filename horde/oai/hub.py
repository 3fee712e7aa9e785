# SPDX-License-Identifier: AGPL-3.0-or-later
"""Signals and progress of every open request of a process, from Redis, over few connections.

One connection hears the completion signals of all requests. Progress streams are read in groups:
one blocking read of a group waits for all its streams, so a thousand streams take some thirty
connections and no polling. Redis may be away at any time; whoever waits is told, and goes on by
polling. Source: docs/explanation/streaming.md.
"""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from horde import chat_progress
from horde.json_text import JsonObject
from horde.logger import get_logger
from horde.oai.signals import ChatNotice, NoticeKind, ProgressEntry

logger = get_logger(__name__)

CHANNEL_PREFIX: Final = "horde:chat:"
# Each post costs one read of its group, and each read looks at the whole group.
STREAMS_PER_READ: Final = 32
ENTRIES_PER_READ: Final = 32
# Of a reader that does not keep up; its stream is left alone until it has taken them.
MAX_WAITING_ENTRIES: Final = 64
MAX_WAITING_CHARACTERS: Final = 64 * 1024
MAX_WAITING_NOTICES: Final = 16

CONNECT_SECONDS: Final = 2.0
REPLY_SECONDS: Final = 3.0  # for what a reachable server answers at once
CONFIRM_SECONDS: Final = 1.0  # for a new subscription, before the request goes on without
RETRY_SECONDS: Final = 1.0
REACHABLE_SECONDS: Final = 0.5
PING_SECONDS: Final = 5.0  # of silence, before the connection of the signals is tried
BLOCK_SECONDS: Final = 5.0
UNNUDGED_BLOCK_SECONDS: Final = 0.1  # where a blocked read cannot be ended from outside
NUDGE_RETRY_SECONDS: Final = 0.001

_OUTCOMES: Final = frozenset(
    {NoticeKind.GENERATION, NoticeKind.DONE, NoticeKind.CANCELLED, NoticeKind.FAULTED}
)


class RedisHub:
    """The subscriptions of one process and one loop. `url` names the database of the chat
    streams.
    """

    def __init__(self, url: str) -> None:
        # RESP2: subscriptions then answer in the order of what was sent.
        options: JsonObject = {
            "protocol": 2,
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": None,  # reads block; each wait here has its own bound
            "retry": Retry(NoBackoff(), 0),
        }
        self._pool = ConnectionPool.from_url(url, **options)
        self._client = Redis(connection_pool=ConnectionPool.from_url(url, **options))
        self._signals = _Signals(self._pool)
        self._groups: list[_StreamGroup] = []

    async def start(self) -> None:
        """Begin to listen; an unreachable server is tried again and again."""
        self._signals.start()

    async def close(self) -> None:
        """End every connection."""
        await self._signals.stop()
        groups, self._groups = self._groups, []
        for group in groups:
            await group.stop()
        await self._client.aclose()
        await self._client.connection_pool.disconnect()

    async def is_reachable(self) -> bool:
        """Whether the server answers, within half a second."""
        try:
            async with asyncio.timeout(REACHABLE_SECONDS):
                await self._client.ping()
        except (RedisError, OSError, TimeoutError):
            return False
        return True

    @contextlib.asynccontextmanager
    async def subscribe(
        self, request_id: str, *, with_progress: bool
    ) -> AsyncIterator["RedisSubscription"]:
        """One request's subscription; entered once it is confirmed, or after a second without."""
        subscription = RedisSubscription(request_id)
        group = self._join_group(subscription) if with_progress else None
        try:
            await self._signals.add(subscription)
            yield subscription
        finally:
            if group is not None:
                self._leave_group(group, subscription)
            await self._signals.remove(subscription)

    def _join_group(self, subscription: "RedisSubscription") -> "_StreamGroup":
        """The fullest group with room, so that groups empty out; one stream stands in a group
        once.
        """
        rooms = [group for group in self._groups if group.has_room_for(subscription)]
        group = max(rooms, key=len, default=None)
        if group is None:
            group = _StreamGroup(self._pool, self._client)
            self._groups.append(group)
        group.add(subscription)
        return group

    def _leave_group(self, group: "_StreamGroup", subscription: "RedisSubscription") -> None:
        group.remove(subscription)
        # One empty group stays, so that a single stream after the other opens no connection each.
        if len(group) == 0 and sum(len(other) < STREAMS_PER_READ for other in self._groups) > 1:
            self._groups.remove(group)
            group.abandon()


class RedisSubscription:
    """What was heard of one request and not taken yet."""

    __slots__ = (
        *("_bell", "_characters", "_entries", "_group", "_notice_bell", "_notices"),
        *("is_full", "is_healthy", "packed_key", "packed_last_id", "request_id", "stream_key"),
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_healthy = False
        self.is_full = False  # its reader has to take something before more is read for it
        self.stream_key = chat_progress.build_stream_key(request_id).encode()
        self.packed_key = pack_word(self.stream_key)
        self.packed_last_id = pack_word(b"0")  # of the stream; its beginning
        self._notices: deque[ChatNotice] = deque(maxlen=MAX_WAITING_NOTICES)
        self._entries: list[ProgressEntry] = []
        self._characters = 0
        self._bell, self._notice_bell = _Bell(), _Bell()
        self._group: _StreamGroup | None = None

    async def next_notice(self, timeout_seconds: float) -> ChatNotice | None:
        """The next notice; None when none comes in time."""
        if not self._notices:
            await self._notice_bell.wait(timeout_seconds)
        return self._notices.popleft() if self._notices else None

    async def next_entries(self, timeout_seconds: float) -> Sequence[ProgressEntry]:
        """Progress since the last call; empty when none comes in time or `wake` was called."""
        if not self._entries:
            await self._bell.wait(timeout_seconds)
        was_full, self.is_full = self.is_full, False
        entries, self._entries, self._characters = self._entries, [], 0
        if was_full and self._group is not None:
            self._group.look_again()
        return entries

    def wake(self) -> None:
        """End a pending `next_entries` at once, or else the next one."""
        self._bell.ring()

    def put_notice(self, notice: ChatNotice) -> None:
        """Hand over a notice."""
        self._notices.append(notice)
        self._notice_bell.wake()

    def put_entries(self, last_id: bytes, entries: Sequence[ProgressEntry]) -> None:
        """Hand over progress up to an id of the stream."""
        self.packed_last_id = pack_word(last_id)
        self._entries += entries
        self._characters += sum(len(entry.content) + len(entry.reasoning) for entry in entries)
        self.is_full = (
            len(self._entries) >= MAX_WAITING_ENTRIES or self._characters >= MAX_WAITING_CHARACTERS
        )
        self._bell.wake()

    def set_healthy(self, *, is_healthy: bool, is_news: bool) -> None:
        """Note whether notices arrive; `is_news`: the reader is to act on it."""
        was_healthy, self.is_healthy = self.is_healthy, is_healthy
        if is_news and was_healthy != is_healthy:
            self.put_notice(ChatNotice(NoticeKind.RECONNECTED if is_healthy else NoticeKind.LOST))

    def join(self, group: "_StreamGroup | None") -> None:
        """Be read by a group, or by none."""
        self._group = group


class _Bell:
    """Wakes the one task that waits; rung while nobody waits, it ends the next wait at once."""

    __slots__ = ("_has_rung", "_waiting")

    def __init__(self) -> None:
        self._has_rung = False
        self._waiting: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self._has_rung = True
        self.wake()

    def wake(self) -> None:
        """End a wait that is going on, and no later one."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self, timeout_seconds: float) -> None:
        if not self._has_rung:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_later(timeout_seconds, self.wake)
            try:
                await self._waiting
            finally:
                timer.cancel()
                self._waiting = None
        self._has_rung = False


class _Signals:
    """The connection that hears the completion signals."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._by_channel: dict[str, set[RedisSubscription]] = {}
        self._confirmed: set[str] = set()  # channels heard by the present connection
        # Those that wait to be confirmed.
        self._entering: dict[RedisSubscription, asyncio.Event] = {}
        self._connection: AbstractConnection | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            await _end_task(self._task)

    async def add(self, subscription: RedisSubscription) -> None:
        """Subscribe; returns once the server confirmed it, or after a while without."""
        channel = CHANNEL_PREFIX + subscription.request_id
        members = self._by_channel.setdefault(channel, set())
        members.add(subscription)
        if channel in self._confirmed:
            subscription.set_healthy(is_healthy=True, is_news=False)
            return
        if self._connection is None:
            return
        confirmed = self._entering[subscription] = asyncio.Event()
        try:
            async with asyncio.timeout(CONFIRM_SECONDS):
                if len(members) == 1:
                    await self._send("SUBSCRIBE", channel)
                await confirmed.wait()
        except TimeoutError:
            logger.warning(
                "horde.oai.subscription_unconfirmed", extra={"native_id": subscription.request_id}
            )
        finally:
            del self._entering[subscription]

    async def remove(self, subscription: RedisSubscription) -> None:
        """Unsubscribe. Best effort: a message for nobody is thrown away."""
        channel = CHANNEL_PREFIX + subscription.request_id
        members = self._by_channel[channel]
        members.discard(subscription)
        if members:
            return
        del self._by_channel[channel]
        self._confirmed.discard(channel)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_SECONDS):
                await self._send("UNSUBSCRIBE", channel)

    async def _send(self, *words: str) -> None:
        connection = self._connection
        # On a lost connection the library would open another, which is this loop's work.
        if connection is not None and connection.is_connected:
            with contextlib.suppress(RedisError, OSError):
                await connection.send_command(*words, check_health=False)

    async def _run(self) -> None:
        """Listen for as long as the process lives."""
        was_lost = False
        while True:
            connection = _make_connection(self._pool)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await _connect(connection)
                self._connection = connection
                if self._by_channel:
                    await self._send("SUBSCRIBE", *self._by_channel)
                if was_lost:
                    logger.info("horde.oai.signals_back")
                was_lost = False
                await self._listen(connection)
            # Whatever it was: a listener that ends leaves every request deaf.
            except Exception as error:  # noqa: BLE001
                if not was_lost:  # once, not every second
                    logger.warning(
                        "horde.oai.signals_lost", extra={"error_class": type(error).__name__}
                    )
                was_lost = True
            finally:
                self._note_lost()
                await _disconnect(connection)
            await asyncio.sleep(RETRY_SECONDS)

    def _note_lost(self) -> None:
        self._connection = None
        self._confirmed.clear()
        for subscription in self._list_subscriptions():
            subscription.set_healthy(is_healthy=False, is_news=True)
        for confirmed in self._entering.values():
            confirmed.set()

    def _list_subscriptions(self) -> Iterator[RedisSubscription]:
        for members in list(self._by_channel.values()):
            yield from members

    async def _listen(self, connection: AbstractConnection) -> None:
        """Hand out messages until the connection breaks. A silent one is asked, since a dead host
        says nothing.
        """
        while True:
            message = await connection.read_response(timeout=PING_SECONDS)
            if message is None:
                await connection.send_command("PING", check_health=False)
                message = await connection.read_response(timeout=REPLY_SECONDS)
                if message is None:
                    raise TimeoutError
            self._take(message)

    def _take(self, message: Sequence[Any]) -> None:
        kind, *words = (
            word.decode("utf-8", "replace") if isinstance(word, bytes) else word for word in message
        )
        if kind == "subscribe":
            self._confirm(words[0])
        elif kind == "message":
            notice = parse_notice(words[1])
            if notice is not None:
                for subscription in self._by_channel.get(words[0], ()):
                    subscription.put_notice(notice)

    def _confirm(self, channel: str) -> None:
        members = self._by_channel.get(channel)
        if members is None:
            return
        self._confirmed.add(channel)
        for subscription in members:
            entering = self._entering.get(subscription)
            # Who no longer waits for it went on without, and may have missed something.
            subscription.set_healthy(is_healthy=True, is_news=entering is None)
            if entering is not None:
                entering.set()


def parse_notice(text: str) -> ChatNotice | None:
    """A completion signal; None for what is none."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    event = body.get("event") if isinstance(body, dict) else None
    if not isinstance(event, str) or event not in _OUTCOMES:
        return None
    reason, rc = body.get("fault_reason"), body.get("fault_rc")
    return ChatNotice(
        NoticeKind(event),
        reason if isinstance(reason, str) else None,
        rc if isinstance(rc, str) else None,
    )


class _StreamGroup:
    """Streams that are waited for by one blocking read, on a connection of its own."""

    def __init__(self, pool: ConnectionPool, client: Redis) -> None:
        self._pool, self._client = pool, client
        self._members: dict[bytes, RedisSubscription] = {}
        # There may be something to read for that the running read does not ask for.
        self._changed = asyncio.Event()
        self._is_blocked = False
        # By which the server knows it; None when it does not tell.
        self._connection_id: int | None = None
        self._nudging: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run())

    def __len__(self) -> int:
        return len(self._members)

    def has_room_for(self, subscription: RedisSubscription) -> bool:
        """Whether one more stream may be read here."""
        return (
            len(self._members) < STREAMS_PER_READ and subscription.stream_key not in self._members
        )

    def add(self, subscription: RedisSubscription) -> None:
        """Read a stream from its beginning on."""
        self._members[subscription.stream_key] = subscription
        subscription.join(self)
        self.look_again()

    def remove(self, subscription: RedisSubscription) -> None:
        """Read it no more."""
        del self._members[subscription.stream_key]
        subscription.join(None)

    def look_again(self) -> None:
        """Begin a new read now, since there is more to read for."""
        self._changed.set()
        if (
            self._is_blocked
            and self._connection_id is not None
            and (self._nudging is None or self._nudging.done())
        ):
            self._nudging = asyncio.create_task(self._nudge(self._connection_id))

    async def stop(self) -> None:
        """End the connection."""
        for task in (self._task, self._nudging):
            if task is not None:
                await _end_task(task)

    def abandon(self) -> None:
        """End the connection, without waiting for it."""
        self._task.cancel()

    async def _nudge(self, connection_id: int) -> None:
        """End the blocked read. It may have been sent and not have arrived yet, hence again and
        again.
        """
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                while self._is_blocked and self._changed.is_set():
                    await self._client.client_unblock(connection_id)
                    await asyncio.sleep(NUDGE_RETRY_SECONDS)
        except ResponseError:
            self._connection_id = None  # not allowed: short reads from now on
        except Exception as error:  # noqa: BLE001  the read ends by itself
            logger.debug("horde.oai.nudge_failed", extra={"error_class": type(error).__name__})

    async def _run(self) -> None:
        """Read for as long as there may be members."""
        failures = 0
        while True:
            connection = _make_connection(self._pool)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await _connect(connection)
                    self._connection_id = await _ask_connection_id(connection)
                while True:
                    await self._read(connection)
                    failures = 0
            # Whatever it was: a reader that ends takes its streams with it.
            except Exception as error:  # noqa: BLE001
                failures += 1
                if failures == 2:  # an idle connection may have been closed at any time
                    logger.warning(
                        "horde.oai.progress_lost", extra={"error_class": type(error).__name__}
                    )
            finally:
                self._is_blocked = False
                await _disconnect(connection)
            if failures > 1:
                await asyncio.sleep(RETRY_SECONDS)

    async def _read(self, connection: AbstractConnection) -> None:
        """One read of all streams whose readers keep up; without any, wait for one."""
        self._changed.clear()
        asked = [member for member in self._members.values() if not member.is_full]
        if not asked:
            await self._changed.wait()
            return
        block_seconds = BLOCK_SECONDS if self._connection_id is not None else UNNUDGED_BLOCK_SECONDS
        command = build_read_command(int(block_seconds * 1000), asked)
        self._is_blocked = True
        async with asyncio.timeout(block_seconds + REPLY_SECONDS):
            await connection.send_packed_command(command, check_health=False)
            answer = await connection.read_response(disable_decoding=True)
        self._is_blocked = False
        for key, found in answer or ():
            member = self._members.get(key)
            if member is not None and member in asked:
                member.put_entries(
                    found[-1][0], [parse_progress_entry(fields) for _, fields in found]
                )


async def _ask_connection_id(connection: AbstractConnection) -> int | None:
    await connection.send_command("CLIENT", "ID", check_health=False)
    try:
        answer = await connection.read_response(disable_decoding=True)
    except ResponseError:
        return None
    return answer if isinstance(answer, int) else None


def pack_word(word: bytes) -> bytes:
    """One word of a command, as the server reads it."""
    return b"$%d\r\n%b\r\n" % (len(word), word)


def build_read_command(block_milliseconds: int, asked: Sequence[RedisSubscription]) -> bytes:
    """The bytes of a blocking read. One is sent for each post, where packing it from words would
    cost the most of all.
    """
    words = (
        b"XREAD",
        b"COUNT",
        b"%d" % ENTRIES_PER_READ,
        b"BLOCK",
        b"%d" % block_milliseconds,
        b"STREAMS",
    )
    parts = [b"*%d\r\n" % (len(words) + 2 * len(asked)), *map(pack_word, words)]
    parts += [member.packed_key for member in asked]
    parts += [member.packed_last_id for member in asked]
    return b"".join(parts)


def parse_progress_entry(fields: Sequence[bytes]) -> ProgressEntry:
    """An entry from its names and values in turn; whatever is missing is empty."""
    words = [word.decode("utf-8", "replace") for word in fields]
    values: Mapping[str, str] = dict(zip(words[::2], words[1::2], strict=False))
    entry = chat_progress.parse_stream_entry(values)
    return ProgressEntry(
        entry.generation_id,
        entry.seq,
        entry.content,
        entry.reasoning_content,
        entry.worker_id or "",
        entry.model or None,
        entry.is_ended,
    )


def _make_connection(pool: ConnectionPool) -> AbstractConnection:
    connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
    return connection


async def _connect(connection: AbstractConnection) -> None:
    await connection.connect()  # type: ignore[no-untyped-call]


async def _disconnect(connection: AbstractConnection) -> None:
    with contextlib.suppress(Exception):  # whatever it was: the next connection is a new one
        await connection.disconnect(nowait=True)


async def _end_task(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
