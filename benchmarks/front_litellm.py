# SPDX-License-Identifier: AGPL-3.0-or-later
"""Open streams through the front and through LiteLLM's proxy, with the same script behind both, one
after the other.

Run by hand: `dev.py bench front_litellm`; it installs the proxy into an environment of its own. How
to read it: docs/how-to/run-the-benchmarks.md.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from redis.asyncio import Redis

from benchmarks import front_streams
from benchmarks._bodies import MODEL
from benchmarks._counters import read_tree_cpu
from benchmarks._front import ScriptedApi, StreamClient, running_front, serving
from benchmarks._stack import STOP_SECONDS
from devtools import clients
from devtools.bootstrap import SetupError
from devtools.processes import find_free_ports
from horde.redis_ctrl import chat_signal_db
from horde.setting_kinds import build_redis_url

FRONT, LITELLM = "front", "LiteLLM"
START_SECONDS = 180  # without bytecode on a busy machine; an idle one needs fifteen
OPENING_SECONDS = 60
OPENED_AT_ONCE = 20
TICK_SECONDS = 0.01  # posts are spread over each second in steps of this
WARM_UP_STREAMS = 20

# As light as it can be made: one process, no database, no keys, no callbacks, nothing counted.
PROXY_ENVIRONMENT = {
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "AIOHTTP_CONNECTOR_LIMIT": "10000",
    "AIOHTTP_CONNECTOR_LIMIT_PER_HOST": "10000",
}

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True)
class Row:
    """One server with a number of open streams, each with a chunk a second."""

    server: str
    streams: int
    chunks: int
    delivered: int
    finished: int
    core_share: float  # of the server's process
    streams_per_core: float
    chunk_ms: float  # CPU of a chunk
    # p50 and p99 from the moment the script says a chunk to its arrival at the client.
    delay_ms: tuple[float, float]


@dataclass
class ScriptedBackend:
    """An OpenAI-compatible backend whose streams say what they are told."""

    # Of the open streams, in their order.
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    port: int = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedBackend"]:
        """Serve on loopback."""
        async with serving(self._serve) as self.port:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                if not head.startswith("post"):  # the proxy looks around now and then
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                length = next(
                    int(line[15:])
                    for line in head.split("\r\n")
                    if line.startswith("content-length:")
                )
                await reader.readexactly(length)
                writer.write(STREAM_HEAD)
                self.writers.append(writer)
        writer.close()

    def say(self, writer: asyncio.StreamWriter, text: str) -> None:
        """A chunk of content."""
        self._send(writer, {"content": text}, None)

    def end(self) -> None:
        """Finish every open stream."""
        for writer in self.writers:
            self._send(writer, {}, "stop")
            write_chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
        self.writers.clear()

    def _send(
        self, writer: asyncio.StreamWriter, delta: dict[str, str], finish_reason: str | None
    ) -> None:
        chunk = {
            "id": "chatcmpl-scripted",
            "object": "chat.completion.chunk",
            "created": 1793463889,
            "model": "scripted",
            "choices": [
                {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
            ],
        }
        write_chunk(writer, f"data: {json.dumps(chunk)}\n\n".encode())


def write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """One piece of a chunked body."""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextlib.contextmanager
def running_litellm(command: Path, backend_port: int, folder: Path) -> Iterator[tuple[int, int]]:
    """LiteLLM's proxy before a backend. Yields its port and process id; raises RuntimeError when it
    does not start.
    """
    port, log, settings = find_free_ports(1)[0], folder / "litellm.log", folder / "litellm.json"
    model = {
        "model": "openai/scripted",
        "api_base": f"http://127.0.0.1:{backend_port}/v1",
        "api_key": "none",
    }
    # JSON is YAML too.
    settings.write_text(
        json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": model}]})
    )
    words = [
        str(command),
        "--config",
        str(settings),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--num_workers",
        "1",
    ]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DATABASE_URL", "REDIS_URL")
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, "--telemetry", "False"],
            cwd=folder,
            env=environment | PROXY_ENVIRONMENT,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_alive(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"LiteLLM's proxy does not start\n{log.read_text(errors='replace')[-4000:]}"
                )
            time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_alive(port: int) -> bool:
    """Whether the proxy says so."""
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
    except (OSError, urllib.error.URLError):
        return False
    return True


async def measure_front(redis_url: str, count: int, seconds: int, folder: Path) -> Row:
    """The streams through a new front; a post is what a worker's post becomes, an entry on
    Redis.
    """
    async with ScriptedApi().running() as api:
        with running_front(
            f"http://127.0.0.1:{api.port}/api", redis_url, folder / "front.log", streams=count
        ) as (
            port,
            process_id,
        ):
            client = Redis.from_url(redis_url)
            try:
                await front_streams.run_streams(api, client, port, WARM_UP_STREAMS, 1, process_id)
                row = await front_streams.run_streams(api, client, port, count, seconds, process_id)
            finally:
                await client.aclose()
    return Row(
        server=FRONT,
        streams=count,
        chunks=row.posts,
        delivered=row.delivered,
        finished=row.finished,
        core_share=row.core_share,
        streams_per_core=count / row.core_share if row.core_share else 0.0,
        chunk_ms=row.chunk_cpu_ms,
        delay_ms=row.delay_ms,
    )


async def measure_litellm(command: Path, count: int, seconds: int, folder: Path) -> Row:
    """The streams through a new proxy; a post is a chunk of the backend's stream."""
    async with ScriptedBackend().running() as backend:
        with running_litellm(command, backend.port, folder) as (port, process_id):
            await run_proxied_streams(backend, port, WARM_UP_STREAMS, 1, process_id)
            return await run_proxied_streams(backend, port, count, seconds, process_id)


