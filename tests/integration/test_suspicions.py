# SPDX-License-Identifier: AGPL-3.0-or-later
"""Points of suspicion, the pause that follows, notices to moderators, raids, refused prompts."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import func, select, update

from devtools.services import ServiceAddresses
from horde import notices, redis_ctrl
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.stats import Filter
from horde.classes.base.suspicion import Suspicion, UserSuspicion, WorkerSuspicion
from horde.classes.base.user import ANONYMOUS_ID, UserRoleTypes
from horde.clock import utcnow
from horde.database import addresses, caches, passkeys
from horde.database.suspects import suspect_worker
from horde.database.suspicions import add_user_suspicion
from horde.db import run_transaction, transaction
from horde.notices import NoticeKind, start_notices
from tests.integration.api_horde import Api, make_moderator, own_api
from tests.integration.rows import get_worker, make_user, make_worker
from tests.integration.text_horde import (
    ADULT,
    KNOWN,
    TextHorde,
    refused,
    require_worker,
    start_clean,
)

PASSKEY = "a passkey of ours"


class Receiver(BaseHTTPRequestHandler):
    """Keeps what is posted to it."""

    received: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, json.loads(body)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def api(service_urls: ServiceAddresses) -> Iterator[Api]:
    with own_api(service_urls, "suspicions") as found:
        yield found


@pytest.fixture(autouse=True)
def _clean(api: Api) -> None:
    start_clean()
    redis_ctrl.call(redis_ctrl.address_suspicion_db, lambda client: client.flushdb())


@pytest.fixture
def horde(api: Api) -> TextHorde:
    return TextHorde(api.app)


@pytest.fixture
def told() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What moderators were told: (path, body) of each notice, complete once the block ends."""
    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Receiver.received = []
    root = f"http://127.0.0.1:{server.server_port}"
    sender = start_notices(
        {NoticeKind.PAUSED_WORKER: f"{root}/paused", NoticeKind.PROBLEM_USER: f"{root}/problem"}
    )
    yield Receiver.received
    notices._sender.set(None)
    sender.stop()
    server.shutdown()
    server.server_close()
    thread.join()


def wait_for_notices() -> None:
    """Let what is queued be sent."""
    sender = notices._sender.get()
    assert sender is not None
    sender.stop()


def list_worker_points(worker_id: UUID) -> list[int]:
    with transaction() as session:
        statement = select(WorkerSuspicion.suspicion_id).where(
            WorkerSuspicion.worker_id == worker_id
        )
        return sorted(session.scalars(statement))


def list_user_points(user_id: int) -> list[int]:
    with transaction() as session:
        statement = select(UserSuspicion.suspicion_id).where(UserSuspicion.user_id == user_id)
        return sorted(session.scalars(statement))


# Points


def test_a_reason_counts_once_for_a_worker_and_its_owner_unless_it_accumulates(api: Api) -> None:
    owner_id, _ = make_user()
    worker_id = make_worker(owner_id)
    for reason in (Suspicion.UNSAFE_IP, Suspicion.UNREASONABLY_FAST, Suspicion.UNSAFE_IP):
        suspect_worker(worker_id, owner_id, reason)
    suspect_worker(worker_id, owner_id, Suspicion.UNREASONABLY_FAST)
    assert list_worker_points(worker_id) == [3, 5, 5]
    assert list_user_points(owner_id) == [3, 5, 5]


def test_anonymous_collects_no_points(api: Api) -> None:
    run_transaction(
        lambda session: add_user_suspicion(session, ANONYMOUS_ID, Suspicion.CORRUPT_PROMPT)
    )
    assert list_user_points(ANONYMOUS_ID) == []


