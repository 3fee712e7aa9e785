# SPDX-License-Identifier: AGPL-3.0-or-later
"""A bridge waits where its horde says that workers may, and never depends on it."""

from dataclasses import dataclass, field

import httpx
import pytest

from horde.bridge.horde_api import HordeApi
from horde.bridge.popping import NotAsked, Popper
from tests.unit.bridge.scripted import KEY, answer, build_config, build_plan

IDLE = {"id": None}
JOB = {"id": "1"}


@dataclass
class Places(httpx.BaseTransport):
    """An API that announces an address, and what is there. Notes who was asked for how long."""

    announced: str = "http://front.test/api"
    at_front: httpx.Response | httpx.HTTPError = field(default_factory=lambda: answer(JOB))
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/api/v2/generate/text/pop"
        prefer = request.headers.get("prefer")
        self.asked.append((request.url.host, prefer))
        if request.url.host == "api.test":
            told = {"Horde-Waiting-Pops": self.announced} if prefer else {}
            return httpx.Response(200, json=IDLE, headers=told)
        if isinstance(self.at_front, httpx.HTTPError):
            raise self.at_front
        return self.at_front


def build_popper(places: Places, scheme: str = "http") -> Popper:
    horde = HordeApi(f"{scheme}://api.test/api", KEY, "a:1:u", transport=places)
    return Popper(horde, build_config(), pause=lambda _: None, end=lambda _: None)


def test_the_next_pop_goes_where_the_api_says_that_workers_may_wait() -> None:
    applied = {"Preference-Applied": "wait=20"}
    places = Places(at_front=httpx.Response(200, json=JOB, headers=applied))
    popper, plan = build_popper(places), build_plan()
    assert [popper.pop(plan, 0) for _ in range(3)] == [None, JOB, JOB]
    assert places.asked == [("api.test", "wait=20"), *[("front.test", "wait=20")] * 2]


@pytest.mark.parametrize(
    "at_front",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("silent"),
        httpx.Response(200, text="<html>"),
        answer({"message": "no"}, 404),
        answer({"message": "this front is not trusted", "rc": "Forbidden"}, 403),
        answer({"message": "too many"}, 429),
        answer({"message": "busy"}, 503),
    ],
    ids=lambda value: str(getattr(value, "status_code", value)),
)
def test_a_front_that_does_not_serve_it_costs_a_worker_nothing(
    at_front: httpx.Response | httpx.HTTPError,
) -> None:
    places = Places(at_front=at_front)
    popper, plan = build_popper(places), build_plan()
    assert [popper.pop(plan, 0) for _ in range(3)] == [None, None, None]
    assert places.asked[1:] == [("front.test", "wait=20"), ("api.test", None), ("api.test", None)]


def test_a_front_that_keeps_nobody_waiting_is_asked_for_no_second_time_in_a_row() -> None:
    places = Places(at_front=answer(IDLE))
    popper, plan = build_popper(places), build_plan()
    assert [popper.pop(plan, 0) for _ in range(3)] == [None, None, None]
    assert [host for host, _ in places.asked] == ["api.test", "front.test", "api.test"]


@pytest.mark.parametrize(
    ("scheme", "announced"),
    [
        ("https", "http://front.test/api"),
        ("HTTPS", "http://front.test/api"),
        ("http", "file:///etc"),
        ("http", "http://"),
        ("http", ""),
    ],
)
def test_a_key_goes_to_no_address_that_is_none_or_less_safe(scheme: str, announced: str) -> None:
    places = Places(announced=announced)
    popper, plan = build_popper(places, scheme), build_plan()
    for _ in range(2):
        popper.pop(plan, 0)
    assert {host for host, _ in places.asked} == {"api.test"}


def test_an_api_that_is_away_is_not_asked_twice() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        raise httpx.ConnectError("refused")

    asked: list[str] = []
    horde = HordeApi("http://api.test/api", KEY, "a:1:u", transport=httpx.MockTransport(refuse))
    popper = Popper(horde, build_config(), pause=lambda _: None, end=lambda _: None)
    with pytest.raises(NotAsked):
        popper.pop(build_plan(), 0)
    assert asked == ["api.test"]
