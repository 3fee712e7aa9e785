# SPDX-License-Identifier: AGPL-3.0-or-later
"""Rate limits: fixed windows in Redis, in process memory while Redis is away.

A decorator stands on a method of a resource, so a request is counted before its body is read and
whatever is wrong with it. A method without one has the default limit. Source:
docs/reference/routes.md, "Rate limits".
"""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from flask import Flask, Response, current_app, request
from flask_limiter import Limiter
from limits import parse

from horde import redis_ctrl
from horde.config import Config, build_redis_url
from horde.ip_subject import build_ip_subject

ANONYMOUS_API_KEY = "0000000000"
WHITELIST_SECONDS = 24 * 3600
MAX_WHITELISTED_ADDRESSES = 10_000  # bounds the memory; the oldest goes first

EXTENSION = "horde.limits"
_OWN_LIMIT = "__horde_own_limit__"


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


@dataclass(frozen=True, slots=True)
class _Limits:
    """What the limits of one application need to know."""

    config: Config
    get_address: Callable[[], str]
    whitelist: Whitelist


def init_limiter(app: Flask, config: Config, get_address: Callable[[], str]) -> None:
    """Count the requests of `app`; `get_address` answers with the client's address of the request
    at hand.
    """
    app.extensions[EXTENSION] = _Limits(
        config, get_address, Whitelist(config.whitelisted_addresses)
    )
    app.config["RATELIMIT_ENABLED"] = config.rate_limits_enabled
    app.config["RATELIMIT_STORAGE_URI"] = build_redis_url(config.redis_url, redis_ctrl.limiter_db)
    app.config["RATELIMIT_STORAGE_OPTIONS"] = redis_ctrl.get_client_options()
    app.after_request(_ask_for_a_second_at_least)  # functions registered first run last
    _limiter.init_app(app)
    app.before_request(_count_by_default)


def _ask_for_a_second_at_least(response: Response) -> Response:
    """Correct the library's `Retry-After: 0` of a window's last second: clients would retry at once
    and be refused again.
    """
    if response.headers.get("Retry-After") == "0":
        response.headers["Retry-After"] = "1"
    return response


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
    api_key = request.headers.get("apikey") or ANONYMOUS_API_KEY
    return f"{hashlib.sha256(api_key.encode()).hexdigest()} {request.method} {request.path}"


def _is_whitelisted() -> bool:
    limits = _get_limits()
    return limits.whitelist.holds(limits.get_address())


def _method_has_own_limit() -> bool:
    """Whether the default does not apply to the method that is about to run."""
    view = current_app.view_functions.get(request.endpoint or "")
    method = getattr(getattr(view, "view_class", None), request.method.lower(), None)
    return bool(getattr(method, _OWN_LIMIT, False))


_limiter = Limiter(
    _address_key,
    headers_enabled=True,
    strategy="fixed-window",
    in_memory_fallback_enabled=True,
)


def _limit(*limits: tuple[str | Callable[[], str], Callable[[], str]]) -> Callable[[Any], Any]:
    """A decorator that applies pairs of a limit and the key it counts by."""

    def decorate(method: Any) -> Any:
        for value, key in limits:
            method = _limiter.limit(value, key_func=key)(method)
        setattr(method, _OWN_LIMIT, True)
        return method

    return decorate


def _get_wider(whitelisted: str, read: Callable[[Config], str]) -> str:
    """The wider of two limits: being whitelisted must not narrow what an operator allows
    everybody.
    """
    ordinary = read(_get_limits().config)
    return max(
        whitelisted, ordinary, key=lambda limit: parse(limit).amount / parse(limit).get_expiry()
    )


def _submit_limits(
    read_2sec: Callable[[Config], str], read_90min: Callable[[Config], str]
) -> tuple[tuple[Callable[[], str], Callable[[], str]], ...]:
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
        is_anonymous = request.headers.get("apikey", ANONYMOUS_API_KEY) == ANONYMOUS_API_KEY
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


# The library's own defaults are lost on every method of a view once one of them has a limit and was
# called.
@_limiter.limit(lambda: _get_limits().config.default_limit, key_func=_address_key)
def _count_route() -> None:
    """One request by an address to the route at hand: the library adds the route to the key."""


def _count_by_default() -> None:
    if request.url_rule is not None and not _method_has_own_limit():
        _count_route()


@_limiter.limit("60/second", key_func=_address_key)
def count_refused_progress() -> None:
    """Count a progress post that no lease covers, by its address; the limiter's 429 for too many of
    them.

    Posts with a lease are bounded by its caps, so the route itself has no limit: one address may
    stream many jobs.
    """


def exempt_from_limits(method: Any) -> Any:
    """A decorator for a method that is never counted."""
    setattr(method, _OWN_LIMIT, True)
    return method
