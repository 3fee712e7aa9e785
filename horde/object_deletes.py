# SPDX-License-Identifier: AGPL-3.0-or-later
"""Objects of requests that are gone: deleted from the store, or kept in a set on Redis until they
can be.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from horde import metrics, r2, redis_ctrl
from horde.logger import get_logger
from horde.redis_ctrl import RedisUnavailable

logger = get_logger(__name__)

RETRY_KEY: Final = "horde:chat:image_delete_retry"
MAX_RETRY_KEYS: Final = 100_000
DELETES_A_TICK: Final = 1000
QUEUE_DELETES_SCRIPT: Final = """
local room = tonumber(ARGV[1]) - redis.call('SCARD', KEYS[1])
local left = {}
for i = 2, #ARGV do
    if room > 0 then
        room = room - redis.call('SADD', KEYS[1], ARGV[i])
    elseif redis.call('SISMEMBER', KEYS[1], ARGV[i]) == 0 then
        left[#left + 1] = ARGV[i]
    end
end
return left
"""


def delete_stored_objects(keys: Sequence[str]) -> None:
    """Delete objects whose request is gone; those the store keeps wait in the retry set. Best
    effort.

    Call it after the commit. A key for which neither works is logged, and its object may stay for
    ever. Where no store is configured there is nothing to delete: a request names its images before
    they are stored.
    """
    if not r2.is_configured():
        return
    kept = r2.delete_objects(keys)
    metrics.store_deletes.add(len(keys) - len(kept), {"horde.outcome": "deleted"})
    lost = queue_deletes(kept)
    metrics.store_deletes.add(len(kept) - len(lost), {"horde.outcome": "queued"})
    if lost:
        metrics.store_deletes.add(len(lost), {"horde.outcome": "lost"})
        logger.error("horde.store.delete_lost", extra={"keys": lost})
    _forget_queued_deletes(sorted(set(keys) - set(kept)))


def queue_deletes(keys: Sequence[str]) -> list[str]:
    """Let keys wait for `retry_deletes`. Those that found no place: all of them while
    Redis is away.
    """
    if not r2.is_configured():
        return []
    lost: list[str] = []
    for start in range(0, len(keys), DELETES_A_TICK):
        part = list(keys[start : start + DELETES_A_TICK])
        arguments: list[str | int | float] = [MAX_RETRY_KEYS, *part]
        try:
            left = redis_ctrl.run_script(
                QUEUE_DELETES_SCRIPT, [RETRY_KEY], arguments, redis_ctrl.cache_db
            )
        except RedisUnavailable:
            left = part
        lost.extend(left if isinstance(left, list) else part)
    return lost


def retry_deletes() -> int:
    """Try some of the waiting keys again, drawn at random so that a stubborn one holds up no other;
    how many went.

    Two at once do no harm: a missing object counts as deleted.
    """
    try:
        drawn = redis_ctrl.call(
            redis_ctrl.cache_db,
            lambda client: client.srandmember(RETRY_KEY, DELETES_A_TICK),
        )
    except RedisUnavailable:
        return 0
    keys = [str(key) for key in drawn] if isinstance(drawn, list) else []
    kept = set(r2.delete_objects(keys))
    deleted = [key for key in keys if key not in kept]
    metrics.store_deletes.add(len(deleted), {"horde.outcome": "deleted"})
    _forget_queued_deletes(deleted)
    return len(deleted)


def count_queued_deletes() -> int | None:
    """How many keys wait for their deletion; None while Redis is away."""
    try:
        count = redis_ctrl.call(redis_ctrl.cache_db, lambda client: client.scard(RETRY_KEY))
    except RedisUnavailable:
        return None
    return count if isinstance(count, int) else 0


def find_queued_deletes(keys: Sequence[str]) -> set[str]:
    """Which of these keys wait for their deletion. Raises RedisUnavailable."""
    if not keys:
        return set()
    flags = redis_ctrl.call(
        redis_ctrl.cache_db,
        lambda client: client.smismember(RETRY_KEY, list(keys)),
    )
    return (
        {key for key, is_member in zip(keys, flags, strict=True) if is_member}
        if isinstance(flags, list)
        else set()
    )


def _forget_queued_deletes(keys: Sequence[str]) -> None:
    """Take keys out of the retry set; one that stays in it is deleted once more, which changes
    nothing.
    """
    if keys:
        with suppress(RedisUnavailable):
            redis_ctrl.call(redis_ctrl.cache_db, lambda client: client.srem(RETRY_KEY, *keys))
