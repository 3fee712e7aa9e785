# SPDX-License-Identifier: AGPL-3.0-or-later
"""Messages to workers: written, listed, and delivered with pops."""

from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from typing import TypedDict
from uuid import UUID

from sqlalchemy import ColumnElement, Table, and_, delete, func, or_, select
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session

from horde.classes.base.worker import Worker
from horde.classes.base.worker_message import WorkerMessage
from horde.database.caches import TimedCache
from horde.db import after_commit, insert_rows, table_of
from horde.json_text import JsonObject
from horde.pop_epochs import EVERYTHING, move_marks
from horde.shapes.base import ModelType
from horde.shapes.worker_messages import Validity, WorkerMessageDetails

MESSAGES_A_PAGE = 50
MESSAGES_A_POP = 50  # the newest; a pop stays small whatever is written
MESSAGE_SECONDS = 60.0
WORKER_TYPES = {
    ModelType.IMAGE: "stable_worker",
    ModelType.TEXT: "text_worker",
    ModelType.INTERROGATION: "interrogation_worker",
}
_KINDS = {worker_type: kind for kind, worker_type in WORKER_TYPES.items()}

messages = table_of(WorkerMessage)

_details = TimedCache[UUID, WorkerMessageDetails | None](MESSAGE_SECONDS)


class ActiveMessage(TypedDict):
    """A message as a worker is to read it, with the time of its end in seconds since 1970."""

    id: str
    message: str
    origin: str | None
    expiry: float


class ShownMessage(TypedDict):
    """The same as a pop tells it, with the end in RFC 822."""

    id: str
    message: str
    origin: str | None
    expiry: str


def build_active_messages(
    workers: Table, now: ColumnElement[datetime]
) -> ColumnElement[list[ActiveMessage] | None]:
    """The messages that each of the `workers` of a statement is to read at `now`, newest first, as
    a JSON column; null for none. As a column, a pop reads them with its worker.
    """
    shown = (
        select(messages)
        .where(
            messages.c.expiry > now,
            or_(
                messages.c.worker_id == workers.c.id,
                and_(
                    messages.c.worker_id.is_(None),
                    or_(
                        messages.c.worker_type.is_(None),
                        messages.c.worker_type == workers.c.worker_type,
                    ),
                ),
            ),
        )
        .order_by(messages.c.created.desc(), messages.c.id)
        .limit(MESSAGES_A_POP)
        .correlate(workers)
        .subquery("shown")
    )
    message = func.json_build_object(
        "id",
        shown.c.id,
        "message",
        shown.c.message,
        "origin",
        shown.c.origin,
        "expiry",
        func.date_part("epoch", shown.c.expiry),
    )
    newest_first = aggregate_order_by(message, shown.c.created.desc(), shown.c.id)
    return select(func.json_agg(newest_first)).scalar_subquery()


def show_active_messages(stored: Sequence[ActiveMessage] | None) -> list[ShownMessage]:
    """What a pop tells of the messages of `build_active_messages`; dates in RFC 822."""
    return [
        {**message, "expiry": format_datetime(datetime.fromtimestamp(message["expiry"], UTC))}
        for message in stored or ()
    ]


def insert_messages(session: Session, rows: Sequence[JsonObject]) -> None:
    """Store messages; each names every column."""
    insert_rows(session, messages, rows)
    after_commit(session, partial(move_marks, [EVERYTHING]))


def list_messages(
    session: Session,
    *,
    user_id: int | None,
    worker_id: UUID | None,
    viewer_id: int | None,
    validity: Validity,
    page: int,
    now: datetime,
) -> list[WorkerMessageDetails]:
    """A page of messages, newest first. One statement.

    With `viewer_id` only those that the account wrote, or that are to one of its workers.
    """
    statement = select(WorkerMessage)
    if user_id is not None:
        statement = statement.where(WorkerMessage.user_id == user_id)
    if worker_id is not None:
        statement = statement.where(WorkerMessage.worker_id == worker_id)
    if viewer_id is not None:
        own_workers = select(Worker.id).where(Worker.user_id == viewer_id)
        statement = statement.where(
            or_(WorkerMessage.user_id == viewer_id, WorkerMessage.worker_id.in_(own_workers))
        )
    if validity is Validity.ACTIVE:
        statement = statement.where(WorkerMessage.expiry > now)
    elif validity is Validity.EXPIRED:
        statement = statement.where(WorkerMessage.expiry <= now)
    statement = (
        statement.order_by(WorkerMessage.created.desc(), WorkerMessage.id)
        .offset((page - 1) * MESSAGES_A_PAGE)
        .limit(MESSAGES_A_PAGE)
    )
    return [build_details(row) for row in session.scalars(statement)]


def find_message(session: Session, message_id: UUID) -> WorkerMessageDetails | None:
    """A message by its id; at most a minute old. None when there is none."""

    def read() -> WorkerMessageDetails | None:
        row = session.get(WorkerMessage, message_id)
        return None if row is None else build_details(row)

    return _details.get(message_id, read)


def find_author(session: Session, message_id: UUID) -> int | None:
    """The account that wrote a message; None when there is no such message."""
    return session.scalar(select(WorkerMessage.user_id).where(WorkerMessage.id == message_id))


def delete_message(session: Session, message_id: UUID) -> None:
    """Delete a message."""
    session.execute(delete(WorkerMessage).where(WorkerMessage.id == message_id))
    after_commit(session, partial(move_marks, [EVERYTHING]))


def forget_message(message_id: UUID) -> None:
    """Show a deleted message no more. Call it after the commit; other processes follow."""
    _details.forget(message_id)


def list_worker_owners(session: Session, worker_ids: Sequence[UUID]) -> dict[UUID, int]:
    """The owners of those of the workers that exist, of any kind."""
    rows = session.execute(select(Worker.id, Worker.user_id).where(Worker.id.in_(worker_ids)))
    return {row.id: row.user_id for row in rows}


def build_details(row: WorkerMessage) -> WorkerMessageDetails:
    """A stored message as it is shown."""
    return WorkerMessageDetails(
        id=str(row.id),
        worker_id=None if row.worker_id is None else str(row.worker_id),
        worker_type=None if row.worker_type is None else _KINDS[row.worker_type],
        user_id=str(row.user_id),
        message=row.message,
        origin=row.origin,
        expiry=_show_time(row.expiry),
        created=_show_time(row.created),
    )


def _show_time(moment: datetime) -> str:
    return format_datetime(moment.replace(tzinfo=UTC))
