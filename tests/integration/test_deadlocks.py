# SPDX-License-Identifier: AGPL-3.0-or-later
"""Deadlocks cost no request: what the database ends so that others can go on is done again.

A trigger on every table makes any write of a route or a periodic job the victim of a deadlock, one
write after the other. Two real deadlocks stand beside it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import Any
from uuid import UUID

import pytest
from flask import Flask
from sqlalchemy import text, update
from sqlalchemy.orm import Session

from devtools.services import ServiceAddresses
from horde.apis import register, site
from horde.apis.v2 import base, kobold, sharedkeys, users, workers
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.user import UserRoleTypes
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.database import threads
from horde.database.samples import prune_samples, refresh_worker_speeds
from horde.db import Base, run_transaction, transaction
from horde.exceptions import ServiceUnavailable
from tests.integration.rows import make_request, make_user, make_worker, own_horde
from tests.integration.text_horde import KNOWN, TextHorde, change_worker, start_clean

pytestmark = pytest.mark.race

MODULES = (kobold, base, workers, users, sharedkeys, register, site)
MOST_WRITES = 40  # of one act; it ends long before

VICTIM = """
CREATE SEQUENCE writes;
CREATE TABLE victims (first bigint NOT NULL, last bigint NOT NULL);
INSERT INTO victims VALUES (0, 0);
CREATE FUNCTION be_the_victim() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    write bigint := nextval('writes');
BEGIN
    IF (SELECT write BETWEEN first AND last FROM victims) THEN
        RAISE EXCEPTION 'deadlock detected' USING ERRCODE = '40P01';
    END IF;
    RETURN NULL;
END $$;
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public'
        AND tablename <> 'victims'
    LOOP
        EXECUTE format('CREATE TRIGGER victim BEFORE INSERT OR UPDATE OR DELETE ON %I'
            ' FOR EACH STATEMENT EXECUTE FUNCTION be_the_victim()', name);
    END LOOP;
END $$;
"""
COUNT_ROWS = " UNION ALL ".join(
    f"SELECT '{name}' AS name, count(*) AS size FROM {name}"
    for name in sorted(Base.metadata.tables)
)


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    settings = {"admins": ("the admin#1",), "test_apikeys": True}
    with own_horde(service_urls, "deadlocks", MODULES, **settings) as app:
        with transaction() as session:
            session.execute(text(VICTIM))
        yield app


@pytest.fixture
def horde(app: Flask) -> TextHorde:
    expect_no_victim()
    start_clean()
    return TextHorde(app)


def expect_victims(first: int, last: int) -> None:
    """Let these of the next writes end as a deadlock's victims, counted from 1."""
    with transaction() as session:
        session.execute(text("UPDATE victims SET first = 0, last = 0"))
        session.execute(
            text("UPDATE victims SET first = :first, last = :last"), {"first": first, "last": last}
        )
        session.execute(text("SELECT setval('writes', 1, false)"))


def expect_no_victim() -> None:
    expect_victims(0, 0)


def count_writes() -> int:
    with transaction() as session:
        is_called, last = session.execute(text("SELECT is_called, last_value FROM writes")).one()
    return int(last) if is_called else 0


def count_all_rows() -> dict[str, int]:
    with transaction() as session:
        return {row.name: row.size for row in session.execute(text(COUNT_ROWS))}


# What is done: each prepares, and answers with the act itself. An act returns what it was answered.

type Act = Callable[[], Any]


