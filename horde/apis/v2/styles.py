# SPDX-License-Identifier: AGPL-3.0-or-later
"""The routes of styles for text and of collections."""

from flask_restx import Api, Namespace, Resource

from horde.actions import collections, styles
from horde.apis.bodies import read_body, read_query
from horde.apis.requests import require_api_key
from horde.apis.swagger import build_answer_model, build_body_model, build_query_params
from horde.json_text import JsonObject
from horde.limiter import exempt_from_limits, limit_style_change, limit_style_create
from horde.shapes.base import ReasonQuery, SimpleResponse
from horde.shapes.styles import (
    CollectionDetails,
    CollectionInput,
    CollectionPatch,
    CollectionsQuery,
    StyleContract,
    StyleModify,
    StylesQuery,
    TextStyleDetails,
    TextStyleInput,
    TextStylePatch,
)

namespace = Namespace("styles", description="Templates that requests name.", path="/v2")
style_input = build_body_model(namespace, TextStyleInput)
style_patch = build_body_model(namespace, TextStylePatch)
style_details = build_answer_model(namespace, TextStyleDetails)
style_modify = build_answer_model(namespace, StyleModify)
collection_input = build_body_model(namespace, CollectionInput)
collection_patch = build_body_model(namespace, CollectionPatch)
collection_details = build_answer_model(namespace, CollectionDetails)
style_contract = build_answer_model(namespace, StyleContract)
simple_response = build_answer_model(namespace, SimpleResponse)

REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}
BAD_STYLE = (
    "BadRequest, NameAlreadyExists, Profanity, SharedKeyEmpty, SharedKeyExpired, SharedKeyInvalid,"
    " StyleDeclarationInvalid, StyleParameterAboveCeiling, StylePolicyOverridableMisplaced,"
    " StylePromptFieldInvalid, StylePromptMissingVars, and the codes of a request's params"
)

type Details = JsonObject


@namespace.route("/styles/text")
class TextStyles(Resource):
    """Styles for text."""

    @namespace.doc(params=build_query_params(StylesQuery))
    @namespace.response(200, "The styles", [style_details])
    @namespace.response(400, "BadRequest")
    @limit_style_change
    def get(self) -> list[Details]:
        """List public styles, 25 a page; about a second old."""
        return [style.dump() for style in styles.list_text_styles(read_query(StylesQuery))]

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(style_input, validate=False)
    @namespace.response(200, "The style", style_modify)
    @namespace.response(400, BAD_STYLE)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "DeletedUser, StylesAnonForbidden, StylesRequiresCustomizer")
    @limit_style_create
    def post(self) -> Details:
        """Make a style, as a trusted user or a customizer."""
        body = read_body(TextStyleInput)
        return styles.create_text_style(require_api_key(), body).dump()


@namespace.route("/styles/text/<string:style_id>")
class TextStyle(Resource):
    """One style for text."""

    @namespace.response(200, "The style", style_details)
    @namespace.response(400, "StyleGetMistmatch")
    @namespace.response(404, "StyleNotFound")
    @limit_style_change
    def get(self, style_id: str) -> Details:
        """A style by its id."""
        return styles.show_text_style(style_id).dump()

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(style_patch, validate=False)
    @namespace.response(200, "The style", style_modify)
    @namespace.response(400, f"{BAD_STYLE}, StyleMismatch")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "DeletedUser, Forbidden, StylesAnonForbidden")
    @namespace.response(404, "StyleNotFound")
    @limit_style_change
    def patch(self, style_id: str) -> Details:
        """Change a style, as its author; what is left out stays."""
        body = read_body(TextStylePatch)
        return styles.change_text_style(require_api_key(), style_id, body).dump()

    @namespace.doc(params=REQUIRED_KEY | build_query_params(ReasonQuery))
    @namespace.response(200, "The style is gone", simple_response)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "Forbidden")
    @namespace.response(404, "StyleNotFound")
    @limit_style_change
    def delete(self, style_id: str) -> Details:
        """Delete a style, as its author or a moderator."""
        query = read_query(ReasonQuery)
        return styles.delete_text_style(require_api_key(), style_id, query.reason).dump()


