# SPDX-License-Identifier: AGPL-3.0-or-later
"""Evidence of prompts that were refused or reported: kept, read by moderators, and gone in time.

Source: docs/reference/moderation.md, "Evidence".
"""

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from ipaddress import ip_address
from uuid import UUID

from sqlalchemy.orm import Session

from horde import clock, r2
from horde.actions.actors import Actor, By, require_moderator
from horde.actions.acts import OPERATOR_NAME, record_act
from horde.classes.base.moderation import TextState
from horde.config import Config
from horde.database import evidence
from horde.database.addresses import count_reported_prompt
from horde.database.evidence import EventFilter, NewEvent, Prompts, StoredEvent, StoredNote
from horde.database.users import get_secret_key, parse_user_id
from horde.database.workers import parse_id
from horde.db import reading, run_transaction
from horde.exceptions import BadRequest, HordeError, NotFound
from horde.logger import get_logger
from horde.r2 import StoreUnavailable
from horde.return_codes import ReturnCode
from horde.runtime import in_this_runtime
from horde.shapes.acts import ModeratorAction
from horde.shapes.evidence import (
    DEFAULT_EVENTS_A_PAGE,
    MAX_EVENTS_A_PAGE,
    MAX_NOTE_LENGTH,
    EvidenceEvent,
    EvidenceNote,
    EvidenceNoteInput,
    EvidencePrompts,
    EvidenceQuery,
)

logger = get_logger(__name__)

MAX_EVENT_ID = 2**63 - 1
TEXTS_A_BATCH = 100
READING_THREADS = 8
NOTHING_FITS = EventFilter(event_id=0)
UNAVAILABLE = "unavailable"
_SUBJECT_KEY = re.compile(rf"[0-9a-f]{{{evidence.SUBJECT_KEY_LENGTH}}}")


# Kept


def keep_event(event: NewEvent, config: Config, *, count: int) -> None:
    """Keep a prompt, its text too while its address sent few within the hour. `count` is which one
    it is.
    """
    keeps_text = r2.is_configured() and count <= config.evidence_texts_an_hour > 0
    if not keeps_text:
        event = evidence.without_prompts(event)
    add = partial(evidence.add_event, event=event, secret_key=get_secret_key(), now=clock.utcnow())
    run_transaction(add)


def keep_reported_prompt(job_id: UUID, config: Config) -> None:
    """Keep the prompt of a job that its worker reported. Best effort: the reply is stored and paid
    for, whatever becomes of this.
    """
    try:
        with reading() as session:
            event = evidence.find_reported_prompt(session, job_id)
        if event is not None:
            keep_event(event, config, count=count_reported_prompt(event.address))
    except HordeError as error:
        logger.warning("horde.evidence.lost", extra={"error_class": type(error).__name__})


# Read


def list_evidence(by: By, query: EvidenceQuery) -> list[EvidenceEvent]:
    """A page of evidence for moderators, the newest first. Who read it is recorded.

    Errors: Unauthorized, Forbidden, and BadRequest for a filter that cannot be.
    """

    def work(session: Session) -> list[StoredEvent]:
        actor = require_moderator(session, by)
        wanted, limit = _read_filter(query), _read_limit(query.limit)
        events = evidence.list_events(session, wanted, limit=limit)
        _record_reading(session, actor, [event.id for event in events if _has_text(event)])
        return events

    return _show_all(run_transaction(work))


def show_event(by: By, event_id: str) -> EvidenceEvent:
    """One event, as `list_evidence`. Errors: NotFound too."""
    found = list_evidence(by, EvidenceQuery(event_id=event_id))
    if not found:
        raise _event_not_found(event_id)
    return found[0]


def add_note(by: By, event_id: str, body: EvidenceNoteInput) -> EvidenceNote:
    """Note something on an event, as a moderator.

    Errors: Unauthorized, Forbidden, BadRequest, NotFound.
    """

    def work(session: Session) -> StoredNote:
        actor = require_moderator(session, by)
        note = _read_note(body.note)
        number = _read_event_id(event_id)
        added = evidence.add_note(
            session,
            number,
            user_id=actor.user_id,
            username=OPERATOR_NAME if actor.account is None else actor.account.alias,
            note=note,
            now=clock.utcnow(),
        )
        if added is None:
            raise _event_not_found(event_id)
        record_act(
            session, actor, ModeratorAction.EVIDENCE_NOTED, f"evidence {number}", note_id=added.id
        )
        return added

    return _show_note(run_transaction(work))


