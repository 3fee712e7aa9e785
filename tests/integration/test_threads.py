# SPDX-License-Identifier: AGPL-3.0-or-later
"""The periodic jobs on a real database: each does its work once, however often and wherever it
runs.
"""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from flask import Flask
from sqlalchemy import func, select

from devtools.services import ServiceAddresses
from horde import chat_signal, model_reference, redis_ctrl
from horde.classes.base.kudos import KudosReservation, upfront_hold_id
from horde.classes.base.stats import (
    FulfillmentPerformance,
    ModelPerformance,
    TextGenState,
    TextGenStatistic,
)
from horde.classes.base.worker import WorkerPerformance
from horde.clock import utcnow
from horde.config import Config
from horde.database import samples, threads
from horde.db import transaction
from horde.return_codes import ReturnCode
from tests.integration.rows import (
    find_job_row,
    find_request,
    forget_everything,
    get_worker,
    make_job,
    make_request,
    make_user,
    make_worker,
    own_horde,
)

LONG_AGO = timedelta(minutes=21)

type Told = tuple[UUID, str, int, str | None, str | None]


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_horde(service_urls, "threads", ()) as app:
        yield app


@pytest.fixture(autouse=True)
def clean(app: Flask) -> None:
    forget_everything()


@pytest.fixture(scope="module")
def user_id(app: Flask) -> int:
    return make_user()[0]


@pytest.fixture
def worker_id(clean: None, user_id: int) -> UUID:
    return make_worker(user_id)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """What was published, each read when everything of it was committed."""
    events: list[Told] = []

    def publish(
        wp_id: UUID,
        event: chat_signal.ChatEvent,
        count: int,
        *,
        fault_reason: str | None = None,
        fault_rc: str | None = None,
    ) -> None:
        events.append((wp_id, event.value, count, fault_reason, fault_rc))

    monkeypatch.setattr(chat_signal, "publish_chat_event", publish)
    return events


def hold(user_id: int, wp_id: UUID) -> None:
    with transaction() as session:
        session.add(
            KudosReservation(user_id=user_id, business_id=upfront_hold_id(wp_id), amount=10)
        )


def is_held(wp_id: UUID) -> bool:
    with transaction() as session:
        return bool(
            session.scalar(
                select(KudosReservation.active).where(
                    KudosReservation.business_id == upfront_hold_id(wp_id)
                )
            )
        )


def count_rows(row_class: type) -> int:
    with transaction() as session:
        return session.scalar(select(func.count()).select_from(row_class)) or 0


def twice_at_once(work: Callable[[], object]) -> list[object]:
    """Run the work in two threads that start together."""
    barrier = threading.Barrier(2)

    def run() -> object:
        barrier.wait()
        return work()

    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(run), pool.submit(run)]]


# Stale jobs


def test_a_job_past_its_lease_goes_back_once(user_id: int, worker_id: UUID) -> None:
    wp_id = make_request(user_id, n=0)
    job_id = make_job(wp_id, worker_id, start_time=utcnow() - timedelta(seconds=151))

    assert threads.abort_stale_jobs() == 1
    assert threads.abort_stale_jobs() == 0

    job, request, worker = find_job_row(job_id), find_request(wp_id), get_worker(worker_id)
    assert job is not None
    assert request is not None
    assert (job.faulted, request.n, request.faulted) == (True, 1, False)
    assert (worker.aborted_jobs, worker.uncompleted_jobs) == (1, 1)
    with transaction() as session:
        assert [row.state for row in session.scalars(select(TextGenStatistic))] == [
            TextGenState.FAULTED
        ]


def test_one_pass_aborts_every_stale_job(
    user_id: int, worker_id: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "STALE_JOBS_A_BATCH", 2)
    for _ in range(5):
        make_job(
            make_request(user_id, n=0), worker_id, start_time=utcnow() - timedelta(seconds=151)
        )
    assert threads.abort_stale_jobs() == 5
    assert threads.abort_stale_jobs() == 0


