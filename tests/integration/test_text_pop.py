# SPDX-License-Identifier: AGPL-3.0-or-later
"""What `POST /generate/text/pop` asks of a worker, writes of it, and hands it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flask import Flask
from sqlalchemy import event, select, text, update

from devtools.services import ServiceAddresses
from horde import db, redis_ctrl
from horde.classes.base.stats import HordeSettings
from horde.classes.base.user import User, UserRoleTypes
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.classes.base.worker import DEFAULT_MAINTENANCE_MESSAGE, Worker, WorkerModel
from horde.classes.kobold.pricing import compute_uptime_reward
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.classes.kobold.worker import TextWorker
from horde.database import addresses, queue_classes, text_queue
from horde.db import transaction
from horde.model_reference import get_text_model_multiplier
from horde.shown_text import is_profane
from tests.integration.rows import make_user, make_worker
from tests.integration.text_horde import (
    KCPP_AGENT,
    KNOWN,
    SMALL,
    TextHorde,
    age_worker,
    change_request,
    change_worker,
    count_rows,
    find_worker,
    forget_copies,
    forget_postings,
    get_request,
    list_postings,
    minutes_ago,
    own_text_horde,
    refused,
    require_worker,
    start_clean,
)

NOTHING: dict[str, Any] = {
    "payload": {
        "max_context_length": 2048,
        "max_length": 80,
        "min_p": 0.0,
        "smoothing_factor": 0.0,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
    },
    "id": None,
    "ids": [],
    "messages": [],
    "ttl": None,
    "extra_source_images": None,
    "skipped": {},
    "softprompt": None,
    "model": None,
}
PROFANE = next(word for word in ("fuck", "nigger", "cunt") if is_profane(word))


@pytest.fixture(scope="module")
def app(service_urls: ServiceAddresses) -> Iterator[Flask]:
    with own_text_horde(service_urls, "text_pops") as app:
        yield app


@pytest.fixture
def horde(app: Flask) -> TextHorde:
    start_clean()
    return TextHorde(app)


@pytest.fixture(scope="module")
def owner(app: Flask) -> int:
    return make_user(UserRoleTypes.TRUSTED)[0]


@pytest.fixture
def key(owner: int) -> str:
    return f"key of user {owner_number(owner)}"


def owner_number(user_id: int) -> str:
    with transaction() as session:
        return session.get_one(User, user_id).username.removeprefix("user ")


def set_modes(**modes: bool) -> None:
    with transaction() as session:
        session.add(HordeSettings(id=1, **modes))
    forget_copies()


def get_text_worker(name: str = "a worker") -> TextWorker:
    with transaction() as session:
        return session.scalars(select(TextWorker).where(TextWorker.name == name)).one()


# What is answered


def test_an_idle_pop_answers_every_key(horde: TextHorde, key: str) -> None:
    assert horde.take(key) == NOTHING


def test_a_job_answers_every_key(horde: TextHorde, key: str) -> None:
    params = {
        "max_length": 64,
        "temperature": 0.5,
        "top_p": None,
        "stop_sequence": ["\n"],
        "n": 1,
        "unknown": 1,
    }
    request_id = horde.queue(models=[SMALL, KNOWN], params=params, prompt="Hello ü")
    job = horde.take(key)
    assert job == NOTHING | {
        "payload": (
            NOTHING["payload"]
            | {
                "max_length": 64,
                "temperature": 0.5,
                "stop_sequence": ["\n"],
                "prompt": "Hello ü",
                "n": 1,
            }
        ),
        "id": job["id"],
        "ids": [job["id"]],
        "ttl": 150,
        "model": KNOWN,
    }
    with transaction() as session:
        row = session.scalars(select(TextProcessingGeneration)).one()
    assert (str(row.id), str(row.wp_id), row.model, row.job_ttl) == (
        job["id"],
        request_id,
        KNOWN,
        150,
    )
    assert (row.generation, row.faulted, row.fake, row.cancelled, row.seed) == (
        None,
        False,
        False,
        False,
        0,
    )


def test_the_model_of_a_request_without_models_is_one_of_the_pop(
    horde: TextHorde, key: str
) -> None:
    horde.queue()
    assert horde.take(key, models=["only/this"])["model"] == "only/this"


def test_amount_takes_several_generations_of_one_request(horde: TextHorde, key: str) -> None:
    request_id = horde.queue(params={"n": 3})
    horde.queue()
    job = horde.take(key, amount=2)
    assert len(set(job["ids"])) == 2
    assert job["id"] == job["ids"][0]
    assert job["payload"]["n"] == 1
    assert get_request(request_id).n == 1
    assert len(horde.take(key, amount=20)["ids"]) == 1
    assert get_request(request_id).n == 0


def test_a_pop_extends_the_requests_life(horde: TextHorde, key: str) -> None:
    request_id = horde.queue()
    change_request(request_id, expiry=minutes_ago(-1))
    horde.take_job(key)
    assert get_request(request_id).expiry > minutes_ago(-19)


# Shapes


@pytest.mark.parametrize(("name", "value"), [
    ("name", None), ("name", ""), ("name", 5), ("models", "x"), ("models", [1]), ("threads", 0),
    ("threads", 51),
    ("threads", "2"), ("amount", 0), ("amount", 21), ("nsfw", "yes"), ("priority_usernames", "x"),
    ("max_length", 0),
    ("max_length", 2**31),
    ("max_context_length", 1.5), ("bridge_agent", 1),
])  # fmt: skip
def test_a_key_of_the_wrong_shape_is_named(
    horde: TextHorde, key: str, name: str, value: Any
) -> None:
    answer = horde.pop(key, **{name: value})
    assert refused(answer) == (400, "BadRequest")
    assert [path.split(".")[0] for path in answer.json["errors"]] == [name]
    assert count_rows(Worker) == 0


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": "a\\u0000", "models": ["b"]}',
        b'{"name": "a\\ud800", "models": ["b"]}',
        b"{",
        b"[]",
    ],
)
def test_a_hostile_body_is_refused(horde: TextHorde, key: str, body: bytes) -> None:
    assert refused(horde.post("pop", body, key))[0] == 400
    assert count_rows(Worker) == 0


def test_unknown_keys_nulls_and_whole_numbers_with_a_point_are_taken(
    horde: TextHorde, key: str
) -> None:
    body: dict[str, Any] = {
        "threads": None,
        "max_length": 512.0,
        "amount": 1.0,
        "softprompts": None,
        "priority_usernames": None,
        "nsfw": None,
        "blacklist": ["x"],
        "require_upfront_kudos": False,
        "allow_unsafe_ipaddr": True,
        "quiet": 1,
    }
    horde.take(key, **body)
    assert get_text_worker().max_length == 512


def test_a_missing_key_is_named(horde: TextHorde) -> None:
    answer = horde.post("pop", {"name": "a", "models": [KNOWN]}, None)
    assert refused(answer) == (400, "BadRequest")
    assert "apikey" in answer.json["errors"]


@pytest.mark.parametrize("models", [[], None, [""], ["x" * 256]])
def test_a_pop_without_a_usable_model_is_refused_even_inside_the_window(
    horde: TextHorde, key: str, models: Any
) -> None:
    assert refused(horde.pop(key, models=models)) == (400, "BadRequest")
    assert count_rows(Worker) == 0
    horde.take(key)
    age_worker("a worker", 40)
    horde.take(key)
    assert refused(horde.pop(key, models=models)) == (400, "BadRequest")


def test_only_the_first_200_models_count(horde: TextHorde, key: str) -> None:
    horde.take(key, models=[f"model/{number}" for number in range(300)] + [KNOWN])
    assert count_rows(WorkerModel) == 200


def test_a_branded_model_belongs_to_its_user(horde: TextHorde, owner: int, key: str) -> None:
    alias = f"user {owner_number(owner)}#{owner}"
    assert horde.pop(key, models=[f"{KNOWN}::{alias}"]).status_code == 200
    assert refused(horde.pop(key, models=[f"{KNOWN}::somebody#1"])) == (400, "BadRequest")


# The order of the refusals


def test_refusals_come_in_the_published_order(horde: TextHorde) -> None:
    set_modes(invite_only=True)
    addresses.set_address_timeout("127.0.0.1", 5)
    stranger, strangers_key = make_user()
    make_worker(stranger, name="taken")
    with transaction() as session:
        session.execute(
            text(
                "INSERT INTO workers (id, worker_type, user_id, name) VALUES (gen_random_uuid(),"
                " 'stable_worker', :owner, :name)"
            ),
            {"owner": stranger, "name": "an image worker"},
        )
    body: dict[str, Any] = {"priority_usernames": ["nobody"], "models": []}

    def pop(key: str, name: str, **changes: Any) -> tuple[int, str | None]:
        return refused(horde.pop(key, name, **body | changes))

    _, plain = make_user()
    _, both = make_user(UserRoleTypes.DELETED, UserRoleTypes.FLAGGED)
    _, flagged = make_user(UserRoleTypes.FLAGGED)
    assert pop("no such key", "an image worker") == (400, "InvalidPriorityUsername")
    body["priority_usernames"] = ["no body#x", "somebody#1"]
    assert pop("no such key", "an image worker") == (401, "InvalidAPIKey")
    assert pop(both, "an image worker") == (403, "DeletedUser")
    assert pop(flagged, "an image worker") == (403, "WorkerFlaggedMaintenance")
    assert pop("0000000000", "an image worker") == (403, "AnonForbiddenWorker")
    assert pop(plain, "an image worker") == (400, "PolymorphicNameConflict")
    assert pop(plain, "taken") == (403, "TimeoutIP")
    forget_timeouts()
    assert pop(plain, f"{PROFANE} colab", bridge_agent=PROFANE) == (400, "ProfaneWorkerName")
    assert pop(plain, "my Colab", bridge_agent=PROFANE) == (400, "ProfaneBridgeAgent")
    assert pop(plain, "my Colab") == (400, "BadRequest")
    assert pop(plain, "mine") == (403, "WorkerInviteOnly")
    assert pop(plain, "taken") == (403, "WrongCredentials")
    assert pop(strangers_key, "taken") == (400, "BadRequest")  # no models
    assert count_rows(Worker) == 2


def forget_timeouts() -> None:
    redis_ctrl.call(redis_ctrl.address_timeout_db, lambda client: client.flushdb())


# New workers


@pytest.mark.parametrize(("name", "stored"), [
    ("  trimmed  ", "trimmed"),
    ("<b>bold</b> name", "bold name"),
    ("n" * 150, "n" * 100),
    ("with / and :: é", "with / and :: é"),
])  # fmt: skip
def test_names_are_cleaned(horde: TextHorde, key: str, name: str, stored: str) -> None:
    horde.take(key, name)
    assert find_worker(stored) is not None
    horde.take(key, name)
    assert count_rows(Worker) == 1


def test_a_name_of_markup_alone_is_refused(horde: TextHorde, key: str) -> None:
    assert refused(horde.pop(key, "<i></i>")) == (400, "BadRequest")


@pytest.mark.parametrize("word", ["CoLab", "TPU", "google"])
def test_reserved_words_are_refused_in_names(horde: TextHorde, key: str, word: str) -> None:
    assert refused(horde.pop(key, f"my {word} box")) == (400, "BadRequest")


def test_a_long_agent_is_cut_and_not_refused(horde: TextHorde, key: str) -> None:
    horde.take(
        key, bridge_agent="AI Horde Worker~unknown" + "~kai" * 500 + ":24:https://example.org"
    )
    assert len(get_text_worker().bridge_agent) == 1000


def test_a_new_worker_starts_from_nothing(horde: TextHorde, owner: int, key: str) -> None:
    horde.take(key, threads=3, nsfw=False, max_length=100, max_context_length=1000)
    worker = get_text_worker()
    assert (
        worker.user_id,
        worker.threads,
        worker.nsfw,
        worker.max_length,
        worker.max_context_length,
    ) == (
        owner,
        3,
        False,
        100,
        1000,
    )
    assert (
        worker.speed,
        worker.uptime,
        worker.last_reward_uptime,
        worker.aborted_jobs,
        worker.kudos,
    ) == (1.0, 0, 0, 0, 0)
    assert (worker.bridge_agent, worker.ipaddr, worker.worker_type) == (
        KCPP_AGENT,
        "127.0.0.1",
        "text_worker",
    )
    assert (worker.paused, worker.maintenance, worker.maintenance_msg) == (
        False,
        False,
        DEFAULT_MAINTENANCE_MESSAGE,
    )
    assert (worker.accepts_chat_jobs, worker.accepts_prompt_jobs) == (False, True)


def test_an_untrusted_owner_has_four_workers_and_no_fifth(horde: TextHorde) -> None:
    user_id, key = make_user()
    for _ in range(3):
        make_worker(user_id)
    horde.take(key, "fourth")
    assert refused(horde.pop(key, "fifth")) == (403, "TooManyWorkers")
    assert horde.pop(key, "fourth").status_code == 200


@pytest.mark.race
def test_of_many_names_that_pop_at_once_as_many_get_in_as_of_few(horde: TextHorde) -> None:
    user_id, key = make_user()
    gate = threading.Barrier(10)

    def bring(number: int) -> tuple[int, str | None]:
        gate.wait(60)
        answer = horde.pop(key, f"one of ten {number}")
        return answer.status_code, answer.json.get("rc")

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(bring, range(10)))
    assert sorted(answers) == sorted([(200, None)] * 4 + [(403, "TooManyWorkers")] * 6)
    with transaction() as session:
        owned = select(Worker.id).where(Worker.user_id == user_id)
        assert len(session.scalars(owned).all()) == 4


@pytest.mark.race
def test_the_threads_of_a_new_worker_get_in_together(horde: TextHorde) -> None:
    user_id, key = make_user()
    for _ in range(3):
        make_worker(user_id)
    gate = threading.Barrier(6)

    def bring(_: int) -> int:
        gate.wait(60)
        return int(horde.pop(key, "the fourth").status_code)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(bring, range(6))) == [200] * 6


def test_a_trusted_owner_has_21_workers_unless_invited(horde: TextHorde) -> None:
    user_id, key = make_user(UserRoleTypes.TRUSTED)
    for _ in range(21):
        make_worker(user_id)
    assert refused(horde.pop(key, "another")) == (403, "TooManyWorkersTrusted")
    with transaction() as session:
        session.execute(update(User).where(User.id == user_id).values(worker_invited=30))
    forget_copies()
    assert horde.pop(key, "another").status_code == 200


def test_an_address_has_four_workers_of_untrusted_owners(horde: TextHorde) -> None:
    for _ in range(4):
        make_worker(make_user()[0], ipaddr="192.0.2.7")
    _, key = make_user()
    assert refused(horde.pop(key, headers={"address": "192.0.2.7"})) == (403, "TooManySameIPs")
    assert horde.pop(key, headers={"address": "192.0.2.8"}).status_code == 200


def test_an_invited_owner_may_add_workers_while_others_may_not(horde: TextHorde) -> None:
    set_modes(invite_only=True)
    _, key = make_user(worker_invited=1)
    assert horde.pop(key, "first").status_code == 200
    assert refused(horde.pop(key, "second")) == (403, "WorkerInviteOnly")
    assert horde.pop(key, "first").status_code == 200


# Check-in


def test_a_worker_in_its_first_30_seconds_is_rewritten_on_every_pop(
    horde: TextHorde, key: str
) -> None:
    horde.take(key)
    horde.take(key, models=[SMALL], max_length=99, threads=2, bridge_agent="other:1:x")
    worker = get_text_worker()
    assert (worker.max_length, worker.threads, worker.bridge_agent) == (99, 2, "other:1:x")
    with transaction() as session:
        assert list(session.scalars(select(WorkerModel.model))) == [SMALL]


def test_inside_the_window_nothing_is_written_and_the_models_of_the_pop_count(
    horde: TextHorde, key: str
) -> None:
    horde.take(key)
    age_worker("a worker", 100)
    horde.take(key)
    before = get_text_worker()
    horde.queue(models=[SMALL])
    horde.queue(
        make_user(kudos=10_000)[1],
        models=[KNOWN],
        params={"max_length": 600},
        validated_backends=True,
    )
    job = horde.take(key, models=[SMALL, KNOWN], max_length=2000, threads=4)
    assert (job["model"], horde.take(key, models=[SMALL, KNOWN], max_length=2000)["id"]) == (
        SMALL,
        None,
    )
    after = get_text_worker()
    assert (after.last_check_in, after.max_length, after.threads) == (before.last_check_in, 512, 1)
    with transaction() as session:
        assert list(session.scalars(select(WorkerModel.model))) == [KNOWN]


def test_an_unchanged_idle_pop_writes_nothing(horde: TextHorde, key: str) -> None:
    horde.take(key)
    age_worker("a worker", 100)
    horde.take(key)
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(db.require_engine(), "before_cursor_execute", note)
    try:
        horde.take(key)
    finally:
        event.remove(db.require_engine(), "before_cursor_execute", note)
    assert [
        statement
        for statement in statements
        if "FOR UPDATE" in statement or not statement.lstrip().startswith(("SELECT", "WITH"))
    ] == []
    assert len(statements) <= 2


def test_uptime_is_counted_between_check_ins(horde: TextHorde, key: str) -> None:
    horde.take(key)
    age_worker("a worker", 200)
    horde.take(key)
    assert get_text_worker().uptime == pytest.approx(200, abs=3)


@pytest.mark.parametrize("changes", [{"maintenance": True}, {"paused": True}, {}])
def test_an_interrupted_interval_starts_again(
    horde: TextHorde, key: str, changes: dict[str, bool]
) -> None:
    horde.take(key)
    age_worker("a worker", 310 if not changes else 200)
    change_worker("a worker", uptime=590, last_reward_uptime=0, **changes)
    horde.pop(key)
    worker = get_text_worker()
    assert (worker.uptime, worker.last_reward_uptime) == (590, 590)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_ten_minutes_of_uptime_are_rewarded_once(horde: TextHorde, is_trusted: bool) -> None:
    user_id, key = make_user(*((UserRoleTypes.TRUSTED,) if is_trusted else ()))
    horde.take(key)
    change_worker("a worker", uptime=1000, last_reward_uptime=600)
    age_worker("a worker", 201)
    forget_postings()
    horde.take(key)
    reward = compute_uptime_reward(
        max_context_length=4096,
        multiplier=get_text_model_multiplier(KNOWN),
        is_known=True,
        validated=True,
    )
    account = "balance" if is_trusted else "escrow"
    assert list_postings(user_id, account) == [reward]
    assert list_postings(user_id, "escrow" if is_trusted else "balance") == []
    assert get_text_worker().last_reward_uptime == get_text_worker().uptime
    age_worker("a worker", 40)
    horde.take(key)
    assert list_postings(user_id, account) == [reward]


# Who gets what


@pytest.mark.parametrize(("asked", "worker", "skipped"), [
    ({"models": [SMALL]}, {}, {"models": 1}),
    ({"params": {"max_length": 512}}, {"max_length": 100}, {"max_length": 1}),
    ({"params": {"max_context_length": 5000}}, {}, {"max_context_length": 1}),
    ({"trusted_workers": True}, {}, {"untrusted": 1}),
    ({"validated_backends": True}, {"bridge_agent": "unknown:1:x"}, {"bridge_version": 1}),
    ({"validated_backends": True}, {"bridge_agent": "KoboldCppEmbedWorker:2"},
        {"bridge_version": 1}),
    ({"validated_backends": True}, {"bridge_agent": "KoboldCppEmbedWorker:x:y"},
        {"bridge_version": 1}),
])  # fmt: skip
def test_a_request_the_worker_cannot_serve_is_skipped_and_said(
    horde: TextHorde, asked: dict[str, Any], worker: dict[str, Any], skipped: dict[str, int]
) -> None:
    request_id = horde.queue(**asked)
    _, key = make_user()
    answer = horde.take(key, **worker)
    assert (answer["id"], answer["skipped"]) == (None, skipped)
    assert get_request(request_id).n == 1


def test_skipped_counts_requests_and_not_kinds_of_them(
    horde: TextHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        horde.queue(models=[SMALL])
    for _ in range(2):
        horde.queue(trusted_workers=True)
    horde.queue(models=["another/model"])
    text_queue.forget_queue_snapshot()
    monkeypatch.setattr(text_queue, "get_json", lambda _key: None)  # others share theirs
    _, key = make_user()
    assert horde.take(key)["skipped"] == {"models": 4, "untrusted": 2}


def test_ten_thousand_classes_of_other_models_are_judged_as_one(
    horde: TextHorde, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many classes are believed for a while, also by the next test.
    monkeypatch.setattr(queue_classes, "MAX_BELIEVED_SECONDS", 0.0)
    horde.take(key)
    request_id = horde.queue(models=[SMALL])
    copies = text("""
        INSERT INTO waiting_prompts
        SELECT (jsonb_populate_record(original, jsonb_build_object(
            'id', gen_random_uuid(), 'queue_class', original.queue_class + number,
            'user_id', :stranger))).*
        FROM waiting_prompts AS original, generate_series(1, 999) AS number
        WHERE original.id = :id
        """)
    with transaction() as session:
        session.execute(copies, {"id": request_id, "stranger": make_user()[0]})
        session.execute(
            text(
                "INSERT INTO wp_models (wp_id, model) SELECT id, :model FROM waiting_prompts"
                " WHERE id NOT IN (SELECT wp_id FROM wp_models)"
            ),
            {"model": SMALL},
        )
    judged = []
    judge = TextWorker.can_generate_with_eligibility_inputs

    def count(worker: TextWorker, *arguments: Any) -> Any:
        judged.append(worker)
        return judge(worker, *arguments)

    monkeypatch.setattr(TextWorker, "can_generate_with_eligibility_inputs", count)
    text_queue.forget_queue_snapshot()
    monkeypatch.setattr(text_queue, "get_json", lambda _key: None)  # others share theirs
    assert horde.take(key)["skipped"] == {"models": 1000}
    assert len(judged) == 1
    horde.queue()
    assert horde.take(key)["id"] is not None


@pytest.mark.parametrize("agent", [
    KCPP_AGENT,
    "AI Horde Worker:24:https://github.com/Haidra-Org",
    "AI Horde Worker~aphrodite~oai:24:u",
    "AI Horde Worker~aphrodite~kai:24:u",
    "TabbyAPI:1:u",
])  # fmt: skip
def test_known_backends_are_validated(horde: TextHorde, key: str, agent: str) -> None:
    horde.queue(validated_backends=True)
    assert horde.take(key, bridge_agent=agent)["id"] is not None


@pytest.mark.parametrize(
    ("lengths", "is_served"),
    [((300, 3000), True), ((301, 3000), False), ((300, 3001), False), ((16, 80), True)],
)
def test_lengths_are_compared_exactly(
    horde: TextHorde, key: str, lengths: tuple[int, int], is_served: bool
) -> None:
    horde.queue(params={"max_length": lengths[0], "max_context_length": lengths[1]})
    assert (horde.take(key, max_length=300, max_context_length=3000)["id"] is not None) == is_served


def test_trusted_workers_serve_who_asks_for_them(horde: TextHorde, key: str) -> None:
    horde.queue(trusted_workers=True)
    horde.take_job(key)


def test_worker_lists_allow_and_deny(horde: TextHorde, key: str) -> None:
    horde.take(key, "one")
    horde.take(key, "two")
    one, two = str(require_worker("one").id), str(require_worker("two").id)
    horde.queue(workers=[one], prompt="for one")
    horde.queue(workers=[one, two], worker_blacklist=True, prompt="for neither")
    horde.queue(workers=[one], worker_blacklist=True, prompt="for two")
    assert horde.take(key, "one")["payload"]["prompt"] == "for one"
    assert horde.take(key, "one")["skipped"] == {"worker_id": 2}
    assert horde.take(key, "two")["payload"]["prompt"] == "for two"
    assert horde.take(key, "two")["id"] is None


@pytest.mark.parametrize(("models", "speed", "is_served"), [
    ([KNOWN], 3.0, True), ([KNOWN], 2.9, False), ([SMALL, KNOWN], 4.9, False), ([SMALL], 5.0, True),
    (["meta-llama/Llama-2-13b-chat-hf"], 4.0, True),
    (["meta-llama/Llama-2-13b-chat-hf"], 3.9, False), (["unknown"], 4.9, False),
    ([KNOWN], 1.0, False),
])  # fmt: skip
def test_slow_workers_are_those_below_the_speed_of_their_first_model(
    horde: TextHorde, key: str, models: list[str], speed: float, is_served: bool
) -> None:
    horde.take(key, models=models)
    change_worker("a worker", speed=speed)
    rich = make_user(kudos=10_000)[1]
    fast = make_worker(
        make_user()[0], tuple(models), speed=50.0, max_length=512, max_context_length=4096
    )
    horde.queue(rich, slow_workers=False)
    assert fast
    assert (horde.take(key, models=models)["id"] is not None) == is_served


@pytest.mark.parametrize("columns", [
    {"active": False}, {"faulted": True}, {"n": 0}, {"expiry": minutes_ago(1)},
])  # fmt: skip
def test_requests_that_are_not_waiting_are_never_handed_out(
    horde: TextHorde, key: str, columns: dict[str, Any]
) -> None:
    change_request(horde.queue(), **columns)
    assert horde.take(key)["id"] is None


def test_a_worker_that_declines_text_jobs_gets_none(horde: TextHorde, key: str) -> None:
    horde.queue()
    limits = {"max_length": 512, "max_context_length": 4096}
    declared: dict[str, Any] = {
        "chat_jobs": True,
        "prompt_jobs": False,
        "model_id": KNOWN,
        "chat_limits": limits,
    }
    assert horde.take(key, **declared)["id"] is None


# Maintenance


def test_a_worker_in_maintenance_serves_its_owner_alone(horde: TextHorde) -> None:
    _, key = make_user()
    horde.take(key)
    change_worker("a worker", maintenance=True, maintenance_msg="Back at noon")
    horde.queue()
    answer = horde.pop(key)
    assert refused(answer) == (403, "WorkerMaintenance")
    assert "Back at noon" in answer.json["message"]
    own = horde.queue(key, prompt="my own")
    assert horde.take(key)["payload"]["prompt"] == "my own"
    assert get_request(own).n == 0


# Fake jobs


def test_a_paused_worker_gets_jobs_that_count_for_nothing(horde: TextHorde) -> None:
    owner, key = make_user(UserRoleTypes.TRUSTED)
    horde.take(key)
    change_worker("a worker", paused=True)
    request_id = horde.queue(params={"n": 3}, prompt="a stranger's")
    forget_postings()
    job = horde.take(key, amount=2)
    assert (len(job["ids"]), job["payload"]["prompt"], job["ttl"], job["model"]) == (
        2,
        "a stranger's",
        150,
        KNOWN,
    )
    assert get_request(request_id).n == 3
    status = horde.status(request_id)
    assert (status["processing"], status["waiting"], status["is_possible"]) == (0, 3, False)
    assert horde.submit(key, job["ids"][0], "text").json["reward"] > 0
    assert refused(horde.submit(key, job["ids"][0], "text")) == (400, "DuplicateGen")
    assert horde.fault(key, job["ids"][1]).json == {"reward": 0.0}
    assert list_postings(owner) == []
    assert horde.status(request_id)["generations"] == []
    assert get_request(request_id).n == 3


def test_a_paused_worker_sees_each_request_once(horde: TextHorde, key: str) -> None:
    horde.take(key)
    change_worker("a worker", paused=True)
    for prompt in ("first", "second"):
        horde.queue(prompt=prompt)
    assert [horde.take(key)["payload"].get("prompt") for _ in range(3)] == ["first", "second", None]


def test_a_paused_worker_serves_its_owner_for_real(horde: TextHorde) -> None:
    _, key = make_user()
    horde.take(key)
    change_worker("a worker", paused=True)
    horde.queue(make_user(kudos=10_000)[1], prompt="a stranger's")
    request_id = horde.queue(key, prompt="my own")
    assert horde.take(key)["payload"]["prompt"] == "my own"
    assert horde.status(request_id)["processing"] == 1


def test_a_paused_worker_in_maintenance_is_told_of_its_maintenance(
    horde: TextHorde, key: str
) -> None:
    horde.take(key)
    change_worker("a worker", paused=True, maintenance=True)
    horde.queue()
    assert refused(horde.pop(key)) == (403, "WorkerMaintenance")


# Order


def test_the_older_of_two_equals_goes_first(horde: TextHorde, key: str) -> None:
    for prompt in ("first", "second"):
        horde.queue(prompt=prompt)
    assert [horde.take(key)["payload"]["prompt"] for _ in range(2)] == ["first", "second"]


def test_more_kudos_go_first_and_waiting_makes_up_for_it(horde: TextHorde, key: str) -> None:
    _, rich = make_user(kudos=1000)
    old = horde.queue(prompt="old")
    horde.queue(rich, prompt="rich")
    young = horde.queue(prompt="young")
    change_request(old, created=minutes_ago(4), extra_priority=0)  # 5 a second: worth 1200
    change_request(young, extra_priority=0)
    assert [horde.take(key)["payload"]["prompt"] for _ in range(3)] == ["old", "rich", "young"]


def test_the_owner_and_priority_users_go_before_everybody(horde: TextHorde) -> None:
    owner, key = make_user()
    friend, friends_key = make_user()
    _, rich = make_user(kudos=10_000)
    horde.queue(rich, prompt="rich")
    horde.queue(friends_key, prompt="friend")
    horde.queue(key, prompt="owner")
    prompts = [
        horde.take(key, priority_usernames=[f"whatever # it is#{friend}"])["payload"]["prompt"]
        for _ in range(3)
    ]
    assert prompts == ["friend", "owner", "rich"]
    assert owner != friend


@pytest.mark.parametrize("username", ["a#", "a#x", "a#-1", "a#99999999999", "a#0"])
def test_a_priority_username_of_nobody_is_harmless(
    horde: TextHorde, key: str, username: str
) -> None:
    horde.queue(make_user()[1])
    assert horde.take(key, priority_usernames=[username])["id"] is not None


def test_unservable_requests_ahead_do_not_hide_a_servable_one(horde: TextHorde, key: str) -> None:
    _, rich = make_user(kudos=100_000, concurrency=500)
    for length in range(300, 330):
        horde.queue(rich, params={"max_length": length})
    horde.queue(prompt="servable", params={"max_length": 260})
    assert horde.take(key, max_length=260)["payload"]["prompt"] == "servable"


def test_deleted_users_and_unknown_keys_leave_no_worker(horde: TextHorde) -> None:
    assert refused(horde.pop("unknown"))[0] == 401
    assert count_rows(Worker) == 0
    assert count_rows(WaitingPrompt) == 0
