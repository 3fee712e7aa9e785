# SPDX-License-Identifier: AGPL-3.0-or-later
"""The models online, remembered for a few seconds. Source: docs/reference/chat_front.md,
"Models".
"""

import asyncio
import time
from collections.abc import Callable

from horde.chat_contract import JsonObject
from horde.oai.errors import NativeUnavailable, RequestRefused, shorten_param
from horde.oai.mapping import build_model_card, build_model_list
from horde.oai.native import NativeClient


class ModelList:
    """The list of one process: concurrent readers share one call, and its failure."""

    def __init__(
        self,
        native: NativeClient,
        cache_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._native, self._cache_seconds, self._clock = native, cache_seconds, clock
        self._lock = asyncio.Lock()
        self._listed: JsonObject | None = None
        self._read_at = self._failed_at = float("-inf")

    async def get_list(self) -> JsonObject:
        """Every card. Raises NativeUnavailable when the API is away and what is remembered is too
        old.
        """
        called_at = self._clock()
        async with self._lock:
            if self._listed is not None and self._clock() - self._read_at < self._cache_seconds:
                return self._listed
            if self._failed_at >= called_at:
                raise NativeUnavailable("the list could not be read a moment ago")
            try:
                entries = await self._native.list_models()
            except NativeUnavailable:
                self._failed_at = self._clock()
                raise
            self._listed = build_model_list([build_model_card(entry) for entry in entries])
            self._read_at = self._clock()
            return self._listed

    async def get_card(self, model: str) -> JsonObject:
        """One card, by its exact id. Raises RequestRefused (404)."""
        for card in (await self.get_list())["data"]:
            if card["id"] == model:
                return dict(card)
        message = (
            f"The model '{shorten_param(model)}' does not exist or no online worker serves it."
        )
        raise RequestRefused("model_not_found", message, "model", status=404)
