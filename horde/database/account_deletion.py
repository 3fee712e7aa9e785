# SPDX-License-Identifier: AGPL-3.0-or-later
"""Erasing an account: what of it goes, and what stays because others' figures add up with it.

The row stays, without a name, an identity or a key that fits. So do its postings, its records and
its styles.
"""

from datetime import datetime, timedelta
from uuid import uuid4

from sqlalchemy import delete, exists, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.user import WIPED, User, UserSharedKey
from horde.classes.base.worker import Worker
from horde.database.evidence import erase_evidence_of
from horde.database.sharedkeys import delete_shared_key
from horde.database.users import announce_change
from horde.database.workers import announce_owner_change
from horde.exceptions import Locked
from horde.return_codes import ReturnCode

INACTIVITY_BEFORE_WIPE = timedelta(days=30)


def wipe_account(session: Session, user_id: int, now: datetime) -> bool:
    """Erase an account that did nothing for 30 days; False when it did, or is erased already.

    Its workers and shared keys are deleted. Errors: Locked while a job refers to one of the
    workers.
    """
    session.execute(select(User.id).where(User.id == user_id).with_for_update())
    for sharedkey_id in session.scalars(
        select(UserSharedKey.id).where(UserSharedKey.user_id == user_id)
    ).all():
        delete_shared_key(session, sharedkey_id, now)
    erase_evidence_of(session, user_id, now)
    _delete_workers(session, user_id)
    wiped = session.execute(
        update(User)
        .where(
            User.id == user_id,
            User.oauth_id != WIPED,
            User.last_active <= now - INACTIVITY_BEFORE_WIPE,
        )
        .values(
            username=WIPED,
            oauth_id=WIPED,
            contact=WIPED,
            api_key=f"{WIPED} {uuid4().hex}",  # no hash of any key
            proxy_passkey=None,
            public_workers=False,
            monthly_kudos=0,
        )
        .returning(User.id)
        .execution_options(synchronize_session=False)
    )
    announce_change(session, user_id)
    return wiped.first() is not None


def _delete_workers(session: Session, user_id: int) -> None:
    locked = Locked(
        "A worker of the account still has jobs. Put it into maintenance and try again in half an"
        " hour.",
        ReturnCode.LOCKED,
    )
    announce_owner_change(session, user_id)
    own = select(Worker.id).where(Worker.user_id == user_id)
    if session.scalar(select(exists().where(ProcessingGeneration.worker_id.in_(own)))):
        raise locked
    try:
        with session.begin_nested():
            session.execute(
                delete(Worker)
                .where(Worker.user_id == user_id)
                .execution_options(synchronize_session=False)
            )
    except IntegrityError:  # a pop was faster
        raise locked from None
