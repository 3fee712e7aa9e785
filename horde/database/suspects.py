# SPDX-License-Identifier: AGPL-3.0-or-later
"""What follows when a worker does what an honest one rarely does.

Each function is an edge of its own: it opens a transaction, and is called after the commit of what
gave rise to it. Source: docs/explanation/countermeasures.md, "Points of suspicion".
"""

from functools import partial
from uuid import UUID

from sqlalchemy.orm import Session

from horde.classes.base.suspicion import Suspicion
from horde.database.suspicions import add_worker_suspicion
from horde.database.workers import announce_worker_change
from horde.db import after_commit, run_transaction
from horde.notices import NoticeKind, queue_notice

LONG_WORKER_NAME = 100
EXTREME_WORKER_NAME = 200


def suspect_worker(worker_id: UUID, owner_id: int, reason: Suspicion) -> None:
    """Give a worker and its owner a point, and tell the moderators when it paused the worker."""

    def work(session: Session) -> None:
        paused = add_worker_suspicion(session, worker_id, owner_id, reason)
        if paused is None:
            return
        announce_worker_change(session, paused.id, paused.name)
        content = (
            f"Worker {paused.id} of user {paused.owner_id} was paused after points of suspicion,"
            f" the last one {reason.name}."
        )
        after_commit(session, partial(queue_notice, NoticeKind.PAUSED_WORKER, content))

    run_transaction(work)


def suspect_worker_name(worker_id: UUID, owner_id: int, name: str) -> None:
    """Give points for a name, as it was sent, that is far longer than any needs to be."""
    if len(name) > LONG_WORKER_NAME:
        suspect_worker(worker_id, owner_id, Suspicion.WORKER_NAME_LONG)
    if len(name) > EXTREME_WORKER_NAME:
        suspect_worker(worker_id, owner_id, Suspicion.WORKER_NAME_EXTREME)
