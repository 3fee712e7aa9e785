# SPDX-License-Identifier: AGPL-3.0-or-later
"""Idle pops that cost no statement, and everything that makes a worker look again."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import func, select, update

from devtools.services import ServiceAddresses
from horde import clock, model_reference, pop_epochs, r2, redis_ctrl
from horde.actions import idle_pops
from horde.classes.base.stats import HordeSettings
from horde.classes.base.user import User, UserRoleTypes, hash_api_key
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.classes.base.worker import Worker
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.classes.kobold.worker import TextWorker
from horde.database import addresses, caches, threads, users
from horde.database.addresses import block_network, set_address_timeout
from horde.database.stats import set_horde_modes
from horde.database.worker_messages import delete_message, insert_messages
from horde.db import transaction
from horde.exceptions import ServiceUnavailable
from horde.pop_epochs import build_address_mark
from horde.redis_ctrl import RedisUnavailable
from tests.integration._fake_chat_worker import MODEL, Body, ChatHorde, chat_horde, start_anew
from tests.integration.chat_front import wait_until
from tests.integration.own_redis import OwnRedis
from tests.integration.rows import SECRET, make_user
from tests.integration.statements import noting_statements

TEXT = {"prompt": "Once", "models": ["a/model"], "params": {"max_length": 64}}
NAME = "chat worker"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRedis]:
    server = OwnRedis(Path(tmp_path_factory.mktemp("idle")))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def shared(service_urls: ServiceAddresses, redis: OwnRedis) -> Iterator[ChatHorde]:
    addresses = replace(service_urls, redis_url=redis.url.removesuffix("/7"))
    with chat_horde(addresses, "idle_pops") as horde:
        yield horde


@pytest.fixture
def horde(shared: ChatHorde) -> ChatHorde:
    """A horde with a worker that is older than its first half minute, and has looked."""
    wait_until(lambda: redis_ctrl.get_counter("any") is not None)  # a test may have ended it
    start_anew()
    pop(shared)
    with transaction() as session:
        session.execute(update(Worker).values(created=Worker.created - timedelta(hours=1)))
    for _ in range(3):  # a Redis that was just started has no marks yet
        pop(shared)
    return shared


def pop(horde: ChatHorde, **changes: Any) -> Body:
    answer = horde.pop(models=[MODEL, "a/model"], **changes)
    assert answer.status_code == 200, answer.json
    return dict(answer.json)


def count_statements(horde: ChatHorde, **changes: Any) -> int:
    with noting_statements() as seen:
        assert pop(horde, **changes)["id"] is None
    return len(seen)


def get_worker_id() -> Any:
    with transaction() as session:
        return session.scalar(select(Worker.id).where(Worker.name == NAME))


def count_jobs() -> int:
    with transaction() as session:
        return session.scalar(select(func.count()).select_from(TextProcessingGeneration)) or 0


def test_an_idle_pop_that_repeats_itself_costs_no_statement(horde: ChatHorde) -> None:
    first = pop(horde)
    with noting_statements() as seen:
        for _ in range(5):
            assert pop(horde) == first
    assert seen == []


def test_a_chat_request_is_found_by_the_next_pop(horde: ChatHorde) -> None:
    for _ in range(3):
        assert count_statements(horde) == 0
        horde.queue()
        assert pop(horde)["id"] is not None
        assert pop(horde)["id"] is None


@pytest.mark.parametrize("models", [["a/model"], [], ["other/model", "a/model"]])
def test_a_text_request_is_found_by_the_next_pop(horde: ChatHorde, models: list[str]) -> None:
    assert count_statements(horde) == 0
    answer = horde.post("/generate/text/async", TEXT | {"models": models}, horde.requester_key)
    assert answer.status_code == 202, answer.json
    assert pop(horde)["id"] is not None


def test_work_for_other_models_costs_an_idle_worker_nothing(horde: ChatHorde) -> None:
    marks = {pop_epochs.build_model_mark(name) for name in (MODEL, "a/model")}
    other = next(
        name
        for name in (f"other/model-{number}" for number in range(10))
        if pop_epochs.build_model_mark(name) not in marks
    )
    assert count_statements(horde) == 0
    queued = horde.post("/generate/text/async", TEXT | {"models": [other]}, horde.requester_key)
    assert queued.status_code == 202, queued.json
    assert count_statements(horde) == 0


def test_a_job_given_back_is_found_by_the_next_pop(horde: ChatHorde) -> None:
    horde.queue()
    job = pop(horde, name="other worker")
    pop(horde)
    assert count_statements(horde) == 0
    assert horde.fault(job["id"]).status_code == 200
    assert pop(horde)["id"] is not None


def test_a_job_whose_lease_ended_is_found_by_the_next_pop(horde: ChatHorde) -> None:
    horde.queue()
    assert pop(horde, name="other worker")["id"] is not None
    pop(horde)
    assert count_statements(horde) == 0
    with transaction() as session:
        session.execute(
            update(TextProcessingGeneration).values(
                start_time=TextProcessingGeneration.start_time - timedelta(hours=1)
            )
        )
    assert threads.abort_stale_jobs() == 1
    assert pop(horde)["id"] is not None


def test_work_that_nobody_told_of_is_found_within_a_tick_of_the_leader(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads.publish_queue_order()
    assert count_statements(horde) in {0, 2}
    with monkeypatch.context() as patch:
        # As when the process dies between its commit and what comes after it.
        patch.setattr("horde.actions.queue_requests.publish_text_work", lambda _: None)
        horde.queue()
    assert pop(horde)["id"] is None
    threads.publish_queue_order()
    assert pop(horde)["id"] is not None


def test_work_is_found_a_tick_later_where_the_leader_could_not_tell_of_it(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads.publish_queue_order()
    with monkeypatch.context() as patch:
        patch.setattr("horde.actions.queue_requests.publish_text_work", lambda _: None)
        horde.queue()

    def fail(*_: object) -> None:
        raise ServiceUnavailable("The database is away.")

    with monkeypatch.context() as patch:
        patch.setattr(threads, "get_needs_of_classes", fail)
        with pytest.raises(ServiceUnavailable):
            threads.publish_queue_order()
    assert pop(horde)["id"] is None
    threads.publish_queue_order()
    assert pop(horde)["id"] is not None


def test_a_mark_that_could_not_be_moved_while_another_thread_moved_it_is_still_owed(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    del horde
    real = redis_ctrl.call
    moved: list[Any] = []

    def read() -> Any:
        return real(redis_ctrl.cache_db, lambda client: client.hget(pop_epochs.EPOCHS_KEY, "mark"))

    def fail(*_: object) -> None:
        raise RedisUnavailable

    def move_then_fail_for_another(database: Any, work: Any) -> Any:
        result = real(database, work)
        moved.append(read())
        monkeypatch.setattr("horde.pop_epochs.redis_ctrl.call", fail)
        # Its commit came after what was moved just now.
        assert not pop_epochs.move_marks(["mark"])
        return result

    monkeypatch.setattr("horde.pop_epochs.redis_ctrl.call", fail)
    assert not pop_epochs.move_marks(["mark"])
    monkeypatch.setattr("horde.pop_epochs.redis_ctrl.call", move_then_fail_for_another)
    assert pop_epochs.move_marks([])
    monkeypatch.undo()
    pop_epochs.read_marks(["mark"])  # moves first what is owed
    paid = read()
    assert None not in {moved[0], paid}
    assert paid != moved[0]
    pop_epochs.read_marks(["mark"])
    assert read() == paid  # owed no more


def test_a_mark_that_could_not_be_moved_is_moved_later(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert count_statements(horde) == 0

    def fail(*_: object) -> None:
        raise RedisUnavailable

    with monkeypatch.context() as patch:
        patch.setattr("horde.pop_epochs.redis_ctrl.call", fail)
        horde.queue()
    assert pop(horde)["id"] is not None


def change_worker(horde: ChatHorde, **changes: Any) -> None:
    answer = horde.client.put(
        f"/api/v2/workers/{get_worker_id()}", json=changes, headers={"apikey": horde.owner_key}
    )
    assert answer.status_code == 200, answer.json


def test_maintenance_is_told_at_the_next_pop(horde: ChatHorde) -> None:
    assert count_statements(horde) == 0
    change_worker(horde, maintenance=True)
    refused = horde.pop(models=[MODEL, "a/model"])
    assert (refused.status_code, refused.json["rc"]) == (403, "WorkerMaintenance")


def test_a_worker_that_was_renamed_or_deleted_registers_anew(horde: ChatHorde) -> None:
    before = get_worker_id()
    change_worker(horde, name="another name")
    pop(horde)
    assert get_worker_id() not in {None, before}


def test_a_key_that_was_reset_is_refused_at_the_next_pop(horde: ChatHorde) -> None:
    user_id, key = make_user()
    for _ in range(2):
        assert horde.pop(name="of this key", key=key).status_code == 200
    with transaction() as session:
        session.execute(update(Worker).values(created=Worker.created - timedelta(hours=1)))
    for _ in range(3):
        assert horde.pop(name="of this key", key=key).status_code == 200
    with noting_statements() as seen:
        assert horde.pop(name="of this key", key=key).status_code == 200
    assert seen == []
    with transaction() as session:
        session.get_one(User, user_id).api_key = hash_api_key("a new key", SECRET)
        users.announce_change(session, user_id)
    assert horde.pop(name="of this key", key=key).status_code == 401


def test_an_owner_that_was_flagged_is_refused_at_the_next_pop(horde: ChatHorde) -> None:
    assert count_statements(horde) == 0
    with transaction() as session:
        users.set_role(
            session, horde.owner_id, UserRoleTypes.FLAGGED, granted=True, now=clock.utcnow()
        )
    try:
        assert horde.pop(models=[MODEL, "a/model"]).json["rc"] == "WorkerFlaggedMaintenance"
    finally:
        with transaction() as session:
            users.set_role(
                session, horde.owner_id, UserRoleTypes.FLAGGED, granted=False, now=clock.utcnow()
            )


def test_a_block_of_its_address_holds_at_once(horde: ChatHorde, redis: OwnRedis) -> None:
    assert count_statements(horde) == 0
    set_address_timeout("127.0.0.1", 1)
    refused = horde.pop(models=[MODEL, "a/model"])
    assert (refused.status_code, refused.json["rc"]) == (403, "TimeoutIP")
    redis.run("FLUSHALL")


def test_a_block_of_its_network_holds_at_once(horde: ChatHorde, redis: OwnRedis) -> None:
    assert count_statements(horde) == 0
    block_network(ip_network("127.0.0.0/8"), 1)
    refused = horde.pop(models=[MODEL, "a/model"])
    assert (refused.status_code, refused.json["rc"]) == (403, "TimeoutIP")
    redis.run("FLUSHALL")
    addresses._blocks.clear()


def test_a_timeout_of_another_address_makes_no_worker_look(horde: ChatHorde) -> None:
    assert build_address_mark("198.51.100.7") != build_address_mark("127.0.0.1")
    assert count_statements(horde) == 0
    set_address_timeout("198.51.100.7", 1)
    assert count_statements(horde) == 0


def test_an_idle_pop_asks_redis_once(horde: ChatHorde, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_statements(horde) == 0
    asked, own_thread = [], threading.get_ident()
    call = redis_ctrl.call

    def count(database: int, *arguments: Any) -> Any:
        if threading.get_ident() == own_thread:  # others work beside
            asked.append(database)
        return call(database, *arguments)

    monkeypatch.setattr(redis_ctrl, "call", count)
    assert count_statements(horde) == 0
    assert asked.count(redis_ctrl.cache_db) == 1
    assert redis_ctrl.address_timeout_db not in asked


def test_a_switch_of_the_horde_makes_workers_look(horde: ChatHorde) -> None:
    assert count_statements(horde) == 0
    with transaction() as session:
        set_horde_modes(session, {"invite_only": True})
    assert count_statements(horde) > 0
    with transaction() as session:
        set_horde_modes(session, {"invite_only": False})


def test_the_end_of_a_raid_reaches_a_worker_that_looked_before_its_process_heard_of_it(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = horde.app.extensions["horde.config"]
    object.__setattr__(config, "ip_checker", "http://checker.invalid/{ip}")
    monkeypatch.setattr(addresses, "_ask_checker", lambda *_: False)
    with transaction() as session:
        users.set_role(
            session, horde.owner_id, UserRoleTypes.TRUSTED, granted=False, now=clock.utcnow()
        )
        set_horde_modes(session, {"raid": True})
    try:
        pop(horde)
        with transaction() as session:  # as another node ends it
            session.execute(update(HordeSettings).values(raid=False))
        pop_epochs.move_marks([pop_epochs.EVERYTHING])
        pop(horde)  # the switches may be a second old
        caches.clear_all()
        refused = horde.pop(models=[MODEL, "a/model"])
        assert (refused.status_code, refused.json["rc"]) == (403, "UnsafeIP")
    finally:
        object.__setattr__(config, "ip_checker", "")
        with transaction() as session:
            set_horde_modes(session, {"raid": False})
            users.set_role(
                session, horde.owner_id, UserRoleTypes.TRUSTED, granted=True, now=clock.utcnow()
            )


def test_messages_are_told_at_the_next_pop_and_no_longer_than_they_last(horde: ChatHorde) -> None:
    assert count_statements(horde) == 0
    now = clock.utcnow()
    message_id = uuid4()
    row = {
        "id": message_id,
        "user_id": horde.owner_id,
        "worker_id": get_worker_id(),
        "worker_type": None,
        "message": "Please update.",
        "origin": "the horde",
        "created": now,
        "expiry": now + timedelta(hours=1),
    }
    with transaction() as session:
        insert_messages(session, [row])
    assert [message["message"] for message in pop(horde)["messages"]] == ["Please update."]
    with noting_statements() as seen:
        assert pop(horde)["messages"]
    assert seen == []
    with transaction() as session:
        delete_message(session, message_id)
    assert pop(horde)["messages"] == []


def test_another_list_of_models_makes_workers_look(horde: ChatHorde) -> None:
    assert count_statements(horde) == 0
    model_reference.use_bundled_text_models()
    assert count_statements(horde) > 0


def test_a_store_that_goes_away_makes_workers_look(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert count_statements(horde) == 0
    monkeypatch.setattr(r2, "is_circuit_open", lambda: True)
    assert count_statements(horde) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"max_length": 256},
        {"nsfw": False},
        {"chat_limits": {"max_context_length": 4096, "max_length": 512}},
        {"priority_usernames": ["somebody#1"]},
        {"bridge_agent": "other:1:url"},
    ],
)
def test_another_body_is_another_question(horde: ChatHorde, changes: Body) -> None:
    assert count_statements(horde) == 0
    assert count_statements(horde, **changes) > 0


def test_a_change_of_declaration_by_another_thread_is_taken_back(horde: ChatHorde) -> None:
    narrow = {"chat_limits": {"max_context_length": 4096, "max_length": 512}}
    pop(horde, **narrow)
    pop(horde)  # declares its own again
    with transaction() as session:
        assert (
            session.scalar(select(TextWorker.chat_max_length).where(TextWorker.name == NAME))
            == 1024
        )


def test_the_check_in_is_written_when_it_is_due(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction() as session:
        seen = session.scalar(select(Worker.last_check_in).where(Worker.name == NAME))
    assert seen is not None
    now = clock.utcnow()
    for seconds, is_written in ((29, False), (31, True)):
        later = now + timedelta(seconds=seconds)
        monkeypatch.setattr("horde.apis.v2.kobold.utcnow", lambda moment=later: moment)
        pop(horde)
        with transaction() as session:
            latest = session.scalar(select(Worker.last_check_in).where(Worker.name == NAME))
        assert (latest != seen) == is_written


def test_without_redis_every_pop_looks(horde: ChatHorde, redis: OwnRedis) -> None:
    assert count_statements(horde) == 0
    redis.kill()
    try:
        assert count_statements(horde) > 0
        horde.queue()
        assert pop(horde)["id"] is not None
    finally:
        redis.start()


def test_a_redis_that_was_emptied_shows_no_old_mark_as_new(
    horde: ChatHorde, redis: OwnRedis
) -> None:
    for queue in (False, True):
        pop(horde)
        pop(horde)
        assert count_statements(horde) == 0
        redis.run("FLUSHALL")
        if queue:
            horde.queue()
        redis.run("FLUSHALL")
        with noting_statements() as seen:
            assert (pop(horde)["id"] is not None) == queue
        assert seen


def test_a_pop_that_others_contested_is_not_remembered(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horde.database.queue_claims.CONTESTED_WAIT_MILLISECONDS", 100)
    request_id = horde.queue()
    with transaction() as session:
        session.execute(
            select(WaitingPrompt.id).where(WaitingPrompt.id == request_id).with_for_update()
        )
        assert pop(horde)["id"] is None  # somebody holds the row, and lets it go without taking it
    assert pop(horde)["id"] is not None


def test_few_answers_are_kept(horde: ChatHorde, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_pops, "MAX_KEPT", 2)
    for length in (100, 200, 300):
        pop(horde, max_length=length)
    assert len(idle_pops._kept.get().answers) <= 2


def test_no_pop_that_begins_after_a_request_was_accepted_misses_it(horde: ChatHorde) -> None:
    """Workers poll all the time on connections of their own; whatever was accepted is in somebody's
    hands once a pop that began afterwards is answered.
    """
    stop, failures = threading.Event(), []

    def poll() -> None:
        while not stop.is_set():
            answer = horde.pop(models=[MODEL, "a/model"])
            if answer.status_code != 200:
                failures.append(answer.json)

    pollers = [threading.Thread(target=poll) for _ in range(4)]
    for poller in pollers:
        poller.start()
    try:
        for number in range(40):
            horde.queue()
            pop(horde)
            assert count_jobs() == number + 1
    finally:
        stop.set()
        for poller in pollers:
            poller.join()
    assert failures == []


@pytest.mark.parametrize("repeat", range(3))
def test_an_activation_between_the_marks_and_the_look_is_not_missed(
    horde: ChatHorde, monkeypatch: pytest.MonkeyPatch, repeat: int
) -> None:
    """The request is committed and told of while a pop stands between any two of its steps."""
    steps: list[Callable[[], object]] = [lambda: None, horde.queue]

    def interrupt(name: str) -> None:
        module, _, attribute = name.rpartition(".")
        real = getattr(__import__(module, fromlist=[attribute]), attribute)

        def run(*arguments: Any, **options: Any) -> Any:
            result = real(*arguments, **options)
            steps.pop()() if steps else None
            return result

        monkeypatch.setattr(name, run)

    pop(horde, max_length=100 + repeat)
    interrupt(
        (
            "horde.actions.pop.begin_look",
            "horde.actions.pop.find_named_worker",
            "horde.actions.pop.get_sorted_text_wp_filtered_to_worker",
        )[repeat]
    )
    found = pop(horde, max_length=200 + repeat)["id"]
    monkeypatch.undo()
    assert found is not None or pop(horde, max_length=200 + repeat)["id"] is not None
