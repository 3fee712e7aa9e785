# SPDX-License-Identifier: AGPL-3.0-or-later
"""Points of suspicion of accounts and workers."""

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from horde.classes.base.suspicion import UserSuspicion, WorkerSuspicion
from horde.classes.base.worker import Worker


def forget_suspicions(session: Session, user_id: int) -> None:
    """Take back every point of an account and of its workers."""
    own_workers = select(Worker.id).where(Worker.user_id == user_id)
    for statement in (
        delete(WorkerSuspicion).where(WorkerSuspicion.worker_id.in_(own_workers)),
        delete(UserSuspicion).where(UserSuspicion.user_id == user_id),
    ):
        session.execute(statement.execution_options(synchronize_session=False))
