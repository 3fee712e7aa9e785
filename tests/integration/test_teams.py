# SPDX-License-Identifier: AGPL-3.0-or-later
"""Teams: who makes them, what is shown of them, and who joins and leaves."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import update

from devtools.services import ServiceAddresses
from horde.classes.base.user import ANONYMOUS_KEY, UserRoleTypes
from horde.classes.base.worker import Worker
from horde.database import teams
from horde.db import transaction
from tests.integration.api_horde import Api, make_moderator, own_api
from tests.integration.rows import forget_everything, make_user, make_worker

POP = {"name": "a worker", "models": ["a/model"], "max_length": 512, "max_context_length": 4096}


@pytest.fixture(scope="module")
def module_api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "teams") as api:
        yield api


@pytest.fixture
def api(module_api: Api) -> Api:
    forget_everything()
    return module_api


@pytest.fixture
def founder(api: Api) -> tuple[int, str]:
    return make_user(UserRoleTypes.TRUSTED)


def refused(answer: Any) -> tuple[int, str | None]:
    return answer.status_code, answer.json.get("rc")


def make_team(api: Api, key: str, name: str = "The Llamas", **body: Any) -> dict[str, Any]:
    answer = api.post("/teams", {"name": name, **body}, key)
    assert answer.status_code == 200, answer.json
    return dict(answer.json)


def test_a_trusted_user_makes_a_team_that_everybody_sees(
    api: Api, founder: tuple[int, str]
) -> None:
    user_id, key = founder
    made = make_team(api, key, "  The <b>Llamas</b> ", info="We like grass.")
    assert made == {"id": made["id"], "name": "The Llamas", "info": "We like grass."}
    shown = {
        "name": "The Llamas",
        "id": made["id"],
        "info": "We like grass.",
        "requests_fulfilled": 0,
        "kudos": 0.0,
        "uptime": 0,
        "creator": f"user {user_id}#{user_id}",
        "worker_count": 0,
        "workers": [],
        "models": [],
    }
    [listed] = api.get("/teams").json
    assert listed | {"creator": ""} == shown | {"creator": ""}
    assert listed["creator"].endswith(f"#{user_id}")
    assert api.get(f"/teams/{made['id']}").json == listed


@pytest.mark.parametrize(
    ("body", "status", "rc"),
    [
        ({"name": "ab"}, 400, "BadRequest"),
        ({"name": "x" * 101}, 400, "BadRequest"),
        ({"name": "<b></b>   "}, 400, "BadRequest"),
        ({"name": 7}, 400, "BadRequest"),
        ({}, 400, "BadRequest"),
        ({"name": "The Fuck"}, 400, "ProfaneTeamName"),
        ({"name": "Fine", "info": "shit"}, 400, "ProfaneTeamInfo"),
        ({"name": "Fine", "info": "x" * 1001}, 400, "BadRequest"),
        ({"name": "tHE lLAMAS"}, 400, "TeamNameAlreadyExists"),
    ],
)
def test_a_team_that_cannot_be_is_refused_and_not_made(
    api: Api, founder: tuple[int, str], body: dict[str, Any], status: int, rc: str
) -> None:
    make_team(api, founder[1])
    assert refused(api.post("/teams", body, founder[1])) == (status, rc)
    assert len(api.get("/teams").json) == 1


def test_who_may_not_make_a_team(api: Api) -> None:
    body = {"name": "The Llamas"}
    assert refused(api.post("/teams", body, ANONYMOUS_KEY)) == (403, "AnonForbidden")
    assert refused(api.post("/teams", body, make_user()[1])) == (403, "UntrustedTeamCreation")
    leaving = make_user(UserRoleTypes.TRUSTED, UserRoleTypes.DELETED)[1]
    assert refused(api.post("/teams", body, leaving)) == (403, "DeletedUser")
    assert refused(api.post("/teams", body, "nobody's")) == (401, "InvalidAPIKey")
    assert api.post("/teams", body, None).status_code == 400


def test_of_two_teams_of_one_name_at_once_one_is_made(api: Api, founder: tuple[int, str]) -> None:
    names = ["The Herd", "THE HERD", "the herd", "The HERD"]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda name: api.post("/teams", {"name": name}, founder[1]), names))
    assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400]


def test_a_team_is_read_by_anybody_or_with_a_moderators_key(
    api: Api, founder: tuple[int, str]
) -> None:
    path = f"/teams/{make_team(api, founder[1])['id']}"
    assert api.get(path).status_code == 200
    assert api.get(path, make_moderator()[1]).status_code == 200
    assert refused(api.get(path, founder[1])) == (403, "NotModerator")
    assert refused(api.get(path, "nobody's")) == (401, "InvalidAPIKey")
    for missing in (str(uuid4()), "x", "x" * 500):
        assert refused(api.get(f"/teams/{missing}")) == (404, "TeamNotFound")


def test_its_owner_and_moderators_change_a_team(api: Api, founder: tuple[int, str]) -> None:
    path = f"/teams/{make_team(api, founder[1])['id']}"
    moderator = make_moderator()[1]
    stranger = make_user(UserRoleTypes.TRUSTED)[1]
    assert refused(api.patch(path, {}, founder[1])) == (400, "NoTeamModSelected")
    assert refused(api.patch(path, {"name": "Mine"}, stranger)) == (403, "NotModerator")
    assert refused(api.patch(path, {"info": "Mine"}, stranger)) == (403, "NotOwner")
    changed = api.patch(path, {"name": "THE LLAMAS"}, founder[1])
    assert (changed.status_code, changed.json["name"]) == (200, "THE LLAMAS")
    assert "info" not in changed.json
    changed = api.patch(path, {"info": "Now with info", "reason": "asked for"}, moderator)
    assert changed.json["info"] == "Now with info"
    assert api.get(path).json["info"] == "Now with info"
    make_team(api, founder[1], "Another")
    taken = api.patch(path, {"name": "another"}, founder[1])
    assert refused(taken) == (400, "TeamNameAlreadyExists")
    [act] = api.list_acts(moderator, action="team.changed")
    assert (act["reason"], act["details"]["changes"]) == ("asked for", {"info": "Now with info"})


def join(api: Api, key: str, worker_id: object, team_id: str) -> Any:
    return api.put(f"/workers/{worker_id}", {"team": team_id}, key)


def test_workers_join_and_leave(api: Api, founder: tuple[int, str]) -> None:
    user_id, key = founder
    team = make_team(api, key)
    path = f"/teams/{team['id']}"
    online = make_worker(user_id, ("a/model", "b/model"), name="worker one")
    away = make_worker(user_id, ("b/model",), name="worker two")
    with transaction() as session:
        session.execute(
            update(Worker)
            .where(Worker.id == away)
            .values(last_check_in=Worker.last_check_in - timedelta(hours=1))
        )
    assert join(api, key, online, team["id"]).json == {"team": "The Llamas"}
    assert join(api, key, away, team["id"]).status_code == 200
    shown = api.get(path).json
    assert shown["worker_count"] == 2
    assert [(each["name"], each["online"], each["type"]) for each in shown["workers"]] == [
        ("worker one", True, "text"),
        ("worker two", False, "text"),
    ]
    assert shown["models"] == [{"name": "a/model", "count": 1}, {"name": "b/model", "count": 1}]
    details = api.get(f"/workers/{online}").json
    assert details["team"] == {"name": "The Llamas", "id": team["id"]}
    assert join(api, key, online, "").json == {"team": "None"}
    assert refused(join(api, key, online, str(uuid4()))) == (404, "TeamNotFound")


def test_a_dissolved_team_leaves_no_trace_at_its_workers(
    api: Api, founder: tuple[int, str]
) -> None:
    user_id, key = founder
    team = make_team(api, key)
    worker_id = make_worker(user_id, name="worker one")
    join(api, key, worker_id, team["id"])
    assert api.get(f"/workers/{worker_id}").json["team"]["name"] == "The Llamas"
    path = f"/teams/{team['id']}"
    assert refused(api.delete(path, make_user()[1])) == (403, "NotModerator")
    moderator = make_moderator()[1]
    gone = api.delete(f"{path}?reason=asked", moderator)
    assert gone.json == {"deleted_id": team["id"], "deleted_name": "The Llamas"}
    assert refused(api.delete(path, key)) == (404, "TeamNotFound")
    assert api.get("/teams").json == []
    assert api.get(f"/workers/{worker_id}").json["team"] == {"name": None, "id": None}
    assert api.list_acts(moderator, action="team.deleted")[0]["reason"] == "asked"


def test_a_team_counts_the_time_its_workers_are_online(api: Api, founder: tuple[int, str]) -> None:
    user_id, key = founder
    team = make_team(api, key)
    worker_id = make_worker(user_id, ("a/model",), name="a worker", uptime=580)
    join(api, key, worker_id, team["id"])
    for expected in (600, 600):
        with transaction() as session:
            session.execute(
                update(Worker).values(
                    created=Worker.created - timedelta(hours=1),
                    last_check_in=Worker.last_check_in - timedelta(seconds=40),
                )
            )
        assert api.post("/generate/text/pop", POP, key).status_code == 200
        teams.forget_team(UUID(team["id"]))
        assert api.get(f"/teams/{team['id']}").json["uptime"] == expected
