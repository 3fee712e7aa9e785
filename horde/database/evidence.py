# SPDX-License-Identifier: AGPL-3.0-or-later
"""Evidence of prompts that were refused or reported: rows, whose text moves to the object store.

The key of an object is in its row from the beginning, so no object is ever nobody's. An object is
deleted a while after its row says so: whoever was still storing it has ended by then.
Source: docs/reference/moderation.md, "Evidence".
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, Select, delete, insert, select, update
from sqlalchemy.orm import Session

from horde.classes.base.moderation import (
    ModerationEvent,
    ModerationNote,
    ModerationReason,
    TextState,
)
from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.waiting_prompt import WPModels
from horde.classes.base.worker import Worker
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.ip_subject import build_ip_subject
from horde.json_text import JsonObject
from horde.r2 import EVIDENCE_SUFFIX
from horde.shapes.base import MAX_MODEL_NAME_LENGTH

MAX_STAGE_CHARACTERS = 16_000
MAX_MODELS = 20
SUBJECT_KEY_LENGTH = 32
# Longer than a put lasts, with its second attempt.
DELETE_AFTER = timedelta(minutes=1)
KEPT_STATES = (TextState.WAITING, TextState.STORED)

type Prompts = Mapping[str, str | None]
"""`submitted`, `moderation` and `effective`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """A prompt to be kept; without `prompts` only that there was one."""

    reason: ModerationReason
    user_id: int
    address: str
    models: Sequence[str]
    is_chat: bool
    proxied_account: str | None = None
    worker_id: UUID | None = None
    prompts: Prompts | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNote:
    """A note as it is stored."""

    id: int
    event_id: int
    created: datetime
    user_id: int | None
    username: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """An event as it is stored; `prompts` are there while they wait for the store."""

    id: int
    created: datetime
    reason: str
    user_id: int | None
    proxied_account: str | None
    ipaddr: str | None
    ip_subject_key: str | None
    worker_id: UUID | None
    models: Sequence[str]
    is_chat: bool
    is_anonymised: bool
    text_state: str
    object_id: UUID
    prompts: Prompts | None = field(repr=False)
    notes: Sequence[StoredNote] = ()

    @property
    def object_key(self) -> str:
        """Where its text is stored."""
        return build_object_key(self.object_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events are wanted; None is any."""

    event_id: int | None = None
    user_id: int | None = None
    proxied_account: str | None = None
    ip_subject_key: str | None = None
    worker_id: UUID | None = None
    since: datetime | None = None
    until: datetime | None = None
    before_id: int | None = None


def without_prompts(event: NewEvent) -> NewEvent:
    """The event without its text."""
    return replace(event, prompts=None)


def build_object_key(object_id: UUID) -> str:
    """The key of an event's text."""
    return f"{object_id}{EVIDENCE_SUFFIX}"


def build_subject_key(address: str, secret_key: str) -> str:
    """What stands for an address, so that its events are found when it is gone."""
    subject = f"moderation subject {build_ip_subject(address)}"
    digest = hmac.new(secret_key.encode(), subject.encode(), hashlib.sha256).hexdigest()
    return digest[:SUBJECT_KEY_LENGTH]


def add_event(session: Session, event: NewEvent, *, secret_key: str, now: datetime) -> int:
    """Keep an event; its id."""
    prompts = event.prompts and {
        stage: text and text[:MAX_STAGE_CHARACTERS] for stage, text in event.prompts.items()
    }
    statement = (
        insert(ModerationEvent)
        .values(
            created=now,
            reason=event.reason,
            user_id=event.user_id,
            proxied_account=event.proxied_account,
            ipaddr=event.address,
            ip_subject_key=build_subject_key(event.address, secret_key),
            worker_id=event.worker_id,
            models=[model[:MAX_MODEL_NAME_LENGTH] for model in event.models[:MAX_MODELS]],
            is_chat=event.is_chat,
            is_anonymised=False,
            text_state=TextState.NONE if prompts is None else TextState.WAITING,
            text_changed=now,
            object_id=uuid4(),
            prompts=prompts,
        )
        .returning(ModerationEvent.id)
    )
    return int(session.execute(statement).scalar_one())


def find_reported_prompt(session: Session, job_id: UUID) -> NewEvent | None:
    """The request of a job whose worker reported it, as an event; None when it is gone."""
    request, job = TextWaitingPrompt, ProcessingGeneration
    row = session.execute(
        select(
            request.id,
            request.user_id,
            request.ipaddr,
            request.proxied_account,
            request.is_chat,
            request.submitted_prompt,
            request.prompt,
            job.worker_id,
        )
        .join(job, job.wp_id == request.id)
        .where(job.id == job_id)
    ).one_or_none()
    if row is None:
        return None
    models = select(WPModels.model).where(WPModels.wp_id == row.id).order_by(WPModels.id)
    return NewEvent(
        reason=ModerationReason.WORKER_CSAM,
        user_id=row.user_id,
        address=row.ipaddr,
        proxied_account=row.proxied_account,
        models=session.scalars(models).all(),
        is_chat=row.is_chat,
        worker_id=row.worker_id,
        prompts={
            "submitted": row.prompt if row.submitted_prompt is None else row.submitted_prompt,
            "moderation": None,
            "effective": row.prompt,
        },
    )


def list_events(session: Session, wanted: EventFilter, *, limit: int) -> list[StoredEvent]:
    """Events with their notes, the newest first. Two statements."""
    newest_first = _select_events().order_by(ModerationEvent.id.desc()).limit(limit)
    rows = session.execute(newest_first.where(*_build_conditions(wanted))).all()
    notes: dict[int, list[StoredNote]] = {}
    for note in _list_notes(session, [row.id for row in rows]):
        notes.setdefault(note.event_id, []).append(note)
    return [StoredEvent(**row._mapping, notes=tuple(notes.get(row.id, ()))) for row in rows]


def add_note(
    session: Session,
    event_id: int,
    *,
    user_id: int | None,
    username: str,
    note: str,
    now: datetime,
) -> StoredNote | None:
    """Note something on an event; None when there is no such event."""
    locked = select(ModerationEvent.id).where(ModerationEvent.id == event_id)
    if session.scalar(locked.with_for_update(read=True, key_share=True)) is None:
        return None
    values: dict[str, Any] = {
        "event_id": event_id,
        "created": now,
        "user_id": user_id,
        "username": username,
        "note": note,
    }
    added = session.execute(insert(ModerationNote).values(**values).returning(ModerationNote.id))
    return StoredNote(id=added.scalar_one(), **values)


# To the store and out of it


def list_waiting_texts(session: Session, *, limit: int) -> list[StoredEvent]:
    """Events whose text is to be stored, the oldest first."""
    return _list_by_state(session, ModerationEvent.text_state == TextState.WAITING, limit=limit)


def note_stored(session: Session, event_id: int, now: datetime) -> None:
    """The text of an event is stored, and no longer needed in its row; unless it was to go
    meanwhile.
    """
    event = ModerationEvent
    _change(
        session,
        [event.id == event_id, event.text_state == TextState.WAITING],
        {"text_state": TextState.STORED, "text_changed": now, "prompts": None},
    )


def list_texts_to_delete(session: Session, now: datetime, *, limit: int) -> list[StoredEvent]:
    """Events whose object is to be deleted now."""
    event = ModerationEvent
    is_due = (event.text_state == TextState.DELETING) & (event.text_changed < now - DELETE_AFTER)
    return _list_by_state(session, is_due, limit=limit)


def note_deleted(session: Session, event_ids: Sequence[int], now: datetime) -> None:
    """The objects of these events are gone."""
    event = ModerationEvent
    _change(
        session,
        [event.id.in_(event_ids), event.text_state == TextState.DELETING],
        {"text_state": TextState.DELETED, "text_changed": now},
    )


def find_events_of_objects(session: Session, object_ids: Sequence[UUID]) -> dict[UUID, str]:
    """The state of the text of each object that an event names."""
    event = ModerationEvent
    rows = session.execute(
        select(event.object_id, event.text_state).where(event.object_id.in_(object_ids))
    )
    return {row.object_id: row.text_state for row in rows}


def list_stored_objects(session: Session) -> list[UUID]:
    """The objects that events name as stored."""
    event = ModerationEvent
    return list(
        session.scalars(select(event.object_id).where(event.text_state == TextState.STORED))
    )


# What goes in time


def drop_texts(session: Session, before: datetime, now: datetime) -> int:
    """Let the texts of older events go; how many."""
    event = ModerationEvent
    return _change(
        session, [event.created < before, event.text_state.in_(KEPT_STATES)], _without_text(now)
    )


def drop_addresses(session: Session, before: datetime) -> int:
    """Let the addresses of older events go; how many. Their keys stay."""
    event = ModerationEvent
    return _change(session, [event.created < before, event.ipaddr.is_not(None)], {"ipaddr": None})


def anonymise_events(session: Session, before: datetime, now: datetime) -> int:
    """Take whatever names somebody off older events; how many."""
    event = ModerationEvent
    return _anonymise(session, [event.created < before, event.is_anonymised.is_(False)], now)


def erase_evidence_of(session: Session, user_id: int, now: datetime) -> None:
    """Take an account that is erased off its events, with their texts; and its workers off what
    they reported, which tells of others.
    """
    event = ModerationEvent
    _anonymise(session, [event.user_id == user_id], now)
    own_workers = select(Worker.id).where(Worker.user_id == user_id)
    _change(session, [event.worker_id.in_(own_workers)], {"worker_id": None})


def _anonymise(session: Session, conditions: Sequence[ColumnElement[bool]], now: datetime) -> int:
    event = ModerationEvent
    _change(session, [*conditions, event.text_state.in_(KEPT_STATES)], _without_text(now))
    ids = select(event.id).where(*conditions)
    session.execute(
        delete(ModerationNote)
        .where(ModerationNote.event_id.in_(ids))
        .execution_options(synchronize_session=False)
    )
    nobody = dict.fromkeys(
        ("user_id", "proxied_account", "ipaddr", "ip_subject_key", "worker_id"), None
    )
    return _change(session, conditions, {**nobody, "is_anonymised": True})


def _without_text(now: datetime) -> JsonObject:
    return {"text_state": TextState.DELETING, "text_changed": now, "prompts": None}


def _change(
    session: Session, conditions: Sequence[ColumnElement[bool]], values: Mapping[str, object]
) -> int:
    changed = session.execute(
        update(ModerationEvent)
        .where(*conditions)
        .values(**values)
        .returning(ModerationEvent.id)
        .execution_options(synchronize_session=False)
    )
    return len(changed.all())


def _list_by_state(
    session: Session, condition: ColumnElement[bool], *, limit: int
) -> list[StoredEvent]:
    oldest_first = _select_events().order_by(ModerationEvent.text_changed).limit(limit)
    rows = session.execute(oldest_first.where(condition))
    return [StoredEvent(**row._mapping) for row in rows]


def _select_events() -> Select[Any]:
    columns = ModerationEvent.__table__.columns
    return select(*(column for column in columns if column.key != "text_changed"))


def _list_notes(session: Session, event_ids: Sequence[int]) -> list[StoredNote]:
    rows = session.execute(
        select(*ModerationNote.__table__.columns)
        .where(ModerationNote.event_id.in_(event_ids))
        .order_by(ModerationNote.id)
    )
    return [StoredNote(**row._mapping) for row in rows]


def _build_conditions(wanted: EventFilter) -> list[ColumnElement[bool]]:
    event = ModerationEvent
    equal = {
        event.id: wanted.event_id,
        event.user_id: wanted.user_id,
        event.proxied_account: wanted.proxied_account,
        event.ip_subject_key: wanted.ip_subject_key,
        event.worker_id: wanted.worker_id,
    }
    conditions = [column == value for column, value in equal.items() if value is not None]
    if wanted.since is not None:
        conditions.append(event.created >= wanted.since)
    if wanted.until is not None:
        conditions.append(event.created < wanted.until)
    if wanted.before_id is not None:
        conditions.append(event.id < wanted.before_id)
    return conditions
