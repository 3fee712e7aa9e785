# SPDX-License-Identifier: AGPL-3.0-or-later
"""Addresses that moderators refuse: single ones, networks, and those of workers."""

from collections.abc import Iterator
from typing import Any

import pytest

from devtools.services import ServiceAddresses
from horde import redis_ctrl
from horde.classes.base.user import UserRoleTypes
from horde.database import caches
from tests.integration.api_horde import Api, make_moderator, own_api
from tests.integration.rows import make_user, make_worker
from tests.integration.text_horde import refused

HOUR = 3600


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "operations") as found:
        yield found


@pytest.fixture
def key(api: Api) -> str:
    """A moderator's key, in a horde that refuses nobody."""
    for database in (redis_ctrl.address_timeout_db, redis_ctrl.address_suspicion_db):
        redis_ctrl.call(database, lambda client: client.flushdb())
    caches.clear_all()
    return make_moderator()[1]


def block(api: Api, key: str, ipaddr: str, hours: Any = 1, **body: Any) -> Any:
    return api.post("/operations/ipaddr", {"ipaddr": ipaddr, "hours": hours, **body}, key)


def ask_from(api: Api, address: str) -> str | None:
    """The code that a request from an address is refused with; None when it is queued."""
    _, asker = make_user()
    answer = api.post("/generate/text/async", {"prompt": "Once"}, asker, address=address)
    rc: str | None = answer.json.get("rc")
    assert (answer.status_code == 202) == (rc is None), answer.json
    return rc


def show(api: Api, key: str, address: str) -> list[tuple[str, bool]]:
    """What refuses an address, and whether for about an hour yet."""
    answer = api.get(f"/operations/ipaddr/{address}", key)
    assert answer.status_code == 200, answer.json
    return [(each["ipaddr"], HOUR - 60 < each["seconds"] <= HOUR) for each in answer.json]


def test_a_refused_address_can_neither_ask_nor_serve_until_it_is_admitted(
    api: Api, key: str
) -> None:
    assert block(api, key, "198.51.100.7").json == {"message": "OK"}
    assert ask_from(api, "198.51.100.7") == "TimeoutIP"
    assert ask_from(api, "198.51.100.8") is None
    _, owner = make_user()
    pop = {"name": "a worker there", "models": ["a/model"]}
    assert refused(api.post("/generate/text/pop", pop, owner, address="198.51.100.7")) == (
        403,
        "TimeoutIP",
    )
    assert show(api, key, "198.51.100.7") == [("198.51.100.7", True)]
    admitted = api.delete("/operations/ipaddr", key, {"ipaddr": "198.51.100.7"})
    assert admitted.json == {"message": "OK"}
    assert ask_from(api, "198.51.100.7") is None
    assert show(api, key, "198.51.100.7") == []


def test_a_refused_network_refuses_what_is_in_it_and_is_listed(api: Api, key: str) -> None:
    block(api, key, "203.0.113.77/24")
    block(api, key, "2001:db8:7::/48")
    assert ask_from(api, "203.0.113.1") == "TimeoutIP"
    assert ask_from(api, "203.0.114.1") is None
    assert ask_from(api, "2001:db8:7:1::5") == "TimeoutIP"
    listed = api.get("/operations/ipaddr", key).json
    assert [each["ipaddr"] for each in listed] == ["203.0.113.0/24", "2001:db8:7::/48"]
    assert show(api, key, "203.0.113.9") == [("203.0.113.0/24", True)]
    assert show(api, key, "203.0.113.0/25") == [("203.0.113.0/24", True)]
    assert show(api, key, "203.0.0.0/8") == []
    api.delete("/operations/ipaddr", key, {"ipaddr": "203.0.113.0/24"})
    assert ask_from(api, "203.0.113.1") is None


def test_single_addresses_are_not_in_the_list_of_networks(api: Api, key: str) -> None:
    block(api, key, "198.51.100.7")
    assert api.get("/operations/ipaddr", key).json == []


def test_an_address_of_ipv6_stands_for_its_household(api: Api, key: str) -> None:
    block(api, key, "2001:db8:1:2::9")
    assert ask_from(api, "2001:db8:1:2:3::4") == "TimeoutIP"
    assert ask_from(api, "2001:db8:1:3::9") is None
    assert show(api, key, "2001:db8:1:2::1") == [("2001:db8:1:2::/64", True)]


@pytest.mark.parametrize("written", ["::ffff:198.51.100.9", " 198.51.100.9 ", "198.51.100.9/32"])
def test_an_address_is_the_same_however_it_is_written(api: Api, key: str, written: str) -> None:
    block(api, key, written)
    assert ask_from(api, "198.51.100.9") == "TimeoutIP"


