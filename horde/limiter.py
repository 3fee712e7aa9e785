# SPDX-License-Identifier: AGPL-3.0-or-later
"""Rate limits: fixed windows in Redis, in process memory while Redis is away.

A decorator stands on a method of a resource, so a request is counted before its body is read and
whatever is wrong with it. A method without one has the default limit. Source:
docs/reference/routes.md, "Rate limits".
"""

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flask import Flask, Response, current_app, g, request
from limits import RateLimitItem, parse_many
from werkzeug.exceptions import TooManyRequests

from horde import redis_ctrl
from horde.config import Config
from horde.ip_subject import build_ip_subject
from horde.redis_ctrl import RedisUnavailable
from horde.shapes.users import ANONYMOUS_KEY

WHITELIST_SECONDS = 24 * 3600
MAX_WHITELISTED_ADDRESSES = 10_000  # bounds the memory; the oldest goes first
MAX_OWN_WINDOWS = 100_000  # bounds the memory; the one counted longest ago goes first

EXTENSION = "horde.limits"
_OWN_LIMIT = "__horde_own_limit__"
_COUNTED = "horde_counted_limit"  # of the request at hand, for its headers

# Counts a request in each of its windows, up to the first that is full.
# KEYS: the windows. ARGV: for each its amount and its seconds.
# Answers with the count and the milliseconds left of each window it counted in.
_COUNT_SCRIPT = """
local answer = {}
for place, key in ipairs(KEYS) do
    local count = redis.call('INCR', key)
    local left = redis.call('PTTL', key)
    if left < 0 then
        left = 1000 * ARGV[2 * place]
        redis.call('PEXPIRE', key, left)
    end
    answer[#answer + 1] = count
    answer[#answer + 1] = left
    if count > tonumber(ARGV[2 * place - 1]) then
        break
    end
end
return answer
"""


