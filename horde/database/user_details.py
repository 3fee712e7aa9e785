# SPDX-License-Identifier: AGPL-3.0-or-later
"""An account as the API shows it, by how much the viewer may see."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from enum import IntEnum
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, selectinload

from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.user import (
    ANONYMOUS_ID,
    WIPED,
    User,
    UserRecords,
    UserRecordTypes,
    UserRoleTypes,
    UserSharedKey,
    UserStats,
    is_pseudonymous,
)
from horde.classes.base.worker import Worker
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt

KUDOS_ACTIONS = (
    "accumulated",
    "gifted",
    "donated",
    "admin",
    "received",
    "recurring",
    "awarded",
    "styled",
)
ACTIVE_GENERATIONS_LIMIT = 500  # as many as the largest concurrency allows


class Privilege(IntEnum):
    """How much of an account a viewer sees."""

    PUBLIC = 0
    OWNER = 1
    MODERATOR = 2


def get_user_details(
    session: Session, user_id: int, privilege: Privilege, now: datetime
) -> dict[str, Any] | None:
    """Everything a viewer may see of an account, as the API answers it; None for an unknown or
    wiped one.

    Six statements at most. Keys without a value are left out.
    """
    user = session.scalar(
        select(User)
        .where(User.id == user_id, User.oauth_id != WIPED)
        .options(selectinload(User.roles))
    )
    if user is None:
        return None
    worker_ids = list(
        session.scalars(
            select(Worker.id).where(Worker.user_id == user_id).order_by(Worker.created, Worker.id)
        )
    )
    details = {
        **_build_public_part(user, now),
        "worker_count": len(worker_ids),
        "kudos_details": _get_kudos_details(session, user_id),
        "records": _get_records(session, user_id),
    }
    if user.public_workers or privilege >= Privilege.OWNER:
        details["worker_ids"] = [str(worker_id) for worker_id in worker_ids]
    if privilege >= Privilege.OWNER:
        details |= _build_owner_part(session, user)
    if privilege >= Privilege.MODERATOR:
        details |= _build_moderator_part(user)
    return {key: value for key, value in details.items() if value is not None}


def _has(user: User, role: UserRoleTypes) -> bool:
    return any(held.user_role is role and held.value for held in user.roles)


def _build_public_part(user: User, now: datetime) -> dict[str, Any]:
    return {
        "username": user.alias,
        "id": user.id,
        "kudos": user.kudos,
        "concurrency": user.concurrency,
        "worker_invited": user.worker_invited,
        "moderator": _has(user, UserRoleTypes.MODERATOR),
        "styles": [],
        "trusted": _has(user, UserRoleTypes.TRUSTED),
        "flagged": _has(user, UserRoleTypes.FLAGGED),
        "service": _has(user, UserRoleTypes.SERVICE),
        "education": _has(user, UserRoleTypes.EDUCATION),
        "customizer": _has(user, UserRoleTypes.CUSTOMIZER),
        "deleted": _has(user, UserRoleTypes.DELETED),
        "pseudonymous": is_pseudonymous(user.oauth_id),
        "account_age": max(int((now - user.created).total_seconds()), 0),
        "usage": {},  # superseded by `records`; clients still read the key
        "contributions": {},
    }


def _build_owner_part(session: Session, user: User) -> dict[str, Any]:
    sharedkey_ids = session.scalars(
        select(UserSharedKey.id)
        .where(UserSharedKey.user_id == user.id)
        .order_by(UserSharedKey.created, UserSharedKey.id)
    )
    return {
        "sharedkey_ids": [str(sharedkey_id) for sharedkey_id in sharedkey_ids],
        "contact": user.contact,
        "vpn": _has(user, UserRoleTypes.VPN),
        "special": _has(user, UserRoleTypes.SPECIAL),
        "active_generations": _list_active_generations(session, user.id),
    }


def _build_moderator_part(user: User) -> dict[str, Any]:
    received = user.monthly_kudos_last_received
    monthly: dict[str, Any] = {"amount": user.monthly_kudos}
    if received is not None:
        monthly["last_received"] = format_datetime(received.replace(tzinfo=UTC))
    return {
        "evaluating_kudos": user.evaluating_kudos,
        "monthly_kudos": monthly,
        "suspicious": 0,
        "admin_comment": user.admin_comment,
        "proxy_passkey": user.proxy_passkey,
    }


def _get_kudos_details(session: Session, user_id: int) -> dict[str, int]:
    stored = session.execute(
        select(UserStats.action, UserStats.value).where(UserStats.user_id == user_id)
    )
    known: Mapping[str, int] = {row.action: row.value for row in stored}
    return {action: known.get(action, 0) for action in KUDOS_ACTIONS}


def _get_records(session: Session, user_id: int) -> dict[str, dict[str, float | int]]:
    stored = session.execute(
        select(UserRecords.record_type, UserRecords.record, UserRecords.value).where(
            UserRecords.user_id == user_id
        )
    )
    known: dict[tuple[UserRecordTypes, str], float] = {
        (row.record_type, row.record): row.value for row in stored
    }

    def of(kind: UserRecordTypes, record: str) -> float:
        return known.get((kind, record), 0.0)

    def things(kind: UserRecordTypes) -> dict[str, float | int]:
        return {"megapixelsteps": of(kind, "image"), "tokens": round(of(kind, "text"))}

    def amounts(kind: UserRecordTypes) -> dict[str, float | int]:
        return {record: round(of(kind, record)) for record in ("image", "text", "interrogation")}

    return {
        "usage": things(UserRecordTypes.USAGE),
        "contribution": things(UserRecordTypes.CONTRIBUTION),
        "fulfillment": amounts(UserRecordTypes.FULFILLMENT),
        "request": amounts(UserRecordTypes.REQUEST),
        "style": amounts(UserRecordTypes.STYLE),
    }


def _list_active_generations(session: Session, user_id: int) -> dict[str, list[str]]:
    """Requests that are waiting or being worked on. Chat requests are left out: whoever has the id
    may read them.

    None are listed for the anonymous account, whose key everybody has.
    """
    lists: dict[str, list[str]] = {"text": [], "image": [], "alchemy": []}
    if user_id == ANONYMOUS_ID:
        return lists
    in_work = (
        select(ProcessingGeneration.id)
        .where(
            ProcessingGeneration.wp_id == TextWaitingPrompt.id,
            ProcessingGeneration.generation.is_(None),
            ProcessingGeneration.faulted.is_(False),
        )
        .exists()
    )
    active = session.scalars(
        select(TextWaitingPrompt.id)
        .where(
            TextWaitingPrompt.user_id == user_id,
            TextWaitingPrompt.active.is_(True),
            TextWaitingPrompt.faulted.is_(False),
            TextWaitingPrompt.is_chat.is_(False),
            (TextWaitingPrompt.n > 0) | in_work,
        )
        .order_by(TextWaitingPrompt.created)
        .limit(ACTIVE_GENERATIONS_LIMIT)
    )
    lists["text"] = [str(wp_id) for wp_id in active]
    return lists
