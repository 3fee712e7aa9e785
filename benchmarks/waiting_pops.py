# SPDX-License-Identifier: AGPL-3.0-or-later
"""How soon a job reaches a worker that waits for it at the front, and what a waiting worker costs.

Run by hand: `dev.py bench waiting_pops`. How to read it: docs/how-to/run-the-benchmarks.md.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psycopg2

from benchmarks._bodies import MODEL, OTHER_MODEL, build_pop, build_text_request
from benchmarks._counters import read_tree_cpu
from benchmarks._front import read_memory_kib, running_front
from benchmarks._http import Connection, Timings, read_answer
from benchmarks._stack import Account, Api, make_account, own_database, running_api, season_workers
from horde.redis_ctrl import chat_signal_db
from horde.setting_kinds import build_redis_url

FUNDS = 1_000_000_000
WAIT_SECONDS = 30
OPENING_SECONDS = 300
OPENED_AT_ONCE = 32  # each first pop of a worker writes its row
QUIET_SECONDS = 3
PAUSE_SECONDS = 0.02  # between two requests, so that one is served at a time
WARM_UP_JOBS = 20


@dataclass(frozen=True)
class Options:
    """What to measure."""

    workers: int
    jobs: int


@dataclass(frozen=True)
class Row:
    """Jobs given to so many waiting workers, one after the other; milliseconds."""

    workers: int
    jobs: int
    worker_kib: float  # memory of a waiting worker
    quiet_core_share: float  # of the front, while nothing is queued
    idle_answers: int  # waits that ended without a job
    accepted_ms: tuple[float, float]  # p50 and p99 from the 202 to the job
    sent_ms: tuple[float, float]  # and from sending the request
    # A worker that pops at the API itself, the moment a request is accepted: the least that the
    # machine, as busy as it is, lets a job take.
    direct_ms: tuple[float, float]


class WaitingWorker:
    """One worker at the front, on a connection of its own, that waits until it has a job."""

    def __init__(self, port: int, owner: Account, number: int) -> None:
        body = json.dumps(build_pop(f"waiting {number}", is_chat=False)).encode()
        head = (
            f"POST /api/v2/generate/text/pop HTTP/1.1\r\nHost: localhost\r\napikey: {owner.api_key}"
            f"\r\nPrefer: wait={WAIT_SECONDS}\r\nContent-Type: application/json\r\nContent-Length:"
            f" {len(body)}\r\n\r\n"
        )
        self.port, self.request = port, head.encode() + body
        self.idle_answers = 0

    async def run(self, got: "asyncio.Queue[tuple[str, float]]") -> None:
        """Pop until there is a job; its prompt and the moment it came."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            while True:
                writer.write(self.request)
                job = await read_answer(reader)
                came = time.perf_counter()
                if job["id"] is not None:
                    await got.put((job["payload"]["prompt"], came))
                    return
                self.idle_answers += 1
        finally:
            writer.close()


