# SPDX-License-Identifier: AGPL-3.0-or-later
"""The progress route and the lease of a streamed chat job, on a real database and Redis."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from redis import Redis
from sqlalchemy import create_engine, event, select, update
from sqlalchemy.orm import sessionmaker

from devtools.services import ServiceAddresses
from horde import chat_progress, db, redis_ctrl
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.user import User, hash_api_key
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.classes.kobold.processing_generation import LeaseWriting, renew_text_job_lease
from horde.clock import utcnow
from horde.database import threads, users
from horde.db import transaction
from tests.integration._fake_chat_worker import (
    MODEL,
    Body,
    ChatHorde,
    build_progress_body,
    chat_horde,
    start_anew,
)
from tests.integration.instruments import Counting
from tests.integration.rows import (
    SECRET,
    find_job_row,
    get_worker,
    make_job,
    make_user,
    make_worker,
)
from tests.integration.text_horde import refused

RENEWALS, ABORTS = "horde.text.lease_renewals", "horde.text.stale_aborts"


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "text_progress") as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> ChatHorde:
    start_anew()
    return module_horde


@pytest.fixture
def redis(horde: ChatHorde, service_urls: ServiceAddresses) -> Iterator[Redis]:
    with Redis.from_url(f"{service_urls.redis_url}/7", decode_responses=True) as client:
        yield client


@pytest.fixture
def untrusted(module_horde: ChatHorde) -> ChatHorde:
    """The same horde with a worker of an owner who is not trusted."""
    start_anew()
    owner_id, owner_key = make_user(kudos=1000)
    return ChatHorde(
        app=module_horde.app,
        owner_id=owner_id,
        owner_key=owner_key,
        requester_id=module_horde.requester_id,
        requester_key=module_horde.requester_key,
    )


def read_lease(redis: Redis, job_id: str) -> dict[str, str]:
    return dict(redis.hgetall(f"horde:chat:lease:{job_id}"))  # type: ignore[arg-type]


def read_stream(redis: Redis, request_id: str) -> list[dict[str, str]]:
    return [fields for _, fields in redis.xrange(f"horde:chat:stream:{request_id}")]


def get_job(job_id: str) -> Any:
    job = find_job_row(UUID(job_id))
    assert job is not None
    return job


def age_job(redis: Redis, job_id: str, seconds: float) -> None:
    """Let a job have been popped so much earlier, for Postgres and Redis alike."""
    with transaction() as session:
        session.execute(
            update(ProcessingGeneration)
            .where(ProcessingGeneration.id == UUID(job_id))
            .values(start_time=ProcessingGeneration.start_time - timedelta(seconds=seconds))
        )
    key = f"horde:chat:lease:{job_id}"
    if redis.exists(key):
        redis.hset(key, "started", str(float(read_lease(redis, job_id)["started"]) - seconds))
        redis.pexpire(key, max(1, redis.pttl(key) - round(seconds * 1000)))


# The hint and the lease


def test_a_streamed_request_hands_the_hint_and_a_lease_to_its_worker(
    horde: ChatHorde, redis: Redis
) -> None:
    request_id, job = horde.serve(stream=True, max_tokens=100)
    assert job["payload"]["stream_progress"] is True
    assert job["ttl"] == 150
    lease = read_lease(redis, job["id"])
    stored = get_job(job["id"])
    assert abs(float(lease.pop("started")) - stored.start_time.timestamp()) % 3600 < 0.001
    with transaction() as session:
        stored_key = session.scalar(select(User.api_key).where(User.id == horde.owner_id))
    assert stored_key is not None
    assert lease == {
        "request": request_id,
        "worker": str(stored.worker_id),
        "model": stored.model,
        "owner": str(horde.owner_id),
        "key": chat_progress.build_lease_owner_key(stored_key),
        "max_bytes": "1600",
        "fake": "0",
        "job_ttl": "150",
        "lease_cap": "600",
        "trusted": "1",
    }
    assert 200 < float(redis.ttl(f"horde:chat:lease:{job['id']}")) <= 240  # type: ignore[arg-type]


def test_an_untrusted_owners_lease_is_capped_earlier(untrusted: ChatHorde, redis: Redis) -> None:
    _, job = untrusted.serve(stream=True)
    lease = read_lease(redis, job["id"])
    assert (lease["lease_cap"], lease["trusted"]) == ("200", "0")


@pytest.mark.parametrize("stream", [False, None])
def test_a_request_that_does_not_stream_has_neither(
    horde: ChatHorde, redis: Redis, stream: bool | None
) -> None:
    _, job = horde.serve(**({} if stream is None else {"stream": stream}))
    assert "stream_progress" not in job["payload"]
    assert redis.keys() == []
    assert refused(horde.post_progress(job["id"])) == (404, "ChatProgressNotStreaming")


def test_the_hint_survives_the_narrowing_of_tools(horde: ChatHorde) -> None:
    _, job = horde.serve(
        stream=True, tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none"
    )
    assert job["payload"]["stream_progress"] is True
    assert "tools" not in job["payload"]


def test_the_hint_is_not_in_the_fingerprint(horde: ChatHorde) -> None:
    horde.take_nothing()
    key = str(uuid4())
    first = horde.submit(stream=True, horde={"operation_key": key})
    again = horde.submit(stream=False, horde={"operation_key": key})
    assert (first.status_code, again.status_code, again.json["id"]) == (202, 200, first.json["id"])


@pytest.mark.parametrize("stream", ["true", 1, 0, [], {}])
def test_the_hint_is_a_boolean(horde: ChatHorde, stream: object) -> None:
    assert refused(horde.submit(stream=stream)) == (400, "BadRequest")


# Posts


def test_posts_reach_the_stream(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    first = horde.post_progress(job["id"], 1, "Bl")
    second = horde.post_progress(job["id"], 2, None, reasoning="Hm.")
    third = horde.post_progress(job["id"], 3, "ue", reasoning="So.")
    assert [answer.json for answer in (first, second, third)] == [
        {"accepted_seq": number, "cancelled": False} for number in (1, 2, 3)
    ]
    stored = get_job(job["id"])
    common = {"gen": job["id"], "worker": str(stored.worker_id), "model": stored.model}
    assert read_stream(redis, request_id) == [
        {"seq": "1", "content": "Bl", **common},
        {"seq": "2", "content": "", "reasoning_content": "Hm.", **common},
        {"seq": "3", "content": "ue", "reasoning_content": "So.", **common},
    ]


def test_a_lost_answer_is_asked_for_again(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    answers = [horde.post_progress(job["id"], 1, "Bl", reasoning="Hm") for _ in range(3)]
    assert [answer.json for answer in answers] == [{"accepted_seq": 1, "cancelled": False}] * 3
    assert len(read_stream(redis, request_id)) == 1


@pytest.mark.parametrize(("seq", "content"), [(1, "other"), (3, "x"), (2**63, "x"), (10**300, "x")])
def test_out_of_sequence_tells_what_comes_next(
    horde: ChatHorde, redis: Redis, seq: int, content: str
) -> None:
    request_id, job = horde.serve(stream=True)
    horde.post_progress(job["id"], 1, "Bl")
    answer = horde.post_progress(job["id"], seq, content)
    assert answer.status_code == 409
    assert answer.json == {
        "message": f"Expected seq 2 for generation {job['id']}.",
        "rc": "ChatProgressOutOfSequence",
        "expected_seq": 2,
    }
    assert len(read_stream(redis, request_id)) == 1


def test_more_than_the_reply_may_hold_is_over_the_cap_and_the_reply_is_still_taken(
    horde: ChatHorde,
) -> None:
    _, job = horde.serve(stream=True, max_tokens=16)
    assert horde.post_progress(job["id"], 1, "x" * 250, reasoning="y" * 6).status_code == 200
    assert refused(horde.post_progress(job["id"], 2, "z")) == (413, "ChatProgressCapReached")
    assert horde.post_progress(job["id"], 1, "x" * 250, reasoning="y" * 6).status_code == 200
    assert horde.reply(job["id"]).status_code == 200


def test_characters_that_cannot_be_stored_are_replaced(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    raw = json.dumps(build_progress_body(job["id"], 1, "a\x00b\ud83d"))
    answer = horde.client.post(
        "/api/v2/generate/text/progress",
        data=raw,
        content_type="application/json",
        headers={"apikey": horde.owner_key},
    )
    assert answer.status_code == 200
    assert read_stream(redis, request_id)[0]["content"] == "a\ufffdb\ufffd"


BROKEN: list[Body] = [
    {"delta": {}},
    {"delta": {"content": "", "reasoning_content": ""}},
    {"delta": {"content": None}},
    {"delta": None},
    {"delta": "Bl"},
    {"delta": ["Bl"]},
    {"delta": {"content": 1}},
    {"delta": {"content": ["Bl"]}},
    {"delta": {"content": "Bl", "reasoning_content": {}}},
    {"seq": 0},
    {"seq": -1},
    {"seq": True},
    {"seq": "1"},
    {"seq": 1.5},
    {"seq": None},
    {"id": None},
    {"id": 7},
    {"id": {}},
]


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_a_broken_post_is_a_bad_request_and_leaves_nothing(
    horde: ChatHorde, redis: Redis, broken: Body
) -> None:
    request_id, job = horde.serve(stream=True)
    answer = horde.post(
        "/generate/text/progress", build_progress_body(job["id"]) | broken, horde.owner_key
    )
    assert refused(answer) == (400, "BadRequest")
    assert (read_stream(redis, request_id), "seq" in read_lease(redis, job["id"])) == ([], False)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'"x"',
        b"null",
        b"{",
        b"\xff\xfe",
        b'{"id": "x", "seq": NaN, "delta": {"content": "x"}}',
        b'{"id": "x", "seq": 1e999, "delta": {"content": "x"}}',
        b'{"id": "x", "seq": ' + b"9" * 5000 + b', "delta": {"content": "x"}}',
        b'{"id": "x", "seq": 1, "delta": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        b'{"id": "x", "seq": 1, "delta": ' + b"[" * 200000,
    ],
)
def test_a_hostile_body_is_a_bad_request(horde: ChatHorde, raw: bytes) -> None:
    answer = horde.client.post(
        "/api/v2/generate/text/progress",
        data=raw,
        content_type="application/json",
        headers={"apikey": horde.owner_key},
    )
    assert refused(answer) == (400, "BadRequest")


@pytest.mark.parametrize(
    "job_id", ["", "x", "\x00", "*", "horde:chat:lease:1", "a" * 100_000, "é", str(UUID(int=7))]
)
def test_an_id_that_nothing_has_is_an_aborted_job_whatever_the_key(
    horde: ChatHorde, job_id: str
) -> None:
    for key in (horde.owner_key, "no key of anybody"):
        answer = horde.post_progress(job_id, key=key)
        assert refused(answer) == (404, "ChatJobAborted")
        assert len(answer.json["message"]) < 200


def test_a_post_needs_a_key_header(horde: ChatHorde) -> None:
    _, job = horde.serve(stream=True)
    answer = horde.post("/generate/text/progress", build_progress_body(job["id"]))
    assert refused(answer) == (400, "BadRequest")
    assert "apikey" in answer.json["errors"]


@pytest.mark.parametrize("key", ["", "wrong", "0000000000", "\u00ff" * 40])
def test_another_key_than_the_owners_is_refused(horde: ChatHorde, redis: Redis, key: str) -> None:
    request_id, job = horde.serve(stream=True)
    assert refused(horde.post_progress(job["id"], key=key)) == (403, "WrongCredentials")
    assert refused(horde.post_progress(job["id"], key=horde.requester_key)) == (
        403,
        "WrongCredentials",
    )
    assert read_stream(redis, request_id) == []


def test_the_lease_alone_tells_who_may_post(horde: ChatHorde) -> None:
    """A key that was reset goes on to work for the jobs that were taken with it."""
    _, job = horde.serve(stream=True)
    with transaction() as session:
        session.execute(
            update(User)
            .where(User.id == horde.owner_id)
            .values(api_key=hash_api_key("a new key of the owner", SECRET))
        )
    users.callers.get().clear()
    try:
        assert horde.post_progress(job["id"]).status_code == 200
        assert refused(horde.post_progress(job["id"], 2, key="a new key of the owner")) == (
            403,
            "WrongCredentials",
        )
    finally:
        with transaction() as session:
            hashed = hash_api_key(horde.owner_key, SECRET)
            session.execute(update(User).where(User.id == horde.owner_id).values(api_key=hashed))
        users.callers.get().clear()


# How a job ends


def test_a_submit_ends_the_posts_and_leaves_the_stream(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    horde.post_progress(job["id"])
    assert horde.reply(job["id"]).status_code == 200
    assert read_lease(redis, job["id"]) == {}
    assert refused(horde.post_progress(job["id"], 2)) == (404, "ChatProgressNotStreaming")
    assert [entry.get("ended") for entry in read_stream(redis, request_id)] == [None]
    assert float(redis.ttl(f"horde:chat:stream:{request_id}")) > 800  # type: ignore[arg-type]


def test_a_refused_reply_leaves_the_posts_open(horde: ChatHorde) -> None:
    _, job = horde.serve(stream=True)
    assert refused(horde.reply(job["id"], finish_reason="eos")) == (400, "ChatSubmitInvalid")
    assert horde.post_progress(job["id"]).status_code == 200


def test_a_fault_marks_the_end_and_the_next_job_streams_anew(
    horde: ChatHorde, redis: Redis
) -> None:
    request_id, job = horde.serve(stream=True)
    horde.post_progress(job["id"])
    assert horde.fault(job["id"]).status_code == 200
    assert horde.fault(job["id"]).status_code == 200
    assert refused(horde.post_progress(job["id"], 2)) == (404, "ChatJobAborted")
    again = horde.take()
    assert horde.post_progress(again["id"]).status_code == 200
    assert [(entry["gen"], entry.get("ended")) for entry in read_stream(redis, request_id)] == [
        (job["id"], None),
        (job["id"], "1"),
        (again["id"], None),
    ]


def test_a_fault_without_a_post_marks_the_end_too(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    horde.fault(job["id"])
    assert read_stream(redis, request_id) == [{"gen": job["id"], "ended": "1"}]


def test_a_lapsed_lease_marks_the_end(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    horde.post_progress(job["id"])
    age_job(redis, job["id"], 152)
    # Before the job is aborted, so it is taken and moves nothing.
    late = horde.post_progress(job["id"], 2, "ue")
    assert late.json == {"accepted_seq": 2, "cancelled": False}
    assert threads.abort_stale_jobs() == 1
    assert [entry.get("ended") for entry in read_stream(redis, request_id)] == [None, None, "1"]
    assert refused(horde.post_progress(job["id"], 3)) == (404, "ChatJobAborted")
    assert refused(horde.reply(job["id"])) == (400, "AbortedGen")


def test_an_expired_request_aborts_its_jobs_posts(horde: ChatHorde, redis: Redis) -> None:
    _, job = horde.serve(stream=True)
    redis.flushdb()
    with transaction() as session:
        session.execute(update(WaitingPrompt).values(expiry=utcnow() - timedelta(seconds=1)))
    threads.delete_expired_requests()
    assert refused(horde.post_progress(job["id"])) == (404, "ChatJobAborted")


# The deadline


def test_posts_move_the_deadline_in_postgres_and_redis_alike(
    horde: ChatHorde, redis: Redis
) -> None:
    _, job = horde.serve(stream=True)
    renewals = Counting(RENEWALS)
    age_job(redis, job["id"], 100)
    horde.post_progress(job["id"], 1, "a")
    granted = get_job(job["id"]).job_ttl
    assert 250 < granted < 280
    assert read_lease(redis, job["id"])["job_ttl"] == str(granted)
    horde.post_progress(job["id"], 1, "a")  # a retry
    assert get_job(job["id"]).job_ttl == granted
    age_job(redis, job["id"], 140)
    horde.post_progress(job["id"], 2, "b")
    assert 390 < get_job(job["id"]).job_ttl < 420
    assert renewals.read() == [({"horde.outcome": "granted", "horde.worker_trusted": True}, 2)]


@pytest.mark.parametrize("is_trusted", [True, False])
def test_the_deadline_stops_at_the_owners_cap(
    horde: ChatHorde, untrusted: ChatHorde, redis: Redis, is_trusted: bool
) -> None:
    served, cap = (horde, 600) if is_trusted else (untrusted, 200)
    _, job = served.serve(stream=True)
    renewals = Counting(RENEWALS)
    for seq in range(1, 6):
        age_job(redis, job["id"], 110 if is_trusted else 38)
        assert served.post_progress(job["id"], seq, "x").status_code == 200
    assert (get_job(job["id"]).job_ttl, read_lease(redis, job["id"])["job_ttl"]) == (cap, str(cap))
    counted = {attributes["horde.outcome"]: count for attributes, count in renewals.read()}
    assert counted == ({"granted": 5} if is_trusted else {"granted": 2, "at_cap": 3})
    age_job(redis, job["id"], 51 if is_trusted else 11)
    assert threads.abort_stale_jobs() == 1
    message = served.reply(job["id"]).json["message"]
    assert f"within {cap} seconds" in message
    assert job["id"] in message


def test_a_post_after_the_lapse_revives_nothing(horde: ChatHorde, redis: Redis) -> None:
    _, job = horde.serve(stream=True)
    age_job(redis, job["id"], 151)
    assert horde.post_progress(job["id"]).status_code == 200
    assert get_job(job["id"]).job_ttl == 150
    assert threads.abort_stale_jobs() == 1


class Statements(list[str]):
    """What went to the database while the block ran, transactions included."""

    def __enter__(self) -> "Statements":
        event.listen(db.require_engine(), "before_cursor_execute", self._note)
        event.listen(db.require_engine(), "begin", self._note_begin)
        return self

    def __exit__(self, *_: object) -> None:
        event.remove(db.require_engine(), "before_cursor_execute", self._note)
        event.remove(db.require_engine(), "begin", self._note_begin)

    def _note(self, _c: object, _k: object, statement: str, *_: object) -> None:
        self.append(statement)

    def _note_begin(self, _c: object) -> None:
        self.append("BEGIN")


def test_a_post_asks_the_database_only_when_the_deadline_moves(
    horde: ChatHorde, redis: Redis
) -> None:
    _, job = horde.serve(stream=True)
    horde.post_progress(job["id"], 1, "a")
    age_job(redis, job["id"], 10)
    with Statements() as moving:
        horde.post_progress(job["id"], 2, "b")
    assert [statement.split()[:2] for statement in moving] == [
        ["BEGIN"],
        ["UPDATE", "processing_gens"],
    ]
    with Statements() as retried:
        horde.post_progress(job["id"], 2, "b")
        horde.post_progress(job["id"], 9, "b")
        horde.post_progress(job["id"], 3, "b", key="wrong")
    assert retried == []
    redis.hset(f"horde:chat:lease:{job['id']}", "job_ttl", 600)
    with Statements() as at_cap:
        horde.post_progress(job["id"], 3, "c")
    assert at_cap == []
    redis.hset(f"horde:chat:lease:{job['id']}", mapping={"cancelled": 1, "job_ttl": 150})
    with Statements() as cancelled:
        horde.post_progress(job["id"], 4, "d")
    assert cancelled == []
    redis.delete(f"horde:chat:lease:{job['id']}")
    with Statements() as without:
        horde.post_progress(job["id"], 5, "e")
    # BEGIN is not sent.
    assert [statement.split()[0] for statement in without if statement != "BEGIN"] == ["SELECT"]


def test_a_deadline_that_cannot_be_written_is_counted_and_the_post_is_accepted(
    horde: ChatHorde, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id, job = horde.serve(stream=True)
    failures = Counting("horde.text.lease_renewal_failures")
    age_job(redis, job["id"], 10)
    with monkeypatch.context() as away:
        away.setattr(
            db.state.get(),
            "reading_sessions",
            sessionmaker(create_engine("postgresql+psycopg2://127.0.0.1:1/none")),
        )
        answer = horde.post_progress(job["id"])
    assert (answer.status_code, answer.json) == (200, {"accepted_seq": 1, "cancelled": False})
    assert failures.read() == [({}, 1)]
    assert len(read_stream(redis, request_id)) == 1
    assert get_job(job["id"]).job_ttl == 150


def test_a_deadline_that_could_not_be_written_is_written_by_the_next_post(
    untrusted: ChatHorde, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the cap as well, where later posts move nothing: a job must not lapse before what its
    lease on Redis says.
    """
    _, job = untrusted.serve(stream=True)
    renewals = Counting(RENEWALS)
    age_job(redis, job["id"], 60)
    with monkeypatch.context() as away:
        away.setattr(
            db.state.get(),
            "reading_sessions",
            sessionmaker(create_engine("postgresql+psycopg2://127.0.0.1:1/none")),
        )
        assert untrusted.post_progress(job["id"], 1, "a").status_code == 200
    assert read_lease(redis, job["id"])["job_ttl"] == "150"
    assert untrusted.post_progress(job["id"], 1, "a").status_code == 200  # a retry moves nothing
    assert get_job(job["id"]).job_ttl == 150
    assert untrusted.post_progress(job["id"], 2, "b").status_code == 200
    assert (get_job(job["id"]).job_ttl, read_lease(redis, job["id"])["job_ttl"]) == (200, "200")
    assert renewals.read() == [({"horde.outcome": "granted", "horde.worker_trusted": False}, 1)]


