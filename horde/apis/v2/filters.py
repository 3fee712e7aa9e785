# SPDX-License-Identifier: AGPL-3.0-or-later
"""The filter routes: the moderators' rules for prompts."""

from flask_restx import Api, Namespace, Resource

from horde.actions import filters
from horde.apis.bodies import read_body, read_query
from horde.apis.requests import require_api_key
from horde.apis.responses import PRIVATE
from horde.apis.swagger import build_answer_model, build_body_model, build_query_params
from horde.json_text import JsonObject
from horde.shapes.base import ReasonQuery, SimpleResponse
from horde.shapes.filters import (
    FilterDetails,
    FilterPromptSuspicion,
    FilterRegex,
    FilterRegexQuery,
    FiltersQuery,
    PatchExistingFilter,
    PutNewFilter,
    TriedPrompt,
)

namespace = Namespace("filters", description="Rules for prompts.", path="/v2/filters")
filter_details = build_answer_model(namespace, FilterDetails)
prompt_suspicion = build_answer_model(namespace, FilterPromptSuspicion)
filter_regex = build_answer_model(namespace, FilterRegex)
simple_response = build_answer_model(namespace, SimpleResponse)
put_new_filter = build_body_model(namespace, PutNewFilter)
patch_filter = build_body_model(namespace, PatchExistingFilter)
tried_prompt = build_body_model(namespace, TriedPrompt)

REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = JsonObject
type Private[T] = tuple[T, int, dict[str, str]]


@namespace.route("")
class Filters(Resource):
    """All rules."""

    @namespace.doc(params=REQUIRED_KEY | build_query_params(FiltersQuery))
    @namespace.response(200, "The rules", [filter_details])
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    def get(self) -> Private[list[Details]]:
        """The rules, in the order they are applied in."""
        query = read_query(FiltersQuery)
        return [rule.dump() for rule in filters.list_rules(require_api_key(), query)], 200, PRIVATE

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(put_new_filter, validate=False)
    @namespace.response(200, "The rule", filter_details)
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    def put(self) -> Details:
        """Add a rule. One with the same expression and type is answered as it is."""
        body = read_body(PutNewFilter)
        return filters.add_rule(require_api_key(), body).dump()

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(tried_prompt, validate=False)
    @namespace.response(200, "What was found", prompt_suspicion)
    @namespace.response(400, "BadRequest, CorruptPrompt: the rules take too long")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    def post(self) -> Private[Details]:
        """Search a prompt by the rules, to try them out."""
        body = read_body(TriedPrompt)
        return filters.try_prompt(require_api_key(), body).dump(), 200, PRIVATE


@namespace.route("/regex")
class FilterRegexes(Resource):
    """Rules as one expression."""

    @namespace.doc(params=REQUIRED_KEY | build_query_params(FilterRegexQuery))
    @namespace.response(200, "The expressions", [filter_regex])
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    def get(self) -> Private[list[Details]]:
        """The rules of each type as one expression."""
        query = read_query(FilterRegexQuery)
        combined = filters.list_combined_rules(require_api_key(), query)
        return [each.dump() for each in combined], 200, PRIVATE


@namespace.route("/<string:filter_id>")
class FilterSingle(Resource):
    """One rule."""

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.response(200, "The rule", filter_details)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(404, "FilterNotFound")
    def get(self, filter_id: str) -> Private[Details]:
        """A rule."""
        return filters.show_rule(require_api_key(), filter_id).dump(), 200, PRIVATE

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(patch_filter, validate=False)
    @namespace.response(200, "The rule as it is now", filter_details)
    @namespace.response(400, "NoFilterModSelected, BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(404, "FilterNotFound")
    def patch(self, filter_id: str) -> Details:
        """Change a rule."""
        body = read_body(PatchExistingFilter)
        return filters.change_rule(require_api_key(), filter_id, body).dump()

    @namespace.doc(params=REQUIRED_KEY | build_query_params(ReasonQuery))
    @namespace.response(200, "Done", simple_response)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(404, "FilterNotFound")
    def delete(self, filter_id: str) -> Details:
        """Delete a rule."""
        query = read_query(ReasonQuery)
        return filters.delete_rule(require_api_key(), filter_id, query.reason).dump()


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
