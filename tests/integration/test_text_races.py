# SPDX-License-Identifier: AGPL-3.0-or-later
"""What must hold when text requests, pops, submits, faults and cancels meet: real connections, real
commits.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import Barrier
from typing import Any
from uuid import UUID

import pytest
from flask import Flask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, NullPool, create_engine, select, text

from devtools.services import ServiceAddresses
from horde import db
from horde.classes.base.stats import TextGenStatistic
from horde.classes.base.user import UserRoleTypes
from horde.classes.base.waiting_prompt import WaitingPrompt, WPAllowedWorkers
from horde.classes.base.worker import Worker, WorkerModel
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.classes.kobold.queue_class import compute_queue_class
from horde.classes.kobold.worker import EligibilityInputs, RequestNeeds, TextWorker
from horde.clock import utcnow
from horde.database.queue_claims import claim_next_request
from horde.database.text_functions import get_sorted_text_wp_filtered_to_worker
from horde.db import transaction
from tests.integration.rows import make_request, make_user, make_worker
from tests.integration.text_horde import (
    KCPP_AGENT,
    KNOWN,
    TextHorde,
    age_worker,
    change_worker,
    count_rows,
    forget_postings,
    get_request,
    list_discrepancies,
    list_holds,
    list_postings,
    own_text_horde,
    require_worker,
    start_clean,
)

pytestmark = pytest.mark.race
ROUNDS = 5


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_text_horde(service_urls, "text_races", db_pool_size=30) as app:
        yield app


@pytest.fixture
def horde(app: Flask) -> Iterator[TextHorde]:
    start_clean()
    yield TextHorde(app)
    assert list_discrepancies() == ()


@pytest.fixture(scope="module")
def keys(app: Flask) -> list[str]:
    """The keys of trusted owners, one worker each."""
    return [make_user(UserRoleTypes.TRUSTED)[1] for _ in range(8)]


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The answers of calls that start together, in the order of the calls."""
    barrier = Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        answers = list(pool.map(run, calls))
    assert not [answer.data for answer in answers if answer.status_code >= 500]
    return answers


def names(keys: Sequence[str]) -> list[tuple[str, str]]:
    """(key, worker name) of each owner."""
    return [(key, f"worker of {key}") for key in keys]


def enlist(horde: TextHorde, keys: Sequence[str]) -> None:
    """Let each owner's worker be known, so that the next pop only looks for a job."""
    for key, name in names(keys):
        horde.take(key, name)


def pops(horde: TextHorde, keys: Sequence[str]) -> list[Callable[[], Any]]:
    return [lambda key=key, name=name: horde.pop(key, name) for key, name in names(keys)]


def list_jobs(request_id: str) -> list[TextProcessingGeneration]:
    with transaction() as session:
        return list(
            session.scalars(
                select(TextProcessingGeneration).where(
                    TextProcessingGeneration.wp_id == UUID(request_id)
                )
            )
        )


def test_one_generation_goes_to_one_worker(horde: TextHorde, keys: list[str]) -> None:
    enlist(horde, keys)
    for _ in range(ROUNDS):
        request_id = horde.queue()
        answers = at_once(*pops(horde, keys))
        assert Counter(answer.json["id"] is None for answer in answers) == {
            True: len(keys) - 1,
            False: 1,
        }
        assert (get_request(request_id).n, len(list_jobs(request_id))) == (0, 1)


def test_twenty_generations_are_handed_out_once_each_and_nobody_goes_away_empty(
    horde: TextHorde, keys: list[str]
) -> None:
    enlist(horde, keys)
    request_id = horde.queue(params={"n": 20})
    got: list[str] = []
    for _ in range(2):
        answers = at_once(*pops(horde, keys))
        got += [answer.json["id"] for answer in answers]
    assert None not in got
    assert len(set(got)) == 16
    answers = at_once(*pops(horde, keys))
    assert sum(answer.json["id"] is not None for answer in answers) == 4
    assert (get_request(request_id).n, len(list_jobs(request_id))) == (0, 20)


def test_many_requests_are_handed_out_once_each(horde: TextHorde, keys: list[str]) -> None:
    enlist(horde, keys)
    wanted = {horde.queue(prompt=f"number {number}") for number in range(16)}
    for _ in range(2):
        assert None not in [answer.json["id"] for answer in at_once(*pops(horde, keys))]
    assert all(len(list_jobs(request_id)) == 1 for request_id in wanted)


