# SPDX-License-Identifier: AGPL-3.0-or-later
"""What moderators do to the horde as a whole, and what was done."""

from flask_restx import Api, Namespace, Resource

from horde.actions import addresses
from horde.actions.acts import list_acts
from horde.apis.bodies import read_body, read_query
from horde.apis.requests import require_api_key
from horde.apis.responses import PRIVATE
from horde.apis.swagger import build_answer_model, build_body_model, build_query_params
from horde.json_text import JsonObject
from horde.shapes.acts import ActsQuery, ModeratorActDetails
from horde.shapes.base import ReasonQuery, SimpleResponse
from horde.shapes.operations import (
    AddTimeoutIPInput,
    AddWorkerTimeout,
    DeleteTimeoutIPInput,
    IPTimeout,
)

namespace = Namespace("operations", description="For moderators.", path="/v2/operations")
moderator_act = build_answer_model(namespace, ModeratorActDetails)
ip_timeout = build_answer_model(namespace, IPTimeout)
simple_response = build_answer_model(namespace, SimpleResponse)
add_timeout = build_body_model(namespace, AddTimeoutIPInput)
delete_timeout = build_body_model(namespace, DeleteTimeoutIPInput)
add_worker_timeout = build_body_model(namespace, AddWorkerTimeout)

REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = JsonObject
type Private[T] = tuple[T, int, dict[str, str]]


@namespace.route("/moderator_acts")
class ModeratorActs(Resource):
    """What was done, by whom and why."""

    @namespace.doc(params=REQUIRED_KEY | build_query_params(ActsQuery))
    @namespace.response(200, "The acts of the page", [moderator_act])
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    def get(self) -> Private[list[Details]]:
        """A page of what moderators and operators did, the newest first."""
        query = read_query(ActsQuery)
        return [act.dump() for act in list_acts(require_api_key(), query)], 200, PRIVATE


@namespace.route("/ipaddr")
class OperationsIP(Resource):
    """Addresses and networks that are refused."""

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.response(200, "The networks", [ip_timeout])
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(503, "Redis is away")
    def get(self) -> Private[list[Details]]:
        """Every network that is refused. Single addresses are asked for one by one."""
        networks = addresses.list_networks(require_api_key())
        return [timeout.dump() for timeout in networks], 200, PRIVATE

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(add_timeout, validate=False)
    @namespace.response(200, "Done", simple_response)
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(503, "Redis is away")
    def post(self) -> Details:
        """Refuse an address or a network for some hours."""
        body = read_body(AddTimeoutIPInput)
        return addresses.refuse_address(require_api_key(), body).dump()

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(delete_timeout, validate=False)
    @namespace.response(200, "Done", simple_response)
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(503, "Redis is away")
    def delete(self) -> Details:
        """Refuse an address or a network no longer."""
        body = read_body(DeleteTimeoutIPInput)
        return addresses.admit_address(require_api_key(), body).dump()


@namespace.route("/ipaddr/<path:ipaddr>")
class OperationsIPSingle(Resource):
    """One address."""

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.response(200, "What refuses it", [ip_timeout])
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(503, "Redis is away")
    def get(self, ipaddr: str) -> Private[list[Details]]:
        """The networks an address belongs to that are refused, and its own timeout."""
        timeouts = addresses.show_address(require_api_key(), ipaddr)
        return [timeout.dump() for timeout in timeouts], 200, PRIVATE


@namespace.route("/block_worker_ipaddr/<string:worker_id>")
class OperationsBlockWorkerIP(Resource):
    """The address of a worker."""

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(add_worker_timeout, validate=False)
    @namespace.response(200, "Done", simple_response)
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(404, "WorkerNotFound")
    @namespace.response(503, "Redis is away")
    def put(self, worker_id: str) -> Details:
        """Refuse the address of a worker for some days."""
        body = read_body(AddWorkerTimeout)
        return addresses.refuse_worker_address(require_api_key(), worker_id, body).dump()

    @namespace.doc(params=REQUIRED_KEY | build_query_params(ReasonQuery))
    @namespace.response(200, "Done", simple_response)
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotModerator")
    @namespace.response(404, "WorkerNotFound")
    @namespace.response(503, "Redis is away")
    def delete(self, worker_id: str) -> Details:
        """Refuse the address of a worker no longer."""
        query = read_query(ReasonQuery)
        return addresses.admit_worker_address(require_api_key(), worker_id, query.reason).dump()


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
