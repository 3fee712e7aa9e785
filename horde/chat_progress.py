# SPDX-License-Identifier: AGPL-3.0-or-later
"""Live progress of streamed chat jobs on Redis: a lease for each job, a stream of entries for each
request.

Whoever holds a lease may post; whoever knows a request's id may read its stream with `XREAD`. All
of it may be lost: the reply itself is always submitted. Every script is one atomic step on one
server, and names the stream's key after what the lease says, so it is not among the script's
declared keys.

Shape of a lease, a hash at `build_lease_key`: request, worker, model, owner, key, max_bytes, fake,
started, job_ttl, lease_cap, trusted; from the first accepted post on seq, bytes, content and
reasoning; cancelled once it is. Shape of an entry: see `StreamEntry`. Times are Unix seconds, sizes
are bytes of UTF-8. Source: docs/reference/chat_requests.md, "Streaming progress".
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from redis import Redis

from horde import redis_ctrl
from horde.logger import get_logger
from horde.redis_ctrl import RedisUnavailable, chat_signal_db

logger = get_logger(__name__)

MAX_CHAT_PROGRESS_ENTRIES: Final = 1000  # a generation's posts; one a second outlasts any reader
CHAT_PROGRESS_BYTES_PER_TOKEN: Final = 16  # a token is a few characters of at most four bytes
STALE_JOBS_PERIOD_SECONDS: Final = 60  # how often jobs past their lease are aborted
# Past the job's lease, so that the pass that aborts it still finds it.
CHAT_PROGRESS_LEASE_GRACE_SECONDS: Final = 90
# From the last entry: the longest reader plus 300 s for a stalled one.
CHAT_PROGRESS_STREAM_TTL_SECONDS: Final = 900
CHAT_PROGRESS_STREAM_MAX_ENTRIES: Final = 4000  # every attempt a request gets; trimmed roughly
# More than any job may post in all. What is larger is refused by its size, without a copy of it in
# Redis.
MAX_CHAT_PROGRESS_POST_BYTES: Final = 1024 * 1024

LEASE_KEY_PREFIX: Final = "horde:chat:lease:"
STREAM_KEY_PREFIX: Final = "horde:chat:stream:"

# Fields of an entry.
GENERATION_FIELD: Final = "gen"
SEQ_FIELD: Final = "seq"
CONTENT_FIELD: Final = "content"
REASONING_FIELD: Final = "reasoning_content"
WORKER_FIELD: Final = "worker"
MODEL_FIELD: Final = "model"
ENDED_FIELD: Final = "ended"
ENDED_MARK: Final = "1"

MAX_SEQ: Final = 2**53  # what Lua counts exactly; a larger number is never the next one either


class PostOutcome(StrEnum):
    """What became of a post."""

    ACCEPTED = "accepted"  # also of one that repeats the last accepted post
    NO_LEASE = "no_lease"
    WRONG_KEY = "wrong_key"
    OUT_OF_SEQUENCE = "out_of_sequence"
    CAP_REACHED = "cap_reached"


class LeaseRenewal(StrEnum):
    """What an appended post did to its job's lease, when it did something that is counted."""

    GRANTED = "granted"  # the deadline moved by a second or more
    AT_CAP = "at_cap"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLease:
    """The right to post progress of one job."""

    generation_id: UUID
    request_id: UUID
    worker_id: UUID
    model: str | None
    owner_id: int
    key: str = field(repr=False)  # of `build_lease_owner_key`
    max_bytes: int
    is_fake: bool
    started: float
    job_ttl: int  # seconds from `started`
    lease_cap: int  # seconds from `started`
    owner_trusted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressPost:
    """One post of a worker, about the text since its previous one."""

    generation_id: UUID
    seq: int
    content: str = field(repr=False)
    reasoning: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResult:
    """What the horde made of a post."""

    outcome: PostOutcome
    seq: int = 0  # the last one accepted
    is_cancelled: bool = False
    is_fake: bool = False
    owner_trusted: bool = False
    renewal: LeaseRenewal | None = None
    job_ttl: int = 0  # the lease in seconds as it is now
    previous_ttl: int = 0  # and as it was before the post
    age_seconds: float = field(default=0.0, compare=False)  # of the job; it differs each time


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEntry:
    """An entry as a reader gets it: text of a generation, or with `is_ended` the end of one that
    brings no reply.
    """

    generation_id: str
    is_ended: bool = False
    seq: int = 0
    content: str = ""
    reasoning_content: str = ""
    worker_id: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class PostedProgress:
    """What a worker posted of one generation, as far as Redis still knows. Reasoning is not in
    `content`.
    """

    content: str | None  # None when the stream does not hold every entry
    accepted_bytes: int = 0

    @property
    def character_count(self) -> int:
        """Characters to price it by: of the content, else the bytes accepted, which overstate them
        at times.
        """
        return self.accepted_bytes if self.content is None else len(self.content)


