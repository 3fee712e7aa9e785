# SPDX-License-Identifier: AGPL-3.0-or-later
"""Stored objects against the rows that name them: the proof that none is left behind."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from horde import r2
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt, find_queued_chat_image_deletes
from horde.database.text_functions import is_live

OBJECTS_A_BATCH = 500
_CHAT_KEY = re.compile(
    r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})_chat_(?:\d+\.jpg|messages\.json)"
)


@dataclass(slots=True, kw_only=True)
class StoreReport:
    """What lies in the store. `foreign` objects have a key that no chat request makes: they are
    others' and left alone.
    """

    objects: int = 0
    referenced: int = 0
    waiting_for_deletion: int = 0
    foreign: int = 0
    orphans: list[str] = field(default_factory=list)  # named by no row, and nobody will delete them
    missing: list[str] = field(default_factory=list)  # named by a waiting request, and not there

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
        ours = [key for key in batch if _CHAT_KEY.fullmatch(key)]
        report.objects += len(batch)
        report.foreign += len(batch) - len(ours)
        named = _find_named(session, ours)
        waiting = find_queued_chat_image_deletes([key for key in ours if key not in named])
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
    request_ids = {_get_request_id(key) for key in keys}
    return set(TextWaitingPrompt.list_object_keys(session, list(request_ids))).intersection(keys)


def _is_orphan(session: Session, key: str) -> bool:
    """Asked in the order in which an object goes: queued first, then its row, then itself."""
    return not (
        _find_named(session, [key]) or find_queued_chat_image_deletes([key])
    ) and r2.has_object(key)


def _list_live_keys(session: Session) -> Iterator[str]:
    request = TextWaitingPrompt
    for batch in batched(
        session.scalars(select(request.id).where(is_live(request), request.is_chat)).all(),
        OBJECTS_A_BATCH,
    ):
        yield from TextWaitingPrompt.list_object_keys(session, batch)


def _is_live(session: Session, key: str) -> bool:
    request = TextWaitingPrompt
    return (
        session.scalar(
            select(request.id).where(request.id == _get_request_id(key), is_live(request))
        )
        is not None
    )


def _get_request_id(key: str) -> UUID:
    return UUID(key.partition("_")[0])
