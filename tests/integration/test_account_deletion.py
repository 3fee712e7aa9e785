# SPDX-License-Identifier: AGPL-3.0-or-later
"""Deleting an account in two steps, and what moderators' changes of accounts leave in the list of
acts.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select

from devtools.services import ServiceAddresses
from horde.classes.base.suspicion import Suspicion, UserSuspicion, WorkerSuspicion
from horde.classes.base.user import ANONYMOUS_KEY, User, UserRoleTypes, UserSharedKey
from horde.classes.base.worker import Worker
from horde.db import transaction
from tests.integration.api_horde import Api, let_rest, make_moderator, own_api
from tests.integration.rows import make_job, make_request, make_user, make_worker
from tests.integration.text_horde import make_shared_key, refused


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "account_deletion") as found:
        yield found


def find_row(user_id: int) -> User:
    with transaction() as session:
        return session.get_one(User, user_id)


def count_belongings(user_id: int) -> int:
    with transaction() as session:
        return len(session.scalars(select(Worker).where(Worker.user_id == user_id)).all()) + len(
            session.scalars(select(UserSharedKey).where(UserSharedKey.user_id == user_id)).all()
        )


def test_the_first_call_marks_the_account_and_undelete_takes_it_back(api: Api) -> None:
    user_id, key = make_user()
    assert api.delete(f"/users/{user_id}", key).json == {"message": "OK"}
    assert api.get(f"/users/{user_id}").json["deleted"] is True
    assert api.put(f"/users/{user_id}", {"undelete": True}, key).json == {"undeleted": True}
    assert api.get(f"/users/{user_id}").json["deleted"] is False


def test_a_marked_account_that_was_active_is_not_erased(api: Api) -> None:
    user_id, key = make_user()
    api.delete(f"/users/{user_id}", key)
    assert refused(api.delete(f"/users/{user_id}", key)) == (403, "CannotWipeActiveUser")
    let_rest(user_id, 29.9)
    assert refused(api.delete(f"/users/{user_id}", key)) == (403, "CannotWipeActiveUser")
    assert find_row(user_id).username != "<wiped>"


def test_a_second_call_after_a_month_erases_the_account_with_its_keys_and_workers(
    api: Api,
) -> None:
    user_id, key = make_user(contact="me@example.org", proxy_passkey="a passkey")
    make_worker(user_id)
    sharedkey = make_shared_key(user_id)
    api.delete(f"/users/{user_id}", key)
    let_rest(user_id, 30.1)
    assert api.delete(f"/users/{user_id}", key).json == {"message": "OK"}
    row = find_row(user_id)
    assert (row.username, row.oauth_id, row.contact) == ("<wiped>", "<wiped>", "<wiped>")
    assert row.proxy_passkey is None
    assert count_belongings(user_id) == 0
    assert refused(api.get(f"/users/{user_id}")) == (404, "UserNotFound")
    for gone in (key, sharedkey):
        assert refused(api.get("/find_user", gone)) == (404, "UserNotFound")
    _, moderator = make_moderator()
    assert refused(api.delete(f"/users/{user_id}", moderator)) == (404, "UserNotFound")


def test_many_accounts_can_be_erased(api: Api) -> None:
    for _ in range(3):
        user_id, key = make_user()
        api.delete(f"/users/{user_id}", key)
        let_rest(user_id, 31)
        assert api.delete(f"/users/{user_id}", key).status_code == 200


def test_an_account_whose_worker_has_a_job_is_not_erased(api: Api) -> None:
    user_id, key = make_user()
    make_job(make_request(make_user()[0]), make_worker(user_id))
    api.delete(f"/users/{user_id}", key)
    let_rest(user_id, 31)
    assert refused(api.delete(f"/users/{user_id}", key)) == (423, "Locked")
    assert count_belongings(user_id) == 1


def test_who_may_not_delete_an_account(api: Api) -> None:
    user_id, _ = make_user()
    moderator_id, moderator = make_moderator()
    _, stranger = make_user(UserRoleTypes.TRUSTED)
    assert refused(api.delete(f"/users/{user_id}", "x" * 22)) == (401, "InvalidAPIKey")
    assert refused(api.delete(f"/users/{user_id}", None)) == (400, "BadRequest")
    assert refused(api.delete(f"/users/{user_id}", ANONYMOUS_KEY)) == (403, "AnonForbiddenUser")
    assert refused(api.delete("/users/0", moderator)) == (403, "AnonForbiddenUser")
    assert refused(api.delete(f"/users/{user_id}", stranger)) == (403, "NotUserOrMod")
    assert refused(api.delete(f"/users/{moderator_id}", moderator)) == (403, "CannotDeleteMod")
    assert refused(api.delete("/users/999999", moderator)) == (404, "UserNotFound")
    assert refused(api.delete("/users/x", moderator)) == (404, "UserNotFound")
    assert api.get(f"/users/{user_id}").json["deleted"] is False


@pytest.mark.race
def test_of_two_erasing_calls_at_once_one_wins(api: Api) -> None:
    user_id, key = make_user()
    _, moderator = make_moderator()
    api.delete(f"/users/{user_id}", key)
    let_rest(user_id, 31)
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda _: api.delete(f"/users/{user_id}", moderator).status_code, range(4))
        )
    assert answers.count(200) == 1
    assert set(answers) <= {200, 403, 404}
    erased = [
        act
        for act in api.list_acts(moderator, subject=f"user%20{user_id}")
        if act["action"] == "user.wiped"
    ]
    assert len(erased) == 1


def test_what_a_moderator_does_to_an_account_is_recorded_with_the_reason(api: Api) -> None:
    user_id, _ = make_user()
    moderator_id, moderator = make_moderator()
    changed = api.put(f"/users/{user_id}", {"flagged": True, "reason": "spam"}, moderator)
    assert changed.json == {"flagged": True}
    api.delete(f"/users/{user_id}?reason=asked+by+mail", moderator)
    acts = api.list_acts(moderator, subject=f"user%20{user_id}")
    assert [(act["action"], act["reason"]) for act in acts] == [
        ("user.marked_for_deletion", "asked by mail"),
        ("user.changed", "spam"),
    ]
    assert acts[1]["user_id"] == moderator_id
    assert acts[1]["username"].endswith(f"#{moderator_id}")
    assert acts[1]["details"] == {"changes": {"flagged": True}}


def test_what_an_owner_does_to_the_own_account_is_nobody_elses_business(api: Api) -> None:
    user_id, key = make_user()
    _, moderator = make_moderator()
    api.put(f"/users/{user_id}", {"contact": "me@example.org"}, key)
    api.delete(f"/users/{user_id}", key)
    assert api.list_acts(moderator, subject=f"user%20{user_id}") == []


def test_a_refused_change_records_nothing(api: Api) -> None:
    user_id, _ = make_user()
    _, moderator = make_moderator()
    assert refused(api.put(f"/users/{user_id}", {"kudos": 1}, moderator)) == (403, "NotAdmin")
    assert api.list_acts(moderator, subject=f"user%20{user_id}") == []


def test_the_list_of_acts_is_for_moderators_and_kept_by_no_cache(api: Api) -> None:
    _, moderator = make_moderator()
    _, trusted = make_user(UserRoleTypes.TRUSTED)
    assert refused(api.get("/operations/moderator_acts", trusted)) == (403, "NotModerator")
    assert refused(api.get("/operations/moderator_acts", "x" * 22)) == (401, "InvalidAPIKey")
    assert refused(api.get("/operations/moderator_acts")) == (400, "BadRequest")
    assert refused(api.get("/operations/moderator_acts?page=0", moderator)) == (400, "BadRequest")
    answer = api.get("/operations/moderator_acts", moderator)
    assert answer.headers["Cache-Control"] == "private, no-store"


def test_points_of_suspicion_are_shown_to_moderators_and_taken_back_by_them(api: Api) -> None:
    user_id, key = make_user()
    worker_id = make_worker(user_id)
    with transaction() as session:
        session.add_all(
            [
                UserSuspicion(user_id=user_id, suspicion_id=Suspicion.UNSAFE_IP),
                WorkerSuspicion(worker_id=worker_id, suspicion_id=Suspicion.UNSAFE_IP),
            ]
        )
    _, moderator = make_moderator()
    assert api.get(f"/users/{user_id}", moderator).json["suspicious"] == 1
    assert refused(api.put(f"/users/{user_id}", {"reset_suspicion": True}, key)) == (
        403,
        "NotModerator",
    )
    answer = api.put(f"/users/{user_id}", {"reset_suspicion": False}, moderator)
    assert answer.json == {"new_suspicion": 0}
    assert api.get(f"/users/{user_id}", moderator).json["suspicious"] == 0
    with transaction() as session:
        assert session.scalars(select(WorkerSuspicion)).all() == []


def test_what_a_moderator_does_to_a_worker_and_to_the_modes_is_recorded(api: Api) -> None:
    owner_id, owner = make_user()
    worker_id = make_worker(owner_id, name="a slow worker")
    _, moderator = make_moderator()
    api.put(f"/workers/{worker_id}", {"info": "mine"}, owner)
    api.put(f"/workers/{worker_id}", {"paused": True, "reason": "fakes replies"}, moderator)
    api.put("/status/modes", {"invite_only_mode": True, "reason": "flood"}, moderator)
    api.put("/status/modes", {"invite_only_mode": False}, moderator)
    api.delete(f"/workers/{worker_id}?reason=asked", moderator)
    acts = api.list_acts(moderator)[:4]
    assert [(act["action"], act["subject"], act["reason"]) for act in acts] == [
        ("worker.deleted", f"worker {worker_id}", "asked"),
        ("modes.changed", "horde", None),
        ("modes.changed", "horde", "flood"),
        ("worker.changed", f"worker {worker_id}", "fakes replies"),
    ]
    assert acts[3]["details"] == {"name": "a slow worker", "changes": {"paused": True}}
