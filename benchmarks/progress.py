# SPDX-License-Identifier: AGPL-3.0-or-later
"""How long a progress post takes beside the bare script that it runs on Redis, and how soon its
reader has it.

Run by hand: `dev.py bench progress`. The content of each post is the moment it was sent at, so that
a reader knows its age. Source of the figures' meaning: docs/how-to/run-the-benchmarks.md.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import redis

from benchmarks._bodies import build_chat_request, build_pop, build_submit
from benchmarks._counters import Meter
from benchmarks._http import Connection, Timings
from benchmarks._stack import Account, Api, make_account, own_database, running_api
from benchmarks.queue import pick, show
from horde.chat_progress import APPEND_PROGRESS_SCRIPT, build_lease_key, build_stream_key
from horde.redis_ctrl import chat_signal_db

FUNDS = 1_000_000_000  # kudos, so that no request waits for any
MAX_TOKENS = 1000  # 16 bytes of posts each; what a new worker may be given
ROUTE = "/api/v2/generate/text/progress"
WORKER_NAME = "bench streamer"
POST_SECONDS = 1.0
JOBS_OF_A_POSTER = 10  # each poster posts for so many jobs, on one connection
READ_BLOCK_MS = 200
LOG_SECONDS = 10  # until the last line of the API's log is there
THREAD_SWITCH_SECONDS = 0.0005  # a tenth of the usual: many threads measure short waits


@dataclass(frozen=True)
class Options:
    """What to measure."""

    jobs: int
    seconds: float
    posts: int  # one after the other
    processes: int
    threads: int


@dataclass(frozen=True)
class Row:
    """One line of the table. Milliseconds are p50 and p99; CPU, statements and commits are for each
    post.
    """

    name: str
    jobs: int
    posts: int
    posts_per_second: float | None
    script_ms: tuple[float, float] | None  # the bare EVALSHA
    server_ms: tuple[float, float] | None  # as the API's log has it
    script_ratio: float | None  # p50 of the server as a multiple of the script's
    client_ms: tuple[float, float] | None  # from the first byte sent to the answer
    # From the first byte sent to the return of a reader's XREAD.
    reader_ms: tuple[float, float] | None
    api_cpu_ms: float | None
    statements: float | None
    commits: float | None
    lost: int | None  # entries that are missing or out of order
    late: int | None  # posts sent more than half a second after their time, for want of CPU


@dataclass
class Job:
    """A streamed job and what was posted of it."""

    request_id: str
    answer: dict[str, Any] = field(repr=False)
    posted: list[str] = field(default_factory=list)


@dataclass
class Reader:
    """Reads streams as a front does, and notes how old each entry is when it comes."""

    client: redis.Redis
    places: dict[str, str]
    ages: list[float] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Until told to stop."""
        while not self.stop.is_set():
            answer: Any = self.client.xread(self.places, block=READ_BLOCK_MS)
            now = time.perf_counter()
            for key, entries in answer or ():
                for entry_id, fields in entries:
                    self.places[key] = entry_id
                    self.ages.append(now - float(fields["content"]))


