# SPDX-License-Identifier: AGPL-3.0-or-later
"""Stored objects against the rows that name them: the proof that none is left behind."""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from horde import r2
from horde.classes.base.moderation import TextState
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.database.evidence import (
    KEPT_STATES,
    build_object_key,
    find_events_of_objects,
    list_stored_objects,
)
from horde.database.queue_classes import is_live
from horde.database.request_endings import list_object_keys
from horde.object_deletes import find_queued_deletes

OBJECTS_A_BATCH = 500
_CHAT_KEY = re.compile(
    r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})_chat_(?:\d+\.jpg|messages\.json)"
)
_EVIDENCE_KEY = re.compile(
    rf"[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}{r2.EVIDENCE_SUFFIX}"
)


@dataclass(slots=True, kw_only=True)
class StoreReport:
    """What lies in the store. `foreign` objects have a key that nothing here makes: they are
    others' and left alone.
    """

    objects: int = 0
    referenced: int = 0
    waiting_for_deletion: int = 0
    foreign: int = 0
    orphans: list[str] = field(default_factory=list)  # named by no row, and nobody will delete them
    missing: list[str] = field(default_factory=list)  # of a waiting request or evidence, not there

    @property
    def has_discrepancies(self) -> bool:
        """Whether something is there that must not be, or the reverse."""
        return bool(self.orphans or self.missing)


def audit_store(session: Session) -> StoreReport:
    """Compare every object with the rows, while the horde runs; `session` reads each statement by
    itself.

    What looks wrong is looked at once more at the end, since requests come and go meanwhile: an
    object whose row went is deleted or queued by then. Changes nothing. Raises StoreUnavailable and
    RedisUnavailable.
    """
    report, suspects = StoreReport(), list[str]()
    for batch in batched((key for _, key in r2.list_objects()), OBJECTS_A_BATCH):
        ours = [key for key in batch if _CHAT_KEY.fullmatch(key) or _EVIDENCE_KEY.fullmatch(key)]
        report.objects += len(batch)
        report.foreign += len(batch) - len(ours)
        named = _find_named(session, ours)
        waiting = _find_waiting(session, [key for key in ours if key not in named])
        report.referenced += len(named)
        report.waiting_for_deletion += len(waiting)
        suspects.extend(key for key in ours if key not in named and key not in waiting)
    report.orphans = [key for key in suspects if _is_orphan(session, key)]
    report.missing = [
        key for key in _list_live_keys(session) if not r2.has_object(key) and _is_live(session, key)
    ]
    return report


def _find_named(session: Session, keys: Sequence[str]) -> set[str]:
    """Which of the keys a row names."""
    request_ids = {_get_owner_id(key) for key in keys if not _is_evidence(key)}
    requests = list_object_keys(session, list(request_ids))
    return {*requests, *_find_evidence(session, keys, KEPT_STATES)}.intersection(keys)


def _find_waiting(session: Session, keys: Sequence[str]) -> set[str]:
    """Which of the keys wait to be deleted."""
    queued = find_queued_deletes([key for key in keys if not _is_evidence(key)])
    return {*queued, *_find_evidence(session, keys, {TextState.DELETING})}


def _find_evidence(session: Session, keys: Sequence[str], states: Container[str]) -> set[str]:
    """Which of the keys hold the text of an event that is in one of the states."""
    found = find_events_of_objects(
        session, [_get_owner_id(key) for key in keys if _is_evidence(key)]
    )
    return {build_object_key(object_id) for object_id, state in found.items() if state in states}


def _is_orphan(session: Session, key: str) -> bool:
    """Asked in the order in which an object goes: queued first, then its row, then itself."""
    return not (_find_named(session, [key]) or _find_waiting(session, [key])) and r2.has_object(key)


def _list_live_keys(session: Session) -> Iterator[str]:
    request = TextWaitingPrompt
    for batch in batched(
        session.scalars(select(request.id).where(is_live(request), request.is_chat)).all(),
        OBJECTS_A_BATCH,
    ):
        yield from list_object_keys(session, batch)
    yield from map(build_object_key, list_stored_objects(session))


def _is_live(session: Session, key: str) -> bool:
    if _is_evidence(key):
        return bool(_find_evidence(session, [key], {TextState.STORED}))
    request = TextWaitingPrompt
    return (
        session.scalar(select(request.id).where(request.id == _get_owner_id(key), is_live(request)))
        is not None
    )


def _is_evidence(key: str) -> bool:
    return key.endswith(r2.EVIDENCE_SUFFIX)


def _get_owner_id(key: str) -> UUID:
    return UUID(key.partition("_")[0])