@pytest.mark.race
def test_two_hosts_give_a_stale_job_back_once(user_id: int, worker_id: UUID) -> None:
    started = utcnow() - timedelta(seconds=151)
    requests = [make_request(user_id, n=0) for _ in range(8)]
    for wp_id in requests:
        make_job(wp_id, worker_id, start_time=started)

    results = twice_at_once(threads.abort_stale_jobs)

    assert sum(int(str(result)) for result in results) == len(requests)
    assert [request.n for wp_id in requests if (request := find_request(wp_id)) is not None] == [
        1
    ] * len(requests)
    assert get_worker(worker_id).aborted_jobs == len(requests)


def test_only_pending_real_jobs_past_their_own_lease_are_aborted(
    user_id: int, worker_id: UUID
) -> None:
    wp_id = make_request(user_id, n=0)
    started = utcnow() - timedelta(seconds=200)
    kept = [
        make_job(wp_id, worker_id, start_time=started, job_ttl=210),
        make_job(wp_id, worker_id, start_time=started, fake=True),
        make_job(wp_id, worker_id, start_time=started, generation=""),
    ]

    assert threads.abort_stale_jobs() == 0

    assert [job.faulted for job_id in kept if (job := find_job_row(job_id)) is not None] == [
        False
    ] * 3
    request = find_request(wp_id)
    assert request is not None
    assert request.n == 0


def test_a_nonconformant_reply_is_no_dropped_job(user_id: int, worker_id: UUID) -> None:
    wp_id = make_request(user_id, n=0, is_chat=True)
    started = utcnow() - timedelta(seconds=151)
    make_job(
        wp_id,
        worker_id,
        start_time=started,
        chat_refusal_rc=ReturnCode.CHAT_SUBMIT_NONCONFORMANT.value,
    )
    threads.abort_stale_jobs()
    worker = get_worker(worker_id)
    assert (worker.nonconformant_replies, worker.aborted_jobs, worker.uncompleted_jobs) == (1, 0, 0)


def test_the_third_lapsed_lease_ends_a_chat_request(
    user_id: int, worker_id: UUID, told: list[Told]
) -> None:
    wp_id = make_request(
        user_id, n=0, is_chat=True, chat_fault_reason="Why", chat_fault_rc="ChatWorkerFault"
    )
    hold(user_id, wp_id)
    for _ in range(2):
        make_job(wp_id, worker_id, faulted=True)
    make_job(wp_id, worker_id, start_time=utcnow() - timedelta(seconds=151))

    threads.check_waiting_prompts()
    threads.check_waiting_prompts()

    request = find_request(wp_id)
    assert request is not None
    assert (request.faulted, request.terminal_outcome) == (True, "faulted")
    assert not is_held(wp_id)
    assert told == [(wp_id, "faulted", 0, "Why", "ChatWorkerFault")]


# Requests that failed too often


def test_a_request_over_the_limit_is_faulted_once(
    user_id: int, worker_id: UUID, told: list[Told]
) -> None:
    wp_id = make_request(user_id, n=1, is_chat=True)
    text_id = make_request(user_id, n=1)
    for faulted_id in (wp_id, text_id):
        hold(user_id, faulted_id)
        for _ in range(3):
            make_job(faulted_id, worker_id, faulted=True)

    assert threads.fault_failing_requests() == 2
    assert threads.fault_failing_requests() == 0

    assert [
        request.faulted for i in (wp_id, text_id) if (request := find_request(i)) is not None
    ] == [True, True]
    assert not is_held(wp_id)
    assert told == [(wp_id, "faulted", 0, None, None)]


