# SPDX-License-Identifier: AGPL-3.0-or-later
"""Messages to workers: who writes to which, and what pops deliver."""

from collections.abc import Iterator
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import update

from devtools.services import ServiceAddresses
from horde.classes.base.user import ANONYMOUS_KEY, UserRoleTypes
from horde.classes.base.worker import Worker
from horde.classes.base.worker_message import WorkerMessage
from horde.clock import utcnow
from horde.database import caches
from horde.db import transaction
from tests.integration.api_horde import Api, make_moderator, own_api
from tests.integration.rows import forget_everything, make_user, make_worker

WORKER = "a worker"


@pytest.fixture(scope="module")
def module_api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "worker_messages") as api:
        yield api


@pytest.fixture
def api(module_api: Api) -> Api:
    forget_everything()
    return module_api


@pytest.fixture
def owner(api: Api) -> tuple[int, str]:
    return make_user(UserRoleTypes.TRUSTED)


@pytest.fixture
def worker_id(owner: tuple[int, str]) -> UUID:
    return make_worker(owner[0], name=WORKER)


def refused(answer: Any) -> tuple[int, str | None]:
    return answer.status_code, answer.json.get("rc")


def write(api: Api, key: str, message: str = "Please update.", **body: Any) -> dict[str, Any]:
    answer = api.post("/workers/messages", {"message": message, **body}, key)
    assert answer.status_code == 200, answer.json
    return dict(answer.json)


def pop_messages(api: Api, key: str, name: str = WORKER, **body: Any) -> list[dict[str, Any]]:
    pop = {"name": name, "models": ["a/model"], "max_length": 512, "max_context_length": 4096}
    answer = api.post("/generate/text/pop", pop | body, key)
    assert answer.status_code == 200, answer.json
    return list(answer.json["messages"])


def list_texts(api: Api, key: str, query: str = "") -> list[str]:
    answer = api.get(f"/workers/messages{query}", key)
    assert answer.status_code == 200, answer.json
    return [message["message"] for message in answer.json]


def test_an_owner_writes_to_its_worker_and_the_pop_delivers_it(
    api: Api, owner: tuple[int, str], worker_id: UUID
) -> None:
    user_id, key = owner
    posted = write(api, key, worker_id=str(worker_id), expiry=2, origin="The Moderators")
    assert posted["worker_id"] == str(worker_id)
    assert posted["user_id"] == str(user_id)
    assert posted["origin"].endswith(f"#{user_id}")  # only moderators choose
    expiry = parsedate_to_datetime(posted["expiry"]).replace(tzinfo=None)
    assert timedelta(hours=1.9) < expiry - utcnow() < timedelta(hours=2.1)
    [delivered] = pop_messages(api, key)
    assert delivered == {
        "id": posted["id"],
        "message": "Please update.",
        "origin": posted["origin"],
        "expiry": posted["expiry"],
    }
    assert pop_messages(api, key) == [delivered]  # until it expires
    caches.clear_all()
    assert api.get(f"/workers/{worker_id}", key).json["messages"][0]["id"] == posted["id"]
    assert "messages" not in api.get(f"/workers/{worker_id}").json


def test_a_moderator_writes_to_one_several_a_kind_and_all(
    api: Api, owner: tuple[int, str], worker_id: UUID
) -> None:
    _, key = owner
    other = make_worker(make_user()[0], name="another worker")
    moderator = make_moderator()[1]
    one = write(api, moderator, "to one", worker_id=str(worker_id))
    assert one["origin"] == "AI Horde Moderators"
    several = write(api, moderator, "to two", worker_ids=[str(other), str(worker_id)])
    assert len(several["ids"]) == 2
    write(api, moderator, "to text", worker_type="text", origin="The crew")
    write(api, moderator, "to image", worker_type="image")
    everybody = write(api, moderator, "to all")
    assert "worker_id" not in everybody
    delivered = {message["message"]: message for message in pop_messages(api, key)}
    assert delivered.keys() == {"to one", "to two", "to text", "to all"}
    assert delivered["to text"]["origin"] == "The crew"
    assert len(api.list_acts(moderator, action="message.posted")) == 5
    # A worker that comes later gets what is for all.
    pop_messages(api, key, "a new worker")
    names = {message["message"] for message in pop_messages(api, key, "a new worker")}
    assert names == {"to text", "to all"}


def test_who_may_not_write(api: Api, owner: tuple[int, str], worker_id: UUID) -> None:
    _, key = owner
    stranger = make_user(UserRoleTypes.TRUSTED)[1]
    path = "/workers/messages"
    to_worker = {"message": "hi", "worker_id": str(worker_id)}
    only_own = (403, "MessagesOnlyOwnWorkers")
    assert refused(api.post(path, to_worker, stranger)) == only_own
    assert refused(api.post(path, {"message": "hi"}, key)) == only_own
    assert refused(api.post(path, {"message": "hi", "worker_type": "text"}, key)) == only_own
    assert refused(api.post(path, to_worker, ANONYMOUS_KEY)) == (403, "AnonForbidden")
    assert refused(api.post(path, to_worker, "nobody's")) == (401, "InvalidAPIKey")
    unknown = {"message": "hi", "worker_id": str(uuid4())}
    assert refused(api.post(path, unknown, key)) == (404, "WorkerNotFound")
    mixed = [str(worker_id), str(make_worker(make_user()[0], name="foreign one"))]
    assert refused(api.post(path, {"message": "hi", "worker_ids": mixed}, key)) == only_own
    assert list_texts(api, make_moderator()[1], "?validity=all") == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"message": ""},
        {"message": "x" * 10_241},
        {"message": "\u001b\u0000".replace("\u0000", "\u200b")},
        {"message": "hi", "expiry": 0},
        {"message": "hi", "expiry": 721},
        {"message": "hi", "expiry": True},
        {"message": "hi", "origin": "x" * 256},
        {"message": "hi", "worker_id": "x"},
        {"message": "hi", "worker_ids": []},
        {"message": "hi", "worker_type": "tpu"},
        {"message": "hi", "worker_type": "text", "worker_ids": ["x" * 36]},
    ],
)
def test_a_message_that_cannot_be_is_refused(api: Api, body: dict[str, Any]) -> None:
    answer = api.post("/workers/messages", body, make_moderator()[1])
    assert refused(answer) == (400, "BadRequest")