class Acts:
    """Every kind of write of the API and of the clock."""

    def __init__(self, horde: TextHorde) -> None:
        self.horde, self.http = horde, horde.app.test_client()
        self.owner, self.key = make_user(UserRoleTypes.TRUSTED)
        self.requester, self.asks = make_user(UserRoleTypes.TRUSTED, kudos=1_000_000)
        _, self.moderates = make_user(UserRoleTypes.MODERATOR)

    def call(self, method: str, path: str, key: str | None = None, **options: Any) -> Any:
        headers = {} if key is None else {"apikey": key}
        answer = self.http.open(f"/api/v2{path}", method=method, headers=headers, **options)
        return answer.status_code

    def chat_body(self) -> dict[str, Any]:
        return {
            "model": KNOWN,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 64,
        }

    def take_chat(self) -> Any:
        declared: dict[str, Any] = {
            "chat_jobs": True,
            "model_id": KNOWN,
            "chat_features": ["prompt_overflow_refused"],
            "chat_limits": {"max_context_length": 8192, "max_length": 1024},
        }
        return self.horde.take(self.key, **declared)

    def a_text_request(self) -> Act:
        self.horde.take(self.key)
        return lambda: self.horde.ask(self.asks, slow_workers=False).status_code

    def a_chat_request(self) -> Act:
        self.take_chat()
        return lambda: self.call("POST", "/generate/chat/async", self.asks, json=self.chat_body())

    def a_first_pop(self) -> Act:
        self.horde.queue(self.asks)
        return lambda: self.horde.pop(self.key, "brand new").status_code

    def a_pop(self) -> Act:
        self.horde.take(self.key)
        self.horde.queue(self.asks)
        return lambda: self.horde.pop(self.key).json["id"] is not None

    def a_reply(self) -> Act:
        self.horde.take(self.key)
        change_worker("a worker", speed=10.0)
        self.horde.queue(self.asks, slow_workers=False)
        job = self.horde.take_job(self.key)
        return lambda: self.horde.submit(self.key, job).status_code

    def a_chat_reply(self) -> Act:
        self.take_chat()
        assert self.a_chat_request()() == 202
        job = self.take_chat()
        reply = {
            "id": job["id"],
            "message": {"role": "assistant", "content": "Blue."},
            "finish_reason": "stop",
            "model_id": KNOWN,
        }
        return lambda: self.horde.post("submit", reply, self.key).status_code

    def a_refused_chat_reply(self) -> Act:
        self.take_chat()
        assert self.a_chat_request()() == 202
        reply = {"id": self.take_chat()["id"], "message": {"role": "user"}, "model_id": KNOWN}
        return lambda: self.horde.post("submit", reply, self.key).status_code

    def a_fault(self) -> Act:
        self.horde.queue(self.asks)
        job = self.horde.take_job(self.key)
        return lambda: self.horde.fault(self.key, job).status_code

    def a_cancel(self) -> Act:
        self.horde.take(self.key)
        request_id = self.horde.queue(self.asks, slow_workers=False)
        return lambda: self.horde.cancel(request_id).status_code

    def a_change_of_a_worker(self) -> Act:
        worker_id = make_worker(self.owner)
        change = {"maintenance": True, "info": "changed"}
        return lambda: self.call("PUT", f"/workers/{worker_id}", self.key, json=change)

    def a_deletion_of_a_worker(self) -> Act:
        worker_id = make_worker(self.owner)
        return lambda: self.call("DELETE", f"/workers/{worker_id}", self.key)

    def a_change_of_an_account(self) -> Act:
        change = {"trusted": True, "admin_comment": "changed"}
        return lambda: self.call("PUT", f"/users/{self.owner}", self.moderates, json=change)

    def a_new_shared_key(self) -> Act:
        return lambda: self.call("PUT", "/sharedkeys", self.asks, json={"kudos": 5})

    def make_shared_key(self) -> str:
        answer = self.http.put("/api/v2/sharedkeys", headers={"apikey": self.asks}, json={})
        assert answer.json is not None
        return str(answer.json["id"])

    def a_change_of_a_shared_key(self) -> Act:
        shared = self.make_shared_key()
        return lambda: self.call("PATCH", f"/sharedkeys/{shared}", self.asks, json={"kudos": 7})

    def a_deletion_of_a_shared_key(self) -> Act:
        shared = self.make_shared_key()
        self.horde.queue(shared)
        return lambda: self.call("DELETE", f"/sharedkeys/{shared}", self.asks)

    def a_change_of_the_modes(self) -> Act:
        change = {"raid_mode": True}
        return lambda: self.call("PUT", "/status/modes", self.moderates, json=change)

    def a_registration(self) -> Act:
        return lambda: self.http.post("/register", data={"username": "somebody"}).status_code

    def an_account_for_tests(self) -> Act:
        body = {"username": "tester", "kudos": 100}
        return lambda: self.call("POST", "/users/dev/test-user", json=body)

    # The clock's

    def an_abort_of_stale_jobs(self) -> Act:
        self.horde.queue(self.asks)
        self.horde.take_job(self.key)
        with transaction() as session:
            session.execute(
                update(ProcessingGeneration).values(
                    start_time=ProcessingGeneration.start_time - timedelta(hours=1)
                )
            )
        return threads.abort_stale_jobs

    def a_deletion_of_expired_requests(self) -> Act:
        self.horde.queue(self.asks)
        with transaction() as session:
            session.execute(
                update(WaitingPrompt).values(expiry=WaitingPrompt.expiry - timedelta(hours=1))
            )
        return threads.delete_expired_requests

    def a_classification_of_requests(self) -> Act:
        for _ in range(3):
            make_request(self.requester, (KNOWN,))
        return threads.classify_requests

    def a_fold(self) -> Act:
        threads.fold_kudos()
        assert self.a_reply()() == 200
        return lambda: threads.fold_kudos() > 0

    def a_refresh_of_speeds(self) -> Act:
        assert self.a_reply()() == 200
        return refresh_worker_speeds

    def a_pruning_of_samples(self) -> Act:
        return prune_samples


