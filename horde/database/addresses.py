# SPDX-License-Identifier: AGPL-3.0-or-later
"""Countermeasures by address: timeouts, blocked networks, and the check of a worker's address. All
of it lives in Redis.

Without Redis nobody is timed out and no address is checked: generation goes on.
Source: docs/explanation/countermeasures.md.
"""

import math
import time
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import quote

from redis import Redis

from horde import redis_ctrl
from horde.circuit_breaker import CircuitBreaker
from horde.config import Config
from horde.database.caches import TimedCache
from horde.exceptions import Forbidden
from horde.ip_subject import build_ip_subject
from horde.logger import get_logger
from horde.outbound import OutboundFailed, fetch_text
from horde.pop_epochs import build_address_mark, move_marks
from horde.redis_ctrl import RedisUnavailable
from horde.return_codes import ReturnCode
from horde.runtime import Part
from horde.settings import Network

logger = get_logger(__name__)

BLOCK_KEY_PREFIX = "ipblock_"
BLOCK_LIST_SECONDS = 5.0  # how long another process may not know of a new block
LONGEST_STATED_SECONDS = 4 * 24 * 3600  # beyond it the caller is blocked rather than asked to wait
# What a timeout without an end counts as: the longest a moderator can set.
ENDLESS_SECONDS = 30 * 24 * 3600

SAFE_BELOW_PROBABILITY = 0.93
CHECKER_TIMEOUT_SECONDS = 2.0
# A checker that failed is left alone, or every pop would wait for it in turn.
CHECKER_PAUSE_SECONDS = 10.0
CHECKER_MAX_BYTES = 4096  # it answers with one number
SAFETY_SECONDS = 6 * 3600
SUSPICION_SECONDS = 24 * 3600
REJECTION_SECONDS = 3600
PROCESS_SAFETY_SECONDS = 300.0  # also bounds how long an error of the checker counts as safe
MAX_REMEMBERED_ADDRESSES = 10_000


@dataclass(frozen=True, slots=True)
class AddressTimeout:
    """An address or a network that is refused, and for how many seconds yet."""

    address: str
    seconds: int


@dataclass(frozen=True, slots=True)
class _Block:
    network: Network
    ends_at: float  # on the monotonic clock


_blocks: TimedCache[None, tuple[_Block, ...]] = TimedCache(BLOCK_LIST_SECONDS)
_safety: TimedCache[str, bool] = TimedCache(
    PROCESS_SAFETY_SECONDS, max_entries=MAX_REMEMBERED_ADDRESSES
)
checker = Part(lambda: CircuitBreaker(CHECKER_PAUSE_SECONDS))


def find_timeout_seconds(address: str) -> int | None:
    """Seconds for which nothing is accepted from the address; None when it is free, or Redis is
    away.

    One round trip; blocked networks are read again every few seconds.
    """
    try:
        ask_for_end = ("PTTL", build_ip_subject(address))
        (own,) = redis_ctrl.ask(redis_ctrl.address_timeout_db, ask_for_end)
        return _read_remaining_seconds(own) or _find_block_seconds(address)
    except RedisUnavailable:
        return None


def set_address_timeout(address: str, minutes: float) -> None:
    """Refuse an IPv4 address, or the /64 of an IPv6 address, from now on for so long. Raises
    RedisUnavailable.
    """
    _write_timeout(build_ip_subject(address), minutes)


def block_network(network: Network, minutes: float) -> None:
    """Refuse a whole network from now on for so long; other processes follow in seconds. Raises
    RedisUnavailable.
    """
    _write_timeout(f"{BLOCK_KEY_PREFIX}{network}", minutes)
    _blocks.clear()


def check_address_timeout(address: str, *, for_worker: bool) -> None:
    """Refuse an address in timeout. Raises Forbidden, `TimeoutIP`."""
    _refuse_for(find_timeout_seconds(address), for_worker=for_worker)


def check_network_block(address: str) -> None:
    """Refuse a worker whose network is blocked, as known for some seconds: no round trip. Raises
    Forbidden, `TimeoutIP`.
    """
    try:
        seconds = _find_block_seconds(address)
    except RedisUnavailable:
        return
    _refuse_for(seconds, for_worker=True)


def _refuse_for(seconds: int | None, *, for_worker: bool) -> None:
    if seconds is not None:
        raise Forbidden(
            build_timeout_message(seconds, for_worker=for_worker), ReturnCode.TIMEOUT_IP
        )


def build_timeout_message(seconds: int, *, for_worker: bool) -> str:
    """What the refused caller reads. A long block names no end: it was set by a person, whom the
    caller should ask.
    """
    reason = "workers from it are not served" if for_worker else "requests from it are not accepted"
    if seconds > LONGEST_STATED_SECONDS:
        return f"This address is blocked: {reason}. Contact the operators if this is a mistake."
    return f"This address is in timeout: {reason} for another {seconds} seconds."


