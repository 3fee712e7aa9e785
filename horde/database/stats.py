# SPDX-License-Identifier: AGPL-3.0-or-later
"""Figures of the whole horde: its models, its totals and its modes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    ScalarSelect,
    and_,
    case,
    exists,
    func,
    literal,
    or_,
    select,
    union,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from horde.classes.base.kudos import upfront_hold_id
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.stats import FulfillmentPerformance, HordeSettings, ModelPerformance
from horde.classes.base.waiting_prompt import TerminalOutcome, WPModels
from horde.classes.base.worker import WorkerModel, online_since
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import TextWorker
from horde.database.caches import TimedCache, forget_shared, read_shared, write_shared
from horde.database.kudos import release_holds
from horde.database.queue_classes import TEXT_FAMILY, is_live
from horde.db import after_commit, table_of
from horde.hot_session import keep
from horde.pop_epochs import EVERYTHING, move_marks

MODELS_KEY = "models_cache"
MODELS_KEY_TTL_SECONDS = 600
MODELS_REBUILD_SECONDS = 10.0
TOTALS_KEY = "totals_cache"
# Long past the rebuild, short enough that a horde without a leader stops showing old totals.
TOTALS_KEY_TTL_SECONDS = 300
TOTALS_REBUILD_SECONDS = 60.0
SHARED_READ_SECONDS = 2.0  # how long a process believes its copy of what is shared
MODES_SECONDS = 1.0  # a mode set on one node acts on all within this time
MODEL_SAMPLES_KEPT = timedelta(hours=1)
FULFILLMENTS_KEPT = timedelta(seconds=60)
NO_THROUGHPUT_ETA_SECONDS = 10_000
SETTINGS_ID = 1
STOPPED_REQUESTS_A_BATCH = 500
NO_LOAD = (0, 0, 0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """A text model: who serves it, how fast, and what waits for it."""

    name: str
    is_served: bool = False
    count: int = 0  # threads of its online workers out of maintenance that take text jobs
    performance: float = 0.0  # tokens per second, mean of the last hour
    queued: float = 0.0  # tokens of the waiting requests that name it, each counted once
    jobs: float = 0.0  # generations waiting and in flight
    eta: int = 0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HordeTotals:
    """The text side in numbers."""

    queued_text_requests: int  # generations waiting and in flight
    queued_tokens: int
    past_minute_tokens: float
    past_minute_jobs: int
    text_worker_count: int
    text_thread_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HordeModes:
    """The switches of the whole horde."""

    maintenance: bool = False
    invite_only: bool = False
    raid: bool = False


@dataclass(frozen=True, slots=True)
class StoppedRequest:
    """A waiting request that maintenance ended; a chat one is signalled once that is committed."""

    id: UUID
    is_chat: bool
    generations: int  # results stored so far


_models = TimedCache[None, dict[str, ModelFigures]](SHARED_READ_SECONDS)
_computed_models = TimedCache[None, dict[str, ModelFigures]](MODELS_REBUILD_SECONDS)
_totals = TimedCache[None, HordeTotals](SHARED_READ_SECONDS)
_computed_totals = TimedCache[None, HordeTotals](TOTALS_REBUILD_SECONDS)
_modes = TimedCache[None, HordeModes](MODES_SECONDS)


def get_model_figures(session: Session, now: datetime) -> dict[str, ModelFigures]:
    """Every text model that is served, waited for or was measured in the last hour, by its name; at
    most 12 s old.
    """

    def read() -> dict[str, ModelFigures]:
        shared = read_shared(
            MODELS_KEY, lambda rows: {row["name"]: ModelFigures(**row) for row in rows}
        )
        if shared is not None:
            return shared
        return _computed_models.get(None, lambda: compute_model_figures(session, now))

    return _models.get(None, read)


def forget_model_figures() -> None:
    """List the models anew when next asked: a worker came or left. Call it after the commit."""
    forget_shared(MODELS_KEY)
    _models.clear()
    _computed_models.clear()


def publish_model_figures(figures: Mapping[str, ModelFigures]) -> None:
    """Share what was computed with every process. Best effort."""
    write_shared(MODELS_KEY, [asdict(model) for model in figures.values()], MODELS_KEY_TTL_SECONDS)


def compute_model_figures(session: Session, now: datetime) -> dict[str, ModelFigures]:
    """The figures of every text model as they stand, by its name, in name order."""
    threads = _count_model_threads(session, now)
    loads = _sum_model_loads(session, now)
    figures = {}
    for name in sorted({*threads, *loads}):
        tokens, waiting, in_flight, speed = loads.get(name, NO_LOAD)
        count = threads.get(name, 0)
        figures[name] = ModelFigures(
            name=name,
            is_served=name in threads,
            count=count,
            performance=round(speed, 1),
            queued=float(tokens),
            jobs=float(waiting + in_flight),
            eta=compute_eta(queued_tokens=tokens, thread_count=count, tokens_per_second=speed),
        )
    return figures


def is_model_served(session: Session, name: str, now: datetime) -> bool:
    """Whether an online worker out of maintenance offers exactly this model, as it stands."""
    offers = exists().where(WorkerModel.worker_id == TextWorker.id, WorkerModel.model == name)
    offers_chat = and_(TextWorker.accepts_chat_jobs, TextWorker.chat_model_id == name)
    is_online = and_(TextWorker.last_check_in >= online_since(now), ~TextWorker.maintenance)
    return bool(session.scalar(select(exists().where(is_online, or_(offers, offers_chat)))))


def compute_eta(*, queued_tokens: float, thread_count: int, tokens_per_second: float) -> int:
    """Seconds until what waits for a model is done, leaving out that its workers serve other models
    too.
    """
    if queued_tokens <= 0:
        return 0
    throughput = thread_count * tokens_per_second
    return int(queued_tokens / throughput) if throughput > 0 else NO_THROUGHPUT_ETA_SECONDS


def _count_model_threads(session: Session, now: datetime) -> dict[str, int]:
    """Threads by served model. A worker without text jobs lists its models, with no threads."""
    # A chat model may be newer than the models of the last check-in: the declaration is stored on
    # every pop.
    offered = union(
        select(WorkerModel.worker_id, WorkerModel.model),
        select(TextWorker.id, TextWorker.chat_model_id).where(TextWorker.accepts_chat_jobs),
    ).subquery()
    threads = case((TextWorker.accepts_prompt_jobs, TextWorker.threads), else_=0)
    statement = (
        select(offered.c.model, func.sum(threads))
        .join(TextWorker, TextWorker.id == offered.c.worker_id)
        .where(TextWorker.last_check_in >= online_since(now), ~TextWorker.maintenance)
        .group_by(offered.c.model)
    )
    return {model: int(count) for model, count in session.execute(statement)}


def _sum_model_loads(session: Session, now: datetime) -> dict[str, tuple[int, int, int, float]]:
    """By model: the tokens and the generations that wait for it, each as often as a request names
    it, its jobs in flight, and its mean speed of the last hour. One statement.
    """
    nothing = literal(0)
    waiting = (
        select(
            WPModels.model.label("model"),
            func.sum(TextWaitingPrompt.max_length).label("tokens"),
            func.sum(TextWaitingPrompt.n).label("waiting"),
            nothing.label("in_flight"),
            nothing.label("speed"),
        )
        .join(TextWaitingPrompt, TextWaitingPrompt.id == WPModels.wp_id)
        .where(is_live(TextWaitingPrompt), TextWaitingPrompt.wp_type == TEXT_FAMILY)
        .group_by(WPModels.model)
    )
    # Jobs in flight, by the model they were handed out with.
    in_flight = (
        select(ProcessingGeneration.model, nothing, nothing, func.count(), nothing)
        .where(
            ProcessingGeneration.generation.is_(None),
            ProcessingGeneration.faulted.is_(False),
            ProcessingGeneration.fake.is_(False),
            ProcessingGeneration.procgen_type == TEXT_FAMILY,
        )
        .group_by(ProcessingGeneration.model)
    )
    speeds = (
        select(
            ModelPerformance.model,
            nothing,
            nothing,
            nothing,
            func.avg(ModelPerformance.performance),
        )
        .where(ModelPerformance.created >= now - MODEL_SAMPLES_KEPT)
        .group_by(ModelPerformance.model)
    )
    loads = union_all(waiting, in_flight, speeds).subquery()
    statement = select(
        loads.c.model,
        *(func.sum(loads.c[name]) for name in ("tokens", "waiting", "in_flight", "speed")),
    ).group_by(loads.c.model)
    return {
        model: (int(tokens), int(waiting), int(in_flight), float(speed))
        for model, tokens, waiting, in_flight, speed in session.execute(statement)
    }


def get_totals(session: Session, now: datetime) -> HordeTotals:
    """The text side in numbers, at most about a minute old."""

    def read() -> HordeTotals:
        shared = read_shared(TOTALS_KEY, lambda totals: HordeTotals(**totals))
        if shared is not None:
            return shared
        return _computed_totals.get(None, lambda: compute_totals(session, now))

    return _totals.get(None, read)


def publish_totals(totals: HordeTotals) -> None:
    """Share what was computed with every process. Best effort."""
    write_shared(TOTALS_KEY, asdict(totals), TOTALS_KEY_TTL_SECONDS)


def compute_totals(session: Session, now: datetime) -> HordeTotals:
    """The text side in numbers as they stand, in one statement."""
    in_flight = (
        select(func.count())
        .select_from(ProcessingGeneration)
        .where(
            ProcessingGeneration.generation.is_(None),
            ProcessingGeneration.faulted.is_(False),
            ProcessingGeneration.fake.is_(False),
            ProcessingGeneration.procgen_type == TEXT_FAMILY,
        )
    )
    waiting = is_live(TextWaitingPrompt) & (TextWaitingPrompt.wp_type == TEXT_FAMILY)
    online = TextWorker.last_check_in >= online_since(now)

    def sum_delivered(amount: ColumnElement[Any]) -> ScalarSelect[Any]:
        return (
            select(amount)
            .where(
                FulfillmentPerformance.thing_type == TEXT_FAMILY,
                FulfillmentPerformance.created >= now - FULFILLMENTS_KEPT,
            )
            .scalar_subquery()
        )

    row = session.execute(
        select(
            select(func.coalesce(func.sum(TextWaitingPrompt.n), 0))
            .where(waiting)
            .scalar_subquery(),
            in_flight.scalar_subquery(),
            select(func.coalesce(func.sum(TextWaitingPrompt.max_length), 0))
            .where(waiting)
            .scalar_subquery(),
            sum_delivered(func.coalesce(func.sum(FulfillmentPerformance.things), 0.0)),
            select(func.count(TextWorker.id)).where(online).scalar_subquery(),
            select(func.coalesce(func.sum(TextWorker.threads), 0)).where(online).scalar_subquery(),
            sum_delivered(func.count()),
        )
    ).one()
    return HordeTotals(
        queued_text_requests=int(row[0]) + row[1],
        queued_tokens=int(row[2]),
        past_minute_tokens=float(row[3]),
        text_worker_count=row[4],
        text_thread_count=int(row[5]),
        past_minute_jobs=row[6],
    )


_settings = table_of(HordeSettings).c
_READ_MODES = keep(
    select(_settings.maintenance, _settings.invite_only, _settings.raid)
    .order_by(_settings.id)
    .limit(1)
)


def get_horde_modes(session: Session) -> HordeModes:
    """The switches of the horde, at most a second old."""
    return _modes.get(None, lambda: read_horde_modes(session))


def read_horde_modes(session: Session) -> HordeModes:
    """The switches as stored; all off when nobody ever set one."""
    row = session.execute(_READ_MODES).one_or_none()
    return (
        HordeModes()
        if row is None
        else HordeModes(maintenance=row[0], invite_only=row[1], raid=row[2])
    )


def set_horde_modes(session: Session, changes: Mapping[str, bool]) -> None:
    """Store switches by the names of `HordeModes`; other nodes follow within a second."""
    first = select(func.min(HordeSettings.id)).scalar_subquery()
    changed = session.execute(
        update(HordeSettings)
        .where(HordeSettings.id == first)
        .values(**changes)
        .returning(HordeSettings.id)
    )
    if changed.first() is None:
        values = {**asdict(HordeModes()), **changes}
        session.execute(
            insert(HordeSettings)
            .values(id=SETTINGS_ID, **values)
            .on_conflict_do_update(index_elements=["id"], set_=dict(changes))
        )
    after_commit(session, _modes.clear)
    after_commit(session, partial(move_marks, [EVERYTHING]))


def stop_waiting_requests(session: Session, now: datetime) -> list[StoppedRequest]:
    """End a batch of waiting text and chat requests, as a cancel would; empty when none is left.

    What is in flight goes on. Holds are released with it unless a job still has to be paid from
    them; that job's end releases those.
    """
    batch = (
        select(TextWaitingPrompt.id)
        .where(is_live(TextWaitingPrompt), TextWaitingPrompt.wp_type == TEXT_FAMILY)
        .order_by(TextWaitingPrompt.id)
        .limit(STOPPED_REQUESTS_A_BATCH)
        # A row being claimed or cancelled is found by the next batch.
        .with_for_update(skip_locked=True)
    )
    stopped_ids = list(session.scalars(batch))
    if not stopped_ids:
        return []
    own_job = ProcessingGeneration.wp_id == TextWaitingPrompt.id
    is_done = ProcessingGeneration.generation.is_not(None)
    in_flight = exists().where(
        own_job,
        ~is_done,
        ProcessingGeneration.faulted.is_(False),
        ProcessingGeneration.fake.is_(False),
    )
    results = (
        select(func.count())
        .select_from(ProcessingGeneration)
        .where(own_job, is_done, ProcessingGeneration.fake.is_(False))
    )
    statement = (
        update(TextWaitingPrompt)
        .where(TextWaitingPrompt.id.in_(stopped_ids))
        .values(
            n=0,
            terminal_outcome=func.coalesce(
                TextWaitingPrompt.terminal_outcome, literal(TerminalOutcome.CANCELLED)
            ),
            terminal_recorded_at=func.coalesce(TextWaitingPrompt.terminal_recorded_at, now),
        )
        .returning(
            TextWaitingPrompt.id, TextWaitingPrompt.is_chat, results.scalar_subquery(), in_flight
        )
        .execution_options(synchronize_session=False)
    )
    rows = session.execute(statement).all()
    release_holds(session, [upfront_hold_id(row[0]) for row in rows if not row[3]], now)
    return [StoppedRequest(row[0], row[1], row[2]) for row in rows]
