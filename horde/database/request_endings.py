# SPDX-License-Identifier: AGPL-3.0-or-later
"""Requests as they end: cancelled, faulted with a reason, and deleted with their stored objects."""

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.orm import Session

from horde.chat.stored_objects import list_stored_chat_object_keys
from horde.chat.submission import MAX_CHAT_FAULT_REASON_LENGTH
from horde.chat_contract import WORKER_FAULT_MESSAGES
from horde.classes.base.waiting_prompt import TerminalOutcome
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt, delete_stored_chat_images
from horde.db import after_commit, table_of
from horde.return_codes import ReturnCode

requests = table_of(TextWaitingPrompt)

# Postgres picks the URLs out. In lax mode a path passes over messages whose content is a string.
_IMAGE_URLS = func.jsonb_path_query_array(
    requests.c.messages, text("'$[*].content[*].image_url.url'")
).label("image_urls")


def delete_requests(
    session: Session,
    request_ids: Sequence[UUID],
    *,
    only_inactive: bool = False,
    object_keys: Sequence[str] | None = None,
) -> int:
    """Delete requests with their jobs; their stored objects go once the caller's transaction is
    committed.

    How many it deleted. With `only_inactive` those that a worker may have seen are left alone.
    Whoever knows what was stored so far gives `object_keys`: then these go, and not all that
    the requests name.
    """
    if not request_ids:
        return 0
    rows = requests.c
    condition = (
        rows.id.in_(request_ids) & ~rows.active if only_inactive else rows.id.in_(request_ids)
    )
    deleted = session.execute(
        delete(requests)
        .where(condition)
        .returning(rows.id, rows.is_chat, _IMAGE_URLS, rows.chat_messages_offloaded)
    ).all()
    keys = _list_object_keys(deleted) if object_keys is None else list(object_keys)
    if keys:
        after_commit(session, partial(delete_stored_chat_images, keys))
    return len(deleted)


def list_object_keys(session: Session, request_ids: Sequence[UUID]) -> list[str]:
    """Keys of the stored objects of these requests: images and messages. No messages are loaded
    for it.
    """
    rows = requests.c
    statement = select(rows.id, rows.is_chat, _IMAGE_URLS, rows.chat_messages_offloaded)
    return _list_object_keys(
        session.execute(statement.where(rows.id.in_(request_ids), rows.is_chat)).all()
    )


def _list_object_keys(rows: Sequence[Any]) -> list[str]:
    keys: list[str] = []
    for wp_id, is_chat, image_urls, is_offloaded in rows:
        if is_chat:
            keys.extend(
                list_stored_chat_object_keys(wp_id, image_urls or (), is_offloaded=is_offloaded)
            )
    return keys


def mark_cancelled(session: Session, wp_id: UUID, now: datetime) -> bool:
    """Stop handing out a request's generations; True for the one call that did it.

    Jobs in flight go on, are paid and keep their results. The first terminal outcome stands, so
    a request that was done or faulted before stays that.
    """
    statement = (
        update(TextWaitingPrompt)
        .where(
            TextWaitingPrompt.id == wp_id,
            TextWaitingPrompt.terminal_outcome.is_(None),
            ~TextWaitingPrompt.faulted,
        )
        .values(n=0, terminal_outcome=TerminalOutcome.CANCELLED, terminal_recorded_at=now)
        .returning(TextWaitingPrompt.id)
        .execution_options(synchronize_session=False)
    )
    return session.scalar(statement) is not None


def record_chat_refusal(session: Session, wp_id: UUID, message: str, rc: ReturnCode) -> None:
    """Keep why the horde refused a reply; a later refusal overwrites it."""
    _write_fault(session, wp_id, message, rc)


def record_chat_worker_fault(session: Session, wp_id: UUID, fault_reason: str) -> None:
    """Keep the sentence for a worker's known fault reason; the worker's own text is never
    stored.
    """
    message = WORKER_FAULT_MESSAGES.get(fault_reason)
    if message is not None:
        _write_fault(session, wp_id, message, ReturnCode.CHAT_WORKER_FAULT)


def _write_fault(session: Session, wp_id: UUID, message: str, rc: ReturnCode) -> None:
    session.execute(
        update(TextWaitingPrompt)
        .where(TextWaitingPrompt.id == wp_id)
        .values(
            chat_fault_reason=func.left(message, MAX_CHAT_FAULT_REASON_LENGTH),
            chat_fault_rc=rc.value,
        )
        .execution_options(synchronize_session=False)
    )
