# SPDX-License-Identifier: AGPL-3.0-or-later
"""Leases and streams on a real Redis: what one post, one end and one cancel do, each in one
step.
"""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any
from uuid import UUID, uuid4

import pytest
from redis import Redis

from devtools.services import ServiceAddresses
from horde import chat_progress, redis_ctrl
from horde.chat_progress import (
    CHAT_PROGRESS_LEASE_GRACE_SECONDS,
    CHAT_PROGRESS_STREAM_MAX_ENTRIES,
    CHAT_PROGRESS_STREAM_TTL_SECONDS,
    MAX_CHAT_PROGRESS_ENTRIES,
    AppendResult,
    LeaseRenewal,
    PostedProgress,
    PostOutcome,
    ProgressPost,
    StreamEntry,
    StreamLease,
    parse_stream_entry,
)
from horde.config import Config

STARTED = 1_790_000_000.25
KEY = chat_progress.build_lease_owner_key("stored hash")
BASE = 150


@pytest.fixture(scope="module")
def connected(service_urls: ServiceAddresses) -> None:
    redis_ctrl.connect(Config(database_url="", redis_url=service_urls.redis_url, secret_key="x"))


@pytest.fixture
def redis(connected: None, service_urls: ServiceAddresses) -> Iterator[Redis]:
    with Redis.from_url(f"{service_urls.redis_url}/7", decode_responses=True) as client:
        client.flushdb()
        yield client


def lease(**changes: Any) -> StreamLease:
    facts: dict[str, Any] = {
        "generation_id": uuid4(),
        "request_id": uuid4(),
        "worker_id": uuid4(),
        "model": "a/model",
        "owner_id": 7,
        "key": KEY,
        "max_bytes": 16 * 64,
        "is_fake": False,
        "started": STARTED,
        "job_ttl": BASE,
        "lease_cap": 600,
        "owner_trusted": True,
    }
    return StreamLease(**facts | changes)


def written(**changes: Any) -> StreamLease:
    new = lease(**changes)
    chat_progress.write_stream_lease(new)
    return new


def post(
    of: StreamLease | UUID,
    seq: int,
    content: str = "Blue",
    reasoning: str = "",
    *,
    age: float = 0,
    key: str = KEY,
) -> AppendResult:
    generation_id = of if isinstance(of, UUID) else of.generation_id
    new = ProgressPost(generation_id=generation_id, seq=seq, content=content, reasoning=reasoning)
    return chat_progress.append_progress(new, key=key, now=STARTED + age, base_lease_seconds=BASE)


def fields_of(redis: Redis, of: StreamLease) -> dict[str, str]:
    return dict(redis.hgetall(chat_progress.build_lease_key(of.generation_id)))


def entries_of(redis: Redis, request_id: UUID) -> list[dict[str, str]]:
    return [fields for _, fields in redis.xrange(chat_progress.build_stream_key(request_id))]


def life_of(redis: Redis, key: str) -> float:
    return float(redis.pttl(key)) / 1000  # type: ignore[arg-type]


def test_a_lease_holds_what_the_route_needs(redis: Redis) -> None:
    held = written()
    assert fields_of(redis, held) == {
        "request": str(held.request_id),
        "worker": str(held.worker_id),
        "model": "a/model",
        "owner": "7",
        "key": KEY,
        "max_bytes": "1024",
        "fake": "0",
        "started": "1790000000.250000",
        "job_ttl": "150",
        "lease_cap": "600",
        "trusted": "1",
    }
    life = life_of(redis, f"horde:chat:lease:{held.generation_id}")
    assert (
        BASE + CHAT_PROGRESS_LEASE_GRACE_SECONDS - 60
        < life
        <= BASE + CHAT_PROGRESS_LEASE_GRACE_SECONDS
    )


