# SPDX-License-Identifier: AGPL-3.0-or-later
"""What dies while the horde serves, and what must not be lost or done twice then.

The workers are scripted, the rest is real: two API processes, a Postgres that waits for the disk, a
Redis. Each test uses a model of its own, so that none sees the requests of another.
"""

import contextlib
import gzip
import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4

import httpx
import pytest

from devtools.processes import read_start_stamp
from devtools.services import ServiceAddresses
from horde.chat_contract import MAX_CHAT_BODY_BYTES
from tests.acceptance._stack import (
    WITH_WIDE_LIMITS,
    Account,
    Answer,
    FailingServices,
    Horde,
    ScriptedWorker,
    build_chat_request,
    build_reply,
    build_text_request,
    running_bridge,
    running_horde,
    wait_until,
)

pytestmark = pytest.mark.slow

JSON = "application/json; charset=utf-8"
REQUEST_COUNT = 200
# What twenty calls of a kind may take more than twice what they take with Redis, which is the
# measure of how busy the machine is. A driver that retries by itself takes four for one.
# So many calls take eight seconds and more when each of them waits for Redis.
CALLS = 40
SPARE_SECONDS = 5.0


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingServices]:
    """A Postgres and a Redis nobody else uses."""
    services = FailingServices(tmp_path_factory.mktemp("failing") / "state")
    try:
        services.start()
        yield services
    finally:
        services.close()


@pytest.fixture(scope="module")
def horde(
    services: FailingServices,
    service_urls: ServiceAddresses,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Horde]:
    """The API on them, with limits so wide that tests don't meet them."""
    addresses = service_urls.build_environment() | {
        "DATABASE_URL": services.postgres.url,
        "REDIS_URL": services.valkey.url,
    }
    with running_horde(addresses, tmp_path_factory.mktemp("horde"), **WITH_WIDE_LIMITS) as horde:
        yield horde


@pytest.fixture(scope="module")
def owner(horde: Horde) -> Account:
    """Whose workers they are."""
    return horde.create_account("owner")


@pytest.fixture(scope="module")
def client(horde: Horde) -> Account:
    """Who asks; a trusted account would have limits of its own from its address."""
    return horde.create_account("client", is_trusted=False)


def make_worker(horde: Horde, owner: Account, name: str, **more: Any) -> ScriptedWorker:
    """An online worker of both kinds of jobs, with a model named after it."""
    worker = ScriptedWorker(horde.api, owner.key, name, f"tests/{name}", takes_chat=True, **more)
    assert worker.pop() is None
    return worker


def retry(call: Callable[[], Answer], stop: threading.Event) -> Answer | None:
    """Call until something answers other than "not now"; None when the test is over."""
    while not stop.is_set():
        with contextlib.suppress(httpx.TransportError):
            answer = call()
            if answer.status_code not in (429, 503):
                return answer
        time.sleep(0.1)
    return None