def parse_options(words: Sequence[str]) -> tuple[Options, bool]:
    """The options, and whether JSON is wanted."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench progress", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--jobs", type=int, default=200, help="that stream at once, a post a second each"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="they stream for")
    parser.add_argument(
        "--posts", type=int, default=500, help="sent one after the other with nothing else going on"
    )
    parser.add_argument("--processes", type=int, default=2, help="of the API")
    parser.add_argument("--threads", type=int, default=16, help="of each of them")
    parser.add_argument("--quick", action="store_true", help="a few posts, to see that it runs")
    parser.add_argument(
        "--json",
        action="store_true",
        help="the figures as JSON on standard output, the table on standard error",
    )
    arguments = parser.parse_args(words)
    options = Options(
        jobs=arguments.jobs,
        seconds=arguments.seconds,
        posts=min(arguments.posts, 1000),
        processes=arguments.processes,
        threads=arguments.threads,
    )
    if arguments.quick:
        options = dataclasses.replace(
            options, jobs=4, seconds=2.0, posts=10, processes=1, threads=4
        )
    return options, arguments.json


class Benchmark:
    """One run against one API."""

    def __init__(
        self, options: Options, api: Api, log: Path, meter: Meter, payer: Account, owner: Account
    ) -> None:
        self.options, self.api, self.log, self.meter, self.payer, self.owner = (
            options,
            api,
            log,
            meter,
            payer,
            owner,
        )
        self.redis_url = os.environ["REDIS_URL"]
        self.log_place = 0
        self.timings = Timings()
        self.script_p50: float | None = None

    def run(self) -> Iterator[Row]:
        """Every row as it is measured; the script first, which the others are compared with."""
        worker = self.connect(self.owner)
        self.pop(worker)  # a chat request asks for a worker that is known
        script = self.measure_script(worker)
        self.script_p50 = script.script_ms[0] if script.script_ms else None
        yield script
        yield self.measure_alone(worker)
        yield self.measure_streams(worker)
        worker.close()

    def connect(self, account: Account) -> Connection:
        """A connection to the API."""
        return Connection(self.api.port, account.api_key, self.timings)

    def connect_redis(self) -> redis.Redis:
        """A connection of one's own to the streams."""
        return redis.Redis.from_url(self.redis_url, db=chat_signal_db, decode_responses=True)

    def pop(self, worker: Connection) -> dict[str, Any]:
        """A job, or the body of an idle pop."""
        limits = {"max_length": MAX_TOKENS, "max_context_length": 4096}
        body = build_pop(WORKER_NAME, is_chat=True) | {
            "threads": 50,
            "chat_limits": limits,
            **limits,
        }
        return dict(worker.call("pop", "POST", "/generate/text/pop", body))

    def take_jobs(self, worker: Connection, count: int) -> list[Job]:
        """As many streamed jobs, popped."""
        client = self.connect(self.payer)
        jobs = []
        for number in range(count):
            body = build_chat_request(f"stream-{number}", max_tokens=MAX_TOKENS, stream=True)
            request_id = str(client.call("async", "POST", "/generate/chat/async", body)["id"])
            job = self.pop(worker)
            if job["id"] is None or job["payload"].get("stream_progress") is not True:
                raise RuntimeError("the worker was not given the one request that it can serve")
            jobs.append(Job(request_id, job))
        client.close()
        return jobs

    def measure_script(self, worker: Connection) -> Row:
        """The route's script on a lease like a job's, sent by a client that does nothing else."""
        (job,) = self.take_jobs(worker, 1)
        with self.connect_redis() as client:
            fields: Any = client.hgetall(build_lease_key(job.answer["id"]))
            lease = build_lease_key(uuid4())
            client.hset(lease, mapping={**fields, "request": str(UUID(int=0)), "max_bytes": 10**9})
            sha = client.script_load(APPEND_PROGRESS_SCRIPT)
            seconds = []
            for seq in range(1, self.options.posts + 1):
                content = f"{time.perf_counter():.6f}"
                arguments = [
                    fields["key"],
                    seq,
                    content,
                    "",
                    len(content),
                    f"{time.time():.6f}",
                    job.answer["id"],
                    150,
                ]
                started = time.perf_counter()
                client.evalsha(sha, 1, lease, *arguments)
                seconds.append(time.perf_counter() - started)
            client.delete(lease, build_stream_key(UUID(int=0)))
        worker.call("submit", "POST", "/generate/text/submit", build_submit(job.answer))
        return build_row("EVALSHA", jobs=1, posts=len(seconds), script_ms=summarize(seconds))

    def measure_alone(self, worker: Connection) -> Row:
        """One job's posts one after the other, with a reader waiting for each."""
        jobs = self.take_jobs(worker, 1)
        self.post(worker, jobs[0])
        self.read_log()
        with self.reading(jobs) as reader:
            row = self.measure("alone", jobs, lambda: self.post_in_turn(worker, jobs[0]), reader)
        return self.finish(row, worker, jobs)

    def measure_streams(self, worker: Connection) -> Row:
        """Many jobs with a post a second each, and readers for all of them."""
        jobs = self.take_jobs(worker, self.options.jobs)
        self.read_log()
        late: list[int] = []
        with self.reading(jobs) as reader:
            row = self.measure(
                "streaming", jobs, lambda: late.append(self.post_each_second(jobs)), reader
            )
        return self.finish(dataclasses.replace(row, late=sum(late)), worker, jobs)

    def post_in_turn(self, worker: Connection, job: Job) -> None:
        """As many posts as fit into the job's bounds."""
        for _ in range(self.options.posts - 1):
            self.post(worker, job)

    def post_each_second(self, jobs: Sequence[Job]) -> int:
        """The posts of all jobs, evenly over each second; how many were late."""
        started = time.monotonic()
        late: list[int] = []
        shares = [
            jobs[place : place + JOBS_OF_A_POSTER]
            for place in range(0, len(jobs), JOBS_OF_A_POSTER)
        ]
        failures: list[BaseException] = []

        def serve(place: int, share: Sequence[Job]) -> None:
            connection = self.connect(self.owner)
            count = 0
            try:
                for second in range(int(self.options.seconds)):
                    for number, job in enumerate(share):
                        share_of_second = (number + place / len(shares)) / len(share)
                        due = started + (second + share_of_second) * POST_SECONDS
                        time.sleep(max(due - time.monotonic(), 0))
                        count += time.monotonic() - due > POST_SECONDS / 2
                        self.post(connection, job)
            except Exception as failure:  # noqa: BLE001  raised again in the thread that waits
                failures.append(failure)
            late.append(count)
            connection.close()

        threads = [
            threading.Thread(target=serve, args=(place, share))
            for place, share in enumerate(shares)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return sum(late)

    def post(self, connection: Connection, job: Job) -> None:
        """The next post of a job: the moment it is sent."""
        content = f"{time.perf_counter():.6f}"
        body = {"id": job.answer["id"], "seq": len(job.posted) + 1, "delta": {"content": content}}
        connection.call("progress", "POST", "/generate/text/progress", body)
        job.posted.append(content)

    def measure(self, name: str, jobs: Sequence[Job], work: Any, reader: Reader) -> Row:
        """Do some work and count what it cost."""
        posted_before = sum(len(job.posted) for job in jobs)
        self.timings.by_route.clear()
        before, started = self.meter.read(), time.monotonic()
        work()
        elapsed, costs = time.monotonic() - started, self.meter.read().since(before)
        posts = sum(len(job.posted) for job in jobs) - posted_before
        deadline = time.monotonic() + LOG_SECONDS
        server_seconds: list[float] = []
        while len(server_seconds) < posts and time.monotonic() < deadline:
            server_seconds += self.read_log()
            time.sleep(0.05)
        server_ms = summarize(server_seconds)
        script = self.script_p50
        return build_row(
            name,
            jobs=len(jobs),
            posts=posts,
            posts_per_second=posts / elapsed,
            script_ratio=server_ms[0] / script if server_ms and script else None,
            server_ms=server_ms,
            client_ms=summarize(self.timings.by_route["progress"]),
            reader_ms=summarize(reader.ages),
            api_cpu_ms=costs.api_cpu / posts * 1000,
            statements=None if costs.statements is None else costs.statements / posts,
            commits=None if costs.commits is None else costs.commits / posts,
        )

    def reading(self, jobs: Sequence[Job]) -> "RunningReader":
        """A reader of these jobs' streams."""
        places = {build_stream_key(job.request_id): "$" for job in jobs}
        return RunningReader(Reader(self.connect_redis(), places))

    def finish(self, row: Row, worker: Connection, jobs: Sequence[Job]) -> Row:
        """Compare every stream with what was posted, and submit the jobs."""
        lost = 0
        with self.connect_redis() as client:
            for job in jobs:
                entries: Any = client.xrange(build_stream_key(job.request_id))
                found = [fields["content"] for _, fields in entries]
                lost += sum(
                    posted != entry for posted, entry in zip(job.posted, found, strict=False)
                )
                lost += abs(len(job.posted) - len(found))
                worker.call("submit", "POST", "/generate/text/submit", build_submit(job.answer))
                client.delete(build_stream_key(job.request_id))
        return dataclasses.replace(row, lost=lost)

    def read_log(self) -> list[float]:
        """The seconds the API says each post took, of those logged since the last call."""
        with self.log.open("rb") as lines:
            lines.seek(self.log_place)
            text = lines.read()
        complete = text[: text.rfind(b"\n") + 1]
        self.log_place += len(complete)
        found = []
        for line in complete.splitlines():
            if ROUTE.encode() in line and line.startswith(b"{"):
                event = json.loads(line)
                if event.get("route") == ROUTE:
                    found.append(event["milliseconds"] / 1000)
        return found


class RunningReader:
    """A reader in a thread of its own, for a `with` block."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.thread = threading.Thread(target=reader.read)

    def __enter__(self) -> Reader:
        self.reader.places = {key: self.find_end(key) for key in self.reader.places}
        self.thread.start()
        return self.reader

    def __exit__(self, *_: object) -> None:
        self.reader.stop.set()
        self.thread.join()
        self.reader.client.close()

    def find_end(self, key: str) -> str:
        """The last entry so far: `$` would lose what comes between two reads."""
        last: Any = self.reader.client.xrevrange(key, count=1)
        return str(last[0][0]) if last else "0"


def build_row(name: str, *, jobs: int, posts: int, **figures: Any) -> Row:
    """A row of which only some figures are measured."""
    measured = {column.name: None for column in dataclasses.fields(Row)} | figures
    return Row(**measured | {"name": name, "jobs": jobs, "posts": posts})


def summarize(seconds: Sequence[float]) -> tuple[float, float] | None:
    """p50 and p99 in milliseconds."""
    return (pick(seconds, 0.5), pick(seconds, 0.99)) if seconds else None


PAIRS = ("script", "server", "client", "reader")
HEADER = (
    f"{'':10} {'jobs':>5} {'posts':>6} {'posts/s':>8} "
    + " ".join(f"{name + ' p50/p99':>15}" for name in PAIRS)
    + f" {'x script':>8} {'API ms':>7} {'SQL':>5} {'commits':>7} {'lost':>5} {'late':>5}"
)


def format_row(row: Row) -> str:
    """A line of the table; a dash where something is not measured."""
    pairs = [getattr(row, f"{name}_ms") for name in PAIRS]
    return " ".join(
        [
            f"{row.name:10} {row.jobs:5} {row.posts:6}",
            show(row.posts_per_second, 8, 1),
            *(f"{'-' if pair is None else f'{pair[0]:.2f}/{pair[1]:.2f}':>15}" for pair in pairs),
            show(row.script_ratio, 8, 1),
            show(row.api_cpu_ms, 7, 2),
            show(row.statements, 5, 2),
            show(row.commits, 7, 2),
            (
                f"{'-' if row.lost is None else row.lost:>5}"
                f" {'-' if row.late is None else row.late:>5}"
            ),
        ]
    )


def main(words: Sequence[str]) -> None:
    """Print the table while it is measured."""
    options, is_json = parse_options(words)
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    table = sys.stderr if is_json else sys.stdout
    rows: list[Row] = []
    with (
        own_database(os.environ["DATABASE_URL"]) as environment,
        tempfile.TemporaryDirectory() as folder,
    ):
        owner = make_account(environment, "bench-owner", "--trusted")
        payer = make_account(environment, "bench-payer", "--kudos", str(FUNDS))
        log = Path(folder) / "api.log"
        environment["HORDE_LOG_FORMAT"] = "json"
        with running_api(
            environment, log, processes=options.processes, threads=options.threads
        ) as api:
            meter = Meter(environment["DATABASE_URL"], api.process_id)
            print(f"API: {options.processes} processes of {options.threads} threads", file=table)
            print(HEADER, file=table, flush=True)
            try:
                for row in Benchmark(options, api, log, meter, payer, owner).run():
                    rows.append(row)
                    print(format_row(row), file=table, flush=True)
            finally:
                meter.close()
    if is_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
