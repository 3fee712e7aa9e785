# SPDX-License-Identifier: AGPL-3.0-or-later
"""A copy of the waiting text queue, a second old at most: positions and waits are read from it,
never the table.
"""

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session

from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import RequestNeeds
from horde.database.queue_classes import TEXT_FAMILY, get_needs_of_classes, get_rank, is_live
from horde.db import table_of
from horde.hot_session import keep
from horde.redis_ctrl import RedisUnavailable, get_json, set_json
from horde.runtime import Part

QUEUE_KEY = "text_wp_cache"
QUEUE_KEY_TTL_SECONDS = 5
COPY_SECONDS = 1.0  # how long a process believes its copy

# Request id, class, max_length, max_context_length, generations.
type QueueRow = tuple[str, int | None, int, int, int]


@dataclass(frozen=True, slots=True)
class QueueGroup:
    """Waiting requests of one class and length, by their places in the queue, with running totals
    of their work.
    """

    queue_class: int
    max_length: int
    max_context_length: int
    places: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # running total of max_length times generations
    jobs: list[int] = field(default_factory=list)  # running total of generations

    def add(self, place: int, jobs: int) -> None:
        """Append the next request in queue order."""
        self.places.append(place)
        self.tokens.append((self.tokens[-1] if self.tokens else 0) + self.max_length * jobs)
        self.jobs.append((self.jobs[-1] if self.jobs else 0) + jobs)

    def get_work_before(self, place: int | None) -> tuple[int, int]:
        """Tokens and generations of the requests ahead of a place; of all of them when it is
        None.
        """
        count = len(self.places) if place is None else bisect_left(self.places, place)
        return (self.tokens[count - 1], self.jobs[count - 1]) if count else (0, 0)


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The waiting text requests in queue order, as they stood when it was made."""

    places: dict[str, int]  # request id to place, from 0
    groups: tuple[QueueGroup, ...]
    class_counts: dict[int, int]  # requests of each class
    _chosen: dict[Hashable, tuple[QueueGroup, ...]] = field(default_factory=dict, repr=False)

    def get_position(self, wp_id: UUID) -> int:
        """Place in the queue from 1; 0 when the request is not waiting."""
        place = self.places.get(str(wp_id))
        return 0 if place is None else place + 1

    def choose_groups(
        self, key: Hashable, is_chosen: Callable[[QueueGroup], bool]
    ) -> tuple[QueueGroup, ...]:
        """The groups of which `is_chosen` holds, judged once for each key: with many classes it
        would cost each request milliseconds.
        """
        if key not in self._chosen:
            self._chosen[key] = tuple(group for group in self.groups if is_chosen(group))
        return self._chosen[key]

    def get_work(self, groups: Iterable[QueueGroup], before: UUID | None = None) -> tuple[int, int]:
        """Outstanding tokens and generations of groups, ahead of a request or in all."""
        place = None if before is None else self.places.get(str(before), len(self.places))
        work = [group.get_work_before(place) for group in groups]
        return sum(tokens for tokens, _ in work), sum(jobs for _, jobs in work)


def build_queue_snapshot(rows: Iterable[QueueRow]) -> QueueSnapshot:
    """A snapshot from rows in queue order."""
    places: dict[str, int] = {}
    groups: dict[tuple[int | None, int, int], QueueGroup] = {}
    for place, (wp_id, queue_class, max_length, max_context_length, jobs) in enumerate(rows):
        places[wp_id] = place
        key = (queue_class, max_length, max_context_length)
        if key not in groups:
            groups[key] = QueueGroup(queue_class or 0, max_length, max_context_length)
        groups[key].add(place, jobs)
    counts: Counter[int] = Counter()
    for group in groups.values():
        counts[group.queue_class] += len(group.places)
    return QueueSnapshot(places=places, groups=tuple(groups.values()), class_counts=dict(counts))


waiting = table_of(TextWaitingPrompt).c

_LIST_QUEUE = keep(
    select(
        cast(waiting.id, Text),
        waiting.queue_class,
        waiting.max_length,
        waiting.max_context_length,
        waiting.n,
    )
    .where(is_live(waiting), waiting.wp_type == TEXT_FAMILY)
    .order_by(get_rank(waiting).desc(), waiting.created, waiting.id)
)


def list_queue_rows(session: Session) -> list[QueueRow]:
    """Every waiting text request in queue order, in one statement."""
    return [(row[0], row[1], row[2], row[3], row[4]) for row in session.execute(_LIST_QUEUE)]


@dataclass(slots=True)
class _SeenQueue:
    """Generations of each request as this process last read them; None before the first time."""

    counts: dict[str, int] | None = None


_seen: Part[_SeenQueue] = Part(_SeenQueue)


def list_gained_rows(rows: Sequence[QueueRow]) -> list[QueueRow]:
    """The rows with more generations than those that `note_seen_rows` was last called with; all
    before the first time.
    """
    before = _seen.get().counts or {}
    return [row for row in rows if row[4] > before.get(row[0], 0)]


def note_seen_rows(rows: Sequence[QueueRow]) -> None:
    """Note what the queue was, once workers are told of what it gained: where that failed, it is
    told of at the next time.
    """
    _seen.get().counts = {row[0]: row[4] for row in rows}


def publish_queue(rows: list[QueueRow]) -> None:
    """Share the order with every process for a few seconds. Best effort."""
    try:
        set_json(QUEUE_KEY, rows, QUEUE_KEY_TTL_SECONDS)
    except RedisUnavailable:
        return


class _Copy:
    """The runtime's own copy."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.snapshot: QueueSnapshot | None = None
        self.made = 0.0

    def forget(self) -> None:
        self.snapshot = None


_copy: Part[_Copy] = Part(_Copy)


def get_queue_snapshot(session: Session) -> QueueSnapshot:
    """The queue as it stood at most a second ago: this process's copy, else the shared one, else
    one read of the table.
    """
    copy = _copy.get()
    snapshot = copy.snapshot
    if snapshot is not None and time.monotonic() - copy.made < COPY_SECONDS:
        return snapshot
    with copy.lock:
        if copy.snapshot is None or time.monotonic() - copy.made >= COPY_SECONDS:
            copy.snapshot = build_queue_snapshot(_read_rows(session))
            copy.made = time.monotonic()
        return copy.snapshot


def forget_queue_snapshot() -> None:
    """Drop the runtime's copy."""
    _copy.get().forget()


def _read_rows(session: Session) -> Iterable[Any]:
    try:
        shared = get_json(QUEUE_KEY)
    except RedisUnavailable:
        shared = None
    return shared if isinstance(shared, list) else list_queue_rows(session)


def get_needs_of_groups(session: Session, snapshot: QueueSnapshot) -> dict[int, RequestNeeds]:
    """The needs of every class in the snapshot, from process memory where the class was met
    before.
    """
    return get_needs_of_classes(session, list({group.queue_class for group in snapshot.groups}))
