# SPDX-License-Identifier: AGPL-3.0-or-later
"""What happens to streamed jobs when something dies under them: no request is lost, no job paid
twice, no lease left behind.

The workers are scripted and do what the contract tells them; the rest is real. Each test uses a
model of its own.
"""

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from devtools.services import ServiceAddresses
from horde.redis_ctrl import chat_signal_db
from tests.acceptance._stack import (
    WITH_WIDE_LIMITS,
    Account,
    Answer,
    Api,
    Commands,
    FailingServices,
    Horde,
    ScriptedWorker,
    build_reply,
    running_horde,
    wait_until,
)

pytestmark = pytest.mark.slow

JOB_COUNT = 50
POST_COUNT = 8  # of each job
POST_SECONDS = 0.3
SKEW_SECONDS = 2.0
OUTAGE_SECONDS = 120  # how long a worker tries; a test ends long before


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingServices]:
    """A Postgres and a Redis nobody else uses."""
    services = FailingServices(tmp_path_factory.mktemp("streaming failures") / "state")
    try:
        services.start()
        yield services
    finally:
        services.close()


@pytest.fixture(scope="module")
def settings(services: FailingServices, service_urls: ServiceAddresses) -> dict[str, str]:
    """Where an API finds them."""
    return service_urls.build_environment() | {
        "DATABASE_URL": services.postgres.url,
        "REDIS_URL": services.valkey.url,
    }


@pytest.fixture(scope="module")
def horde(settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Horde]:
    """The API with two processes."""
    with running_horde(settings, tmp_path_factory.mktemp("horde"), **WITH_WIDE_LIMITS) as horde:
        yield horde


@pytest.fixture(scope="module")
def owner(horde: Horde) -> Account:
    return horde.create_account("owner")


@pytest.fixture(scope="module")
def client(horde: Horde) -> Account:
    return horde.create_account("client", is_trusted=False)


@pytest.fixture
def streams(services: FailingServices) -> Iterator[redis.Redis]:
    """The logical database of leases and streams."""
    with redis.Redis.from_url(
        services.valkey.url, db=chat_signal_db, decode_responses=True
    ) as connection:
        yield connection


def make_worker(
    horde: Horde, owner: Account, name: str, model: str | None = None
) -> ScriptedWorker:
    """An online worker that takes many chats at a time."""
    worker = ScriptedWorker(
        horde.api,
        owner.key,
        name,
        model or f"tests/{name}",
        takes_chat=True,
        changes={"threads": JOB_COUNT},
    )
    assert worker.pop() is None
    return worker


def pop_streamed_jobs(
    horde: Horde, client: Account, worker: ScriptedWorker, count: int
) -> dict[str, dict[str, Any]]:
    """As many jobs by their request."""
    jobs = {}
    for _ in range(count):
        request_id = horde.api.queue_chat(client.key, worker.model, stream=True)
        jobs[request_id] = worker.require_job()
    return jobs


def list_pieces(job: dict[str, Any]) -> list[str]:
    """What a scripted worker posts for a job, a piece a post."""
    return [f"{job['id'][:4]} {number}. " for number in range(POST_COUNT)]


def retry(call: Callable[[], Answer]) -> Answer:
    """Call until something answers other than "not now"."""
    deadline = time.monotonic() + OUTAGE_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            answer = call()
            if answer.status_code not in (429, 502, 503):
                return answer
        assert time.monotonic() < deadline
        time.sleep(0.1)


@dataclass
class StreamingCrowd:
    """Workers of as many streamed jobs at once, and what they were told."""

    worker: ScriptedWorker
    posts: Counter[str] = field(default_factory=Counter)
    """Accepted posts of each job."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Of each job: ``settled``, or the word of the horde that ended it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stream(self, job: dict[str, Any]) -> None:
        """Post piece by piece, then submit, as the table of the contract says."""
        posts = True
        pieces = list_pieces(job)
        for seq, piece in enumerate(pieces, 1):
            time.sleep(POST_SECONDS)
            if not posts:
                continue
            answer = retry(
                lambda seq=seq, piece=piece: self.worker.post_progress(job["id"], seq, piece)
            )  # type: ignore[misc]
            if answer.status_code == 200:
                with self.lock:
                    self.posts[job["id"]] += 1
                if answer.json()["cancelled"]:
                    self.outcomes[job["id"]] = "cancelled"
                    return
            elif answer.json()["rc"] == "ChatJobAborted":
                self.outcomes[job["id"]] = "ChatJobAborted"
                return
            else:
                assert answer.json()["rc"] == "ChatProgressNotStreaming", answer.text
                posts = False
        answer = retry(lambda: self.worker.post_reply(job, "".join(pieces)))
        # Stored before its answer was lost.
        stored = answer.status_code == 200 or answer.json().get("rc") == "DuplicateGen"
        self.outcomes[job["id"]] = "settled" if stored else str(answer.json())


@contextlib.contextmanager
def streaming(crowd: StreamingCrowd, jobs: dict[str, dict[str, Any]]) -> Iterator[None]:
    """All jobs at once, until the end of the block and of the jobs."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        running = [threads.submit(crowd.stream, job) for job in jobs.values()]
        yield
        for thread in running:
            thread.result(OUTAGE_SECONDS)


