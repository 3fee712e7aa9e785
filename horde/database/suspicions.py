# SPDX-License-Identifier: AGPL-3.0-or-later
"""Points of suspicion of accounts and workers."""

from collections.abc import Collection

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from horde.classes.base.suspicion import SUSPICION_LIMIT, UserSuspicion, WorkerSuspicion
from horde.classes.base.worker import Worker


def forget_suspicions(session: Session, user_id: int) -> None:
    """Take back every point of an account and of its workers."""
    own_workers = select(Worker.id).where(Worker.user_id == user_id)
    for statement in (
        delete(WorkerSuspicion).where(WorkerSuspicion.worker_id.in_(own_workers)),
        delete(UserSuspicion).where(UserSuspicion.user_id == user_id),
    ):
        session.execute(statement.execution_options(synchronize_session=False))


def list_suspicious_users(session: Session, user_ids: Collection[int]) -> set[int]:
    """Those of the accounts with so many points that a person has to decide. No statement for
    none. Trusted accounts are never under suspicion: leave them out.
    """
    if not user_ids:
        return set()
    return set(
        session.scalars(
            select(UserSuspicion.user_id)
            .where(UserSuspicion.user_id.in_(user_ids))
            .group_by(UserSuspicion.user_id)
            .having(func.count() >= SUSPICION_LIMIT)
        )
    )