class Whitelist:
    """Addresses with wider limits: those of the settings for ever, others for a day. Safe for
    threads.
    """

    def __init__(
        self, permanent: tuple[str, ...], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._permanent, self._clock = frozenset(permanent), clock
        self._lock = threading.Lock()
        self._expiry: dict[str, float] = {}  # in order of insertion, hence of expiry

    def add(self, address: str) -> None:
        """Widen the limits of an address for a day from now."""
        with self._lock:
            self._expiry.pop(address, None)
            self._expiry[address] = self._clock() + WHITELIST_SECONDS
            if len(self._expiry) > MAX_WHITELISTED_ADDRESSES:
                del self._expiry[next(iter(self._expiry))]

    def holds(self, address: str) -> bool:
        """Whether the address has wider limits now."""
        return address in self._permanent or self.holds_for_a_day(address)

    def holds_for_a_day(self, address: str) -> bool:
        """Whether it has them because of who generated from it."""
        return self._expiry.get(address, 0.0) > self._clock()


class OwnWindows:
    """Fixed windows in this process's memory.

    The storage of `limits` is not used: its threads clear windows away without a lock, and one that
    meets another ends with a KeyError.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[str, tuple[int, float]] = {}

    def count(self, key: str, seconds: int) -> tuple[int, float]:
        """Count one request. Returns the window's count and when it ends, in Unix seconds."""
        with self._lock:
            now = self._clock()
            count, resets_at = self._windows.pop(key, (0, 0.0))
            if resets_at <= now:
                count, resets_at = 0, now + seconds

            self._windows[key] = count + 1, resets_at
            if len(self._windows) > MAX_OWN_WINDOWS:
                self._forget_ended(now)
            return count + 1, resets_at

    def _forget_ended(self, now: float) -> None:
        """Keep the windows that still count; when those are too many, the ones counted last."""
        running = [(key, window) for key, window in self._windows.items() if window[1] > now]
        self._windows = dict(running[-MAX_OWN_WINDOWS // 2 :])


@dataclass(frozen=True, slots=True)
class _Limits:
    """What the limits of one application need to know."""

    config: Config
    get_address: Callable[[], str]
    whitelist: Whitelist
    own_memory: "OwnWindows"  # where windows are counted while Redis is away


@dataclass(frozen=True, slots=True)
class _Window:
    """One limit of a request, and under which key it is counted."""

    limit: RateLimitItem
    key: str


@dataclass(frozen=True, slots=True)
class CountedRequest:
    """The window that a request is told of: the full one, else the shortest."""

    limit: RateLimitItem
    count: int
    resets_at: float  # Unix seconds

    @property
    def is_over(self) -> bool:
        """Whether the request is refused."""
        return self.count > self.limit.amount

    def write_headers(self, response: Response) -> None:
        """Tell a client what is left, and when it starts anew."""
        remaining = max(self.limit.amount - self.count, 0)
        resets_at = int(self.resets_at + 1)
        response.headers["X-RateLimit-Limit"] = str(self.limit.amount)
        response.headers["X-RateLimit-Remaining"] = str(remaining)
        response.headers["X-RateLimit-Reset"] = str(resets_at)
        # A client that is told 0 would retry at once and be refused again.
        response.headers["Retry-After"] = str(max(int(resets_at - time.time()), 1))


def init_limiter(app: Flask, config: Config, get_address: Callable[[], str]) -> None:
    """Count the requests of `app`; `get_address` answers with the client's address of the request
    at hand.
    """
    app.extensions[EXTENSION] = _Limits(
        config, get_address, Whitelist(config.whitelisted_addresses), OwnWindows()
    )
    if config.rate_limits_enabled:
        app.before_request(_count_by_default)
        app.after_request(_write_limit_headers)


def whitelist_address(address: str) -> None:
    """Widen the limits of an address for a day, because a trusted, education or service user
    generated from it.
    """
    _get_limits().whitelist.add(address)


def _get_limits() -> _Limits:
    return cast(_Limits, current_app.extensions[EXTENSION])


def _address_key() -> str:
    return build_ip_subject(_get_limits().get_address())


def _path_key() -> str:
    """Address, method and path: each id in a path has a budget of its own."""
    return f"{_address_key()} {request.method} {request.path}"


def _key_key() -> str:
    """Key, method and path. Only a hash of the key reaches Redis."""
    api_key = request.headers.get("apikey") or ANONYMOUS_KEY
    return f"{hashlib.sha256(api_key.encode()).hexdigest()} {request.method} {request.path}"


def _key_alone() -> str:
    """Key and method, whatever stands in the path."""
    return _key_key().removesuffix(f" {request.path}")


def _is_whitelisted() -> bool:
    limits = _get_limits()
    return limits.whitelist.holds(limits.get_address())


def _method_has_own_limit() -> bool:
    """Whether the default does not apply to the method that is about to run."""
    view = current_app.view_functions.get(request.endpoint or "")
    method = getattr(getattr(view, "view_class", None), request.method.lower(), None)
    return bool(getattr(method, _OWN_LIMIT, False))


type _Rule = tuple[str | Callable[[], str], Callable[[], str]]
"""The limits of a request or what reads them, and what names who is counted."""


def _limit(*rules: _Rule) -> Callable[[Any], Any]:
    """A decorator that counts a call of a route's method by these rules."""

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def counted(*arguments: Any, **options: Any) -> Any:
            count_request(*rules)
            return method(*arguments, **options)

        setattr(counted, _OWN_LIMIT, True)
        return counted

    return decorate


def count_request(*rules: _Rule) -> None:
    """Count the request at hand, in one round trip; the 429 of the first window that is full."""
    limiting = _get_limits()
    if not limiting.config.rate_limits_enabled:
        return
    scope = request.endpoint or ""
    windows = [
        _Window(limit, limit.key_for(get_subject(), scope))
        for limits_text, get_subject in rules
        for limit in _parse_limits(limits_text() if callable(limits_text) else limits_text)
    ]
    windows.sort(key=lambda window: window.limit.get_expiry())
    counted = _count(windows, limiting.own_memory)
    setattr(g, _COUNTED, counted)
    if counted.is_over:
        raise TooManyRequests(str(counted.limit))


@functools.lru_cache(maxsize=1000)
def _parse_limits(text: str) -> list[RateLimitItem]:
    return parse_many(text)


def _count(windows: Sequence[_Window], own_memory: "OwnWindows") -> CountedRequest:
    """Count in Redis, in the process's own memory while it is away."""
    arguments = [
        number for window in windows for number in (window.limit.amount, window.limit.get_expiry())
    ]
    try:
        answer: Any = redis_ctrl.run_script(
            _COUNT_SCRIPT,
            [window.key for window in windows],
            arguments,
            redis_ctrl.limiter_db,
        )
    except RedisUnavailable:
        return _count_in_memory(windows, own_memory)
    now = time.time()
    counted = [
        CountedRequest(window.limit, count, now + left / 1000)
        for window, count, left in zip(windows, answer[::2], answer[1::2], strict=False)
    ]
    return counted[-1] if counted[-1].is_over else counted[0]


def _count_in_memory(windows: Sequence[_Window], memory: "OwnWindows") -> CountedRequest:
    first = None
    for window in windows:
        count, resets_at = memory.count(window.key, window.limit.get_expiry())
        counted = CountedRequest(window.limit, count, resets_at)
        if counted.is_over:
            return counted
        first = first or counted
    if first is None:
        raise ValueError("a request is counted by at least one limit")
    return first


def _write_limit_headers(response: Response) -> Response:
    counted = g.get(_COUNTED)
    if counted is not None:
        counted.write_headers(response)
    return response


def _get_wider(whitelisted: str, read: Callable[[Config], str]) -> str:
    """The wider of two limits: being whitelisted must not narrow what an operator allows
    everybody.
    """
    return max(whitelisted, read(_get_limits().config), key=_get_rate)


def _get_rate(text: str) -> float:
    """Requests a second that limits allow at most."""
    return min(limit.amount / limit.get_expiry() for limit in _parse_limits(text))


def _submit_limits(
    read_2sec: Callable[[Config], str], read_90min: Callable[[Config], str]
) -> tuple[_Rule, ...]:
    """The three limits of a generate route; whitelisted addresses and the shared anonymous key have
    wider ones.

    The limit by key is that of text on either route, so that raising the chat limit of an address
    that many share does not raise what one account may send.
    """

    def by_path_a_minute() -> str:
        return (
            _get_wider("300/minute", read_90min)
            if _is_whitelisted()
            else read_90min(_get_limits().config)
        )

    def by_path_a_second() -> str:
        return (
            _get_wider("10/second", read_2sec)
            if _is_whitelisted()
            else read_2sec(_get_limits().config)
        )

    def by_key_a_second() -> str:
        limits = _get_limits()
        is_anonymous = request.headers.get("apikey", ANONYMOUS_KEY) == ANONYMOUS_KEY
        if is_anonymous or limits.whitelist.holds_for_a_day(limits.get_address()):
            return "60/second"
        return limits.config.text_request_2sec_limit

    return (by_path_a_minute, _path_key), (by_path_a_second, _path_key), (by_key_a_second, _key_key)


limit_text_submit = _limit(
    *_submit_limits(
        lambda config: config.text_request_2sec_limit,
        lambda config: config.text_request_90min_limit,
    )
)
limit_chat_submit = _limit(
    *_submit_limits(
        lambda config: config.chat_request_2sec_limit,
        lambda config: config.chat_request_90min_limit,
    )
)
limit_status_read = _limit((lambda: _get_limits().config.status_read_limit, _path_key))
limit_status_delete = _limit((lambda: _get_limits().config.status_delete_limit, _path_key))
limit_pop = _limit(("60/second", _address_key))
limit_submit = _limit(("60/second", _address_key))
limit_user = _limit(("60/minute", _path_key))
limit_user_list = _limit(("90/minute", _address_key))
# Accounts are free, so they are not made by the thousand.
limit_kudos_transfer = _limit(
    ("1/second", _key_key),
    (lambda: "600/hour" if _is_whitelisted() else "90/hour", _key_key),
)
limit_register = _limit(("10/minute", _path_key))
limit_worker = _limit(("30/minute", _path_key))
limit_team = _limit(("30/minute", _path_key))
limit_style_create = _limit(("20/hour", _path_key), ("2/second", _path_key))
limit_style_change = _limit(("90/minute", _path_key), ("2/second", _path_key))
limit_sharedkey_create = _limit(("5/minute", _path_key))
limit_modes = _limit(("30/minute", _path_key))
limit_evidence_read = _limit(("120/minute", _key_alone))
limit_evidence_note = _limit(("30/minute", _key_alone))


def _count_by_default() -> None:
    if request.url_rule is not None and not _method_has_own_limit():
        count_request((lambda: _get_limits().config.default_limit, _address_key))


def count_refused_progress() -> None:
    """Count a progress post that no lease covers, by its address; the limiter's 429 for too many of
    them.

    Posts with a lease are bounded by its caps, so the route itself has no limit: one address may
    stream many jobs.
    """
    count_request(("60/second", _address_key))


def exempt_from_limits(method: Any) -> Any:
    """A decorator for a method that is never counted."""
    setattr(method, _OWN_LIMIT, True)
    return method