def build_lease_key(generation_id: UUID | str) -> str:
    """Where the lease of a job is."""
    return f"{LEASE_KEY_PREFIX}{generation_id}"


def build_stream_key(request_id: UUID | str) -> str:
    """Where the stream of a request is, on logical database `redis_ctrl.chat_signal_db`."""
    return f"{STREAM_KEY_PREFIX}{request_id}"


def build_lease_owner_key(stored_key: str) -> str:
    """What a lease keeps of its owner's key: a hash of the hash that the account stores."""
    return hashlib.sha256(stored_key.encode()).hexdigest()


def compute_max_progress_bytes(max_length: int) -> int:
    """How much a job of so many tokens may post in all, in bytes."""
    return CHAT_PROGRESS_BYTES_PER_TOKEN * max_length


def parse_stream_entry(fields: Mapping[str, str]) -> StreamEntry:
    """An entry from the fields that `XREAD` or `XRANGE` gave, decoded; whatever is missing is
    empty.
    """
    seq = fields.get(SEQ_FIELD, "")
    return StreamEntry(
        generation_id=fields.get(GENERATION_FIELD, ""),
        is_ended=fields.get(ENDED_FIELD) == ENDED_MARK,
        seq=int(seq) if seq.isascii() and seq.isdecimal() else 0,
        content=fields.get(CONTENT_FIELD, ""),
        reasoning_content=fields.get(REASONING_FIELD, ""),
        worker_id=fields.get(WORKER_FIELD),
        model=fields.get(MODEL_FIELD),
    )


# The lease


def write_stream_lease(lease: StreamLease) -> None:
    """Let a job's worker post. Best effort: without a lease the worker is told to stop posting and
    to submit.
    """
    key = build_lease_key(lease.generation_id)
    fields: dict[str, str | int] = {
        "request": str(lease.request_id),
        "worker": str(lease.worker_id),
        "owner": lease.owner_id,
        "key": lease.key,
        "max_bytes": lease.max_bytes,
        "fake": int(lease.is_fake),
        "started": f"{lease.started:.6f}",
        "job_ttl": lease.job_ttl,
        "lease_cap": lease.lease_cap,
        "trusted": int(lease.owner_trusted),
    }
    if lease.model is not None:
        fields["model"] = lease.model

    def write(client: Redis) -> None:
        with client.pipeline(transaction=True) as steps:
            steps.delete(key)
            steps.hset(key, mapping=fields)  # type: ignore[arg-type]
            steps.expire(key, lease.job_ttl + CHAT_PROGRESS_LEASE_GRACE_SECONDS)
            steps.execute()

    _try(write, "write_lease")


def delete_stream_lease(generation_id: UUID) -> None:
    """End the posts of a submitted job; its entries stay for readers to compare with the reply.
    Best effort.
    """
    _try(lambda client: client.delete(build_lease_key(generation_id)), "delete_lease")


# Posting

