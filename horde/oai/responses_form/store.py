# SPDX-License-Identifier: AGPL-3.0-or-later
"""Stored responses in Redis: records, their events, and who waits for one that is running.

Everything expires from its first write on, and may be lost. A record is changed only by the holder
of its lease, so that a process that was thought to be dead changes nothing any more. Source:
docs/reference/front_responses.md, "Stored responses".
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from horde import metrics
from horde.front_config import FrontConfig
from horde.oai.responses_form.records import Record, write_json

PREFIX: Final = "horde:oai:responses:"
LEASE_SECONDS: Final = 30.0
RENEW_SECONDS: Final = 10.0
REPLY_SECONDS: Final = 5.0  # a record may be megabytes
CONNECT_SECONDS: Final = 2.0
BLOCK_SECONDS: Final = 2.0  # of one look for further events
EVENTS_PER_READ: Final = 64
EXTRA_LIFE_SECONDS: Final = 60

# KEYS: record, the key's list, lease. ARGV: native id, now, owner, fixed, response, status,
# life, most records, lease token, lease milliseconds, prefix. Returns 1, or 0 where there is one.
_CREATE: Final = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local most, prefix = tonumber(ARGV[8]), ARGV[11]
if redis.call('ZCARD', KEYS[2]) >= most then
  local is_removed = false
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local status = redis.call('HGET', prefix .. 'record:' .. id, 'status')
    local is_over = status and status ~= 'queued' and status ~= 'in_progress'
    if not status or (is_over and not is_removed) then
      redis.call('DEL', prefix .. 'record:' .. id, prefix .. 'events:' .. id)
      redis.call('ZREM', KEYS[2], id)
      is_removed = true
    end
  end
end
redis.call('HSET', KEYS[1], 'owner', ARGV[3], 'fixed', ARGV[4], 'response', ARGV[5],
  'status', ARGV[6])
redis.call('EXPIRE', KEYS[1], ARGV[7])
redis.call('ZADD', KEYS[2], ARGV[2], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[7])
redis.call('SET', KEYS[3], ARGV[9], 'PX', ARGV[10])
return 1
"""
# KEYS: record, events, lease, the key's list. ARGV: token, response or '', status, life, whether
# it is over, first number, then events. Returns 1, or 0 when the lease or the record is lost.
_WRITE: Final = """
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return 0 end
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)
local last = newest[1] and tonumber(string.match(newest[1][1], '^%d+')) or 0
for i = 7, #ARGV do
  local place = tonumber(ARGV[6]) + i - 6
  -- Events of a write whose answer was lost are there already.
  if place > last then redis.call('XADD', KEYS[2], place .. '-0', 'e', ARGV[i]) end
end
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], 'response', ARGV[2], 'status', ARGV[3])
end
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
if redis.call('TTL', KEYS[4]) < tonumber(ARGV[4]) then
  redis.call('EXPIRE', KEYS[4], ARGV[4])
end
if ARGV[5] == '1' then redis.call('DEL', KEYS[3]) end
return 1
"""
# KEYS: lease. ARGV: token, milliseconds (0 gives it back).
_RENEW: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""


class StoreUnavailable(Exception):
    """Redis did not answer."""


class ResponseGone(Exception):
    """The record is lost, or somebody else holds its lease."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to change one record."""

    request_id: str
    token: str


