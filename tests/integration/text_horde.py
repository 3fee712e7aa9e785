# SPDX-License-Identifier: AGPL-3.0-or-later
"""Talking to the text routes as requesters and workers do, and reading what they left in the
database.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

from flask import Flask
from sqlalchemy import func, select, update

from devtools.services import ServiceAddresses
from horde import redis_ctrl
from horde.apis.v2 import kobold
from horde.classes.base.kudos import KudosPosting, KudosReservation
from horde.classes.base.user import ANONYMOUS_KEY, User, UserSharedKey
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.classes.base.worker import Worker
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.clock import utcnow
from horde.database import caches, functions, text_queue, users
from horde.database.kudos import audit_ledger, fold_postings
from horde.db import transaction
from tests.integration.rows import forget_everything, own_horde

KNOWN = "elinas/chronos-70b-v2"  # 68.976648192B
SMALL = "meta-llama/Llama-3.1-8B-Instruct"
ADULT = "KoboldAI/LLaMA2-13B-Tiefighter"  # marked nsfw in the reference
KCPP_AGENT = "KoboldCppEmbedWorker:2:https://github.com/LostRuins/koboldcpp"
_marks = {"postings": 0}
STATUS_KEYS = {
    "finished",
    "processing",
    "restarted",
    "waiting",
    "done",
    "faulted",
    "wait_time",
    "queue_position",
    "kudos",
    "is_possible",
    "eligible_workers",
    "eligible_worker_threads",
    "might_stall",
    "generations",
}


class TextHorde:
    """The text routes of an application; `Any` is the response of the call, whose body a test may
    look into as it is.
    """

    def __init__(self, app: Flask) -> None:
        self.app = app

    def post(self, path: str, body: Any, key: str | None = ANONYMOUS_KEY, **headers: str) -> Any:
        sent = headers if key is None else {"apikey": key, **headers}
        address = sent.pop("address", "127.0.0.1")
        options: dict[str, Any] = {"data": body, "content_type": "application/json"}
        if not isinstance(body, bytes):
            options = {"json": body}
        return self.app.test_client().post(
            f"/api/v2/generate/text/{path}",
            headers=sent,
            environ_base={"REMOTE_ADDR": address},
            **options,
        )

    def ask(
        self, key: str | None = ANONYMOUS_KEY, headers: dict[str, str] | None = None, **body: Any
    ) -> Any:
        """Queue a request; keyword arguments are body keys beside a prompt."""
        return self.post("async", {"prompt": "Once upon a time", **body}, key, **(headers or {}))

    def queue(self, key: str | None = ANONYMOUS_KEY, **body: Any) -> str:
        """The id of a request that was accepted."""
        answer = self.ask(key, **body)
        assert answer.status_code == 202, answer.json
        return str(answer.json["id"])

    def pop(
        self, key: str, name: str = "a worker", headers: dict[str, str] | None = None, **body: Any
    ) -> Any:
        """A worker's pop with a generous declaration."""
        declared = {
            "name": name,
            "models": [KNOWN],
            "max_length": 512,
            "max_context_length": 4096,
            "bridge_agent": KCPP_AGENT,
        }
        return self.post("pop", declared | body, key, **(headers or {}))

    def take(self, key: str, name: str = "a worker", **body: Any) -> dict[str, Any]:
        """The body of a pop that was answered with 200."""
        answer = self.pop(key, name, **body)
        assert answer.status_code == 200, answer.json
        assert isinstance(answer.json, dict)
        return answer.json

    def take_job(self, key: str, name: str = "a worker", **body: Any) -> str:
        """The id of a job that a pop got."""
        job = self.take(key, name, **body)
        assert job["id"] is not None, job
        return str(job["id"])

    def submit(self, key: str, job_id: str, generation: str = "and so on", **body: Any) -> Any:
        return self.post(
            "submit", {"id": job_id, "generation": generation, "state": "ok"} | body, key
        )

    def fault(self, key: str, job_id: str) -> Any:
        return self.submit(key, job_id, "faulted", state="faulted", seed=-1)

    def status(self, request_id: str) -> dict[str, Any]:
        """The body of a status read that found the request."""
        answer = self.app.test_client().get(f"/api/v2/generate/text/status/{request_id}")
        assert answer.status_code == 200, answer.json
        assert isinstance(answer.json, dict)
        return answer.json

    def cancel(self, request_id: str) -> Any:
        return self.app.test_client().delete(f"/api/v2/generate/text/status/{request_id}")


