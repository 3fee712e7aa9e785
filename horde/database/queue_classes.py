# SPDX-License-Identifier: AGPL-3.0-or-later
"""Classes of waiting text requests: what the requests of each share, and which of them wait."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, and_, false, func, literal, select, text
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session

from horde.classes.base.waiting_prompt import PRIORITY_PER_SECOND, WPAllowedWorkers, WPModels
from horde.classes.kobold.class_index import ClassIndex
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import RequestNeeds
from horde.hot_session import keep
from horde.runtime import Part
from horde.text_work import TextWork

MAX_CACHED_CLASSES = 20_000
MANY_CLASSES = 200
MAX_BELIEVED_SECONDS = 1.0
TEXT_FAMILY = "text"

# JSONB containment: messages of which one has such a part.
AN_IMAGE_PART = [{"content": [{"type": "image_url"}]}]

# One probe of the queue's index for each class, however deep it is.
_LIST_CLASSES = keep(select(func.list_queue_classes()))


class _NeedsOfClasses:
    """The needs behind each class, in process memory: a class is the hash of its needs, so they
    never change.
    """

    def __init__(self) -> None:
        self._needs: OrderedDict[int, RequestNeeds] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, queue_classes: Iterable[int]) -> dict[int, RequestNeeds]:
        with self._lock:
            return {
                number: self._needs[number] for number in queue_classes if number in self._needs
            }

    def remember(self, needs: dict[int, RequestNeeds]) -> None:
        with self._lock:
            self._needs.update(needs)
            while len(self._needs) > MAX_CACHED_CLASSES:
                self._needs.popitem(last=False)


_needs_of_classes: Part[_NeedsOfClasses] = Part(_NeedsOfClasses)


def is_live(request: Any) -> ColumnElement[bool]:
    """The predicate of the queue's partial indexes, spelled as they spell it so that the planner
    sees it.

    `request` has the columns as attributes: the row class, or `.c` of its table or an alias of
    that.
    """
    return and_(request.active, ~request.faulted, request.n > literal(0, literal_execute=True))


def get_rank(request: Any) -> Any:
    """The queue's order, highest first: starting priority minus what every later second costs."""
    return request.extra_priority - PRIORITY_PER_SECOND * func.date_part(
        text("'epoch'"), request.created
    )


class _ClassList:
    """The classes as last read, believed for a while only where there are so many that reading them
    costs milliseconds.
    """

    def __init__(self) -> None:
        # Together, since threads replace them.
        self.latest: tuple[list[int], ClassIndex] = [], ClassIndex({})
        self.believed_until = float("-inf")

    def believe(self, seconds_taken: float) -> None:
        if len(self.latest[0]) >= MANY_CLASSES:
            # So that reading and indexing them take a tenth of the time at most; on a machine with
            # too much to do they take long, and no job shall wait for that.
            seconds = min(10 * seconds_taken, MAX_BELIEVED_SECONDS)
            self.believed_until = time.monotonic() + seconds


_class_list: Part[_ClassList] = Part(_ClassList)


class ClassLook:
    """A look at the classes of the queue, which another statement may make on its way: it puts what
    `list_queue_classes` answers into `classes`.

    Reading grows with the classes, not with the requests. Where they are many, a list is believed
    for a while instead, and no look is needed.
    """

    def __init__(self) -> None:
        self._held = _class_list.get()
        self._started = time.monotonic()
        self.is_needed = self._started >= self._held.believed_until
        self.classes: list[int] | None = None

    def get_index(self, session: Session) -> ClassIndex:
        """Every class with a waiting request. The index is made anew only when they changed."""
        held = self._held
        if not self.is_needed:
            return held.latest[1]
        classes = self.classes
        if classes is None:
            classes = list(session.scalar(_LIST_CLASSES) or ())
        known, index = held.latest
        if classes != known:
            needs = get_needs_of_classes(session, classes)
            index = ClassIndex(needs, index)
            # One whose last request went meanwhile has no needs, and may come back.
            held.latest = (classes if len(needs) == len(classes) else [], index)
        held.believe(time.monotonic() - self._started)
        return index


