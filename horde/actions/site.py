# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the pages for people show: the horde, its models and its workers."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from sqlalchemy.orm import Session

from horde import clock
from horde.classes.kobold.pricing import compute_text_quote, round_quote
from horde.database.stats import (
    HordeModes,
    HordeTotals,
    ModelFigures,
    get_horde_modes,
    get_model_figures,
    get_totals,
)
from horde.database.text_functions import ChatModelOffer, get_chat_model_offers
from horde.database.workers import get_online_workers
from horde.db import reading
from horde.model_reference import get_text_model_multiplier, is_known_text_model

WORKERS_A_PAGE = 100
LEADERS = 25
PRICED_TOKENS = 512
PRICED_CONTEXT_TOKENS = 2048

type Details = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLine:
    """A model as a page shows it."""

    name: str
    kinds: tuple[str, ...]  # "text", "chat"
    workers: int  # of either kind, those out of maintenance
    speed: float  # tokens a second
    jobs: float
    eta: int  # seconds


@dataclass(frozen=True, slots=True)
class HordeOverview:
    """What the horde does now."""

    totals: HordeTotals
    modes: HordeModes
    models: list[ModelLine]  # those with the most workers first


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOverview:
    """A model, what a reply of it costs, and the first of those who serve it."""

    model: ModelLine
    offer: ChatModelOffer | None
    price: int
    workers: list[Details]
    worker_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersPage:
    """Some of the workers that are online."""

    workers: list[Details]
    worker_count: int
    page: int
    page_count: int


def show_horde() -> HordeOverview:
    """The figures of the front page."""
    now = clock.utcnow()
    with reading() as session:
        totals, modes = get_totals(session, now), get_horde_modes(session)
        lines = list_model_lines(
            get_model_figures(session, now),
            get_chat_model_offers(session, now),
            count_workers_by_model(list_online_workers(session)),
        )
    return HordeOverview(totals, modes, lines)


def find_model(name: str) -> ModelOverview | None:
    """One model; None for one that nobody serves and the reference does not list."""
    now = clock.utcnow()
    with reading() as session:
        figures = get_model_figures(session, now).get(name)
        offer = get_chat_model_offers(session, now).get(name)
        online = list_online_workers(session)
    is_served = offer is not None or (figures is not None and figures.is_served)
    if not is_served and not is_known_text_model(name):
        return None
    serving = [worker for worker in online if name in worker["models"]]
    quote = compute_text_quote(
        max_length=PRICED_TOKENS,
        max_context_length=PRICED_CONTEXT_TOKENS,
        models=[(get_text_model_multiplier(name), is_known_text_model(name))],
        n=1,
    )
    return ModelOverview(
        model=build_model_line(figures, offer, name, count_workers_by_model(serving)[name]),
        offer=offer,
        price=round_quote(quote),
        workers=serving[:WORKERS_A_PAGE],
        worker_count=len(serving),
    )


def show_workers(page: int) -> WorkersPage:
    """A page of the workers that are online; the nearest there is."""
    with reading() as session:
        online = list_online_workers(session)
    page_count = max(1, math.ceil(len(online) / WORKERS_A_PAGE))
    page = min(max(1, page), page_count)
    return WorkersPage(
        workers=online[(page - 1) * WORKERS_A_PAGE : page * WORKERS_A_PAGE],
        worker_count=len(online),
        page=page,
        page_count=page_count,
    )


def show_best_workers() -> list[Details]:
    """The online workers that earned most, the best first."""
    with reading() as session:
        online = list_online_workers(session)
    return nlargest(LEADERS, online, key=lambda worker: worker["kudos_rewards"])


def list_online_workers(session: Session) -> list[Details]:
    """The workers that are online, as everybody sees them."""
    workers: list[Details] = get_online_workers(session, clock.utcnow(), is_privileged=False).read()
    return workers


def count_workers_by_model(workers: Iterable[Details]) -> Counter[str]:
    """How many workers serve each model, of those that take jobs."""
    return Counter(
        name for worker in workers if not worker["maintenance_mode"] for name in worker["models"]
    )


def build_model_line(
    figures: ModelFigures | None, offer: ChatModelOffer | None, name: str, workers: int
) -> ModelLine:
    """One model from what text and chat say about it. The list of workers that was counted may be
    half a minute older than the offer.
    """
    kinds = {
        "text": figures is not None and figures.count > 0,
        "chat": offer is not None and offer.workers > 0,
    }
    return ModelLine(
        name=name,
        kinds=tuple(kind for kind, is_served in kinds.items() if is_served),
        workers=max(workers, offer.workers if offer is not None else 0),
        speed=figures.performance if figures is not None else 0.0,
        jobs=figures.jobs if figures is not None else 0.0,
        eta=figures.eta if figures is not None else 0,
    )


def list_model_lines(
    figures: Mapping[str, ModelFigures],
    offers: Mapping[str, ChatModelOffer],
    workers: Mapping[str, int],
) -> list[ModelLine]:
    """Every served model, those with the most workers first."""
    served = {name for name, model in figures.items() if model.is_served} | offers.keys()
    lines = [
        build_model_line(figures.get(name), offers.get(name), name, workers.get(name, 0))
        for name in served
    ]
    return sorted(lines, key=lambda line: (-line.workers, line.name.casefold()))