def test_posts_become_entries(redis: Redis) -> None:
    held = written()
    assert post(held, 1, "Bl").outcome is PostOutcome.ACCEPTED
    result = post(held, 2, "ue", "Hm.")
    assert (result.outcome, result.seq, result.is_cancelled, result.owner_trusted) == (
        PostOutcome.ACCEPTED,
        2,
        False,
        True,
    )
    common = {"gen": str(held.generation_id), "worker": str(held.worker_id), "model": "a/model"}
    assert entries_of(redis, held.request_id) == [
        {"seq": "1", "content": "Bl", **common},
        {"seq": "2", "content": "ue", "reasoning_content": "Hm.", **common},
    ]
    kept = fields_of(redis, held)
    assert {name: kept[name] for name in ("seq", "bytes", "content", "reasoning")} == {
        "seq": "2",
        "bytes": "7",
        "content": "ue",
        "reasoning": "Hm.",
    }
    life = life_of(redis, f"horde:chat:stream:{held.request_id}")
    assert CHAT_PROGRESS_STREAM_TTL_SECONDS - 60 < life <= CHAT_PROGRESS_STREAM_TTL_SECONDS


def test_each_append_starts_the_streams_life_anew(redis: Redis) -> None:
    held = written()
    post(held, 1)
    redis.expire(f"horde:chat:stream:{held.request_id}", 10)
    post(held, 1)
    assert life_of(redis, f"horde:chat:stream:{held.request_id}") <= 10
    post(held, 2)
    assert life_of(redis, f"horde:chat:stream:{held.request_id}") > 800


def test_an_entry_without_a_model_has_none(redis: Redis) -> None:
    held = written(model=None)
    post(held, 1)
    assert set(entries_of(redis, held.request_id)[0]) == {"gen", "seq", "content", "worker"}


def test_a_reader_gets_back_what_was_posted(redis: Redis) -> None:
    held = written()
    post(held, 1, "Blé \N{GRINNING FACE}", "Hm")
    assert parse_stream_entry(entries_of(redis, held.request_id)[0]) == StreamEntry(
        generation_id=str(held.generation_id),
        seq=1,
        content="Blé \N{GRINNING FACE}",
        reasoning_content="Hm",
        worker_id=str(held.worker_id),
        model="a/model",
    )


def test_a_post_without_a_lease_says_so(redis: Redis) -> None:
    assert post(uuid4(), 1) == AppendResult(outcome=PostOutcome.NO_LEASE)
    assert redis.keys() == []


def test_another_key_is_refused_and_leaves_nothing(redis: Redis) -> None:
    held = written()
    before = fields_of(redis, held)
    assert (
        post(held, 1, key=chat_progress.build_lease_owner_key("other")).outcome
        is PostOutcome.WRONG_KEY
    )
    assert fields_of(redis, held) == before
    assert entries_of(redis, held.request_id) == []


def test_a_repeated_post_is_accepted_again_and_changes_nothing(redis: Redis) -> None:
    held = written()
    post(held, 1, "Bl", "Hm")
    before = fields_of(redis, held)
    repeated = post(held, 1, "Bl", "Hm", age=60)
    assert (repeated.outcome, repeated.seq, repeated.renewal) == (PostOutcome.ACCEPTED, 1, None)
    assert fields_of(redis, held) == before
    assert len(entries_of(redis, held.request_id)) == 1


@pytest.mark.parametrize(
    ("seq", "content", "reasoning"),
    [
        (1, "Bl", ""),
        (2, "other", ""),
        (2, "ue", "now with thoughts"),
        (4, "x", ""),
        (2**70, "x", ""),
        (2**53 + 1, "x", ""),
    ],
)
def test_another_seq_than_the_next_is_out_of_sequence(
    redis: Redis, seq: int, content: str, reasoning: str
) -> None:
    held = written()
    post(held, 1, "Bl")
    post(held, 2, "ue")
    result = post(held, seq, content, reasoning)
    assert (result.outcome, result.seq) == (PostOutcome.OUT_OF_SEQUENCE, 2)
    assert len(entries_of(redis, held.request_id)) == 2


