# SPDX-License-Identifier: AGPL-3.0-or-later
"""The statement and transaction budgets of the hot routes, counted on a real database.

Source: docs/explanation/performance.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import Connection, event, text, update

from devtools.services import ServiceAddresses
from horde import db
from horde.apis.v2 import kobold
from horde.classes.base.kudos import KudosBalanceSnapshot
from horde.classes.base.user import User, UserRoleTypes
from horde.classes.base.worker import Worker
from horde.database import functions, text_queue
from horde.database.kudos import fold_postings
from horde.db import transaction
from horde.hot_session import HotSession
from horde.pop_epochs import EVERYTHING, move_marks
from tests.integration.rows import forget_everything, make_user, own_horde

MODEL = "elinas/chronos-70b-v2"
TEXT = {"prompt": "Once upon a time", "params": {"max_length": 80}, "models": [MODEL]}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name one colour."}],
    "max_tokens": 64,
}
POP: dict[str, Any] = {
    "name": "counted worker",
    "models": [MODEL],
    "bridge_agent": "KoboldCppEmbedWorker:2:here",
    "max_length": 512,
    "max_context_length": 4096,
    "chat_jobs": True,
    "chat_features": ["prompt_overflow_refused"],
    "chat_limits": {"max_context_length": 8192, "max_length": 1024},
    "model_id": MODEL,
}

# Accounts, the switches of the horde, who is online and the order of the queue: a process asks for
# them every few seconds, so how slow the machine is decides which call pays.
ASKED_BY_TIME = (
    "SELECT users.id, users.username",
    "FROM settings",
    "workers.last_check_in >=",
    "SELECT CAST(waiting_prompts.id AS TEXT)",
)


@dataclass
class Counted:
    """What a block of calls asked of the database."""

    statements: list[str] = field(default_factory=list)
    transactions: int = 0


@contextmanager
def counting() -> Iterator[Counted]:
    counted = Counted()
    engine = db.require_engine()

    def count_statement(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not any(words in statement for words in ASKED_BY_TIME):
            counted.statements.append(statement)

    def count_transaction(connection: Connection) -> None:
        if not connection.get_execution_options().get(db.READS_ALONE):
            counted.transactions += 1

    event.listen(engine, "before_cursor_execute", count_statement)
    event.listen(engine, "begin", count_transaction)
    try:
        yield counted
    finally:
        event.remove(engine, "before_cursor_execute", count_statement)
        event.remove(engine, "begin", count_transaction)


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_horde(service_urls, "budgets", (kobold,)) as app:
        yield app


@pytest.fixture(scope="module")
def key(app: Flask) -> str:
    return make_user(UserRoleTypes.TRUSTED)[1]


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    forget_everything()
    functions.forget_cached_availability()
    text_queue.forget_queue_snapshot()
    return app.test_client()


def post(client: FlaskClient, path: str, body: dict[str, Any], key: str) -> Any:
    answer = client.post(f"/api/v2/generate/{path}", json=body, headers={"apikey": key})
    assert answer.status_code in {200, 202}, answer.json
    return answer.json


@pytest.fixture
def served(client: FlaskClient, key: str) -> FlaskClient:
    """A horde with one seasoned worker and warm caches: what a busy process looks like."""
    post(client, "text/pop", POP, key)
    for path, body in (("text/async", TEXT), ("chat/async", CHAT)):
        post(client, path, body, key)
        job = post(client, "text/pop", POP, key)
        post(client, "text/submit", build_reply(job), key)
    with transaction() as session:
        session.execute(update(Worker).values(created=Worker.created - timedelta(hours=1)))
    fold_postings()
    return client


def build_reply(job: dict[str, Any]) -> dict[str, Any]:
    if not job.get("chat"):
        return {"id": job["id"], "generation": "and so on", "state": "ok"}
    message = {"role": "assistant", "content": "Blue."}
    return {"id": job["id"], "message": message, "finish_reason": "stop", "model_id": MODEL}


def test_an_idle_pop_that_repeats_itself_costs_no_statement(served: FlaskClient, key: str) -> None:
    # A Redis without any marks gets them first, and other tests may empty it at any moment.
    for _ in range(20):
        with counting() as counted:
            post(served, "text/pop", POP, key)
        if not counted.statements:
            return
    pytest.fail(f"every pop looks: {counted.statements}")


def test_an_idle_pop_that_looks_costs_one_statement_and_no_write(
    served: FlaskClient, key: str
) -> None:
    move_marks([EVERYTHING])
    with counting() as counted:
        post(served, "text/pop", POP, key)
    assert len(counted.statements) <= 1, counted.statements
    assert counted.transactions == 0
    assert not [
        statement
        for statement in counted.statements
        if statement.lstrip().startswith(("UPDATE", "INSERT"))
    ]


def test_reading_begins_no_transaction_and_leaves_none_to_the_next(served: FlaskClient) -> None:
    started = text(
        "SELECT xact_start = query_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
    )
    with db.reading() as session:
        session.execute(text("SELECT pg_sleep(0.01)"))
        assert session.execute(started).scalar_one()  # each statement is its own transaction
    with transaction() as session:
        session.execute(text("SELECT 1"))
        session.execute(text("SELECT pg_sleep(0.01)"))
        # One transaction for all, on the same pooled connection.
        assert not session.execute(started).scalar_one()


@pytest.mark.parametrize(
    ("path", "body", "budget"), [("text/async", TEXT, 3), ("chat/async", CHAT, 3)]
)
def test_a_request_stays_within_its_budget(
    served: FlaskClient, key: str, path: str, body: dict[str, Any], budget: int
) -> None:
    with counting() as counted:
        post(served, path, body, key)
    assert len(counted.statements) <= budget, counted.statements
    assert counted.transactions <= 2


def test_a_request_that_holds_kudos_stays_within_its_budget(served: FlaskClient, key: str) -> None:
    body = TEXT | {"slow_workers": False, "params": {"max_length": 16}, "models": ["unknown/model"]}
    make_rich()
    with counting() as counted:
        post(served, "text/async", body, key)
    assert len(counted.statements) <= 5, counted.statements


def make_rich() -> None:
    with transaction() as session:
        session.execute(update(User).values(kudos=100_000))
        session.execute(
            update(KudosBalanceSnapshot).values(balance=100_000, opening_balance=100_000)
        )


@pytest.mark.parametrize(("path", "body"), [("text/async", TEXT), ("chat/async", CHAT)])
@pytest.mark.parametrize("is_due", [False, True])
def test_a_pop_with_a_job_stays_within_its_budget(
    served: FlaskClient, key: str, path: str, body: dict[str, Any], is_due: bool
) -> None:
    post(served, path, body, key)
    if is_due:
        with transaction() as session:
            session.execute(
                update(Worker).values(last_check_in=Worker.last_check_in - timedelta(seconds=40))
            )
    with counting() as counted:
        job = post(served, "text/pop", POP, key)
    assert job["id"] is not None
    assert len(counted.statements) <= (3 if is_due else 2), counted.statements
    assert counted.transactions <= (1 if is_due else 0)  # beside the claim, which is its own


@pytest.mark.parametrize(("path", "body"), [("text/async", TEXT), ("chat/async", CHAT)])
def test_a_submit_of_a_reply_stays_within_its_budget(
    served: FlaskClient, key: str, path: str, body: dict[str, Any]
) -> None:
    post(served, path, body, key)
    job = post(served, "text/pop", POP, key)
    with counting() as counted:
        post(served, "text/submit", build_reply(job), key)
    assert len(counted.statements) <= 2, counted.statements
    assert counted.transactions == 0  # the settlement is its own


@pytest.mark.parametrize(("path", "body"), [("text/async", TEXT), ("chat/async", CHAT)])
def test_a_status_read_stays_within_its_budget(
    served: FlaskClient, key: str, path: str, body: dict[str, Any]
) -> None:
    request_id = post(served, path, body, key)["id"]
    job = post(served, "text/pop", POP, key)
    post(served, "text/submit", build_reply(job), key)
    family = path.partition("/")[0]
    with counting() as counted:
        answer = served.get(f"/api/v2/generate/{family}/status/{request_id}")
    assert answer.json is not None
    assert answer.json["done"] is True
    assert len(counted.statements) <= 1, counted.statements
    assert counted.transactions == 0


def test_a_text_job_from_request_to_read_reply_is_at_most_8_statements_and_4_commits(
    served: FlaskClient, key: str
) -> None:
    with counting() as counted:
        request_id = post(served, "text/async", TEXT, key)["id"]
        job = post(served, "text/pop", POP, key)
        post(served, "text/submit", build_reply(job), key)
        served.get(f"/api/v2/generate/text/status/{request_id}")
    assert len(counted.statements) <= 8, counted.statements
    # The activation, the claim and the settlement are statements that are transactions themselves.
    assert counted.transactions <= 1


def test_a_text_job_from_request_to_read_reply_is_at_most_8_round_trips(
    served: FlaskClient, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    send = HotSession._run

    def note(self: HotSession, *statements: Any) -> Any:
        cursor = send(self, *statements)
        words = cursor.query.decode()
        if not any(asked in words for asked in ASKED_BY_TIME):
            sent.append(words)
        return cursor

    monkeypatch.setattr(HotSession, "_run", note)
    request_id = post(served, "text/async", TEXT, key)["id"]
    job = post(served, "text/pop", POP, key)
    post(served, "text/submit", build_reply(job), key)
    served.get(f"/api/v2/generate/text/status/{request_id}")
    assert len(sent) <= 8, sent