def test_fakes_cancelled_jobs_and_finished_requests_do_not_fail(
    user_id: int, worker_id: UUID
) -> None:
    wp_id = make_request(user_id, n=1)
    for columns in ({}, {}, {"fake": True}, {"cancelled": True}):
        make_job(wp_id, worker_id, faulted=True, **columns)
    done_id = make_request(user_id, n=0, terminal_outcome="completed")
    for _ in range(3):
        make_job(done_id, worker_id, faulted=True)
    assert threads.fault_failing_requests() == 0


def test_a_hold_stays_while_a_job_of_a_failed_request_runs(user_id: int, worker_id: UUID) -> None:
    wp_id = make_request(user_id, n=0)
    hold(user_id, wp_id)
    for _ in range(3):
        make_job(wp_id, worker_id, faulted=True)
    make_job(wp_id, worker_id)
    assert threads.fault_failing_requests() == 1
    assert is_held(wp_id)


# Expiry


def test_an_expired_request_goes_with_its_hold_and_jobs(
    user_id: int, worker_id: UUID, told: list[Told]
) -> None:
    expired = make_request(
        user_id,
        expiry=utcnow() - timedelta(seconds=1),
        n=0,
        is_chat=True,
        chat_fault_rc="ChatSubmitInvalid",
    )
    live = make_request(user_id)
    for wp_id in (expired, live):
        hold(user_id, wp_id)
    make_job(expired, worker_id, generation="half of it")

    assert threads.delete_expired_requests() == 1

    assert find_request(expired) is None
    assert find_request(live) is not None
    assert (is_held(expired), is_held(live)) == (False, True)
    assert told == [(expired, "faulted", 1, None, "ChatSubmitInvalid")]


@pytest.mark.parametrize(
    "columns",
    [
        {"terminal_outcome": "completed"},
        {"terminal_outcome": "cancelled"},
        {"faulted": True},
        {"active": False},
        {"is_chat": False},
    ],
)
def test_an_ended_request_expires_silently(
    user_id: int, told: list[Told], columns: dict[str, object]
) -> None:
    wp_id = make_request(
        user_id, expiry=utcnow() - timedelta(seconds=1), **{"is_chat": True} | columns
    )
    assert threads.delete_expired_requests() == 1
    assert find_request(wp_id) is None
    assert told == []


def test_an_inactive_request_left_behind_goes_early(user_id: int) -> None:
    left = make_request(user_id, active=False, created=utcnow() - timedelta(minutes=6))
    fresh = make_request(user_id, active=False)
    old = make_request(user_id, created=utcnow() - timedelta(minutes=6))
    hold(user_id, left)
    assert threads.delete_expired_requests() == 1
    assert find_request(left) is None
    assert not is_held(left)
    assert None not in (find_request(fresh), find_request(old))


def test_many_expired_requests_go_in_batches(user_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "EXPIRED_REQUESTS_A_BATCH", 2)
    for _ in range(5):
        make_request(user_id, expiry=utcnow() - LONG_AGO)
    assert threads.delete_expired_requests() == 5


@pytest.mark.race
def test_two_hosts_tell_of_an_expiry_once(user_id: int, told: list[Told]) -> None:
    expired = {make_request(user_id, expiry=utcnow() - LONG_AGO, is_chat=True) for _ in range(8)}
    twice_at_once(threads.delete_expired_requests)
    assert sorted(event[0] for event in told) == sorted(expired)


def test_keys_of_stored_objects_are_collected(user_id: int) -> None:
    images = [
        {"type": "image_url", "image_url": {"url": f"horde-r2://{name}.jpg"}} for name in ("a", "b")
    ]
    messages = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, *images]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
        },
    ]
    wp_id = make_request(user_id, is_chat=True, messages=messages, chat_messages_offloaded=True)
    text_id = make_request(user_id)
    with transaction() as session:
        keys = threads.collect_expired_chat_image_keys(session, [wp_id, text_id])
    assert keys == ["a.jpg", "b.jpg", f"{wp_id}_chat_messages.json"]


# Samples


