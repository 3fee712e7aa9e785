# SPDX-License-Identifier: AGPL-3.0-or-later
"""Speed samples: what workers are judged by, and how long each kind is kept. Submits only append
them.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Float, case, cast, delete, exists, func, or_, select, update
from sqlalchemy.orm import Session

from horde import clock
from horde.classes.base.stats import FulfillmentPerformance, ModelPerformance
from horde.classes.base.worker import SPEED_BASELINE, WorkerPerformance, online_since
from horde.classes.kobold.pricing import MINIMUM_REPLY_TOKENS
from horde.classes.kobold.worker import UNMEASURED_TEXT_WORKER_TOKENS_PER_SECOND, TextWorker
from horde.database.functions import note_text_workers_changed
from horde.database.stats import FULFILLMENTS_KEPT, MODEL_SAMPLES_KEPT
from horde.db import after_commit, retry_deadlocks, run_transaction, transaction

SPEED_SAMPLES = 20
SPEED_REFRESH_AGE = timedelta(seconds=180)  # workers without a newer sample keep their speed
# Fewer tell how long the model took to load, or to read a prompt.
MEASURED_REPLIES = 3
MEASURED_TOKENS = 300
SLOWNESS_KEPT = timedelta(days=1)
WORKERS_A_BATCH = 100
MEASURED_BASELINE = 0.99  # a rate of exactly the baseline, which means unmeasured


def refresh_worker_speeds() -> int:
    """Store the speed of each worker that delivered lately, and drop samples past their use.

    Each batch of workers is a transaction of its own: their rows are wanted by pops. How many
    workers it went through.
    """
    now = clock.utcnow()
    with transaction() as session:
        statement = (
            select(WorkerPerformance.worker_id)
            .where(WorkerPerformance.created >= now - SPEED_REFRESH_AGE)
            .distinct()
            .order_by(WorkerPerformance.worker_id)
        )
        worker_ids = list(session.scalars(statement))
        slow_ids = _list_long_slow_workers(session, now)
    for start in range(0, len(worker_ids), WORKERS_A_BATCH):
        retry_deadlocks(partial(_refresh_speeds, worker_ids[start : start + WORKERS_A_BATCH]))
    for worker_id in slow_ids:
        run_transaction(partial(_forget_slowness, worker_id=worker_id))
    return len(worker_ids)


def _list_long_slow_workers(session: Session, now: datetime) -> list[UUID]:
    """Online workers that were measured slow and have delivered nothing for a day.

    The gate may keep every job from them that would show them faster, as once another program no
    longer shares their card.
    """
    recent = exists().where(
        WorkerPerformance.worker_id == TextWorker.id,
        WorkerPerformance.created >= now - SLOWNESS_KEPT,
    )
    statement = select(TextWorker.id).where(
        TextWorker.last_check_in >= online_since(now),
        TextWorker.speed != SPEED_BASELINE,
        TextWorker.speed < UNMEASURED_TEXT_WORKER_TOKENS_PER_SECOND,
        ~TextWorker.speed_is_provisional,
        ~recent,
    )
    return list(session.scalars(statement))


def _forget_slowness(session: Session, worker_id: UUID) -> None:
    session.execute(
        update(TextWorker)
        .where(TextWorker.id == worker_id)
        .values(speed_is_provisional=True)
        .execution_options(synchronize_session=False)
    )
    after_commit(session, note_text_workers_changed)


def _refresh_speeds(worker_ids: Sequence[UUID]) -> None:
    ranked = (
        select(
            WorkerPerformance.id,
            WorkerPerformance.worker_id,
            WorkerPerformance.performance,
            WorkerPerformance.generated_tokens,
            WorkerPerformance.seconds,
            func.row_number()
            .over(partition_by=WorkerPerformance.worker_id, order_by=WorkerPerformance.id.desc())
            .label("place"),
        )
        .where(WorkerPerformance.worker_id.in_(worker_ids))
        .subquery()
    )
    took_time = func.coalesce(ranked.c.seconds, 1.0) > 0  # a reply in no time measures nothing
    speeds = (
        select(
            ranked.c.worker_id,
            build_stored_speed(_build_rate(ranked.c)).label("speed"),
            _build_is_provisional(ranked.c).label("is_provisional"),
        )
        .where(ranked.c.place <= SPEED_SAMPLES, took_time)
        .group_by(ranked.c.worker_id)
        .subquery()
    )
    with transaction() as session:
        # In the order of every other writer of several workers, so that none waits in a circle.
        session.execute(
            select(TextWorker.id)
            .where(TextWorker.id.in_(worker_ids))
            .order_by(TextWorker.id)
            .with_for_update(key_share=True)
        )
        changed = session.execute(
            update(TextWorker)
            .where(
                TextWorker.id == speeds.c.worker_id,
                or_(
                    TextWorker.speed != speeds.c.speed,
                    TextWorker.speed_is_provisional != speeds.c.is_provisional,
                ),
            )
            .values(speed=speeds.c.speed, speed_is_provisional=speeds.c.is_provisional)
            .returning(TextWorker.id)
            .execution_options(synchronize_session=False)
        )
        if changed.first() is not None:
            after_commit(session, note_text_workers_changed)
        old = select(ranked.c.id).where(ranked.c.place > SPEED_SAMPLES)
        session.execute(
            delete(WorkerPerformance)
            .where(WorkerPerformance.id.in_(old))
            .execution_options(synchronize_session=False)
        )


def _build_rate(sample: Any) -> ColumnElement[float]:
    """Tokens over seconds of samples together, so that a long reply weighs more than a short one.

    A reply counts for the least it is paid for. A sample of an older server has a rate alone, which
    counts as one second of it.
    """
    tokens = case(
        (sample.seconds.is_(None), sample.performance),
        else_=func.greatest(sample.generated_tokens, MINIMUM_REPLY_TOKENS),
    )
    seconds = func.coalesce(sample.seconds, 1.0)
    return cast(func.sum(tokens) / func.sum(seconds), Float)


def _build_is_provisional(sample: Any) -> ColumnElement[bool]:
    """Whether samples are too few, or too short together, to keep jobs from their worker by."""
    return or_(
        func.count(sample.generated_tokens) < MEASURED_REPLIES,
        func.coalesce(func.sum(sample.generated_tokens), 0) < MEASURED_TOKENS,
    )


def build_stored_speed(rate: ColumnElement[float]) -> ColumnElement[float]:
    """What is stored for a rate: it divides, so zero is the baseline, and the baseline itself means
    unmeasured.
    """
    return case(
        (func.coalesce(rate, 0) <= 0, SPEED_BASELINE),
        (rate == SPEED_BASELINE, MEASURED_BASELINE),
        else_=rate,
    )


def prune_samples() -> None:
    """Drop samples past their use."""
    now = clock.utcnow()
    for sample, kept in (
        (FulfillmentPerformance, FULFILLMENTS_KEPT),
        (ModelPerformance, MODEL_SAMPLES_KEPT),
    ):
        run_transaction(partial(_delete_samples_before, sample=sample, moment=now - kept))


def _delete_samples_before(
    session: Session,
    sample: type[FulfillmentPerformance | ModelPerformance],
    moment: datetime,
) -> None:
    session.execute(
        delete(sample).where(sample.created < moment).execution_options(synchronize_session=False)
    )
