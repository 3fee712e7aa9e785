# SPDX-License-Identifier: AGPL-3.0-or-later
"""Speed samples: what workers are judged by, and how long each kind is kept. Submits only append
them.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

from sqlalchemy import ColumnElement, case, delete, func, select, update
from sqlalchemy.orm import Session

from horde import clock
from horde.classes.base.stats import FulfillmentPerformance, ModelPerformance
from horde.classes.base.worker import SPEED_BASELINE, WorkerPerformance
from horde.classes.kobold.worker import TextWorker
from horde.database.stats import FULFILLMENTS_KEPT, MODEL_SAMPLES_KEPT
from horde.db import retry_deadlocks, run_transaction, transaction

SPEED_SAMPLES = 20
SPEED_REFRESH_AGE = timedelta(seconds=180)  # workers without a newer sample keep their speed
WORKERS_A_BATCH = 100
MEASURED_BASELINE = 0.99  # a mean of exactly the baseline, which means unmeasured


def refresh_worker_speeds() -> int:
    """Store the mean of the newest samples of each worker that delivered lately, and drop older
    samples.

    Each batch of workers is a transaction of its own: their rows are wanted by pops. How many
    workers it went through.
    """
    with transaction() as session:
        statement = (
            select(WorkerPerformance.worker_id)
            .where(WorkerPerformance.created >= clock.utcnow() - SPEED_REFRESH_AGE)
            .distinct()
            .order_by(WorkerPerformance.worker_id)
        )
        worker_ids = list(session.scalars(statement))
    for start in range(0, len(worker_ids), WORKERS_A_BATCH):
        retry_deadlocks(partial(_refresh_speeds, worker_ids[start : start + WORKERS_A_BATCH]))
    return len(worker_ids)


def _refresh_speeds(worker_ids: Sequence[UUID]) -> None:
    ranked = (
        select(
            WorkerPerformance.id,
            WorkerPerformance.worker_id,
            WorkerPerformance.performance,
            func.row_number()
            .over(partition_by=WorkerPerformance.worker_id, order_by=WorkerPerformance.id.desc())
            .label("place"),
        )
        .where(WorkerPerformance.worker_id.in_(worker_ids))
        .subquery()
    )
    mean = func.avg(ranked.c.performance)
    means = (
        select(ranked.c.worker_id, build_stored_speed(mean).label("speed"))
        .where(ranked.c.place <= SPEED_SAMPLES)
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
        session.execute(
            update(TextWorker)
            .where(TextWorker.id == means.c.worker_id, TextWorker.speed != means.c.speed)
            .values(speed=means.c.speed)
            .execution_options(synchronize_session=False)
        )
        old = select(ranked.c.id).where(ranked.c.place > SPEED_SAMPLES)
        session.execute(
            delete(WorkerPerformance)
            .where(WorkerPerformance.id.in_(old))
            .execution_options(synchronize_session=False)
        )


def build_stored_speed(mean: ColumnElement[float]) -> ColumnElement[float]:
    """What is stored for a mean: it divides, so zero is the baseline, and the baseline itself means
    unmeasured.
    """
    return case(
        (func.coalesce(mean, 0) <= 0, SPEED_BASELINE),
        (mean == SPEED_BASELINE, MEASURED_BASELINE),
        else_=mean,
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
