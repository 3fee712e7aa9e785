# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the queue gains, as a front hears it from Redis. Redis may be away at any time; whoever
listens is told.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from horde.logger import get_logger
from horde.text_work import TEXT_WORK_CHANNEL, TextWork, parse_text_work

logger = get_logger(__name__)

CONNECT_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 1.0
PING_SECONDS: Final = 5.0  # of silence, since a dead host says nothing
PONG_SECONDS: Final = 3.0


class WorkFeed:
    """One subscription of one loop; `url` None hears nothing.

    `on_health` is told whether hints arrive: with each loss, and with each beginning, before which
    some may have been missed.
    """

    def __init__(
        self,
        url: str | None,
        on_work: Callable[[TextWork], None],
        on_health: Callable[[bool], None],
    ) -> None:
        self._url, self._on_work, self._on_health = url, on_work, on_health
        self._task: asyncio.Task[None] | None = None
        self._hears = False

    def start(self) -> None:
        """Begin to listen; an unreachable server is tried again and again."""
        if self._url is not None and self._task is None:
            self._task = asyncio.create_task(self._run(self._url))

    async def stop(self) -> None:
        """End the connection."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, url: str) -> None:
        """Listen for as long as the process lives."""
        options: dict[str, Any] = {
            "socket_connect_timeout": CONNECT_SECONDS,
            "socket_timeout": None,  # each wait here has its own bound
            "retry": Retry(NoBackoff(), 0),
        }
        is_first = True
        while True:
            try:
                async with (
                    Redis.from_url(url, **options) as client,
                    client.pubsub() as subscription,
                ):
                    await self._listen(subscription)
            # Whatever it was: a feed that ends leaves every waiting worker deaf.
            except Exception as error:  # noqa: BLE001
                if self._hears or is_first:  # once, not every second
                    extra = {"error_class": type(error).__name__}
                    logger.warning("horde.oai.work_feed_lost", extra=extra)
            is_first = False
            self._tell(hears=False)
            await asyncio.sleep(RETRY_SECONDS)

    def _tell(self, *, hears: bool) -> None:
        if hears != self._hears:
            self._hears = hears
            self._on_health(hears)

    async def _listen(self, subscription: PubSub) -> None:
        """Hand out hints until the connection breaks."""
        async with asyncio.timeout(CONNECT_SECONDS):
            await subscription.subscribe(TEXT_WORK_CHANNEL)
        patience, has_asked = CONNECT_SECONDS, True
        while True:
            message = await subscription.get_message(timeout=patience)
            if message is None:
                if has_asked:
                    raise TimeoutError
                await subscription.ping()
                patience, has_asked = PONG_SECONDS, True
                continue
            patience, has_asked = PING_SECONDS, False
            if message["type"] == "subscribe":
                self._tell(hears=True)
            elif message["type"] == "message":
                work = parse_text_work(message["data"].decode("utf-8", "replace"))
                if work is not None:
                    self._on_work(work)
