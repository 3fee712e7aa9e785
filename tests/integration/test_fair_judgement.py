# SPDX-License-Identifier: AGPL-3.0-or-later
"""How workers are judged: by what they were measured on, and by whose fault it is."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import func, select, update

from devtools.services import ServiceAddresses
from horde import redis_ctrl
from horde.actions import models
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.user import UserRoleTypes
from horde.classes.base.worker import WorkerPerformance
from horde.classes.kobold.worker import TextWorker
from horde.clock import utcnow
from horde.database import functions, samples, threads, users
from horde.database.check_ins import find_named_worker, take_check_in, write_check_in
from horde.database.job_faults import fault_job
from horde.database.text_jobs import find_job
from horde.database.users import find_caller
from horde.db import transaction
from horde.shapes.base import parse_shape
from horde.shapes.jobs import TextPopBody
from tests.integration._fake_chat_worker import (
    MODEL,
    ChatHorde,
    build_pop_body,
    chat_horde,
    start_anew,
)
from tests.integration.rows import make_chat_worker, make_user, make_worker

WORKER = "chat worker"


@pytest.fixture(scope="module")
def module_horde(service_urls: ServiceAddresses) -> Iterator[ChatHorde]:
    with chat_horde(service_urls, "fair_judgement") as horde:
        yield horde


@pytest.fixture
def horde(module_horde: ChatHorde) -> ChatHorde:
    start_anew()
    return module_horde


def get_worker(name: str = WORKER) -> TextWorker:
    with transaction() as session:
        worker = session.scalars(select(TextWorker).where(TextWorker.name == name)).one()
        session.expunge(worker)
    return worker


def set_worker(**columns: Any) -> None:
    with transaction() as session:
        session.execute(update(TextWorker).where(TextWorker.name == WORKER).values(**columns))
    functions.note_text_workers_changed()


def get_epoch() -> int:
    epoch = redis_ctrl.get_counter(functions.WORKERS_EPOCH_KEY)
    assert epoch is not None
    return epoch


def let_jobs_take(seconds: float) -> None:
    with transaction() as session:
        session.execute(
            update(ProcessingGeneration)
            .where(ProcessingGeneration.generation.is_(None))
            .values(start_time=ProcessingGeneration.start_time - timedelta(seconds=seconds))
        )


def answer_one(horde: ChatHorde, content: str, *, seconds: float, **request: Any) -> None:
    """Let the worker answer one request in so much time."""
    horde.queue(**request)
    job = horde.take()
    let_jobs_take(seconds)
    assert horde.reply(job["id"], content).status_code == 200


# --- speed


def test_a_first_short_reply_after_a_slow_load_does_not_starve_the_worker(horde: ChatHorde) -> None:
    """ "Yes." after 9 s of loading made 2.2 tokens a second, too slow for a default chat."""
    horde.take_nothing()
    answer_one(horde, "Yes.", seconds=9)
    samples.refresh_worker_speeds()
    assert 1 < get_worker().speed < 20 / 8.9  # shown, and asked by `slow_workers`
    request_id = horde.queue()
    status = horde.status(request_id)
    assert (status["is_possible"], status["impossible_reason"]) == (True, None)
    assert "speed_limit" not in status
    assert horde.take()["id"] is not None


def test_many_words_in_little_time_do_not_measure_a_worker_either(horde: ChatHorde) -> None:
    horde.take_nothing()
    answer_one(horde, "yes " * 500, seconds=1)
    samples.refresh_worker_speeds()
    assert get_worker().speed > 20
    horde.take_nothing(chat_limits={"max_context_length": 8192, "max_length": 4096})
    status = horde.status(horde.queue(max_tokens=4096))
    assert status["speed_limit"] == {"largest_max_length": 1200}


@pytest.mark.parametrize(
    ("made", "is_provisional"),
    [
        pytest.param([(150, 5.0), (150, 5.0)], True, id="two replies"),
        pytest.param([(100, 5.0), (100, 5.0), (99, 5.0)], True, id="299 tokens"),
        pytest.param([(100, 5.0), (100, 5.0), (100, 5.0)], False, id="three replies of 300 tokens"),
        pytest.param([(298, 9.0), (1, 1.0), (1, 1.0)], False, id="uneven replies"),
        pytest.param([(1, 9.0)] * 20, True, id="twenty short replies"),
        pytest.param([(500, 0.0), (500, 0.0), (500, 5.0)], True, id="replies in no time"),
        pytest.param([(0, 5.0)] * 10, True, id="empty replies"),
        pytest.param([(None, None)] * 20, True, id="samples of an older server"),
        pytest.param([(None, None)] * 17 + [(100, 5.0)] * 3, False, id="old and new samples"),
        pytest.param([(16384, 600.0), (1, 0.001), (1, 600.0)], False, id="huge and tiny replies"),
    ],
)
def test_a_worker_is_measured_from_three_replies_and_300_tokens_on(
    horde: ChatHorde, made: list[tuple[int | None, float | None]], is_provisional: bool
) -> None:
    worker_id = make_worker(horde.owner_id, (MODEL,), name=WORKER)
    with transaction() as session:
        session.add_all(
            WorkerPerformance(
                worker_id=worker_id, performance=2.0, generated_tokens=tokens, seconds=seconds
            )
            for tokens, seconds in made
        )
    samples.refresh_worker_speeds()
    worker = get_worker()
    assert worker.speed_is_provisional is is_provisional
    assert worker.gate_speed == (1.0 if is_provisional else worker.speed)


def test_a_speed_is_the_tokens_over_the_seconds_of_the_newest_replies_together(
    horde: ChatHorde,
) -> None:
    worker_id = make_worker(horde.owner_id, (MODEL,), name=WORKER)
    forgotten = [(9000, 1.0)]
    counted = [(1000, 50.0), (20, 10.0), (5, 10.0), *[(100, 10.0)] * 17]
    for tokens, seconds in forgotten + counted:
        with transaction() as session:
            session.add(
                WorkerPerformance(
                    worker_id=worker_id, performance=1.0, generated_tokens=tokens, seconds=seconds
                )
            )
    samples.refresh_worker_speeds()
    # A short reply counts as the 20 tokens it is paid for.
    assert get_worker().speed == pytest.approx((1000 + 20 + 20 + 1700) / (50 + 10 + 10 + 170))


def test_a_worker_that_answers_in_chinese_is_as_fast_as_one_that_answers_in_english(
    horde: ChatHorde,
) -> None:
    horde.take_nothing()
    for _ in range(3):
        answer_one(horde, "天地玄黃宇宙洪荒" * 50, seconds=60)
    samples.refresh_worker_speeds()
    worker = get_worker()
    assert not worker.speed_is_provisional
    assert worker.speed == pytest.approx(300 / 60, rel=0.05)


def test_text_replies_measure_a_worker_too(horde: ChatHorde) -> None:
    horde.take_nothing()
    for _ in range(3):
        body = {"prompt": "Say", "models": [MODEL], "params": {"max_length": 512}}
        assert horde.post("/generate/text/async", body, horde.requester_key).status_code == 202
        job_id = horde.take()["id"]
        let_jobs_take(200)
        body = {"id": job_id, "generation": "word " * 100, "state": "ok"}
        assert horde.post("/generate/text/submit", body, horde.owner_key).status_code == 200
    samples.refresh_worker_speeds()
    worker = get_worker()
    assert not worker.speed_is_provisional
    assert worker.speed == pytest.approx(125 / 200, rel=0.05)


def test_a_request_that_speed_alone_rules_out_says_so_and_only_then(horde: ChatHorde) -> None:
    horde.take_nothing()
    request_id = horde.queue()
    assert "speed_limit" not in horde.status(request_id)
    set_worker(speed=2.0)
    status = horde.status(request_id)
    assert status["speed_limit"] == {"largest_max_length": 240}
    assert (status["is_possible"], status["impossible_reason"]) == (False, None)
    assert "speed_limit" not in horde.status(horde.queue(max_tokens=240))
    assert horde.status(horde.queue(max_tokens=241))["speed_limit"] == {"largest_max_length": 240}
    set_worker(speed=20.0)
    assert "speed_limit" not in horde.status(request_id)


def test_the_fastest_worker_ruled_out_by_speed_sets_the_limit(horde: ChatHorde) -> None:
    for speed in (1.5, 3.0, 0.5):
        make_chat_worker(
            horde.owner_id, MODEL, speed=speed, chat_features=["prompt_overflow_refused"]
        )
    # This one is faster, and lacks the guarantee.
    make_chat_worker(horde.owner_id, MODEL, speed=50.0, chat_features=[])
    status = horde.status(horde.queue())
    assert status["speed_limit"] == {"largest_max_length": 360}
    assert status["impossible_reason"] is None


def test_a_request_that_is_served_or_ended_tells_no_limit(horde: ChatHorde) -> None:
    request_id, job = horde.serve()
    set_worker(speed=2.0)
    assert "speed_limit" not in horde.status(request_id)
    horde.fault(job["id"])
    assert "speed_limit" in horde.status(request_id)
    assert horde.cancel(request_id).status_code == 200
    assert "speed_limit" not in horde.status(request_id)


@pytest.mark.parametrize("cause", ["maintenance", "gone", "declaration", "other model"])
def test_another_reason_is_not_called_speed(horde: ChatHorde, cause: str) -> None:
    horde.take_nothing()
    request_id = horde.queue()
    changes: dict[str, Any] = {
        "maintenance": {"maintenance": True},
        "gone": {"last_check_in": utcnow() - timedelta(seconds=301)},
        "declaration": {"chat_features": []},
        "other model": {"chat_model_id": "another"},
    }[cause]
    set_worker(speed=2.0, **changes)
    status = horde.status(request_id)
    assert not status["is_possible"]
    assert "speed_limit" not in status


def test_a_worker_that_was_slow_a_day_ago_is_measured_anew(horde: ChatHorde) -> None:
    horde.take_nothing()
    set_worker(speed=2.0)
    request_id = horde.queue()
    worker_id = get_worker().id
    with transaction() as session:
        session.add(
            WorkerPerformance(
                worker_id=worker_id,
                performance=2.0,
                generated_tokens=500,
                seconds=250.0,
                created=utcnow() - timedelta(hours=23),
            )
        )
    samples.refresh_worker_speeds()
    assert not horde.status(request_id)["is_possible"]
    with transaction() as session:
        session.execute(update(WorkerPerformance).values(created=utcnow() - timedelta(hours=25)))
    samples.refresh_worker_speeds()
    assert horde.status(request_id)["is_possible"]
    assert get_worker().speed == 2.0


def test_a_fast_worker_of_a_quiet_horde_stays_measured(horde: ChatHorde) -> None:
    horde.take_nothing()
    set_worker(speed=40.0)
    samples.refresh_worker_speeds()
    assert get_worker().gate_speed == 40.0


# --- dropped jobs


def drop(horde: ChatHorde, attempts: int = 3, **fault: Any) -> str:
    """Queue a request and drop it so often; its id."""
    request_id = horde.queue()
    for _ in range(attempts):
        assert horde.fault(horde.take()["id"], **fault).status_code == 200
    return request_id


def count_drops(name: str = WORKER) -> tuple[int, int, bool]:
    """(toward the hourly limit, in all, in maintenance)."""
    worker = get_worker(name)
    return worker.aborted_jobs, worker.uncompleted_jobs, worker.maintenance


def test_seven_cheap_requests_do_not_retire_an_honest_worker(horde: ChatHorde) -> None:
    """Each faulted three times on the only worker, which made 21 drops within an hour."""
    horde.take_nothing()
    for _ in range(7):
        assert horde.status(drop(horde))["faulted"]
    assert count_drops() == (7, 21, False)


@pytest.mark.parametrize("fault", [{}, {"fault_reason": "generation_error"}])
def test_a_worker_that_drops_many_requests_is_retired(
    horde: ChatHorde, fault: dict[str, str]
) -> None:
    horde.take_nothing()
    for number in range(21):
        request_id = horde.queue()
        epoch = get_epoch()
        assert count_drops() == (number, number, False)
        assert horde.fault(horde.take()["id"], **fault).status_code == 200
        horde.cancel(request_id)
    assert count_drops() == (0, 21, True)
    assert get_epoch() > epoch  # others learn at once that it serves no more


def test_prompts_that_the_horde_estimated_to_fit_retire_nobody(horde: ChatHorde) -> None:
    """Three overflows a request, seven requests, and the worker was in maintenance."""
    horde.take_nothing()
    for _ in range(8):
        drop(horde, fault_reason="prompt_overflow")
    assert count_drops() == (0, 24, False)


def test_an_overflow_does_not_excuse_another_drop_of_the_request(horde: ChatHorde) -> None:
    horde.take_nothing()
    horde.queue()
    assert horde.fault(horde.take()["id"], fault_reason="prompt_overflow").status_code == 200
    assert count_drops() == (0, 1, False)
    assert horde.fault(horde.take()["id"]).status_code == 200
    assert count_drops() == (1, 2, False)
    assert horde.fault(horde.take()["id"]).status_code == 200
    assert count_drops() == (1, 3, False)


def test_a_worker_whose_reply_was_refused_had_room_for_the_prompt(horde: ChatHorde) -> None:
    horde.take_nothing()
    horde.queue()
    job_id = horde.take()["id"]
    assert horde.reply(job_id, finish_reason="eos").status_code == 400
    assert horde.fault(job_id, fault_reason="prompt_overflow").status_code == 200
    assert count_drops() == (1, 1, False)


def test_each_worker_that_drops_a_request_counts_it_once(horde: ChatHorde) -> None:
    horde.take_nothing()
    horde.take_nothing(name="another")
    horde.queue()
    assert horde.fault(horde.take()["id"]).status_code == 200
    assert horde.fault(horde.take(name="another")["id"]).status_code == 200
    assert horde.fault(horde.take()["id"]).status_code == 200
    assert count_drops() == (1, 2, False)
    assert count_drops("another") == (1, 1, False)


def test_a_lease_that_lapses_counts_once_for_a_request_too(horde: ChatHorde) -> None:
    horde.take_nothing()
    horde.queue()
    for _ in range(2):
        horde.take()
        let_jobs_take(151)
        assert threads.abort_stale_jobs() == 1
    assert count_drops() == (1, 2, False)


def test_text_jobs_of_one_request_count_once(horde: ChatHorde) -> None:
    horde.take_nothing()
    body = {"prompt": "Say", "models": [MODEL], "params": {"n": 3, "max_length": 80}}
    assert horde.post("/generate/text/async", body, horde.requester_key).status_code == 202
    job = horde.take(amount=3)
    for job_id in job["ids"]:
        body = {"id": job_id, "generation": "faulted", "state": "faulted"}
        assert horde.post("/generate/text/submit", body, horde.owner_key).status_code == 200
    assert count_drops() == (1, 3, False)


@pytest.mark.race
def test_of_drops_at_the_same_moment_one_counts(horde: ChatHorde) -> None:
    horde.take_nothing()
    body = {"prompt": "Say", "models": [MODEL], "params": {"n": 4, "max_length": 80}}
    assert horde.post("/generate/text/async", body, horde.requester_key).status_code == 202
    job_ids = [UUID(job_id) for job_id in horde.take(amount=4)["ids"]]
    barrier = Barrier(4)

    def fault(job_id: UUID) -> None:
        with transaction() as session:
            job = find_job(session, job_id)
            assert job is not None
            barrier.wait(60)
            assert fault_job(session, job, is_raid=False, now=utcnow()).is_applied

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fault, job_ids))
    assert count_drops() == (1, 4, False)


# --- who serves, and who left


def leave(horde: ChatHorde, **changes: Any) -> Any:
    return horde.pop(**{"leaving": True, **changes})


def list_models(horde: ChatHorde, query: str = "type=text&chat=true") -> list[str]:
    models._model_lists.clear()
    return [model["name"] for model in horde.get(f"/status/models?{query}").json]


def test_a_worker_that_leaves_gets_no_job_and_is_offline_at_once(horde: ChatHorde) -> None:
    """Its model stayed listed for five minutes, and requests waited for nobody."""
    horde.take_nothing()
    request_id = horde.queue()
    assert horde.status(request_id)["is_possible"]
    assert list_models(horde) == [MODEL]
    assert list_models(horde, "type=text&min_count=1") == [MODEL]
    assert [worker["name"] for worker in horde.get("/workers?type=text").json] == [WORKER]
    epoch = get_epoch()

    answer = leave(horde)

    assert (answer.status_code, answer.json["id"], answer.json["ids"]) == (200, None, [])
    assert answer.json["skipped"] == {}
    assert get_epoch() > epoch
    status = horde.status(request_id)
    assert (status["is_possible"], status["eligible_workers"]) == (False, 0)
    assert list_models(horde) == []
    assert list_models(horde, "type=text&min_count=1") == []
    assert horde.get("/workers?type=text").json == []
    assert horde.get(f"/workers/{get_worker().id}").json["online"] is False
    refused = horde.submit()
    assert (refused.status_code, refused.json["rc"]) == (404, "UnknownChatModel")


def test_a_worker_that_left_comes_back_with_its_next_pop(horde: ChatHorde) -> None:
    horde.take_nothing()
    request_id = horde.queue()
    leave(horde)
    assert not horde.status(request_id)["is_possible"]
    assert horde.take()["id"] is not None
    assert list_models(horde) == [MODEL]
    assert leave(horde, leaving=False).status_code == 200
    assert get_worker().last_check_in > utcnow() - timedelta(seconds=30)


def test_the_jobs_of_a_worker_that_left_may_still_be_submitted(horde: ChatHorde) -> None:
    request_id, job = horde.serve()
    assert leave(horde).status_code == 200
    assert horde.reply(job["id"]).status_code == 200
    assert horde.status(request_id)["done"]


def test_leaving_twice_or_in_maintenance_or_with_little_said_is_fine(horde: ChatHorde) -> None:
    horde.take_nothing()
    set_worker(maintenance=True)
    for _ in range(2):
        assert leave(horde).json["id"] is None
    bare = {"name": WORKER, "leaving": True}
    assert horde.post("/generate/text/pop", bare, horde.owner_key).status_code == 200


def test_leaving_makes_no_worker_and_moves_nobody_elses(horde: ChatHorde) -> None:
    assert leave(horde).status_code == 200
    with transaction() as session:
        assert session.scalar(select(func.count()).select_from(TextWorker)) == 0
    horde.take_nothing()
    _, other_key = make_user()
    refused = leave(horde, key=other_key)
    assert (refused.status_code, refused.json["rc"]) == (403, "WrongCredentials")
    refused = leave(horde, key="nobody's")
    assert (refused.status_code, refused.json["rc"]) == (401, "InvalidAPIKey")
    refused = horde.pop(leaving="yes")
    assert (refused.status_code, refused.json["rc"]) == (400, "BadRequest")
    assert get_worker().last_check_in > utcnow() - timedelta(seconds=30)


def test_a_check_in_that_overlaps_with_leaving_does_not_undo_it(horde: ChatHorde) -> None:
    horde.take_nothing()
    body = parse_shape(TextPopBody, build_pop_body())
    with transaction() as session:
        caller = find_caller(session, horde.owner_key)
        known = find_named_worker(session, WORKER, utcnow())
    assert caller is not None
    assert known is not None
    worker = known.worker
    now = utcnow()
    pending = take_check_in(worker, body, None, is_new=False, address="127.0.0.1", now=now)
    leave(horde)
    with transaction() as session:
        write_check_in(session, worker, pending, [MODEL], caller, (), now)
    assert get_worker().last_check_in < utcnow() - timedelta(seconds=300)


def set_role(user_id: int, role: UserRoleTypes, *, granted: bool) -> None:
    with transaction() as session:
        users.set_role(session, user_id, role, granted=granted, now=utcnow())


def change_by_route(horde: ChatHorde, **changes: Any) -> None:
    _, moderator_key = make_user(UserRoleTypes.MODERATOR)
    answer = horde.client.put(
        f"/api/v2/workers/{get_worker().id}", json=changes, headers={"apikey": moderator_key}
    )
    assert answer.status_code == 200, answer.json


def delete_by_route(horde: ChatHorde) -> None:
    answer = horde.client.delete(
        f"/api/v2/workers/{get_worker().id}", headers={"apikey": horde.owner_key}
    )
    assert answer.status_code == 200, answer.json


def check_in_again(horde: ChatHorde, **changes: Any) -> None:
    with transaction() as session:
        session.execute(
            update(TextWorker).values(
                last_check_in=TextWorker.last_check_in - timedelta(seconds=31)
            )
        )
    horde.pop(**changes)


CHANGES: dict[str, Callable[[ChatHorde], Any]] = {
    "maintenance": lambda horde: change_by_route(horde, maintenance=True),
    "pause": lambda horde: change_by_route(horde, paused=True),
    "deletion": delete_by_route,
    "leaving": leave,
    "declaration": lambda horde: horde.pop(chat_features=[]),
    "no chat": lambda horde: horde.pop(chat_jobs=None, chat_limits=None, model_id=None),
    "text limits": lambda horde: check_in_again(horde, max_length=100),
    "nsfw": lambda horde: check_in_again(horde, nsfw=False),
    "program": lambda horde: check_in_again(horde, bridge_agent="Another:1:https://example.com"),
    "models": lambda horde: check_in_again(horde, models=[MODEL, "more"]),
    "flag": lambda horde: set_role(horde.owner_id, UserRoleTypes.FLAGGED, granted=True),
    "deleted owner": lambda horde: set_role(horde.owner_id, UserRoleTypes.DELETED, granted=True),
    "trust taken": lambda horde: set_role(horde.owner_id, UserRoleTypes.TRUSTED, granted=False),
}


@pytest.fixture
def restored_owner(horde: ChatHorde) -> Iterator[ChatHorde]:
    yield horde
    for role in (UserRoleTypes.FLAGGED, UserRoleTypes.DELETED):
        set_role(horde.owner_id, role, granted=False)
    set_role(horde.owner_id, UserRoleTypes.TRUSTED, granted=True)


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_who_may_serve_is_known_to_every_process_at_once(
    restored_owner: ChatHorde, change: str
) -> None:
    horde = restored_owner
    horde.take_nothing()
    epoch = get_epoch()
    CHANGES[change](horde)
    assert get_epoch() > epoch


@pytest.mark.parametrize(
    "change", ["maintenance", "pause", "deletion", "leaving", "declaration", "flag", "trust taken"]
)
def test_a_request_does_not_go_on_being_possible_after_its_last_worker(
    restored_owner: ChatHorde, change: str
) -> None:
    """Some processes said yes for a minute more, others no."""
    horde = restored_owner
    horde.take_nothing()
    request_id = horde.queue(horde={"trusted_workers": True})
    assert horde.status(request_id)["is_possible"]
    CHANGES[change](horde)
    status = horde.status(request_id)
    assert (status["is_possible"], status["eligible_workers"]) == (False, 0)


def test_a_change_that_another_process_made_ends_a_yes(horde: ChatHorde) -> None:
    horde.take_nothing()
    request_id = horde.queue()
    assert horde.status(request_id)["is_possible"]
    with transaction() as session:
        session.execute(update(TextWorker).values(maintenance=True))
    redis_ctrl.increment_counter(functions.WORKERS_EPOCH_KEY)
    assert not horde.status(request_id)["is_possible"]


def test_a_yes_ends_with_the_time_online_of_its_last_worker(horde: ChatHorde) -> None:
    horde.take_nothing()
    request_id = UUID(horde.queue())
    now = utcnow()
    with transaction() as session:

        def count(seconds: float) -> int:
            availability = functions.get_stored_request_availability(
                session,
                request_id,
                validated_backends=(),
                now=now + timedelta(seconds=seconds),
            )
            return availability.worker_count

        assert [count(0), count(299), count(302), count(299)] == [1, 1, 0, 0]


def test_the_workers_of_a_flagged_account_are_offline_and_come_back_with_it(
    restored_owner: ChatHorde,
) -> None:
    horde = restored_owner
    horde.take_nothing()
    set_role(horde.owner_id, UserRoleTypes.FLAGGED, granted=True)
    assert list_models(horde) == []
    assert horde.submit().json["rc"] == "UnknownChatModel"
    assert horde.pop().status_code == 403
    set_role(horde.owner_id, UserRoleTypes.FLAGGED, granted=False)
    horde.take_nothing()
    assert list_models(horde) == [MODEL]


def test_trust_lets_a_worker_serve_who_asks_for_it_at_once(restored_owner: ChatHorde) -> None:
    horde = restored_owner
    set_role(horde.owner_id, UserRoleTypes.TRUSTED, granted=False)
    horde.take_nothing()
    request_id = horde.queue(horde={"trusted_workers": True})
    assert not horde.status(request_id)["is_possible"]
    set_role(horde.owner_id, UserRoleTypes.TRUSTED, granted=True)
    assert horde.status(request_id)["is_possible"]