@namespace.route("/styles/text_by_name/<path:style_name>")
class TextStyleByName(Resource):
    """One style for text, by any of its names."""

    @namespace.response(200, "The style", style_details)
    @namespace.response(400, "StyleGetMistmatch")
    @namespace.response(404, "StyleNotFound")
    def get(self, style_name: str) -> Details:
        """A style by its name: `name`, `style::name`, `alias#id::name` or both prefixes."""
        return styles.show_text_style_by_name(style_name).dump()


@namespace.route("/collections")
class Collections(Resource):
    """Collections of styles."""

    @namespace.doc(params=build_query_params(CollectionsQuery))
    @namespace.response(200, "The collections", [collection_details])
    @namespace.response(400, "BadRequest")
    @limit_style_change
    def get(self) -> list[Details]:
        """List public collections, 25 a page; at most half a minute old."""
        found = collections.list_collections(read_query(CollectionsQuery))
        return [collection.dump() for collection in found]

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(collection_input, validate=False)
    @namespace.response(200, "The collection", style_modify)
    @namespace.response(400, "BadRequest, NameAlreadyExists, Profanity, StyleMismatch")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "DeletedUser, StylesAnonForbidden")
    @namespace.response(404, "StyleNotFound")
    @limit_style_change
    def post(self) -> Details:
        """Make a collection of styles of one type."""
        body = read_body(CollectionInput)
        return collections.create_collection(require_api_key(), body).dump()


@namespace.route("/collections/<string:collection_id>")
class Collection(Resource):
    """One collection."""

    @namespace.response(200, "The collection", collection_details)
    @namespace.response(404, "CollectionNotFound")
    @limit_style_change
    def get(self, collection_id: str) -> Details:
        """A collection by its id."""
        return collections.show_collection(collection_id).dump()

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(collection_patch, validate=False)
    @namespace.response(200, "The collection", style_modify)
    @namespace.response(400, "BadRequest, NameAlreadyExists, Profanity, StyleMismatch")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "DeletedUser, Forbidden, StylesAnonForbidden")
    @namespace.response(404, "CollectionNotFound, StyleNotFound")
    @limit_style_change
    def patch(self, collection_id: str) -> Details:
        """Change a collection, as its author; what is left out stays."""
        body = read_body(CollectionPatch)
        return collections.change_collection(require_api_key(), collection_id, body).dump()

    @namespace.doc(params=REQUIRED_KEY | build_query_params(ReasonQuery))
    @namespace.response(200, "The collection is gone", simple_response)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "Forbidden")
    @namespace.response(404, "CollectionNotFound")
    @limit_style_change
    def delete(self, collection_id: str) -> Details:
        """Delete a collection, as its author or a moderator; its styles stay."""
        query = read_query(ReasonQuery)
        return collections.delete_collection(require_api_key(), collection_id, query.reason).dump()


@namespace.route("/collection_by_name/<path:collection_name>")
class CollectionByName(Resource):
    """One collection, by any of its names."""

    @namespace.response(200, "The collection", collection_details)
    @namespace.response(404, "CollectionNotFound")
    def get(self, collection_name: str) -> Details:
        """A collection by its name: `name`, `collection::name`, `alias#id::name` or both
        prefixes.
        """
        return collections.show_collection_by_name(collection_name).dump()


@namespace.route("/status/style_contract")
class StyleContractRoute(Resource):
    """What a style may say."""

    @namespace.response(200, "The contract", style_contract)
    @exempt_from_limits
    def get(self) -> Details:
        """Params with their ranges, policies and templates, for programs that help to write one."""
        return styles.show_style_contract().dump()


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