def test_what_a_terminal_would_obey_is_taken_out(
    api: Api, owner: tuple[int, str], worker_id: UUID
) -> None:
    write(api, owner[1], "two\n\u001b[31mlines\u202e", worker_id=str(worker_id))
    assert pop_messages(api, owner[1])[0]["message"] == "two\n[31mlines"


def test_an_expired_message_is_not_delivered_and_is_listed_as_such(
    api: Api, owner: tuple[int, str], worker_id: UUID
) -> None:
    _, key = owner
    write(api, key, "old", worker_id=str(worker_id))
    with transaction() as session:
        session.execute(update(WorkerMessage).values(expiry=utcnow() - timedelta(seconds=1)))
    write(api, key, "new", worker_id=str(worker_id))
    assert [message["message"] for message in pop_messages(api, key)] == ["new"]
    assert list_texts(api, key) == ["new"]
    assert list_texts(api, key, "?validity=expired") == ["old"]
    assert list_texts(api, key, "?validity=all") == ["new", "old"]
    assert refused(api.get("/workers/messages?validity=odd", key)) == (400, "BadRequest")


def test_the_list_shows_ones_own_and_a_moderator_everything(
    api: Api, owner: tuple[int, str], worker_id: UUID
) -> None:
    user_id, key = owner
    moderator_id, moderator = make_moderator()
    stranger = make_user()[1]
    write(api, moderator, "to the worker", worker_id=str(worker_id))
    write(api, key, "from the owner", worker_id=str(worker_id))
    write(api, moderator, "to all")
    assert list_texts(api, key) == ["from the owner", "to the worker"]
    assert list_texts(api, key, f"?user_id={user_id}") == ["from the owner"]
    assert list_texts(api, key, f"?worker_id={worker_id}") == ["from the owner", "to the worker"]
    assert list_texts(api, stranger) == []
    assert list_texts(api, moderator) == ["to all", "from the owner", "to the worker"]
    assert list_texts(api, moderator, f"?user_id={moderator_id}") == ["to all", "to the worker"]
    foreign = api.get(f"/workers/messages?worker_id={worker_id}", stranger)
    assert refused(foreign) == (403, "MessagesOnlyOwnWorkers")
    foreign = api.get(f"/workers/messages?user_id={user_id}", stranger)
    assert refused(foreign) == (403, "Forbidden")
    unknown = api.get(f"/workers/messages?worker_id={uuid4()}", moderator)
    assert refused(unknown) == (404, "WorkerNotFound")
    assert api.get("/workers/messages", None).status_code == 400


def test_a_page_holds_fifty(api: Api, owner: tuple[int, str], worker_id: UUID) -> None:
    _, key = owner
    for number in range(52):
        write(api, key, f"message {number}", worker_id=str(worker_id))
    assert len(list_texts(api, key)) == 50
    assert list_texts(api, key, "?page=2") == ["message 1", "message 0"]
    assert len(pop_messages(api, key)) == 50


def test_a_message_is_read_by_anybody_and_deleted_by_its_author_or_a_moderator(
    api: Api, owner: tuple[int, str], worker_id: UUID
) -> None:
    _, key = owner
    moderator = make_moderator()[1]
    posted = write(api, key, worker_id=str(worker_id))
    path = f"/workers/messages/{posted['id']}"
    assert api.get(path).json == posted
    assert refused(api.delete(path, make_user()[1])) == (403, "Forbidden")
    assert api.delete(path, key).json == {"message": "OK"}
    assert refused(api.get(path)) == (404, "WorkermessageNotFound")
    assert refused(api.delete(path, key)) == (404, "WorkermessageNotFound")
    assert pop_messages(api, key) == []
    foreign = write(api, key, worker_id=str(worker_id))
    assert (
        api.delete(f"/workers/messages/{foreign['id']}?reason=rude", moderator).status_code == 200
    )
    assert api.list_acts(moderator, action="message.deleted")[0]["reason"] == "rude"
    assert refused(api.get("/workers/messages/x")) == (404, "WorkermessageNotFound")


def test_workers_not_seen_for_a_day_take_no_place(api: Api) -> None:
    user_id, key = make_user()
    for number in range(6):
        make_worker(user_id, name=f"dead worker {number}", ipaddr="127.0.0.1")
    answer = api.post("/generate/text/pop", {"name": "a new one", "models": ["m"]}, key)
    assert refused(answer) == (403, "TooManyWorkers")
    with transaction() as session:
        session.execute(update(Worker).values(last_check_in=utcnow() - timedelta(days=1, hours=1)))
    assert pop_messages(api, key, "a new one") == []