def assert_each_job_is_paid_once(horde: Horde, owner: Account) -> None:
    """As many payments to the workers' owner as replies and cancelled jobs, and nothing held or in
    doubt.
    """
    settled = "generation IS NOT NULL OR settled_character_count IS NOT NULL"
    paid_jobs = horde.database.value(f"SELECT count(*) FROM processing_gens WHERE {settled}")
    assert horde.count_payments(owner) == paid_jobs
    assert (
        horde.database.value(
            "SELECT count(*) FROM processing_gens WHERE generation IS NULL AND NOT faulted"
        )
        == 0
    )
    assert horde.audit()["discrepancies"] == []
    assert horde.database.value("SELECT count(*) FROM kudos_reservations WHERE active") == 0


def assert_all_replied(horde: Horde, jobs: dict[str, dict[str, Any]]) -> None:
    for request_id, job in jobs.items():
        status = horde.api.get_status("chat", request_id)
        assert (status["done"], status["faulted"], status["restarted"]) == (True, False, 0), status
        (generation,) = status["generations"]
        assert generation["message"]["content"] == "".join(list_pieces(job))


def read_stream(streams: redis.Redis, request_id: str) -> list[dict[str, str]]:
    return [entry for _, entry in streams.xrange(f"horde:chat:stream:{request_id}")]


def list_leases(streams: redis.Redis) -> list[str]:
    return list(streams.scan_iter("horde:chat:lease:*"))


def test_a_redis_that_comes_back_empty_costs_streams_and_nothing_else(
    horde: Horde, services: FailingServices, streams: redis.Redis, client: Account, owner: Account
) -> None:
    worker = make_worker(horde, owner, "redis lost")
    jobs = pop_streamed_jobs(horde, client, worker, JOB_COUNT)
    cancelled = dict(list(jobs.items())[:5])
    crowd = StreamingCrowd(worker)
    with streaming(crowd, jobs):
        wait_until(lambda: len(crowd.posts) == JOB_COUNT and crowd.posts.total() >= 2 * JOB_COUNT)
        services.stop("valkey", SIGKILL)
        for request_id in cancelled:
            answer = horde.api.http.delete(f"/generate/chat/status/{request_id}")
            assert answer.status_code == 200
        late = horde.api.queue_chat(client.key, worker.model, stream=True)
        services.start_again("valkey")
    kept = {request_id: job for request_id, job in jobs.items() if request_id not in cancelled}
    assert {crowd.outcomes[job["id"]] for job in cancelled.values()} == {"ChatJobAborted"}
    assert {crowd.outcomes[job["id"]] for job in kept.values()} == {"settled"}
    assert any(crowd.posts[job["id"]] < POST_COUNT for job in kept.values())
    assert_all_replied(horde, kept)
    for request_id in cancelled:
        status = horde.api.get_status("chat", request_id)
        assert (status["finished"], status["processing"], status["waiting"]) == (0, 0, 0)

    job = worker.require_job()  # streams work again, for what is popped from now on
    with streaming(crowd, {late: job}):
        pass
    assert "".join(entry["content"] for entry in read_stream(streams, late)) == "".join(
        list_pieces(job)
    )
    assert list_leases(streams) == []
    assert worker.pop() is None
    assert_each_job_is_paid_once(horde, owner)