def test_the_first_post_has_number_one(redis: Redis) -> None:
    held = written()
    assert (post(held, 2).outcome, post(held, 2).seq) == (PostOutcome.OUT_OF_SEQUENCE, 0)
    assert post(held, 1).outcome is PostOutcome.ACCEPTED


def test_bytes_are_capped_with_the_reasoning(redis: Redis) -> None:
    held = written(max_bytes=10)
    assert post(held, 1, "äöü", "ab").outcome is PostOutcome.ACCEPTED  # 8 bytes
    assert post(held, 2, "abc").outcome is PostOutcome.CAP_REACHED
    assert post(held, 2, "", "abc").outcome is PostOutcome.CAP_REACHED
    assert post(held, 2, "ab").outcome is PostOutcome.ACCEPTED
    assert post(held, 2, "ab").outcome is PostOutcome.ACCEPTED  # a retry of it
    assert post(held, 3, "a").outcome is PostOutcome.CAP_REACHED


def test_a_huge_post_is_refused_by_its_size(redis: Redis) -> None:
    held = written()
    huge = "x" * (chat_progress.MAX_CHAT_PROGRESS_POST_BYTES + 1)
    assert post(held, 1, huge).outcome is PostOutcome.CAP_REACHED
    assert post(held, 9, huge).outcome is PostOutcome.OUT_OF_SEQUENCE
    assert post(held, 1, huge, key="other").outcome is PostOutcome.WRONG_KEY


def test_entries_are_capped(redis: Redis) -> None:
    held = written(max_bytes=10**9)
    redis.hset(
        chat_progress.build_lease_key(held.generation_id), "seq", MAX_CHAT_PROGRESS_ENTRIES - 1
    )
    assert post(held, MAX_CHAT_PROGRESS_ENTRIES).outcome is PostOutcome.ACCEPTED
    assert post(held, MAX_CHAT_PROGRESS_ENTRIES + 1).outcome is PostOutcome.CAP_REACHED
    assert post(held, MAX_CHAT_PROGRESS_ENTRIES).outcome is PostOutcome.ACCEPTED


def test_a_stream_is_trimmed(redis: Redis) -> None:
    held = written(max_bytes=10**9)
    with redis.pipeline() as steps:
        for _ in range(CHAT_PROGRESS_STREAM_MAX_ENTRIES + 500):
            steps.xadd(
                chat_progress.build_stream_key(held.request_id),
                {"gen": "other", "seq": 1, "content": "x"},
            )
        steps.execute()
    post(held, 1)
    assert len(entries_of(redis, held.request_id)) < CHAT_PROGRESS_STREAM_MAX_ENTRIES + 200


# The lease moves


@pytest.mark.parametrize(
    ("ages", "cap", "job_ttl", "renewals"),
    [
        ([0.0], 600, 150, [None]),
        ([0.001], 600, 151, [LeaseRenewal.GRANTED]),
        ([30.0, 30.9, 31.0], 600, 181, [LeaseRenewal.GRANTED, LeaseRenewal.GRANTED, None]),
        ([-2.0], 600, 150, [None]),  # a process whose clock is behind
        ([150.0], 600, 300, [LeaseRenewal.GRANTED]),  # the last moment of the lease
        ([150.1], 600, 150, [None]),  # lapsed
        ([49.5, 60.0], 200, 200, [LeaseRenewal.GRANTED, LeaseRenewal.AT_CAP]),
        (
            [140.0, 280.0, 420.0, 460.0, 461.0],
            600,
            600,
            [LeaseRenewal.GRANTED] * 4 + [LeaseRenewal.AT_CAP],
        ),
        # Lapsed at its cap.
        ([140.0, 190.0, 201.0], 200, 200, [LeaseRenewal.GRANTED, LeaseRenewal.AT_CAP, None]),
    ],
)
def test_an_appended_post_moves_the_deadline(
    redis: Redis, ages: list[float], cap: int, job_ttl: int, renewals: list[LeaseRenewal | None]
) -> None:
    held = written(lease_cap=cap)
    results = [post(held, number, age=age) for number, age in enumerate(ages, start=1)]
    assert [result.renewal for result in results] == renewals
    assert (results[-1].job_ttl, fields_of(redis, held)["job_ttl"]) == (job_ttl, str(job_ttl))
    assert {result.outcome for result in results} == {PostOutcome.ACCEPTED}


