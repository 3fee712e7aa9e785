# SPDX-License-Identifier: AGPL-3.0-or-later
"""Accounts for tests of clients."""

from functools import partial
from uuid import uuid4

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from horde import clock
from horde.classes.base.kudos import to_kudos
from horde.classes.base.user import UserRoleTypes
from horde.database.kudos import fold_postings, get_effective_kudos, get_projected_kudos
from horde.database.users import (
    adjust_kudos,
    create_user,
    find_user_by_identity,
    reset_api_key,
    set_role,
)
from horde.db import run_transaction
from horde.shapes.users import TestUser, TestUserInput


def make_test_user(body: TestUserInput) -> TestUser:
    """Make an account, or give the one with this identity a new key.

    Its kudos can be spent at once.
    """
    try:
        made = run_transaction(partial(_make_test_user, body=body))
    except IntegrityError:  # another request made the account in between
        made = run_transaction(partial(_make_test_user, body=body))
    fold_postings()
    return made


def _make_test_user(session: Session, body: TestUserInput) -> TestUser:
    now = clock.utcnow()
    # A made-up identity, and not a bare UUID: that would make the account pseudonymous.
    oauth_id = body.oauth_id or f"test_{uuid4().hex}"
    user = find_user_by_identity(session, oauth_id)
    is_new = user is None
    if user is None:
        made = create_user(session, username=body.username, oauth_id=oauth_id, now=now)
        user, api_key = made.user, made.api_key
    else:
        api_key = reset_api_key(session, user.id)
    # Moderator before trusted: granting it grants trust too, which the second decides on.
    set_role(session, user.id, UserRoleTypes.MODERATOR, granted=body.moderator, now=now)
    set_role(session, user.id, UserRoleTypes.TRUSTED, granted=body.trusted, now=now)
    if body.kudos is not None:
        difference = to_kudos(body.kudos) - get_projected_kudos(session, user.id)
        if difference:
            adjust_kudos(session, user.id, difference, action="admin", now=now)
    return TestUser(
        api_key=api_key,
        user_id=str(user.id),
        username=user.username,
        alias=user.alias,
        kudos=int(get_effective_kudos(session, user.id)),
        trusted=body.trusted,
        moderator=body.moderator,
        created=is_new,
    )
