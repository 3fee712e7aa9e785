# SPDX-License-Identifier: AGPL-3.0-or-later
"""Waiting requests that the workers of a benchmark cannot serve, as many as asked, ahead of
everything else.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import psycopg2
from psycopg2 import sql

from benchmarks._bodies import (
    CLOSELY_TOO_LONG,
    FAR_TOO_LONG,
    OTHER_MODEL,
    build_chat_request,
    build_text_request,
)
from benchmarks._http import Connection

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
CLIENT_AGENT = "backlog:1:benchmark"  # by which the rows are found again


class Backlog(StrEnum):
    """Why the workers cannot serve the requests."""

    NONE = "none"
    MODEL = "model"
    TRUST = "trust"
    LENGTH = "length"
    # In one class with the requests they can serve: told apart row by row.
    CLOSE_LENGTH = "close length"
    DECLARATION = "declaration"
    # Every request a class of its own: one after another, by a model nobody serves.
    MANY_CLASSES = "many classes"


def build_request(backlog: Backlog) -> tuple[str, dict[str, Any]]:
    """Family and body of one such request."""
    match backlog:
        case Backlog.MODEL | Backlog.MANY_CLASSES:
            return "text", build_text_request("backlog", model=OTHER_MODEL)
        case Backlog.TRUST:
            return "text", build_text_request("backlog", trusted_workers=True)
        case Backlog.LENGTH:
            return "text", build_text_request("backlog", max_length=FAR_TOO_LONG)
        case Backlog.CLOSE_LENGTH:
            return "text", build_text_request("backlog", max_length=CLOSELY_TOO_LONG)
        case _:
            return "chat", build_chat_request("backlog", tools=[TOOL])


def fill(database_url: str, client: Connection, backlog: Backlog, depth: int) -> None:
    """Queue `depth` requests: one through the API, so that it is stored as it should be, and copies
    of its rows.
    """
    if depth == 0 or backlog is Backlog.NONE:
        return
    family, body = build_request(backlog)
    wp_id = client.call("fill", "POST", f"/generate/{family}/async", body)["id"]
    with psycopg2.connect(database_url) as connection, connection.cursor() as cursor:
        cursor.execute(
            "UPDATE waiting_prompts SET client_agent = %s, created = created - interval '1 minute'"
            " WHERE id = %s",
            (CLIENT_AGENT, wp_id),
        )
        copy_request(cursor, wp_id, depth - 1, has_own_class=backlog is Backlog.MANY_CLASSES)
    analyze(database_url)


def copy_request(cursor: Any, wp_id: str, count: int, *, has_own_class: bool) -> None:
    """Copies of a request and its models, each born a millisecond before the last."""
    cursor.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'waiting_prompts'::regclass AND attnum >"
        " 0 AND NOT attisdropped"
    )
    changed: Mapping[str, str] = {
        "id": "gen_random_uuid()",
        "created": "original.created - number * interval '1 ms'",
        "queue_class": "original.queue_class + number" if has_own_class else "original.queue_class",
    }
    columns = [name for (name,) in cursor.fetchall()]
    values = [
        (
            sql.SQL(changed[name])
            if name in changed
            else sql.SQL("original.{}").format(sql.Identifier(name))
        )
        for name in columns
    ]
    cursor.execute(
        sql.SQL("""
            WITH copies AS (
                INSERT INTO waiting_prompts ({columns})
                SELECT {values}
                FROM waiting_prompts AS original, generate_series(1, %(count)s) AS number
                WHERE original.id = %(id)s
                RETURNING id
            )
            INSERT INTO wp_models (wp_id, model)
            SELECT copies.id, wp_models.model FROM copies, wp_models WHERE wp_models.wp_id = %(id)s
            """).format(
            columns=sql.SQL(", ").join(map(sql.Identifier, columns)),
            values=sql.SQL(", ").join(values),
        ),
        {"id": wp_id, "count": count},
    )


def clear(database_url: str) -> None:
    """Delete the backlog, and what its rows left in the indexes."""
    with psycopg2.connect(database_url) as connection, connection.cursor() as cursor:
        cursor.execute("DELETE FROM waiting_prompts WHERE client_agent = %s", (CLIENT_AGENT,))
    analyze(database_url)


def analyze(database_url: str) -> None:
    """What autovacuum does within a minute, now: each row of the table is measured in the same
    state.
    """
    connection = psycopg2.connect(database_url)
    try:
        connection.autocommit = True
        connection.cursor().execute("VACUUM (ANALYZE) waiting_prompts, wp_models, processing_gens")
    finally:
        connection.close()