def test_the_leases_life_moves_with_its_deadline(redis: Redis) -> None:
    held = written()
    redis.expire(chat_progress.build_lease_key(held.generation_id), 5)
    post(held, 1, age=100)
    life = life_of(redis, chat_progress.build_lease_key(held.generation_id))
    assert (
        150 + CHAT_PROGRESS_LEASE_GRACE_SECONDS - 60
        < life
        <= 150 + CHAT_PROGRESS_LEASE_GRACE_SECONDS
    )


# Ends


def test_a_fault_marks_the_end_once(redis: Redis) -> None:
    held = written()
    post(held, 1)
    chat_progress.end_progress_stream(held.generation_id)
    chat_progress.end_progress_stream(held.generation_id)
    assert fields_of(redis, held) == {}
    assert entries_of(redis, held.request_id)[1:] == [
        {"gen": str(held.generation_id), "ended": "1"}
    ]
    assert parse_stream_entry(entries_of(redis, held.request_id)[1]).is_ended
    assert life_of(redis, f"horde:chat:stream:{held.request_id}") > 800


def test_a_fault_without_a_lease_marks_nothing(redis: Redis) -> None:
    chat_progress.end_progress_stream(uuid4())
    assert redis.keys() == []


def test_a_submit_ends_the_posts_and_leaves_the_stream(redis: Redis) -> None:
    held = written()
    post(held, 1)
    chat_progress.delete_stream_lease(held.generation_id)
    assert post(held, 2).outcome is PostOutcome.NO_LEASE
    assert len(entries_of(redis, held.request_id)) == 1


def test_a_cancel_flags_leases_that_exist_and_marks_their_ends(redis: Redis) -> None:
    held, gone = written(), lease()
    fake = written(is_fake=True, request_id=held.request_id)
    post(held, 1, age=10)
    for _ in range(2):
        chat_progress.cancel_progress_streams(
            [held.generation_id, gone.generation_id, fake.generation_id]
        )
    assert fields_of(redis, gone) == {}
    assert (fields_of(redis, held)["cancelled"], fields_of(redis, fake)["cancelled"]) == ("1", "1")
    assert entries_of(redis, held.request_id)[1:] == [
        {"gen": str(held.generation_id), "ended": "1"}
    ]

    result = post(held, 2, age=50)
    assert (result.outcome, result.is_cancelled, result.renewal, result.job_ttl) == (
        PostOutcome.ACCEPTED,
        True,
        None,
        160,
    )
    assert post(held, 2, age=50).is_cancelled
    assert post(fake, 1).is_cancelled
    assert [entry.get("seq") for entry in entries_of(redis, held.request_id)] == ["1", None, "2"]

    chat_progress.end_progress_stream(held.generation_id)
    assert sum("ended" in entry for entry in entries_of(redis, held.request_id)) == 1


def test_a_fake_is_answered_alike_and_streams_nothing(redis: Redis) -> None:
    real, fake = written(max_bytes=12), written(max_bytes=12, is_fake=True)
    steps = [(1, "Bl"), (1, "Bl"), (1, "other"), (3, "x"), (2, "x" * 20), (2, "y")]
    answers = [
        [
            (result.outcome, result.seq, result.job_ttl)
            for seq, text in steps
            if (result := post(of, seq, text, age=seq))
        ]
        for of in (real, fake)
    ]
    assert answers[0] == answers[1]
    assert post(fake, 3, "z", age=9) == replace(post(real, 3, "z", age=9), is_fake=True)
    assert entries_of(redis, fake.request_id) == []
    chat_progress.end_progress_stream(fake.generation_id)
    assert entries_of(redis, fake.request_id) == []