@pytest.mark.race
def test_points_given_at_once_are_each_counted_as_they_should(api: Api) -> None:
    owner_id, _ = make_user(UserRoleTypes.TRUSTED)
    worker_ids = [make_worker(owner_id) for _ in range(4)]
    acts = [
        (worker_id, owner_id, reason)
        for worker_id in worker_ids
        for reason in (Suspicion.UNSAFE_IP, Suspicion.TOO_MANY_JOBS_ABORTED)
        for _ in range(3)
    ]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda act: suspect_worker(*act), acts):
            pass
    assert [list_worker_points(worker_id) for worker_id in worker_ids] == [[3, 9, 9, 9]] * 4
    assert list_user_points(owner_id) == [3, *[9] * 12]


def test_five_points_pause_a_worker_and_the_moderators_are_told(
    api: Api, told: list[tuple[str, dict[str, Any]]]
) -> None:
    owner_id, _ = make_user()
    worker_id = make_worker(owner_id)
    for number in range(7):
        assert get_worker(worker_id).paused is (number >= 5)
        suspect_worker(worker_id, owner_id, Suspicion.UNREASONABLY_FAST)
    wait_for_notices()
    assert [path for path, _ in told] == ["/paused"]
    assert told[0][1] == {
        "content": f"Worker {worker_id} of user {owner_id} was paused after points of suspicion,"
        " the last one UNREASONABLY_FAST."
    }


def test_a_worker_of_a_trusted_owner_is_never_paused_by_itself(api: Api) -> None:
    owner_id, _ = make_user(UserRoleTypes.TRUSTED)
    worker_id = make_worker(owner_id)
    for _ in range(6):
        suspect_worker(worker_id, owner_id, Suspicion.UNREASONABLY_FAST)
    assert not get_worker(worker_id).paused


# What gives points


def serve(horde: TextHorde, owner: str, name: str, *, seconds: float, tokens: int = 200) -> None:
    """Let a worker answer a request with so many tokens after so many seconds."""
    _, asker = make_user()
    horde.queue(asker, models=[KNOWN], params={"max_length": 512})
    job_id = horde.take_job(owner, name)
    with transaction() as session:
        session.execute(
            update(ProcessingGeneration)
            .where(ProcessingGeneration.id == UUID(job_id))
            .values(start_time=utcnow() - timedelta(seconds=seconds))
        )
    assert horde.submit(owner, job_id, "abcd" * tokens).status_code == 200


@pytest.mark.parametrize(("seconds", "points"), [(1.9, [5]), (2.5, [])])
def test_a_reply_faster_than_its_model_can_write_is_a_point(
    horde: TextHorde, seconds: float, points: list[int]
) -> None:
    owner_id, owner = make_user()
    serve(
        horde, owner, "fast", seconds=seconds
    )  # 200 tokens of a model that may write 100 a second
    assert list_worker_points(require_worker("fast").id) == points
    assert list_user_points(owner_id) == points


def test_a_trusted_owner_may_be_as_fast_as_any_model(horde: TextHorde) -> None:
    _, owner = make_user(UserRoleTypes.TRUSTED)
    serve(horde, owner, "trusted", seconds=2.0)
    assert list_worker_points(require_worker("trusted").id) == []
    serve(horde, owner, "trusted", seconds=1.0)
    assert list_worker_points(require_worker("trusted").id) == [5]


def test_a_short_reply_at_once_is_nothing_odd(horde: TextHorde) -> None:
    _, owner = make_user()
    for _ in range(6):
        serve(horde, owner, "brief", seconds=0.0, tokens=10)
    worker = require_worker("brief")
    assert (list_worker_points(worker.id), worker.paused) == ([], False)


def test_a_name_far_longer_than_needed_is_a_point_and_a_longer_one_two(horde: TextHorde) -> None:
    for length, points in ((100, []), (101, [0]), (201, [0, 1])):
        _, owner = make_user()
        name = f"{length} " + "n" * (length - 4)
        assert len(name) == length
        horde.take(owner, name)
        assert list_worker_points(require_worker(name[:100].rstrip()).id) == points


