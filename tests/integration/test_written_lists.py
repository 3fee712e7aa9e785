# SPDX-License-Identifier: AGPL-3.0-or-later
"""Lists that many read are written once: the bytes are kept, packed for who takes them so."""

import gzip
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import event

from devtools.services import ServiceAddresses
from horde import db, redis_ctrl
from horde.classes.base.user import UserRoleTypes
from horde.database import threads, workers
from tests.integration.api_horde import Api, make_moderator, own_api
from tests.integration.rows import forget_everything, make_chat_worker, make_user, make_worker
from tests.integration.text_horde import forget_copies

LISTS = (
    "/workers",
    "/users",
    "/teams",
    "/status/models?type=text",
    "/stats/text/totals",
    "/stats/text/models",
)


@pytest.fixture(scope="module")
def module_api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "written_lists") as api:
        yield api


@pytest.fixture
def api(module_api: Api) -> Api:
    forget_everything()
    forget_copies()
    return module_api


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """What is sent to Postgres while the test runs."""
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    engine = db.require_engine()
    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)


def make_horde(workers_count: int = 20) -> None:
    owner_id, _ = make_user(UserRoleTypes.TRUSTED, public_workers=True)
    for _ in range(workers_count):
        make_worker(owner_id, (f"a/model-{workers_count}", "b/model"), info="Ünïcode « » \u2028")


@pytest.mark.parametrize("path", LISTS)
def test_a_list_is_packed_for_who_takes_it_so_and_is_the_same(api: Api, path: str) -> None:
    make_horde()
    plain = api.get(path)
    assert plain.headers.get("Content-Encoding") is None
    packed = api.get(path, **{"Accept-Encoding": "br, gzip"})
    if len(plain.data) > 1400:
        assert packed.headers["Content-Encoding"] == "gzip"
        assert len(packed.data) < len(plain.data) / 2
        assert gzip.decompress(packed.data) == plain.data
    for answer in (plain, packed):
        assert answer.headers["Vary"] == "Accept-Encoding"
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert int(answer.headers["Content-Length"]) == len(answer.data)
    assert plain.data.isascii()


@pytest.mark.parametrize("accepted", ["gzip;q=0", "identity", "deflate", ""])
def test_who_does_not_take_it_packed_gets_it_plain(api: Api, accepted: str) -> None:
    make_horde()
    answer = api.get("/workers", **{"Accept-Encoding": accepted})
    assert answer.headers.get("Content-Encoding") is None
    assert len(answer.json) == 20


def test_fields_are_narrowed_whatever_is_accepted(api: Api) -> None:
    make_horde(2)
    headers = {"X-Fields": "name,online", "Accept-Encoding": "gzip"}
    answer = api.get("/workers", **headers)
    assert answer.headers.get("Content-Encoding") is None
    assert [set(worker) for worker in answer.json] == [{"name", "online"}] * 2


@pytest.mark.parametrize("path", LISTS)
def test_a_list_that_is_kept_costs_no_statement(api: Api, statements: list[str], path: str) -> None:
    make_horde()
    first = api.get(path)
    statements.clear()
    assert api.get(path).data == first.data
    assert statements == []


def test_everybody_and_moderators_get_lists_of_their_own(api: Api) -> None:
    owner_id, _ = make_user(contact="me@example.org")
    make_worker(owner_id, name="watched", ipaddr="198.51.100.4")
    _, key = make_moderator()
    for _ in range(2):
        (public,) = api.get("/workers").json
        (full,) = api.get("/workers", key).json
        assert not {"ipaddr", "contact", "paused", "suspicious", "owner"} & set(public)
        assert (full["ipaddr"], full["contact"], full["paused"]) == (
            "198.51.100.4",
            "me@example.org",
            False,
        )
        assert api.get("/workers?name=WATCHED").json == [public]
        assert api.get("/workers?name=WATCHED", key).json == [full]


def test_what_the_leader_shares_is_read_as_it_is(api: Api, statements: list[str]) -> None:
    make_horde(3)
    owner_id, _ = make_user()
    make_chat_worker(owner_id)
    threads.publish_workers()
    forget_copies()
    statements.clear()
    assert len(api.get("/workers").json) == 4
    assert statements == []


@pytest.mark.parametrize("left", ["no JSON at all é", "é"])
def test_what_another_version_left_in_redis_breaks_nothing(api: Api, left: str) -> None:
    make_horde(1)
    for privileged in (False, True):
        redis_ctrl.set_text(f"{workers.WORKERS_KEY}{privileged}", left, 60)
    forget_copies()
    assert len(api.get("/workers").json) == 1


def test_a_change_shows_at_once(api: Api) -> None:
    owner_id, key = make_user()
    worker_id = make_worker(owner_id)
    assert api.get("/workers").json[0]["maintenance_mode"] is False
    api.put(f"/workers/{worker_id}", {"maintenance": True}, key)
    assert api.get("/workers").json[0]["maintenance_mode"] is True
    _, founder = make_user(UserRoleTypes.TRUSTED)
    before = len(api.get("/teams").json)
    api.post("/teams", {"name": f"Team of {owner_id}"}, founder)
    assert len(api.get("/teams").json) == before + 1


def test_without_redis_lists_are_written_from_the_database(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_horde(2)

    def fail(*_: object, **__: object) -> Any:
        raise redis_ctrl.RedisUnavailable("away")

    monkeypatch.setattr(redis_ctrl, "call", fail)
    forget_copies()
    assert len(api.get("/workers").json) == 2
    assert api.get("/users").status_code == 200


@pytest.mark.race
def test_while_one_writes_a_changed_list_the_others_get_the_old_one(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_horde(1)
    assert len(api.get("/workers").json) == 1
    computing, may_end = threading.Event(), threading.Event()
    compute = workers.compute_online_worker_records
    calls: list[int] = []

    def compute_slowly(*arguments: Any) -> Any:
        calls.append(1)
        computing.set()
        assert may_end.wait(60)
        return compute(*arguments)

    monkeypatch.setattr(workers, "compute_online_worker_records", compute_slowly)
    make_worker(make_user()[0])
    workers.forget_online_worker_records()
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(api.get, "/workers")
        assert computing.wait(60)
        others = [pool.submit(api.get, "/workers") for _ in range(5)]
        assert [len(other.result().json) for other in others] == [1] * 5
        may_end.set()
        assert len(first.result().json) == 2
    assert calls == [1]
    assert len(api.get("/workers").json) == 2


def test_messages_are_told_of_one_worker_and_left_out_of_lists(api: Api) -> None:
    owner_id, key = make_user(public_workers=True)
    worker_id = make_worker(owner_id)
    api.post("/workers/messages", {"worker_id": str(worker_id), "message": "x" * 10_000}, key)
    assert api.get(f"/workers/{worker_id}").json["messages"][0]["message"] == "x" * 10_000
    assert "messages" not in json.loads(api.get("/workers").data)[0]