def test_a_deadline_never_moves_back(horde: ChatHorde, redis: Redis) -> None:
    """Of two posts in two processes the later may be written first."""
    request_id, job = horde.serve(stream=True)
    for seconds, written in (
        (190, LeaseWriting.WRITTEN),
        (180, LeaseWriting.UNCHANGED),
        (190, LeaseWriting.UNCHANGED),
    ):
        with db.single_statement() as session:
            assert renew_text_job_lease(session, job_id=UUID(job["id"]), job_ttl=seconds) is written
        assert get_job(job["id"]).job_ttl == 190
    assert (read_stream(redis, request_id), redis.exists(f"horde:chat:lease:{job['id']}")) == (
        [],
        1,
    )


def test_a_deadline_moved_further_by_another_post_is_not_taken_back(
    horde: ChatHorde, redis: Redis
) -> None:
    _, job = horde.serve(stream=True)
    key = f"horde:chat:lease:{job['id']}"
    redis.hset(key, "job_ttl", 190)
    moved = chat_progress.AppendResult(
        outcome=chat_progress.PostOutcome.ACCEPTED, job_ttl=189, previous_ttl=180
    )
    chat_progress.take_back_renewal(UUID(job["id"]), moved)
    assert redis.hget(key, "job_ttl") == "190"
    redis.delete(key)
    chat_progress.take_back_renewal(UUID(job["id"]), moved)
    assert redis.exists(key) == 0