def test_a_killed_api_loses_no_entry_and_no_reply(
    horde: Horde, streams: redis.Redis, client: Account, owner: Account
) -> None:
    worker = make_worker(horde, owner, "api killed")
    jobs = pop_streamed_jobs(horde, client, worker, JOB_COUNT)
    crowd = StreamingCrowd(worker)
    with streaming(crowd, jobs):
        wait_until(lambda: len(crowd.posts) == JOB_COUNT and crowd.posts.total() >= 2 * JOB_COUNT)
        horde.api.kill()
        horde.api.start()
    assert set(crowd.outcomes.values()) == {"settled"}
    assert_all_replied(horde, jobs)
    for request_id, job in jobs.items():
        entries = read_stream(streams, request_id)
        assert [(entry["seq"], entry["content"]) for entry in entries] == [
            (str(seq), piece) for seq, piece in enumerate(list_pieces(job), 1)
        ]
    assert list_leases(streams) == []
    assert worker.pop() is None
    assert_each_job_is_paid_once(horde, owner)


def test_a_vanished_workers_job_is_offered_again_once(
    horde: Horde, streams: redis.Redis, client: Account, owner: Account
) -> None:
    worker = make_worker(horde, owner, "vanished")
    other = make_worker(horde, owner, "follower", worker.model)
    ((request_id, job),) = pop_streamed_jobs(horde, client, worker, 1).items()
    assert worker.post_progress(job["id"], 1, "I was").status_code == 200
    assert other.pop() is None
    horde.end_leases(job["id"])
    horde.clean_up()
    second = other.require_job()
    assert [other.pop(), worker.pop()] == [None, None]
    assert second["payload"]["stream_progress"] is True

    late_post, late_reply = worker.post_progress(job["id"], 2, " here"), worker.post_reply(job)
    assert (late_post.status_code, late_post.json()["rc"]) == (404, "ChatJobAborted")
    assert (late_reply.status_code, late_reply.json()["rc"]) == (400, "AbortedGen")

    crowd = StreamingCrowd(other)
    with streaming(crowd, {request_id: second}):
        pass
    entries = read_stream(streams, request_id)
    assert [(entry["gen"], entry.get("ended")) for entry in entries[:2]] == [
        (job["id"], None),
        (job["id"], "1"),
    ]
    assert "".join(entry["content"] for entry in entries[2:]) == "".join(list_pieces(second))
    status = horde.api.get_status("chat", request_id)
    assert (status["restarted"], status["finished"], status["done"]) == (1, 1, True)
    assert list_leases(streams) == []
    assert_each_job_is_paid_once(horde, owner)


def test_two_leaders_at_once_end_each_job_once(
    horde: Horde, streams: redis.Redis, client: Account, owner: Account
) -> None:
    worker = make_worker(horde, owner, "led twice")
    other = make_worker(horde, owner, "led on", worker.model)
    jobs = pop_streamed_jobs(horde, client, worker, 20)
    for job in jobs.values():
        assert worker.post_progress(job["id"], 1, "x").status_code == 200
    uncompleted = "SELECT uncompleted_jobs FROM workers WHERE name = %s"
    before = horde.database.value(uncompleted, worker.name)
    with contextlib.ExitStack() as stack:
        leaders = [horde.commands, Commands(horde.environment)]
        stack.callback(leaders[1].close)
        for leader in leaders:
            # Everything is imported, so that the next passes run at the same time.
            leader.require("clean-up")
        horde.end_leases(*(job["id"] for job in jobs.values()))
        with ThreadPoolExecutor(len(leaders)) as threads:
            list(threads.map(lambda leader: leader.require("clean-up"), leaders))

    assert horde.database.value(uncompleted, worker.name) == before + len(jobs)
    assert list_leases(streams) == []
    for request_id, job in jobs.items():
        assert horde.api.get_status("chat", request_id)["restarted"] == 1
        ended = [entry["gen"] for entry in read_stream(streams, request_id) if entry.get("ended")]
        assert ended == [job["id"]]
    again = [other.require_job() for _ in jobs]
    assert len({job["id"] for job in again}) == len(jobs)
    assert other.pop() is None
    for job in again:
        other.submit(job)
    assert all(horde.api.get_status("chat", request_id)["done"] for request_id in jobs)
    assert list_leases(streams) == []
    assert_each_job_is_paid_once(horde, owner)


@contextlib.contextmanager
def running_api_with_skew(horde: Horde, folder: Path, seconds: float) -> Iterator[Api]:
    """A second host of the same horde whose clock is ahead by so many seconds."""
    environment = {**horde.environment, "SKEW_SECONDS": str(seconds)}
    api = Api(environment, folder, module="tests.acceptance._skewed")
    try:
        api.start()
        yield api
    finally:
        api.close()


