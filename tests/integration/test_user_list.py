# SPDX-License-Identifier: AGPL-3.0-or-later
"""The list of accounts: its order, its pages, what it hides, and what it costs."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import delete, text

from devtools.services import ServiceAddresses
from horde import redis_ctrl
from horde.classes.base.user import ANONYMOUS_ID, User, UserRoleTypes
from horde.clock import utcnow
from horde.database import caches
from horde.database.user_details import list_user_details
from horde.db import transaction
from horde.shapes.users import UserSort
from tests.integration.api_horde import Api, own_api
from tests.integration.rows import make_user, make_worker
from tests.integration.statements import count_statements
from tests.integration.text_horde import refused


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "user_list") as found:
        yield found


@pytest.fixture(autouse=True)
def _no_accounts(api: Api) -> None:
    with transaction() as session:
        session.execute(delete(User).where(User.id != ANONYMOUS_ID))
    redis_ctrl.call(redis_ctrl.cache_db, lambda client: client.flushdb())
    caches.clear_all()


def list_ids(api: Api, query: str = "") -> list[int]:
    answer = api.get(f"/users{query}")
    assert answer.status_code == 200, answer.json
    return [user["id"] for user in answer.json]


def test_the_richest_come_first_and_the_older_of_two_equals(api: Api) -> None:
    poor, rich, equal = (make_user(kudos=amount)[0] for amount in (10, 500, 10))
    assert list_ids(api) == [rich, poor, equal, ANONYMOUS_ID]


def test_sorted_by_age_the_oldest_come_first(api: Api) -> None:
    now = utcnow()
    young, old = (make_user(created=now - timedelta(days=days))[0] for days in (1, 4000))
    assert list_ids(api, "?sort=age")[0] == old
    assert set(list_ids(api, "?sort=age")) == {old, young, ANONYMOUS_ID}


def test_a_page_has_25_accounts_and_the_next_goes_on(api: Api) -> None:
    ids = [make_user(kudos=1000 - number)[0] for number in range(30)]
    assert list_ids(api) == ids[:25]
    assert list_ids(api, "?page=2") == [*ids[25:], ANONYMOUS_ID]
    assert list_ids(api, "?page=3") == []
    assert list_ids(api, "?page=10001") == []
    assert list_ids(api, f"?page={10**40}") == []


@pytest.mark.parametrize("query", ["?page=0", "?page=-1", "?page=x", "?page=1.5", "?sort=name"])
def test_a_page_or_order_that_does_not_exist_is_refused(api: Api, query: str) -> None:
    assert refused(api.get(f"/users{query}")) == (400, "BadRequest")


def test_erased_accounts_are_not_listed(api: Api) -> None:
    make_user(username="<wiped>", oauth_id="<wiped>")
    make_user(username="<wiped>", oauth_id="<wiped>")  # as many as there are
    assert list_ids(api) == [ANONYMOUS_ID]


def test_an_entry_is_what_everybody_may_see_of_the_account(api: Api) -> None:
    user_id, key = make_user(
        UserRoleTypes.TRUSTED, kudos=7, contact="me@example.org", admin_comment="watch out"
    )
    shown_id, _ = make_user(kudos=6, public_workers=True)
    make_worker(user_id)
    worker_id = make_worker(shown_id)
    private_style(user_id)
    entries: list[dict[str, Any]] = api.get("/users").json
    assert entries[0] == api.get(f"/users/{user_id}").json
    assert (entries[0]["trusted"], entries[0]["worker_count"]) == (True, 1)
    assert entries[0].keys().isdisjoint({"worker_ids", "contact", "admin_comment", "vpn"})
    assert entries[0]["styles"] == []
    assert entries[1]["worker_ids"] == [str(worker_id)]
    assert [style["name"] for style in api.get(f"/users/{user_id}", key).json["styles"]] == ["mine"]


def private_style(user_id: int) -> None:
    with transaction() as session:
        session.execute(
            text(
                "INSERT INTO styles (id, style_type, user_id, name, prompt, public)"
                " VALUES (:id, 'text', :user_id, 'mine', '{p}', false)"
            ),
            {"id": str(uuid4()), "user_id": user_id},
        )


def test_a_page_stays_for_a_while_and_is_shared_by_all_processes(api: Api) -> None:
    first, _ = make_user(kudos=5)
    assert list_ids(api) == [first, ANONYMOUS_ID]
    second, _ = make_user(kudos=50)
    assert list_ids(api) == [first, ANONYMOUS_ID]
    caches.clear_all()  # as in another process
    assert list_ids(api) == [first, ANONYMOUS_ID]
    redis_ctrl.delete("users_cache_kudos_1")
    caches.clear_all()
    assert list_ids(api) == [second, first, ANONYMOUS_ID]


def test_a_page_costs_one_statement_however_many_accounts_there_are(api: Api) -> None:
    for _ in range(30):
        make_worker(make_user()[0])
    with transaction() as session:
        assert (
            count_statements(
                session,
                lambda: list_user_details(
                    session, sort=UserSort.KUDOS, offset=0, limit=25, now=utcnow()
                ),
            )
            == 1
        )