def test_a_lease_that_outlived_its_job_ends_with_the_first_post_that_moves_it(
    horde: ChatHorde, redis: Redis
) -> None:
    """As when Redis was away when the job was faulted."""
    request_id, job = horde.serve(stream=True)
    with transaction() as session:
        session.execute(update(ProcessingGeneration).values(faulted=True))
    age_job(redis, job["id"], 5)
    assert horde.post_progress(job["id"]).status_code == 200
    assert refused(horde.post_progress(job["id"], 2)) == (404, "ChatJobAborted")
    assert [entry.get("ended") for entry in read_stream(redis, request_id)] == [None, "1"]


# Limits, failures


def test_posts_with_a_lease_are_not_limited_and_others_are(service_urls: ServiceAddresses) -> None:
    with chat_horde(service_urls, "text_progress_limits", rate_limits_enabled=True) as horde:
        start_anew()
        _, job = horde.serve(stream=True, max_tokens=1024)
        answers = [horde.post_progress(job["id"], number, "x") for number in range(1, 101)]
        assert {answer.status_code for answer in answers} == {200}
        with Redis.from_url(f"{service_urls.redis_url}/1", decode_responses=True) as counters:
            counters.flushdb()
            found: list[str] = []
            while not found:  # on a busy machine its second may be over before it is looked for
                assert refused(horde.post_progress(str(uuid4()))) == (404, "ChatJobAborted")
                found = [str(key) for key in counters.scan_iter()]
            assert len(found) == 1
            counters.set(found[0], 58, ex=60)
            assert horde.post_progress(job["id"], 101, key="wrong").status_code == 403
            assert refused(horde.post_progress(str(uuid4()))) == (404, "ChatJobAborted")
            assert horde.post_progress(str(uuid4())).status_code == 429
            assert horde.post_progress(job["id"], 101, key="wrong").status_code == 429
            assert horde.post_progress(job["id"], 101, "x").status_code == 200


