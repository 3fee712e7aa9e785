# SPDX-License-Identifier: AGPL-3.0-or-later
"""The rate limits of gifts and of the list of accounts."""

from collections.abc import Iterator
from typing import Any

import pytest

from devtools.services import ServiceAddresses
from horde import redis_ctrl
from tests.integration.api_horde import Api, own_api
from tests.integration.rows import make_user


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "account_limits", rate_limits_enabled=True) as found:
        redis_ctrl.call(redis_ctrl.limiter_db, lambda client: client.flushdb())
        yield found


def is_limited(answer: Any) -> bool:
    """Whether an answer is the limiter's, which has no code of its own."""
    if answer.status_code == 429:
        assert "rc" not in answer.json
        assert int(answer.headers["Retry-After"]) >= 1
    return bool(answer.status_code == 429)


def give(api: Api, key: str, address: str = "198.51.100.1") -> Any:
    return api.post("/kudos/transfer", {"username": "nobody"}, key, address=address)


def test_a_key_gives_once_a_second_wherever_it_is_used(api: Api) -> None:
    _, key = make_user()
    answers = [give(api, key, f"198.51.100.{number}") for number in range(8)]
    assert sum(map(is_limited, answers)) >= 5  # a test may take three seconds, not eight
    assert not is_limited(give(api, make_user()[1]))


def test_a_key_is_counted_by_the_second_and_by_the_hour(api: Api) -> None:
    redis_ctrl.call(redis_ctrl.limiter_db, lambda client: client.flushdb())
    give(api, make_user()[1])
    counted = redis_ctrl.call(redis_ctrl.limiter_db, lambda client: list(client.scan_iter()))
    windows = {name.partition("/kudos_kudos_transfer/")[2] for name in counted}
    assert windows == {"1/1/second", "90/1/hour"}


def test_an_address_lists_accounts_90_times_a_minute(api: Api) -> None:
    answers = [
        api.get(f"/users?page={number}", address="198.51.100.99") for number in range(1, 101)
    ]
    assert 10 <= sum(map(is_limited, answers)) <= 55  # a minute may end in between
    assert not is_limited(api.get("/users", address="198.51.100.98"))
