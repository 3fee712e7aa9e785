# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shared keys as their owners make, change and delete them. What they may pay for is decided where
a request is admitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID, uuid4

from sqlalchemy import delete, func, insert, select, text, update
from sqlalchemy.orm import Session

from horde.classes.base.kudos import upfront_hold_id
from horde.classes.base.user import WIPED, User, UserSharedKey
from horde.classes.base.waiting_prompt import WaitingPrompt
from horde.database.kudos import release_holds
from horde.database.request_endings import delete_requests

# Kind of the advisory lock that serialises an owner's new keys; the other half is the owner.
SHARED_KEY_LOCK = 0x484B


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSharedKey:
    """A shared key as it is shown, with its owner. Budgets of -1 are unlimited, limits of -1 are
    none.
    """

    id: UUID
    owner_id: int
    owner_name: str
    name: str | None
    kudos: int
    expiry: datetime | None
    utilized: int
    max_image_pixels: int
    max_image_steps: int
    max_text_tokens: int


def find_shared_key(session: Session, sharedkey_id: UUID) -> StoredSharedKey | None:
    """A shared key by its id, read fresh; None when there is none."""
    key = UserSharedKey
    row = session.execute(
        select(
            key.id,
            User.id.label("owner_id"),
            User.username.label("owner_name"),
            key.name,
            key.kudos,
            key.expiry,
            key.utilized,
            key.max_image_pixels,
            key.max_image_steps,
            key.max_text_tokens,
        )
        .join(User, User.id == key.user_id)
        .where(key.id == sharedkey_id, User.oauth_id != WIPED)
    ).one_or_none()
    return None if row is None else StoredSharedKey(**row._mapping)


def count_shared_keys_before_a_new_one(session: Session, owner_id: int) -> int:
    """How many an account has. Until the transaction ends nobody else counts for the same owner, or
    two would both fit.
    """
    session.execute(
        text("SELECT pg_advisory_xact_lock(:kind, :owner_id)"),
        {"kind": SHARED_KEY_LOCK, "owner_id": owner_id},
    )
    return session.scalar(select(func.count()).where(UserSharedKey.user_id == owner_id)) or 0


def create_shared_key(
    session: Session, owner_id: int, columns: Mapping[str, object], now: datetime
) -> UUID:
    """Store a new shared key; its id, which is the key itself."""
    sharedkey_id = uuid4()
    session.execute(
        insert(UserSharedKey).values(id=sharedkey_id, user_id=owner_id, created=now, **columns)
    )
    return sharedkey_id


def change_shared_key(session: Session, sharedkey_id: UUID, columns: Mapping[str, object]) -> None:
    """Set the given columns and leave the others."""
    session.execute(
        update(UserSharedKey)
        .where(UserSharedKey.id == sharedkey_id)
        .values(**columns)
        .execution_options(synchronize_session=False)
    )


def delete_shared_key(session: Session, sharedkey_id: UUID, now: datetime) -> bool:
    """Delete a shared key with the requests made by it, whose holds are released and whose objects
    go after the commit. False when somebody else deleted it first.

    Locks the requests first, as a submit does, which charges the key while it holds its request.
    Then the key, so that no request joins them unseen.
    """
    made = (
        select(WaitingPrompt.id)
        .where(WaitingPrompt.sharedkey_id == sharedkey_id)
        .order_by(WaitingPrompt.id)
    )
    session.scalars(made.with_for_update()).all()
    session.execute(
        select(UserSharedKey.id).where(UserSharedKey.id == sharedkey_id).with_for_update()
    )
    request_ids = session.scalars(made).all()
    release_holds(session, [upfront_hold_id(wp_id) for wp_id in request_ids], now)
    delete_requests(session, request_ids)
    deleted = session.execute(
        delete(UserSharedKey)
        .where(UserSharedKey.id == sharedkey_id)
        .returning(UserSharedKey.id)
        .execution_options(synchronize_session=False)
    )
    return deleted.first() is not None
