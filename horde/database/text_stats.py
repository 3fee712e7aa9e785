# SPDX-License-Identifier: AGPL-3.0-or-later
"""Statistics of text, kept by increments: no read ever looks at the recorded jobs themselves.

What ended waits in a queue that the database fills as a job is recorded. A periodic job takes it
from there and adds it to sums over spans of time, in one transaction, so each job counts once
whatever is interrupted. A window is read as the spans that overlap it.
Source: docs/reference/status.md, "Statistics".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, text
from sqlalchemy.orm import Session

from horde.classes.base.text_stats import ALL_TIME, TextStatModel, TextStatTotal

MINUTE, HOUR, DAY, MONTH = (
    timedelta(minutes=1),
    timedelta(hours=1),
    timedelta(days=1),
    timedelta(days=30),
)
# The span a window is read in: as coarse as its edge may be, so that few rows are read.
TOTAL_SPANS = {MINUTE: 5, HOUR: 60, DAY: 3600, MONTH: 3600}
MODEL_SPANS = {DAY: 3600, MONTH: 86400}
KEPT = {5: timedelta(minutes=10), 60: 3 * HOUR, 3600: MONTH + DAY, 86400: MONTH + 2 * DAY}

_ADD = """
    , spans (span_seconds, kept_from) AS (
        SELECT * FROM unnest(CAST(:spans AS integer[]), CAST(:kept_from AS timestamp[]))
    ), parts AS (
        SELECT spans.span_seconds, taken.model, taken.tokens,
            CASE WHEN spans.span_seconds = 0 THEN timestamp 'epoch'
                ELSE date_bin(make_interval(secs => spans.span_seconds), taken.finished, 'epoch')
            END AS start
        FROM taken JOIN spans ON taken.finished >= spans.kept_from
    ), totals AS (
        INSERT INTO text_stat_totals AS stored (span_seconds, start, requests, tokens)
        SELECT span_seconds, start, count(*), sum(tokens) FROM parts
        GROUP BY span_seconds, start ORDER BY span_seconds, start
        ON CONFLICT (span_seconds, start) DO UPDATE
        SET requests = stored.requests + excluded.requests, tokens = stored.tokens + excluded.tokens
    ), models AS (
        INSERT INTO text_stat_models AS stored (span_seconds, start, model, requests)
        SELECT span_seconds, start, model, count(*) FROM parts
        WHERE span_seconds = ANY(CAST(:model_spans AS integer[]))
        GROUP BY span_seconds, start, model ORDER BY span_seconds, start, model
        ON CONFLICT (span_seconds, start, model) DO UPDATE
        SET requests = stored.requests + excluded.requests
    )
    SELECT count(*) FROM taken
"""

_ADD_QUEUED = text(
    """
    WITH taken AS (
        DELETE FROM text_stat_queue
        WHERE id IN (
            SELECT id FROM text_stat_queue ORDER BY id LIMIT :batch FOR UPDATE SKIP LOCKED
        )
        RETURNING finished, model, tokens
    )"""
    + _ADD
)

# The range is moved by whoever adds it up, so of two at once the second waits and takes the next.
_TAKE_BACKFILL = text(
    """
    UPDATE text_stat_backfill SET next_id = least(next_id + :batch, last_id + 1)
    WHERE next_id <= last_id
    RETURNING next_id
    """
)
_ADD_RECORDED = text(
    """
    WITH taken AS (
        SELECT finished, model, max_length AS tokens FROM text_gen_stats
        WHERE id >= :first_id AND id < :next_id
    )"""
    + _ADD
)


@dataclass(frozen=True, slots=True)
class PeriodSums:
    """Jobs that ended within a period, and the tokens they were asked for."""

    requests: int = 0
    tokens: int = 0


def add_queued_stats(session: Session, now: datetime, *, batch: int) -> int:
    """Add up to `batch` queued jobs to the sums; how many there were."""
    return int(session.scalar(_ADD_QUEUED, {"batch": batch, **_list_spans(now)}) or 0)


def add_recorded_stats(session: Session, now: datetime, *, batch: int) -> bool:
    """Add a batch of the jobs that were recorded before the queue existed; False when all are."""
    lower_bound = text("SELECT next_id FROM text_stat_backfill WHERE next_id <= last_id FOR UPDATE")
    first_id = session.scalar(lower_bound)
    if first_id is None:
        return False
    next_id = session.scalar(_TAKE_BACKFILL, {"batch": batch})
    session.execute(_ADD_RECORDED, {"first_id": first_id, "next_id": next_id, **_list_spans(now)})
    return True


def prune_stat_spans(session: Session, now: datetime) -> None:
    """Drop the sums of spans that no window reaches any more."""
    for table in (TextStatTotal, TextStatModel):
        outdated = or_(
            *(
                and_(table.span_seconds == span, table.start < now - kept)
                for span, kept in KEPT.items()
            )
        )
        session.execute(delete(table).where(outdated).execution_options(synchronize_session=False))


def get_text_totals(session: Session, now: datetime) -> dict[str, PeriodSums]:
    """The sums of the last minute, hour, day and 30 days and of all time. One statement."""
    windows = {"minute": MINUTE, "hour": HOUR, "day": DAY, "month": MONTH}
    conditions = {
        name: _overlaps(TextStatTotal, window, TOTAL_SPANS[window], now)
        for name, window in windows.items()
    } | {"total": TextStatTotal.span_seconds == ALL_TIME}
    sums = [
        func.coalesce(func.sum(column).filter(condition), 0)
        for condition in conditions.values()
        for column in (TextStatTotal.requests, TextStatTotal.tokens)
    ]
    row = [int(value) for value in session.execute(select(*sums)).one()]
    return {
        name: PeriodSums(row[2 * number], row[2 * number + 1])
        for number, name in enumerate(conditions)
    }


def get_text_model_counts(session: Session, now: datetime) -> dict[str, Mapping[str, int]]:
    """Ended jobs by model in the last day, in 30 days and in all time, each in order of the name.
    One statement.
    """
    conditions = {
        "day": _overlaps(TextStatModel, DAY, MODEL_SPANS[DAY], now),
        "month": _overlaps(TextStatModel, MONTH, MODEL_SPANS[MONTH], now),
        "total": TextStatModel.span_seconds == ALL_TIME,
    }
    counts = [
        func.sum(TextStatModel.requests).filter(condition).label(name)
        for name, condition in conditions.items()
    ]
    statement = (
        select(TextStatModel.model, *counts)
        .where(or_(*conditions.values()))
        .group_by(TextStatModel.model)
        .order_by(TextStatModel.model)
    )
    rows = session.execute(statement).all()
    return {
        name: {row.model: int(count) for row in rows if (count := row._mapping[name]) is not None}
        for name in conditions
    }


def _overlaps(
    table: type[TextStatTotal] | type[TextStatModel],
    window: timedelta,
    span_seconds: int,
    now: datetime,
) -> ColumnElement[bool]:
    """Spans that overlap a window; its oldest one counts as a whole."""
    return and_(
        table.span_seconds == span_seconds,
        table.start > now - window - timedelta(seconds=span_seconds),
    )


def _list_spans(now: datetime) -> dict[str, object]:
    """What each span still takes: a job that ended before is added to all time alone."""
    return {
        "spans": [ALL_TIME, *KEPT],
        "kept_from": [datetime.min, *(now - kept for kept in KEPT.values())],
        "model_spans": [ALL_TIME, *MODEL_SPANS.values()],
    }
