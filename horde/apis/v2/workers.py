# SPDX-License-Identifier: AGPL-3.0-or-later
"""The worker routes: who serves, and what owners and moderators change."""

from flask_restx import Api, Namespace, Resource

from horde.actions import workers
from horde.apis.bodies import read_body, read_query
from horde.apis.requests import find_api_key, require_api_key
from horde.apis.swagger import build_answer_model, build_body_model, build_query_params
from horde.json_text import JsonObject
from horde.limiter import limit_worker
from horde.shapes.base import ReasonQuery
from horde.shapes.workers import (
    DeletedWorker,
    ModifyWorker,
    ModifyWorkerInput,
    WorkerDetails,
    WorkersQuery,
)
from horde.written_answer import WrittenAnswer

namespace = Namespace("workers", description="Those who serve.", path="/v2/workers")
worker_details = build_answer_model(namespace, WorkerDetails)
modify_worker_input = build_body_model(namespace, ModifyWorkerInput)
modify_worker = build_answer_model(namespace, ModifyWorker)
deleted_worker = build_answer_model(namespace, DeletedWorker)

OPTIONAL_KEY = {
    "apikey": {"in": "header", "description": "The owner's or a moderator's key shows more."}
}
REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = JsonObject


@namespace.route("")
class Workers(Resource):
    """The online workers."""

    @namespace.doc(params=OPTIONAL_KEY | build_query_params(WorkersQuery))
    @namespace.response(200, "The workers", [worker_details])
    def get(self) -> WrittenAnswer | list[Details]:
        """List the online workers; about half a minute old."""
        query = read_query(WorkersQuery)
        return workers.list_workers(find_api_key(), query)


@namespace.route("/<string:worker_id>")
class Worker(Resource):
    """One worker, by its id."""

    @namespace.doc(params=OPTIONAL_KEY)
    @namespace.response(200, "The worker", worker_details)
    @namespace.response(404, "WorkerNotFound")
    @limit_worker
    def get(self, worker_id: str) -> Details:
        """Details of a worker, online or not; at most 30 seconds old."""
        return workers.show_worker(find_api_key(), worker_id)

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(modify_worker_input, validate=False)
    @namespace.response(200, "What was changed", modify_worker)
    @namespace.response(
        400,
        "NoWorkerModSelected, ProfaneWorkerInfo, ProfaneWorkerName, TooLongWorkerName,"
        " WorkerNameAlreadyExists",
    )
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbiddenWorker, NotOwner, NotModerator")
    @namespace.response(404, "WorkerNotFound, TeamNotFound")
    @limit_worker
    def put(self, worker_id: str) -> Details:
        """Change a worker, as its owner or a moderator; only moderators pause. Answers with what
        was changed.
        """
        body = read_body(ModifyWorkerInput)
        return workers.change_worker(require_api_key(), worker_id, body).dump()

    @namespace.doc(params=REQUIRED_KEY | build_query_params(ReasonQuery))
    @namespace.response(200, "The worker is gone", deleted_worker)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbiddenWorker, NotModerator")
    @namespace.response(404, "WorkerNotFound")
    @namespace.response(423, "Locked")
    @limit_worker
    def delete(self, worker_id: str) -> Details:
        """Delete a worker, as its owner or a moderator; refused while a job refers to it."""
        query = read_query(ReasonQuery)
        return workers.delete_worker(require_api_key(), worker_id, query.reason).dump()


@namespace.route("/name/<path:worker_name>")
class WorkerByName(Resource):
    """One worker, by its exact name."""

    @namespace.doc(params=OPTIONAL_KEY)
    @namespace.response(200, "The worker", worker_details)
    @namespace.response(404, "WorkerNotFound")
    def get(self, worker_name: str) -> Details:
        """As by its id."""
        return workers.show_worker_by_name(find_api_key(), worker_name)


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
