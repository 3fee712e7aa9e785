# SPDX-License-Identifier: AGPL-3.0-or-later
"""What workers cost the API that ask once a second and get nothing.

Run by hand: `dev.py bench idle_polls`. How to read it: docs/how-to/run-the-benchmarks.md.
"""

import argparse
import asyncio
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

from benchmarks._bodies import build_pop
from benchmarks._counters import read_tree_cpu
from benchmarks._http import read_answer
from benchmarks._stack import Account, Api, make_account, own_database, running_api, season_workers

CHECK_IN_SECONDS = 30  # a run of this length has one check-in of each worker
SHOWN_WORKERS = 2000


@dataclass(frozen=True)
class Row:
    """So many workers that poll once a second, on a connection each. Times are milliseconds."""

    workers: int
    seconds: float
    pops: int
    cpu_ms: float  # of the API for a pop, check-ins included
    core_share: float  # of 2,000 such workers
    repeated_cpu_ms: float  # for a pop between two check-ins
    beat_cpu_ms: float  # for a heartbeat: the least that any call costs here


class Poller:
    """One worker on one connection."""

    def __init__(self, port: int, owner: Account, number: int) -> None:
        body = json.dumps(build_pop(f"idle {number}", is_chat=False)).encode()
        head = (
            f"POST /api/v2/generate/text/pop HTTP/1.1\r\nHost: localhost\r\napikey: {owner.api_key}"
            f"\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.port, self.request, self.pops = port, head.encode() + body, 0

    async def run(self, delay: float, ends_at: float) -> None:
        """Pop once a second, beginning after a delay; opens its connection anew when the API has
        closed it.
        """
        await asyncio.sleep(delay)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while time.monotonic() < ends_at:
            began = time.monotonic()
            try:
                writer.write(self.request)
                job = await read_answer(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                continue
            if job["id"] is not None:
                raise RuntimeError("there was a job")
            self.pops += 1
            await asyncio.sleep(max(began + 1 - time.monotonic(), 0))
        writer.close()


async def poll(pollers: Sequence[Poller], seconds: float) -> int:
    """Let all poll for so long, spread over each second; how many pops were answered."""
    before = sum(poller.pops for poller in pollers)
    ends_at = time.monotonic() + seconds
    await asyncio.gather(
        *(poller.run(number / len(pollers), ends_at) for number, poller in enumerate(pollers))
    )
    return sum(poller.pops for poller in pollers) - before


async def call_in_a_row(api: Api, request: bytes, calls: int) -> float:
    """Milliseconds of the API's processor for each of so many equal calls."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    cpu = 0.0
    for number in range(-calls // 10, calls):
        if number == 0:
            cpu = read_tree_cpu(api.process_id)
        writer.write(request)
        await read_answer(reader)
    cpu = read_tree_cpu(api.process_id) - cpu
    writer.close()
    return cpu / calls * 1000


async def measure(api: Api, owner: Account, url: str, options: argparse.Namespace) -> Row:
    """Make the workers known, then look at a time of polling, then at single calls."""
    workers, calls = options.workers, options.calls
    pollers = [Poller(api.port, owner, number) for number in range(workers)]
    await poll(pollers, 5)
    await asyncio.to_thread(season_workers, url)
    await poll(pollers, 3)
    cpu, started = read_tree_cpu(api.process_id), time.monotonic()
    pops = await poll(pollers, options.seconds)
    cpu, seconds = read_tree_cpu(api.process_id) - cpu, time.monotonic() - started
    beat = b"GET /api/v2/status/heartbeat HTTP/1.1\r\nHost: localhost\r\n\r\n"
    cpu_ms = cpu / pops * 1000
    return Row(
        workers=workers,
        seconds=seconds,
        pops=pops,
        cpu_ms=cpu_ms,
        core_share=cpu_ms / 1000 * SHOWN_WORKERS,
        repeated_cpu_ms=await call_in_a_row(api, pollers[0].request, calls),
        beat_cpu_ms=await call_in_a_row(api, beat, calls),
    )


HEADER = (
    f"{'workers':>8} {'pops':>7} {'pops/s':>7} {'CPU ms':>7} {'repeated':>9} {'beat':>6}"
    f" {'core of 2,000':>14}"
)


def format_row(row: Row) -> str:
    """A line of the table."""
    return (
        f"{row.workers:8} {row.pops:7} {row.pops / row.seconds:7.0f} {row.cpu_ms:7.3f}"
        f" {row.repeated_cpu_ms:9.3f} {row.beat_cpu_ms:6.3f} {row.core_share:14.0%}"
    )


def main(words: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench idle_polls", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--workers", type=int, default=200, help="that poll once a second")
    parser.add_argument("--seconds", type=float, default=CHECK_IN_SECONDS, help="of polling")
    parser.add_argument("--calls", type=int, default=500, help="in a row on one connection")
    parser.add_argument("--quick", action="store_true", help="a few of everything")
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    options = parser.parse_args(words)
    if options.quick:
        options.workers, options.seconds, options.calls = 5, 2, 10
    table: TextIO = sys.stderr if options.json else sys.stdout
    with (
        tempfile.TemporaryDirectory() as folder,
        own_database(os.environ["DATABASE_URL"]) as environment,
    ):
        owner = make_account(environment, "owner", "--trusted")
        with running_api(environment, Path(folder) / "api.log", processes=1, threads=16) as api:
            row = asyncio.run(measure(api, owner, environment["DATABASE_URL"], options))
    print(HEADER, file=table)
    print(format_row(row), file=table, flush=True)
    if options.json:
        print(json.dumps({"idle": [dataclasses.asdict(row)]}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
