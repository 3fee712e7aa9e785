# SPDX-License-Identifier: AGPL-3.0-or-later
"""The parts of Responses joined: form, store, what runs in the background, and their routes.

Source: docs/reference/front_responses.md.
"""

from horde.front_config import FrontConfig
from horde.oai.calls import Calls
from horde.oai.responses_form.form import ResponsesForm
from horde.oai.responses_form.runs import Runs
from horde.oai.responses_form.service import ResponsesService
from horde.oai.responses_form.store import ResponseStore
from horde.oai.responses_form.stored_routes import StoredResponses
from horde.oai.responses_form.stored_stream import StoredStream


class Responses:
    """What serves Responses in one process. Without a Redis nothing is stored."""

    def __init__(self, config: FrontConfig, calls: Calls) -> None:
        store = None if config.responses_redis_url is None else ResponseStore(config)
        runs = None if store is None else Runs(calls, store)
        stream = None if store is None or runs is None else StoredStream(calls, store, runs)
        budget_seconds = max(config.stream_budget_seconds, config.completion_budget_seconds)
        form = ResponsesForm(config.responses_default_max_tokens, store, budget_seconds)
        self._store, self._runs = store, runs
        self.service = ResponsesService(
            calls, form, store, runs, stream, config.background_budget_seconds
        )
        self.stored = StoredResponses(calls, store, runs, stream)

    async def start(self) -> None:
        """Begin to renew leases; an unreachable Redis is no failure."""
        if self._store is not None:
            await self._store.start()

    async def close(self) -> None:
        """Leave what runs to another process."""
        if self._runs is not None and self._store is not None:
            await self._runs.close()
            await self._store.close()

    async def is_store_reachable(self) -> bool | None:
        """Whether responses can be stored; None where none are."""
        return None if self._store is None else await self._store.is_reachable()
