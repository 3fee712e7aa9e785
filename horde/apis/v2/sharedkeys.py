# SPDX-License-Identifier: AGPL-3.0-or-later
"""The shared key routes: keys that let others generate on an account.

Source: docs/reference/accounts.md, "Shared keys".
"""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Annotated, Any

from flask_restx import Api, Namespace, Resource
from pydantic import BeforeValidator, Field
from sqlalchemy.orm import Session

from horde import clock
from horde.apis.bodies import read_body
from horde.apis.models.sharedkeys import (
    build_deleted,
    build_shared_key_details,
    build_shared_key_input,
)
from horde.apis.requests import require_api_key
from horde.database.sharedkeys import (
    StoredSharedKey,
    change_shared_key,
    count_shared_keys_before_a_new_one,
    create_shared_key,
    delete_shared_key,
    find_shared_key,
)
from horde.database.users import Caller, find_caller, parse_uuid
from horde.db import reading, run_transaction
from horde.exceptions import BadRequest, Forbidden, Unauthorized
from horde.limiter import limit_sharedkey_create
from horde.return_codes import ReturnCode
from horde.shapes.base import Body

NEVER = -1
MAX_BUDGET = 50_000_000
MAX_EXPIRY_DAYS = 36_500
LARGEST_LIMIT = 2**31 - 1  # what the columns hold
SHARED_KEY_COUNT = 3
TRUSTED_SHARED_KEY_COUNT = 10
EDUCATION_SHARED_KEY_COUNT = 1000  # a class

namespace = Namespace(
    "sharedkeys", description="Keys that let others generate on an account.", path="/v2/sharedkeys"
)
shared_key_input = build_shared_key_input(namespace)
shared_key_details = build_shared_key_details(namespace)
deleted = build_deleted(namespace)

REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = dict[str, Any]


def _read_whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# The bounds stand inside the optional: outside of it pydantic compares null with them.
Budget = Annotated[int, BeforeValidator(_read_whole), Field(ge=-1, le=MAX_BUDGET)]
Days = Annotated[int, BeforeValidator(_read_whole), Field(ge=NEVER, le=MAX_EXPIRY_DAYS)]
Limit = Annotated[int, BeforeValidator(_read_whole), Field(ge=-1, le=LARGEST_LIMIT)]


class SharedKeyBody(Body):
    """What its owner sets of a shared key; what is left out keeps its value, or has its default on
    a new key.
    """

    kudos: Budget | None = None
    expiry: Days | None = None
    name: Annotated[str | None, Field(min_length=3, max_length=255)] = None
    max_image_pixels: Limit | None = None
    max_image_steps: Limit | None = None
    max_text_tokens: Limit | None = None

    def list_columns(self, now: datetime) -> Details:
        """What was sent, as it is stored: the expiry as a moment, null for never."""
        columns = self.model_dump(exclude_none=True)
        if "expiry" in columns:
            columns["expiry"] = (
                None if columns["expiry"] == NEVER else now + timedelta(days=columns["expiry"])
            )
        return columns


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
        body = read_body(SharedKeyBody)
        api_key = require_api_key()
        now = clock.utcnow()

        def work(session: Session) -> Details:
            caller = require_owner(session, api_key)
            allowed = get_allowed_count(caller)
            if count_shared_keys_before_a_new_one(session, caller.id) >= allowed:
                raise Forbidden(
                    f"This account may have at most {allowed} shared keys. Delete one first.",
                    ReturnCode.FORBIDDEN,
                )
            sharedkey_id = create_shared_key(session, caller.id, body.list_columns(now), now)
            return build_details(require_shared_key(session, str(sharedkey_id)))

        return run_transaction(work)


@namespace.route("/<string:sharedkey_id>")
class SharedKeySingle(Resource):
    """One shared key."""

    @namespace.response(200, "The key", shared_key_details)
    @namespace.response(401, "InvalidAPIKey: there is no such key")
    def get(self, sharedkey_id: str) -> Details:
        """A shared key and what is left of its budget; whoever has the id has the key."""
        with reading() as session:
            return build_details(require_shared_key(session, sharedkey_id))

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(shared_key_input, validate=False)
    @namespace.response(200, "The key as it is now", shared_key_details)
    @namespace.response(400, "NoSharedKeyModSelected")
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbidden, Forbidden: somebody else's key")
    def patch(self, sharedkey_id: str) -> Details:
        """Change a shared key as its owner; what is not sent stays."""
        columns = read_body(SharedKeyBody).list_columns(clock.utcnow())
        api_key = require_api_key()

        def work(session: Session) -> Details:
            stored = require_own_shared_key(session, api_key, sharedkey_id)
            if not columns:
                raise BadRequest(
                    "No change of the shared key was selected.",
                    ReturnCode.NO_SHARED_KEY_MOD_SELECTED,
                )
            change_shared_key(session, stored.id, columns)
            return build_details(require_shared_key(session, sharedkey_id))

        return run_transaction(work)

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.response(200, "Deleted", deleted)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbidden, Forbidden: somebody else's key")
    def delete(self, sharedkey_id: str) -> Details:
        """Delete a shared key as its owner, with the requests made by it."""
        api_key = require_api_key()

        def work(session: Session) -> None:
            stored = require_own_shared_key(session, api_key, sharedkey_id)
            delete_shared_key(session, stored.id, clock.utcnow())

        run_transaction(work)
        return {"message": "OK"}


def require_owner(session: Session, api_key: str) -> Caller:
    """The account of a user key that may have shared keys; raises Unauthorized or Forbidden."""
    caller = find_caller(session, api_key)
    if caller is None:
        raise Unauthorized("No user with this API key.", ReturnCode.INVALID_API_KEY)
    if caller.is_anonymous:
        raise Forbidden("The anonymous account has no shared keys.", ReturnCode.ANON_FORBIDDEN)
    return caller


def get_allowed_count(caller: Caller) -> int:
    """How many shared keys an account may have."""
    if caller.is_education:
        return EDUCATION_SHARED_KEY_COUNT
    return TRUSTED_SHARED_KEY_COUNT if caller.is_trusted else SHARED_KEY_COUNT


def require_shared_key(session: Session, text: str) -> StoredSharedKey:
    """The shared key of an id in a path; raises Unauthorized, since an unknown one is a wrong
    key.
    """
    sharedkey_id = parse_uuid(text)
    stored = None if sharedkey_id is None else find_shared_key(session, sharedkey_id)
    if stored is None:
        raise Unauthorized("There is no such shared key.", ReturnCode.INVALID_API_KEY)
    return stored


def require_own_shared_key(session: Session, api_key: str, text: str) -> StoredSharedKey:
    """The shared key of a path when it is the caller's; raises Unauthorized or Forbidden."""
    caller = require_owner(session, api_key)
    stored = require_shared_key(session, text)
    if stored.owner_id != caller.id:
        raise Forbidden(
            "This shared key is not yours. Use the key of its owner.", ReturnCode.FORBIDDEN
        )
    return stored


def build_details(stored: StoredSharedKey) -> Details:
    """A shared key as the API shows it; nulls are sent."""
    expiry = None if stored.expiry is None else format_datetime(stored.expiry.replace(tzinfo=UTC))
    return {
        "id": str(stored.id),
        "username": f"{stored.owner_name}#{stored.owner_id}",
        "name": stored.name,
        "kudos": stored.kudos,
        "expiry": expiry,
        "utilized": stored.utilized,
        "max_image_pixels": stored.max_image_pixels,
        "max_image_steps": stored.max_image_steps,
        "max_text_tokens": stored.max_text_tokens,
    }


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
