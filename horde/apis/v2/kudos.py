# SPDX-License-Identifier: AGPL-3.0-or-later
"""The kudos routes: gifts and awards."""

from flask import request
from flask_restx import Api, Namespace, Resource

from horde.actions.kudos import award_kudos, transfer_kudos
from horde.apis.bodies import read_body
from horde.apis.requests import require_api_key
from horde.apis.swagger import build_answer_model, build_body_model
from horde.json_text import JsonObject
from horde.limiter import limit_kudos_transfer
from horde.shapes.kudos import (
    KudosAwarded,
    KudosAwardInput,
    KudosTransferInput,
    KudosTransferred,
)

namespace = Namespace("kudos", description="Gifts and awards.", path="/v2/kudos")
transfer_input = build_body_model(namespace, KudosTransferInput)
transferred = build_answer_model(namespace, KudosTransferred)
award_input = build_body_model(namespace, KudosAwardInput)
awarded = build_answer_model(namespace, KudosAwarded)

REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}
IDEMPOTENCY_KEY = {
    "Idempotency-Key": {
        "in": "header",
        "description": "A word of the sender's own. Sent again with it, a gift moves nothing more.",
    }
}

type Details = JsonObject


@namespace.route("/transfer")
class KudosTransfer(Resource):
    """Gifts."""

    @namespace.doc(params=REQUIRED_KEY | IDEMPOTENCY_KEY)
    @namespace.expect(transfer_input, validate=False)
    @namespace.response(200, "What was given", transferred)
    @namespace.response(
        400,
        "InvalidTargetUsername, KudosTransferNotEnough, TooFastKudosTransfers,"
        " IdempotencyKeyConflict, …",
    )
    @namespace.response(401, "InvalidAPIKey")
    @limit_kudos_transfer
    def post(self) -> Details:
        """Give kudos to an account or to a shared key."""
        body = read_body(KudosTransferInput)
        idempotency_key = request.headers.get("Idempotency-Key") or None
        return transfer_kudos(require_api_key(), body, idempotency_key).dump()


@namespace.route("/award")
class KudosAward(Resource):
    """Awards."""

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(award_input, validate=False)
    @namespace.response(200, "What was awarded", awarded)
    @namespace.response(400, "InvalidAwardUsername, KudosAwardToAnon, …")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotAllowedAwards, DeletedUser")
    def post(self) -> Details:
        """Award kudos to an account; the horde's first account alone may."""
        body = read_body(KudosAwardInput)
        return award_kudos(require_api_key(), body).dump()


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
