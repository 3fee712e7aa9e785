# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the owner of an account sees of it at a glance, in two statements whatever it has."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from sqlalchemy import text
from sqlalchemy.orm import Session

from horde.classes.base.worker import SPEED_BASELINE, online_since
from horde.json_text import JsonObject

FLOW_DAYS = 14
# An owner of many workers has a posting a second: the newest of them bound what is read.
MOST_POSTINGS = 20_000
MOST_REQUESTS = 100
MOST_WORKERS = 100
MOST_SHARED_KEYS = 100
MOST_RESERVATIONS = 100
MOST_MESSAGES = 5  # a worker

_FLOW = text(
    """
    SELECT to_char(created, 'YYYY-MM-DD') AS day, entry_type, sum(amount) AS amount
    FROM (
        SELECT created, entry_type, amount
        FROM kudos_ledger
        WHERE user_id = :user_id AND account = 'balance'
        ORDER BY id DESC
        LIMIT :most
    ) AS newest
    WHERE created >= :since AND amount <> 0
    GROUP BY day, entry_type, amount > 0
    """
)

_BELONGINGS = text(
    """
    SELECT
        (SELECT coalesce(sum(amount - consumed), 0) FROM kudos_reservations
         WHERE user_id = :user_id AND active) AS held,
        (SELECT coalesce(json_agg(found), '[]') FROM (
            SELECT business_id AS id, amount - consumed AS amount,
                   extract(epoch FROM :now - created)::int AS age_seconds
            FROM kudos_reservations
            WHERE user_id = :user_id AND active
            ORDER BY id DESC
            LIMIT :most_reservations
        ) AS found) AS reservations,
        (SELECT coalesce(json_agg(found), '[]') FROM (
            SELECT requests.id, requests.is_chat, requests.n AS waiting,
                   extract(epoch FROM :now - requests.created)::int AS age_seconds,
                   (SELECT coalesce(json_agg(model ORDER BY wp_models.id), '[]') FROM wp_models
                    WHERE wp_models.wp_id = requests.id) AS models,
                   (SELECT count(*) FROM processing_gens AS jobs
                    WHERE jobs.wp_id = requests.id AND jobs.generation IS NULL
                      AND NOT jobs.faulted AND NOT jobs.fake) AS processing,
                   (SELECT count(*) FROM processing_gens AS jobs
                    WHERE jobs.wp_id = requests.id AND jobs.generation IS NOT NULL
                      AND NOT jobs.faulted AND NOT jobs.fake) AS finished
            FROM waiting_prompts AS requests
            WHERE requests.user_id = :user_id AND requests.active AND NOT requests.faulted
              AND requests.expiry > :now AND requests.terminal_outcome IS NULL
            ORDER BY requests.created DESC
            LIMIT :most_requests
        ) AS found) AS requests,
        (SELECT coalesce(json_agg(found), '[]') FROM (
            SELECT id, name, maintenance, maintenance_msg, paused, speed, fulfilments, kudos,
                uptime,
                   uncompleted_jobs AS dropped, last_check_in >= :online_since AS is_online,
                   speed <> :unmeasured AS is_measured,
                   (SELECT coalesce(json_agg(model ORDER BY model), '[]') FROM worker_models
                    WHERE worker_models.worker_id = workers.id) AS models,
                   (SELECT coalesce(json_object_agg(reason, faults), '{}') FROM worker_faults
                    WHERE worker_faults.worker_id = workers.id) AS faults,
                   (SELECT coalesce(json_agg(note), '[]') FROM (
                        SELECT messages.id, message, origin, messages.user_id = :user_id AS is_own
                        FROM worker_messages AS messages
                        WHERE expiry > :now AND (messages.worker_id = workers.id
                            OR (messages.worker_id IS NULL
                                AND coalesce(messages.worker_type, workers.worker_type)
                                    = workers.worker_type))
                        ORDER BY messages.created DESC
                        LIMIT :most_messages
                    ) AS note) AS messages
            FROM workers
            WHERE user_id = :user_id
            ORDER BY last_check_in DESC
            LIMIT :most_workers
        ) AS found) AS workers,
        (SELECT coalesce(json_agg(found), '[]') FROM (
            SELECT id, name, kudos, utilized, to_char(expiry, 'YYYY-MM-DD') AS expiry
            FROM user_sharedkeys
            WHERE user_id = :user_id
            ORDER BY created, id
            LIMIT :most_keys
        ) AS found) AS sharedkeys,
        (SELECT json_build_object('username', username, 'contact', contact,
                                  'public_workers', public_workers)
         FROM users WHERE id = :user_id) AS settings
    """
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountOverview:
    """What an account gained and spent by day and reason, and what it has now.

    `days` is {day: {entry type: kudos}}, where what was gained and what was spent for one reason
    are told apart by a `-` before its name.
    """

    held: float
    reservations: list[JsonObject]
    days: dict[str, dict[str, float]]
    requests: list[JsonObject]
    workers: list[JsonObject]
    sharedkeys: list[JsonObject]
    settings: JsonObject


def read_account_overview(session: Session, user_id: int, now: datetime) -> AccountOverview:
    """Read it fresh. At most the newest `MOST_…` of each kind."""
    since = datetime(now.year, now.month, now.day) - timedelta(days=FLOW_DAYS - 1)
    days: dict[str, dict[str, float]] = {}
    flow = session.execute(_FLOW, {"user_id": user_id, "most": MOST_POSTINGS, "since": since})
    for day, reason, amount in flow:
        sign = "-" if amount < 0 else ""
        days.setdefault(day, {})[sign + reason] = float(abs(Decimal(amount)))
    row = session.execute(
        _BELONGINGS,
        {
            "user_id": user_id,
            "now": now,
            "online_since": online_since(now),
            "unmeasured": SPEED_BASELINE,
            "most_requests": MOST_REQUESTS,
            "most_workers": MOST_WORKERS,
            "most_keys": MOST_SHARED_KEYS,
            "most_reservations": MOST_RESERVATIONS,
            "most_messages": MOST_MESSAGES,
        },
    ).one()
    return AccountOverview(
        held=float(row.held),
        reservations=row.reservations,
        days=days,
        requests=row.requests,
        workers=row.workers,
        sharedkeys=row.sharedkeys,
        settings=row.settings,
    )
