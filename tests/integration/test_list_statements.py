# SPDX-License-Identifier: AGPL-3.0-or-later
"""Lists cost the same few statements however much is listed."""

from collections.abc import Iterator

import pytest
from sqlalchemy import event, text

from devtools.services import ServiceAddresses
from horde import db, redis_ctrl
from horde.classes.base.user import UserRoleTypes
from horde.db import transaction
from tests.integration.api_horde import Api, make_moderator, own_api
from tests.integration.rows import (
    forget_everything,
    make_chat_worker,
    make_job,
    make_request,
    make_user,
    make_worker,
)
from tests.integration.text_horde import forget_copies

PATHS = (
    "/teams",
    "/workers?type=text",
    "/users",
    "/users?sort=age",
    "/status/models?type=text",
    "/status/models?type=text&chat=true",
    "/stats/text/totals",
    "/stats/text/models",
    "/workers/messages?validity=all",
    "/styles/text",
    "/collections",
)
# Read without a key; the account of one is a statement of its own.
PUBLIC = {"/teams", "/users", "/users?sort=age", *(path for path in PATHS if "/stat" in path)}


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "list_statements") as api:
        forget_everything()
        yield api


def count_statements(api: Api, path: str, key: str) -> int:
    forget_copies()
    redis_ctrl.call(redis_ctrl.cache_db, lambda client: client.flushdb())
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    engine = db.require_engine()
    event.listen(engine, "before_cursor_execute", note)
    try:
        answer = api.get(path, None if path in PUBLIC else key)
    finally:
        event.remove(engine, "before_cursor_execute", note)
    assert answer.status_code == 200, answer.json
    assert answer.json, path
    return len(sent)


def make_one_of_each(api: Api, key: str, user_id: int, number: int) -> None:
    team = api.post("/teams", {"name": f"Team {number}"}, key).json["id"]
    make_chat_worker(user_id, f"c/model-{number}")
    worker_id = make_worker(user_id, ("a/model", "b/model"), name=f"worker {number}")
    make_job(make_request(user_id), worker_id)
    api.put(f"/workers/{worker_id}", {"team": team}, key)
    api.post("/workers/messages", {"message": "hi", "worker_id": str(worker_id)}, key)
    style = {"name": f"style {number}", "prompt": "{p}", "models": ["m"], "tags": ["t"]}
    made = api.post("/styles/text", style, key).json["id"]
    api.post("/collections", {"name": f"set {number}", "styles": [made]}, key)


def test_a_list_of_many_costs_what_a_list_of_one_does(api: Api) -> None:
    user_id, key = make_user(UserRoleTypes.TRUSTED)
    moderator = make_moderator()[1]
    make_one_of_each(api, key, user_id, 0)
    of_one = {path: count_statements(api, path, moderator) for path in PATHS}
    for number in range(1, 12):
        make_one_of_each(api, key, user_id, number)
    of_many = {path: count_statements(api, path, moderator) for path in PATHS}
    assert of_many == of_one
    assert max(of_one.values()) <= 3


def test_a_request_under_a_style_costs_three_statements_more(api: Api) -> None:
    key = make_user(kudos=1000)[1]
    author = make_user(UserRoleTypes.TRUSTED)[1]
    api.post("/styles/text", {"name": "counted", "prompt": "{p}", "models": ["m"]}, author)
    counts = []
    for style in ({}, {"style": "counted"}):
        body = {"prompt": "Once", "models": ["m"], **style}
        assert api.post("/generate/text/async", body, key).status_code == 202
        sent: list[str] = []

        def note(
            _connection: object, _cursor: object, statement: str, *_: object, sent: list[str] = sent
        ) -> None:
            sent.append(statement)

        engine = db.require_engine()
        event.listen(engine, "before_cursor_execute", note)
        try:
            assert api.post("/generate/text/async", body, key).status_code == 202
        finally:
            event.remove(engine, "before_cursor_execute", note)
        counts.append(len(sent))
    # Its id, the style, and its use.
    assert counts[1] - counts[0] <= 3


def test_the_team_of_two_thousand_workers_is_one_statement_with_a_bound(api: Api) -> None:
    user_id, key = make_user(UserRoleTypes.TRUSTED)
    team = api.post("/teams", {"name": "Two Thousand"}, key).json["id"]
    with transaction() as session:
        session.execute(
            text(
                "INSERT INTO workers (worker_type, user_id, name, team_id, last_check_in)"
                " SELECT 'text_worker', :user_id, 'of many ' || number, CAST(:team AS uuid),"
                " timezone('utc', now()) FROM generate_series(1, 2000) AS number"
            ),
            {"user_id": user_id, "team": team},
        )
    forget_copies()
    shown = api.get(f"/teams/{team}").json
    assert (shown["worker_count"], len(shown["workers"])) == (2000, 1000)
