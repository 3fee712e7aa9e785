# SPDX-License-Identifier: AGPL-3.0-or-later
"""Every stored object belongs to a row or waits for its deletion: the audit that proves it, and
attempts to break it.
"""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from devtools.s3 import Store
from devtools.services import ServiceAddresses
from horde import db, object_deletes, r2, redis_ctrl
from horde.apis.requests import CONFIG_EXTENSION
from horde.classes.kobold.waiting_prompt import (
    retry_chat_image_deletes,
)
from horde.cli import _operating
from horde.cli.main import main
from horde.clock import utcnow
from horde.database import threads
from horde.database.objects import StoreReport, audit_store
from horde.db import transaction
from horde.r2 import StoreUnavailable
from tests.integration._fake_chat_worker import ChatHorde, chat_horde, start_anew
from tests.integration.rows import empty_tables
from tests.integration.stored_chats import (
    list_keys,
    list_waiting_deletes,
    make_stored_chat,
    open_store,
)
from tests.integration.tcp_gate import TcpGate

BUCKET = "audited"
VISION = ["prompt_overflow_refused", "vision"]
LARGE = [{"role": "user", "content": "Und so weiter. " * 200}]


@pytest.fixture(scope="module")
def gate(service_urls: ServiceAddresses) -> Iterator[TcpGate]:
    gate = TcpGate(service_urls.s3_endpoint)
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses, gate: TcpGate) -> Iterator[ChatHorde]:
    service = Store(
        service_urls.s3_endpoint, service_urls.s3_access_key, service_urls.s3_secret_key
    )
    # Of its own: other modules' objects belong to other databases.
    bucket = f"{service_urls.bucket}-{BUCKET}"
    assert service.make_bucket(bucket)
    settings: dict[str, Any] = {
        "s3_endpoint": gate.url,
        "source_image_bucket": bucket,
        "chat_messages_bucket": bucket,
        "evidence_bucket": bucket,
        "chat_messages_offload_enabled": True,
        "chat_messages_offload_bytes": 2000,
    }
    with chat_horde(service_urls, "store_audit", **settings) as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde, gate: TcpGate) -> Iterator[ChatHorde]:
    start_anew()
    redis_ctrl.delete(object_deletes.RETRY_KEY)
    assert r2.delete_objects([key for _, key in r2.list_objects()]) == []
    yield module_horde
    open_store(gate)


def audit() -> StoreReport:
    with db.reading() as session:
        return audit_store(session)


def forget_row(request_id: UUID) -> None:
    """Delete a row as nothing in the horde does: without its objects."""
    with transaction() as session:
        session.execute(text("DELETE FROM waiting_prompts WHERE id = :id"), {"id": request_id})


def test_objects_of_rows_and_of_the_retry_set_are_accounted_for(horde: ChatHorde) -> None:
    make_stored_chat(horde.requester_id, image_count=2, is_offloaded=True)
    gone = make_stored_chat(horde.requester_id)
    forget_row(gone)
    object_deletes.queue_deletes(list_keys(gone))
    r2.put_object(f"{uuid4()}_src.webp", b"x", content_type="image/webp")
    report = audit()
    assert (report.objects, report.referenced, report.waiting_for_deletion, report.foreign) == (
        5,
        3,
        1,
        1,
    )
    assert not report.has_discrepancies


def test_what_nothing_names_and_what_is_not_there_are_found(horde: ChatHorde) -> None:
    orphaned = make_stored_chat(horde.requester_id, image_count=2, is_offloaded=True)
    forget_row(orphaned)
    half = make_stored_chat(horde.requester_id, image_count=2)
    stray = f"{half}_chat_7.jpg"  # of a request that lives, and does not name it
    r2.upload_source_image(stray, b"x")
    assert r2.delete_objects([list_keys(half)[0]]) == []
    report = audit()
    assert sorted(report.orphans) == sorted(
        [*list_keys(orphaned, image_count=2, is_offloaded=True), stray]
    )
    assert report.missing == [list_keys(half)[0]]
    assert report.has_discrepancies


def test_the_texts_of_evidence_are_accounted_for(horde: ChatHorde) -> None:
    kept, going, gone, lost = (uuid4() for _ in range(4))
    states = {kept: "stored", going: "deleting", gone: "deleted", lost: "stored"}
    with transaction() as session:
        for object_id, state in states.items():
            session.execute(
                text(
                    "INSERT INTO moderation_events (created, reason, models, is_chat,"
                    " is_anonymised, text_state, text_changed, object_id) VALUES (now(),"
                    " 'model_rejection', '[]', false, false, :state, now(), :object_id)"
                ),
                {"state": state, "object_id": object_id},
            )
    keys = {object_id: f"{object_id}{r2.EVIDENCE_SUFFIX}" for object_id in states}
    for object_id in (kept, going, gone):
        r2.upload_evidence(keys[object_id], b"{}")
    report = audit()
    assert (report.referenced, report.waiting_for_deletion) == (1, 1)
    assert (report.orphans, report.missing) == ([keys[gone]], [keys[lost]])
    empty_tables("moderation_events")


