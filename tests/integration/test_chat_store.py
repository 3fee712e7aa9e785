# SPDX-License-Identifier: AGPL-3.0-or-later
"""Images and offloaded messages of chat requests: how workers get them, and that they go with their
request.
"""

import base64
import http.client
import json
import logging
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from devtools.services import ServiceAddresses
from horde import object_deletes, r2, redis_ctrl
from horde.apis.requests import CONFIG_EXTENSION
from horde.classes.kobold import waiting_prompt
from horde.classes.kobold.waiting_prompt import (
    TextWaitingPrompt,
    delete_stored_chat_images,
    retry_chat_image_deletes,
)
from horde.clock import utcnow
from horde.database import threads
from horde.database.request_endings import delete_requests
from horde.database.sharedkeys import delete_shared_key
from horde.database.text_requests import delete_inactive_request
from horde.db import transaction
from horde.redis_ctrl import RedisUnavailable
from tests.integration._fake_chat_worker import MODEL, ChatHorde, chat_horde, start_anew
from tests.integration.instruments import Counting
from tests.integration.rows import find_job_row, find_request, get_worker, make_chat_worker
from tests.integration.stored_chats import (
    build_jpeg,
    build_messages,
    count_stored,
    list_keys,
    list_waiting_deletes,
    make_stored_chat,
    open_store,
)
from tests.integration.tcp_gate import TcpGate
from tests.integration.test_budgets import counting
from tests.integration.text_horde import make_shared_key

VISION = ["prompt_overflow_refused", "vision"]
LONG_AGO = timedelta(minutes=21)


@pytest.fixture(scope="module")
def gate(service_urls: ServiceAddresses) -> Iterator[TcpGate]:
    gate = TcpGate(service_urls.s3_endpoint)
    yield gate
    gate.close()


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses, gate: TcpGate) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "chat_store", s3_endpoint=gate.url) as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde, gate: TcpGate) -> Iterator[ChatHorde]:
    start_anew()
    redis_ctrl.delete(object_deletes.RETRY_KEY)
    yield module_horde
    open_store(gate)


def fetch(url: str) -> tuple[int, bytes]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}")
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def get_lifetime(url: str) -> int:
    return int(urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)["X-Amz-Expires"][0])


def list_sent_urls(messages: list[dict[str, Any]]) -> list[str]:
    return [
        part["image_url"]["url"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image_url"
    ]


def get_transport(job: dict[str, Any]) -> str | None:
    row = find_job_row(UUID(job["id"]))
    assert row is not None
    return row.image_transport


def expire(request_id: UUID) -> None:
    with transaction() as session:
        session.execute(
            text("UPDATE waiting_prompts SET expiry = :then WHERE id = :id"),
            {"then": utcnow() - LONG_AGO, "id": request_id},
        )


# --- how workers get them
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transports", [["url"], ["url", "base64"], ["base64", "messages_url", "url"]]
)
def test_a_worker_that_fetches_gets_signed_urls(horde: ChatHorde, transports: list[str]) -> None:
    request_id = make_stored_chat(horde.requester_id, image_count=3)
    job = horde.take(chat_features=VISION, image_transports=transports)
    urls = list_sent_urls(job["payload"]["messages"])
    assert [fetch(url) for url in urls] == [(200, build_jpeg(n)) for n in range(3)]
    assert {get_lifetime(url) for url in urls} == {600}
    assert get_transport(job) == "url"
    sent, stored = job["payload"]["messages"], build_messages(request_id, 3, detail="low")
    for place, url in enumerate(urls, start=1):
        stored[1]["content"][place]["image_url"]["url"] = url
    assert sent == stored, "all else is as it was stored"


@pytest.mark.parametrize("transports", [["base64"], ["base64", "messages_url"]])
def test_a_worker_with_base64_alone_gets_the_stored_bytes(
    horde: ChatHorde, transports: list[str]
) -> None:
    make_stored_chat(horde.requester_id, image_count=2)
    job = horde.take(chat_features=VISION, image_transports=transports)
    assert list_sent_urls(job["payload"]["messages"]) == [
        "data:image/jpeg;base64," + base64.b64encode(build_jpeg(n)).decode() for n in range(2)
    ]
    assert get_transport(job) == "base64"


