# SPDX-License-Identifier: AGPL-3.0-or-later
"""The shared key routes: keys that let others generate on an account.

Source: docs/reference/accounts.md, "Shared keys".
"""

from flask_restx import Api, Namespace, Resource

from horde.actions.sharedkeys import (
    make_shared_key,
    modify_shared_key,
    remove_shared_key,
    show_shared_key,
)
from horde.apis.bodies import read_body
from horde.apis.requests import require_api_key
from horde.apis.swagger import build_answer_model, build_body_model
from horde.json_text import JsonObject
from horde.limiter import limit_sharedkey_create
from horde.shapes.base import SimpleResponse
from horde.shapes.sharedkeys import SharedKeyDetails, SharedKeyInput

namespace = Namespace(
    "sharedkeys", description="Keys that let others generate on an account.", path="/v2/sharedkeys"
)
shared_key_input = build_body_model(namespace, SharedKeyInput)
shared_key_details = build_answer_model(namespace, SharedKeyDetails)
deleted = build_answer_model(namespace, SimpleResponse)

REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = JsonObject


@namespace.route("")
class SharedKeys(Resource):
    """Shared keys of an account."""

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(shared_key_input, validate=False)
    @namespace.response(200, "The new key", shared_key_details)
    @namespace.response(400, "BadRequest")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbidden, Forbidden: as many as the account may have")
    @limit_sharedkey_create
    def put(self) -> Details:
        """Make a shared key."""
        body = read_body(SharedKeyInput)
        return make_shared_key(require_api_key(), body).dump()


@namespace.route("/<string:sharedkey_id>")
class SharedKeySingle(Resource):
    """One shared key."""

    @namespace.response(200, "The key", shared_key_details)
    @namespace.response(401, "InvalidAPIKey: there is no such key")
    def get(self, sharedkey_id: str) -> Details:
        """A shared key and what is left of its budget; whoever has the id has the key."""
        return show_shared_key(sharedkey_id).dump()

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(shared_key_input, validate=False)
    @namespace.response(200, "The key as it is now", shared_key_details)
    @namespace.response(400, "NoSharedKeyModSelected")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbidden, Forbidden: somebody else's key")
    def patch(self, sharedkey_id: str) -> Details:
        """Change a shared key as its owner; what is not sent stays."""
        body = read_body(SharedKeyInput)
        return modify_shared_key(require_api_key(), sharedkey_id, body).dump()

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.response(200, "Deleted", deleted)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbidden, Forbidden: somebody else's key")
    def delete(self, sharedkey_id: str) -> Details:
        """Delete a shared key as its owner, with the requests made by it."""
        return remove_shared_key(require_api_key(), sharedkey_id).dump()


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
