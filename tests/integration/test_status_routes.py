# SPDX-License-Identifier: AGPL-3.0-or-later
"""The status routes as clients read them."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote
from uuid import UUID

import pytest
from flask import Flask
from flask.testing import FlaskClient

from devtools.services import ServiceAddresses
from horde import chat_signal, redis_ctrl
from horde.apis.v2 import base
from horde.classes.base.kudos import KudosReservation, upfront_hold_id
from horde.classes.base.stats import FulfillmentPerformance, ModelPerformance
from horde.classes.base.user import UserRoleTypes
from horde.clock import utcnow
from horde.database import caches, stats, threads
from horde.db import transaction
from tests.integration.rows import (
    find_request,
    forget_everything,
    make_chat_worker,
    make_job,
    make_request,
    make_user,
    make_worker,
    own_horde,
)

ADMIN = "the admin#9999"
ODD_NAME = "aphrodite/Org/Model-13b:Q4 K é"
CHRONOS = "elinas/chronos-70b-v2"


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_horde(service_urls, "status", (base,), admins=(ADMIN,)) as app:
        yield app


@pytest.fixture(autouse=True)
def clean(app: Flask) -> None:
    forget_everything()


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture(scope="module")
def owner(app: Flask) -> int:
    return make_user()[0]


def list_models(client: FlaskClient, **query: object) -> list[dict[str, Any]]:
    answer = client.get("/api/v2/status/models", query_string=query)
    assert answer.status_code == 200, answer.json
    assert isinstance(answer.json, list)
    return answer.json


def test_a_served_model_is_listed_with_its_figures(client: FlaskClient, owner: int) -> None:
    worker = make_worker(owner, threads=3)
    make_worker(owner, maintenance=True, threads=5)
    make_worker(owner, last_check_in=utcnow() - timedelta(seconds=301), threads=7)
    make_request(owner, n=2, max_length=100)
    wp_id = make_request(owner, ("a/model", "another"), n=1, jobs=2, max_length=60)
    make_job(wp_id, worker)
    make_job(wp_id, worker, fake=True)
    make_job(wp_id, worker, generation="done")
    with transaction() as session:
        session.add_all(
            ModelPerformance(model="a/model", performance=speed) for speed in (9.0, 11.1)
        )
        session.add(
            ModelPerformance(
                model="a/model", performance=500.0, created=utcnow() - timedelta(minutes=61)
            )
        )

    (entry,) = list_models(client, type="text")

    assert entry == {
        "name": "a/model",
        "count": 3,
        "performance": 10.1,
        "queued": 160.0,
        "jobs": 4.0,
        "eta": int(160 / (3 * 10.05)),
        "type": "text",
    }
    assert type(entry["count"]) is int
    assert type(entry["eta"]) is int


def test_the_default_list_is_of_image_models(client: FlaskClient, owner: int) -> None:
    make_worker(owner)
    assert list_models(client) == []
    assert list_models(client, type="interrogation") == []


def test_a_queue_that_nobody_works_at_has_an_endless_eta(client: FlaskClient, owner: int) -> None:
    make_worker(owner)
    make_request(owner)
    assert list_models(client, type="text")[0]["eta"] == 10_000


def test_filters_narrow_the_list(client: FlaskClient, owner: int) -> None:
    make_worker(owner, ("own/model",), threads=1)
    make_worker(owner, (CHRONOS,), threads=4)
    make_worker(owner, ("a/horde_special::x",), threads=4)

    def names(**query: object) -> list[str]:
        return [entry["name"] for entry in list_models(client, type="text", **query)]

    assert names() == [CHRONOS, "own/model"]
    assert names(model_state="known") == [CHRONOS]
    assert names(model_state="custom") == ["own/model"]
    assert names(min_count=2) == [CHRONOS]
    assert names(max_count=2) == ["own/model"]


@pytest.mark.parametrize(
    "query",
    [
        "type=text&model_state=none",
        "type=text&min_count=x",
        "type=text&chat=perhaps",
        "type=sound",
        "chat=true",
        "type=image&chat=true",
    ],
)
def test_a_bad_query_is_refused(client: FlaskClient, query: str) -> None:
    answer = client.get(f"/api/v2/status/models?{query}")
    assert (answer.status_code, answer.json["rc"]) == (400, "BadRequest")


def test_the_chat_list_joins_what_chat_workers_offer(client: FlaskClient, owner: int) -> None:
    early = utcnow() - timedelta(days=3)
    make_chat_worker(owner, ODD_NAME, created=early, chat_features=["seed"], chat_max_length=2048)
    make_chat_worker(owner, ODD_NAME, chat_max_context_length=16384)
    make_chat_worker(owner, ODD_NAME, maintenance=True, chat_max_length=9999)
    make_worker(owner, ("text/only",))

    (entry,) = list_models(client, type="text", chat="true")

    assert entry["name"] == ODD_NAME
    assert entry["count"] == 2
    assert entry["chat"] == {
        "workers": 2,
        "max_context_length": 16384,
        "max_length": 2048,
        "features": ["seed", "vision"],
        "created": int(
            (
                early - early.replace(year=1970, month=1, day=1, hour=0, minute=0, second=0)
            ).total_seconds()
        ),
    }
    assert [("chat" in entry) for entry in list_models(client, type="text")] == [False, False]


def test_a_model_of_chat_only_workers_has_no_text_threads(client: FlaskClient, owner: int) -> None:
    make_chat_worker(owner, accepts_prompt_jobs=False, threads=4)
    (entry,) = list_models(client, type="text", chat="true")
    assert (entry["count"], entry["chat"]["workers"]) == (0, 1)
    assert [entry["count"] for entry in list_models(client, type="text")] == [0]


def test_a_chat_worker_shows_before_the_shared_list_is_rebuilt(
    client: FlaskClient, owner: int
) -> None:
    threads.publish_models()
    make_chat_worker(owner)
    assert [entry["name"] for entry in list_models(client, type="text", chat="true")] == ["a/model"]
    assert list_models(client, type="text") == []


def test_lists_survive_the_loss_of_redis(
    client: FlaskClient, owner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise redis_ctrl.RedisUnavailable

    monkeypatch.setattr(redis_ctrl, "call", fail)
    make_chat_worker(owner)
    threads.publish_models()
    assert [entry["name"] for entry in list_models(client, type="text", chat="true")] == ["a/model"]
    assert client.get("/api/v2/status/performance").json["text_worker_count"] == 1


@pytest.mark.parametrize("shared", [{"a": 1}, [{"name": "x", "other": 1}], [1], "text", 7])
def test_what_another_version_shared_is_not_believed(
    client: FlaskClient, owner: int, shared: object
) -> None:
    make_worker(owner)
    redis_ctrl.set_json("models_cache", shared, None)
    redis_ctrl.set_json("totals_cache", shared, None)
    assert [entry["name"] for entry in list_models(client, type="text")] == ["a/model"]
    assert client.get("/api/v2/status/performance").json["text_worker_count"] == 1


@pytest.mark.parametrize("path", [ODD_NAME, quote(ODD_NAME), quote(ODD_NAME, safe="")])
def test_a_model_is_found_by_its_exact_name(client: FlaskClient, owner: int, path: str) -> None:
    make_worker(owner, (ODD_NAME,))
    answer = client.get(f"/api/v2/status/models/{path}")
    assert answer.status_code == 200
    assert [entry["name"] for entry in answer.json] == [ODD_NAME]


@pytest.mark.parametrize("chat", [False, True])
def test_a_model_is_found_the_moment_its_worker_comes(
    client: FlaskClient, owner: int, chat: bool
) -> None:
    assert client.get(f"/api/v2/status/models/{quote(ODD_NAME)}").json["rc"] == "ModelNotFound"
    threads.publish_models()
    if chat:
        make_chat_worker(owner, ODD_NAME)
    else:
        make_worker(owner, (ODD_NAME,))
    (entry,) = client.get(f"/api/v2/status/models/{quote(ODD_NAME)}").json
    assert (entry["name"], entry["count"]) == (ODD_NAME, 1)


def test_a_model_of_the_reference_is_found_without_a_worker(client: FlaskClient) -> None:
    (entry,) = client.get(f"/api/v2/status/models/{CHRONOS}").json
    assert (entry["name"], entry["count"], entry["queued"], entry["eta"]) == (CHRONOS, 0, 0.0, 0)


@pytest.mark.parametrize("name", ["nobody/serves-this", ODD_NAME.lower(), quote(f"{ODD_NAME} ")])
def test_any_other_model_is_not_found(client: FlaskClient, owner: int, name: str) -> None:
    make_worker(owner, (ODD_NAME,))
    answer = client.get(f"/api/v2/status/models/{name}")
    assert (answer.status_code, answer.json["rc"]) == (404, "ModelNotFound")


def test_performance_counts_text_work(client: FlaskClient, owner: int) -> None:
    worker = make_worker(owner, threads=3)
    make_worker(owner, maintenance=True)
    wp_id = make_request(owner, n=2, jobs=3, max_length=100)
    make_job(wp_id, worker)
    make_job(wp_id, worker, fake=True)
    make_request(owner, n=1, faulted=True)
    with transaction() as session:
        session.add(FulfillmentPerformance(things=120, thing_type="text"))
        session.add(
            FulfillmentPerformance(
                things=500, thing_type="text", created=utcnow() - timedelta(seconds=61)
            )
        )

    figures = client.get("/api/v2/status/performance").json

    assert figures == {
        "queued_requests": 0,
        "queued_text_requests": 3,
        "queued_megapixelsteps": 0,
        "queued_tokens": 100,
        "queued_forms": 0,
        "worker_count": 0,
        "thread_count": 0,
        "text_worker_count": 2,
        "text_thread_count": 4,
        "interrogator_count": 0,
        "interrogator_thread_count": 0,
        "past_minute_megapixelsteps": 0,
        "past_minute_tokens": 120.0,
    }


def test_published_figures_are_what_processes_show(client: FlaskClient, owner: int) -> None:
    make_worker(owner)
    threads.publish_models()
    threads.publish_horde_totals()
    make_worker(owner, ("later",))
    caches.clear_all()
    assert [entry["name"] for entry in list_models(client, type="text")] == ["a/model"]
    assert client.get("/api/v2/status/performance").json["text_worker_count"] == 1


@pytest.fixture(scope="module")
def moderator(app: Flask) -> dict[str, str]:
    return {"apikey": make_user(UserRoleTypes.MODERATOR, UserRoleTypes.TRUSTED)[1]}


@pytest.fixture(scope="module")
def admin(app: Flask) -> dict[str, str]:
    return {"apikey": make_user(id=9999, username="the admin")[1]}


def test_modes_are_off_at_first_and_raid_is_for_moderators(
    client: FlaskClient, moderator: dict[str, str]
) -> None:
    public = {"maintenance_mode": False, "invite_only_mode": False}
    assert client.get("/api/v2/status/modes").json == public
    assert client.get("/api/v2/status/modes", headers={"apikey": "nobody's"}).json == public
    assert client.get("/api/v2/status/modes", headers=moderator).json == {
        **public,
        "raid_mode": False,
    }


def test_a_set_mode_holds_at_once(
    client: FlaskClient, moderator: dict[str, str], admin: dict[str, str]
) -> None:
    client.get("/api/v2/status/modes")
    answer = client.put(
        "/api/v2/status/modes",
        json={"raid_mode": True, "invite_only_mode": True},
        headers=moderator,
    )
    assert (answer.status_code, answer.json) == (200, {"raid_mode": True, "invite_only_mode": True})
    answer = client.put(
        "/api/v2/status/modes", json={"maintenance_mode": True, "raid_mode": None}, headers=admin
    )
    assert (answer.status_code, answer.json) == (200, {"maintenance_mode": True})
    expected = {"maintenance_mode": True, "invite_only_mode": True, "raid_mode": True}
    assert client.get("/api/v2/status/modes", headers=moderator).json == expected
    client.put("/api/v2/status/modes", json={"raid_mode": False}, headers=moderator)
    assert client.get("/api/v2/status/modes", headers=moderator).json == {
        **expected,
        "raid_mode": False,
    }


def test_modes_are_set_by_those_who_may(
    client: FlaskClient, moderator: dict[str, str], admin: dict[str, str]
) -> None:
    def refuse(body: object, headers: dict[str, str]) -> tuple[int, str]:
        answer = client.put("/api/v2/status/modes", json=body, headers=headers)
        return answer.status_code, answer.json["rc"]

    assert refuse({"maintenance_mode": True}, moderator) == (403, "NotAdmin")
    assert refuse({"raid_mode": True}, admin) == (403, "NotModerator")
    assert refuse({"invite_only_mode": True}, {"apikey": "0000000000"}) == (403, "NotModerator")
    assert refuse({}, moderator) == (400, "NoHordeModSelected")
    assert refuse({"raid_mode": 1}, moderator) == (400, "BadRequest")
    assert refuse({"raid_mode": True}, {"apikey": "nobody's"}) == (401, "InvalidAPIKey")
    assert refuse({"raid_mode": True}, {}) == (400, "BadRequest")
    assert refuse([], moderator) == (400, "BadRequest")
    assert client.get("/api/v2/status/modes", headers=moderator).json["raid_mode"] is False


def test_maintenance_ends_what_waits_and_leaves_what_runs(
    client: FlaskClient, owner: int, admin: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[UUID, str, int]] = []
    monkeypatch.setattr(
        chat_signal,
        "publish_chat_event",
        lambda wp_id, event, count: told.append((wp_id, event.value, count)),
    )
    monkeypatch.setattr(stats, "STOPPED_REQUESTS_A_BATCH", 1)
    worker = make_worker(owner)
    waiting = make_request(owner, n=2, jobs=2)
    chat = make_request(owner, is_chat=True)
    running = make_request(owner, n=1, jobs=2)
    make_job(running, worker)
    with transaction() as session:
        session.add_all(
            KudosReservation(user_id=owner, business_id=upfront_hold_id(wp), amount=5)
            for wp in (waiting, running)
        )

    assert (
        client.put(
            "/api/v2/status/modes", json={"maintenance_mode": True}, headers=admin
        ).status_code
        == 200
    )

    for wp_id in (waiting, chat, running):
        request = find_request(wp_id)
        assert request is not None
        assert (request.n, request.terminal_outcome) == (0, "cancelled")
    assert told == [(chat, "cancelled", 0)]
    with transaction() as session:
        active = {hold.business_id for hold in session.query(KudosReservation) if hold.active}
    assert active == {upfront_hold_id(running)}