def test_urls_hold_for_a_job_that_may_last_longer() -> None:
    request = TextWaitingPrompt(is_chat=True, messages=build_messages(uuid4(), 1))
    signed: list[int] = []

    class Store:
        def get_object(self, key: str) -> bytes:
            raise AssertionError(key)

        def sign_download_url(self, key: str, lifetime_seconds: int) -> str:
            signed.append(lifetime_seconds)
            return key

    for ttl_seconds in (150, 600, 601):
        request.build_worker_messages(waiting_prompt.ChatImageTransport.URL, ttl_seconds, Store())
    assert signed == [600, 600, 601]


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize(
    "declared",
    [
        {"chat_features": VISION, "image_transports": ["messages_url"]},
        {"chat_features": VISION, "image_transports": []},
        {"chat_features": VISION, "image_transports": None},
        {
            "chat_features": ["prompt_overflow_refused"],
            "image_transports": ["url", "base64", "messages_url"],
        },
    ],
)
def test_images_need_vision_and_url_or_base64(
    horde: ChatHorde, declared: dict[str, Any], is_offloaded: bool
) -> None:
    make_stored_chat(horde.requester_id, is_offloaded=is_offloaded)
    horde.take_nothing(**declared)
    assert horde.take(chat_features=VISION, image_transports=["base64"])["chat"]


def test_what_a_request_with_images_lacks_is_told(horde: ChatHorde) -> None:
    request_id = make_stored_chat(horde.requester_id)
    horde.take_nothing(chat_features=VISION, image_transports=["messages_url"])
    status = horde.status(str(request_id))
    assert status["is_possible"] is False
    assert status["impossible_reason"] == {
        "kind": "declaration_gap",
        "missing_declarations": ["image_transports"],
        "exceeded_limits": [],
    }


def test_offloaded_messages_are_one_url_for_two_minutes(horde: ChatHorde) -> None:
    make_stored_chat(horde.requester_id, image_count=2, is_offloaded=True)
    job = horde.take(chat_features=VISION, image_transports=["url", "messages_url"])
    assert "messages" not in job["payload"]
    url = job["payload"]["messages_url"]
    assert get_lifetime(url) == 120
    status, body = fetch(url)
    assert status == 200
    assert [
        base64.b64decode(sent.partition(",")[2]) for sent in list_sent_urls(json.loads(body))
    ] == [
        build_jpeg(0),
        build_jpeg(1),
    ]
    assert get_transport(job) == "messages_url"


def test_a_worker_without_the_transport_gets_an_offloaded_request_inline(horde: ChatHorde) -> None:
    for transports, sent_as in (["url"], "url"), (["base64"], "base64"):
        make_stored_chat(horde.requester_id, is_offloaded=True)
        job = horde.take(chat_features=VISION, image_transports=transports)
        assert "messages_url" not in job["payload"]
        assert len(list_sent_urls(job["payload"]["messages"])) == 1
        assert get_transport(job) == sent_as


def test_offloaded_text_needs_no_vision(horde: ChatHorde) -> None:
    make_stored_chat(horde.requester_id, image_count=0, is_offloaded=True)
    job = horde.take(image_transports=["messages_url"])
    assert fetch(job["payload"]["messages_url"])[0] == 200
    make_stored_chat(horde.requester_id, image_count=0, is_offloaded=True)
    inline = horde.take(image_transports=None)
    assert inline["payload"]["messages"][0]["content"] == "Describe images briefly."
    assert get_transport(inline) is None