@dataclass
class Crowd:
    """Requesters and workers in threads that retry through an outage, and what they were told."""

    horde: Horde
    client: Account
    worker: ScriptedWorker
    stop: threading.Event = field(default_factory=threading.Event)
    # Id to kind and number of generations.
    accepted: dict[str, tuple[str, int]] = field(default_factory=dict)
    popped: set[str] = field(default_factory=set)
    # Job to how often its submit was answered with success.
    settled: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, float] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def request(self, number: int) -> None:
        """Queue one request; chats carry a key, so that a lost answer is repeated and not queued
        twice.
        """
        if number % 3 == 0:
            kind, n = "chat", 1
            body = build_chat_request(self.worker.model, horde={"operation_key": str(uuid4())})
        else:
            kind, n = "text", 1 + number % 2
            body = build_text_request(self.worker.model, n=n)
        answer = retry(
            lambda: self.horde.api.post(f"/generate/{kind}/async", body, self.client.key), self.stop
        )
        if answer is None:
            return
        with self.lock:
            if answer.status_code in (200, 202):
                self.accepted[answer.json()["id"]] = (kind, n)
            else:
                self.unexpected.append(f"request: {answer.status_code} {answer.text}")

    def work(self) -> None:
        """Pop and submit until the test is over."""
        while not self.stop.is_set():
            answer = retry(self.worker.post_pop, self.stop)
            if answer is None:
                return
            if answer.status_code != 200:
                self.unexpected.append(f"pop: {answer.status_code} {answer.text}")
                return
            job = answer.json()
            if job["id"] is None:
                time.sleep(0.1)
                continue
            self.popped.add(job["id"])
            self.submit(job)

    def submit(self, job: dict[str, Any]) -> None:
        """Hand in a reply until it is answered, as a good worker does."""
        answer = retry(lambda: self.worker.post_reply(job, f"reply of {job['id']}"), self.stop)
        if answer is None:
            return
        with self.lock:
            if answer.status_code == 200:
                self.rewards[job["id"]] = answer.json()["reward"]
            elif answer.json().get("rc") != "DuplicateGen":  # stored before its answer was lost
                self.unexpected.append(f"submit: {answer.status_code} {answer.text}")
                return
            self.settled[job["id"]] += 1


def test_killed_servers_lose_no_request_and_pay_no_job_twice(
    horde: Horde, client: Account, owner: Account
) -> None:
    worker = make_worker(horde, owner, "killed")
    worker.changes = {"threads": 50}
    crowd = Crowd(horde, client, worker)
    with ThreadPoolExecutor(20) as requesters, ThreadPoolExecutor(8) as workers:
        try:
            requests = [requesters.submit(crowd.request, number) for number in range(REQUEST_COUNT)]
            serving = [workers.submit(crowd.work) for _ in range(8)]
            wait_until(
                lambda: len(crowd.accepted) >= REQUEST_COUNT // 2 and len(crowd.settled) >= 20
            )
            horde.api.kill()

            # Jobs whose pop was never answered belong to nobody: their lease has to end. So must
            # requests that died between their row and its activation.
            pending = horde.database.rows(
                "SELECT id FROM processing_gens WHERE generation IS NULL AND NOT faulted"
            )
            horde.end_leases(*({str(job_id) for (job_id,) in pending} - crowd.popped))
            horde.database.rows(
                "UPDATE waiting_prompts SET created = created - interval '1 hour' WHERE NOT active"
            )
            horde.api.start()
            for request in requests:
                request.result()
            assert len(crowd.accepted) == REQUEST_COUNT, crowd.unexpected
            statuses = {
                request_id: horde.api.get_status(kind, request_id)
                for request_id, (kind, _) in crowd.accepted.items()
            }
            for status in statuses.values():
                assert (
                    status["done"]
                    or status["waiting"]
                    or status["processing"]
                    or status["restarted"]
                ), status

            for request_id, (kind, n) in crowd.accepted.items():
                status = horde.api.wait_for_reply(kind, request_id)
                assert (status["faulted"], status["finished"], len(status["generations"])) == (
                    False,
                    n,
                    n,
                )
            wait_until(lambda: count_unfinished(horde) == 0)
        finally:
            crowd.stop.set()
        for thread in serving:
            thread.result()

    assert crowd.unexpected == []
    assert_each_reply_is_paid_once(horde, owner)
    assert horde.audit()["discrepancies"] == []
    assert horde.database.value("SELECT count(*) FROM kudos_reservations WHERE active") == 0
    # A lost answer may have left a text request that nobody knows; nothing else may.
    requested = horde.database.value(
        "SELECT count(*) FROM waiting_prompts WHERE active AND is_chat"
    )
    assert requested == sum(kind == "chat" for kind, _ in crowd.accepted.values())


def count_unfinished(horde: Horde) -> int:
    """Active requests that have not ended."""
    return int(
        horde.database.value(
            "SELECT count(*) FROM waiting_prompts WHERE active AND terminal_outcome IS NULL"
        )
    )


