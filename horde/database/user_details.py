# SPDX-License-Identifier: AGPL-3.0-or-later
"""Accounts as they are shown, by how much the viewer may see: one statement for one or for many."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from enum import IntEnum
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Row,
    Select,
    SQLColumnExpression,
    String,
    Text,
    Uuid,
    cast,
    column,
    func,
    select,
    table,
)
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session

from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.suspicion import UserSuspicion
from horde.classes.base.user import (
    ANONYMOUS_ID,
    WIPED,
    User,
    UserRecords,
    UserRecordTypes,
    UserRole,
    UserRoleTypes,
    UserSharedKey,
    UserStats,
    is_pseudonymous,
)
from horde.classes.base.worker import Worker
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.shapes import users as shapes

ACTIVE_GENERATIONS_LIMIT = 500  # as many as the largest concurrency allows
MAX_SHOWN_STYLES = 1000  # bounds the answer; nobody has as many

# Tables of parts that are only shown here.
_styles = table(
    "styles",
    column("id", Uuid()),
    column("name", String()),
    column("style_type", String()),
    column("user_id"),
    column("public"),
)


class Privilege(IntEnum):
    """How much of an account a viewer sees."""

    PUBLIC = 0
    OWNER = 1
    MODERATOR = 2


def find_user_details(
    session: Session, user_id: int, privilege: Privilege, now: datetime
) -> shapes.UserDetails | None:
    """Everything a viewer may see of an account, in one statement; None for an unknown one."""
    row = session.execute(_select_details(privilege).where(User.id == user_id)).one_or_none()
    return None if row is None else _build_details(row, privilege, now)


def list_user_details(
    session: Session, *, sort: shapes.UserSort, offset: int, limit: int, now: datetime
) -> list[shapes.UserDetails]:
    """What everybody may see of a page of accounts, wiped ones left out. One statement."""
    order = {
        shapes.UserSort.KUDOS: (User.kudos.desc(), User.id),
        shapes.UserSort.AGE: (User.created, User.id),
    }[sort]
    # The page first: what hangs from an account is read for the accounts on it alone.
    page = (
        select(User.id).where(User.oauth_id != WIPED).order_by(*order).offset(offset).limit(limit)
    )
    statement = _select_details(Privilege.PUBLIC).where(User.id.in_(page)).order_by(*order)
    return [_build_details(row, Privilege.PUBLIC, now) for row in session.execute(statement)]


def _select_details(privilege: Privilege) -> Select[Any]:
    statement = select(*_list_public_columns(privilege)).where(User.oauth_id != WIPED)
    if privilege >= Privilege.OWNER:
        statement = statement.add_columns(*_list_owner_columns())
    if privilege >= Privilege.MODERATOR:
        statement = statement.add_columns(
            User.evaluating_kudos,
            User.monthly_kudos,
            User.monthly_kudos_last_received,
            User.admin_comment,
            User.proxy_passkey,
            _of_user(
                select(func.count())
                .select_from(UserSuspicion)
                .where(UserSuspicion.user_id == User.id)
            ).label("suspicions"),
        )
    return statement


def _list_public_columns(privilege: Privilege) -> list[SQLColumnExpression[Any]]:
    shown_styles = select(_styles).where(_styles.c.user_id == User.id)
    if privilege < Privilege.OWNER:
        shown_styles = shown_styles.where(_styles.c.public)
    shown = shown_styles.order_by(_styles.c.name).limit(MAX_SHOWN_STYLES).correlate(User).lateral()
    return [
        User.id.label("id"),
        User.username.label("username"),
        User.oauth_id.label("oauth_id"),
        User.kudos.label("kudos"),
        User.concurrency.label("concurrency"),
        User.worker_invited.label("worker_invited"),
        User.created.label("created"),
        _of_user(
            select(func.array_agg(cast(UserRole.user_role, Text), type_=ARRAY(Text))).where(
                UserRole.user_id == User.id, UserRole.value.is_(True)
            )
        ).label("roles"),
        User.public_workers,
        _list_ids(Worker.id, Worker.user_id, Worker.created).label("worker_ids"),
        _of_user(
            select(func.json_object_agg(UserStats.action, UserStats.value)).where(
                UserStats.user_id == User.id
            )
        ).label("stats"),
        _of_user(
            select(
                func.json_agg(
                    func.json_build_array(
                        cast(UserRecords.record_type, Text), UserRecords.record, UserRecords.value
                    )
                )
            ).where(UserRecords.user_id == User.id)
        ).label("records"),
        _of_user(
            select(
                func.json_agg(
                    func.json_build_object(
                        "name", shown.c.name, "id", shown.c.id, "type", shown.c.style_type
                    )
                )
            ).select_from(shown)
        ).label("styles"),
    ]


def _list_owner_columns() -> list[SQLColumnExpression[Any]]:
    return [
        _list_ids(UserSharedKey.id, UserSharedKey.user_id, UserSharedKey.created).label(
            "sharedkey_ids"
        ),
        User.contact,
        _of_user(_select_active_text_requests()).label("text_request_ids"),
    ]


def _select_active_text_requests() -> Select[Any]:
    """Requests that are waiting or being worked on. Chat requests are left out: whoever has the id
    may read them.

    None are listed for the anonymous account, whose key everybody has.
    """
    in_work = (
        select(ProcessingGeneration.id)
        .where(
            ProcessingGeneration.wp_id == TextWaitingPrompt.id,
            ProcessingGeneration.generation.is_(None),
            ProcessingGeneration.faulted.is_(False),
        )
        .exists()
    )
    active = (
        select(TextWaitingPrompt.id, TextWaitingPrompt.created)
        .where(
            TextWaitingPrompt.user_id == User.id,
            User.id != ANONYMOUS_ID,
            TextWaitingPrompt.active.is_(True),
            TextWaitingPrompt.faulted.is_(False),
            TextWaitingPrompt.is_chat.is_(False),
            (TextWaitingPrompt.n > 0) | in_work,
        )
        .order_by(TextWaitingPrompt.created)
        .limit(ACTIVE_GENERATIONS_LIMIT)
        .correlate(User)
        .lateral()
    )
    return select(func.array_agg(aggregate_order_by(active.c.id, active.c.created))).select_from(
        active
    )


def _list_ids(ids: Any, user_ids: Any, created: Any) -> ColumnElement[Any]:
    """The ids of what belongs to the account, oldest first."""
    return _of_user(
        select(func.array_agg(aggregate_order_by(ids, created, ids))).where(user_ids == User.id)
    )


def _of_user(statement: Select[Any]) -> ColumnElement[Any]:
    return statement.correlate(User).scalar_subquery()


def _build_details(row: Row[Any], privilege: Privilege, now: datetime) -> shapes.UserDetails:
    roles = frozenset(row.roles or ())

    def has(role: UserRoleTypes) -> bool:
        return role.name in roles

    owner: dict[str, Any] = {}
    moderator: dict[str, Any] = {}
    if privilege >= Privilege.OWNER:
        owner = _build_owner_part(row, has)
    if privilege >= Privilege.MODERATOR:
        moderator = _build_moderator_part(row)
    worker_ids = _to_texts(row.worker_ids)
    shows_workers = row.public_workers or privilege >= Privilege.OWNER
    return shapes.UserDetails(
        username=f"{row.username}#{row.id}",
        id=row.id,
        kudos=row.kudos,
        concurrency=row.concurrency,
        worker_invited=row.worker_invited,
        moderator=has(UserRoleTypes.MODERATOR),
        kudos_details=_build_kudos_details(row.stats or {}),
        worker_count=len(worker_ids),
        worker_ids=worker_ids if shows_workers else None,
        styles=[shapes.ResponseModelStylesUser(**style) for style in row.styles or ()],
        trusted=has(UserRoleTypes.TRUSTED),
        flagged=has(UserRoleTypes.FLAGGED),
        service=has(UserRoleTypes.SERVICE),
        education=has(UserRoleTypes.EDUCATION),
        customizer=has(UserRoleTypes.CUSTOMIZER),
        deleted=has(UserRoleTypes.DELETED),
        pseudonymous=is_pseudonymous(row.oauth_id),
        account_age=max(int((now - row.created).total_seconds()), 0),
        records=_build_records(row.records or ()),
        **owner,
        **moderator,
    )


def _build_owner_part(row: Row[Any], has: Callable[[UserRoleTypes], bool]) -> dict[str, Any]:
    return {
        "sharedkey_ids": _to_texts(row.sharedkey_ids),
        "contact": row.contact,
        "vpn": has(UserRoleTypes.VPN),
        "special": has(UserRoleTypes.SPECIAL),
        "active_generations": shapes.UserActiveGenerations(text=_to_texts(row.text_request_ids)),
    }


def _build_moderator_part(row: Row[Any]) -> dict[str, Any]:
    received = row.monthly_kudos_last_received
    return {
        "evaluating_kudos": row.evaluating_kudos,
        "monthly_kudos": shapes.MonthlyKudos(
            amount=row.monthly_kudos,
            last_received=received and format_datetime(received.replace(tzinfo=UTC)),
        ),
        "suspicious": row.suspicions,
        "admin_comment": row.admin_comment,
        "proxy_passkey": row.proxy_passkey,
    }


def _to_texts(ids: Sequence[UUID] | None) -> list[str]:
    return [str(each) for each in ids or ()]


def _build_kudos_details(stats: dict[str, int]) -> shapes.UserKudosDetails:
    shown = shapes.UserKudosDetails.model_fields.keys()
    return shapes.UserKudosDetails(
        **{name: value for name, value in stats.items() if name in shown}
    )


def _build_records(stored: Sequence[tuple[str, str, float]]) -> shapes.UserRecords:
    known = {(kind, record): value for kind, record, value in stored}

    def things(kind: UserRecordTypes) -> shapes.UserThingRecords:
        return shapes.UserThingRecords(
            megapixelsteps=known.get((kind.name, "image"), 0.0),
            tokens=round(known.get((kind.name, "text"), 0.0)),
        )

    def amounts(kind: UserRecordTypes) -> shapes.UserAmountRecords:
        names = shapes.UserAmountRecords.model_fields
        return shapes.UserAmountRecords(
            **{record: round(known.get((kind.name, record), 0.0)) for record in names}
        )

    return shapes.UserRecords(
        usage=things(UserRecordTypes.USAGE),
        contribution=things(UserRecordTypes.CONTRIBUTION),
        fulfillment=amounts(UserRecordTypes.FULFILLMENT),
        request=amounts(UserRecordTypes.REQUEST),
        style=amounts(UserRecordTypes.STYLE),
    )
