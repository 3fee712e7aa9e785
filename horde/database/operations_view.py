# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the operator's dashboard shows of the moment, in two statements whatever there is."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Session

from horde.classes.base.worker import SPEED_BASELINE, online_since
from horde.json_text import JsonObject

MOST_LINES = 100
ELECTION_NAME = "horde election"  # of the connection on which a process stands for leader

# A request that names several models stands in the line of each of them.
_QUEUE = text(
    """
    WITH waiting AS (
        SELECT coalesce(wp_models.model, '') AS model, requests.is_chat, sum(requests.n) AS waiting,
            sum(requests.max_length) AS tokens, min(requests.created) AS oldest
        FROM waiting_prompts AS requests
        LEFT JOIN wp_models ON wp_models.wp_id = requests.id
        WHERE requests.active AND NOT requests.faulted AND requests.n > 0
            AND requests.expiry > :now
        GROUP BY 1, 2
    ), running AS (
        SELECT jobs.model, requests.is_chat, count(*) AS processing
        FROM processing_gens AS jobs
        JOIN waiting_prompts AS requests ON requests.id = jobs.wp_id
        WHERE jobs.generation IS NULL AND jobs.faulted IS false AND NOT jobs.fake
        GROUP BY 1, 2
    ), queue AS (
        SELECT model, is_chat, coalesce(waiting, 0) AS waiting, coalesce(tokens, 0) AS tokens,
            coalesce(processing, 0) AS processing,
            extract(epoch FROM :now - oldest)::int AS oldest_seconds
        FROM waiting FULL JOIN running USING (model, is_chat)
        ORDER BY waiting DESC NULLS LAST, processing DESC NULLS LAST, model
        LIMIT :most
    ), nodes AS (
        SELECT host(activity.client_addr) AS address, activity.pid,
            extract(epoch FROM clock_timestamp() - activity.backend_start)::int AS age_seconds,
            EXISTS (
                SELECT FROM pg_locks
                WHERE pg_locks.pid = activity.pid AND locktype = 'advisory' AND granted
            ) AS is_leader
        FROM pg_stat_activity AS activity
        WHERE datname = current_database() AND application_name = :election_name
        ORDER BY activity.backend_start
        LIMIT :most
    )
    SELECT
        (SELECT coalesce(json_agg(queue), '[]') FROM queue) AS queue,
        (SELECT coalesce(json_agg(nodes), '[]') FROM nodes) AS nodes,
        (SELECT count(*) FROM kudos_ledger WHERE applied IS false) AS unfolded,
        (SELECT coalesce(extract(epoch FROM :now - min(created)), 0) FROM kudos_ledger
         WHERE applied IS false) AS fold_lag_seconds,
        (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()) AS connections,
        current_setting('max_connections')::int AS max_connections,
        pg_database_size(current_database()) AS size_bytes,
        pg_is_in_recovery() AS is_standby
    """
)

_WORKERS = text(
    """
    WITH running AS (
        SELECT worker_id, count(*) AS processing FROM processing_gens
        WHERE generation IS NULL AND faulted IS false AND NOT fake
        GROUP BY worker_id
    ), online AS (
        SELECT workers.id, workers.name, users.username || '#' || users.id AS owner, threads,
            coalesce(processing, 0) AS processing, fulfilments, uncompleted_jobs AS dropped,
            nonconformant_replies AS nonconformant, maintenance, paused, accepts_chat_jobs AS chat,
            nullif(speed, :unmeasured) AS speed, count(*) OVER () AS online_count,
            sum(threads) OVER () AS thread_count,
            count(*) FILTER (WHERE maintenance) OVER () AS maintenance_count,
            count(*) FILTER (WHERE paused) OVER () AS paused_count
        FROM workers
        JOIN users ON users.id = workers.user_id
        LEFT JOIN running ON running.worker_id = workers.id
        WHERE last_check_in >= :online_since
        ORDER BY processing DESC NULLS LAST, workers.uncompleted_jobs DESC, workers.name
        LIMIT :most
    )
    SELECT online.*,
        (SELECT coalesce(json_agg(model ORDER BY worker_models.id), '[]') FROM worker_models
         WHERE worker_models.worker_id = online.id) AS models,
        (SELECT coalesce(json_object_agg(reason, faults), '{}') FROM worker_faults
         WHERE worker_faults.worker_id = online.id) AS faults
    FROM online
    """
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationsView:
    """The moment: lines of JSON as they are shown, and what the database says of itself."""

    queue: list[JsonObject]
    nodes: list[JsonObject]  # processes of the API, the leader marked
    workers: list[JsonObject]  # the busiest
    worker_counts: dict[str, int]
    unfolded: int
    fold_lag_seconds: float
    database: JsonObject


def read_operations_view(session: Session, now: datetime) -> OperationsView:
    """Read it fresh. At most `MOST_LINES` of each kind."""
    row = session.execute(
        _QUEUE, {"now": now, "most": MOST_LINES, "election_name": ELECTION_NAME}
    ).one()
    found = session.execute(
        _WORKERS,
        {"online_since": online_since(now), "most": MOST_LINES, "unmeasured": SPEED_BASELINE},
    )
    workers = [dict(worker._mapping) | {"id": str(worker.id)} for worker in found]
    counts = {
        name: int(workers[0][f"{name}_count"]) if workers else 0
        for name in ("online", "thread", "maintenance", "paused")
    }
    for worker in workers:
        for name in counts:
            worker.pop(f"{name}_count")
    return OperationsView(
        queue=row.queue,
        nodes=row.nodes,
        workers=workers,
        worker_counts=counts,
        unfolded=row.unfolded,
        fold_lag_seconds=float(row.fold_lag_seconds),
        database={
            "connections": row.connections,
            "max_connections": row.max_connections,
            "size_bytes": row.size_bytes,
            "is_standby": row.is_standby,
        },
    )