# KEYS: the lease. ARGV: key, seq, content, reasoning, size of both, now, generation, base lease in
# seconds. Returns {outcome, last accepted seq, cancelled, fake, trusted, renewal, job_ttl, job_ttl
# before the post, age of the job in milliseconds}.
APPEND_PROGRESS_SCRIPT: Final = f"""
local names = {{'request', 'key', 'seq', 'content', 'reasoning', 'bytes', 'max_bytes', 'fake',
    'cancelled', 'started',
    'job_ttl', 'lease_cap', 'trusted', 'worker', 'model'}}
local values = redis.call('HMGET', KEYS[1], unpack(names))
local lease = {{}}
for index, name in ipairs(names) do
    if values[index] then lease[name] = values[index] end
end
if not lease.request then return {{'{PostOutcome.NO_LEASE}'}} end
if lease.key ~= ARGV[1] then return {{'{PostOutcome.WRONG_KEY}'}} end

local seq, size, now = tonumber(ARGV[2]), tonumber(ARGV[5]), tonumber(ARGV[6])
local last = tonumber(lease.seq or 0)
local ttl, cap = tonumber(lease.job_ttl), tonumber(lease.lease_cap)
local previous_ttl = ttl
local is_fake, is_cancelled = lease.fake == '1', lease.cancelled == '1'
local age = math.floor((now - tonumber(lease.started)) * 1000 + 0.5) / 1000
-- No pass aborts a fake, so its lease outlives what a real job's can.
if is_fake and not is_cancelled and age > ttl + {STALE_JOBS_PERIOD_SECONDS} then
    return {{'{PostOutcome.NO_LEASE}'}}
end

local function answer(outcome, accepted, renewal)
    return {{outcome, accepted, is_cancelled and 1 or 0, is_fake and 1 or 0,
        lease.trusted == '1' and 1 or 0, renewal, ttl,
        previous_ttl, math.floor(age * 1000)}}
end

if seq == last and last > 0 and lease.content == ARGV[3] and lease.reasoning == ARGV[4] then
    return answer('{PostOutcome.ACCEPTED}', last, '')
end
if seq ~= last + 1 then return answer('{PostOutcome.OUT_OF_SEQUENCE}', last, '') end
local bytes = tonumber(lease.bytes or 0) + size
if seq > {MAX_CHAT_PROGRESS_ENTRIES} or bytes > tonumber(lease.max_bytes) then
    return answer('{PostOutcome.CAP_REACHED}', last, '')
end

redis.call('HSET', KEYS[1], 'seq', seq, 'bytes', bytes, 'content', ARGV[3], 'reasoning', ARGV[4])
if not is_fake then
    local stream = '{STREAM_KEY_PREFIX}' .. lease.request
    local entry = {{stream, 'MAXLEN', '~', {CHAT_PROGRESS_STREAM_MAX_ENTRIES}, '*',
        '{GENERATION_FIELD}', ARGV[7],
        '{SEQ_FIELD}', seq, '{CONTENT_FIELD}', ARGV[3]}}
    local function add(name, value)
        entry[#entry + 1] = name
        entry[#entry + 1] = value
    end
    if ARGV[4] ~= '' then add('{REASONING_FIELD}', ARGV[4]) end
    if lease.worker then add('{WORKER_FIELD}', lease.worker) end
    if lease.model then add('{MODEL_FIELD}', lease.model) end
    redis.call('XADD', unpack(entry))
    redis.call('EXPIRE', stream, {CHAT_PROGRESS_STREAM_TTL_SECONDS})
end

local renewal = ''
if not is_cancelled and age <= ttl then
    local renewed = math.min(math.ceil(age + tonumber(ARGV[8])), cap)
    if ttl >= cap then
        renewal = '{LeaseRenewal.AT_CAP}'
    elseif renewed > ttl then
        ttl = renewed
        renewal = '{LeaseRenewal.GRANTED}'
        redis.call('HSET', KEYS[1], 'job_ttl', ttl)
        redis.call('PEXPIRE', KEYS[1],
            math.ceil((ttl - age + {CHAT_PROGRESS_LEASE_GRACE_SECONDS}) * 1000))
    end
end
return answer('{PostOutcome.ACCEPTED}', seq, renewal)
"""


def append_progress(
    post: ProgressPost, *, key: str, now: float, base_lease_seconds: int
) -> AppendResult:
    """Check a post against its lease and append it, in one step of Redis.

    A post that repeats the last accepted one is accepted again and changes nothing. An appended one
    moves the job's lease to end `base_lease_seconds` after `now`, in whole seconds up to the cap,
    unless it lapsed or was cancelled: what moved has to be written to the job's row too. Raises
    RedisUnavailable.
    """
    size = len(post.content.encode()) + len(post.reasoning.encode())
    is_huge = size > MAX_CHAT_PROGRESS_POST_BYTES
    arguments: list[str | int | float] = [
        key,
        min(post.seq, MAX_SEQ),
        "" if is_huge else post.content,
        "" if is_huge else post.reasoning,
        size,
        f"{now:.6f}",
        str(post.generation_id),
        base_lease_seconds,
    ]
    answer: Any = redis_ctrl.run_script(
        APPEND_PROGRESS_SCRIPT,
        [build_lease_key(post.generation_id)],
        arguments,
        database=chat_signal_db,
    )
    outcome = PostOutcome(answer[0])
    if len(answer) == 1:
        return AppendResult(outcome=outcome)
    _, seq, is_cancelled, is_fake, is_trusted, renewal, job_ttl, previous_ttl, age = answer
    return AppendResult(
        outcome=outcome,
        seq=seq,
        is_cancelled=bool(is_cancelled),
        is_fake=bool(is_fake),
        owner_trusted=bool(is_trusted),
        renewal=LeaseRenewal(renewal) if renewal else None,
        job_ttl=job_ttl,
        previous_ttl=previous_ttl,
        age_seconds=age / 1000,
    )


# KEYS: the lease. ARGV: the lease in seconds that a post made of it, and what it was before.
# Another post may have moved it on.
_TAKE_BACK_SCRIPT: Final = """
if redis.call('HGET', KEYS[1], 'job_ttl') == ARGV[1] then
    redis.call('HSET', KEYS[1], 'job_ttl', ARGV[2])
end
return 1
"""


def take_back_renewal(generation_id: UUID, appended: AppendResult) -> None:
    """Forget a deadline that could not be written to the job's row, so that the next post moves it
    again. Best effort.

    Without it a lease at its cap would never be written: no later post moves that one.
    """
    ttls = [str(appended.job_ttl), str(appended.previous_ttl)]
    _try_script(_TAKE_BACK_SCRIPT, [build_lease_key(generation_id)], ttls, "take_back_renewal")