@pytest.mark.parametrize(
    "body",
    [
        {"ipaddr": "198.51.100.7"},
        {"hours": 1},
        {"ipaddr": "nowhere", "hours": 1},
        {"ipaddr": "198.51.100.7/33", "hours": 1},
        {"ipaddr": "198.51.100.7/", "hours": 1},
        {"ipaddr": "999.1.1.1", "hours": 1},
        {"ipaddr": "ipblock_1", "hours": 1},
        {"ipaddr": "198.51.100.7", "hours": 0},
        {"ipaddr": "198.51.100.7", "hours": 721},
        {"ipaddr": "198.51.100.7", "hours": "1"},
        {"ipaddr": ["198.51.100.7"], "hours": 1},
        {"ipaddr": "1" * 5000, "hours": 1},
    ],
)
def test_an_address_or_a_time_that_is_none_is_refused(api: Api, key: str, body: Any) -> None:
    before = len(api.list_acts(key))
    assert refused(api.post("/operations/ipaddr", body, key)) == (400, "BadRequest")
    assert refused(api.get("/operations/ipaddr/nowhere", key)) == (400, "BadRequest")
    assert refused(api.delete("/operations/ipaddr", key, {"ipaddr": "no"})) == (400, "BadRequest")
    assert len(api.list_acts(key)) == before


def test_the_address_of_a_worker_is_refused_for_days(api: Api, key: str) -> None:
    worker_id = make_worker(make_user()[0], ipaddr="2001:db8:5:6::7")
    path = f"/operations/block_worker_ipaddr/{worker_id}"
    assert api.put(path, {"days": 2, "reason": "scraper"}, key).json == {"message": "OK"}
    assert ask_from(api, "2001:db8:5:6::1") == "TimeoutIP"
    seconds = api.get("/operations/ipaddr/2001:db8:5:6::1", key).json[0]["seconds"]
    assert 47 * HOUR < seconds <= 48 * HOUR
    act = api.list_acts(key, subject=f"worker%20{worker_id}")[0]
    assert (act["action"], act["reason"], act["details"]["days"]) == (
        "address.blocked",
        "scraper",
        2,
    )
    assert api.delete(path, key).json == {"message": "OK"}
    assert ask_from(api, "2001:db8:5:6::1") is None


def test_a_worker_without_an_address_or_that_is_none_cannot_be_refused(api: Api, key: str) -> None:
    worker_id = make_worker(make_user()[0], ipaddr=None)
    path = "/operations/block_worker_ipaddr"
    assert refused(api.put(f"{path}/{worker_id}", {"days": 1}, key)) == (400, "BadRequest")
    assert refused(api.put(f"{path}/x", {"days": 1}, key)) == (404, "WorkerNotFound")
    assert refused(api.delete(f"{path}/x", key)) == (404, "WorkerNotFound")
    for days in (0, 31, "1", None):
        assert refused(api.put(f"{path}/{worker_id}", {"days": days}, key)) == (400, "BadRequest")


def test_nobody_but_moderators_refuses_addresses(api: Api, key: str) -> None:
    worker_id = make_worker(make_user()[0], ipaddr="198.51.100.7")
    _, trusted = make_user(UserRoleTypes.TRUSTED)
    path = f"/operations/block_worker_ipaddr/{worker_id}"
    for caller, expected in (
        (trusted, (403, "NotModerator")),
        ("x" * 22, (401, "InvalidAPIKey")),
        (None, (400, "BadRequest")),
    ):
        for answer in (
            api.get("/operations/ipaddr", caller),
            api.post("/operations/ipaddr", {"ipaddr": "198.51.100.7", "hours": 1}, caller),
            api.delete("/operations/ipaddr", caller, {"ipaddr": "198.51.100.7"}),
            api.get("/operations/ipaddr/198.51.100.7", caller),
            api.put(path, {"days": 1}, caller),
            api.delete(path, caller),
        ):
            assert refused(answer) == expected
    assert ask_from(api, "198.51.100.7") is None


def test_what_was_refused_and_admitted_is_recorded(api: Api, key: str) -> None:
    block(api, key, "198.51.100.200", 5, reason="spam")
    api.delete("/operations/ipaddr", key, {"ipaddr": "198.51.100.200", "reason": "appeal"})
    acts = api.list_acts(key, subject="address%20198.51.100.200")
    assert [(act["action"], act["reason"], act["details"]) for act in acts] == [
        ("address.unblocked", "appeal", {}),
        ("address.blocked", "spam", {"hours": 5}),
    ]


def test_without_redis_a_moderator_is_told_so_and_nothing_is_recorded(
    api: Api, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(api.list_acts(key))

    def fail(*_: object, **__: object) -> None:
        raise redis_ctrl.RedisUnavailable

    with monkeypatch.context() as patched:
        patched.setattr(redis_ctrl, "call", fail)
        for answer in (
            block(api, key, "198.51.100.7"),
            api.get("/operations/ipaddr", key),
            api.get("/operations/ipaddr/198.51.100.7", key),
            api.delete("/operations/ipaddr", key, {"ipaddr": "198.51.100.7"}),
        ):
            assert answer.status_code == 503
            assert "Redis" in answer.json["message"]
    assert len(api.list_acts(key)) == before