def check_worker_address(address: str, *, is_exempt: bool, raid: bool, config: Config) -> None:
    """Refuse a worker behind an anonymising address.

    It may ask a service outside and wait for it: call it with no transaction open.
    `is_exempt`: the owner is trusted, a patron, or may use a VPN. `raid`: unsafe addresses are let
    in, so that a raider learns nothing from the refusal. Raises Forbidden: `TooManyNewIPs` when
    nobody can tell now, `UnsafeIP`.
    """
    if is_exempt or is_safe_worker_address(address, config) or raid:
        return
    raise Forbidden(
        "Workers behind a VPN or proxy need a trusted owner. Connect without it, or ask for the vpn"
        " role.",
        ReturnCode.UNSAFE_IP,
    )


def is_safe_worker_address(address: str, config: Config) -> bool:
    """Whether the checker finds the address ordinary; True when there is none to ask.

    Call it with no transaction open. Raises Forbidden, `TooManyNewIPs`, when the checker cannot
    answer now.
    """
    if not config.ip_checker or _is_whitelisted(address, config.whitelisted_addresses):
        return True
    return _safety.get(build_ip_subject(address), lambda: _read_or_ask_safety(address, config))


def _read_or_ask_safety(address: str, config: Config) -> bool:
    subject = build_ip_subject(address)
    try:
        stored = redis_ctrl.get_json(subject, redis_ctrl.address_safety_db)
    except RedisUnavailable:
        # Answers could not be shared, and asking anew in every process exhausts the checker's
        # quota.
        return True
    if isinstance(stored, bool):
        return stored
    answer = _ask_checker(address, config)
    if answer is None:
        return True
    try:
        redis_ctrl.set_json(subject, answer, SAFETY_SECONDS, redis_ctrl.address_safety_db)
    except RedisUnavailable:
        logger.warning("horde.address_checker.not_stored")
    return answer


def _ask_checker(address: str, config: Config) -> bool | None:
    """Whether the address is safe; None when the checker refuses to say, which is safe but not
    worth storing.
    """
    if not checker.get().admits():
        raise _checker_unavailable()
    url = config.ip_checker.replace("{ip}", quote(address, safe=""))
    try:
        answer = fetch_text(
            url, timeout_seconds=CHECKER_TIMEOUT_SECONDS, max_bytes=CHECKER_MAX_BYTES
        )
        if answer.status == 429:
            raise OutboundFailed("The checker is over its quota.")
        is_safe = (
            _parse_answer(answer.text, config.ip_checker_no_data)
            if 200 <= answer.status < 300
            else None
        )
    except (OutboundFailed, ValueError) as error:
        checker.get().record_failure()
        logger.warning("horde.address_checker.failed", extra={"error_class": type(error).__name__})
        raise _checker_unavailable() from error
    checker.get().record_success()
    return is_safe


def _parse_answer(text: str, no_data: str) -> bool:
    """Read the probability that an address is bad. Raises ValueError when it is no number."""
    if no_data and text.strip() == no_data:
        return True
    probability = float(text)
    if math.isnan(probability):
        raise ValueError("The checker's answer is not a number.")
    return probability < SAFE_BELOW_PROBABILITY


def _checker_unavailable() -> Forbidden:
    return Forbidden(
        "Too many new addresses are being checked right now. Try again later.",
        ReturnCode.TOO_MANY_NEW_IPS,
    )


def _is_whitelisted(address: str, whitelist: tuple[str, ...]) -> bool:
    return address in whitelist or build_ip_subject(address) in whitelist


def _find_block_seconds(address: str) -> int | None:
    try:
        parsed = ip_address(address)
    except ValueError:
        return None
    blocks = _blocks.get(None, _read_blocks)
    now = time.monotonic()
    remaining = [block.ends_at - now for block in blocks if parsed in block.network]
    longest = max(remaining, default=0.0)
    return math.ceil(longest) if longest > 0 else None


def _read_blocks() -> tuple[_Block, ...]:
    """Every blocked network. Raises RedisUnavailable."""
    keys, remaining = redis_ctrl.call(redis_ctrl.address_timeout_db, _read_block_keys)
    now = time.monotonic()
    blocks = (
        _parse_block(key, milliseconds, now)
        for key, milliseconds in zip(keys, remaining, strict=True)
    )
    return tuple(block for block in blocks if block is not None)


def _read_block_keys(client: Redis) -> tuple[list[str], list[int]]:
    keys = list(client.scan_iter(match=f"{BLOCK_KEY_PREFIX}*", count=1000))
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.pttl(key)
    return keys, pipeline.execute()


def _parse_block(key: str, milliseconds: int, now: float) -> _Block | None:
    seconds = _read_remaining_seconds(milliseconds)
    try:
        network = ip_network(key.removeprefix(BLOCK_KEY_PREFIX), strict=False)
    except ValueError:
        return None
    return None if seconds is None else _Block(network, now + seconds)


