# SPDX-License-Identifier: AGPL-3.0-or-later
"""The moderators' rules: rows of `filters`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, case, delete, func, insert, or_, select, text, update
from sqlalchemy.orm import Session

from horde.classes.base.stats import Filter
from horde.classes.base.user import User

FILTER_LOCK = 0x46494C54  # of this database's advisory locks: a pair with 0
NOBODY = "unknown"  # who wrote a rule that came with an upgrade or from a file


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFilter:
    """A rule, and who added or last changed it."""

    id: int
    regex: str
    filter_type: int
    description: str | None
    replacement: str
    author: str


def list_filters(
    session: Session, *, filter_type: int | None = None, contains: str | None = None
) -> list[StoredFilter]:
    """Rules in the order they are applied in."""
    statement = _select_filters().order_by(Filter.id)
    if filter_type is not None:
        statement = statement.where(Filter.filter_type == filter_type)
    if contains:
        statement = statement.where(
            or_(
                Filter.regex.contains(contains, autoescape=True),
                Filter.description.contains(contains, autoescape=True),
            )
        )
    return [StoredFilter(**row._mapping) for row in session.execute(statement)]


def find_filter(session: Session, filter_id: int) -> StoredFilter | None:
    """A rule; None when there is none of this id."""
    row = session.execute(_select_filters().where(Filter.id == filter_id)).one_or_none()
    return None if row is None else StoredFilter(**row._mapping)


def find_same_filter(session: Session, *, regex: str, filter_type: int) -> int | None:
    """The id of the rule with this expression and type. Until the transaction ends nobody else
    adds one, or there would be two.
    """
    session.execute(text("SELECT pg_advisory_xact_lock(:kind, 0)"), {"kind": FILTER_LOCK})
    return session.scalar(
        select(Filter.id)
        .where(Filter.regex == regex, Filter.filter_type == filter_type)
        .order_by(Filter.id)
        .limit(1)
    )


def add_filter(session: Session, columns: Mapping[str, object], user_id: int | None) -> int:
    """Store a rule; its id."""
    statement = insert(Filter).values(user_id=user_id, **columns).returning(Filter.id)
    return int(session.execute(statement).scalar_one())


def change_filter(
    session: Session, filter_id: int, columns: Mapping[str, object], user_id: int | None
) -> bool:
    """Set columns of a rule; False when it is gone."""
    changed = session.execute(
        update(Filter)
        .where(Filter.id == filter_id)
        .values(user_id=user_id, **columns)
        .returning(Filter.id)
        .execution_options(synchronize_session=False)
    )
    return changed.first() is not None


def delete_filter(session: Session, filter_id: int) -> bool:
    """Delete a rule; False when it is gone."""
    deleted = session.execute(
        delete(Filter)
        .where(Filter.id == filter_id)
        .returning(Filter.id)
        .execution_options(synchronize_session=False)
    )
    return deleted.first() is not None


def _select_filters() -> Select[Any]:
    author = case((User.id.is_not(None), func.concat(User.username, "#", User.id)), else_=NOBODY)
    return select(
        Filter.id,
        Filter.regex,
        Filter.filter_type,
        Filter.description,
        Filter.replacement,
        author.label("author"),
    ).outerjoin(User, User.id == Filter.user_id)