def _record_reading(session: Session, actor: Actor, event_ids: Sequence[int]) -> None:
    """Which texts a moderator was shown. Pages without any are no secret."""
    if event_ids:
        record_act(
            session, actor, ModeratorAction.EVIDENCE_READ, "evidence", events=list(event_ids)
        )


def _has_text(event: StoredEvent) -> bool:
    return event.text_state in {TextState.WAITING, TextState.STORED}


def _show_all(events: Sequence[StoredEvent]) -> list[EvidenceEvent]:
    """The events with their texts, which are read from the store with no transaction open."""
    if not any(event.text_state == TextState.STORED for event in events):
        return [_show(event) for event in events]
    with ThreadPoolExecutor(READING_THREADS, thread_name_prefix="horde-evidence") as pool:
        return list(pool.map(in_this_runtime(_show), events))


def _show(event: StoredEvent) -> EvidenceEvent:
    prompts, state = event.prompts, event.text_state
    if state == TextState.STORED:
        prompts = _read_text(event)
        state = state if prompts is not None else UNAVAILABLE
    return EvidenceEvent(
        id=event.id,
        created=_write_moment(event.created),
        reason=event.reason,
        user_id=event.user_id,
        proxied_account=event.proxied_account,
        ipaddr=event.ipaddr,
        ip_subject_key=event.ip_subject_key,
        worker_id=None if event.worker_id is None else str(event.worker_id),
        models=list(event.models),
        is_chat=event.is_chat,
        is_anonymised=event.is_anonymised,
        text=state,
        prompts=None if prompts is None else EvidencePrompts.model_validate(prompts),
        notes=[_show_note(note) for note in event.notes],
    )


def _read_text(event: StoredEvent) -> Prompts | None:
    """The stored text; None when the store does not hand it out."""
    try:
        prompts: Prompts = json.loads(r2.get_object(event.object_key))
    except (StoreUnavailable, ValueError):
        return None
    return prompts


def _show_note(note: StoredNote) -> EvidenceNote:
    return EvidenceNote(
        id=note.id,
        created=_write_moment(note.created),
        user_id=note.user_id,
        username=note.username,
        note=note.note,
    )


def _write_moment(moment: datetime) -> str:
    return format_datetime(moment.replace(tzinfo=UTC))


def _event_not_found(event_id: str) -> NotFound:
    return NotFound(
        f"Moderation event '{event_id[:64]}' not found.", ReturnCode.MODERATION_EVENT_NOT_FOUND
    )


def _read_filter(query: EvidenceQuery) -> EventFilter:
    """The filter of a query; an id that nothing can have fits nothing. Raises BadRequest."""
    since, until = _read_moment("since", query.since), _read_moment("until", query.until)
    if since is not None and until is not None and since > until:
        raise BadRequest("'since' lies after 'until'.", ReturnCode.INVALID_MODERATION_TIME_RANGE)
    wanted = EventFilter(
        event_id=None if query.event_id is None else _read_event_id(query.event_id),
        user_id=None if query.user_id is None else parse_user_id(query.user_id),
        proxied_account=query.proxied_account,
        ip_subject_key=_read_subject_key(query),
        worker_id=None if query.worker_id is None else parse_id(query.worker_id),
        since=since,
        until=until,
        before_id=_read_cursor(query.before_id),
    )
    is_impossible = (query.user_id is not None and wanted.user_id is None) or (
        query.worker_id is not None and wanted.worker_id is None
    )
    return NOTHING_FITS if is_impossible else wanted


