# SPDX-License-Identifier: AGPL-3.0-or-later
"""The floor: what a job costs when only what has to last is written, in the same tables, through
the same driver.

Five statements and four commits: insert the request; claim it and insert the job; store the reply
with two postings; read it. No rule is checked and nothing is authenticated, so that no server of
this kind can be faster. The kind of these requests, `floor`, is one that the API does not know.
"""

import os
import threading
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import psycopg2
from psycopg2 import extensions

from benchmarks._bodies import MODEL, PROMPT, REPLY

_INSERT = """
    INSERT INTO waiting_prompts (id, wp_type, prompt, user_id, params, n, jobs, active, queue_class)
    VALUES (%(wp_id)s, 'floor', %(prompt)s, %(user_id)s, '{"max_length": 300}', 1, 1, true, 1)
"""
_CLAIM = """
    WITH claimed AS (
        UPDATE waiting_prompts SET n = n - 1 WHERE id = (
            SELECT id FROM waiting_prompts
            WHERE active AND NOT faulted AND n > 0 AND wp_type = 'floor' AND queue_class = 1
            ORDER BY extra_priority - 5 * date_part('epoch', created) DESC, created, id
            LIMIT 1 FOR UPDATE SKIP LOCKED
        ) RETURNING id
    )
    INSERT INTO processing_gens (id, procgen_type, model, wp_id, worker_id)
    SELECT %(job_id)s, 'floor', %(model)s, id, %(worker_id)s FROM claimed
    RETURNING wp_id
"""
_REPLY = (
    "UPDATE processing_gens SET generation = %(reply)s WHERE id = %(job_id)s AND generation IS NULL"
)
_POST = """
    INSERT INTO kudos_ledger (event_id, entry_type, user_id, account, amount, created, applied)
    VALUES (%(event)s, 'GENERATION', %(user_id)s, 'balance', -10, now(), true),
           (%(event)s, 'GENERATION', %(user_id)s, 'balance', 10, now(), true)
"""
_READ = "SELECT generation FROM processing_gens WHERE wp_id = %(wp_id)s"


@dataclass(frozen=True)
class Floor:
    """Jobs a second, and CPU milliseconds a job of the process that sends the statements."""

    jobs_per_second: float
    client_cpu_ms: float


def measure_floor(database_url: str, *, user_id: int, threads: int, seconds: float) -> Floor:
    """Run jobs on as many connections as given for a while."""
    worker_id = make_worker(database_url, user_id)
    deadline = time.monotonic() + seconds
    counts = [0] * threads

    def work(place: int) -> None:
        connection = psycopg2.connect(database_url)
        try:
            while time.monotonic() < deadline:
                do_job(connection, user_id, worker_id)
                counts[place] += 1
        finally:
            connection.close()

    before, started = os.times(), time.monotonic()
    pool = [threading.Thread(target=work, args=(place,)) for place in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    elapsed, after = time.monotonic() - started, os.times()
    cpu = after.user + after.system - before.user - before.system
    clear_floor(database_url)
    jobs = max(sum(counts), 1)
    return Floor(jobs_per_second=jobs / elapsed, client_cpu_ms=cpu / jobs * 1000)


def do_job(connection: extensions.connection, user_id: int, worker_id: str) -> None:
    """One job from request to read reply."""
    values: dict[str, Any] = {
        "wp_id": str(uuid4()),
        "job_id": str(uuid4()),
        "event": str(uuid4()),
        "user_id": user_id,
        "worker_id": worker_id,
        "prompt": PROMPT * 4,
        "reply": REPLY,
        "model": MODEL,
    }
    with connection, connection.cursor() as cursor:
        cursor.execute(_INSERT, values)
    with connection, connection.cursor() as cursor:
        claimed = None
        while claimed is None:  # all that wait may be in the hands of others for a moment
            cursor.execute(_CLAIM, values)
            claimed = cursor.fetchone()
        values["wp_id"] = claimed[0]
    with connection, connection.cursor() as cursor:
        cursor.execute(_REPLY, values)
        cursor.execute(_POST, values)
    with connection, connection.cursor() as cursor:
        cursor.execute(_READ, values)
        cursor.fetchall()


def make_worker(database_url: str, user_id: int) -> str:
    """A row that jobs refer to, long offline."""
    with psycopg2.connect(database_url) as connection, connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO workers (worker_type, user_id, name, last_check_in)"
            " VALUES ('text_worker', %s, %s, '2000-01-01') RETURNING id",
            (user_id, f"floor {uuid4()}"),
        )
        return str((cursor.fetchone() or ("",))[0])


def clear_floor(database_url: str) -> None:
    """Delete the requests with their jobs."""
    with psycopg2.connect(database_url) as connection, connection.cursor() as cursor:
        cursor.execute("DELETE FROM waiting_prompts WHERE wp_type = 'floor'")
