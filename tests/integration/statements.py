# SPDX-License-Identifier: AGPL-3.0-or-later
"""Counting what is sent to Postgres."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import event
from sqlalchemy.orm import Session

from horde import db


@contextmanager
def noting_statements() -> Iterator[list[str]]:
    """The statements that any thread sends in the block, as they are sent."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    engine = db.require_engine()
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)


def count_statements(session: Session, work: Callable[[], object]) -> int:
    """How many statements `work` sends."""
    session.connection()  # the transaction has begun
    with noting_statements() as seen:
        work()
    return len(seen)
