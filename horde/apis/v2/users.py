# SPDX-License-Identifier: AGPL-3.0-or-later
"""The account routes: lists, who a key belongs to, what an account is, and its changes."""

from ipaddress import ip_address

from flask import request
from flask_restx import Api, Namespace, Resource

from horde.actions.client_tests import make_test_user
from horde.actions.user_changes import change_user, delete_user
from horde.actions.users import find_user, list_users, show_user
from horde.apis.bodies import read_body, read_query
from horde.apis.requests import find_api_key, get_config, require_api_key
from horde.apis.swagger import build_answer_model, build_body_model, build_query_params
from horde.exceptions import Forbidden, NotFound
from horde.json_text import JsonObject
from horde.limiter import limit_user, limit_user_list
from horde.shapes.base import ReasonQuery, SimpleResponse
from horde.shapes.users import (
    ModifyUser,
    ModifyUserInput,
    TestUser,
    TestUserInput,
    UserDetails,
    UsersQuery,
)
from horde.written_answer import WrittenAnswer

namespace = Namespace("users", description="Accounts.", path="/v2")
user_details = build_answer_model(namespace, UserDetails)
modify_user_input = build_body_model(namespace, ModifyUserInput)
modify_user = build_answer_model(namespace, ModifyUser)
simple_response = build_answer_model(namespace, SimpleResponse)
test_user_input = build_body_model(namespace, TestUserInput)
test_user = build_answer_model(namespace, TestUser)

OPTIONAL_KEY = {
    "apikey": {"in": "header", "description": "The account's own or a moderator's key shows more."}
}
REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = JsonObject


@namespace.route("/find_user")
class FindUser(Resource):
    """The account of a key."""

    @namespace.doc(
        params={"apikey": {"in": "header", "description": "A user key, or a shared key."}}
    )
    @namespace.response(200, "The account", user_details)
    @namespace.response(401, "InvalidAPIKey: the key is missing")
    @namespace.response(404, "UserNotFound")
    def get(self) -> Details:
        """The account that a key belongs to; with a shared key what everybody may see of its
        owner.
        """
        return find_user(find_api_key()).dump()


@namespace.route("/users")
class Users(Resource):
    """All accounts."""

    @namespace.doc(params=build_query_params(UsersQuery))
    @namespace.response(200, "The accounts of the page", [user_details])
    @namespace.response(400, "BadRequest")
    @limit_user_list
    def get(self) -> WrittenAnswer:
        """A page of accounts, the richest or the oldest first; up to five minutes old."""
        return list_users(read_query(UsersQuery))


@namespace.route("/users/<string:user_id>")
class UserSingle(Resource):
    """One account."""

    @namespace.doc(params=OPTIONAL_KEY)
    @namespace.response(200, "The account", user_details)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(404, "UserNotFound")
    @limit_user
    def get(self, user_id: str) -> Details:
        """The account, as its viewer may see it."""
        return show_user(user_id, find_api_key()).dump()

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(modify_user_input, validate=False)
    @namespace.response(200, "What was changed", modify_user)
    @namespace.response(
        400, "NoUserModSelected, ProfaneUserName, TooLongUserName, UserNotDeleted, …"
    )
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "NotAdmin, NotModerator, AnonForbiddenUserMod, NonServiceForbidden")
    @namespace.response(404, "UserNotFound")
    @limit_user
    def put(self, user_id: str) -> Details:
        """Change an account. Answers with the new values."""
        body = read_body(ModifyUserInput)
        return change_user(require_api_key(), user_id, body).dump()

    @namespace.doc(params=REQUIRED_KEY | build_query_params(ReasonQuery))
    @namespace.response(200, "Done", simple_response)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(
        403, "AnonForbiddenUser, CannotDeleteMod, NotUserOrMod, CannotWipeActiveUser"
    )
    @namespace.response(404, "UserNotFound")
    @namespace.response(423, "Locked: a worker of the account still has jobs")
    @limit_user
    def delete(self, user_id: str) -> Details:
        """Mark an account for deletion; a marked one that did nothing for 30 days is erased."""
        query = read_query(ReasonQuery)
        return delete_user(require_api_key(), user_id, query.reason).dump()


@namespace.route("/dev/test-user")
class TestUserRoute(Resource):
    """Accounts for tests of clients."""

    @namespace.expect(test_user_input, validate=False)
    @namespace.response(200, "The account there was, with a new key", test_user)
    @namespace.response(201, "A new account", test_user)
    @namespace.response(403, "Forbidden: not from this machine")
    @namespace.response(404, "This horde makes no test accounts")
    def post(self) -> tuple[Details, int]:
        """Make an account, or give the one with this oauth_id a new key. Only from the machine
        itself, where switched on.
        """
        if not get_config().test_apikeys:
            raise NotFound("This horde makes no test accounts.", None)
        # The socket's own peer: what a proxy forwards must not open this.
        if not is_loopback(request.remote_addr):
            raise Forbidden(
                "Test accounts are made from the machine itself only. Register an account instead."
            )
        made = make_test_user(read_body(TestUserInput))
        return made.dump(), 201 if made.created else 200


def is_loopback(address: str | None) -> bool:
    """Whether a socket's peer is on this machine."""
    try:
        parsed = ip_address(address or "")
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
