# SPDX-License-Identifier: AGPL-3.0-or-later
"""The status routes: models, figures and modes of the horde."""

from flask_restx import Api, Namespace, Resource

from horde.actions.models import add_chat_offers, list_models, show_model, show_performance
from horde.actions.modes import change_modes, show_modes
from horde.apis.bodies import read_body, read_query
from horde.apis.requests import find_api_key, require_api_key
from horde.apis.swagger import build_answer_model, build_body_model, build_query_params
from horde.json_text import JsonObject
from horde.limiter import limit_modes
from horde.shapes.modes import HordeModes, HordeModesInput
from horde.shapes.status import ActiveModel, HordePerformance, ModelsQuery
from horde.written_answer import WrittenAnswer

namespace = Namespace("status", description="What the horde does now.", path="/v2/status")
active_model = build_answer_model(namespace, ActiveModel)
horde_performance = build_answer_model(namespace, HordePerformance)
horde_modes_input = build_body_model(namespace, HordeModesInput)
horde_modes = build_answer_model(namespace, HordeModes)


@namespace.route("/models")
class Models(Resource):
    """The models that workers serve."""

    @namespace.doc(params=build_query_params(ModelsQuery))
    @namespace.response(200, "The models", [active_model])
    @namespace.response(400, "BadRequest")
    def get(self) -> WrittenAnswer:
        """List models with their workers and queues; `chat=true` lists what chat workers offer."""
        return list_models(read_query(ModelsQuery))

    add_chat_offers = staticmethod(add_chat_offers)


@namespace.route("/models/<path:model_name>")
class Model(Resource):
    """One model; its name may hold slashes, raw or encoded."""

    @namespace.response(200, "The model", [active_model])
    @namespace.response(404, "ModelNotFound")
    def get(self, model_name: str) -> list[ActiveModel]:
        """The model in a list of one, if a worker serves it or the reference lists it."""
        return [show_model(model_name)]


@namespace.route("/performance")
class Performance(Resource):
    """The horde in numbers."""

    @namespace.response(200, "The figures", horde_performance)
    def get(self) -> HordePerformance:
        """Queues, workers and the work of the last minute. This horde takes no image or alchemy
        work: those are 0.
        """
        return show_performance()


@namespace.route("/modes")
class Modes(Resource):
    """The switches of the horde."""

    @namespace.doc(
        params={"apikey": {"in": "header", "description": "A moderator's key shows raid mode too."}}
    )
    @namespace.response(200, "The modes", horde_modes)
    @limit_modes
    def get(self) -> JsonObject:
        """The modes; raid mode only with a moderator's key."""
        return show_modes(find_api_key()).dump()

    @namespace.doc(params={"apikey": {"in": "header", "required": True}})
    @namespace.expect(horde_modes_input, validate=False)
    @namespace.response(200, "What was set", horde_modes)
    @namespace.response(400, "NoHordeModSelected")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotAdmin, NotModerator")
    @limit_modes
    def put(self) -> JsonObject:
        """Set modes: maintenance as an admin, the others as a moderator. Answers with what was
        set.
        """
        body = read_body(HordeModesInput)
        return change_modes(require_api_key(), body).dump()


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
