# SPDX-License-Identifier: AGPL-3.0-or-later
"""What open streams cost one front process, and what the front adds to a completion that does not
stream.

Run by hand: `dev.py bench front_streams`. How to read it: docs/how-to/run-the-benchmarks.md.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from redis.asyncio import Redis

from benchmarks._bodies import build_chat_request
from benchmarks._counters import read_tree_cpu
from benchmarks._front import (
    CHAT,
    WORKER_ID,
    FormOfStreams,
    ScriptedApi,
    StreamClient,
    read_memory_kib,
    running_front,
)
from benchmarks._http import Timings
from benchmarks._load import Parties, introduce_workers, name_worker
from benchmarks._stack import make_account, own_database, running_api, season_workers
from horde.redis_ctrl import chat_signal_db
from horde.setting_kinds import build_redis_url

FUNDS = 1_000_000_000
TICK_SECONDS = 0.01  # posts of many workers are spread over each second in steps of this
WARM_UP_STREAMS = 20
OPENING_SECONDS = 60
LAST_CHUNK_SECONDS = 10


@dataclass(frozen=True)
class Options:
    """What to measure."""

    streams: Sequence[int]
    seconds: int
    completions: int


@dataclass(frozen=True)
class StreamRow:
    """A number of streams, each with a post a second."""

    streams: int
    posts: int
    delivered: int
    finished: int
    core_share: float  # of the front's process
    chunk_cpu_ms: float
    stream_kib: float  # memory of an open stream
    delay_ms: tuple[float, float]  # p50 and p99 from post to chunk


@dataclass(frozen=True)
class CompletionRow:
    """Completions that do not stream, one after the other: p50 in milliseconds."""

    completions: int
    native_ms: float
    front_ms: float

    @property
    def added_ms(self) -> float:
        """What the front adds."""
        return self.front_ms - self.native_ms


def parse_options(words: Sequence[str]) -> tuple[Options, bool]:
    """The options, and whether JSON is wanted."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench front_streams", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--streams", default="100,1000", metavar="N,N", help="open at once")
    parser.add_argument(
        "--seconds", type=int, default=20, help="of posts, one a second of each stream"
    )
    parser.add_argument(
        "--completions", type=int, default=200, help="that do not stream; 0 leaves them out"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few of everything, to see that it runs"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="the figures as JSON on standard output, the table on standard error",
    )
    arguments = parser.parse_args(words)
    options = Options(
        [int(word) for word in arguments.streams.split(",")],
        arguments.seconds,
        arguments.completions,
    )
    if arguments.quick:
        options = Options([5], 2, 3)
    return options, arguments.json


# Streams


async def measure_streams(
    redis_url: str, count: int, seconds: int, log: Path, form: FormOfStreams = CHAT
) -> StreamRow:
    """Open streams on a new front, post to each once a second, and read what arrives."""
    async with ScriptedApi().running() as api:
        with running_front(f"http://127.0.0.1:{api.port}/api", redis_url, log, streams=count) as (
            port,
            process_id,
        ):
            client = Redis.from_url(redis_url)
            try:
                await run_streams(api, client, port, WARM_UP_STREAMS, 1, process_id, form)
                return await run_streams(api, client, port, count, seconds, process_id, form)
            finally:
                await client.aclose()


