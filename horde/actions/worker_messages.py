# SPDX-License-Identifier: AGPL-3.0-or-later
"""Messages to workers: who writes to which, and who reads them again."""

import unicodedata
from datetime import timedelta
from uuid import UUID, uuid4

from sqlalchemy.orm import Session

from horde import clock
from horde.actions.actors import Actor, By, require_actor
from horde.actions.acts import record_act
from horde.classes.base.user import ANONYMOUS_ID
from horde.classes.base.worker_message import WorkerMessage
from horde.database import worker_messages
from horde.database.worker_messages import WORKER_TYPES
from horde.database.workers import parse_id
from horde.db import after_commit, run_transaction, transaction
from horde.exceptions import BadRequest, Forbidden, NotFound, PayloadInvalid
from horde.return_codes import ReturnCode
from horde.shapes.acts import ModeratorAction
from horde.shapes.base import SimpleResponse
from horde.shapes.worker_messages import (
    PostedWorkerMessage,
    WorkerMessageDetails,
    WorkerMessageInput,
    WorkerMessagesQuery,
)

MODERATORS_ORIGIN = "AI Horde Moderators"


def list_messages(by: By, query: WorkerMessagesQuery) -> list[WorkerMessageDetails]:
    """A page of messages, newest first; who is no moderator sees what they wrote and what their
    workers got.

    Errors: Unauthorized, Forbidden for messages of others, NotFound for the worker.
    """
    with transaction() as session:
        actor = require_actor(session, by)
        worker_id = None
        if query.worker_id is not None:
            [worker_id] = _require_workers(session, actor, [query.worker_id])
        is_moderator = actor.is_moderator
        if not is_moderator and query.user_id is not None and not actor.owns(query.user_id):
            raise Forbidden(
                "These messages are not yours. Use the key of who wrote them.", ReturnCode.FORBIDDEN
            )
        return worker_messages.list_messages(
            session,
            user_id=query.user_id,
            worker_id=worker_id,
            viewer_id=None if is_moderator else actor.user_id,
            validity=query.validity,
            page=query.page,
            now=clock.utcnow(),
        )


def show_message(message_id: str) -> WorkerMessageDetails:
    """One message. Errors: NotFound."""
    parsed = parse_id(message_id)
    with transaction() as session:
        message = None if parsed is None else worker_messages.find_message(session, parsed)
    if message is None:
        raise _not_found(message_id)
    return message


def post_message(by: By, body: WorkerMessageInput) -> PostedWorkerMessage:
    """Write to workers: owners to their own, moderators to any, to a kind, or to all.

    Errors: Unauthorized, Forbidden, NotFound for a worker, BadRequest for several addressees of
    different sorts.
    """
    if sum(part is not None for part in (body.worker_id, body.worker_ids, body.worker_type)) > 1:
        raise BadRequest("Send one of 'worker_id', 'worker_ids' and 'worker_type', or none.")
    text = _clean("message", body.message)
    origin = None if body.origin is None else _clean("origin", body.origin).replace("\n", " ")

    def work(session: Session) -> PostedWorkerMessage:
        actor = require_actor(session, by)
        if actor.account is not None and actor.account.is_anonymous:
            raise Forbidden("Anonymous cannot write to workers.", ReturnCode.ANON_FORBIDDEN)
        named = body.worker_ids if body.worker_id is None else [body.worker_id]
        worker_ids: list[UUID | None] = [None]
        if named is not None:
            worker_ids = list(_require_workers(session, actor, named))
        elif not actor.is_moderator:
            raise _only_own_workers()
        rows = _build_rows(actor, body, worker_ids, text, origin)
        worker_messages.insert_messages(session, rows)
        if actor.is_moderator:
            _record_posted(session, actor, body, rows)
        first = worker_messages.build_details(WorkerMessage(**rows[0]))
        ids = None if body.worker_ids is None else [str(row["id"]) for row in rows]
        return PostedWorkerMessage(**first.model_dump(), ids=ids)

    return run_transaction(work)