def test_an_ended_request_may_have_lost_its_objects(horde: ChatHorde) -> None:
    request_id = make_stored_chat(horde.requester_id, n=0)
    assert r2.delete_objects(list_keys(request_id)) == []
    assert not audit().has_discrepancies


def test_an_audit_without_the_store_does_not_pass(horde: ChatHorde, gate: TcpGate) -> None:
    gate.close()
    with pytest.raises(StoreUnavailable):
        audit()


@pytest.fixture
def run_command(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """`horde store audit` in this process: (exit code, output, errors)."""
    config = horde.app.extensions[CONFIG_EXTENSION]
    settings = {
        "DATABASE_URL": config.database_url,
        "REDIS_URL": config.redis_url,
        "S3_ENDPOINT": config.s3_endpoint,
        "AWS_ACCESS_KEY_ID": config.s3_access_key,
        "AWS_SECRET_ACCESS_KEY": config.s3_secret_key,
        "R2_SOURCE_IMAGE_BUCKET": config.source_image_bucket,
        "secret_key": "any",
    }
    monkeypatch.setattr(_operating, "configure_logging", lambda _level, _is_json: None)

    def run(**changes: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in (settings | changes).items():
                patch.setenv(name, value)
            exit_code = main(["store", "audit"])
        connect()
        return exit_code, *capsys.readouterr()

    def connect() -> None:
        db.connect(config)
        redis_ctrl.connect(config)
        r2.connect(config)

    yield run
    connect()


def test_the_command_prints_the_report_and_tells_by_its_exit_code(
    horde: ChatHorde, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    request_id = make_stored_chat(horde.requester_id)
    exit_code, output, _ = run_command()
    assert (exit_code, json.loads(output)["referenced"]) == (0, 1)
    forget_row(request_id)
    exit_code, output, _ = run_command()
    assert (exit_code, json.loads(output)["orphans"]) == (1, list_keys(request_id))


def test_the_command_without_the_store_tells_so_and_no_secret(
    horde: ChatHorde, run_command: Callable[..., tuple[int, str, str]]
) -> None:
    exit_code, output, errors = run_command(S3_ENDPOINT="http://127.0.0.1:9")
    assert (exit_code, output) == (2, "")
    assert errors.startswith("horde store: ")
    assert horde.app.extensions[CONFIG_EXTENSION].s3_secret_key not in errors


class Stopwatch:
    """Runs calls again and again until told to stop; what they raise ends the test."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def repeat(self, call: Callable[[], object], pause_seconds: float) -> None:
        while not self.is_over.wait(pause_seconds):
            call()


@pytest.mark.race
@pytest.mark.slow
def test_nothing_is_left_behind_whatever_happens_at_once(horde: ChatHorde, gate: TcpGate) -> None:
    """Submits, pops, replies, cancels, expiries, two cleaners and a store that comes and goes."""
    horde.take_nothing(chat_features=VISION)
    dice = random.Random(5)
    stopwatch = Stopwatch()
    answers: list[int] = []

    def submit() -> None:
        for index in range(9):
            answer = horde.submit(messages=LARGE, horde={"operation_key": str(uuid4())})
            answers.append(answer.status_code)
            if answer.status_code == 202 and index % 3 == 0:
                horde.cancel(answer.json["id"])

    def make_images() -> None:
        for _ in range(9):
            try:
                make_stored_chat(horde.requester_id, image_count=2, active=dice.random() < 0.7)
            except StoreUnavailable:
                time.sleep(0.01)

    def work() -> None:
        answer = horde.pop(
            chat_features=VISION,
            image_transports=dice.choice([["base64"], ["url", "messages_url"]]),
        )
        answers.append(answer.status_code)
        if answer.status_code == 200 and answer.json["id"] is not None:
            horde.reply(answer.json["id"])

    def clean() -> None:
        with transaction() as session:
            some = "SELECT id FROM waiting_prompts LIMIT 2 FOR UPDATE SKIP LOCKED"
            session.execute(
                text(f"UPDATE waiting_prompts SET expiry = :now WHERE id IN ({some})"),
                {"now": utcnow()},
            )
        threads.delete_expired_requests()
        retry_chat_image_deletes()

    def flap() -> None:
        gate.close()
        time.sleep(0.03)
        open_store(gate)

    with ThreadPoolExecutor(8) as pool:
        helpers = [pool.submit(stopwatch.repeat, call, pause) for call, pause in
                   ((work, 0.01), (clean, 0.03), (clean, 0.05), (flap, 0.2))]  # fmt: skip
        makers = [pool.submit(submit), pool.submit(submit), pool.submit(make_images)]
        try:
            for maker in makers:
                maker.result(timeout=120)
        finally:
            stopwatch.is_over.set()
        for helper in helpers:
            helper.result(timeout=60)

    assert set(answers) <= {200, 202, 503}, answers
    assert 202 in answers
    open_store(gate)
    assert audit().orphans == []

    with transaction() as session:
        session.execute(text("UPDATE waiting_prompts SET expiry = :now"), {"now": utcnow()})
    threads.check_waiting_prompts()
    threads.check_waiting_prompts()
    assert list(r2.list_objects()) == []
    assert list_waiting_deletes() == set()