def test_hosts_whose_clocks_differ_serve_one_stream(
    horde: Horde, streams: redis.Redis, client: Account, owner: Account, tmp_path: Path
) -> None:
    worker = make_worker(horde, owner, "skewed")
    with running_api_with_skew(horde, tmp_path, SKEW_SECONDS) as second:
        elsewhere = ScriptedWorker(
            second, owner.key, worker.name, worker.model, takes_chat=True, changes=worker.changes
        )
        jobs = {}
        for host in (worker, elsewhere):
            request_id = host.api.queue_chat(client.key, worker.model, stream=True)
            jobs[request_id] = host.require_job()
        deadlines: dict[str, list[int]] = {job["id"]: [job["ttl"]] for job in jobs.values()}
        for seq in range(1, 9):
            host = (worker, elsewhere)[seq % 2]
            for job in jobs.values():
                answer = host.post_progress(job["id"], seq, f"{seq} ")
                assert answer.json() == {"accepted_seq": seq, "cancelled": False}
                deadlines[job["id"]].append(
                    horde.database.value(
                        "SELECT job_ttl FROM processing_gens WHERE id = %s", job["id"]
                    )
                )
            time.sleep(0.2)
        horde.clean_up()
        for seconds in deadlines.values():
            assert seconds == sorted(seconds)  # a deadline never moves back
            assert seconds[-1] <= 150 + OUTAGE_SECONDS
        # Each where it was not popped.
        for (request_id, job), host in zip(jobs.items(), (elsewhere, worker), strict=True):
            answer = host.api.post(
                "/generate/text/submit", build_reply(job, "1 2 3 4 5 6 7 8 "), host.key
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["reward"] > 0
            assert [entry["seq"] for entry in read_stream(streams, request_id)] == [
                str(seq) for seq in range(1, 9)
            ]
        # At once there and here: popped by the one, cancelled by the other.
        request_id = worker.api.queue_chat(client.key, worker.model, stream=True)
        job = elsewhere.require_job()
        assert worker.post_progress(job["id"], 1, "Blue").status_code == 200
        assert worker.api.http.delete(f"/generate/chat/status/{request_id}").status_code == 200
        assert elsewhere.post_progress(job["id"], 2, " it is").json()["cancelled"] is True
    speed = horde.database.value("SELECT speed FROM workers WHERE name = %s", worker.name)
    assert 0 < speed < 10_000
    assert_each_job_is_paid_once(horde, owner)
    # A cancelled one is kept for its worker until it expires.
    streams.delete(f"horde:chat:lease:{job['id']}")


def test_a_reader_that_never_reads_holds_up_nobody(
    horde: Horde, services: FailingServices, streams: redis.Redis, client: Account, owner: Account
) -> None:
    worker = make_worker(horde, owner, "unread")
    request_id = horde.api.queue_chat(client.key, worker.model, stream=True, max_tokens=1000)
    job = worker.require_job()
    text = "word " * 1600
    assert worker.post_progress(job["id"], 1, text).status_code == 200
    others = pop_streamed_jobs(horde, client, worker, 3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(ask_without_reading(services.valkey.url, request_id))
        with streaming(StreamingCrowd(worker), others):
            assert worker.post_progress(job["id"], 2, "more").status_code == 200
        worker.submit(job, f"{text}more")
    assert_all_replied(horde, others)
    assert [entry["seq"] for entry in read_stream(streams, request_id)] == ["1", "2"]
    assert list_leases(streams) == []
    assert_each_job_is_paid_once(horde, owner)


@contextlib.contextmanager
def ask_without_reading(redis_url: str, request_id: str) -> Iterator[None]:
    """A reader that asks for a stream of 8 kB a thousand times, far more than its socket holds, and
    takes no answer.
    """
    address = urlsplit(redis_url)
    login = (
        f"AUTH {address.username or 'default'} {address.password}\r\n" if address.password else ""
    )
    with socket.create_connection((address.hostname or "", address.port or 0), 10) as connection:
        connection.sendall(f"{login}SELECT {chat_signal_db}\r\n".encode())
        connection.sendall(f"XRANGE horde:chat:stream:{request_id} - +\r\n".encode() * 1000)
        yield
