# SPDX-License-Identifier: AGPL-3.0-or-later
"""Timeouts, blocks and the check of worker addresses, on a real Redis and a checker of our own."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_network

import pytest

from devtools.services import ServiceAddresses
from horde import redis_ctrl
from horde.config import Config
from horde.database import addresses, caches
from horde.exceptions import Forbidden
from horde.return_codes import ReturnCode

NOBODY = "redis://127.0.0.1:1"  # no server listens there
ADDRESS = "198.51.100.7"


def build_config(redis_url: str, checker: str = "", **settings: object) -> Config:
    return Config(
        database_url="", secret_key="test", redis_url=redis_url, ip_checker=checker, **settings
    )  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def redis(service_urls: ServiceAddresses) -> Iterator[str]:
    """An empty Redis of address facts, and a process that remembers none."""
    caches.clear_all()
    addresses.checker.get().record_success()
    redis_ctrl.connect(build_config(service_urls.redis_url))
    for database in (redis_ctrl.address_timeout_db, redis_ctrl.address_safety_db):
        redis_ctrl.call(database, lambda client: client.flushdb())
    yield service_urls.redis_url
    redis_ctrl.disconnect()
    caches.clear_all()


class Checker:
    """An address checker whose answer a test chooses; it keeps the paths it was asked for."""

    def __init__(self) -> None:
        self.status, self.body, self.paths = 200, "0", list[str]()
        checker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                checker.paths.append(self.path)
                self.send_response(checker.status)
                self.end_headers()
                self.wfile.write(checker.body.encode())

            def log_message(self, *_: object) -> None:
                """Keep the output of the tests clean."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/check?ip={{ip}}"


