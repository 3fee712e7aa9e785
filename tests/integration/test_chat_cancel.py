# SPDX-License-Identifier: AGPL-3.0-or-later
"""A cancelled streamed request: its job in flight is paid for what it posted, once, and its worker
and readers are told.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from threading import Barrier, BrokenBarrierError
from typing import Any
from uuid import UUID, uuid4

import pytest
from redis import Redis
from sqlalchemy import select, text

from devtools.services import ServiceAddresses
from horde import chat_progress, redis_ctrl
from horde.actions.cancel import settle_streamed_jobs
from horde.actions.settle_jobs import settle_or_refuse
from horde.apis.requests import CONFIG_EXTENSION
from horde.classes.base.kudos import KudosPosting
from horde.classes.base.stats import TextGenState, TextGenStatistic
from horde.classes.base.worker import WorkerPerformance
from horde.classes.kobold.processing_generation import get_unix_seconds
from horde.clock import utcnow
from horde.database import threads, users
from horde.database.settlements import Submitted
from horde.database.text_jobs import find_job
from horde.database.text_requests import cancel_text_request
from horde.db import transaction
from horde.exceptions import BadRequest
from tests.integration._fake_chat_worker import ChatHorde, chat_horde, start_anew
from tests.integration.rows import find_job_row, get_worker, make_job, make_user, make_worker
from tests.integration.text_horde import (
    change_worker,
    get_request,
    get_shared_key,
    list_discrepancies,
    list_holds,
    make_shared_key,
    refused,
)

RACE_ROUNDS = 3000
RACE_SECONDS = 40.0  # a busy machine has fewer rounds
ROUTE_RACE_ROUNDS, ROUTE_RACE_SECONDS = 200, 6.0
MANY_ROUNDS = 100  # so many that each side wins some


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "chat_cancel", db_pool_size=20) as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> Iterator[ChatHorde]:
    start_anew()
    yield module_horde
    assert list_discrepancies() == ()


@pytest.fixture
def redis(horde: ChatHorde, service_urls: ServiceAddresses) -> Iterator[Redis]:
    with Redis.from_url(f"{service_urls.redis_url}/7", decode_responses=True) as client:
        yield client


def read_stream(redis: Redis, request_id: str) -> list[dict[str, str]]:
    return [fields for _, fields in redis.xrange(f"horde:chat:stream:{request_id}")]


def get_job(job_id: str) -> Any:
    job = find_job_row(UUID(job_id))
    assert job is not None
    return job


def list_movements(job_id: str) -> dict[int, Decimal]:
    """What a job moved on each account."""
    with transaction() as session:
        rows = session.execute(
            select(KudosPosting.user_id, KudosPosting.amount).where(
                KudosPosting.event_id == UUID(job_id)
            )
        )
        moved: dict[int, Decimal] = {}
        for user_id, amount in rows:
            moved[user_id] = moved.get(user_id, Decimal(0)) + amount
        return moved


def price_of(horde: ChatHorde, content: str, **changes: Any) -> Decimal:
    """What a submitted reply of this text earns."""
    _, job = horde.serve(max_tokens=200)
    answer = horde.reply(job["id"], content, **changes)
    assert answer.status_code == 200, answer.json
    return Decimal(str(answer.json["reward"]))


def test_posted_text_is_paid_like_a_reply_of_it(horde: ChatHorde, redis: Redis) -> None:
    posts = ["Blé " * 60, "ue " * 20]
    content = "".join(posts)
    price = price_of(horde, content)
    request_id, job = horde.serve(stream=True, max_tokens=200)
    for number, post in enumerate(posts, start=1):
        horde.post_progress(job["id"], number, post)

    answer = horde.cancel(request_id)

    assert answer.status_code == 200
    before = answer.json
    assert (before["processing"], before["done"], before["generations"]) == (1, False, [])
    stored = get_job(job["id"])
    assert (stored.faulted, stored.cancelled, stored.generation, stored.message) == (
        True,
        True,
        None,
        None,
    )
    assert (stored.settled_character_count, stored.charge_basis, stored.finish_reason) == (
        len(content),
        None,
        None,
    )
    assert list_movements(job["id"]) == {horde.owner_id: price, horde.requester_id: -price - 1}
    status = horde.status(request_id)
    assert (status["done"], status["faulted"], status["generations"], status["restarted"]) == (
        True,
        False,
        [],
        0,
    )
    assert (status["waiting"], status["processing"], status["finished"]) == (0, 0, 0)
    assert status["kudos"] == round(price + 1) + 1  # and the tax
    assert "settled_character_count" not in str(status)


def test_the_worker_is_told_and_readers_see_the_end(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    horde.post_progress(job["id"], 1, "Bl")
    horde.cancel(request_id)
    assert redis.hget(f"horde:chat:lease:{job['id']}", "cancelled") == "1"
    assert horde.post_progress(job["id"], 1, "Bl").json == {"accepted_seq": 1, "cancelled": True}
    assert horde.post_progress(job["id"], 2, "ue").json == {"accepted_seq": 2, "cancelled": True}
    assert [(entry.get("seq"), entry.get("ended")) for entry in read_stream(redis, request_id)] == [
        ("1", None),
        (None, "1"),
        ("2", None),
    ]
    assert get_job(job["id"]).job_ttl < 180
    assert refused(horde.reply(job["id"])) == (400, "AbortedGen")
    redis.delete(f"horde:chat:lease:{job['id']}")
    assert refused(horde.post_progress(job["id"], 3)) == (404, "ChatJobAborted")


def test_a_cancel_before_any_post_pays_the_floor(horde: ChatHorde, redis: Redis) -> None:
    price = price_of(horde, "")
    request_id, job = horde.serve(stream=True, max_tokens=200)
    horde.cancel(request_id)
    assert get_job(job["id"]).settled_character_count == 0
    assert list_movements(job["id"])[horde.owner_id] == price == price_of(horde, "x" * 80)


def test_no_more_is_paid_than_was_asked_for(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True, max_tokens=200)
    horde.post_progress(job["id"], 1, "x" * 3000)
    horde.cancel(request_id)
    assert list_movements(job["id"])[horde.owner_id] == price_of(horde, "x" * 800)


def test_reasoning_is_not_in_the_price_while_the_stream_holds_the_entries(
    horde: ChatHorde, redis: Redis
) -> None:
    request_id, job = horde.serve(stream=True)
    horde.post_progress(job["id"], 1, "Blé", reasoning="x" * 500)
    horde.cancel(request_id)
    assert get_job(job["id"]).settled_character_count == 3


def test_accepted_bytes_stand_in_for_a_stream_that_is_gone(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    horde.post_progress(job["id"], 1, "Blé", reasoning="x" * 500)
    redis.delete(f"horde:chat:stream:{request_id}")
    horde.cancel(request_id)
    assert get_job(job["id"]).settled_character_count == 504


def test_the_floor_is_paid_when_stream_and_lease_are_gone(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    horde.post_progress(job["id"], 1, "x" * 500)
    redis.flushdb()
    horde.cancel(request_id)
    assert get_job(job["id"]).settled_character_count == 0
    assert redis.keys() == []  # no lease and no marker is made up


def test_the_floor_is_paid_when_redis_is_away(
    horde: ChatHorde, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id, job = horde.serve(stream=True)
    horde.post_progress(job["id"], 1, "x" * 500)

    def fail(*_: object, **__: object) -> None:
        raise redis_ctrl.RedisUnavailable("away")

    with monkeypatch.context() as away:
        away.setattr(redis_ctrl, "call", fail)
        assert horde.cancel(request_id).status_code == 200
    stored = get_job(job["id"])
    assert (stored.faulted, stored.cancelled, stored.settled_character_count) == (True, True, 0)
    assert refused(horde.reply(job["id"])) == (400, "AbortedGen")


def test_a_worker_that_was_not_told_hears_of_it_when_its_deadline_would_move(
    horde: ChatHorde, redis: Redis
) -> None:
    """As when the pop wrote its lease after the cancel looked for it, or Redis was away."""
    request_id, job = horde.serve(stream=True)
    horde.cancel(request_id)
    redis.delete(f"horde:chat:stream:{request_id}")
    redis.hdel(f"horde:chat:lease:{job['id']}", "cancelled")
    assert horde.post_progress(job["id"], 1).json == {"accepted_seq": 1, "cancelled": True}
    assert horde.post_progress(job["id"], 2).json == {"accepted_seq": 2, "cancelled": True}
    assert [entry.get("ended") for entry in read_stream(redis, request_id)] == [None, "1", None]


def test_only_the_attempt_in_flight_is_settled(horde: ChatHorde, redis: Redis) -> None:
    request_id, lost = horde.serve(stream=True)
    horde.post_progress(lost["id"], 1, "x" * 400)
    horde.fault(lost["id"])
    job = horde.take()
    horde.post_progress(job["id"], 1, "four")
    horde.cancel(request_id)
    assert (
        get_job(job["id"]).settled_character_count,
        get_job(lost["id"]).settled_character_count,
    ) == (4, None)
    assert list_movements(lost["id"]) == {}


def test_a_settled_job_is_no_drop_no_sample_and_no_restart(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    horde.post_progress(job["id"], 1, "x" * 400)
    horde.cancel(request_id)
    assert horde.fault(job["id"]).json == {"reward": 0.0}
    threads.check_waiting_prompts()
    worker = get_worker(get_job(job["id"]).worker_id)
    assert (worker.aborted_jobs, worker.uncompleted_jobs) == (0, 0)
    assert get_request(request_id).n == 0
    horde.take_nothing()
    with transaction() as session:
        assert [row.state for row in session.scalars(select(TextGenStatistic))] == [
            TextGenState.CANCELLED
        ]
        assert session.scalars(select(WorkerPerformance)).all() == []


def test_cancels_settle_once(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    first = horde.cancel(request_id).json
    moved, kudos = list_movements(job["id"]), horde.status(request_id)["kudos"]
    again = horde.cancel(request_id)
    assert (again.status_code, again.json["done"], first["done"]) == (200, True, False)
    assert (list_movements(job["id"]), horde.status(request_id)["kudos"]) == (moved, kudos)
    assert [entry.get("ended") for entry in read_stream(redis, request_id)] == ["1"]


def test_an_untrusted_owner_earns_half_in_escrow(horde: ChatHorde, redis: Redis) -> None:
    owner_id, key = make_user()
    request_id = ""
    horde.take_nothing(key=key, name="untrusted")
    request_id = horde.queue(stream=True)
    job = horde.take(key=key, name="untrusted")
    horde.post_progress(job["id"], 1, "x" * 400, key=key)
    horde.cancel(request_id)
    with transaction() as session:
        rows = session.execute(
            select(KudosPosting.account, KudosPosting.amount).where(
                KudosPosting.event_id == UUID(job["id"]), KudosPosting.user_id == owner_id
            )
        ).all()
    assert {row.account for row in rows} == {"balance", "escrow"}


def test_a_hold_ends_with_the_cancel_and_a_shared_key_pays(horde: ChatHorde, redis: Redis) -> None:
    sharedkey = make_shared_key(horde.requester_id, kudos=100_000)
    horde.take_nothing()
    answer = horde.submit(key=sharedkey, stream=True, max_tokens=1024)
    assert answer.status_code == 202, answer.json
    job = horde.take()
    horde.post_progress(job["id"], 1, "x" * 400)
    before = get_shared_key(sharedkey).kudos
    horde.cancel(answer.json["id"])
    charged = -list_movements(job["id"])[horde.requester_id]
    assert before - get_shared_key(sharedkey).kudos == pytest.approx(float(charged), abs=1)
    assert not any(is_active for _, is_active in list_holds())


def test_a_held_request_is_released_when_it_is_settled(horde: ChatHorde, redis: Redis) -> None:
    horde.take_nothing()
    request_id = horde.queue(stream=True, horde={"slow_workers": False})
    change_worker("chat worker", speed=50.0)
    job = horde.take()
    assert [is_active for _, is_active in list_holds()] == [True]
    horde.cancel(request_id)
    assert [is_active for _, is_active in list_holds()] == [False]
    assert get_job(job["id"]).cancelled


def test_a_request_that_does_not_stream_is_paid_for_its_reply_alone(
    horde: ChatHorde, redis: Redis
) -> None:
    request_id, job = horde.serve()
    horde.cancel(request_id)
    stored = get_job(job["id"])
    assert (stored.faulted, stored.settled_character_count, redis.keys()) == (False, None, [])
    assert horde.reply(job["id"]).json["reward"] > 0
    status = horde.status(request_id)
    assert (status["done"], status["finished"]) == (True, 1)


def test_a_queued_streamed_request_is_cancelled_without_a_trace(
    horde: ChatHorde, redis: Redis
) -> None:
    horde.take_nothing()
    request_id = horde.queue(stream=True)
    horde.cancel(request_id)
    horde.take_nothing()
    assert redis.keys() == []


def test_a_fake_is_told_alone(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    worker_id = make_worker(horde.owner_id)
    fake_id = make_job(UUID(request_id), worker_id, fake=True)
    write_lease(horde, fake_id, UUID(request_id), worker_id, is_fake=True)
    horde.cancel(request_id)
    fake = get_job(str(fake_id))
    assert (fake.faulted, fake.cancelled, fake.settled_character_count) == (False, False, None)
    assert list_movements(str(fake_id)) == {}
    assert [entry["gen"] for entry in read_stream(redis, request_id)] == [job["id"]]
    assert horde.post_progress(str(fake_id)).json == {"accepted_seq": 1, "cancelled": True}
    assert horde.post_progress(job["id"]).json == {"accepted_seq": 1, "cancelled": True}


def test_a_fake_alone_does_not_keep_a_hold(horde: ChatHorde, redis: Redis) -> None:
    horde.take_nothing()
    request_id = horde.queue(stream=True, horde={"slow_workers": False})
    make_job(UUID(request_id), make_worker(horde.owner_id), fake=True)
    horde.cancel(request_id)
    assert [is_active for _, is_active in list_holds()] == [False]


def write_lease(
    horde: ChatHorde, job_id: UUID, request_id: UUID, worker_id: UUID, *, is_fake: bool = False
) -> None:
    """The lease that the pop of such a job would write."""
    chat_progress.write_stream_lease(
        chat_progress.StreamLease(
            generation_id=job_id,
            request_id=request_id,
            worker_id=worker_id,
            model="a/model",
            owner_id=horde.owner_id,
            key=users.build_lease_key_of(horde.owner_key),
            max_bytes=1600,
            is_fake=is_fake,
            started=get_unix_seconds(utcnow()),
            job_ttl=150,
            lease_cap=600,
            owner_trusted=True,
        )
    )


# Races


def copy_rows(request_id: str, job_id: str, count: int) -> list[tuple[str, str]]:
    """(request, job) of as many copies of a request in flight with its job."""
    pairs = [(str(uuid4()), str(uuid4())) for _ in range(count)]
    wp_ids, job_ids = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    with transaction() as session:
        for table, source, ids, parents in (
            ("waiting_prompts", request_id, wp_ids, wp_ids),
            ("processing_gens", job_id, job_ids, wp_ids),
        ):
            names = session.scalars(
                text("SELECT column_name FROM information_schema.columns WHERE table_name = :name"),
                {"name": table},
            )
            values = {name: name for name in names} | {"id": "copy.id"}
            if "wp_id" in values:
                values["wp_id"] = "copy.parent"
            columns = ", ".join(
                source if "." in source else f"original.{source}" for source in values.values()
            )
            statement = (
                f"INSERT INTO {table} ({', '.join(values)}) SELECT {columns} FROM {table} AS"
                " original, unnest(CAST(:ids AS uuid[]), CAST(:parents AS uuid[])) AS copy (id,"
                " parent) WHERE original.id = CAST(:source AS uuid)"
            )
            session.execute(text(statement), {"ids": ids, "parents": parents, "source": source})
    return pairs


def race(
    pairs: list[tuple[str, str]],
    *calls: Callable[[str, str], Any],
    seconds: float,
    spread_seconds: float = 0.004,
) -> list[tuple[Any, ...]]:
    """What each call answered for each pair; the calls of a round start together. Stops when the
    time is up.
    """
    barrier = Barrier(len(calls))
    until = time.monotonic() + seconds

    def run(call: Callable[[str, str], Any]) -> list[Any]:
        answers = []
        for request_id, job_id in pairs:
            try:
                barrier.wait(60)
            except BrokenBarrierError:
                break
            if time.monotonic() > until:
                barrier.abort()
                break
            time.sleep(random.uniform(0, spread_seconds))
            answers.append(call(request_id, job_id))
        return answers

    with ThreadPoolExecutor(len(calls)) as pool:
        rounds = list(pool.map(run, calls))
    # The thread that saw the time up first may have let another begin one round more.
    played = list(zip(*rounds, strict=False))
    assert played, "no round fitted into the time, so nothing was tried"
    return played


@pytest.mark.race
def test_of_settlement_and_cancel_one_wins_thousands_of_times(
    horde: ChatHorde, redis: Redis
) -> None:
    """The two transactions themselves, on connections of their own, without what the routes do
    around them.
    """
    request_id, job = horde.serve(stream=True)
    with transaction() as session:
        facts = find_job(session, UUID(job["id"]))
    assert facts is not None
    pairs = copy_rows(request_id, job["id"], RACE_ROUNDS)
    now = utcnow()
    columns = {
        "generation": "y" * 400,
        "message": {"role": "assistant", "content": "y" * 400},
        "gen_metadata": None,
    }

    config = horde.app.extensions[CONFIG_EXTENSION]

    def submit(wp_id: str, job_id: str) -> str | None:
        with horde.app.app_context():
            copy = replace(facts, id=UUID(job_id), wp_id=UUID(wp_id))
            try:
                settle_or_refuse(
                    copy,
                    Submitted(columns=columns, tokens=100, generated_tokens=100),
                    config=config,
                    now=now,
                )
            except BadRequest as refusal:
                return refusal.rc
        return None

    def cancel(wp_id: str, job_id: str) -> bool:
        with horde.app.app_context(), transaction() as session:
            is_cancelled = cancel_text_request(session, UUID(wp_id), now)
            if is_cancelled:
                settle_streamed_jobs(session, UUID(wp_id), {UUID(job_id): 200}, config, now)
        return is_cancelled

    rounds = race(pairs, submit, cancel, seconds=RACE_SECONDS, spread_seconds=0.002)

    assert set(rounds) <= {(None, False), ("AbortedGen", True)}
    stories = Counter(
        (submitted, is_stored, is_faulted, count, outcome, postings)
        for (submitted, _), (is_stored, is_faulted, count, outcome, postings) in zip(
            rounds, read_stories([job_id for _, job_id in pairs]), strict=False
        )
    )
    assert set(stories) <= {
        (None, True, False, None, "completed", 2),
        ("AbortedGen", False, True, 200, "cancelled", 2),
    }
    assert len(stories) == 2 or len(rounds) < MANY_ROUNDS


def read_stories(job_ids: list[str]) -> list[tuple[Any, ...]]:
    """(reply stored, faulted as cancelled, settled characters, the request's end, postings) of each
    job.
    """
    statement = text(
        "SELECT job.generation IS NOT NULL, job.faulted AND job.cancelled,"
        " job.settled_character_count, request.terminal_outcome, (SELECT count(*) FROM kudos_ledger"
        " WHERE event_id = job.id) FROM unnest(CAST(:ids AS uuid[])) WITH ORDINALITY AS wanted (id,"
        " place) JOIN processing_gens AS job USING (id) JOIN waiting_prompts AS request ON"
        " request.id = job.wp_id ORDER BY wanted.place"
    )
    with transaction() as session:
        return [tuple(row) for row in session.execute(statement, {"ids": job_ids})]


@pytest.mark.race
def test_exactly_one_of_submit_and_cancel_wins(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    pairs = copy_rows(request_id, job["id"], ROUTE_RACE_ROUNDS)
    worker_id = get_job(job["id"]).worker_id
    for wp_id, job_id in pairs:
        write_lease(horde, UUID(job_id), UUID(wp_id), worker_id)
        assert chat_progress.append_progress(
            chat_progress.ProgressPost(
                generation_id=UUID(job_id), seq=1, content="x" * 200, reasoning=""
            ),
            key=users.build_lease_key_of(horde.owner_key),
            now=get_unix_seconds(utcnow()),
            base_lease_seconds=150,
        ).seq

    rounds = race(
        pairs,
        lambda _, job_id: horde.reply(job_id, "y" * 400),
        lambda wp_id, _: horde.cancel(wp_id),
        lambda _, job_id: horde.post_progress(job_id, 2, "z"),
        seconds=ROUTE_RACE_SECONDS,
        spread_seconds=0.02,
    )

    winners: Counter[str] = Counter()
    for (wp_id, job_id), (submitted, cancelled, posted) in zip(pairs, rounds, strict=False):
        assert cancelled.status_code == 200
        assert (posted.status_code, posted.json.get("rc")) in {
            (200, None),
            (404, "ChatProgressNotStreaming"),
            (404, "ChatJobAborted"),
        }
        stored, request = get_job(job_id), get_request(wp_id)
        moved = list_movements(job_id)
        if submitted.status_code == 200:
            winners["submit"] += 1
            assert (stored.generation, stored.faulted, stored.cancelled) == (
                "y" * 400,
                False,
                False,
            )
            assert stored.settled_character_count is None
            assert request.terminal_outcome == "completed"
        else:
            winners["cancel"] += 1
            assert refused(submitted) == (400, "AbortedGen")
            assert (stored.generation, stored.message, stored.faulted, stored.cancelled) == (
                None,
                None,
                True,
                True,
            )
            assert stored.settled_character_count in {200, 201}
            assert request.terminal_outcome == "cancelled"
            assert sum("ended" in entry for entry in read_stream(redis, wp_id)) == 1
        assert sorted(moved) == sorted({horde.owner_id, horde.requester_id})
        assert moved[horde.owner_id] + 1 == -moved[horde.requester_id]
        assert round(request.consumed_kudos) == round(-moved[horde.requester_id]) + 1
    assert winners.total() > 0
    with transaction() as session:
        statement = text(
            "SELECT max(postings) FROM (SELECT count(*) AS postings FROM kudos_ledger"
            " WHERE event_id = ANY(CAST(:ids AS uuid[])) GROUP BY event_id) AS counted"
        )
        assert session.scalar(statement, {"ids": [job_id for _, job_id in pairs]}) == 2


@pytest.mark.race
def test_exactly_one_of_fault_lapse_and_cancel_wins(horde: ChatHorde, redis: Redis) -> None:
    request_id, job = horde.serve(stream=True)
    pairs = copy_rows(request_id, job["id"], 100)
    worker_id = get_job(job["id"]).worker_id
    for wp_id, job_id in pairs:
        write_lease(horde, UUID(job_id), UUID(wp_id), worker_id)

    rounds = race(
        pairs,
        lambda _, job_id: horde.fault(job_id),
        lambda wp_id, _: horde.cancel(wp_id),
        seconds=ROUTE_RACE_SECONDS,
    )

    for (wp_id, job_id), (faulted, cancelled) in zip(pairs, rounds, strict=False):
        assert (faulted.status_code, faulted.json, cancelled.status_code) == (
            200,
            {"reward": 0.0},
            200,
        )
        stored, request = get_job(job_id), get_request(wp_id)
        assert (stored.faulted, request.n, request.terminal_outcome) == (True, 0, "cancelled")
        assert bool(list_movements(job_id)) is stored.cancelled
        assert [entry.get("ended") for entry in read_stream(redis, wp_id)] == ["1"]