def drop_jobs(horde: TextHorde, owner: str, count: int) -> None:
    """Let a worker drop jobs, each of another request."""
    for _ in range(count):
        _, asker = make_user()
        request_id = horde.queue(asker, models=[KNOWN])
        assert horde.fault(owner, horde.take_job(owner, "dropper")).status_code == 200
        horde.cancel(request_id)


def test_too_many_dropped_jobs_are_maintenance_and_a_point(horde: TextHorde) -> None:
    _, owner = make_user()
    drop_jobs(horde, owner, 20)
    assert list_worker_points(require_worker("dropper").id) == []
    drop_jobs(horde, owner, 1)
    worker = require_worker("dropper")
    assert (worker.maintenance, list_worker_points(worker.id)) == (True, [9])


def test_in_a_raid_half_as_many_are_a_point_and_no_maintenance(api: Api, horde: TextHorde) -> None:
    _, moderator = make_moderator()
    api.put("/status/modes", {"raid_mode": True}, moderator)
    _, owner = make_user()
    drop_jobs(horde, owner, 10)
    assert list_worker_points(require_worker("dropper").id) == []
    drop_jobs(horde, owner, 1)
    worker = require_worker("dropper")
    assert (worker.maintenance, worker.aborted_jobs) == (False, 0)
    assert list_worker_points(worker.id) == [9]


