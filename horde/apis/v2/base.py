# SPDX-License-Identifier: AGPL-3.0-or-later
"""The status routes: models, figures and modes of the horde."""

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from flask_restx import Api, Namespace, Resource

from horde import clock
from horde.actions.modes import change_modes, show_modes
from horde.apis.bodies import read_body, read_query
from horde.apis.models.base import build_active_model, build_horde_performance
from horde.apis.requests import find_api_key, require_api_key
from horde.apis.swagger import build_answer_model, build_body_model
from horde.classes.kobold.text_request import MAX_MODEL_NAME_LENGTH
from horde.database.caches import TimedCache
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
from horde.limiter import limit_modes
from horde.model_reference import is_known_text_model
from horde.return_codes import ReturnCode
from horde.shapes.base import ModelType, Query
from horde.shapes.modes import HordeModes, HordeModesInput

MODEL_LIST_SECONDS = 2.0
# Models with this in their name serve by invitation and are not advertised.
HIDDEN_MODEL = "horde_special"
MAX_CACHED_QUERIES = 200

type Entry = dict[str, Any]


class ModelState(StrEnum):
    """Which models a list holds: all, those of the reference, or the others."""

    ALL = "all"
    KNOWN = "known"
    CUSTOM = "custom"


class ModelsQuery(Query):
    """The query string of the model list."""

    type: ModelType = ModelType.IMAGE
    min_count: int | None = None
    max_count: int | None = None
    model_state: ModelState = ModelState.ALL
    chat: bool = False


_model_lists = TimedCache[ModelsQuery, list[Entry]](
    MODEL_LIST_SECONDS, max_entries=MAX_CACHED_QUERIES
)

namespace = Namespace("status", description="What the horde does now.", path="/v2/status")
active_model = build_active_model(namespace)
horde_performance = build_horde_performance(namespace)
horde_modes_input = build_body_model(namespace, HordeModesInput)
horde_modes = build_answer_model(namespace, HordeModes)


@namespace.route("/models")
class Models(Resource):
    """The models that workers serve."""

    @namespace.doc(
        params={
            "type": {"in": "query", "enum": [*ModelType], "default": "image"},
            "min_count": {
                "in": "query",
                "type": "integer",
                "description": "Leave out models with fewer threads.",
            },
            "max_count": {
                "in": "query",
                "type": "integer",
                "description": "Leave out models with more threads.",
            },
            "model_state": {"in": "query", "enum": [*ModelState], "default": "all"},
            "chat": {
                "in": "query",
                "type": "boolean",
                "description": "List what chat workers offer; needs type=text.",
            },
        }
    )
    @namespace.response(200, "The models", [active_model])
    @namespace.response(400, "BadRequest")
    def get(self) -> list[Entry]:
        """List models with their workers and queues; `chat=true` lists what chat workers offer."""
        query = read_query(ModelsQuery)
        if query.chat and query.type is not ModelType.TEXT:
            raise BadRequest("chat=true lists text models: send it with type=text.")
        if query.type is not ModelType.TEXT:
            return []
        return _model_lists.get(query, lambda: self.list_models(query))

    def list_models(self, query: ModelsQuery) -> list[Entry]:
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
        return self.add_chat_offers(entries, offers) if query.chat else entries

    def add_chat_offers(
        self, entries: list[Entry], offers: Mapping[str, ChatModelOffer]
    ) -> list[Entry]:
        """The entries of models that an online chat worker serves, each with its `chat` object."""
        return [
            {**entry, "chat": {**asdict(offer), "features": list(offer.features)}}
            for entry in entries
            if (offer := offers.get(entry["name"])) is not None
        ]


@namespace.route("/models/<path:model_name>")
class Model(Resource):
    """One model; its name may hold slashes, raw or encoded."""

    @namespace.response(200, "The model", [active_model])
    @namespace.response(404, "ModelNotFound")
    def get(self, model_name: str) -> list[Entry]:
        """The model in a list of one, if a worker serves it or the reference lists it."""
        now = clock.utcnow()
        with transaction() as session:
            figures = get_model_figures(session, now)
            model = figures.get(model_name, ModelFigures(name=model_name))
            # Its worker came since.
            if not model.is_served and is_model_served(session, model_name, now):
                model = compute_model_figures(session, now).get(model_name, model)
        if not model.is_served and not is_known_text_model(model_name):
            raise NotFound(
                f"Model '{model_name[:MAX_MODEL_NAME_LENGTH]}' not found.",
                ReturnCode.MODEL_NOT_FOUND,
            )
        return [build_entry(model)]


@namespace.route("/performance")
class HordePerformance(Resource):
    """The horde in numbers."""

    @namespace.response(200, "The figures", horde_performance)
    def get(self) -> Entry:
        """Queues, workers and the work of the last minute. This horde takes no image or alchemy
        work: those are 0.
        """
        with transaction() as session:
            totals = get_totals(session, clock.utcnow())
        return {
            "queued_requests": 0,
            "queued_megapixelsteps": 0,
            "queued_forms": 0,
            "worker_count": 0,
            "thread_count": 0,
            "interrogator_count": 0,
            "interrogator_thread_count": 0,
            "past_minute_megapixelsteps": 0,
            **asdict(totals),
        }


@namespace.route("/modes")
class Modes(Resource):
    """The switches of the horde."""

    @namespace.doc(
        params={"apikey": {"in": "header", "description": "A moderator's key shows raid mode too."}}
    )
    @namespace.response(200, "The modes", horde_modes)
    @limit_modes
    def get(self) -> Entry:
        """The modes; raid mode only with a moderator's key."""
        return show_modes(find_api_key()).dump()

    @namespace.doc(params={"apikey": {"in": "header", "required": True}})
    @namespace.expect(horde_modes_input, validate=False)
    @namespace.response(200, "What was set", horde_modes)
    @namespace.response(400, "NoHordeModSelected")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotAdmin, NotModerator")
    @limit_modes
    def put(self) -> Entry:
        """Set modes: maintenance as an admin, the others as a moderator. Answers with what was
        set.
        """
        body = read_body(HordeModesInput)
        return change_modes(require_api_key(), body).dump()


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


def build_entry(model: ModelFigures) -> Entry:
    """The model as the API shows it."""
    return {
        "performance": model.performance,
        "queued": model.queued,
        "jobs": model.jobs,
        "eta": model.eta,
        "type": ModelType.TEXT.value,
        "name": model.name,
        "count": model.count,
    }


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