def assert_each_reply_is_paid_once(horde: Horde, owner: Account) -> None:
    """As many stored replies as payments to their workers' owner, as charges beside the tax, and as
    the workers' own counts.
    """
    replies = horde.database.value(
        "SELECT count(*) FROM processing_gens WHERE generation IS NOT NULL"
    )
    assert horde.count_payments(owner) == replies
    # One for each request that was activated.
    taxes = horde.database.value("SELECT count(*) FROM waiting_prompts WHERE active")
    charges = horde.database.value(
        "SELECT count(*) FROM kudos_ledger WHERE entry_type = 'GENERATION' AND amount < 0"
    )
    assert charges == replies + taxes
    events = horde.database.value(
        "SELECT count(DISTINCT event_id) FROM kudos_ledger WHERE entry_type = 'GENERATION'"
    )
    assert events == replies + taxes
    wait_until(lambda: horde.count_unfolded() == 0)
    assert horde.database.value("SELECT sum(fulfilments) FROM workers") == replies


def test_another_process_takes_over_from_a_killed_leader(
    horde: Horde, client: Account, owner: Account
) -> None:
    worker = make_worker(horde, owner, "leaderless")
    request_id = horde.api.queue_text(client.key, worker.model)
    lost = worker.require_job()
    leader = wait_until(horde.api.find_leader)
    horde.end_leases(lost["id"])

    os.kill(leader, signal.SIGKILL)

    # A kept connection may have been the dead process's.
    with contextlib.suppress(httpx.TransportError):
        horde.api.is_serving()
    wait_until(
        lambda: horde.database.value(
            "SELECT count(*) FROM processing_gens WHERE id = %s AND faulted", lost["id"]
        )
    )
    assert horde.api.get_status("text", request_id)["restarted"] == 1
    wait_until(lambda: horde.api.find_leader() not in (None, leader))
    worker.submit(worker.require_job())
    wait_until(lambda: horde.count_unfolded() == 0)
    assert horde.api.get_status("text", request_id)["finished"] == 1


@pytest.mark.parametrize("way", ["stopped", "frozen"])
def test_without_redis_everything_but_progress_works(
    horde: Horde, services: FailingServices, client: Account, owner: Account, way: str
) -> None:
    worker = make_worker(horde, owner, f"redisless {way}")
    usual, known = time_calls(lambda: horde.api.queue_chat(client.key, worker.model))
    quick = SPARE_SECONDS + 2 * usual
    for request_id in known[1:]:
        horde.api.http.delete(f"/generate/chat/status/{request_id}")
    waiting = known[0]
    streamed_id, streamed = take_streamed_job(horde, client, owner, f"streaming {way}")
    if way == "stopped":
        services.stop("valkey", signal.SIGKILL)
    else:
        services.send("valkey", signal.SIGSTOP)
    try:
        uncompleted = count_uncompleted_jobs(horde, worker)
        seconds, queued = time_calls(lambda: horde.api.queue_chat(client.key, worker.model))
        assert seconds < quick
        seconds, posts = time_calls(lambda: streamed.post_progress(streamed_id, 2, "ue"))
        assert seconds < quick
        assert {(post.status_code, post.json()["rc"]) for post in posts} == {
            (503, "ChatProgressUnavailable")
        }
        seconds, jobs = time_calls(worker.require_job)
        assert seconds < quick
        seconds, rewards = time_calls(lambda: worker.submit(jobs.pop()))
        assert seconds < quick
        assert all(reward > 0 for reward in rewards)
        seconds, statuses = time_calls(lambda: horde.api.get_status("chat", queued[0]))
        assert seconds < quick
        doomed = [horde.api.queue_text(client.key, worker.model) for _ in range(CALLS)]
        seconds, cancels = time_calls(
            lambda: horde.api.http.delete(f"/generate/text/status/{doomed.pop()}").status_code
        )
        assert (seconds < quick, set(cancels)) == (True, {200})
        assert count_uncompleted_jobs(horde, worker) == uncompleted
    finally:
        if way == "stopped":
            services.start_again("valkey")  # empty
        else:
            services.send("valkey", signal.SIGCONT)

    progress = retry(lambda: streamed.post_progress(streamed_id, 2, "ue"), threading.Event())
    assert progress is not None
    if way == "stopped":  # the lease is lost, the job is not
        assert (progress.status_code, progress.json()["rc"]) == (404, "ChatProgressNotStreaming")
    else:
        assert progress.status_code == 200, progress.text
    streamed.submit({"id": streamed_id, "model": streamed.model, "chat": True})
    # The jobs went to the oldest 20 of 21 requests.
    assert {status["finished"] for status in statuses} == {1}
    worker.submit(worker.require_job())
    assert worker.pop() is None
    for request_id in [waiting, *queued]:
        assert horde.api.get_status("chat", request_id)["finished"] == 1
    assert horde.audit()["discrepancies"] == []


