# SPDX-License-Identifier: AGPL-3.0-or-later
"""The answer to a call that waits for its response and has it stored.

Redis may go away at any time: the client gets its reply all the same, and is told that nothing was
stored. Source: docs/reference/front_responses.md, "Stored responses".
"""

from horde.oai.errors import ErrorAnswer
from horde.oai.mapping import CompletedReply
from horde.oai.relay import Remainder
from horde.oai.responses_form.answer import ResponseAnswer, ResponseHead, build_response
from horde.oai.responses_form.records import Record
from horde.oai.responses_form.store import Lease, ResponseGone, ResponseStore, StoreUnavailable


class StoredAnswer(ResponseAnswer):
    """A response that is written to the store at its start and at its end."""

    def __init__(self, head: ResponseHead, store: ResponseStore, record: Record) -> None:
        super().__init__(head)
        self._store, self._record = store, record
        self._lease: Lease | None = None

    async def begin(self) -> None:
        """Write the record. One that is there already is that of the same operation."""
        record = self._record
        try:
            self._lease = await self._store.create(record)
            is_kept = self._lease is not None or (
                await self._store.find(record.request_id, record.owner) is not None
            )
        except StoreUnavailable:
            is_kept = False
        if not is_kept:
            self.withdraw_storage()

    async def settle(self, reply: CompletedReply, remainder: Remainder | None) -> None:
        """Write the object before the client has it."""
        final = self.complete(reply, remainder)
        if not await self._write_record():
            self.withdraw_storage()
            final["store"] = False

    async def record_failure(self, error: ErrorAnswer) -> None:
        """Write that there is no reply, best effort."""
        if self.final is None:
            self.fail(error)
        await self._write_record()

    async def record_end(self) -> None:
        """Write what an open stream ended with, if that was no reply."""
        await self._write_record()

    async def record_departure(self, *, is_resumable: bool) -> None:
        """The client is gone, best effort: who can come back for the reply finds it waited for."""
        if self._lease is None:
            return
        if not is_resumable and self.final is None:
            self.final = build_response(self.head, "cancelled")
            await self._write_record()
        elif is_resumable:
            try:
                await self._store.release(self._lease)
            except StoreUnavailable:
                return

    async def _write_record(self) -> bool:
        """Whether the object is in the store now."""
        if self._lease is None or self.final is None:
            return self.head.store
        self._record.response = self.final
        try:
            await self._store.write(self._lease, self._record)
        except (StoreUnavailable, ResponseGone):
            self._store.drop(self._lease)
            return False
        self._lease = None
        return True