async def run_streams(
    api: ScriptedApi,
    client: Redis,
    port: int,
    count: int,
    seconds: int,
    process_id: int,
    form: FormOfStreams = CHAT,
) -> StreamRow:
    """One load. The first post opens each stream, outside of what is measured."""
    memory_before = read_memory_kib(process_id)
    api.texts.clear()
    readers, tasks = [StreamClient(port, form) for _ in range(count)], []
    opened = [asyncio.Event() for _ in readers]
    async with asyncio.timeout(OPENING_SECONDS):
        for start in range(0, count, 50):
            part = slice(start, start + 50)
            tasks += [
                asyncio.create_task(reader.run(event))
                for reader, event in zip(readers[part], opened[part], strict=True)
            ]
            while len(api.texts) < min(start + 50, count):
                await asyncio.sleep(TICK_SECONDS)
        ids = list(api.texts)
        texts = dict.fromkeys(ids, "")
        for request_id in ids:
            await post(client, texts, [request_id], 1)
        for event in opened:
            await event.wait()
    await asyncio.sleep(0.5)
    stream_kib = (read_memory_kib(process_id) - memory_before) / count
    for reader in readers:
        reader.delays.clear()
    cpu, started = read_tree_cpu(process_id), time.monotonic()
    await post_each_second(client, texts, seconds)
    elapsed, cpu = time.monotonic() - started, read_tree_cpu(process_id) - cpu
    await wait_for_chunks(readers, count * seconds)
    await finish(api, client, texts, tasks)
    delays = sorted(delay for reader in readers for delay in reader.delays)
    posts = count * seconds
    chunk_cpu_ms = cpu / posts * 1000
    return StreamRow(
        streams=count,
        posts=posts,
        delivered=len(delays),
        finished=sum(reader.has_finished for reader in readers),
        core_share=cpu / elapsed,
        chunk_cpu_ms=chunk_cpu_ms,
        stream_kib=stream_kib,
        delay_ms=(pick(delays, 0.5), pick(delays, 0.99)),
    )


async def post_each_second(client: Redis, texts: dict[str, str], seconds: int) -> None:
    """A post of each stream in each second, spread evenly."""
    ids = list(texts)
    steps = round(1 / TICK_SECONDS)
    started = time.monotonic()
    for step in range(seconds * steps):
        await asyncio.sleep(max(started + step * TICK_SECONDS - time.monotonic(), 0))
        second, place = divmod(step, steps)
        await post(client, texts, ids[place::steps], second + 2)


async def post(client: Redis, texts: dict[str, str], ids: Sequence[str], seq: int) -> None:
    """An entry in each stream, as the progress route appends it; its text is the moment."""
    if not ids:
        return
    async with client.pipeline(transaction=False) as steps:
        for request_id in ids:
            text = f"@{time.perf_counter():.6f}"
            texts[request_id] += text
            fields = {
                "gen": "a generation",
                "seq": seq,
                "content": text,
                "worker": WORKER_ID,
                "model": "a/model",
            }
            steps.xadd(f"horde:chat:stream:{request_id}", fields)  # type: ignore[arg-type]
        await steps.execute()


async def wait_for_chunks(readers: Sequence[StreamClient], count: int) -> None:
    """Return when all have arrived, or too late."""
    deadline = time.monotonic() + LAST_CHUNK_SECONDS
    while sum(len(reader.delays) for reader in readers) < count and time.monotonic() < deadline:
        await asyncio.sleep(TICK_SECONDS)


async def finish(
    api: ScriptedApi, client: Redis, texts: dict[str, str], tasks: Sequence[asyncio.Task[None]]
) -> None:
    """Let every request be done, and its client read to the end."""
    api.texts.update(texts)
    for request_id in texts:
        await client.publish(
            f"horde:chat:{request_id}",
            json.dumps({"id": request_id, "event": "done", "generations": 1}),
        )
        await client.delete(f"horde:chat:stream:{request_id}")
    await asyncio.wait_for(asyncio.gather(*tasks), OPENING_SECONDS)