def take_streamed_job(
    horde: Horde, client: Account, owner: Account, name: str
) -> tuple[str, ScriptedWorker]:
    """The id of a streamed job of which one post was accepted, and its worker, which serves a model
    of its own.
    """
    worker = make_worker(horde, owner, name)
    horde.api.queue_chat(client.key, worker.model, stream=True)
    job = worker.require_job()
    assert job["payload"]["stream_progress"] is True
    answer = worker.post_progress(job["id"], 1, "Bl")
    assert answer.json() == {"accepted_seq": 1, "cancelled": False}
    return job["id"], worker


def time_calls[T](call: Callable[[], T], count: int = CALLS) -> tuple[float, list[T]]:
    """How long so many calls take, one after the other, and what they answered."""
    started = time.monotonic()
    answers = [call() for _ in range(count)]
    return time.monotonic() - started, answers


def count_uncompleted_jobs(horde: Horde, worker: ScriptedWorker) -> int:
    return int(
        horde.database.value("SELECT uncompleted_jobs FROM workers WHERE name = %s", worker.name)
    )


def list_plain_routes(horde: Horde) -> list[str]:
    """Every documented route that is read without anything in its path."""
    document = httpx.get(f"{horde.api.url}/swagger.json", verify=False).json()
    return [
        path.removeprefix("/v2")
        for path, methods in document["paths"].items()
        if "get" in methods and "{" not in path
    ]


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGQUIT], ids=["shut down", "crashed"])
def test_without_postgres_answers_are_503_and_nothing_promised_is_lost(
    horde: Horde, services: FailingServices, client: Account, owner: Account, way: signal.Signals
) -> None:
    worker = make_worker(horde, owner, f"baseless {way.name}")
    finished, held, waiting = (horde.api.queue_chat(client.key, worker.model) for _ in range(3))
    worker.submit(worker.require_job(), "before")
    job = worker.require_job()
    accepted = horde.api.queue_text(client.key, worker.model)
    processes = horde.api.list_process_ids()

    services.stop("postgres", way)
    try:
        calls: dict[str, Callable[[], Answer]] = {
            "text": lambda: horde.api.post(
                "/generate/text/async", build_text_request(worker.model), client.key
            ),
            "chat": lambda: horde.api.post(
                "/generate/chat/async", build_chat_request(worker.model), client.key
            ),
            "status": lambda: horde.api.http.get(f"/generate/chat/status/{finished}"),
            "cancel": lambda: horde.api.http.delete(f"/generate/chat/status/{waiting}"),
            "pop": worker.post_pop,
            "submit": lambda: worker.post_reply(job, "after"),
        }
        for name, call in calls.items():
            for _ in range(4):  # both processes, and those of their connections that were open
                started = time.monotonic()
                answer = call()
                assert (answer.status_code, answer.headers["content-type"]) == (503, JSON), (
                    name,
                    answer.text,
                )
                assert answer.json()["message"]
                assert time.monotonic() - started < 30, name
        for route in list_plain_routes(horde):
            answer = horde.api.http.get(route, headers={"apikey": client.key})
            # What is read from a copy is answered still.
            assert answer.status_code == 503 or answer.status_code < 500, (route, answer.text)
            assert answer.headers["content-type"] == JSON, route
        assert horde.api.http.get("/status/heartbeat").status_code == 200
    finally:
        services.start_again("postgres")

    wait_until(lambda: horde.api.http.get(f"/generate/chat/status/{finished}").status_code == 200)
    assert horde.api.get_status("chat", finished)["generations"][0]["text"] == "before"
    worker.submit(job, "after")
    assert horde.api.get_status("chat", held)["generations"][0]["text"] == "after"
    worker.submit(worker.require_job())
    worker.submit(worker.require_job())
    assert horde.api.get_status("chat", waiting)["finished"] == 1
    assert horde.api.get_status("text", accepted)["finished"] == 1
    assert horde.api.list_process_ids() == processes
    # Waits for the periodic jobs, which have come back too.
    assert horde.audit()["discrepancies"] == []