# Ending

# An entry that says that a generation brings no reply; the stream's life starts again with it.
_MARK_ENDED: Final = f"""
local function mark_ended(request, generation)
    local stream = '{STREAM_KEY_PREFIX}' .. request
    redis.call('XADD', stream, 'MAXLEN', '~', {CHAT_PROGRESS_STREAM_MAX_ENTRIES}, '*',
        '{GENERATION_FIELD}', generation, '{ENDED_FIELD}', '{ENDED_MARK}')
    redis.call('EXPIRE', stream, {CHAT_PROGRESS_STREAM_TTL_SECONDS})
end
"""

# KEYS: the lease. ARGV: generation. A cancelled lease has its marker already.
_END_SCRIPT: Final = f"""
{_MARK_ENDED}
local lease = redis.call('HMGET', KEYS[1], 'request', 'fake', 'cancelled')
if lease[1] and lease[2] ~= '1' and lease[3] ~= '1' then mark_ended(lease[1], ARGV[1]) end
return redis.call('DEL', KEYS[1])
"""

# KEYS: the leases. ARGV: their generations. A lease that is flagged already is left as it is.
_CANCEL_SCRIPT: Final = f"""
{_MARK_ENDED}
for index, key in ipairs(KEYS) do
    local lease = redis.call('HMGET', key, 'request', 'fake', 'cancelled')
    if lease[1] and lease[3] ~= '1' then
        redis.call('HSET', key, 'cancelled', '1')
        if lease[2] ~= '1' then mark_ended(lease[1], ARGV[index]) end
    end
end
return #KEYS
"""


def end_progress_stream(generation_id: UUID) -> None:
    """Tell readers that a faulted generation brings no reply, and end its posts. Nothing without a
    lease. Best effort.
    """
    key, generation = build_lease_key(generation_id), str(generation_id)
    _try_script(_END_SCRIPT, [key], [generation], "end_stream")


def cancel_progress_streams(generation_ids: Sequence[UUID]) -> None:
    """Flag the leases of a cancelled request's generations and mark their ends, in one step. Best
    effort.

    Leases stay, so that each worker learns of it by its next post; none is made where there is
    none.
    """
    if generation_ids:
        keys = [build_lease_key(generation_id) for generation_id in generation_ids]
        _try_script(
            _CANCEL_SCRIPT,
            keys,
            [str(generation_id) for generation_id in generation_ids],
            "cancel_streams",
        )


def read_posted_progress(
    request_id: UUID, generation_ids: Sequence[UUID]
) -> dict[UUID, PostedProgress]:
    """What was posted of each generation of a request; empty when Redis cannot tell, and then
    nothing counts as posted.
    """
    if not generation_ids:
        return {}

    def read(client: Redis) -> list[Any]:
        with client.pipeline(transaction=True) as steps:
            steps.xrange(build_stream_key(request_id))
            for generation_id in generation_ids:
                steps.hmget(build_lease_key(generation_id), ["seq", "bytes"])
            return steps.execute()

    try:
        entries, *leases = redis_ctrl.call(chat_signal_db, read)
    except RedisUnavailable:
        logger.warning("horde.chat_progress.failed", extra={"step": "read_posted"})
        return {}
    posted = [parse_stream_entry(fields) for _, fields in entries]
    return {
        generation_id: _join_posted(
            [
                entry
                for entry in posted
                if entry.generation_id == str(generation_id) and not entry.is_ended
            ],
            accepted_count=int(lease[0] or 0),
            accepted_bytes=int(lease[1] or 0),
        )
        for generation_id, lease in zip(generation_ids, leases, strict=True)
    }


def _join_posted(
    entries: Sequence[StreamEntry], *, accepted_count: int, accepted_bytes: int
) -> PostedProgress:
    """The content in the order of the posts; the bytes stand in when entries were trimmed or
    expired.
    """
    if len(entries) < accepted_count:
        return PostedProgress(None, accepted_bytes)
    ordered = sorted(entries, key=lambda entry: entry.seq)
    return PostedProgress("".join(entry.content for entry in ordered), accepted_bytes)


def _try(work: Callable[[Redis], object], step: str) -> None:
    """Run a write whose failure must not change what the caller answers."""
    try:
        redis_ctrl.call(chat_signal_db, work)
    except RedisUnavailable:
        logger.warning("horde.chat_progress.failed", extra={"step": step})


def _try_script(script: str, keys: Sequence[str], arguments: Sequence[str], step: str) -> None:
    _try(lambda client: client.register_script(script)(keys=list(keys), args=list(arguments)), step)