@contextmanager
def holding(*request_ids: str) -> Iterator[Connection]:
    """Another transaction that has these requests' rows locked, as a pop or a reply has them."""
    engine = create_engine(db.require_engine().url, poolclass=NullPool)
    with engine.connect() as other:
        statement = "SELECT FROM waiting_prompts WHERE id = ANY(CAST(:ids AS uuid[])) FOR UPDATE"
        other.execute(text(statement), {"ids": list(request_ids)})
        yield other


def wait_for_waiter() -> None:
    """Return once a statement waits for a row; it holds none itself, so nobody waits for it."""
    waiter = "SELECT backend_xid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with transaction() as session:
            rows = session.execute(text(waiter)).all()
        if rows:
            # Whoever locked or wrote a row has a transaction id.
            assert [row.backend_xid for row in rows] == [None]
            return
        time.sleep(0.01)
    pytest.fail("nobody waited")


def test_a_worker_waits_its_turn_for_a_request_that_others_are_claiming(
    horde: TextHorde, keys: list[str]
) -> None:
    enlist(horde, keys[:1])
    request_id, other_id = horde.queue(params={"n": 3}), horde.queue(prompt="another")
    with ThreadPoolExecutor(1) as pool:
        with holding(request_id, other_id):
            popping = pool.submit(horde.pop, *names(keys)[0])
            wait_for_waiter()
        assert popping.result(60).json["id"] is not None
    assert [str(job.wp_id) for job in list_every_job()] == [request_id]


def test_a_worker_whose_turn_finds_nothing_left_is_answered_as_idle(
    horde: TextHorde, keys: list[str]
) -> None:
    enlist(horde, keys[:1])
    request_id = horde.queue()
    with ThreadPoolExecutor(1) as pool:
        with holding(request_id) as other:
            popping = pool.submit(horde.pop, *names(keys)[0])
            wait_for_waiter()
            other.execute(text("UPDATE waiting_prompts SET n = 0"))
            other.commit()
        answer = popping.result(60)
    assert (answer.status_code, answer.json["id"]) == (200, None)


def test_a_worker_does_not_wait_for_ever_for_a_row_that_stays_locked(
    horde: TextHorde, keys: list[str]
) -> None:
    enlist(horde, keys[:1])
    request_id = horde.queue()
    with holding(request_id):
        answer = horde.pop(*names(keys)[0])
    assert (answer.status_code, answer.json["id"]) == (200, None)
    assert horde.pop(*names(keys)[0]).json["id"] is not None


def test_a_worker_takes_what_nobody_holds_without_waiting(
    horde: TextHorde, keys: list[str]
) -> None:
    enlist(horde, keys[:1])
    held, free = horde.queue(), horde.queue(prompt="another")
    with holding(held):
        assert horde.pop(*names(keys)[0]).json["id"] is not None
    assert [str(job.wp_id) for job in list_every_job()] == [free]


def test_two_submits_of_a_reply_pay_once(horde: TextHorde) -> None:
    owner, key = make_user(UserRoleTypes.TRUSTED)
    requester, asks = make_user(kudos=10_000)
    for _ in range(ROUNDS):
        request_id = horde.queue(asks)
        job_id = horde.take_job(key)
        forget_postings()
        answers = at_once(
            *[
                lambda number=number, job_id=job_id: horde.submit(key, job_id, f"reply {number}")
                for number in range(4)
            ]
        )
        assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400]
        assert {answer.json["rc"] for answer in answers if answer.status_code == 400} == {
            "DuplicateGen"
        }
        winner = next(number for number, answer in enumerate(answers) if answer.status_code == 200)
        assert [generation["text"] for generation in horde.status(request_id)["generations"]] == [
            f"reply {winner}"
        ]
        assert (len(list_postings(owner)), len(list_postings(requester))) == (1, 1)
    assert count_rows(TextGenStatistic) == ROUNDS


def test_a_fault_and_a_reply_at_once_leave_one_of_them(horde: TextHorde) -> None:
    owner, key = make_user(UserRoleTypes.TRUSTED)
    for _ in range(ROUNDS):
        request_id = horde.queue()
        job_id = horde.take_job(key)
        forget_postings()
        reply, fault = at_once(
            partial(horde.submit, key, job_id, "reply"), partial(horde.fault, key, job_id)
        )
        status = horde.status(request_id)
        if reply.status_code == 200:
            assert (fault.status_code, fault.json["rc"]) == (400, "DuplicateGen")
            assert (status["finished"], status["waiting"], len(list_postings(owner))) == (1, 0, 1)
        else:
            assert (reply.json["rc"], fault.json) == ("AbortedGen", {"reward": 0.0})
            assert (status["finished"], status["waiting"], list_postings(owner)) == (0, 1, [])
        horde.cancel(request_id)