def test_a_request_in_flight_at_the_end_is_finished(
    horde: Horde, client: Account, owner: Account
) -> None:
    worker = make_worker(horde, owner, "ended")
    body = json.dumps(build_text_request(worker.model)).encode()
    head = build_head("/api/v2/generate/text/async", client.key, f"Content-Length: {len(body)}")
    with socket.create_connection(("127.0.0.1", horde.api.port), 30) as connection:
        connection.sendall(head + body[:20])
        time.sleep(0.5)
        horde.api.process.terminate()
        time.sleep(0.5)
        connection.sendall(body[20:])
        status, answer = read_answer(connection)
    assert horde.api.process.wait(60) == 0
    assert status == 202
    horde.api.start()
    worker.submit(worker.require_job())
    assert horde.api.get_status("text", answer["id"])["finished"] == 1


class StuckBackend(ThreadingHTTPServer):
    """An OpenAI-compatible server that never answers a chat; ``asked`` is set by the first one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), StuckHandler)
        self.asked, self.over = threading.Event(), threading.Event()


class StuckHandler(BaseHTTPRequestHandler):
    server: StuckBackend

    def do_GET(self) -> None:
        content = json.dumps({"data": [{"id": "stuck", "max_model_len": 4096}]}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        if self.path == "/v1/chat/completions":
            self.server.asked.set()
            self.server.over.wait()
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@contextlib.contextmanager
def running_stuck_backend() -> Iterator[StuckBackend]:
    with StuckBackend() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


def test_the_job_of_a_killed_bridge_is_offered_again_once(
    horde: Horde, client: Account, owner: Account
) -> None:
    model = "tests/stuck"
    options = ["--model", model, "--supports", "prompt_overflow_refused"]
    with running_stuck_backend() as backend:
        address = f"http://127.0.0.1:{backend.server_address[1]}"
        with running_bridge(horde, owner.key, address, "stuck bridge", *options) as bridge:
            request_id = horde.api.queue_chat(client.key, model)
            assert backend.asked.wait(60)
            bridge.kill()
            bridge.wait()
    assert horde.api.get_status("chat", request_id)["processing"] == 1
    others = [
        ScriptedWorker(horde.api, owner.key, f"heir {number}", model, takes_chat=True)
        for number in range(6)
    ]
    assert [worker.pop() for worker in others] == [None] * 6  # its lease holds

    (held,) = horde.database.rows(
        "SELECT id, model FROM processing_gens WHERE wp_id = %s", request_id
    )
    horde.end_leases(str(held[0]))
    horde.clean_up()
    horde.clean_up()  # a pass that runs twice gives nothing back twice
    status = horde.api.get_status("chat", request_id)
    assert (status["waiting"], status["processing"], status["restarted"], status["finished"]) == (
        1,
        0,
        1,
        0,
    )

    with ThreadPoolExecutor(6) as pool:
        popped = list(pool.map(lambda worker: (worker, worker.pop()), others))
    ((heir, job),) = [(worker, job) for worker, job in popped if job is not None]
    late = horde.api.post(
        "/generate/text/submit",
        build_reply({"id": str(held[0]), "model": model, "chat": True}, "too late"),
        owner.key,
    )
    assert (late.status_code, late.json()["rc"]) == (400, "AbortedGen")
    heir.submit(job, "in time")
    status = horde.api.get_status("chat", request_id)
    assert (status["done"], status["finished"], status["generations"][0]["text"]) == (
        True,
        1,
        "in time",
    )
    assert (
        horde.database.value("SELECT uncompleted_jobs FROM workers WHERE name = 'stuck bridge'")
        == 1
    )
    assert horde.audit()["discrepancies"] == []


# Malformed traffic


def build_head(path: str, key: str, *headers: str) -> bytes:
    """The head of a JSON POST that closes its connection."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: a",
        "Connection: close",
        f"apikey: {key}",
        "Content-Type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def read_answer(connection: socket.socket) -> tuple[int, Any]:
    """Status and JSON of the one answer that a connection brings, which has to say that it is
    JSON.
    """
    received = b""
    with contextlib.suppress(ConnectionResetError):  # the rest of the body was not wanted
        while chunk := connection.recv(65536):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), received[:300]
    return int(head.split(b" ")[1]), json.loads(body)


