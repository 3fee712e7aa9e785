# SPDX-License-Identifier: AGPL-3.0-or-later
"""What moderators do to the horde as a whole, and what was done."""

from typing import Any

from flask_restx import Api, Namespace, Resource

from horde.actions.acts import list_acts
from horde.apis.bodies import read_query
from horde.apis.requests import require_api_key
from horde.apis.responses import PRIVATE
from horde.apis.swagger import build_answer_model, build_query_params
from horde.shapes.acts import ActsQuery, ModeratorActDetails

namespace = Namespace("operations", description="For moderators.", path="/v2/operations")
moderator_act = build_answer_model(namespace, ModeratorActDetails)

REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = dict[str, Any]


@namespace.route("/moderator_acts")
class ModeratorActs(Resource):
    """What was done, by whom and why."""

    @namespace.doc(params=REQUIRED_KEY | build_query_params(ActsQuery))
    @namespace.response(200, "The acts of the page", [moderator_act])
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    def get(self) -> tuple[list[Details], int, dict[str, str]]:
        """A page of what moderators and operators did, the newest first."""
        query = read_query(ActsQuery)
        return [act.dump() for act in list_acts(require_api_key(), query)], 200, PRIVATE


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