def _read_limit(text: str | None) -> int:
    limit = DEFAULT_EVENTS_A_PAGE if text is None else _parse_number(text)
    if limit is None or not 1 <= limit <= MAX_EVENTS_A_PAGE:
        raise BadRequest(
            f"'limit' is no number from 1 to {MAX_EVENTS_A_PAGE}.",
            ReturnCode.INVALID_OPERATIONS_LIMIT,
        )
    return limit


def _read_cursor(text: str | None) -> int | None:
    if text is None:
        return None
    number = _parse_number(text)
    if number is None or number < 1:
        raise BadRequest(
            "'before_id' is no number of an event.", ReturnCode.INVALID_OPERATIONS_CURSOR
        )
    return number


def _read_event_id(text: str) -> int:
    number = _parse_number(text)
    if number is None or number < 1:
        raise BadRequest("The id is no number of an event.", ReturnCode.INVALID_MODERATION_EVENT_ID)
    return number


def _parse_number(text: str) -> int | None:
    """A number that the column of ids can hold; None for anything else."""
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(MAX_EVENT_ID)):
        return None
    return int(text) if int(text) <= MAX_EVENT_ID else None


def _read_moment(name: str, text: str | None) -> datetime | None:
    """A moment in UTC, as the rows have it."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)
    except (ValueError, OverflowError):
        raise BadRequest(
            f"'{name}' is no moment.", ReturnCode.INVALID_MODERATION_TIME_RANGE
        ) from None


def _read_subject_key(query: EvidenceQuery) -> str | None:
    key = query.ip_subject_key
    if query.ipaddr is None and key is None:
        return None
    if key is None:
        try:
            address = str(ip_address(query.ipaddr or ""))
        except ValueError:
            raise _bad_address("'ipaddr' is no address.") from None
        return evidence.build_subject_key(address, get_secret_key())
    if query.ipaddr is not None:
        raise _bad_address("'ipaddr' and 'ip_subject_key' ask for the same.")
    if not _SUBJECT_KEY.fullmatch(key):
        raise _bad_address("'ip_subject_key' is no key of an address.")
    return key


def _bad_address(message: str) -> BadRequest:
    return BadRequest(message, ReturnCode.INVALID_MODERATION_ADDRESS_FILTER)


def _read_note(note: object) -> str:
    text = note.strip() if isinstance(note, str) else ""
    if not 1 <= len(text) <= MAX_NOTE_LENGTH:
        raise BadRequest(
            f"'note' is no text of 1 to {MAX_NOTE_LENGTH} characters.",
            ReturnCode.INVALID_MODERATION_NOTE,
        )
    return text


# Stored, and gone in time


def store_evidence() -> None:
    """Move the texts that wait to the object store. While it is away they wait on."""
    while r2.is_configured():
        with reading() as session:
            waiting = evidence.list_waiting_texts(session, limit=TEXTS_A_BATCH)
        for event in waiting:
            body = json.dumps(event.prompts, ensure_ascii=False).encode()
            try:
                r2.upload_evidence(event.object_key, body)
            except StoreUnavailable:
                return
            stored = partial(evidence.note_stored, event_id=event.id, now=clock.utcnow())
            run_transaction(stored)
        if len(waiting) < TEXTS_A_BATCH:
            return


def expire_evidence(config: Config) -> None:
    """Let go what was kept long enough, and delete the objects of texts that went."""
    now = clock.utcnow()

    def work(session: Session) -> None:
        evidence.drop_texts(session, now - timedelta(days=config.evidence_text_days), now)
        evidence.drop_addresses(session, now - timedelta(days=config.evidence_address_days))
        evidence.anonymise_events(session, now - timedelta(days=config.evidence_days), now)

    run_transaction(work)
    _delete_dropped_texts(now)


def _delete_dropped_texts(now: datetime) -> None:
    while True:
        with reading() as session:
            due = evidence.list_texts_to_delete(session, now, limit=TEXTS_A_BATCH)
        failed = set(r2.delete_objects([event.object_key for event in due])) if due else set()
        gone = [event.id for event in due if event.object_key not in failed]
        if gone:
            run_transaction(partial(evidence.note_deleted, event_ids=gone, now=now))
        if failed or len(due) < TEXTS_A_BATCH:
            return