def send(horde: Horde, *parts: bytes) -> tuple[int, Any]:
    """Send bytes on a connection of their own; the answer."""
    with socket.create_connection(("127.0.0.1", horde.api.port), 60) as connection:
        for part in parts:
            connection.sendall(part)
        return read_answer(connection)


@pytest.fixture
def steady(horde: Horde) -> Iterator[Horde]:
    """The horde, which has to be served by the same processes afterwards."""
    before = horde.api.list_process_ids()
    yield horde
    assert horde.api.http.get("/status/heartbeat").status_code == 200
    assert horde.api.list_process_ids() == before
    assert all(read_start_stamp(pid) is not None for pid in before)


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", 400),
        (b"GET /api/v2/status/heartbeat HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n", 400),
        (
            b"GET /api/v2/status/heartbeat HTTP/1.1\r\nHost: a\r\nX-A: "
            + b"a" * 100_000
            + b"\r\n\r\n",
            431,
        ),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (
            b"GET / HTTP/1.1\r\nHost: a\r\n"
            + b"".join(b"X-%d: a\r\n" % number for number in range(300))
            + b"\r\n",
            431,
        ),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
        (
            (
                b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            ),
            400,
        ),
    ],
    ids=[
        "tls",
        "no path",
        "version",
        "header",
        "huge header",
        "huge path",
        "many headers",
        "length",
        "two lengths",
        "both",
    ],
)
def test_a_request_that_is_no_http_is_refused_in_json(
    steady: Horde, request_bytes: bytes, expected: int
) -> None:
    status, body = send(steady, request_bytes)
    assert (status, isinstance(body["message"], str)) == (expected, True)


def test_a_chunked_chat_over_the_bound_is_refused(steady: Horde, client: Account) -> None:
    head = build_head("/api/v2/generate/chat/async", client.key, "Transfer-Encoding: chunked")
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    count = MAX_CHAT_BODY_BYTES // 0x100000 + 1
    status, body = send(steady, head, *[chunk] * count, b"0\r\n\r\n")
    assert (status, body["rc"]) == (413, "RequestTooLarge")


def test_a_declared_chat_over_the_bound_is_refused(steady: Horde, client: Account) -> None:
    head = build_head(
        "/api/v2/generate/chat/async", client.key, f"Content-Length: {MAX_CHAT_BODY_BYTES + 1}"
    )
    status, body = send(steady, head, b"{")
    assert (status, body["rc"]) == (413, "RequestTooLarge")


@pytest.mark.parametrize(
    "route",
    ["generate/text/async", "generate/chat/async", "generate/text/pop", "generate/text/submit"],
)
def test_a_compressed_body_is_refused(steady: Horde, client: Account, route: str) -> None:
    body = gzip.compress(b" " * 50_000_000)
    head = build_head(
        f"/api/v2/{route}", client.key, "Content-Encoding: gzip", f"Content-Length: {len(body)}"
    )
    assert send(steady, head, body)[0] == 415