def pick(ordered: Sequence[float], share: float) -> float:
    """The value, in milliseconds, that this share of sorted seconds does not exceed; 0 of none."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 if ordered else 0.0


# Completions


def measure_completions(redis_url: str, count: int, folder: Path) -> CompletionRow:
    """The same jobs through the API alone and through a front before it, in turn."""
    with own_database(os.environ["DATABASE_URL"]) as environment:
        owner = make_account(environment, "bench-owner", "--trusted")
        payer = make_account(environment, "bench-payer", "--kudos", str(FUNDS))
        with running_api(environment, folder / "api.log", processes=1, threads=8) as api:
            native_url = f"http://127.0.0.1:{api.port}/api"
            with running_front(native_url, redis_url, folder / "front.log", streams=10) as (
                port,
                _,
            ):
                parties = Parties(api.port, payer, owner, payer, is_chat=True)
                introduce_workers(parties, 1)
                season_workers(environment["DATABASE_URL"])
                native, through_front = [], []
                for number in range(count + 3):
                    spans = run_native(parties, number), run_front(parties, port, number)
                    if number >= 3:  # the first fill caches
                        native.append(spans[0])
                        through_front.append(spans[1])
    return CompletionRow(count, pick(sorted(native), 0.5), pick(sorted(through_front), 0.5))


def run_native(parties: Parties, number: int) -> float:
    """Seconds from the request to its read reply, by a client that knows at once when there is
    one.
    """
    is_done = threading.Event()

    def ask() -> None:
        client = parties.connect_client(Timings())
        wp_id = parties.request(client, f"native-{number}")
        is_done.wait()
        parties.read(client, wp_id)
        client.close()

    return run_with_worker(parties, ask, is_done)


def run_front(parties: Parties, port: int, number: int) -> float:
    """The same through the front."""
    body = json.dumps(build_chat_request(f"front-{number}")).encode()
    headers = {
        "Authorization": f"Bearer {parties.payer.api_key}",
        "Content-Type": "application/json",
    }
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)

    def ask() -> None:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    return run_with_worker(parties, ask, threading.Event())


def run_with_worker(parties: Parties, ask: Callable[[], None], is_done: threading.Event) -> float:
    """Seconds that a call takes while a worker pops all the time, and sets the event once it has
    submitted.
    """
    worker, spans = parties.connect_worker(Timings()), []

    def measure() -> None:
        started = time.perf_counter()
        ask()
        spans.append(time.perf_counter() - started)

    asking = threading.Thread(target=measure)
    asking.start()
    parties.submit(worker, take_job(parties, worker))
    is_done.set()
    asking.join()
    worker.close()
    return spans[0]


def take_job(parties: Parties, worker: object) -> dict[str, object]:
    """Pop until there is a job."""
    while True:
        job = parties.pop(worker, name_worker(0))  # type: ignore[arg-type]
        if job["id"] is not None:
            return job


HEADER = (
    f"{'streams':>8} {'posts':>8} {'delivered':>9} {'finished':>9} {'core':>6} {'chunk ms':>9}"
    f" {'KiB/stream':>10} {'post to chunk p50/p99':>22}"
)


def format_row(row: StreamRow) -> str:
    """A line of the table."""
    delay = f"{row.delay_ms[0]:.1f}/{row.delay_ms[1]:.1f}"
    return (
        f"{row.streams:8} {row.posts:8} {row.delivered:9} {row.finished:9} {row.core_share:6.1%}"
        f" {row.chunk_cpu_ms:9.3f}"
        f" {row.stream_kib:10.1f} {delay:>22}"
    )


def main(words: Sequence[str]) -> None:
    """Print the table while it is measured."""
    options, is_json = parse_options(words)
    table: TextIO = sys.stderr if is_json else sys.stdout
    redis_url = build_redis_url(os.environ["REDIS_URL"], chat_signal_db)
    rows: list[StreamRow] = []
    completions: CompletionRow | None = None
    with tempfile.TemporaryDirectory() as folder:
        print(HEADER, file=table, flush=True)
        for count in options.streams:
            rows.append(
                asyncio.run(
                    measure_streams(redis_url, count, options.seconds, Path(folder) / "front.log")
                )
            )
            print(format_row(rows[-1]), file=table, flush=True)
        if options.completions:
            completions = measure_completions(redis_url, options.completions, Path(folder))
            print(
                f"completion p50: native {completions.native_ms:.1f} ms, through the front"
                f" {completions.front_ms:.1f} ms, added {completions.added_ms:.1f} ms",
                file=table,
            )
    if is_json:
        figures = {"streams": [dataclasses.asdict(row) for row in rows]}
        if completions is not None:
            figures["completions"] = [
                dataclasses.asdict(completions) | {"added_ms": completions.added_ms}
            ]
        print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
