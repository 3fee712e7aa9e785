# SPDX-License-Identifier: AGPL-3.0-or-later
"""Workers that wait for a job at the front: told at once, asked sparingly, and no job lost."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from flask import Flask
from sqlalchemy import func, select

from devtools.services import ServiceAddresses
from horde import redis_ctrl
from horde.classes.base.user import User, hash_api_key
from horde.classes.base.worker import Worker
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.database.account_cache import publish_account_change
from horde.db import transaction
from horde.oai import app as front_app
from horde.oai.pops import Pops
from horde.oai.server import FrontServer
from tests.integration._fake_chat_worker import (
    Body,
    build_chat_submit_body,
    build_pop_body,
    start_anew,
)
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    FrontStack,
    build_client,
    run_front,
    run_front_stack,
    run_native,
    wait_until,
)
from tests.integration.own_redis import OwnRedis
from tests.integration.rows import SECRET, make_user

POP_PATH = "/api/v2/generate/text/pop"
LONG_SECONDS = 30
FRONTS: list[Pops] = []
IDLE = {"id": None, "ids": [], "model": None}


@dataclass
class Gate:
    """In front of the API: counts its pops, and can keep their answers back, or answer itself."""

    pops: int = 0
    held: int = 0
    answers: list[tuple[str, bytes]] = field(default_factory=list)  # instead of the API's
    may_pass: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.may_pass.set()

    def stand_before(self, app: Flask) -> None:
        serve = app.wsgi_app

        def count(environ: Any, start: Any) -> Any:
            if not environ["PATH_INFO"].endswith("/text/pop"):
                return serve(environ, start)
            self.pops += 1
            if self.answers:
                status, body = self.answers.pop(0)
                environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
                start(status, [("Content-Type", "application/json"), ("Retry-After", "1")])
                return [body]
            answer = serve(environ, start)
            if not self.may_pass.is_set():
                self.held += 1
                self.may_pass.wait(PATIENCE_SECONDS)
            return answer

        app.wsgi_app = count  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    server = OwnRedis(Path(tmp_path_factory.mktemp("waiting")))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def addresses(service_urls: ServiceAddresses, redis: OwnRedis) -> ServiceAddresses:
    return replace(service_urls, redis_url=redis.url.removesuffix("/7"))


@pytest.fixture(scope="module")
def gate() -> Gate:
    return Gate()


@pytest.fixture(scope="module", autouse=True)
def _known_fronts() -> Iterator[None]:
    """Keep what each front of this module holds of its workers."""

    def build(*arguments: Any) -> Pops:
        FRONTS.append(Pops(*arguments))
        return FRONTS[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front_app, "Pops", build)
        yield


@pytest.fixture(scope="module")
def shared(addresses: ServiceAddresses, redis: OwnRedis, gate: Gate) -> Iterator[FrontStack]:
    with run_front_stack(
        addresses,
        "waiting_pops",
        native={"trusted_proxies": (ip_network("127.0.0.0/8"),)},
        redis_url=redis.url,
        poll_seconds=0.2,
        subscribed_poll_seconds=600.0,
        max_waiting_pops=40,
        max_waiting_pops_per_caller=20,
        trusted_proxies=(ip_network("127.0.0.0/8"),),
    ) as stack:
        gate.stand_before(stack.horde.app)
        yield stack


@pytest.fixture
def stack(shared: FrontStack, redis: OwnRedis, gate: Gate) -> FrontStack:
    redis_ctrl.state.get().breaker.record_success()  # the test before may have lost Redis
    start_anew()
    gate.answers.clear()
    gate.may_pass.set()
    wait_until(lambda: redis.run("PUBSUB", "NUMSUB", "horde:text_work")[1])
    wait_until(lambda: count_waiting() == 0)
    return shared


def count_waiting() -> int:
    """Workers that wait at any front of this module."""
    return sum(len(pops._waiters) for pops in FRONTS)


def wait_for_job(
    stack: FrontStack,
    seconds: object = LONG_SECONDS,
    *,
    key: str | None = None,
    headers: dict[str, str] | None = None,
    url: str | None = None,
    **changes: Any,
) -> "Future[httpx.Response]":
    """A pop that waits, in a thread."""
    sent = {"apikey": key or stack.horde.owner_key, "prefer": f"wait={seconds}"} | (headers or {})

    def pop() -> httpx.Response:
        with build_client(url or stack.url) as client:
            return client.post(POP_PATH, json=build_pop_body(**changes), headers=sent)

    return stack.threads.submit(pop)


def get_job(answer: httpx.Response) -> Body:
    assert answer.status_code == 200, answer.text
    body = dict(answer.json())
    assert body["id"] is not None, body
    return body


def is_idle(answer: httpx.Response) -> bool:
    assert answer.status_code == 200, answer.text
    return bool({key: answer.json()[key] for key in IDLE} == IDLE)


class HangingUp:
    """A waiting pop whose connection a test ends."""

    def __init__(self, stack: FrontStack, seconds: int = LONG_SECONDS, **changes: Any) -> None:
        port = int(stack.url.rpartition(":")[2])
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        self.connection.request(
            "POST",
            POP_PATH,
            json.dumps(build_pop_body(**changes)),
            {
                "apikey": stack.horde.owner_key,
                "content-type": "application/json",
                "prefer": f"wait={seconds}",
            },
        )

    def hang_up(self) -> None:
        assert self.connection.sock is not None
        self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def await_waiting(count: int = 1) -> None:
    wait_until(lambda: count_waiting() == count)


def await_rest(gate: Gate, count: int = 1) -> int:
    """The pops so far, once so many workers wait and have asked."""
    await_waiting(count)
    waiters = [waiter for pops in FRONTS for waiter in pops._waiters.values()]
    wait_until(lambda: all(waiter.idle and not waiter.is_asking for waiter in waiters))
    return gate.pops


def count_jobs() -> int:
    with transaction() as session:
        return session.scalar(select(func.count()).select_from(TextProcessingGeneration)) or 0


def test_a_waiting_worker_gets_a_chat_job_as_soon_as_it_is_queued(
    stack: FrontStack, gate: Gate
) -> None:
    waiting = wait_for_job(stack)
    asked = await_rest(gate)
    request_id = stack.horde.queue()
    answer = waiting.result(PATIENCE_SECONDS)
    job = get_job(answer)
    assert answer.headers["preference-applied"] == "wait=30"
    assert gate.pops == asked + 1  # once when it came, once when something was there
    assert stack.horde.reply(job["id"]).status_code == 200
    assert stack.horde.status(request_id)["done"]


def test_a_waiting_worker_gets_a_text_job(stack: FrontStack, gate: Gate) -> None:
    waiting = wait_for_job(stack, chat_jobs=None, models=["a/model"])
    await_rest(gate)
    body = {"prompt": "Once", "models": ["a/model"], "params": {"max_length": 64}}
    assert (
        stack.horde.post("/generate/text/async", body, stack.horde.requester_key).status_code == 202
    )
    assert get_job(waiting.result(PATIENCE_SECONDS))["payload"]["prompt"] == "Once"


def test_a_waiting_worker_gets_what_another_gives_back(stack: FrontStack, gate: Gate) -> None:
    _, job = stack.horde.serve()
    waiting = wait_for_job(stack, name="second worker")
    await_rest(gate)
    assert stack.horde.fault(job["id"]).status_code == 200
    assert get_job(waiting.result(PATIENCE_SECONDS))["id"] != job["id"]


def test_without_the_header_nothing_changes(stack: FrontStack) -> None:
    for preference in ({}, {"prefer": "respond-async"}, {"prefer": "wait=0"}, {"prefer": "wait=x"}):
        headers = {"apikey": stack.horde.owner_key, **preference}
        answer = stack.client.post(POP_PATH, json=build_pop_body(), headers=headers)
        assert is_idle(answer)
        assert "preference-applied" not in answer.headers
    stack.horde.queue()
    headers = {"apikey": stack.horde.owner_key}
    get_job(stack.client.post(POP_PATH, json=build_pop_body(), headers=headers))


def test_other_paths_of_the_api_are_not_at_the_front(stack: FrontStack) -> None:
    for path in ("/api/v2/generate/text/submit", "/api/v2/workers", f"{POP_PATH}/"):
        assert stack.client.post(path, json={}).status_code == 404
    refused = stack.client.get(POP_PATH)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST, OPTIONS")
    assert set(refused.json()) == {"message"}


def test_a_job_that_waits_already_is_handed_out_at_once(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    stack.horde.queue()
    answer = wait_for_job(stack).result(PATIENCE_SECONDS)
    get_job(answer)
    assert answer.headers["preference-applied"] == "wait=30"


def test_a_wait_ends_with_the_idle_answer(stack: FrontStack) -> None:
    started = time.monotonic()
    answer = wait_for_job(stack, 1).result(PATIENCE_SECONDS)
    assert is_idle(answer)
    assert time.monotonic() - started >= 1
    assert answer.headers["preference-applied"] == "wait=1"


def test_quoted_and_repeated_headers_are_read_as_the_rfc_has_it(stack: FrontStack) -> None:
    headers = [("apikey", stack.horde.owner_key), ("prefer", 'wait="1"'), ("prefer", "wait=20")]
    answer = stack.client.post(POP_PATH, json=build_pop_body(), headers=headers)
    assert is_idle(answer)
    assert answer.headers["preference-applied"] == "wait=1"


def test_work_for_others_asks_nobody(stack: FrontStack, gate: Gate) -> None:
    stack.horde.take_nothing(name="other", model="other/model")
    waiting = wait_for_job(stack)
    asked = await_rest(gate)
    stack.horde.queue(model="other/model")
    time.sleep(0.5)
    assert gate.pops == asked
    stack.horde.queue()
    get_job(waiting.result(PATIENCE_SECONDS))


def test_only_as_many_workers_ask_as_there_are_jobs(stack: FrontStack, gate: Gate) -> None:
    waiting = [wait_for_job(stack, name=f"worker {number}") for number in range(4)]
    waiting += [wait_for_job(stack, name=f"worker {number}") for number in range(4)]
    asked = await_rest(gate, 8)
    stack.horde.queue()
    wait_until(lambda: any(answer.done() for answer in waiting))
    await_waiting(7)
    time.sleep(0.3)
    assert gate.pops == asked + 1
    for _ in range(7):
        stack.horde.queue()
    ids = {get_job(answer.result(PATIENCE_SECONDS))["id"] for answer in waiting}
    assert len(ids) == 8


def test_a_job_that_the_first_may_not_take_goes_to_the_next(stack: FrontStack, gate: Gate) -> None:
    _, plain_key = make_user()
    first = wait_for_job(stack, key=plain_key, name="untrusted")
    await_rest(gate)
    second = wait_for_job(stack, name="trusted")
    await_rest(gate, 2)
    stack.horde.queue(horde={"trusted_workers": True})
    get_job(second.result(PATIENCE_SECONDS))
    assert not first.done()
    stack.horde.queue()
    get_job(first.result(PATIENCE_SECONDS))


def test_a_worker_that_hangs_up_waits_no_more(stack: FrontStack, gate: Gate) -> None:
    gone = HangingUp(stack)
    await_rest(gate)
    gone.hang_up()
    await_waiting(0)
    asked = gate.pops
    stack.horde.queue()
    time.sleep(0.3)
    assert (gate.pops, count_jobs()) == (asked, 0)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_job_assigned_while_its_worker_vanished_is_given_back(
    stack: FrontStack, gate: Gate, is_first: bool
) -> None:
    stack.horde.take_nothing()
    if is_first:
        request_id = stack.horde.queue()
        gate.may_pass.clear()
        gone = HangingUp(stack)
    else:
        gone = HangingUp(stack)
        await_rest(gate)
        gate.may_pass.clear()
        request_id = stack.horde.queue()
    wait_until(count_jobs)  # the API has assigned it, and its answer is on the way
    gone.hang_up()
    await_waiting(0)
    gate.may_pass.set()
    wait_until(lambda: stack.horde.status(request_id)["waiting"] == 1)
    job = get_job(wait_for_job(stack, name="next").result(PATIENCE_SECONDS))
    assert stack.horde.reply(job["id"]).status_code == 200
    assert stack.horde.status(request_id)["done"]


def test_a_job_for_a_plain_pop_whose_worker_vanished_is_given_back(
    stack: FrontStack, gate: Gate
) -> None:
    stack.horde.take_nothing()
    request_id = stack.horde.queue()
    gate.may_pass.clear()
    gone = HangingUp(stack, seconds=0)
    wait_until(count_jobs)
    gone.hang_up()
    time.sleep(0.2)
    gate.may_pass.set()
    wait_until(lambda: stack.horde.status(request_id)["waiting"] == 1)


def test_all_generations_of_a_vanished_worker_are_given_back(stack: FrontStack, gate: Gate) -> None:
    options: Body = {"chat_jobs": None, "models": ["a/model"], "amount": 2}
    stack.horde.take_nothing(**options)
    body = {"prompt": "Once", "models": ["a/model"], "params": {"n": 2, "max_length": 64}}
    queued = stack.horde.post("/generate/text/async", body, stack.horde.requester_key)
    assert queued.status_code == 202, queued.json
    gate.may_pass.clear()
    gone = HangingUp(stack, **options)
    wait_until(lambda: count_jobs() == 2)
    gone.hang_up()
    await_waiting(0)
    gate.may_pass.set()
    path = f"/generate/text/status/{queued.json['id']}"
    wait_until(lambda: cast(Any, stack.horde.get(path).json)["waiting"] == 2)


def test_a_hint_while_the_first_question_is_asked_is_not_missed(
    stack: FrontStack, gate: Gate
) -> None:
    stack.horde.take_nothing()
    gate.may_pass.clear()
    held = gate.held
    waiting = wait_for_job(stack)
    wait_until(lambda: gate.held > held)  # it found nothing, and does not know yet
    stack.horde.queue()
    gate.may_pass.set()
    get_job(waiting.result(PATIENCE_SECONDS))


def test_a_worker_put_into_maintenance_while_it_waits_gets_no_job(
    stack: FrontStack, gate: Gate
) -> None:
    waiting = wait_for_job(stack)
    await_rest(gate)
    with transaction() as session:
        worker_id = session.scalar(select(Worker.id).where(Worker.name == "chat worker"))
    changed = stack.horde.client.put(
        f"/api/v2/workers/{worker_id}",
        json={"maintenance": True},
        headers={"apikey": stack.horde.owner_key},
    )
    assert changed.status_code == 200, changed.json
    stack.horde.queue()
    answer = waiting.result(PATIENCE_SECONDS)
    assert (answer.status_code, answer.json()["rc"]) == (403, "WorkerMaintenance")
    assert "preference-applied" not in answer.headers
    assert count_jobs() == 0


def test_a_worker_that_was_deleted_while_it_waits_registers_anew(
    stack: FrontStack, gate: Gate
) -> None:
    waiting = wait_for_job(stack)
    await_rest(gate)
    with transaction() as session:
        worker_id = session.scalar(select(Worker.id).where(Worker.name == "chat worker"))
    gone = stack.horde.client.delete(
        f"/api/v2/workers/{worker_id}", headers={"apikey": stack.horde.owner_key}
    )
    assert gone.status_code == 200, gone.json
    stack.horde.take_nothing(name="other")
    stack.horde.queue()
    get_job(waiting.result(PATIENCE_SECONDS))
    with transaction() as session:
        new_id = session.scalar(select(Worker.id).where(Worker.name == "chat worker"))
    assert new_id not in {None, worker_id}


def test_a_key_that_was_reset_while_its_worker_waits_gets_no_job(
    stack: FrontStack, gate: Gate
) -> None:
    user_id, key = make_user()
    waiting = wait_for_job(stack, key=key, name="old key")
    await_rest(gate)
    reset_key(user_id)
    stack.horde.queue()
    answer = waiting.result(PATIENCE_SECONDS)
    assert (answer.status_code, answer.json()["rc"]) == (401, "InvalidAPIKey")
    assert count_jobs() == 0


def reset_key(user_id: int) -> None:
    with transaction() as session:
        user = session.get_one(User, user_id)
        user.api_key = hash_api_key("another key", SECRET)
    publish_account_change(user_id)


def test_a_refusal_comes_back_as_the_api_says_it(stack: FrontStack) -> None:
    answer = wait_for_job(stack, key="no such key").result(PATIENCE_SECONDS)
    assert (answer.status_code, answer.json()["rc"]) == (401, "InvalidAPIKey")
    answer = wait_for_job(stack, models=[], chat_jobs=None).result(PATIENCE_SECONDS)
    assert (answer.status_code, answer.json()["rc"]) == (400, "BadRequest")
    headers = {"apikey": stack.horde.owner_key, "prefer": "wait=5"}
    for content, media, status in (
        (b"{", "application/json", 400),
        (b"[]", "application/json", 400),
        (b"[" * 50_000, "application/json", 400),
        (b'"\xff"', "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"", "application/json", 400),
    ):
        sent = headers | {"content-type": media}
        refused = stack.client.post(POP_PATH, content=content, headers=sent)
        assert refused.status_code == status, (content[:20], refused.text)
        assert refused.headers["content-type"].startswith("application/json")
        assert isinstance(refused.json()["message"], str)


def test_a_body_over_the_limit_is_refused_in_the_apis_form(stack: FrontStack) -> None:
    content = b" " * (10 * 1024 * 1024 + 1)
    headers = {"apikey": stack.horde.owner_key, "content-type": "application/json"}
    refused = stack.client.post(POP_PATH, content=content, headers=headers)
    assert (refused.status_code, refused.json()["rc"]) == (413, "RequestTooLarge")


def test_a_long_body_is_served_and_does_not_wait(stack: FrontStack) -> None:
    body = build_pop_body() | {"padding": "x" * 40_000}
    headers = {"apikey": stack.horde.owner_key, "prefer": "wait=20"}
    answer = stack.client.post(POP_PATH, json=body, headers=headers)
    assert is_idle(answer)
    assert "preference-applied" not in answer.headers


def test_too_many_of_one_address_are_refused_in_json(stack: FrontStack, gate: Gate) -> None:
    waiting = [HangingUp(stack, name=f"worker {number % 4}") for number in range(20)]
    await_rest(gate, 20)
    answer = wait_for_job(stack).result(PATIENCE_SECONDS)
    assert answer.status_code == 429
    assert set(answer.json()) == {"message"}
    assert int(answer.headers["retry-after"]) > 0
    # A plain pop is served all the same.
    headers = {"apikey": stack.horde.owner_key}
    assert is_idle(stack.client.post(POP_PATH, json=build_pop_body(), headers=headers))
    for one in waiting:
        one.hang_up()
    await_waiting(0)
    again = wait_for_job(stack, 1).result(PATIENCE_SECONDS)
    assert is_idle(again)


def test_too_many_in_all_are_refused_in_json(stack: FrontStack, gate: Gate) -> None:
    with run_front(replace(stack.config, max_waiting_pops=1)) as url:
        waiting = wait_for_job(stack, 3, url=url)
        await_rest(gate)
        other = {"x-forwarded-for": "203.0.113.1"}
        key = stack.horde.requester_key
        answer = wait_for_job(stack, 3, url=url, key=key, headers=other).result(PATIENCE_SECONDS)
        assert answer.status_code == 503
        assert set(answer.json()) == {"message"}
        assert int(answer.headers["retry-after"]) > 0
        assert is_idle(waiting.result(PATIENCE_SECONDS))


def test_the_api_sees_the_workers_own_address(stack: FrontStack) -> None:
    answer = wait_for_job(
        stack, 1, headers={"x-forwarded-for": "198.51.100.7"}, name="far away"
    ).result(PATIENCE_SECONDS)
    assert is_idle(answer)
    with transaction() as session:
        address = session.scalar(select(Worker.ipaddr).where(Worker.name == "far away"))
    assert address == "198.51.100.7"


def test_a_worker_cannot_choose_its_address_by_headers_of_its_own(stack: FrontStack) -> None:
    cautious = replace(stack.config, trusted_proxies=())
    with run_front(cautious) as url:
        for name in ("x-forwarded-for", "horde-popping-address", "proxied-for"):
            headers = {name: "198.51.100.8"}
            answer = wait_for_job(stack, 1, headers=headers, url=url, name=name)
            assert is_idle(answer.result(PATIENCE_SECONDS))
            with transaction() as session:
                address = session.scalar(select(Worker.ipaddr).where(Worker.name == name))
            assert address == "127.0.0.1"


def test_a_front_the_api_does_not_trust_is_refused_for_workers_elsewhere(
    addresses: ServiceAddresses,
) -> None:
    with run_front_stack(
        addresses, "untrusted_front", trusted_proxies=(ip_network("127.0.0.0/8"),)
    ) as stack:
        headers = {"x-forwarded-for": "198.51.100.7"}
        answer = wait_for_job(stack, 1, headers=headers).result(PATIENCE_SECONDS)
        assert (answer.status_code, answer.json()["rc"]) == (403, "Forbidden")
        assert "HORDE_TRUSTED_PROXIES" in answer.json()["message"]
        with transaction() as session:
            assert session.scalar(select(func.count()).select_from(Worker)) == 0
        # From the front's own machine there is nothing to believe.
        assert is_idle(wait_for_job(stack, 1).result(PATIENCE_SECONDS))


def test_a_busy_or_failing_api_is_asked_again_while_a_worker_waits(
    stack: FrontStack, gate: Gate
) -> None:
    waiting = wait_for_job(stack)
    await_rest(gate)
    gate.answers += [("503 Busy", b'{"message": "busy"}'), ("500 No", b"<html>"), ("200 OK", b"no")]
    stack.horde.queue()
    get_job(waiting.result(PATIENCE_SECONDS))
    assert not gate.answers


def test_an_api_that_is_restarted_while_workers_wait_is_asked_again(
    stack: FrontStack, gate: Gate
) -> None:
    with contextlib.ExitStack() as first_run:
        native_url = first_run.enter_context(run_native(stack.horde.app))
        port = int(native_url.removesuffix("/api").rpartition(":")[2])
        with run_front(replace(stack.config, native_url=native_url)) as url:
            waiting = wait_for_job(stack, url=url)
            await_rest(gate)
            first_run.close()
            stack.horde.queue()  # its hint leads to a closed port
            time.sleep(0.3)
            assert not waiting.done()
            with run_native(stack.horde.app, port):
                get_job(waiting.result(PATIENCE_SECONDS))


def test_an_api_that_is_away_at_the_first_question_is_a_502_in_json(stack: FrontStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/api"
    with run_front(replace(stack.config, native_url=address)) as url:
        answer = wait_for_job(stack, 5, url=url).result(PATIENCE_SECONDS)
        assert answer.status_code == 502
        assert set(answer.json()) == {"message"}


def test_workers_that_wait_while_redis_is_lost_ask_by_themselves(
    stack: FrontStack, gate: Gate, redis: OwnRedis
) -> None:
    waiting = wait_for_job(stack)
    await_rest(gate)
    redis.kill()
    try:
        stack.horde.queue()
        get_job(waiting.result(PATIENCE_SECONDS))
    finally:
        redis.start()


def test_work_that_came_while_redis_was_lost_is_found_when_it_is_back(
    stack: FrontStack, gate: Gate, redis: OwnRedis
) -> None:
    patient = replace(stack.config, poll_seconds=3.0)
    with run_front(patient) as url:
        wait_until(lambda: redis.run("PUBSUB", "NUMSUB", "horde:text_work")[1] == 2)
        waiting = wait_for_job(stack, url=url)
        await_rest(gate)
        redis.kill()
        redis.start()
        get_job((stack.horde.queue(), waiting.result(PATIENCE_SECONDS))[1])


def test_a_front_that_ends_answers_its_waiting_workers_at_once(stack: FrontStack) -> None:
    with running_server(stack) as (url, server):
        waiting = wait_for_job(stack, url=url)
        wait_until(lambda: server._pops._waiters)
        wait_until(lambda: all(one.idle for one in server._pops._waiters.values()))
        started = time.monotonic()
        server.should_exit = True
        answer = waiting.result(PATIENCE_SECONDS)
        assert is_idle(answer)
        assert time.monotonic() - started < LONG_SECONDS / 2


@contextlib.contextmanager
def running_server(stack: FrontStack) -> Iterator[tuple[str, Any]]:
    """The front as it is run, in a thread; its address and the server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = FrontServer(stack.config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
        finally:
            server.should_exit = True
            thread.join(PATIENCE_SECONDS)


def test_workers_waiting_at_two_fronts_share_the_jobs(stack: FrontStack, gate: Gate) -> None:
    with run_front(stack.config) as url:
        waiting = [
            wait_for_job(stack, name=f"worker {number}", url=url if number % 2 else None)
            for number in range(4)
        ]
        wait_until(lambda: gate.pops >= 4)
        time.sleep(0.5)
        for _ in range(4):
            stack.horde.queue()
        ids = {get_job(answer.result(PATIENCE_SECONDS))["id"] for answer in waiting}
    assert len(ids) == 4


def test_every_request_of_a_burst_is_served_by_waiting_workers(
    stack: FrontStack, gate: Gate
) -> None:
    """Workers pop, serve and pop again while requests come in; nothing waits for a timer."""
    total, done, lock = 40, [0], threading.Lock()
    stop = threading.Event()

    def work(number: int) -> None:
        with build_client(stack.url) as client:
            while not stop.is_set():
                headers = {"apikey": stack.horde.owner_key, "prefer": "wait=2"}
                body = build_pop_body(name=f"worker {number}")
                popped = client.post(POP_PATH, json=body, headers=headers).json()
                if popped["id"] is None:
                    continue
                reply = stack.horde.post(
                    "/generate/text/submit",
                    build_chat_submit_body(popped["id"]),
                    stack.horde.owner_key,
                )
                assert reply.status_code == 200, reply.json
                with lock:
                    done[0] += 1

    workers = [stack.threads.submit(work, number) for number in range(4)]
    await_rest(gate, 4)
    for _ in range(total):
        stack.horde.queue()
    try:
        wait_until(lambda: done[0] == total, 30)
    finally:
        stop.set()
    for worker in workers:
        worker.result(PATIENCE_SECONDS)
