# SPDX-License-Identifier: AGPL-3.0-or-later
"""What each form of the front adds over chat completions: to a call that does not stream, and to
the chunks of open streams.

The API answers from memory, so that what is left is the front's. Run by hand: `dev.py bench
front_forms`. How to read it: docs/how-to/run-the-benchmarks.md.
"""

import argparse
import asyncio
import dataclasses
import http.client
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from benchmarks._counters import read_tree_cpu
from benchmarks._front import (
    CHAT,
    MESSAGES,
    RESPONSES,
    FormOfStreams,
    ScriptedApi,
    running_front,
)
from benchmarks.front_streams import measure_streams, pick
from horde.redis_ctrl import chat_signal_db
from horde.setting_kinds import build_redis_url

FORMS = (CHAT, MESSAGES, RESPONSES)
WARM_UP_CALLS = 20
KEY = "0000000000"


@dataclass(frozen=True)
class FormRow:
    """One form: p50 and CPU of a call, and CPU of a chunk, in milliseconds. `share` is the chunk's
    cost against that of chat completions.
    """

    form: str
    call_ms: float
    added_ms: float
    call_cpu_ms: float
    chunk_cpu_ms: float
    share: float


class InstantApi(ScriptedApi):
    """Every request is done as soon as it is asked for."""

    def _answer(self, method: str, path: str) -> tuple[int, dict[str, Any]]:
        if method != "POST":
            return super()._answer(method, path)
        request_id = str(uuid4())
        self.texts[request_id] = "Blue, like the sky."
        return 202, {"id": request_id, "kudos": 10}


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """`calls`, `streams`, `seconds` and whether JSON is wanted."""
    parser = argparse.ArgumentParser(
        prog="dev.py bench front_forms", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--calls", type=int, default=400, help="of each form, in turn")
    parser.add_argument("--streams", type=int, default=200, help="open at once, of each form")
    parser.add_argument("--seconds", type=int, default=10, help="of posts, one a second")
    parser.add_argument("--rounds", type=int, default=3, help="of streams; the least counts")
    parser.add_argument("--quick", action="store_true", help="a few, to see that it runs")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    options = parser.parse_args(words)
    if options.quick:
        options.calls, options.streams, options.seconds, options.rounds = 3, 3, 1, 1
    return options


async def measure_calls(redis_url: str, count: int, log: Path) -> dict[str, tuple[float, float]]:
    """p50 and CPU of a call by form, in milliseconds; the forms take turns."""
    async with InstantApi().running() as api:
        native_url = f"http://127.0.0.1:{api.port}/api"
        with running_front(native_url, redis_url, log, streams=10) as (port, process_id):
            return await asyncio.to_thread(call_in_turn, port, process_id, count)


def call_in_turn(port: int, process_id: int, count: int) -> dict[str, tuple[float, float]]:
    """As `measure_calls`, on a front that runs."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for form in FORMS:
        for _ in range(WARM_UP_CALLS):
            call(connection, form)
    spans: dict[str, list[float]] = {form.name: [] for form in FORMS}
    for _ in range(count):
        for form in FORMS:
            spans[form.name].append(call(connection, form))
    costs = {}
    for form in FORMS:  # in one go each, since the clock of a process is coarse
        cpu = read_tree_cpu(process_id)
        for _ in range(count):
            call(connection, form)
        costs[form.name] = (read_tree_cpu(process_id) - cpu) / count * 1000
    connection.close()
    return {name: (pick(sorted(taken), 0.5), costs[name]) for name, taken in spans.items()}


def call(connection: http.client.HTTPConnection, form: FormOfStreams) -> float:
    """Seconds of one call."""
    body = json.dumps(form.build_body(is_stream=False))
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    started = time.perf_counter()
    connection.request("POST", form.path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    taken = time.perf_counter() - started
    if answer.status != 200:
        raise RuntimeError(data.decode())
    return taken


def measure(redis_url: str, options: argparse.Namespace, folder: Path) -> list[FormRow]:
    """A row for each form."""
    log = folder / "front.log"
    calls = asyncio.run(measure_calls(redis_url, options.calls, log))
    chunks: dict[str, float] = {}
    for _ in range(options.rounds):
        for form in FORMS:
            row = asyncio.run(
                measure_streams(redis_url, options.streams, options.seconds, log, form)
            )
            if row.delivered != row.posts or row.finished != row.streams:
                raise RuntimeError(f"streams of {form.name} are incomplete: {row}")
            chunks[form.name] = min(row.chunk_cpu_ms, chunks.get(form.name, row.chunk_cpu_ms))
    base_ms, base_chunk_ms = calls[CHAT.name][0], chunks[CHAT.name]
    return [
        FormRow(
            form=form.name,
            call_ms=calls[form.name][0],
            added_ms=calls[form.name][0] - base_ms,
            call_cpu_ms=calls[form.name][1],
            chunk_cpu_ms=chunks[form.name],
            share=chunks[form.name] / base_chunk_ms if base_chunk_ms else 0.0,
        )
        for form in FORMS
    ]


HEADER = f"{'form':>10} {'call ms':>9} {'added ms':>9} {'CPU ms':>8} {'chunk ms':>9} {'share':>7}"


def format_row(row: FormRow) -> str:
    """A line of the table."""
    return (
        f"{row.form:>10} {row.call_ms:9.3f} {row.added_ms:9.3f} {row.call_cpu_ms:8.3f}"
        f" {row.chunk_cpu_ms:9.4f} {row.share:7.1%}"
    )


def main(words: Sequence[str]) -> None:
    """Print the table, or the rows as JSON."""
    options = parse_options(words)
    redis_url = build_redis_url(os.environ["REDIS_URL"], chat_signal_db)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(redis_url, options, Path(folder))
    table: TextIO = sys.stderr if options.json else sys.stdout
    print(HEADER, *map(format_row, rows), sep="\n", file=table)
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