def get_needs_of_classes(session: Session, queue_classes: Sequence[int]) -> dict[int, RequestNeeds]:
    """The needs of each class, read from one of its requests the first time a process meets it."""
    held = _needs_of_classes.get()
    known = held.find(queue_classes)
    unknown = [number for number in queue_classes if number not in known]
    if unknown:
        read = _read_needs_of_classes(session, unknown)
        held.remember(read)
        known |= read
    return known


def _read_needs_of_classes(session: Session, queue_classes: list[int]) -> dict[int, RequestNeeds]:
    sample = (
        select(TextWaitingPrompt.id, TextWaitingPrompt.queue_class)
        .where(is_live(TextWaitingPrompt), TextWaitingPrompt.queue_class.in_(queue_classes))
        .distinct(TextWaitingPrompt.queue_class)
        .order_by(TextWaitingPrompt.queue_class)
    ).subquery()
    rows = session.execute(
        select(*_list_need_columns()).where(TextWaitingPrompt.id.in_(select(sample.c.id)))
    ).all()
    return {row.queue_class: build_request_needs(row) for row in rows}


def _list_need_columns() -> tuple[Any, ...]:
    models = (
        select(func.array_agg(aggregate_order_by(WPModels.model, WPModels.id)))
        .where(WPModels.wp_id == TextWaitingPrompt.id)
        .correlate(TextWaitingPrompt)
        .scalar_subquery()
    )
    workers = (
        select(func.array_agg(WPAllowedWorkers.worker_id))
        .where(WPAllowedWorkers.wp_id == TextWaitingPrompt.id)
        .correlate(TextWaitingPrompt)
        .scalar_subquery()
    )
    stored = TextWaitingPrompt
    return (
        stored.id,
        stored.queue_class,
        stored.user_id,
        stored.is_chat,
        stored.max_length,
        stored.max_context_length,
        stored.trusted_workers,
        stored.validated_backends,
        stored.slow_workers,
        stored.nsfw,
        stored.worker_blacklist,
        stored.chat_required_features,
        stored.chat_tools_temperature,
        func.coalesce(stored.is_chat & stored.messages.contains(AN_IMAGE_PART), false()).label(
            "has_images"
        ),
        models.label("models"),
        workers.label("worker_ids"),
    )


def build_request_needs(row: Any) -> RequestNeeds:
    """Needs from a row of `_list_need_columns`."""
    return RequestNeeds(
        user_id=row.user_id,
        is_chat=row.is_chat,
        models=tuple(row.models or ()),
        max_length=row.max_length,
        max_context_length=row.max_context_length,
        trusted_workers=row.trusted_workers,
        validated_backends=row.validated_backends,
        slow_workers=row.slow_workers,
        nsfw=row.nsfw,
        worker_ids=frozenset(row.worker_ids or ()),
        worker_blacklist=row.worker_blacklist,
        required_features=frozenset(row.chat_required_features or ()),
        tools_temperature=row.chat_tools_temperature,
        has_images=row.has_images,
    )


def find_request_needs(session: Session, wp_id: UUID) -> RequestNeeds | None:
    """What decides who may serve a stored request; None when it is gone."""
    row = session.execute(
        select(*_list_need_columns()).where(TextWaitingPrompt.id == wp_id)
    ).one_or_none()
    return None if row is None else build_request_needs(row)


def build_text_work(needs: RequestNeeds, count: int) -> TextWork:
    """What the queue gains by so many generations of a request."""
    return TextWork(needs.models, needs.is_chat, count, needs.max_length, needs.max_context_length)


def list_unclassified_requests(session: Session, limit: int) -> list[tuple[UUID, RequestNeeds]]:
    """Live requests without a class, as a server of an older version writes them."""
    statement = (
        select(*_list_need_columns())
        .where(
            is_live(TextWaitingPrompt),
            TextWaitingPrompt.wp_type == TEXT_FAMILY,
            TextWaitingPrompt.queue_class.is_(None),
        )
        .limit(limit)
    )
    return [(row.id, build_request_needs(row)) for row in session.execute(statement)]
