# SPDX-License-Identifier: AGPL-3.0-or-later
"""The models online, remembered for a few seconds. Source: docs/reference/chat_front.md,
"Models".
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from horde.oai.errors import NativeUnavailable, RequestRefused, shorten_param
from horde.oai.mapping import ListedModels, ModelCard, build_model_card, build_model_list
from horde.oai.native import NativeClient


class Remembered[T]:
    """What one call to the native API answers, for a few seconds: concurrent readers share the
    call, and its failure.
    """

    def __init__(
        self,
        fetch: Callable[[], Awaitable[T]],
        cache_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetch, self._cache_seconds, self._clock = fetch, cache_seconds, clock
        self._lock = asyncio.Lock()
        self._value: T | None = None
        self._read_at = self._failed_at = float("-inf")

    async def get(self) -> T:
        """The value. Raises NativeUnavailable when the API is away and what is remembered is too
        old.
        """
        called_at = self._clock()
        async with self._lock:
            if self._value is not None and self._clock() - self._read_at < self._cache_seconds:
                return self._value
            if self._failed_at >= called_at:
                raise NativeUnavailable("the list could not be read a moment ago")
            try:
                self._value = await self._fetch()
            except NativeUnavailable:
                self._failed_at = self._clock()
                raise
            self._read_at = self._clock()
            return self._value


class ModelList:
    """The chat models online, as cards."""

    def __init__(
        self,
        native: NativeClient,
        cache_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._native = native
        self._listed = Remembered(self._fetch, cache_seconds, clock)

    async def _fetch(self) -> ListedModels:
        return build_model_list(
            [build_model_card(entry) for entry in await self._native.list_models()]
        )

    async def get_list(self) -> ListedModels:
        """Every card. Raises NativeUnavailable."""
        return await self._listed.get()

    async def get_card(self, model: str) -> ModelCard:
        """One card, by its exact id. Raises RequestRefused (404)."""
        for card in (await self.get_list())["data"]:
            if card["id"] == model:
                return card
        raise _build_unknown(model, "model")


class TextModels:
    """The names of the text models online. Text requests are queued for any name, so that one which
    nobody serves has to be refused here.
    """

    def __init__(self, native: NativeClient, cache_seconds: float) -> None:
        self._native = native
        self._names = Remembered(self._fetch, cache_seconds)

    async def _fetch(self) -> frozenset[str]:
        entries = await self._native.list_models(for_chat=False)
        return frozenset(entry["name"] for entry in entries)

    async def check(self, models: Sequence[str], *, is_list: bool) -> None:
        """Refuse models of which none is served: RequestRefused (404). Raises NativeUnavailable."""
        if (await self._names.get()).isdisjoint(models):
            raise _build_unknown(models[0], "models[0]" if is_list else "model")


def _build_unknown(model: str, param: str) -> RequestRefused:
    message = f"The model '{shorten_param(model)}' does not exist or no online worker serves it."
    return RequestRefused("model_not_found", message, param, status=404)
