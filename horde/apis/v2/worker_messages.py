# SPDX-License-Identifier: AGPL-3.0-or-later
"""The routes of messages to workers."""

from flask_restx import Api, Namespace, Resource

from horde.actions import worker_messages
from horde.apis.bodies import read_body, read_query
from horde.apis.requests import require_api_key
from horde.apis.swagger import build_answer_model, build_body_model, build_query_params
from horde.json_text import JsonObject
from horde.shapes.base import ReasonQuery, SimpleResponse
from horde.shapes.worker_messages import (
    PostedWorkerMessage,
    WorkerMessageDetails,
    WorkerMessageInput,
    WorkerMessagesQuery,
)

namespace = Namespace(
    "worker messages", description="What workers are told.", path="/v2/workers/messages"
)
message_input = build_body_model(namespace, WorkerMessageInput)
message_details = build_answer_model(namespace, WorkerMessageDetails)
posted_message = build_answer_model(namespace, PostedWorkerMessage)
simple_response = build_answer_model(namespace, SimpleResponse)

REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = JsonObject


@namespace.route("")
class WorkerMessages(Resource):
    """Messages to workers."""

    @namespace.doc(params=REQUIRED_KEY | build_query_params(WorkerMessagesQuery))
    @namespace.response(200, "The messages", [message_details])
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "Forbidden, MessagesOnlyOwnWorkers")
    @namespace.response(404, "WorkerNotFound")
    def get(self) -> list[Details]:
        """List messages, newest first: your own and those to your workers, or all as a
        moderator.
        """
        query = read_query(WorkerMessagesQuery)
        found = worker_messages.list_messages(require_api_key(), query)
        return [message.dump() for message in found]

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(message_input, validate=False)
    @namespace.response(200, "The message", posted_message)
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbidden, MessagesOnlyOwnWorkers")
    @namespace.response(404, "WorkerNotFound")
    def post(self) -> Details:
        """Write to your own workers or, as a moderator, to any, to a kind, or to all."""
        body = read_body(WorkerMessageInput)
        return worker_messages.post_message(require_api_key(), body).dump()


@namespace.route("/<string:message_id>")
class WorkerMessage(Resource):
    """One message."""

    @namespace.response(200, "The message", message_details)
    @namespace.response(404, "WorkermessageNotFound")
    def get(self, message_id: str) -> Details:
        """A message; at most a minute old."""
        return worker_messages.show_message(message_id).dump()

    @namespace.doc(params=REQUIRED_KEY | build_query_params(ReasonQuery))
    @namespace.response(200, "The message is gone", simple_response)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "Forbidden")
    @namespace.response(404, "WorkermessageNotFound")
    def delete(self, message_id: str) -> Details:
        """Delete a message, as its author or a moderator."""
        query = read_query(ReasonQuery)
        return worker_messages.delete_message(require_api_key(), message_id, query.reason).dump()


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