class ResponseStore:
    """The records of one deployment. `secret` makes keys into owners."""

    def __init__(self, config: FrontConfig) -> None:
        assert config.responses_redis_url is not None
        self.secret = config.responses_key_secret
        self.max_bytes = config.responses_max_bytes
        self._life_seconds = config.responses_ttl_seconds
        self._most_per_key = config.responses_per_key
        self._running_life_seconds = (
            max(config.background_budget_seconds, config.stream_budget_seconds)
            + config.responses_ttl_seconds
            + EXTRA_LIFE_SECONDS
        )
        self._client = Redis.from_url(
            config.responses_redis_url,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=REPLY_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        self._leases: dict[str, Lease] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to renew what this process holds."""
        self._renewing = asyncio.create_task(self._renew_for_ever())

    async def close(self) -> None:
        """Give every lease back, so that another process goes on at once."""
        if self._renewing is not None:
            self._renewing.cancel()
        with contextlib.suppress(StoreUnavailable):
            for lease in list(self._leases.values()):
                await self.release(lease)
        await self._client.aclose()

    async def check(self) -> None:
        """Raise StoreUnavailable unless Redis answers."""
        await self._call(self._client.ping())

    async def is_reachable(self) -> bool:
        """Whether Redis answers."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self.check()
        except (StoreUnavailable, TimeoutError):
            return False
        return True

    # --- records

    async def create(self, record: Record) -> Lease | None:
        """Write a record and take its lease; None when there is one of that id already. Raises
        StoreUnavailable.
        """
        lease = Lease(record.request_id, uuid4().hex)
        id_ = record.request_id
        keys = [_key("record", id_), _key("key", record.owner), _key("lease", id_)]
        is_new = await self._run(
            _CREATE,
            keys,
            id_,
            time.time(),
            record.owner,
            record.write_fixed(),
            write_json(record.response),
            record.status,
            int(self._running_life_seconds),
            self._most_per_key,
            lease.token,
            int(LEASE_SECONDS * 1000),
            PREFIX,
        )
        if not is_new:
            return None
        self._leases[id_] = lease
        metrics.oai_stored_responses.add(1, {"outcome": "written"})
        return lease

    async def find(self, request_id: str, owner: str) -> Record | None:
        """A record of this owner; None for one that is not there, or another's. Raises
        StoreUnavailable.
        """
        (record,) = await self.find_all([request_id], owner)
        return record

    async def find_all(self, request_ids: Sequence[str], owner: str) -> list[Record | None]:
        """Several records at once. Raises StoreUnavailable."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for request_id in request_ids:
                pipeline.hmget(_key("record", request_id), ["owner", "fixed", "response"])
            rows = await self._call(pipeline.execute())
        records = [_read(row, owner) for row in rows]
        for record in records:
            outcome = "missing" if record is None else "read"
            metrics.oai_stored_responses.add(1, {"outcome": outcome})
        return records

    async def renew_life(self, records: Sequence[Record]) -> None:
        """Let records live on, since they were used. Raises StoreUnavailable."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for record in records:
                for kind in ("record", "events"):
                    pipeline.expire(_key(kind, record.request_id), self._life_seconds, gt=True)
                pipeline.expire(_key("key", record.owner), self._life_seconds, gt=True)
            await self._call(pipeline.execute())

    async def delete(self, record: Record) -> bool:
        """Forget a record and its events; False when it was gone. Raises StoreUnavailable."""
        id_ = record.request_id
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.delete(_key("record", id_))
            pipeline.delete(_key("events", id_), _key("lease", id_))
            pipeline.zrem(_key("key", record.owner), id_)
            removed = (await self._call(pipeline.execute()))[0]
        self._leases.pop(id_, None)
        if removed:
            metrics.oai_stored_responses.add(1, {"outcome": "deleted"})
        return bool(removed)

    async def write(
        self,
        lease: Lease,
        record: Record,
        *,
        events: Sequence[bytes] = (),
        first_number: int = 0,
        has_changed: bool = True,
    ) -> None:
        """Write the object and further events together. Raises ResponseGone or StoreUnavailable."""
        id_ = record.request_id
        is_over = not record.is_running
        keys = [_key(kind, id_) for kind in ("record", "events", "lease")]
        written = await self._run(
            _WRITE,
            [*keys, _key("key", record.owner)],
            lease.token,
            write_json(record.response) if has_changed else b"",
            record.status,
            int(self._life_seconds if is_over else self._running_life_seconds),
            "1" if is_over else "0",
            first_number,
            *events,
        )
        if is_over or not written:
            self._leases.pop(id_, None)
        if not written:
            raise ResponseGone

    async def read_status(self, request_id: str) -> str | None:
        """Where a response stands; None for one that is gone. Raises StoreUnavailable."""
        status = await self._call(self._client.hget(_key("record", request_id), "status"))
        return None if status is None else status.decode()

    # --- leases

    async def claim(self, request_id: str, *, by_force: bool = False) -> Lease | None:
        """Take the lease of a record that nobody holds, or of anybody; None when it is held.
        Raises StoreUnavailable.
        """
        lease = Lease(request_id, uuid4().hex)
        taken = await self._call(
            self._client.set(
                _key("lease", request_id),
                lease.token,
                nx=not by_force,
                px=int(LEASE_SECONDS * 1000),
            )
        )
        if not taken:
            return None
        self._leases[request_id] = lease
        return lease

    async def release(self, lease: Lease) -> None:
        """Give a lease back. Raises StoreUnavailable."""
        self.drop(lease)
        await self._run(_RENEW, [_key("lease", lease.request_id)], lease.token, 0)

    def drop(self, lease: Lease) -> None:
        """Renew a lease no more: in half a minute another process may go on."""
        if self._leases.get(lease.request_id) == lease:
            del self._leases[lease.request_id]

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            for lease in list(self._leases.values()):
                with contextlib.suppress(StoreUnavailable):
                    await self._run(
                        _RENEW,
                        [_key("lease", lease.request_id)],
                        lease.token,
                        int(LEASE_SECONDS * 1000),
                    )

    # --- events

    async def read_events(
        self, request_id: str, after: int, *, wait_seconds: float = 0.0
    ) -> list[tuple[int, bytes]]:
        """Events with a number above `after`, each with its number; empty when none come in time.
        Raises StoreUnavailable.
        """
        answer = await self._call(
            self._client.xread(
                {_key("events", request_id): f"{after + 1}-0"},
                count=EVENTS_PER_READ,
                block=int(wait_seconds * 1000) or None,
            )
        )
        entries: Any = (
            answer.values() if isinstance(answer, Mapping) else [rows for _, rows in answer or ()]
        )
        return [
            (int(id_.split(b"-")[0]) - 1, fields[b"e"])
            for rows in entries
            for id_, fields in _flatten(rows)
        ]

    # --- calls

    async def _run(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        return await self._call(self._client.eval(script, len(keys), *keys, *arguments))

    @staticmethod
    async def _call(answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except (RedisError, OSError, TimeoutError) as error:
            metrics.oai_stored_responses.add(1, {"outcome": "unavailable"})
            raise StoreUnavailable(type(error).__name__) from None


def _flatten(rows: Any) -> Any:
    """Entries of one stream; newer protocols put them into one more list."""
    return rows[0] if rows and isinstance(rows[0], list) else rows


def _key(kind: str, name: str) -> str:
    return f"{PREFIX}{kind}:{name}"


def _read(row: Sequence[bytes | None], owner: str) -> Record | None:
    stored_owner, fixed, response = row
    if stored_owner is None or fixed is None or response is None:
        return None
    if not hmac.compare_digest(stored_owner, owner.encode()):
        return None
    return Record.read(fixed, response)