async def run_proxied_streams(
    backend: ScriptedBackend, port: int, count: int, seconds: int, process_id: int
) -> Row:
    """One load. The first chunk opens each stream, outside of what is measured."""
    readers = [StreamClient(port) for _ in range(count)]
    opened = [asyncio.Event() for _ in readers]
    tasks = []
    async with asyncio.timeout(OPENING_SECONDS + count):
        for start in range(0, count, OPENED_AT_ONCE):
            part = slice(start, start + OPENED_AT_ONCE)
            tasks += [
                asyncio.create_task(reader.run(event))
                for reader, event in zip(readers[part], opened[part], strict=True)
            ]
            while len(backend.writers) < min(start + OPENED_AT_ONCE, count):
                await asyncio.sleep(TICK_SECONDS)
            for writer in backend.writers[part]:
                backend.say(writer, stamp())
        for event in opened:
            await event.wait()
    await asyncio.sleep(1)
    for reader in readers:
        reader.delays.clear()
    cpu, started = read_tree_cpu(process_id), time.monotonic()
    await say_each_second(backend, seconds)
    elapsed = time.monotonic() - started
    await front_streams.wait_for_chunks(readers, count * seconds)
    cpu = read_tree_cpu(process_id) - cpu  # with what it was late with
    backend.end()
    await asyncio.wait_for(asyncio.gather(*tasks), OPENING_SECONDS)
    delays = sorted(delay for reader in readers for delay in reader.delays)
    return Row(
        server=LITELLM,
        streams=count,
        chunks=count * seconds,
        delivered=len(delays),
        finished=sum(reader.has_finished for reader in readers),
        core_share=cpu / elapsed,
        streams_per_core=count * elapsed / cpu if cpu else 0.0,
        chunk_ms=cpu / (count * seconds) * 1000,
        delay_ms=(front_streams.pick(delays, 0.5), front_streams.pick(delays, 0.99)),
    )


async def say_each_second(backend: ScriptedBackend, seconds: int) -> None:
    """A chunk in each stream in each second, spread evenly."""
    steps = round(1 / TICK_SECONDS)
    started = time.monotonic()
    for step in range(seconds * steps):
        await asyncio.sleep(max(started + step * TICK_SECONDS - time.monotonic(), 0))
        for writer in backend.writers[step % steps :: steps]:
            backend.say(writer, stamp())


def stamp() -> str:
    """A text that names this moment, as `StreamClient` reads it."""
    return f"@{time.perf_counter():.6f}"


HEADER = (
    f"{'server':8} {'streams':>8} {'chunks':>8} {'delivered':>9} {'finished':>9} {'core':>6}"
    f" {'streams/core':>13} {'chunk ms':>11} {'added ms p50/p99':>18}"
)


def format_row(row: Row) -> str:
    """A line of the table."""
    delay = f"{row.delay_ms[0]:.1f}/{row.delay_ms[1]:.1f}"
    return (
        f"{row.server:8} {row.streams:8} {row.chunks:8} {row.delivered:9} {row.finished:9}"
        f" {row.core_share:6.1%} {row.streams_per_core:13.0f}"
        f" {row.chunk_ms:11.3f} {delay:>18}"
    )


def compare(rows: Sequence[Row]) -> str:
    """What the rows come to: the most streams a core of each server, and its delay at the load that
    both had first.
    """
    best = {
        server: max(row.streams_per_core for row in rows if row.server == server)
        for server in (FRONT, LITELLM)
    }
    first = {
        server: next(row for row in rows if row.server == server) for server in (FRONT, LITELLM)
    }
    times = best[FRONT] / best[LITELLM] if best[LITELLM] else 0.0
    return (
        f"streams a core: front {best[FRONT]:.0f}, LiteLLM {best[LITELLM]:.0f}, {times:.1f} times"
        f" as many; added at {first[FRONT].streams} streams: front {first[FRONT].delay_ms[0]:.1f}"
        f" ms, LiteLLM {first[LITELLM].delay_ms[0]:.1f} ms"
    )


def parse_numbers(text: str) -> list[int]:
    """Numbers with commas between them; none of an empty text."""
    return [int(word) for word in text.split(",") if word]


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench front_litellm", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--streams",
        type=parse_numbers,
        default=[100, 200],
        metavar="N,N",
        help="open at once through each",
    )
    parser.add_argument(
        "--front-streams",
        type=parse_numbers,
        default=[1000],
        metavar="N,N",
        help="through the front alone",
    )
    parser.add_argument(
        "--seconds", type=int, default=20, help="of chunks, one a second in each stream"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="the figures as JSON on standard output, the table on standard error",
    )
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Print the table while it is measured. Returns 2 when LiteLLM cannot be installed."""
    options = parse_options(words)
    table: TextIO = sys.stderr if options.json else sys.stdout
    try:
        command = clients.require_litellm_proxy()
    except SetupError as error:
        print(f"front_litellm: {error}", file=sys.stderr)
        return 2
    redis_url = build_redis_url(os.environ["REDIS_URL"], chat_signal_db)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(format_row(row), file=table, flush=True)

    print(HEADER, file=table, flush=True)
    with tempfile.TemporaryDirectory() as name:
        for count in options.streams:
            add(asyncio.run(measure_front(redis_url, count, options.seconds, Path(name))))
            add(asyncio.run(measure_litellm(command, count, options.seconds, Path(name))))
        for count in options.front_streams:
            add(asyncio.run(measure_front(redis_url, count, options.seconds, Path(name))))
    print(compare(rows), file=table, flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