def delete_message(by: By, message_id: str, reason: str | None = None) -> SimpleResponse:
    """Delete a message, as its author or a moderator. Errors: Unauthorized, NotFound, Forbidden."""

    def work(session: Session) -> SimpleResponse:
        actor = require_actor(session, by)
        parsed = parse_id(message_id)
        author = None if parsed is None else worker_messages.find_author(session, parsed)
        if parsed is None or author is None:
            raise _not_found(message_id)
        if not actor.is_moderator and not (actor.owns(author) and author != ANONYMOUS_ID):
            raise Forbidden(
                "This message is not yours. Use the key of who wrote it.", ReturnCode.FORBIDDEN
            )
        worker_messages.delete_message(session, parsed)
        if not actor.owns(author):
            record_act(session, actor, ModeratorAction.MESSAGE_DELETED, f"message {parsed}", reason)
        after_commit(session, lambda: worker_messages.forget_message(parsed))
        return SimpleResponse()

    return run_transaction(work)


def _require_workers(session: Session, actor: Actor, named: list[str]) -> list[UUID]:
    """The workers of these ids, each once, which the actor may write to; raises NotFound or
    Forbidden.
    """
    parsed = {worker_id: parse_id(worker_id) for worker_id in named}
    ids = list(dict.fromkeys(found for found in parsed.values() if found is not None))
    owners = worker_messages.list_worker_owners(session, ids)
    for worker_id, found in parsed.items():
        if found is None or found not in owners:
            raise NotFound(
                f"Worker with ID '{worker_id[:64]}' not found.", ReturnCode.WORKER_NOT_FOUND
            )
    if not actor.is_moderator and not all(actor.owns(owners[found]) for found in ids):
        raise _only_own_workers()
    return ids


def _build_rows(
    actor: Actor,
    body: WorkerMessageInput,
    worker_ids: list[UUID | None],
    text: str,
    origin: str | None,
) -> list[dict[str, object]]:
    now = clock.utcnow()
    if not actor.is_moderator and actor.account is not None:
        origin = actor.account.alias
    shared = {
        "worker_type": None if body.worker_type is None else WORKER_TYPES[body.worker_type],
        "user_id": ANONYMOUS_ID if actor.user_id is None else actor.user_id,
        "message": text,
        "origin": origin or MODERATORS_ORIGIN,
        "expiry": now + timedelta(hours=body.expiry),
        "created": now,
    }
    return [{"id": uuid4(), "worker_id": worker_id, **shared} for worker_id in worker_ids]


def _record_posted(
    session: Session, actor: Actor, body: WorkerMessageInput, rows: list[dict[str, object]]
) -> None:
    """Record what a moderator wrote to whom; the text stands in the message itself."""
    addressed = [str(row["worker_id"]) for row in rows if row["worker_id"] is not None]
    record_act(
        session,
        actor,
        ModeratorAction.MESSAGE_POSTED,
        f"message {rows[0]['id']}",
        worker_ids=addressed,
        worker_type=body.worker_type,
    )


def _clean(key: str, text: str) -> str:
    """A text without what cannot be seen: it is shown in terminals. Lines stay."""
    cleaned = "".join(
        character
        for character in text
        if character == "\n" or not unicodedata.category(character).startswith("C")
    ).strip()
    if not cleaned:
        raise PayloadInvalid({key: "String should have at least 1 visible character"})
    return cleaned


def _only_own_workers() -> Forbidden:
    return Forbidden(
        "You can send messages only to your own workers.", ReturnCode.MESSAGES_ONLY_OWN_WORKERS
    )


def _not_found(message_id: str) -> NotFound:
    return NotFound(
        f"Worker message with ID '{message_id[:64]}' not found.",
        ReturnCode.WORKERMESSAGE_NOT_FOUND,
    )