def _read_remaining_seconds(milliseconds: int) -> int | None:
    """Read the answer of PTTL: -2 for a missing key, -1 for one that never ends."""
    if milliseconds == -1:
        return ENDLESS_SECONDS
    return math.ceil(milliseconds / 1000) if milliseconds > 0 else None


def _write_timeout(key: str, minutes: float) -> None:
    redis_ctrl.call(
        redis_ctrl.address_timeout_db,
        lambda client: client.set(key, "1", px=round(minutes * 60_000)),
    )
    move_marks([build_address_mark(key)])  # an idle worker of the address looks again


# What moderators see and lift


def refuse_network(network: Network, minutes: float) -> None:
    """Refuse a network, or an address as a network of one; of IPv6 at least the /64. Raises
    RedisUnavailable.
    """
    subject = _find_single_subject(network)
    if subject is None:
        block_network(network, minutes)
    else:
        _write_timeout(subject, minutes)


def admit_network(network: Network) -> None:
    """Refuse a network no longer, and forget the suspicion of a single address. Raises
    RedisUnavailable.
    """
    subject = _find_single_subject(network)
    if subject is None:
        redis_ctrl.delete(f"{BLOCK_KEY_PREFIX}{network}", database=redis_ctrl.address_timeout_db)
        _blocks.clear()
        return
    redis_ctrl.delete(subject, database=redis_ctrl.address_timeout_db)
    redis_ctrl.delete(subject, database=redis_ctrl.address_suspicion_db)


def list_blocked_networks() -> list[AddressTimeout]:
    """Every network that is refused, in the order of addresses. Raises RedisUnavailable."""
    blocks = sorted(
        _read_blocks(), key=lambda block: (block.network.version, block.network.network_address)
    )
    now = time.monotonic()
    return [AddressTimeout(str(block.network), math.ceil(block.ends_at - now)) for block in blocks]


def list_timeouts_of(network: Network) -> list[AddressTimeout]:
    """The refused networks that hold a network or an address, and the timeout of the address
    itself. Raises RedisUnavailable.
    """
    holding = [
        timeout
        for timeout in list_blocked_networks()
        if _holds(ip_network(timeout.address), network)
    ]
    subject = _find_single_subject(network)
    if subject is None:
        return holding
    own = redis_ctrl.call(redis_ctrl.address_timeout_db, lambda client: client.pttl(subject))
    seconds = _read_remaining_seconds(own)
    return holding if seconds is None else [*holding, AddressTimeout(subject, seconds)]


def _holds(outer: Network, inner: Network) -> bool:
    return outer.version == inner.version and (
        int(outer.network_address) <= int(inner.network_address)
        and int(inner.broadcast_address) <= int(outer.broadcast_address)
    )


def _find_single_subject(network: Network) -> str | None:
    """Who one address stands for; None for a network, which is refused as one."""
    if network.prefixlen < network.max_prefixlen:
        return None
    return build_ip_subject(str(network.network_address))


# What refused prompts lead to


def count_address_rejection(address: str) -> int:
    """How many prompts from an address were refused within the hour, with this one; 0 without
    Redis.
    """
    return _count(f"rejections:{build_ip_subject(address)}", REJECTION_SECONDS)


def count_reported_prompt(address: str) -> int:
    """How many prompts from an address its workers reported within the hour, with this one; 0
    without Redis.
    """
    return _count(f"reports:{build_ip_subject(address)}", REJECTION_SECONDS)


def count_proxied_rejection(user_id: int) -> int:
    """How many prompts that a service sent for others were refused within the hour, with this one;
    0 without Redis.
    """
    return _count(f"rejections:user:{user_id}", REJECTION_SECONDS)


def punish_address(address: str) -> int:
    """Refuse an address for a while that grows with each time within a day; the minutes, 0 without
    Redis.
    """
    subject = build_ip_subject(address)
    previous = _count(subject, SUSPICION_SECONDS) - 1
    if previous < 0:
        return 0
    minutes = compute_timeout_minutes(previous)
    try:
        _write_timeout(subject, minutes)
    except RedisUnavailable:
        return 0
    return minutes


def compute_timeout_minutes(previous: int) -> int:
    """How long an address is refused that was so often before: 3, 9, 15, 21, …"""
    return 3 * (2 * previous + 1)


def _count(key: str, lifetime_seconds: int) -> int:
    """Count one more under a key that lives so long from its first one; 0 without Redis."""

    def work(client: Redis) -> int:
        pipeline = client.pipeline(transaction=True)
        pipeline.incr(key)
        pipeline.expire(key, lifetime_seconds, nx=True)
        return int(pipeline.execute()[0])

    try:
        return redis_ctrl.call(redis_ctrl.address_suspicion_db, work)
    except RedisUnavailable:
        return 0