def test_faults_at_once_give_a_generation_back_once(horde: TextHorde, keys: list[str]) -> None:
    key = keys[0]
    request_id = horde.queue()
    job_id = horde.take_job(key)
    answers = at_once(*[lambda: horde.fault(key, job_id)] * 4)
    assert [answer.json for answer in answers] == [{"reward": 0.0}] * 4
    assert get_request(request_id).n == 1
    assert require_worker("a worker").aborted_jobs == 1
    assert count_rows(TextGenStatistic) == 1


def test_faults_of_many_jobs_at_once_cross_the_limit_once(
    horde: TextHorde, keys: list[str]
) -> None:
    key = keys[0]
    requester, asks = make_user(kudos=10_000)
    horde.take(key)
    change_worker("a worker", speed=10.0)
    request_id = horde.queue(asks, params={"n": 4}, slow_workers=False)
    jobs = horde.take(key, amount=4)["ids"]
    at_once(*[lambda job_id=job_id: horde.fault(key, job_id) for job_id in jobs])
    row = get_request(request_id)
    assert (row.faulted, row.terminal_outcome, row.n) == (True, "faulted", 3)
    worker = require_worker("a worker")
    # Of one request one drop counts toward the hourly limit; the total that is shown has them all.
    assert (worker.aborted_jobs, worker.uncompleted_jobs) == (1, 4)
    assert [is_active for _, is_active in list_holds()] == [False]
    assert requester


def test_a_cancel_and_a_pop_at_once_leave_one_story(horde: TextHorde, keys: list[str]) -> None:
    enlist(horde, keys[:1])
    key, name = names(keys)[0]
    for _ in range(ROUNDS):
        request_id = horde.queue(params={"n": 2})
        cancelled, popped = at_once(partial(horde.cancel, request_id), lambda: horde.pop(key, name))
        assert cancelled.status_code == 200
        status = horde.status(request_id)
        assert (status["waiting"], get_request(request_id).n) == (0, 0)
        assert status["processing"] == len(popped.json["ids"])
        assert status["done"] == (popped.json["id"] is None)
        if popped.json["id"] is not None:
            horde.submit(key, popped.json["id"])
            assert horde.status(request_id)["done"]


def test_cancels_and_faults_at_once_never_revive_a_request(
    horde: TextHorde, keys: list[str]
) -> None:
    key = keys[0]
    for _ in range(ROUNDS):
        request_id = horde.queue()
        job_id = horde.take_job(key)
        at_once(
            partial(horde.cancel, request_id),
            partial(horde.fault, key, job_id),
            partial(horde.cancel, request_id),
        )
        row = get_request(request_id)
        assert (row.n, row.terminal_outcome) == (0, "cancelled")
        assert horde.status(request_id)["done"]


def test_the_last_replies_at_once_end_the_request_and_its_hold(
    horde: TextHorde, keys: list[str]
) -> None:
    key = keys[0]
    horde.take(key)
    change_worker("a worker", speed=10.0)
    _, asks = make_user(kudos=100_000)
    for _ in range(ROUNDS):
        request_id = horde.queue(asks, params={"n": 4}, slow_workers=False)
        jobs = horde.take(key, amount=4)["ids"]
        answers = at_once(*[lambda job_id=job_id: horde.submit(key, job_id) for job_id in jobs])
        assert [answer.status_code for answer in answers] == [200] * 4
        assert get_request(request_id).terminal_outcome == "completed"
        assert horde.status(request_id)["finished"] == 4
    assert {is_active for _, is_active in list_holds()} == {False}


def test_first_pops_of_one_worker_at_once_make_one_worker(
    horde: TextHorde, keys: list[str]
) -> None:
    horde.queue(params={"n": 4})
    answers = at_once(*[lambda: horde.pop(keys[0], "brand new")] * 4)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert None not in [answer.json["id"] for answer in answers]
    assert (count_rows(Worker), count_rows(WorkerModel)) == (1, 1)
    assert {job.worker_id for job in list_every_job()} == {require_worker("brand new").id}


def list_every_job() -> list[TextProcessingGeneration]:
    with transaction() as session:
        return list(session.scalars(select(TextProcessingGeneration)))


def test_first_pops_of_two_owners_with_one_name_make_one_worker(
    horde: TextHorde, keys: list[str]
) -> None:
    answers = at_once(*[lambda key=key: horde.pop(key, "popular") for key in keys[:4]])
    assert sorted(answer.status_code for answer in answers) == [200, 403, 403, 403]
    assert {answer.json["rc"] for answer in answers if answer.status_code == 403} == {
        "WrongCredentials"
    }