def test_signing_needs_no_store_and_the_store_is_asked_with_no_row_locked(
    horde: ChatHorde, gate: TcpGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = make_stored_chat(horde.requester_id)
    read = r2.get_object
    seen: list[bool] = []

    def get_object(key: str) -> bytes:
        with transaction() as session:  # another connection: it may lock the row, and sees the job
            session.execute(
                text("SELECT 1 FROM waiting_prompts WHERE id = :id FOR UPDATE NOWAIT"),
                {"id": request_id},
            )
            count = session.scalar(
                text("SELECT count(*) FROM processing_gens WHERE wp_id = :id"), {"id": request_id}
            )
            seen.append(count == 1)
        return read(key)

    monkeypatch.setattr(r2, "get_object", get_object)
    horde.take(chat_features=VISION, image_transports=["base64"])
    assert seen == [True]
    make_stored_chat(horde.requester_id)
    gate.close()
    horde.take(chat_features=VISION, image_transports=["url"])


def test_a_job_whose_images_cannot_be_read_is_given_back(horde: ChatHorde, gate: TcpGate) -> None:
    horde.take_nothing(chat_features=VISION)
    request_id = make_stored_chat(horde.requester_id)
    gate.close()
    answer = horde.pop(chat_features=VISION, image_transports=["base64"])
    assert (answer.status_code, answer.json and answer.json["rc"]) == (
        503,
        "ChatImageStorageUnavailable",
    )
    request = find_request(request_id)
    assert request is not None
    assert (request.n, request.faulted) == (1, False)
    open_store(gate)
    job = horde.take(chat_features=VISION, image_transports=["base64"])
    row = find_job_row(UUID(job["id"]))
    assert row is not None
    worker = get_worker(row.worker_id)
    assert (worker.aborted_jobs, worker.uncompleted_jobs) == (0, 0), "the worker did nothing wrong"
    assert horde.reply(job["id"]).status_code == 200


def test_while_the_store_is_left_alone_images_that_would_have_to_be_read_wait(
    horde: ChatHorde, gate: TcpGate
) -> None:
    """Else each pop would give the job back, and the third one would end the request."""
    horde.take_nothing(chat_features=VISION)
    request_id = make_stored_chat(horde.requester_id)
    gate.close()
    reads = {"chat_features": VISION, "image_transports": ["base64", "messages_url"]}
    assert horde.pop(**reads).status_code == 503
    for _ in range(3):
        horde.take_nothing(**reads)
    plain = horde.queue()
    assert horde.status(plain)["waiting"] == 1
    job = horde.take(**reads)
    assert horde.status(plain)["processing"] == 1, "what needs no store is served before it"
    assert horde.reply(job["id"]).status_code == 200
    status = horde.status(str(request_id))
    assert (status["faulted"], status["waiting"], status["is_possible"]) == (False, 1, True)
    fetched = horde.take(chat_features=VISION, image_transports=["url"])
    assert get_transport(fetched) == "url", "signing needs no store"
    open_store(gate)
    waiting = make_stored_chat(horde.requester_id)
    horde.take(**reads)
    assert horde.status(str(waiting))["processing"] == 1


def test_a_request_whose_images_are_gone_ends_as_faulted(horde: ChatHorde) -> None:
    request_id = make_stored_chat(horde.requester_id)
    assert r2.delete_objects(list_keys(request_id)) == []
    for _ in range(3):
        assert horde.pop(chat_features=VISION, image_transports=["base64"]).status_code == 503
    status = horde.status(str(request_id))
    assert (status["faulted"], status["done"]) == (True, True)
    horde.take_nothing(chat_features=VISION, image_transports=["base64"])


@pytest.mark.parametrize("transport", ["url", "base64", "messages_url"])
def test_a_job_with_images_costs_the_database_what_any_job_costs(
    horde: ChatHorde, transport: str
) -> None:
    declared = {"chat_features": VISION, "image_transports": [transport, "base64"]}
    horde.take_nothing(**declared)
    make_stored_chat(horde.requester_id, image_count=2, is_offloaded=True)
    horde.take(**declared)  # the process meets the class of the request
    make_stored_chat(horde.requester_id, image_count=2, is_offloaded=True)
    # Between two check-ins: one that is due costs every pop a statement more.
    with transaction() as session:
        seen = {"then": utcnow() - timedelta(hours=1), "now": utcnow()}
        session.execute(text("UPDATE workers SET created = :then, last_check_in = :now"), seen)
    with counting() as counted:
        job = horde.take(**declared)
    assert get_transport(job) == transport
    assert len(counted.statements) <= 5, counted.statements
    assert counted.transactions <= 2


# --- they go with their request
# --------------------------------------------------------------------------------------


def test_an_expired_request_takes_its_objects_along(horde: ChatHorde) -> None:
    request_id = make_stored_chat(horde.requester_id, image_count=2, is_offloaded=True)
    kept = make_stored_chat(horde.requester_id)
    keys = list_keys(request_id, image_count=2, is_offloaded=True)
    assert count_stored(keys) == 3
    expire(request_id)
    threads.check_waiting_prompts()
    assert find_request(request_id) is None
    assert count_stored(keys) == 0
    assert count_stored(list_keys(kept)) == 1
    assert list_waiting_deletes() == set()


def test_a_request_taken_back_takes_its_objects_along(horde: ChatHorde) -> None:
    inactive = make_stored_chat(horde.requester_id, is_offloaded=True, active=False)
    active = make_stored_chat(horde.requester_id)
    with transaction() as session:
        delete_inactive_request(session, inactive, utcnow())
        delete_inactive_request(session, active, utcnow())
        assert count_stored(list_keys(inactive, is_offloaded=True)) == 2, "not before the commit"
    assert count_stored(list_keys(inactive, is_offloaded=True)) == 0
    assert count_stored(list_keys(active)) == 1


def test_nothing_goes_with_a_deletion_that_is_rolled_back(horde: ChatHorde) -> None:
    request_id = make_stored_chat(horde.requester_id)

    def fail() -> None:
        with transaction() as session:
            assert delete_requests(session, [request_id]) == 1
            raise RuntimeError("after the deletion")

    with pytest.raises(RuntimeError):
        fail()
    assert find_request(request_id) is not None
    assert count_stored(list_keys(request_id)) == 1
    assert list_waiting_deletes() == set()


def test_a_deleted_shared_key_takes_the_objects_of_its_requests_along(horde: ChatHorde) -> None:
    key_id = UUID(make_shared_key(horde.requester_id))
    request_id = make_stored_chat(horde.requester_id, sharedkey_id=key_id, image_count=2)
    with transaction() as session:
        delete_shared_key(session, key_id, utcnow())
    assert find_request(request_id) is None
    assert count_stored(list_keys(request_id, image_count=2)) == 0


def test_objects_that_the_store_keeps_wait_and_go_when_it_is_back(
    horde: ChatHorde, gate: TcpGate
) -> None:
    request_id = make_stored_chat(horde.requester_id, image_count=2, is_offloaded=True)
    keys = list_keys(request_id, image_count=2, is_offloaded=True)
    expire(request_id)
    counting = Counting("horde.store.deletes")
    gate.close()
    threads.check_waiting_prompts()
    assert find_request(request_id) is None, "the request does not wait for the store"
    assert list_waiting_deletes() == set(keys)
    assert (
        redis_ctrl.call(redis_ctrl.cache_db, lambda client: client.ttl(object_deletes.RETRY_KEY))
        == -1
    )
    threads.check_waiting_prompts()
    assert list_waiting_deletes() == set(keys)
    open_store(gate)
    assert count_stored(keys) == 3
    threads.check_waiting_prompts()
    assert count_stored(keys) == 0
    assert list_waiting_deletes() == set()
    figures = {str(attributes["horde.outcome"]): count for attributes, count in counting.read()}
    assert figures == {"queued": 3, "deleted": 3}


def test_a_tick_retries_a_thousand(horde: ChatHorde, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"{uuid4()}_chat_0.jpg" for _ in range(1005)]
    assert object_deletes.queue_deletes(keys) == []
    assert retry_chat_image_deletes() == 1000
    assert len(list_waiting_deletes()) == 5
    assert retry_chat_image_deletes() == 5
    assert retry_chat_image_deletes() == 0


def test_past_its_bound_the_set_takes_no_more_and_the_rest_is_logged(
    horde: ChatHorde,
    gate: TcpGate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(object_deletes, "MAX_RETRY_KEYS", 3)
    counting = Counting("horde.store.deletes")
    gate.close()
    with caplog.at_level(logging.ERROR):
        delete_stored_chat_images(["a_chat_0.jpg", "b_chat_0.jpg"])
        delete_stored_chat_images(["a_chat_0.jpg", "c_chat_0.jpg", "d_chat_0.jpg", "b_chat_0.jpg"])
    assert list_waiting_deletes() == {"a_chat_0.jpg", "b_chat_0.jpg", "c_chat_0.jpg"}
    assert [
        record.__dict__["keys"]
        for record in caplog.records
        if record.message == "horde.store.delete_lost"
    ] == [["d_chat_0.jpg"]]
    assert {str(attributes["horde.outcome"]): count for attributes, count in counting.read()} == {
        "queued": 5,
        "lost": 1,
    }


def test_without_redis_and_store_a_key_is_logged_and_nothing_fails(
    horde: ChatHorde,
    gate: TcpGate,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RedisUnavailable("away")

    request_id = make_stored_chat(horde.requester_id)
    expire(request_id)
    monkeypatch.setattr(redis_ctrl, "call", fail)
    gate.close()
    with caplog.at_level(logging.ERROR):
        threads.check_waiting_prompts()
    assert find_request(request_id) is None
    assert [
        record.__dict__["keys"]
        for record in caplog.records
        if record.message == "horde.store.delete_lost"
    ] == [list_keys(request_id)]


def test_without_redis_alone_objects_go(horde: ChatHorde, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RedisUnavailable("away")

    request_id = make_stored_chat(horde.requester_id)
    expire(request_id)
    monkeypatch.setattr(redis_ctrl, "call", fail)
    threads.check_waiting_prompts()
    assert count_stored(list_keys(request_id)) == 0


def test_without_a_store_nothing_waits_for_its_deletion(horde: ChatHorde) -> None:
    """A refused request names images that were never stored."""
    request_id = make_stored_chat(horde.requester_id, active=False)
    config = horde.app.extensions[CONFIG_EXTENSION]
    r2.connect(replace(config, s3_endpoint=""))
    try:
        with transaction() as session:
            delete_inactive_request(session, request_id, utcnow())
        assert find_request(request_id) is None
        assert list_waiting_deletes() == set()
    finally:
        r2.connect(config)


def test_a_cleaner_that_dies_after_the_commit_orphans_nothing(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(_keys: object) -> None:
        raise Killed

    request_id = make_stored_chat(horde.requester_id)
    expire(request_id)
    with monkeypatch.context() as patch:
        patch.setattr(threads, "delete_stored_chat_images", die)
        with pytest.raises(Killed):
            threads.delete_expired_requests()
    assert find_request(request_id) is None
    assert count_stored(list_keys(request_id)) == 1
    assert list_waiting_deletes() == set(list_keys(request_id))
    threads.check_waiting_prompts()
    assert count_stored(list_keys(request_id)) == 0


@pytest.mark.race
def test_two_cleaners_at_once_delete_everything_once(horde: ChatHorde) -> None:
    requests = [make_stored_chat(horde.requester_id) for _ in range(12)]
    for request_id in requests:
        expire(request_id)
    barrier = threading.Barrier(2)

    def clean() -> int:
        barrier.wait()
        count = threads.delete_expired_requests()
        retry_chat_image_deletes()
        return count

    with ThreadPoolExecutor(2) as pool:
        counts = [future.result() for future in [pool.submit(clean), pool.submit(clean)]]
    assert sum(counts) == 12
    assert count_stored([key for request_id in requests for key in list_keys(request_id)]) == 0
    assert list_waiting_deletes() == set()


@pytest.mark.race
def test_a_pop_and_the_expiry_never_both_get_a_request(horde: ChatHorde) -> None:
    """A job's images are there to be read for as long as it may run, whoever comes first."""
    horde.take_nothing(chat_features=VISION)
    for _ in range(10):
        request_id = make_stored_chat(
            horde.requester_id, expiry=utcnow() + timedelta(milliseconds=30)
        )
        barrier = threading.Barrier(2)

        def clean(barrier: threading.Barrier = barrier) -> int:
            barrier.wait()
            return sum(threads.delete_expired_requests() for _ in range(12))

        def pop(barrier: threading.Barrier = barrier) -> Any:
            barrier.wait()
            return horde.pop(chat_features=VISION, image_transports=["base64"])

        with ThreadPoolExecutor(2) as pool:
            cleaned, popped = pool.submit(clean), pool.submit(pop)
            deleted_count, answer = cleaned.result(), popped.result()
        assert answer.status_code == 200
        if answer.json["id"] is None:
            expire(request_id)
            deleted_count += threads.delete_expired_requests()
            assert count_stored(list_keys(request_id)) == 0
        else:
            assert deleted_count == 0
            assert count_stored(list_keys(request_id)) == 1
        start_anew()


def test_a_worker_of_an_older_declaration_is_judged_by_its_row(horde: ChatHorde) -> None:
    """Availability reads the stored declaration, with the same rule as the pop."""
    request_id = make_stored_chat(horde.requester_id)
    make_chat_worker(
        horde.owner_id,
        MODEL,
        chat_features=VISION,
        image_transports=["base64"],
        last_check_in=utcnow(),
    )
    assert horde.status(str(request_id))["is_possible"] is True
