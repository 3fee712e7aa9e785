# SPDX-License-Identifier: AGPL-3.0-or-later
"""What must hold when the pops, posts, lapses and cancels of streamed jobs meet: real connections,
real commits.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from threading import Barrier
from typing import Any
from uuid import UUID

import pytest
from redis import Redis
from sqlalchemy import select, update

from devtools.services import ServiceAddresses
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.worker import Worker
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.database import threads
from horde.db import transaction
from tests.integration._fake_chat_worker import ChatHorde, chat_horde, start_anew
from tests.integration.rows import find_job_row
from tests.integration.text_horde import get_request, list_discrepancies, refused

pytestmark = pytest.mark.race
ROUNDS, SECONDS = 60, 10.0  # a busy machine has fewer rounds


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "stream_races", db_pool_size=20) as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> Iterator[ChatHorde]:
    start_anew()
    module_horde.take_nothing()
    yield module_horde
    assert list_discrepancies() == ()


@pytest.fixture
def redis(horde: ChatHorde, service_urls: ServiceAddresses) -> Iterator[Redis]:
    with Redis.from_url(f"{service_urls.redis_url}/7", decode_responses=True) as client:
        yield client


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What calls answered that started together, in the order of the calls."""
    barrier = Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def rounds() -> Iterator[int]:
    until = time.monotonic() + SECONDS
    for number in range(ROUNDS):
        yield number
        if time.monotonic() > until:
            return


def forget_drops() -> None:
    """Where most rounds end in an abort, their worker would be put into maintenance."""
    with transaction() as session:
        session.execute(update(Worker).values(aborted_jobs=0))


def get_job(job_id: str) -> TextProcessingGeneration:
    job = find_job_row(UUID(job_id))
    assert job is not None
    return job


def read_stream(redis: Redis, request_id: str) -> list[dict[str, str]]:
    return [fields for _, fields in redis.xrange(f"horde:chat:stream:{request_id}")]


def age_job(redis: Redis, job_id: str, seconds: float) -> None:
    """Let a job have been popped so much earlier, for Postgres and Redis alike."""
    with transaction() as session:
        session.execute(
            update(ProcessingGeneration)
            .where(ProcessingGeneration.id == UUID(job_id))
            .values(start_time=ProcessingGeneration.start_time - timedelta(seconds=seconds))
        )
    key = f"horde:chat:lease:{job_id}"
    redis.hset(key, "started", str(float(str(redis.hget(key, "started"))) - seconds))


def test_a_worker_learns_of_a_cancel_however_it_met_the_pop(horde: ChatHorde, redis: Redis) -> None:
    met: Counter[str] = Counter()
    for _ in rounds():
        request_id = horde.queue(stream=True)
        popped, cancelled = at_once(horde.pop, lambda: horde.cancel(request_id))  # noqa: B023
        assert (popped.status_code, cancelled.status_code) == (200, 200)
        job_id = popped.json["id"]
        if job_id is None:
            met["cancelled first"] += 1
            continue
        met["popped first"] += 1
        job = get_job(job_id)
        assert (job.faulted, job.cancelled, get_request(request_id).n) == (True, True, 0)
        age_job(redis, job_id, 2)
        answers = [horde.post_progress(job_id, number, "x").json for number in (1, 2)]
        assert answers == [{"accepted_seq": number, "cancelled": True} for number in (1, 2)]
        assert sum("ended" in entry for entry in read_stream(redis, request_id)) == 1
        assert refused(horde.reply(job_id)) == (400, "AbortedGen")
    assert set(met) <= {"cancelled first", "popped first"}


def test_a_post_at_the_last_moment_renews_or_the_job_is_aborted_once(
    horde: ChatHorde, redis: Redis
) -> None:
    for _ in rounds():
        forget_drops()
        request_id = horde.queue(stream=True)
        job_id = horde.take()["id"]
        started = float(str(redis.hget(f"horde:chat:lease:{job_id}", "started")))
        age_job(redis, job_id, 150 - (time.time() - started) - 0.02)
        posted, aborted, other = at_once(
            lambda: horde.post_progress(job_id),  # noqa: B023
            threads.abort_stale_jobs,
            threads.abort_stale_jobs,
        )
        job, lease = get_job(job_id), dict(redis.hgetall(f"horde:chat:lease:{job_id}"))
        assert aborted + other == int(job.faulted)
        has_ended = [entry for entry in read_stream(redis, request_id) if "ended" in entry]
        if job.faulted:
            assert (lease, len(has_ended), get_request(request_id).n) == ({}, 1, 1)
            assert refused(horde.post_progress(job_id, 2)) == (404, "ChatJobAborted")
        else:
            assert posted.status_code == 200
            assert (str(job.job_ttl), has_ended, get_request(request_id).n) == (
                lease["job_ttl"],
                [],
                0,
            )
        horde.cancel(request_id)


def test_posts_of_one_number_at_once_are_taken_once(horde: ChatHorde, redis: Redis) -> None:
    request_id = horde.queue(stream=True)
    job_id = horde.take()["id"]
    for number in rounds():
        texts = [f"{number} of {sender}" for sender in range(4)]
        posts = [partial(horde.post_progress, job_id, number + 1, text) for text in texts]
        answers = at_once(*posts)
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    entries = read_stream(redis, request_id)
    assert [entry["seq"] for entry in entries] == [
        str(number) for number in range(1, len(entries) + 1)
    ]
    with transaction() as session:
        stored = session.scalar(
            select(TextProcessingGeneration.job_ttl).where(
                TextProcessingGeneration.id == UUID(job_id)
            )
        )
    assert str(stored) == redis.hget(f"horde:chat:lease:{job_id}", "job_ttl")


def test_a_reply_and_posts_at_once_leave_no_lease(horde: ChatHorde, redis: Redis) -> None:
    for _ in rounds():
        horde.queue(stream=True)
        job_id = horde.take()["id"]
        submitted, *posts = at_once(
            lambda: horde.reply(job_id),  # noqa: B023
            lambda: horde.post_progress(job_id, 1, "x"),  # noqa: B023
            lambda: horde.post_progress(job_id, 1, "x"),  # noqa: B023
        )
        assert submitted.status_code == 200
        assert {(post.status_code, post.json.get("rc")) for post in posts} <= {
            (200, None),
            (404, "ChatProgressNotStreaming"),
        }
        assert redis.exists(f"horde:chat:lease:{job_id}") == 0
        assert refused(horde.post_progress(job_id, 2)) == (404, "ChatProgressNotStreaming")
