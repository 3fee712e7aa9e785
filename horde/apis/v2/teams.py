# SPDX-License-Identifier: AGPL-3.0-or-later
"""The team routes."""

from flask_restx import Api, Namespace, Resource

from horde.actions import teams
from horde.apis.bodies import read_body, read_query
from horde.apis.requests import find_api_key, require_api_key
from horde.apis.swagger import build_answer_model, build_body_model, build_query_params
from horde.json_text import JsonObject
from horde.limiter import limit_team
from horde.shapes.base import ReasonQuery
from horde.shapes.teams import (
    CreateTeamInput,
    DeletedTeam,
    ModifyTeam,
    ModifyTeamInput,
    TeamDetails,
)
from horde.written_answer import WrittenAnswer

namespace = Namespace("teams", description="Names that workers serve under.", path="/v2/teams")
create_team_input = build_body_model(namespace, CreateTeamInput)
modify_team_input = build_body_model(namespace, ModifyTeamInput)
modify_team = build_answer_model(namespace, ModifyTeam)
deleted_team = build_answer_model(namespace, DeletedTeam)
team_details = build_answer_model(namespace, TeamDetails)

REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}
BAD_TEXTS = "BadRequest, ProfaneTeamInfo, ProfaneTeamName, TeamNameAlreadyExists"

type Details = JsonObject


@namespace.route("")
class Teams(Resource):
    """All teams."""

    @namespace.response(200, "The teams", [team_details])
    @limit_team
    def get(self) -> WrittenAnswer:
        """List the teams, oldest first; at most ten seconds old."""
        return teams.list_teams()

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(create_team_input, validate=False)
    @namespace.response(200, "The team", modify_team)
    @namespace.response(400, BAD_TEXTS)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbidden, DeletedUser, UntrustedTeamCreation")
    @limit_team
    def post(self) -> Details:
        """Make a team, as a trusted user."""
        body = read_body(CreateTeamInput)
        return teams.create_team(require_api_key(), body).dump()


@namespace.route("/<string:team_id>")
class Team(Resource):
    """One team."""

    @namespace.doc(params={"apikey": {"in": "header", "description": "A moderator's key."}})
    @namespace.response(200, "The team", team_details)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(404, "TeamNotFound")
    @limit_team
    def get(self, team_id: str) -> Details:
        """Details of a team; at most three seconds old."""
        return teams.show_team(find_api_key(), team_id).dump()

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(modify_team_input, validate=False)
    @namespace.response(200, "What was changed", modify_team)
    @namespace.response(400, f"{BAD_TEXTS}, NoTeamModSelected")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator, NotOwner")
    @namespace.response(404, "TeamNotFound")
    @limit_team
    def patch(self, team_id: str) -> Details:
        """Change a team, as its owner or a moderator. Answers with what was changed."""
        body = read_body(ModifyTeamInput)
        return teams.change_team(require_api_key(), team_id, body).dump()

    @namespace.doc(params=REQUIRED_KEY | build_query_params(ReasonQuery))
    @namespace.response(200, "The team is gone", deleted_team)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(404, "TeamNotFound")
    @limit_team
    def delete(self, team_id: str) -> Details:
        """Dissolve a team, as its owner or a moderator; its workers leave it."""
        query = read_query(ReasonQuery)
        return teams.delete_team(require_api_key(), team_id, query.reason).dump()


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
