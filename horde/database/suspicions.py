# SPDX-License-Identifier: AGPL-3.0-or-later
"""Points of suspicion of accounts and workers, and the pause that follows from them.

A point is given in a transaction of its own, after what gave rise to it is committed: it takes a
lock by account, which must not be waited for while rows of jobs are held.
Source: docs/explanation/countermeasures.md, "Points of suspicion".
"""

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import delete, exists, func, select, text, update
from sqlalchemy.orm import Session

from horde.classes.base.suspicion import (
    ACCUMULATING,
    SUSPICION_LIMIT,
    Suspicion,
    UserSuspicion,
    WorkerSuspicion,
)
from horde.classes.base.user import ANONYMOUS_ID, UserRole, UserRoleTypes
from horde.classes.base.worker import Worker

SUSPICION_LOCK = 0x53555350  # of this database's advisory locks: a pair with an account

_ADD_USER_POINT = text(
    """
    INSERT INTO user_suspicions (user_id, suspicion_id)
    SELECT :user_id, :reason
    WHERE :accumulates OR NOT EXISTS (
        SELECT FROM user_suspicions WHERE user_id = :user_id AND suspicion_id = :reason
    )
    """
)
_ADD_WORKER_POINT = text(
    """
    INSERT INTO worker_suspicions (worker_id, suspicion_id)
    SELECT id, :reason FROM workers
    WHERE id = :worker_id AND (:accumulates OR NOT EXISTS (
        SELECT FROM worker_suspicions WHERE worker_id = :worker_id AND suspicion_id = :reason
    ))
    """
)


@dataclass(frozen=True, slots=True)
class PausedWorker:
    """A worker that was paused for its points, and whose it is."""

    id: UUID
    name: str
    owner_id: int


def add_user_suspicion(session: Session, user_id: int, reason: Suspicion) -> None:
    """Give an account a point; a reason that does not accumulate counts once.

    Anonymous gets none.
    """
    if user_id == ANONYMOUS_ID:
        return
    session.execute(
        text("SELECT pg_advisory_xact_lock(:kind, :user_id)"),
        {"kind": SUSPICION_LOCK, "user_id": user_id},
    )
    session.execute(
        _ADD_USER_POINT,
        {"user_id": user_id, "reason": reason, "accumulates": reason in ACCUMULATING},
    )


def add_worker_suspicion(
    session: Session, worker_id: UUID, owner_id: int, reason: Suspicion
) -> PausedWorker | None:
    """Give a worker and its owner a point; the worker, when the point paused it.

    A worker of an untrusted owner is paused from five points on.
    """
    add_user_suspicion(session, owner_id, reason)
    session.execute(
        _ADD_WORKER_POINT,
        {"worker_id": worker_id, "reason": reason, "accumulates": reason in ACCUMULATING},
    )
    points = select(func.count()).where(WorkerSuspicion.worker_id == worker_id).scalar_subquery()
    is_trusted = exists().where(
        UserRole.user_id == Worker.user_id,
        UserRole.user_role == UserRoleTypes.TRUSTED,
        UserRole.value.is_(True),
    )
    paused = session.execute(
        update(Worker)
        .where(
            Worker.id == worker_id,
            Worker.paused.is_(False),
            ~is_trusted,
            points >= SUSPICION_LIMIT,
        )
        .values(paused=True)
        .returning(Worker.id, Worker.name, Worker.user_id)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    return None if paused is None else PausedWorker(*paused)


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