# What was posted


def read(of: StreamLease) -> PostedProgress:
    return chat_progress.read_posted_progress(of.request_id, [of.generation_id])[of.generation_id]


def test_posted_content_is_joined_without_the_reasoning_or_other_jobs(redis: Redis) -> None:
    held = written()
    other = written(request_id=held.request_id)
    post(held, 1, "", "Hm")
    post(other, 1, "Rouge")
    post(held, 2, "Blé")
    post(held, 3, "ue")
    assert (read(held).content, read(held).character_count) == ("Bléue", 5)


def test_posted_entries_count_in_the_order_of_their_numbers(redis: Redis) -> None:
    held = lease()
    for seq, content in ((10, "c"), (9, "b"), (2, "a")):
        redis.xadd(
            chat_progress.build_stream_key(held.request_id),
            {"gen": str(held.generation_id), "seq": seq, "content": content},
        )
    assert read(held).content == "abc"


def test_bytes_stand_in_for_entries_that_are_gone(redis: Redis) -> None:
    held = written()
    post(held, 1, "Blé", "Hm")
    post(held, 2, "ue")
    redis.delete(chat_progress.build_stream_key(held.request_id))
    assert (read(held).content, read(held).character_count) == (None, 8)


def test_nothing_posted_counts_nothing(redis: Redis) -> None:
    assert read(written()).character_count == 0
    assert read(lease()).character_count == 0
    assert chat_progress.read_posted_progress(uuid4(), []) == {}


# Races and failures


@pytest.mark.race
def test_of_posts_at_once_each_number_is_taken_once(redis: Redis) -> None:
    held = written(max_bytes=10**6)
    barrier = Barrier(8)

    def run(name: int) -> list[PostOutcome]:
        barrier.wait(60)
        return [post(held, seq, f"{name}:{seq};").outcome for seq in range(1, 101)]

    with ThreadPoolExecutor(8) as pool:
        outcomes = [outcome for outcomes in pool.map(run, range(8)) for outcome in outcomes]
    entries = entries_of(redis, held.request_id)
    assert [entry["seq"] for entry in entries] == [
        str(number) for number in range(1, len(entries) + 1)
    ]
    assert outcomes.count(PostOutcome.ACCEPTED) == len(entries)
    assert int(fields_of(redis, held)["bytes"]) == sum(len(entry["content"]) for entry in entries)


def test_without_redis_writes_are_logged_alone_and_posts_are_told(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise redis_ctrl.RedisUnavailable("away")

    held = lease()
    monkeypatch.setattr(redis_ctrl, "call", fail)
    chat_progress.write_stream_lease(held)
    chat_progress.delete_stream_lease(held.generation_id)
    chat_progress.end_progress_stream(held.generation_id)
    chat_progress.cancel_progress_streams([held.generation_id])
    assert chat_progress.read_posted_progress(held.request_id, [held.generation_id]) == {}
    failed = [
        record.__dict__["step"]
        for record in caplog.records
        if record.message == "horde.chat_progress.failed"
    ]
    assert failed == ["write_lease", "delete_lease", "end_stream", "cancel_streams", "read_posted"]
    with pytest.raises(redis_ctrl.RedisUnavailable):
        post(held, 1)


def test_a_reader_needs_no_database() -> None:
    code = (
        "import sys, horde.chat_progress; sys.exit(any(name in sys.modules for name in"
        " ('sqlalchemy', 'flask', 'psycopg2')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_lease_written_again_forgets_the_posts_of_before(redis: Redis) -> None:
    held = written()
    post(held, 1)
    chat_progress.write_stream_lease(replace(held, job_ttl=200))
    assert "seq" not in fields_of(redis, held)