def test_a_body_that_breaks_off_is_refused(steady: Horde, client: Account) -> None:
    head = build_head("/api/v2/generate/chat/async", client.key, "Content-Length: 100")
    with socket.create_connection(("127.0.0.1", steady.api.port), 60) as connection:
        connection.sendall(head + b'{"model"')
        connection.shutdown(socket.SHUT_WR)
        status, body = read_answer(connection)
    assert (status, body["rc"]) == (400, "BadRequest")


HOSTILE = [
    None,
    True,
    -1,
    1e308,
    10**400,
    "",
    "\u0000",
    "\ud800",
    "a" * 5000,
    [],
    [[]],
    {},
    {"": None},
    [None] * 50,
    {"type": "function"},
    "00000000-0000-0000-0000-000000000000",
]


def test_no_json_of_any_shape_is_answered_with_a_5xx(
    steady: Horde, client: Account, owner: Account
) -> None:
    """Each key of a good body in turn, at each depth, gets each hostile value."""
    worker = make_worker(steady, owner, "hostile")
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    chat = build_chat_request(
        worker.model,
        tools=[tool],
        tool_choice="auto",
        stop=["x"],
        seed=1,
        horde={"dry_run": True},
        response_format={"type": "text"},
    )
    steady.api.queue_chat(client.key, worker.model)
    job = worker.require_job()
    pop = {
        "name": "hostile",
        "models": ["a"],
        "chat_jobs": True,
        "model_id": "a",
        "chat_limits": {"max_length": 1},
    }
    bodies = {
        "generate/text/async": (
            client.key,
            build_text_request("tests/nobody", stop_sequence=["x"]) | {"dry_run": True},
        ),
        "generate/chat/async": (client.key, chat),
        "generate/text/pop": (
            owner.key,
            pop | {"threads": 1, "amount": 1, "priority_usernames": ["a#1"]},
        ),
        "generate/text/submit": (
            owner.key,
            build_reply(job, "x") | {"gen_metadata": [], "prompt_tokens": 1},
        ),
    }
    draw = random.Random(1)
    for route, (key, body) in bodies.items():
        for path in list_paths(body):
            for value in draw.sample(HOSTILE, 6):
                raw = json.dumps(replace_at(body, path, value)).encode("utf-8", "surrogatepass")
                answer = post_raw(steady, route, raw, key)
                said = (route, path, value, answer.status_code, answer.text[:200])
                assert answer.status_code < 500, said
                assert answer.headers["content-type"] == JSON, said
                assert isinstance(answer.json(), dict), said
    for raw in (
        b"",
        b"nul",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"\xef\xbb\xbf{}",
    ):
        for route in bodies:
            answer = post_raw(steady, route, raw, client.key)
            while answer.status_code == 429:  # a fast machine meets the limit of 60 a second
                time.sleep(1.0)
                answer = post_raw(steady, route, raw, client.key)
            assert (answer.status_code, answer.headers["content-type"]) == (400, JSON), (
                route,
                raw[:20],
                answer.text,
            )


def post_raw(horde: Horde, route: str, body: bytes, key: str) -> Answer:
    """POST bytes as JSON."""
    return horde.api.http.post(
        f"/{route}", content=body, headers={"apikey": key, "Content-Type": "application/json"}
    )


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, the whole included."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(found for key, item in inner for found in list_paths(item, (*path, key)))]


def replace_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value in one place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replace_at(copy[path[0]], path[1:], new)
    return copy


def test_the_log_of_all_this_has_no_unforeseen_failure(horde: Horde) -> None:
    """Last: what was answered with 500, or would have been had somebody read it, is in the log."""
    failed = [
        line for line in horde.api.log.read_text().splitlines() if "horde.request.failed" in line
    ]
    assert failed == []
