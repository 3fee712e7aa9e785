# SPDX-License-Identifier: AGPL-3.0-or-later
"""The worker routes: what each caller sees, and what each may change."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import text

from devtools.services import ServiceAddresses
from horde.apis.v2 import workers as worker_routes
from horde.classes.base.user import UserRoleTypes
from horde.classes.base.worker import DEFAULT_MAINTENANCE_MESSAGE, WorkerStats
from horde.clock import utcnow
from horde.database import caches, threads
from horde.db import transaction
from tests.integration.rows import (
    forget_everything,
    get_worker,
    make_chat_worker,
    make_job,
    make_request,
    make_user,
    make_worker,
    own_horde,
)

ANONYMOUS = {"apikey": "0000000000"}
PUBLIC_KEYS = {
    "accepts_chat_jobs",
    "accepts_prompt_jobs",
    "bridge_agent",
    "flagged",
    "id",
    "kudos_details",
    "kudos_rewards",
    "maintenance_mode",
    "max_context_length",
    "max_length",
    "models",
    "name",
    "nonconformant_replies",
    "nsfw",
    "online",
    "performance",
    "requests_fulfilled",
    "team",
    "threads",
    "trusted",
    "type",
    "uncompleted_jobs",
    "uptime",
}


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_horde(service_urls, "workers", (worker_routes,)) as app:
        yield app


@pytest.fixture(autouse=True)
def clean(app: Flask) -> None:
    forget_everything()


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture(scope="module")
def owner(app: Flask) -> tuple[int, dict[str, str]]:
    user_id, key = make_user(UserRoleTypes.TRUSTED, contact="owner@example.com")
    return user_id, {"apikey": key}


@pytest.fixture(scope="module")
def stranger(app: Flask) -> dict[str, str]:
    return {"apikey": make_user()[1]}


@pytest.fixture(scope="module")
def moderator(app: Flask) -> dict[str, str]:
    return {"apikey": make_user(UserRoleTypes.MODERATOR, UserRoleTypes.TRUSTED)[1]}


def get_details(
    client: FlaskClient, worker_id: UUID, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    answer = client.get(f"/api/v2/workers/{worker_id}", headers=headers)
    assert answer.status_code == 200, answer.json
    assert isinstance(answer.json, dict)
    return answer.json


def change(
    client: FlaskClient, worker_id: object, headers: dict[str, str], **body: object
) -> tuple[int, Any]:
    answer = client.put(f"/api/v2/workers/{worker_id}", json=body, headers=headers)
    return answer.status_code, answer.json if answer.status_code == 200 else answer.json["rc"]


def test_everybody_sees_the_public_details(
    client: FlaskClient, owner: tuple[int, dict[str, str]]
) -> None:
    worker_id = make_chat_worker(
        owner[0],
        name="my worker",
        speed=14.23,
        kudos=12,
        uptime=900,
        fulfilments=7,
        threads=2,
        nsfw=True,
        max_length=512,
        max_context_length=4096,
        chat_tools_max_temperature=0.7,
        info="Mine",
        ipaddr="203.0.113.7",
    )
    with transaction() as session:
        session.add(WorkerStats(worker_id=worker_id, action="generated", value=10))

    details = get_details(client, worker_id)

    assert details.keys() == PUBLIC_KEYS | {"info", "chat"}
    assert details == details | {
        "id": str(worker_id),
        "name": "my worker",
        "type": "text",
        "online": True,
        "requests_fulfilled": 7,
        "kudos_rewards": 12,
        "kudos_details": {"generated": 10, "uptime": 0},
        "performance": "14.2 tokens per second",
        "threads": 2,
        "uptime": 900,
        "nsfw": True,
        "trusted": True,
        "flagged": False,
        "models": ["a/model"],
        "team": {"name": None, "id": None},
        "max_length": 512,
        "max_context_length": 4096,
        "chat": {
            "model_id": "a/model",
            "features": ["seed", "vision"],
            "limits": {
                "max_context_length": 8192,
                "max_length": 1024,
                "tools_max_temperature": 0.7,
            },
            "image_transports": ["base64", "url"],
        },
    }
    assert client.get("/api/v2/workers/name/my%20worker").json == details


def test_a_fresh_worker_shows_no_speed_and_no_nulls(
    client: FlaskClient, owner: tuple[int, dict[str, str]]
) -> None:
    details = get_details(client, make_worker(owner[0]))
    assert details["performance"] == "No requests fulfilled yet"
    assert details.keys() == PUBLIC_KEYS


def test_privilege_decides_what_more_is_seen(
    client: FlaskClient,
    owner: tuple[int, dict[str, str]],
    stranger: dict[str, str],
    moderator: dict[str, str],
) -> None:
    worker_id = make_worker(owner[0], ipaddr="203.0.113.7", paused=True)
    with transaction() as session:
        session.execute(
            text(
                "INSERT INTO worker_messages (id, worker_id, user_id, message) VALUES (:id,"
                " :worker_id, :user_id, 'Hello')"
            ),
            {"id": uuid4(), "worker_id": worker_id, "user_id": owner[0]},
        )
        session.execute(
            text("INSERT INTO worker_suspicions (worker_id, suspicion_id) VALUES (:id, 4)"),
            {"id": worker_id},
        )

    assert get_details(client, worker_id).keys() == PUBLIC_KEYS
    assert get_details(client, worker_id, stranger).keys() == PUBLIC_KEYS
    own = get_details(client, worker_id, owner[1])
    assert own.keys() == PUBLIC_KEYS | {"owner", "messages"}
    assert own["messages"][0]["message"] == "Hello"
    seen = get_details(client, worker_id, moderator)
    assert seen.keys() == own.keys() | {"paused", "suspicious", "ipaddr", "contact"}
    assert (seen["paused"], seen["suspicious"], seen["ipaddr"]) == (True, 1, "203.0.113.7")


def test_an_owner_may_be_shown_to_everybody(client: FlaskClient) -> None:
    user_id, _ = make_user(username="somebody", public_workers=True)
    assert get_details(client, make_worker(user_id))["owner"] == f"somebody#{user_id}"


@pytest.mark.parametrize(
    "path",
    [
        "not-an-id",
        "5e4f7a60-0000-4000-8000-000000000000",
        "name/nobody",
        "name/no/body",
        "name/%C3%A9%FF",
    ],
)
def test_an_unknown_worker_is_not_found(client: FlaskClient, path: str) -> None:
    answer = client.get(f"/api/v2/workers/{path}")
    assert (answer.status_code, answer.json["rc"]) == (404, "WorkerNotFound")


def test_the_list_holds_online_workers(
    client: FlaskClient, owner: tuple[int, dict[str, str]], moderator: dict[str, str]
) -> None:
    first = make_worker(
        owner[0], name="First One", ipaddr="203.0.113.7", created=utcnow() - timedelta(days=1)
    )
    second = make_worker(owner[0], maintenance=True)
    make_worker(owner[0], last_check_in=utcnow() - timedelta(seconds=301))

    def ids(headers: dict[str, str] | None = None, **query: str) -> list[str]:
        answer = client.get("/api/v2/workers", query_string=query, headers=headers)
        assert answer.status_code == 200
        return [entry["id"] for entry in answer.json]

    assert ids() == ids(type="text") == [str(first), str(second)]
    assert ids(type="image") == []
    assert ids(name="FIRST one", type="image") == [str(first)]
    assert "ipaddr" not in client.get("/api/v2/workers", headers=owner[1]).json[0]
    assert client.get("/api/v2/workers", headers=moderator).json[0]["ipaddr"] == "203.0.113.7"
    refused = client.get("/api/v2/workers?type=sound")
    assert (refused.status_code, list(refused.json["errors"])) == (400, ["type"])


def test_processes_show_the_published_list(
    client: FlaskClient, owner: tuple[int, dict[str, str]]
) -> None:
    worker_id = make_chat_worker(owner[0])
    threads.publish_workers()
    make_worker(owner[0])
    caches.clear_all()
    (entry,) = client.get("/api/v2/workers").json
    assert entry == get_details(client, worker_id)


def test_an_owner_changes_a_worker(client: FlaskClient, owner: tuple[int, dict[str, str]]) -> None:
    worker_id = make_worker(owner[0], name="old name")
    get_details(client, worker_id)
    sent = {
        "maintenance": True,
        "maintenance_msg": "Back at noon",
        "info": "Fast",
        "name": "new name",
    }

    assert change(client, worker_id, owner[1], **sent, paused=None, unknown=1) == (200, sent)

    details = get_details(client, worker_id)
    assert (details["name"], details["info"], details["maintenance_mode"]) == (
        "new name",
        "Fast",
        True,
    )
    assert client.get("/api/v2/workers/name/old name").json["rc"] == "WorkerNotFound"
    assert client.get("/api/v2/workers/name/new name").json["id"] == str(worker_id)
    assert get_worker(worker_id).maintenance_msg == "Back at noon"
    assert change(client, worker_id, owner[1], maintenance=False) == (200, {"maintenance": False})
    assert get_worker(worker_id).maintenance_msg == DEFAULT_MAINTENANCE_MESSAGE


def test_an_owner_joins_and_leaves_a_team(
    client: FlaskClient, owner: tuple[int, dict[str, str]]
) -> None:
    worker_id, team_id = make_worker(owner[0]), uuid4()
    with transaction() as session:
        session.execute(
            text("INSERT INTO teams (id, name, owner_id) VALUES (:id, 'The team', :owner_id)"),
            {"id": team_id, "owner_id": owner[0]},
        )
    assert change(client, worker_id, owner[1], team=str(team_id)) == (200, {"team": "The team"})
    assert get_details(client, worker_id)["team"] == {"name": "The team", "id": str(team_id)}
    assert change(client, worker_id, owner[1], team=str(uuid4())) == (404, "TeamNotFound")
    assert change(client, worker_id, owner[1], team="nonsense") == (404, "TeamNotFound")
    assert change(client, worker_id, owner[1], team="") == (200, {"team": "None"})
    assert get_worker(worker_id).team_id is None


@pytest.mark.parametrize(
    ("body", "status", "rc"),
    [
        ({}, 400, "NoWorkerModSelected"),
        ({"info": None}, 400, "NoWorkerModSelected"),
        ({"info": "What a fuck1ng mess"}, 400, "ProfaneWorkerInfo"),
        ({"name": "the cunt"}, 400, "ProfaneWorkerName"),
        ({"name": "n" * 101}, 400, "TooLongWorkerName"),
        ({"info": "i" * 1001}, 400, "TooLongWorkerName"),
        ({"name": "shor"}, 400, "BadRequest"),
        ({"maintenance_msg": "m" * 301}, 400, "BadRequest"),
        ({"maintenance": "true"}, 400, "BadRequest"),
        ({"name": "taken name"}, 400, "WorkerNameAlreadyExists"),
        ({"paused": True}, 403, "NotModerator"),
    ],
)
def test_a_change_that_cannot_be_is_refused_whole(
    client: FlaskClient,
    owner: tuple[int, dict[str, str]],
    body: dict[str, Any],
    status: int,
    rc: str,
) -> None:
    make_worker(owner[0], name="taken name")
    worker_id = make_worker(owner[0], name="own name")
    assert change(
        client, worker_id, owner[1], **({"maintenance": True} | body if body.get("name") else body)
    ) == (status, rc)
    worker = get_worker(worker_id)
    assert (worker.name, worker.info, worker.maintenance, worker.paused) == (
        "own name",
        None,
        False,
        False,
    )


def test_a_worker_keeps_its_own_name(
    client: FlaskClient, owner: tuple[int, dict[str, str]]
) -> None:
    worker_id = make_worker(owner[0], name="own name")
    assert change(client, worker_id, owner[1], name="own name") == (200, {"name": "own name"})


def test_others_may_not_change_a_worker(
    client: FlaskClient,
    owner: tuple[int, dict[str, str]],
    stranger: dict[str, str],
    moderator: dict[str, str],
) -> None:
    worker_id = make_worker(owner[0])
    assert change(client, worker_id, stranger, maintenance=True) == (403, "NotOwner")
    assert change(client, worker_id, stranger, info="x", name="another name") == (403, "NotOwner")
    assert change(client, worker_id, stranger, name="another name") == (403, "NotModerator")
    assert change(client, worker_id, stranger, paused=True) == (403, "NotModerator")
    assert change(client, worker_id, ANONYMOUS, maintenance=True) == (403, "AnonForbiddenWorker")
    assert change(client, worker_id, {"apikey": "nobody's"}, maintenance=True) == (
        401,
        "InvalidAPIKey",
    )
    assert change(client, worker_id, {}, maintenance=True) == (400, "BadRequest")
    assert change(client, uuid4(), stranger, maintenance=True) == (404, "WorkerNotFound")
    assert change(client, worker_id, moderator, paused=True, maintenance=True) == (
        200,
        {"paused": True, "maintenance": True},
    )


def test_nobody_manages_the_workers_of_anonymous_as_anonymous(client: FlaskClient) -> None:
    worker_id = make_worker(0)
    assert change(client, worker_id, ANONYMOUS, maintenance=True) == (403, "AnonForbiddenWorker")
    assert (
        "owner" not in get_details(client, worker_id, ANONYMOUS)
        or get_details(client, worker_id)["owner"]
    )


def test_a_worker_is_deleted_when_no_job_refers_to_it(
    client: FlaskClient, owner: tuple[int, dict[str, str]], stranger: dict[str, str]
) -> None:
    worker_id = make_chat_worker(owner[0], name="short lived")
    make_job(wp_id := make_request(owner[0]), worker_id, generation="done")
    get_details(client, worker_id)

    def delete(headers: dict[str, str]) -> tuple[int, Any]:
        answer = client.delete(f"/api/v2/workers/{worker_id}", headers=headers)
        return answer.status_code, answer.json if answer.status_code == 200 else answer.json["rc"]

    assert delete(stranger) == (403, "NotModerator")
    assert delete(ANONYMOUS) == (403, "AnonForbiddenWorker")
    assert delete(owner[1]) == (423, "Locked")
    with transaction() as session:
        session.execute(text("DELETE FROM waiting_prompts WHERE id = :id"), {"id": wp_id})
    assert delete(owner[1]) == (200, {"deleted_id": str(worker_id), "deleted_name": "short lived"})
    assert delete(owner[1]) == (404, "WorkerNotFound")
    assert client.get(f"/api/v2/workers/{worker_id}").json["rc"] == "WorkerNotFound"


def test_a_name_with_slashes_is_found(
    client: FlaskClient, owner: tuple[int, dict[str, str]]
) -> None:
    make_worker(owner[0], name="a/b c?é")
    for path in (quote("a/b c?é"), quote("a/b c?é", safe="")):
        assert client.get(f"/api/v2/workers/name/{path}").json["name"] == "a/b c?é"


def test_a_new_name_and_info_are_shown_without_markup_and_control_characters(app: Flask) -> None:
    owner_id, key = make_user()
    worker_id = make_worker(owner_id)
    body = {
        "name": "<b>\u202ea new\x07</b> name",
        "info": "<script>x",
        "maintenance_msg": "back\n<i>soon</i>",
    }
    answer = app.test_client().put(
        f"/api/v2/workers/{worker_id}", json=body, headers={"apikey": key}
    )
    assert answer.status_code == 200, answer.json
    assert answer.json == {"name": "a new name", "info": "x", "maintenance_msg": "back soon"}
    refused = app.test_client().put(
        f"/api/v2/workers/{worker_id}", json={"name": "\u200b" * 9}, headers={"apikey": key}
    )
    assert (refused.status_code, refused.json["rc"]) == (400, "BadRequest")
