# SPDX-License-Identifier: AGPL-3.0-or-later
"""What an operator has to say: documents and news."""

from flask_restx import Api, Namespace, Resource

from horde.actions.documents import list_news, show_document
from horde.apis.bodies import read_query
from horde.apis.requests import get_config
from horde.apis.swagger import build_answer_model, build_query_params
from horde.json_text import JsonObject
from horde.shapes.documents import DocumentName, DocumentQuery, HordeDocument, Newspiece

namespace = Namespace("documents", description="What the operator has to say.", path="/v2")
horde_document = build_answer_model(namespace, HordeDocument)
newspiece = build_answer_model(namespace, Newspiece)

type Details = JsonObject


def answer_document(name: DocumentName) -> Details:
    """The document in the format that the query asks for."""
    query = read_query(DocumentQuery)
    return show_document(get_config(), name, query.format).dump()


@namespace.route("/documents/terms")
class DocsTerms(Resource):
    """The terms of service."""

    @namespace.doc(params=build_query_params(DocumentQuery))
    @namespace.response(200, "The document", horde_document)
    @namespace.response(400, "BadRequest")
    def get(self) -> Details:
        """The terms of service."""
        return answer_document(DocumentName.TERMS)


@namespace.route("/documents/privacy")
class DocsPrivacy(Resource):
    """The privacy policy."""

    @namespace.doc(params=build_query_params(DocumentQuery))
    @namespace.response(200, "The document", horde_document)
    @namespace.response(400, "BadRequest")
    def get(self) -> Details:
        """The privacy policy."""
        return answer_document(DocumentName.PRIVACY)


@namespace.route("/documents/sponsors")
class DocsSponsors(Resource):
    """Who supports the horde."""

    @namespace.doc(params=build_query_params(DocumentQuery))
    @namespace.response(200, "The document", horde_document)
    @namespace.response(400, "BadRequest")
    def get(self) -> Details:
        """Who supports the horde."""
        return answer_document(DocumentName.SPONSORS)


@namespace.route("/status/news")
class News(Resource):
    """What is new."""

    @namespace.response(200, "The news", [newspiece])
    def get(self) -> list[Details]:
        """News of the operator, the newest first; up to five minutes old."""
        return [piece.dump() for piece in list_news(get_config())]


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
