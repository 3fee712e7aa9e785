# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shared keys: made, shown, changed and deleted by their owners.

Source: docs/reference/accounts.md, "Shared keys".
"""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from sqlalchemy.orm import Session

from horde import clock
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
from horde.return_codes import ReturnCode
from horde.shapes.base import SimpleResponse
from horde.shapes.sharedkeys import NEVER, SharedKeyDetails, SharedKeyInput

SHARED_KEY_COUNT = 3
TRUSTED_SHARED_KEY_COUNT = 10
EDUCATION_SHARED_KEY_COUNT = 1000  # a class


def make_shared_key(api_key: str, body: SharedKeyInput) -> SharedKeyDetails:
    """A new shared key of an account. Raises Unauthorized or Forbidden."""
    now = clock.utcnow()

    def work(session: Session) -> SharedKeyDetails:
        caller = require_owner(session, api_key)
        allowed = get_allowed_count(caller)
        if count_shared_keys_before_a_new_one(session, caller.id) >= allowed:
            raise Forbidden(
                f"This account may have at most {allowed} shared keys. Delete one first.",
                ReturnCode.FORBIDDEN,
            )
        sharedkey_id = create_shared_key(session, caller.id, list_columns(body, now), now)
        return build_details(require_shared_key(session, str(sharedkey_id)))

    return run_transaction(work)


def show_shared_key(sharedkey_id: str) -> SharedKeyDetails:
    """A shared key and what is left of its budget; whoever has the id has the key. Raises
    Unauthorized.
    """
    with reading() as session:
        return build_details(require_shared_key(session, sharedkey_id))


def modify_shared_key(api_key: str, sharedkey_id: str, body: SharedKeyInput) -> SharedKeyDetails:
    """A shared key changed by its owner; what is not sent stays. Raises Unauthorized, Forbidden or
    BadRequest.
    """
    columns = list_columns(body, clock.utcnow())

    def work(session: Session) -> SharedKeyDetails:
        stored = require_own_shared_key(session, api_key, sharedkey_id)
        if not columns:
            raise BadRequest(
                "No change of the shared key was selected.",
                ReturnCode.NO_SHARED_KEY_MOD_SELECTED,
            )
        change_shared_key(session, stored.id, columns)
        return build_details(require_shared_key(session, sharedkey_id))

    return run_transaction(work)


def remove_shared_key(api_key: str, sharedkey_id: str) -> SimpleResponse:
    """A shared key deleted by its owner, with the requests made by it. Raises Unauthorized or
    Forbidden.
    """

    def work(session: Session) -> None:
        stored = require_own_shared_key(session, api_key, sharedkey_id)
        if not delete_shared_key(session, stored.id, clock.utcnow()):
            raise _no_such_key()

    run_transaction(work)
    return SimpleResponse()


def list_columns(body: SharedKeyInput, now: datetime) -> dict[str, object]:
    """What was sent, as it is stored: the expiry as a moment, null for never."""
    columns: dict[str, object] = body.model_dump(exclude_none=True)
    if body.expiry is not None:
        columns["expiry"] = None if body.expiry == NEVER else now + timedelta(days=body.expiry)
    return columns


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
        raise _no_such_key()
    return stored


def _no_such_key() -> Unauthorized:
    return Unauthorized("There is no such shared key.", ReturnCode.INVALID_API_KEY)


def require_own_shared_key(session: Session, api_key: str, text: str) -> StoredSharedKey:
    """The shared key of a path when it is the caller's; raises Unauthorized or Forbidden."""
    caller = require_owner(session, api_key)
    stored = require_shared_key(session, text)
    if stored.owner_id != caller.id:
        raise Forbidden(
            "This shared key is not yours. Use the key of its owner.", ReturnCode.FORBIDDEN
        )
    return stored


def build_details(stored: StoredSharedKey) -> SharedKeyDetails:
    """A shared key as the API shows it."""
    expiry = None if stored.expiry is None else format_datetime(stored.expiry.replace(tzinfo=UTC))
    return SharedKeyDetails(
        id=str(stored.id),
        username=f"{stored.owner_name}#{stored.owner_id}",
        name=stored.name,
        kudos=stored.kudos,
        expiry=expiry,
        utilized=stored.utilized,
        max_image_pixels=stored.max_image_pixels,
        max_image_steps=stored.max_image_steps,
        max_text_tokens=stored.max_text_tokens,
    )