@contextmanager
def own_text_horde(service_urls: ServiceAddresses, name: str, **settings: Any) -> Iterator[Flask]:
    """An application with the text routes on a database of its own."""
    with own_horde(service_urls, name, (kobold,), **settings) as app:
        yield app


def start_clean() -> None:
    """Empty what tests write, and every copy the process keeps."""
    forget_everything()
    redis_ctrl.call(redis_ctrl.address_timeout_db, lambda client: client.flushdb())
    forget_copies()


def forget_copies() -> None:
    """Drop what the process remembers of accounts, workers and the queue."""
    caches.clear_all()
    users.callers.get().clear()
    functions.forget_cached_availability()
    text_queue.forget_queue_snapshot()


def refused(answer: Any) -> tuple[int, str | None]:
    """(status, rc) of a refusal, whose body is JSON with a message."""
    assert answer.content_type.startswith("application/json"), answer.data
    assert isinstance(answer.json, dict)
    assert isinstance(answer.json["message"], str)
    return answer.status_code, answer.json.get("rc")


def make_shared_key(user_id: int, **columns: Any) -> str:
    with transaction() as session:
        sharedkey = UserSharedKey(id=uuid4(), user_id=user_id, **columns)
        session.add(sharedkey)
        session.flush()
        return str(sharedkey.id)


def get_shared_key(sharedkey_id: str) -> UserSharedKey:
    with transaction() as session:
        return session.get_one(UserSharedKey, UUID(sharedkey_id))


def age_worker(name: str, seconds: float) -> None:
    """Let a worker have been created, and have polled, so long ago."""
    away = timedelta(seconds=seconds)
    with transaction() as session:
        session.execute(
            update(Worker)
            .where(Worker.name == name)
            .values(created=Worker.created - away, last_check_in=Worker.last_check_in - away)
        )


def change_worker(name: str, **columns: Any) -> None:
    with transaction() as session:
        session.execute(update(Worker).where(Worker.name == name).values(**columns))
    functions.note_text_workers_changed()


def find_worker(name: str) -> Worker | None:
    with transaction() as session:
        return session.scalar(select(Worker).where(Worker.name == name))


def require_worker(name: str) -> Worker:
    worker = find_worker(name)
    assert worker is not None
    return worker


def change_request(request_id: str, **columns: Any) -> None:
    with transaction() as session:
        session.execute(
            update(WaitingPrompt).where(WaitingPrompt.id == UUID(request_id)).values(**columns)
        )


def get_request(request_id: str) -> TextWaitingPrompt:
    with transaction() as session:
        return session.get_one(TextWaitingPrompt, UUID(request_id))


def count_rows(table: Any) -> int:
    with transaction() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def list_postings(user_id: int, account: str = "balance") -> list[Decimal]:
    """Signed amounts against a user's balance since `forget_postings`, oldest first."""
    with transaction() as session:
        statement = select(KudosPosting.amount).where(
            KudosPosting.user_id == user_id,
            KudosPosting.account == account,
            KudosPosting.id > _marks["postings"],
        )
        return list(session.scalars(statement.order_by(KudosPosting.id)))


def forget_postings() -> None:
    """Let `list_postings` show what is booked from here on."""
    with transaction() as session:
        _marks["postings"] = session.scalar(select(func.max(KudosPosting.id))) or 0


def list_holds() -> list[tuple[Decimal, bool]]:
    """(amount, is active) of every hold."""
    with transaction() as session:
        rows = session.execute(
            select(KudosReservation.amount, KudosReservation.active).order_by(KudosReservation.id)
        )
        return [(row.amount, row.active) for row in rows]


def list_discrepancies() -> tuple[Any, ...]:
    """What a replay of the ledger finds wrong once everything is folded."""
    fold_postings()
    with transaction() as session:
        return audit_ledger(session).discrepancies


def get_user(user_id: int) -> User:
    with transaction() as session:
        return session.get_one(User, user_id)


def minutes_ago(minutes: float) -> datetime:
    return utcnow() - timedelta(minutes=minutes)