def test_check_ins_at_once_earn_one_uptime_reward(horde: TextHorde) -> None:
    owner, key = make_user(UserRoleTypes.TRUSTED)
    horde.take(key)
    for _ in range(ROUNDS):
        change_worker("a worker", uptime=1000, last_reward_uptime=600)
        age_worker("a worker", 250)
        forget_postings()
        at_once(*[lambda: horde.pop(key, models=[KNOWN, "new/model"])] * 4)
        assert len(list_postings(owner)) == 1
        assert require_worker("a worker").uptime < 1260
    assert count_rows(WorkerModel) == 2


def test_requests_at_once_never_hold_more_than_there_is(horde: TextHorde, keys: list[str]) -> None:
    horde.take(keys[0])
    _, asks = make_user(kudos=25 + 50)  # two holds of 20
    answers = at_once(*[lambda: horde.ask(asks, slow_workers=False)] * 6)
    assert sorted(answer.status_code for answer in answers) == [202, 202, 403, 403, 403, 403]
    assert (count_rows(WaitingPrompt), len(list_holds())) == (2, 2)


@pytest.mark.slow
def test_a_busy_horde_loses_nothing_and_pays_everything_once(
    horde: TextHorde, keys: list[str]
) -> None:
    """Workers pop, reply, fault, repeat themselves; requesters ask and cancel: all at once, then
    the books are read.
    """
    enlist(horde, keys)
    _, asks = make_user(kudos=1_000_000, concurrency=500)
    requests: list[str] = []

    def work(worker: tuple[str, str]) -> None:
        key, name = worker
        dice = random.Random(name)
        for _ in range(12):
            job = horde.take(key, name, amount=dice.choice([1, 3]))
            for job_id in job["ids"]:
                act = dice.random()
                answers = [horde.fault(key, job_id) if act < 0.2 else horde.submit(key, job_id)]
                if act > 0.8:
                    answers.append(horde.submit(key, job_id))
                assert [answer.status_code for answer in answers] == [200, 400][: len(answers)]

    def request(_: int) -> None:
        for number in range(6):
            requests.append(horde.queue(asks, params={"n": 3}))
            if number % 3 == 2:
                assert horde.cancel(requests[-1]).status_code == 200

    with ThreadPoolExecutor(11) as pool:
        running = [pool.submit(request, number) for number in range(3)]
        running += [pool.submit(work, worker) for worker in names(keys)]
        for one in running:
            one.result(120)
    with transaction() as session:
        unsound = session.execute(
            text(
                "SELECT id FROM waiting_prompts AS request WHERE terminal_outcome IS DISTINCT FROM"
                " 'cancelled' AND NOT faulted AND jobs <> n + (SELECT count(*) FROM processing_gens"
                " WHERE wp_id = request.id AND NOT faulted)"
            )
        ).all()
        paid = session.scalar(
            text(
                "SELECT count(DISTINCT event_id) FROM kudos_ledger WHERE amount > 0"
                " AND entry_type = 'GENERATION'"
            )
        )
        stored = session.scalar(
            text("SELECT count(*) FROM processing_gens WHERE generation IS NOT NULL")
        )
        earlier = session.scalar(
            text(
                "SELECT count(DISTINCT event_id) FROM kudos_ledger WHERE amount > 0"
                " AND entry_type = 'GENERATION'"
                " AND event_id NOT IN (SELECT id FROM processing_gens)"
            )
        )
    assert unsound == []
    assert paid - earlier == stored


# The queue query and the rule say the same


MODELS = ("one", "two", "three")
FEATURES = ("tools", "seed", "vision")
lengths = st.sampled_from([16, 64, 65, 100, 128, 129, 512])
subsets = st.sets(st.sampled_from(MODELS), max_size=2)
some = st.sets(st.sampled_from(MODELS), min_size=1, max_size=2)