def test_a_speed_is_the_mean_of_the_newest_samples(user_id: int) -> None:
    worker_id, idle = make_worker(user_id), make_worker(user_id, speed=7.0)
    with transaction() as session:
        session.add_all(
            WorkerPerformance(worker_id=worker_id, performance=1000.0) for _ in range(5)
        )
        session.flush()
        session.add_all(
            WorkerPerformance(worker_id=worker_id, performance=float(speed))
            for speed in range(1, 21)
        )
        session.add(
            WorkerPerformance(
                worker_id=idle, performance=3.0, created=utcnow() - timedelta(seconds=181)
            )
        )

    assert samples.refresh_worker_speeds() == 1
    assert samples.refresh_worker_speeds() == 1

    assert get_worker(worker_id).speed == 10.5
    assert get_worker(idle).speed == 7.0
    assert count_rows(WorkerPerformance) == 21


@pytest.mark.parametrize(
    ("measured", "stored"), [((0.0,), 1.0), ((1.0,), 0.99), ((0.5, 1.5), 0.99), ((12.5,), 12.5)]
)
def test_a_measured_speed_is_told_from_none(
    user_id: int, measured: tuple[float, ...], stored: float
) -> None:
    worker_id = make_worker(user_id, speed=50.0)
    with transaction() as session:
        session.add_all(
            WorkerPerformance(worker_id=worker_id, performance=speed) for speed in measured
        )
    samples.refresh_worker_speeds()
    assert get_worker(worker_id).speed == stored


def test_speeds_are_refreshed_in_batches(user_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "WORKERS_A_BATCH", 2)
    worker_ids = [make_worker(user_id) for _ in range(5)]
    with transaction() as session:
        session.add_all(
            WorkerPerformance(worker_id=worker_id, performance=4.0) for worker_id in worker_ids
        )
    assert samples.refresh_worker_speeds() == 5
    assert {get_worker(worker_id).speed for worker_id in worker_ids} == {4.0}


def test_old_samples_are_dropped() -> None:
    now = utcnow()
    with transaction() as session:
        session.add_all(
            FulfillmentPerformance(
                things=1, thing_type="text", created=now - timedelta(seconds=age)
            )
            for age in (50, 70)
        )
        session.add_all(
            ModelPerformance(model="m", performance=1, created=now - timedelta(minutes=age))
            for age in (59, 61)
        )
    threads.prune_samples()
    assert (count_rows(FulfillmentPerformance), count_rows(ModelPerformance)) == (1, 1)


# Copies and the list of jobs


def test_the_queue_order_is_shared(user_id: int) -> None:
    late = make_request(user_id, extra_priority=0)
    first = make_request(user_id, extra_priority=1000)
    threads.publish_queue_order()
    shared = redis_ctrl.get_json("text_wp_cache")
    assert isinstance(shared, list)
    assert [row[0] for row in shared] == [str(first), str(late)]


def test_requests_of_an_older_server_get_their_class(user_id: int) -> None:
    wp_id = make_request(user_id)
    assert threads.classify_requests() == 1
    assert threads.classify_requests() == 0
    request = find_request(wp_id)
    assert request is not None
    assert request.queue_class is not None


def test_every_job_runs(app: Flask, tmp_path: Path) -> None:
    source = tmp_path / "db.json"
    source.write_text(json.dumps({"a/model": {"parameters": 7_000_000_000}}))
    config = Config(database_url="unused", secret_key="unused", text_model_reference=str(source))
    jobs = threads.list_jobs(config)
    assert [job.name for job in jobs if not job.leader_only] == ["model_reference"]
    assert len({job.name for job in jobs}) == len(jobs)
    try:
        for job in jobs:
            job.run()
        assert model_reference.list_text_model_names() == ["a/model"]
    finally:
        model_reference.use_bundled_text_models()


def test_without_a_source_the_reference_is_not_refreshed() -> None:
    jobs = threads.list_jobs(Config(database_url="unused", secret_key="unused"))
    assert all(job.leader_only for job in jobs)