def parse_options(words: Sequence[str]) -> tuple[Options, bool]:
    """The options, and whether JSON is wanted."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench waiting_pops", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--workers", type=int, default=1000, help="that wait all the time")
    parser.add_argument("--jobs", type=int, default=300, help="queued one after the other")
    parser.add_argument(
        "--quick", action="store_true", help="a few of everything, to see that it runs"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="the figures as JSON on standard output, the table on standard error",
    )
    arguments = parser.parse_args(words)
    options = Options(5, 5) if arguments.quick else Options(arguments.workers, arguments.jobs)
    return options, arguments.json


async def measure(
    options: Options,
    front_port: int,
    front_id: int,
    api: Api,
    owner: Account,
    payer: Account,
    url: str,
) -> Row:
    """Let workers wait, look at them, then give one job after the other."""
    got: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
    memory_before = read_memory_kib(front_id)
    count = options.workers + options.jobs + WARM_UP_JOBS
    workers = [WaitingWorker(front_port, owner, number) for number in range(count)]
    tasks = []
    async with asyncio.timeout(OPENING_SECONDS):
        for start in range(0, count, OPENED_AT_ONCE):
            part = workers[start : start + OPENED_AT_ONCE]
            tasks += [asyncio.create_task(worker.run(got)) for worker in part]
            await asyncio.sleep(OPENED_AT_ONCE * 0.02)
        await asyncio.to_thread(await_workers, url, count)
    await asyncio.to_thread(season_workers, url)
    await asyncio.sleep(1)
    worker_kib = (read_memory_kib(front_id) - memory_before) / count
    cpu, started = read_tree_cpu(front_id), time.monotonic()
    await asyncio.sleep(QUIET_SECONDS)
    share = (read_tree_cpu(front_id) - cpu) / (time.monotonic() - started)
    client = Connection(api.port, payer.api_key, Timings())
    polling = Connection(api.port, owner.api_key, Timings())
    accepted: list[float] = []
    sent: list[float] = []
    direct: list[float] = []
    try:
        for number in range(WARM_UP_JOBS + options.jobs):
            began, taken = await asyncio.to_thread(request, client, f"job {number}")
            prompt, came = await asyncio.wait_for(got.get(), WAIT_SECONDS)
            if f"job {number}" not in prompt:
                raise RuntimeError(f"another job came: {prompt[:100]}")
            if number >= WARM_UP_JOBS:
                accepted.append(max(came - taken, 0.0))
                sent.append(came - began)
            await asyncio.sleep(PAUSE_SECONDS)
            seconds = await asyncio.to_thread(pop_directly, client, polling)
            if number >= WARM_UP_JOBS:
                direct.append(seconds)
            await asyncio.sleep(PAUSE_SECONDS)
    finally:
        client.close()
        polling.close()
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
    return Row(
        workers=options.workers,
        jobs=options.jobs,
        worker_kib=worker_kib,
        quiet_core_share=share,
        idle_answers=sum(worker.idle_answers for worker in workers),
        accepted_ms=pick(accepted),
        sent_ms=pick(sent),
        direct_ms=pick(direct),
    )


def await_workers(database_url: str, count: int) -> None:
    """Return once each worker's first pop was answered, or is about to be."""
    with contextlib.closing(psycopg2.connect(database_url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            while True:
                cursor.execute("SELECT count(*) FROM workers")
                if cursor.fetchone() == (count,):
                    return
                time.sleep(0.2)


def request(client: Connection, tag: str, model: str = MODEL) -> tuple[float, float]:
    """When a request was sent, and when it was accepted."""
    began = time.perf_counter()
    client.call("async", "POST", "/generate/text/async", build_text_request(tag, model=model))
    return began, time.perf_counter()


def pop_directly(client: Connection, worker: Connection) -> float:
    """Seconds from an accepted request to its job, for a worker that asks in that moment."""
    _, accepted = request(client, "direct", OTHER_MODEL)
    body = build_pop("polling", is_chat=False, model=OTHER_MODEL)
    job = worker.call("pop", "POST", "/generate/text/pop", body)
    came = time.perf_counter()
    if job["id"] is None:
        raise RuntimeError("a request that was accepted is not there")
    return came - accepted


def pick(seconds: list[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return ordered[last // 2] * 1000, ordered[round(last * 0.99)] * 1000


HEADER = (
    f"{'workers':>8} {'jobs':>6} {'KiB/worker':>10} {'quiet core':>10}"
    f" {'202 to job p50/p99':>19} {'sent to job p50/p99':>20} {'direct p50/p99':>15}"
)


def format_row(row: Row) -> str:
    """A line of the table."""
    accepted, sent, direct = (
        f"{p50:.1f}/{p99:.1f}" for p50, p99 in (row.accepted_ms, row.sent_ms, row.direct_ms)
    )
    return (
        f"{row.workers:8} {row.jobs:6} {row.worker_kib:10.1f} {row.quiet_core_share:10.1%}"
        f" {accepted:>19} {sent:>20} {direct:>15}"
    )


def main(words: Sequence[str]) -> None:
    """Print the table."""
    options, is_json = parse_options(words)
    table: TextIO = sys.stderr if is_json else sys.stdout
    redis_url = build_redis_url(os.environ["REDIS_URL"], chat_signal_db)
    room = {
        "HORDE_OAI_MAX_WAITING_POPS": "1000000",
        "HORDE_OAI_MAX_WAITING_POPS_PER_CALLER": "1000000",
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        own_database(os.environ["DATABASE_URL"]) as environment,
    ):
        payer = make_account(environment, "payer", "--kudos", str(FUNDS))
        owner = make_account(environment, "owner", "--trusted")
        with (
            running_api(environment, Path(folder) / "api.log", processes=1, threads=16) as api,
            running_front(
                f"http://127.0.0.1:{api.port}/api",
                redis_url,
                Path(folder) / "front.log",
                streams=100,
                settings=room,
            ) as (front_port, front_id),
        ):
            row = asyncio.run(
                measure(
                    options, front_port, front_id, api, owner, payer, environment["DATABASE_URL"]
                )
            )
    print(HEADER, file=table)
    print(format_row(row), file=table, flush=True)
    if is_json:
        print(json.dumps({"waiting": [dataclasses.asdict(row)]}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
