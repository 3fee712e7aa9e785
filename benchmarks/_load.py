# SPDX-License-Identifier: AGPL-3.0-or-later
"""Clients and scripted workers around an API, all threads of this process.

A worker pops when a request waits for it, so that each job is one call of each route and nothing is
polled: what idle pops and repeated status reads cost is measured by itself.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks._bodies import (
    build_chat_request,
    build_pop,
    build_submit,
    build_text_request,
    read_tag,
)
from benchmarks._counters import Costs, Meter
from benchmarks._http import Connection, Timings
from benchmarks._stack import Account

JOB_SECONDS = 60  # a job that takes longer has been lost
PATIENCE_SECONDS = 0.2  # how often a waiting thread looks whether the run is over
RETRY_SECONDS = 0.002  # after a pop that found only requests in the hands of others


@dataclass(frozen=True)
class Parties:
    """Where the API is and who uses it."""

    port: int
    payer: Account
    owner: Account
    # Whose requests stand in the way: an account's own waiting requests are counted at each
    # request.
    stranger: Account
    is_chat: bool

    @property
    def family(self) -> str:
        """The path's word for the requests."""
        return "chat" if self.is_chat else "text"

    def connect_client(self, timings: Timings) -> Connection:
        """A connection that asks."""
        return Connection(self.port, self.payer.api_key, timings)

    def connect_stranger(self) -> Connection:
        """A connection of the account that fills the queue."""
        return Connection(self.port, self.stranger.api_key, Timings())

    def connect_worker(self, timings: Timings) -> Connection:
        """A connection that serves."""
        return Connection(self.port, self.owner.api_key, timings)

    def request(self, client: Connection, tag: str) -> str:
        """Queue a request that the workers can serve; its id."""
        body = build_chat_request(tag) if self.is_chat else build_text_request(tag)
        return str(client.call("async", "POST", f"/generate/{self.family}/async", body)["id"])

    def pop(self, worker: Connection, name: str, route: str = "pop") -> dict[str, Any]:
        """A job, or the body of an idle pop."""
        # A worker that declares chat serves both families, as today's do.
        return dict(worker.call(route, "POST", "/generate/text/pop", build_pop(name, is_chat=True)))

    def submit(self, worker: Connection, job: dict[str, Any]) -> None:
        """The reply to a job."""
        worker.call("submit", "POST", "/generate/text/submit", build_submit(job))

    def read(self, client: Connection, wp_id: str) -> None:
        """The finished request; raises RuntimeError when it is not done."""
        status = client.call("status", "GET", f"/generate/{self.family}/status/{wp_id}")
        if not status["done"] or len(status["generations"]) != 1:
            raise RuntimeError(f"request {wp_id} is not done: {status}")


@dataclass(frozen=True)
class Result:
    """A stretch of work under load."""

    jobs: int
    seconds: float
    costs: Costs
    timings: dict[str, list[float]]


@dataclass
class Load:
    """As many workers, and as many clients with one request each in flight."""

    parties: Parties
    workers: int
    timings: Timings = field(default_factory=Timings)
    waiting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    replied: dict[str, threading.Event] = field(default_factory=dict)
    tags: Iterator[int] = field(default_factory=itertools.count)
    clients_stop: threading.Event = field(default_factory=threading.Event)
    workers_stop: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self) -> None:
        """A client: ask, wait for the reply, read it, ask again."""
        client = self.parties.connect_client(self.timings)
        while not self.clients_stop.is_set() and not self.failures:
            tag = f"job-{next(self.tags)}"
            event = self.replied[tag] = threading.Event()
            wp_id = self.parties.request(client, tag)
            self.waiting.release()
            if not event.wait(JOB_SECONDS):
                raise RuntimeError(f"nobody served request {wp_id}")
            self.parties.read(client, wp_id)
            with self.lock:
                self.done += 1
        client.close()

    def serve(self, name: str) -> None:
        """A worker: pop when something waits, and reply at once."""
        worker = self.parties.connect_worker(self.timings)
        while not self.workers_stop.is_set() and not self.failures:
            if not self.waiting.acquire(timeout=PATIENCE_SECONDS):
                continue
            job = self.parties.pop(worker, name)
            if job["id"] is None:
                self.waiting.release()
                time.sleep(RETRY_SECONDS)
                continue
            self.parties.submit(worker, job)
            self.replied.pop(read_tag(job)).set()
        worker.close()

    def run(self, meter: Meter, *, warm_up_seconds: float, seconds: float) -> Result:
        """Work for a while and measure all but the first of it. Raises the first failure of any
        thread.
        """
        servers = [
            self.start(lambda place=place: self.serve(name_worker(place)))
            for place in range(self.workers)
        ]
        askers = [self.start(self.ask) for _ in range(self.workers)]
        time.sleep(warm_up_seconds)
        self.timings.by_route.clear()
        before, done_before, started = meter.read(), self.done, time.monotonic()
        self.clients_stop.wait(seconds)
        costs, done, elapsed = (
            meter.read().since(before),
            self.done - done_before,
            time.monotonic() - started,
        )
        timings = {route: list(values) for route, values in self.timings.by_route.items()}
        self.clients_stop.set()
        for thread in askers:
            thread.join()
        self.workers_stop.set()
        for thread in servers:
            thread.join()
        if self.failures:
            raise self.failures[0]
        return Result(jobs=done, seconds=elapsed, costs=costs, timings=timings)

    def start(self, work: Callable[[], None]) -> threading.Thread:
        """A thread whose failure ends the run."""

        def guarded() -> None:
            try:
                work()
            # Raised again by `run`, in the thread that waits.
            except Exception as failure:  # noqa: BLE001
                self.failures.append(failure)
                self.clients_stop.set()

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread


def name_worker(place: int) -> str:
    """The name of one of the workers, the same in every run."""
    return f"bench worker {place}"


def introduce_workers(parties: Parties, count: int) -> None:
    """Let each worker pop once."""
    worker = parties.connect_worker(Timings())
    for place in range(count):
        parties.pop(worker, name_worker(place))
    worker.close()


def run_alone(parties: Parties, *, jobs: int, idle_pops: int) -> dict[str, list[float]]:
    """One call after the other with nothing else going on: the seconds of each route.

    `idle` is a pop that finds nothing, `beat` the heartbeat: the least that any call costs here and
    now.
    """
    timings = Timings()
    client, worker = parties.connect_client(timings), parties.connect_worker(timings)
    name = name_worker(0)
    for count in (3, jobs):  # the first fill caches
        timings.by_route.clear()
        for number in range(count):
            wp_id = parties.request(client, f"alone-{number}")
            job = parties.pop(worker, name)
            if job["id"] is None:
                raise RuntimeError("the worker was not given the one request that it can serve")
            parties.submit(worker, job)
            parties.read(client, wp_id)
    for _ in range(idle_pops):
        if parties.pop(worker, name, "idle")["id"] is not None:
            raise RuntimeError("a job came from nowhere")
        client.call("beat", "GET", "/status/heartbeat")
    client.close()
    worker.close()
    return dict(timings.by_route)