def test_in_a_raid_an_unsafe_worker_is_let_in_under_suspicion(
    api: Api, horde: TextHorde, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, moderator = make_moderator()
    config = api.app.extensions["horde.config"]
    object.__setattr__(config, "ip_checker", "http://checker.invalid/{ip}")
    monkeypatch.setattr(addresses, "_ask_checker", lambda *_: False)
    try:
        owner_id, owner = make_user()
        assert refused(horde.pop(owner, "hidden")) == (403, "UnsafeIP")
        api.put("/status/modes", {"raid_mode": True}, moderator)
        caches.clear_all()
        for _ in range(2):
            assert horde.pop(owner, "hidden").status_code == 200
        assert list_worker_points(require_worker("hidden").id) == [3]
        assert list_user_points(owner_id) == [3]
        for roles in ((UserRoleTypes.TRUSTED,), (UserRoleTypes.VPN,)):
            exempt_id, exempt = make_user(*roles)
            assert horde.pop(exempt, f"of {roles[0].name}").status_code == 200
            assert list_user_points(exempt_id) == []
    finally:
        object.__setattr__(config, "ip_checker", "")


# Who counts among the workers of an owner


def test_workers_that_are_gone_for_a_day_take_nobodys_place(horde: TextHorde) -> None:
    owner_id, owner = make_user()
    for _ in range(10):
        make_worker(owner_id, last_check_in=utcnow() - timedelta(hours=25), ipaddr="127.0.0.1")
    assert horde.pop(owner, "a new one").status_code == 200
    for _ in range(4):
        make_worker(owner_id, last_check_in=utcnow() - timedelta(hours=23))
    assert refused(horde.pop(owner, "another")) == (403, "TooManyWorkers")


# Refused prompts


@pytest.fixture
def _everything_is_filtered(api: Api) -> Iterator[None]:
    """A horde whose rule leaves nothing of a prompt that says bad."""
    with transaction() as session:
        rule = Filter(regex=r".*bad.*", filter_type=10, replacement=" ")
        session.add(rule)
        session.flush()
        rule_id = rule.id
    caches.clear_all()
    yield
    with transaction() as session:
        session.delete(session.get_one(Filter, rule_id))
    caches.clear_all()


def ask_badly(horde: TextHorde, key: str, address: str, **headers: str) -> tuple[int, str | None]:
    answer = horde.ask(key, {"address": address, **headers}, prompt="bad", models=[ADULT])
    return refused(answer)


@pytest.mark.usefixtures("_everything_is_filtered")
def test_an_address_whose_prompts_are_refused_again_and_again_is_refused(
    horde: TextHorde,
) -> None:
    user_id, key = make_user()
    for _ in range(6):
        assert ask_badly(horde, key, "198.51.100.50") == (400, "CorruptPrompt")
    assert ask_badly(horde, key, "198.51.100.50") == (403, "TimeoutIP")
    assert addresses.find_timeout_seconds("198.51.100.50") in range(170, 181)
    assert ask_badly(horde, key, "198.51.100.51") == (400, "CorruptPrompt")
    assert list_user_points(user_id) == [8]


@pytest.mark.usefixtures("_everything_is_filtered")
def test_in_a_raid_the_first_refused_prompt_times_its_address_out(
    api: Api, horde: TextHorde
) -> None:
    _, moderator = make_moderator()
    api.put("/status/modes", {"raid_mode": True}, moderator)
    _, key = make_user()
    assert ask_badly(horde, key, "198.51.100.60") == (400, "CorruptPrompt")
    assert ask_badly(horde, key, "198.51.100.60") == (403, "TimeoutIP")


@pytest.mark.usefixtures("_everything_is_filtered")
def test_moderators_may_try_things_out(horde: TextHorde) -> None:
    moderator_id, moderator = make_moderator()
    for _ in range(8):
        assert ask_badly(horde, moderator, "198.51.100.70") == (400, "CorruptPrompt")
    assert list_user_points(moderator_id) == []


@pytest.mark.usefixtures("_everything_is_filtered")
def test_of_a_service_whose_clients_prompts_are_refused_the_moderators_are_told_once(
    horde: TextHorde, told: list[tuple[str, dict[str, Any]]]
) -> None:
    service_id, key = make_user(UserRoleTypes.SERVICE, proxy_passkey=PASSKEY)
    passkeys.forget_passkeys()
    for number in range(13):
        answer = ask_badly(
            horde,
            key,
            "198.51.100.80",
            **{"Proxied-For": f"203.0.113.{number}", "Proxy-Authorization": PASSKEY},
        )
        assert answer == (400, "CorruptPrompt")
    wait_for_notices()
    assert [(path, str(service_id) in body["content"]) for path, body in told] == [
        ("/problem", True)
    ]


def test_timeouts_grow_with_each_time() -> None:
    assert [addresses.compute_timeout_minutes(count) for count in range(4)] == [3, 9, 15, 21]


def test_deleting_a_timeout_forgets_how_often_there_was_one(api: Api) -> None:
    _, moderator = make_moderator()
    assert [addresses.punish_address("198.51.100.90") for _ in range(2)] == [3, 9]
    api.delete("/operations/ipaddr", moderator, {"ipaddr": "198.51.100.90"})
    assert addresses.find_timeout_seconds("198.51.100.90") is None
    assert addresses.punish_address("198.51.100.90") == 3


def test_a_receiver_that_fails_ends_no_notices(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    sender = start_notices({NoticeKind.PAUSED_WORKER: "http://127.0.0.1:9/nobody"})
    try:
        notices.queue_notice(NoticeKind.PAUSED_WORKER, "first")
        notices.queue_notice(NoticeKind.PAUSED_WORKER, "second")
        notices.queue_notice(NoticeKind.PROBLEM_USER, "wanted by nobody")
    finally:
        notices._sender.set(None)
        sender.stop()
    failures = [record for record in caplog.records if record.msg == "horde.notice.failed"]
    assert len(failures) == 2


def test_nothing_counts_twice_in_the_rows(api: Api) -> None:
    with transaction() as session:
        doubled = session.execute(
            select(UserSuspicion.user_id, UserSuspicion.suspicion_id)
            .where(UserSuspicion.suspicion_id.not_in([5, 9]))
            .group_by(UserSuspicion.user_id, UserSuspicion.suspicion_id)
            .having(func.count() > 1)
        ).all()
    assert doubled == []