@pytest.fixture
def checker() -> Iterator[Checker]:
    """A running checker."""
    checker = Checker()
    thread = threading.Thread(target=checker.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield checker
    checker.server.shutdown()
    thread.join()
    checker.server.server_close()


def refusal(
    address: str, config: Config, *, is_exempt: bool = False, raid: bool = False
) -> ReturnCode | None:
    try:
        addresses.check_worker_address(address, is_exempt=is_exempt, raid=raid, config=config)
    except Forbidden as error:
        return error.rc
    return None


def test_an_unknown_address_is_free() -> None:
    assert addresses.find_timeout_seconds(ADDRESS) is None
    addresses.check_address_timeout(ADDRESS, for_worker=False)


def test_a_timed_out_address_is_refused_with_its_remaining_seconds() -> None:
    addresses.set_address_timeout(ADDRESS, 3)
    assert addresses.find_timeout_seconds(ADDRESS) == pytest.approx(180, abs=2)
    assert addresses.find_timeout_seconds("198.51.100.8") is None
    with pytest.raises(Forbidden, match=r"1(80|79|78) seconds") as error:
        addresses.check_address_timeout(ADDRESS, for_worker=False)
    assert (error.value.status, error.value.rc) == (403, ReturnCode.TIMEOUT_IP)


def test_workers_and_requesters_read_different_words() -> None:
    texts = {
        addresses.build_timeout_message(60, for_worker=for_worker) for for_worker in (True, False)
    }
    assert len(texts) == 2


def test_a_long_block_does_not_state_its_end() -> None:
    days = 4 * 24 * 3600
    assert str(days) in addresses.build_timeout_message(days, for_worker=True)
    assert str(days + 1) not in addresses.build_timeout_message(days + 1, for_worker=True)


def test_a_timeout_covers_the_household_of_an_ipv6_address() -> None:
    addresses.set_address_timeout("2001:db8:1:2::3", 3)
    assert addresses.find_timeout_seconds("2001:db8:1:2:ffff::9") is not None
    assert addresses.find_timeout_seconds("2001:db8:1:3::3") is None


@pytest.mark.parametrize(
    ("network", "inside", "outside"),
    [
        ("198.51.100.0/24", ADDRESS, "198.51.101.7"),
        ("2001:db8::/32", "2001:db8:5::1", "2001:db9::1"),
    ],
)
def test_a_blocked_network_is_refused(network: str, inside: str, outside: str) -> None:
    # The list of blocks is remembered from here on.
    assert addresses.find_timeout_seconds(inside) is None
    addresses.block_network(ip_network(network), 60)
    assert addresses.find_timeout_seconds(inside) == pytest.approx(3600, abs=2)
    assert addresses.find_timeout_seconds(outside) is None


def test_keys_that_other_hordes_wrote_are_understood() -> None:
    redis_ctrl.call(
        redis_ctrl.address_timeout_db, lambda client: client.set("ipblock_198.51.100.9/24", "1")
    )
    redis_ctrl.call(
        redis_ctrl.address_timeout_db, lambda client: client.set("ipblock_nonsense", "1", ex=60)
    )
    assert addresses.find_timeout_seconds(ADDRESS) == addresses.ENDLESS_SECONDS


def test_a_known_block_list_costs_one_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses.find_timeout_seconds(ADDRESS)
    calls, call = [], redis_ctrl.call
    monkeypatch.setattr(
        redis_ctrl, "call", lambda database, work: (calls.append(database), call(database, work))[1]
    )
    addresses.find_timeout_seconds(ADDRESS)
    assert calls == [redis_ctrl.address_timeout_db]


@pytest.mark.parametrize("address", ["", "unix:", "no address"])
def test_what_is_no_address_is_free(address: str) -> None:
    assert addresses.find_timeout_seconds(address) is None


def test_without_redis_nobody_is_timed_out_or_checked(checker: Checker) -> None:
    redis_ctrl.connect(build_config(NOBODY))
    checker.body = "1"
    assert addresses.find_timeout_seconds(ADDRESS) is None
    assert refusal(ADDRESS, build_config(NOBODY, checker.url)) is None
    assert checker.paths == []


@pytest.mark.parametrize(
    ("status", "body", "rc"),
    [
        (200, "0.92", None),
        (200, "0.93", ReturnCode.UNSAFE_IP),
        (200, " 1\n", ReturnCode.UNSAFE_IP),
        (200, "7", None),  # the "no data" answer of the settings
        (200, "what?", ReturnCode.TOO_MANY_NEW_IPS),
        (200, "nan", ReturnCode.TOO_MANY_NEW_IPS),
        (200, "0" * 5000, ReturnCode.TOO_MANY_NEW_IPS),
        (429, "0", ReturnCode.TOO_MANY_NEW_IPS),
        (302, "1", None),
        (500, "1", None),
    ],
)
def test_the_answer_of_the_checker_decides(
    redis: str, checker: Checker, status: int, body: str, rc: ReturnCode | None
) -> None:
    checker.status, checker.body = status, body
    assert refusal(ADDRESS, build_config(redis, checker.url, ip_checker_no_data="7")) == rc
    assert checker.paths == [f"/check?ip={ADDRESS}"]


def test_an_answer_is_shared_and_asked_for_once(redis: str, checker: Checker) -> None:
    config = build_config(redis, checker.url)
    checker.body = "1"
    assert refusal(ADDRESS, config) == refusal(ADDRESS, config) == ReturnCode.UNSAFE_IP
    caches.clear_all()  # as another process
    assert refusal(ADDRESS, config) == ReturnCode.UNSAFE_IP
    assert len(checker.paths) == 1


def test_an_error_of_the_checker_is_not_shared(redis: str, checker: Checker) -> None:
    config = build_config(redis, checker.url)
    checker.status = 500
    assert refusal(ADDRESS, config) is None
    caches.clear_all()
    checker.status, checker.body = 200, "1"
    assert refusal(ADDRESS, config) == ReturnCode.UNSAFE_IP


def test_a_failing_checker_is_left_alone_for_a_while(redis: str, checker: Checker) -> None:
    config = build_config(redis, checker.url)
    checker.status = 429
    assert (
        refusal(ADDRESS, config) == refusal("198.51.100.8", config) == ReturnCode.TOO_MANY_NEW_IPS
    )
    assert len(checker.paths) == 1


def test_a_checker_that_is_away_asks_workers_to_come_again(redis: str) -> None:
    assert (
        refusal(ADDRESS, build_config(redis, "http://127.0.0.1:1/{ip}"))
        == ReturnCode.TOO_MANY_NEW_IPS
    )


def test_a_raid_lets_unsafe_addresses_in(redis: str, checker: Checker) -> None:
    checker.body = "1"
    config = build_config(redis, checker.url)
    assert refusal(ADDRESS, config, raid=True) is None
    assert not addresses.is_safe_worker_address(ADDRESS, config)


def test_exempt_and_whitelisted_workers_are_not_checked(redis: str, checker: Checker) -> None:
    assert refusal(ADDRESS, build_config(redis, checker.url), is_exempt=True) is None
    assert (
        refusal(ADDRESS, build_config(redis, checker.url, whitelisted_addresses=(ADDRESS,))) is None
    )
    assert refusal(ADDRESS, build_config(redis)) is None
    assert checker.paths == []