ACTS = [name for name in vars(Acts) if name.startswith(("a_", "an_"))]


def do_freshly(horde: TextHorde, name: str, victim: int) -> tuple[Any, dict[str, int], int]:
    """The answer of an act on a clean horde, by how much each table grew, and how many writes it
    took; `victim` is the write that a deadlock ends.
    """
    expect_no_victim()
    start_clean()
    act = getattr(Acts(horde), name)()
    before = count_all_rows()
    expect_victims(victim, victim)
    answer = act()
    writes = count_writes()
    expect_no_victim()
    after = count_all_rows()
    return answer, {table: after[table] - before[table] for table in after}, writes


@pytest.mark.parametrize("name", ACTS)
def test_whichever_write_a_deadlock_ends_the_act_is_done_once(horde: TextHorde, name: str) -> None:
    expected, growth, writes = do_freshly(horde, name, victim=0)
    if isinstance(expected, int) and not isinstance(expected, bool) and expected >= 100:
        assert expected < 500
    assert writes < MOST_WRITES
    for victim in range(1, writes + 1):
        answer, grown, repeated = do_freshly(horde, name, victim)
        assert repeated > writes, f"write {victim} of {writes} was not repeated"
        assert (answer, grown) == (expected, growth), f"write {victim} of {writes}"


@pytest.mark.parametrize("name", ["a_text_request", "a_pop", "a_reply", "a_fault", "a_cancel"])
def test_deadlocks_that_never_end_are_503_and_leave_nothing(horde: TextHorde, name: str) -> None:
    acts = Acts(horde)
    act = getattr(acts, name)()
    before = count_all_rows()
    expect_victims(1, 1_000_000)
    answer = horde.pop(acts.key).status_code if name == "a_pop" else act()
    expect_no_victim()
    assert answer == 503
    assert count_all_rows() == before


def test_two_transactions_that_wait_for_each_other_both_succeed(horde: TextHorde) -> None:
    owner, _ = make_user()
    first, second = make_request(owner), make_request(owner)
    barrier = Barrier(2)

    def lock(rows: tuple[UUID, UUID]) -> int:
        tries = 0

        def work(session: Session) -> None:
            nonlocal tries
            tries += 1
            for wp_id in rows:
                session.execute(
                    update(WaitingPrompt)
                    .where(WaitingPrompt.id == wp_id)
                    .values(n=WaitingPrompt.n + 1)
                )
                if tries == 1 and wp_id == rows[0]:
                    barrier.wait(60)

        run_transaction(work)
        return tries

    with ThreadPoolExecutor(2) as pool:
        tries = list(pool.map(lock, [(first, second), (second, first)]))
    assert sorted(tries) == [1, 2]
    with transaction() as session:
        assert [session.get_one(WaitingPrompt, wp_id).n for wp_id in (first, second)] == [3, 3]


def test_an_outer_retry_does_not_repeat_what_an_inner_one_gave_up(horde: TextHorde) -> None:
    owner, _ = make_user()
    wp_id = make_request(owner)
    tries = 0

    def work(session: Session) -> None:
        nonlocal tries
        tries += 1
        session.execute(update(WaitingPrompt).where(WaitingPrompt.id == wp_id).values(n=9))

    expect_victims(1, 1_000_000)
    with pytest.raises(ServiceUnavailable):
        run_transaction(lambda _: run_transaction(work))
    expect_no_victim()
    assert tries == 5