@st.composite
def workers(draw: st.DrawFn) -> dict[str, object]:
    is_chat = draw(st.booleans())
    return {
        "models": tuple(sorted(draw(some))),
        "maintenance": draw(st.booleans()) and draw(st.booleans()),
        "speed": draw(st.sampled_from([0.5, 0.99, 1.0, 2.0, 4.9, 5.0, 50.0])),
        "max_length": draw(lengths),
        "max_context_length": draw(lengths),
        "bridge_agent": draw(st.sampled_from([KCPP_AGENT, "odd:1:x"])),
        "nsfw": draw(st.booleans()),
        "accepts_chat_jobs": is_chat,
        "accepts_prompt_jobs": draw(st.booleans()) or not is_chat,
        "chat_model_id": draw(st.sampled_from(MODELS)) if is_chat else None,
        "chat_max_length": draw(lengths) if is_chat else None,
        "chat_max_context_length": draw(lengths) if is_chat else None,
        "chat_features": sorted(draw(st.sets(st.sampled_from(FEATURES)))) if is_chat else None,
        "chat_tools_max_temperature": draw(st.sampled_from([None, 0.5])) if is_chat else None,
    }


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    is_chat = draw(st.booleans())
    return {
        "is_chat": is_chat,
        "models": tuple(sorted(draw(some if is_chat else subsets))),
        "max_length": draw(lengths),
        "max_context_length": draw(lengths),
        "trusted_workers": draw(st.booleans()) and draw(st.booleans()),
        "validated_backends": draw(st.booleans()) and draw(st.booleans()),
        "slow_workers": draw(st.booleans()) or draw(st.booleans()),
        "nsfw": draw(st.booleans()) and draw(st.booleans()),
        "lists": draw(st.sampled_from(["nobody", "nobody", "the worker", "another"])),
        "worker_blacklist": draw(st.booleans()),
        "required_features": (
            frozenset(draw(st.sets(st.sampled_from(FEATURES), max_size=1)))
            if is_chat
            else frozenset()
        ),
        "tools_temperature": draw(st.sampled_from([None, 0.5, 0.6])) if is_chat else None,
        "of_owner": draw(st.booleans()),
    }


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    drawn=workers(), asked=st.lists(requests(), min_size=1, max_size=4), owner_trusted=st.booleans()
)
def test_the_queue_query_and_the_rule_agree(
    app: Flask, drawn: dict[str, object], asked: list[dict[str, object]], owner_trusted: bool
) -> None:
    now = utcnow()
    owner, other = OWNERS(app)
    with transaction() as session:
        session.execute(text("DELETE FROM waiting_prompts"))
        session.execute(text("DELETE FROM workers"))
    columns = dict(drawn)
    models = columns.pop("models")
    assert isinstance(models, tuple)
    worker_id = make_worker(owner, models, **columns)
    another_id = make_worker(other, ("elsewhere",))
    with transaction() as session:
        worker = session.get_one(TextWorker, worker_id)
    inputs = EligibilityInputs(
        models=frozenset(models),
        owner_trusted=owner_trusted,
        validated_backends=("KoboldCppEmbedWorker",),
        minimum_speed=5.0,
        now=now,
    )
    expected: set[UUID] = set()
    for request in asked:
        wanted = dict(request)
        listed = {"nobody": (), "the worker": (worker_id,), "another": (another_id,)}[
            str(wanted.pop("lists"))
        ]
        user_id = owner if wanted.pop("of_owner") else other
        facts = RequestNeeds(user_id=user_id, worker_ids=frozenset(listed), **wanted)
        wp_id = store(facts)
        if worker.can_generate_with_eligibility_inputs(facts, inputs) is None:
            expected.add(wp_id)
    taken: set[UUID] = set()
    with transaction() as session:
        queue = get_sorted_text_wp_filtered_to_worker(session, worker, inputs, inputs, ())
        claim = partial(claim_next_request, session, queue, worker, models, wanted=1, now=now)
        while (claimed := claim()) is not None:
            taken.add(claimed.request.id)
    assert taken == expected


def store(facts: RequestNeeds) -> UUID:
    """A waiting request of these facts."""
    wp_id = make_request(
        facts.user_id,
        facts.models,
        max_length=facts.max_length,
        max_context_length=facts.max_context_length,
        is_chat=facts.is_chat,
        trusted_workers=facts.trusted_workers,
        validated_backends=facts.validated_backends,
        slow_workers=facts.slow_workers,
        nsfw=facts.nsfw,
        worker_blacklist=facts.worker_blacklist,
        chat_required_features=sorted(facts.required_features) if facts.is_chat else None,
        chat_tools_temperature=facts.tools_temperature,
        queue_class=compute_queue_class(facts),
        messages=[{"role": "user", "content": "Hello"}] if facts.is_chat else None,
    )
    with transaction() as session:
        session.add_all(
            WPAllowedWorkers(wp_id=wp_id, worker_id=worker_id) for worker_id in facts.worker_ids
        )
    return wp_id


class _Owners:
    """Two accounts for the property, made once."""

    def __init__(self) -> None:
        self.known: tuple[int, int] | None = None

    def __call__(self, app: Flask) -> tuple[int, int]:
        if self.known is None:
            self.known = (make_user()[0], make_user()[0])
        return self.known


OWNERS = _Owners()
