# SPDX-License-Identifier: AGPL-3.0-or-later
"""The models that workers serve, and the horde in numbers."""

from collections.abc import Mapping

from horde import clock
from horde.database.caches import TimedCache, write_answer
from horde.database.stats import (
    ModelFigures,
    compute_model_figures,
    get_model_figures,
    get_totals,
    is_model_served,
)
from horde.database.text_functions import ChatModelOffer, get_chat_model_offers
from horde.db import transaction
from horde.exceptions import BadRequest, NotFound
from horde.model_reference import is_known_text_model
from horde.return_codes import ReturnCode
from horde.shapes.base import MAX_MODEL_NAME_LENGTH, ModelType
from horde.shapes.status import ActiveModel, HordePerformance, ModelsQuery, ModelState, OfferedChat
from horde.written_answer import WrittenAnswer

MODEL_LIST_SECONDS = 2.0
# Models with this in their name serve by invitation and are not advertised.
HIDDEN_MODEL = "horde_special"
MAX_CACHED_QUERIES = 200

_model_lists = TimedCache[ModelsQuery, WrittenAnswer](
    MODEL_LIST_SECONDS, max_entries=MAX_CACHED_QUERIES
)


def list_models(query: ModelsQuery) -> WrittenAnswer:
    """The models with their workers and queues; `chat` lists what chat workers offer. Raises
    BadRequest.
    """
    if query.chat and query.type is not ModelType.TEXT:
        raise BadRequest("chat=true lists text models: send it with type=text.")
    if query.type is not ModelType.TEXT:
        return WrittenAnswer("[]")
    return _model_lists.get(query, lambda: write_answer(_read_models(query)))


def find_offered_chat_model() -> str | None:
    """The name of a model that a chat worker offers now."""
    with transaction() as session:
        return next(iter(get_chat_model_offers(session, clock.utcnow())), None)


def _read_models(query: ModelsQuery) -> list[ActiveModel]:
    """The entries of a text list, read anew."""
    now = clock.utcnow()
    with transaction() as session:
        figures = get_model_figures(session, now)
        offers = get_chat_model_offers(session, now) if query.chat else {}
        # A worker came since.
        if any(name not in figures or not figures[name].is_served for name in offers):
            figures = compute_model_figures(session, now)
    # A worker may change its chat model between two check-ins, which alone write the models it
    # offers to text.
    figures = {**{name: ModelFigures(name=name) for name in offers}, **figures}
    entries = [build_entry(model) for model in figures.values() if is_listed(model, query)]
    return add_chat_offers(entries, offers) if query.chat else entries


def add_chat_offers(
    entries: list[ActiveModel], offers: Mapping[str, ChatModelOffer]
) -> list[ActiveModel]:
    """The entries of models that an online chat worker serves, each with its `chat` object."""
    return [
        ActiveModel(
            **entry,
            chat=OfferedChat(
                workers=offer.workers,
                max_context_length=offer.max_context_length,
                max_length=offer.max_length,
                features=list(offer.features),
                created=offer.created,
            ),
        )
        for entry in entries
        if (offer := offers.get(entry["name"])) is not None
    ]


def show_model(name: str) -> ActiveModel:
    """One model, if a worker serves it or the reference lists it; raises NotFound."""
    now = clock.utcnow()
    with transaction() as session:
        figures = get_model_figures(session, now)
        model = figures.get(name, ModelFigures(name=name))
        # Its worker came since.
        if not model.is_served and is_model_served(session, name, now):
            model = compute_model_figures(session, now).get(name, model)
    if not model.is_served and not is_known_text_model(name):
        raise NotFound(
            f"Model '{name[:MAX_MODEL_NAME_LENGTH]}' not found.", ReturnCode.MODEL_NOT_FOUND
        )
    return build_entry(model)


def show_performance() -> HordePerformance:
    """Queues, workers and the work of the last minute."""
    with transaction() as session:
        totals = get_totals(session, clock.utcnow())
    return HordePerformance(
        queued_requests=0,
        queued_text_requests=totals.queued_text_requests,
        worker_count=0,
        text_worker_count=totals.text_worker_count,
        thread_count=0,
        text_thread_count=totals.text_thread_count,
        queued_megapixelsteps=0,
        past_minute_megapixelsteps=0,
        queued_forms=0,
        interrogator_count=0,
        interrogator_thread_count=0,
        queued_tokens=totals.queued_tokens,
        past_minute_tokens=totals.past_minute_tokens,
    )


def is_listed(model: ModelFigures, query: ModelsQuery) -> bool:
    """Whether a list shows the model."""
    if not model.is_served or HIDDEN_MODEL in model.name:
        return False
    if query.min_count is not None and model.count < query.min_count:
        return False
    if query.max_count is not None and model.count > query.max_count:
        return False
    if query.model_state is ModelState.ALL:
        return True
    return is_known_text_model(model.name) == (query.model_state is ModelState.KNOWN)


def build_entry(model: ModelFigures) -> ActiveModel:
    """The model as the API shows it."""
    return ActiveModel(
        performance=model.performance,
        queued=model.queued,
        jobs=model.jobs,
        eta=model.eta,
        type="text",
        name=model.name,
        count=model.count,
    )
