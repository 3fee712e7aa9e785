# SPDX-License-Identifier: AGPL-3.0-or-later
"""More pops than requests: workers that reply at once and ask again all the time, as on a quiet
horde with many of them.

`--stress-seconds` says how long; the default keeps a run of all tests bearable.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import pytest

from devtools.services import ServiceAddresses
from tests.acceptance._stack import (
    Account,
    Answer,
    Horde,
    ScriptedWorker,
    build_text_request,
    running_horde,
)
from tests.services import make_database

pytestmark = pytest.mark.slow

WORKERS, REQUESTERS = 16, 8
IDLE_SECONDS = 0.05
PATIENCE_SECONDS = 60  # a lost reply keeps its requester waiting for the job's whole lease
MODEL = "tests/stress"


@pytest.fixture(scope="module")
def horde(
    service_urls: ServiceAddresses, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Horde]:
    addresses = service_urls.build_environment() | {
        "DATABASE_URL": make_database(service_urls.database_url, "stress")
    }
    with running_horde(addresses, tmp_path_factory.mktemp("horde")) as horde:
        yield horde


@dataclass
class Crowd:
    """Workers and requesters in threads, and what they were told."""

    horde: Horde
    owner: Account
    client: Account
    ends_at: float
    stop: threading.Event = field(default_factory=threading.Event)
    failures: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    idle_pops: list[None] = field(default_factory=list)

    def check(self, what: str, answer: Answer) -> bool:
        """Whether the answer is a success; what is none is remembered."""
        if answer.status_code >= 300:
            self.failures.append(f"{what}: {answer.status_code} {answer.text}")
        return answer.status_code < 300

    def work(self, number: int) -> None:
        """Pop, reply at once, and ask again soon."""
        worker = ScriptedWorker(
            self.horde.api, self.owner.key, f"stress {number}", MODEL, changes={"threads": 1}
        )
        while not self.stop.is_set():
            popped = worker.post_pop()
            if not self.check("pop", popped):
                continue
            job = popped.json()
            if job["id"] is None:
                self.idle_pops.append(None)
                time.sleep(IDLE_SECONDS)
                continue
            self.check("reply", worker.post_reply(job, "blue"))

    def ask(self, number: int) -> None:
        """Queue one request after the other, of one generation or of several, and wait for each."""
        while time.monotonic() < self.ends_at:
            body = build_text_request(MODEL, n=1 + number % 3)
            queued = self.horde.api.post("/generate/text/async", body, self.client.key)
            if self.check("request", queued):
                self.wait_for(queued.json()["id"])

    def wait_for(self, request_id: str) -> None:
        """Read the status until the request is done."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                answer = self.horde.api.http.get(f"/generate/text/status/{request_id}")
                if self.check("status", answer) and answer.json()["done"]:
                    self.finished.append(request_id)
                    return
            time.sleep(0.01)
        self.failures.append(f"{request_id} is not done")


def test_no_pop_and_no_reply_is_lost_when_workers_outnumber_requests(
    horde: Horde, pytestconfig: pytest.Config
) -> None:
    owner, client = horde.create_account("owner"), horde.create_account("client")
    horde.database.rows("UPDATE users SET worker_invited = %s", WORKERS)
    crowd = Crowd(
        horde, owner, client, time.monotonic() + pytestconfig.getoption("--stress-seconds")
    )
    with ThreadPoolExecutor(WORKERS + REQUESTERS) as pool:
        working = [pool.submit(crowd.work, number) for number in range(WORKERS)]
        asking = [pool.submit(crowd.ask, number) for number in range(REQUESTERS)]
        try:
            for one in asking:
                one.result()
        finally:
            crowd.stop.set()
        for one in working:
            one.result()
    assert crowd.failures == []
    assert len(crowd.finished) >= REQUESTERS
    assert crowd.idle_pops, "there were no more workers than work"
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert horde.database.value(deadlocks) == 0
    assert horde.audit()["discrepancies"] == []