def test_without_redis_a_post_is_503_and_the_rest_goes_on(
    horde: ChatHorde, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise redis_ctrl.RedisUnavailable("away")

    request_id, job = horde.serve(stream=True)
    other, faulty = horde.queue(stream=True), None
    with monkeypatch.context() as away:
        away.setattr(redis_ctrl, "call", fail)
        assert refused(horde.post_progress(job["id"])) == (503, "ChatProgressUnavailable")
        assert horde.reply(job["id"]).json["reward"] > 0
        faulty = horde.take()
        assert horde.fault(faulty["id"]).status_code == 200
    assert horde.status(request_id)["done"]
    assert refused(horde.post_progress(faulty["id"])) == (404, "ChatJobAborted")
    again = horde.take()
    assert horde.cancel(other).status_code == 200
    assert again["payload"]["stream_progress"] is True


def test_a_job_popped_without_redis_is_told_to_submit_alone(horde: ChatHorde, redis: Redis) -> None:
    _, job = horde.serve(stream=True)
    redis.flushdb()  # as after a restart
    assert refused(horde.post_progress(job["id"])) == (404, "ChatProgressNotStreaming")
    assert horde.reply(job["id"]).status_code == 200


# Fakes, whose rows a factory makes


@pytest.fixture
def fake_job(horde: ChatHorde, redis: Redis) -> str:
    """A fake of a streamed request with the lease that its pop would write."""
    horde.take_nothing()
    request_id = horde.queue(stream=True)
    worker_id = make_worker(horde.owner_id)
    job_id = make_job(UUID(request_id), worker_id, fake=True, model=MODEL, assigned_model=MODEL)
    chat_progress.write_stream_lease(
        chat_progress.StreamLease(
            generation_id=job_id,
            request_id=UUID(request_id),
            worker_id=worker_id,
            model="a/model",
            owner_id=horde.owner_id,
            key=users.build_lease_key_of(horde.owner_key),
            max_bytes=1600,
            is_fake=True,
            started=time.time(),
            job_ttl=150,
            lease_cap=600,
            owner_trusted=True,
        )
    )
    return str(job_id)


def test_a_fakes_posts_are_answered_and_go_nowhere(
    horde: ChatHorde, redis: Redis, fake_job: str
) -> None:
    renewals = Counting(RENEWALS)
    request_id = read_lease(redis, fake_job)["request"]
    age_job(redis, fake_job, 20)
    assert horde.post_progress(fake_job).json == {"accepted_seq": 1, "cancelled": False}
    assert refused(horde.post_progress(fake_job, 5)) == (409, "ChatProgressOutOfSequence")
    assert (read_stream(redis, request_id), renewals.read()) == ([], [])
    assert get_job(fake_job).job_ttl == int(read_lease(redis, fake_job)["job_ttl"]) > 165
    assert horde.fault(fake_job).json == {"reward": 0.0}
    assert read_stream(redis, request_id) == []
    assert refused(horde.post_progress(fake_job, 2)) == (404, "ChatJobAborted")


def test_a_fake_past_its_lease_looks_aborted(horde: ChatHorde, redis: Redis, fake_job: str) -> None:
    redis.flushdb()
    assert refused(horde.post_progress(fake_job)) == (404, "ChatProgressNotStreaming")
    age_job(redis, fake_job, 200)
    assert threads.abort_stale_jobs() == 0
    assert refused(horde.post_progress(fake_job)) == (404, "ChatJobAborted")
    assert not get_job(fake_job).faulted


def test_a_fakes_posts_end_when_a_real_jobs_do(
    horde: ChatHorde, redis: Redis, fake_job: str
) -> None:
    """The pass that aborts a lapsed job comes within a minute. It leaves a fake alone, whose lease
    is there for 30 s more.
    """
    age_job(redis, fake_job, 150 + 55)
    assert horde.post_progress(fake_job).status_code == 200
    age_job(redis, fake_job, 15)
    assert redis.exists(f"horde:chat:lease:{fake_job}")
    for seq in (1, 2):
        assert refused(horde.post_progress(fake_job, seq)) == (404, "ChatJobAborted")
    # That of a real one is kept to tell of the cancel.
    horde.cancel(read_lease(redis, fake_job)["request"])
    assert horde.post_progress(fake_job, 2).json == {"accepted_seq": 2, "cancelled": True}


def test_a_fakes_late_reply_is_refused_like_a_real_one(
    horde: ChatHorde, redis: Redis, fake_job: str
) -> None:
    age_job(redis, fake_job, 190)  # a real one may be submitted until the clean-up has come by
    assert horde.reply(fake_job).status_code == 200
    with transaction() as session:
        session.execute(update(ProcessingGeneration).values(generation=None))
    age_job(redis, fake_job, 21)
    assert refused(horde.reply(fake_job)) == (400, "AbortedGen")
    assert not get_job(fake_job).faulted
    assert horde.fault(fake_job).json == {"reward": 0.0}


def test_a_fakes_reply_after_a_cancel_is_refused_like_a_real_one(
    horde: ChatHorde, redis: Redis, fake_job: str
) -> None:
    horde.cancel(read_lease(redis, fake_job)["request"])
    assert horde.post_progress(fake_job).json == {"accepted_seq": 1, "cancelled": True}
    assert refused(horde.reply(fake_job)) == (400, "AbortedGen")
    assert horde.fault(fake_job).json == {"reward": 0.0}


def test_a_stale_abort_counts_and_takes_the_generation_back(horde: ChatHorde, redis: Redis) -> None:
    aborts = Counting(ABORTS)
    request_id, job = horde.serve(stream=True)
    age_job(redis, job["id"], 151)
    assert threads.abort_stale_jobs() == 1
    assert aborts.read() == [({"horde.worker_trusted": True, "horde.chat": True}, 1)]
    assert get_worker(get_job(job["id"]).worker_id).aborted_jobs == 1
    assert horde.status(request_id)["waiting"] == 1


def test_a_stale_abort_is_counted_by_its_owners_trust(untrusted: ChatHorde, redis: Redis) -> None:
    aborts = Counting(ABORTS)
    _, job = untrusted.serve()
    age_job(redis, job["id"], 151)
    assert threads.abort_stale_jobs() == 1
    assert aborts.read() == [({"horde.worker_trusted": False, "horde.chat": True}, 1)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_after_the_deadline_and_before_the_abort_is_taken(
    horde: ChatHorde, redis: Redis, stream: bool
) -> None:
    request_id, job = horde.serve(stream=stream)
    age_job(redis, job["id"], 205)
    assert horde.reply(job["id"]).json["reward"] > 0
    assert threads.abort_stale_jobs() == 0
    assert (horde.status(request_id)["finished"], horde.status(request_id)["restarted"]) == (1, 0)
