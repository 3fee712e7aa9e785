# SPDX-License-Identifier: AGPL-3.0-or-later
"""The text queue: what a worker may take, the claim, and who serves a chat model."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    CTE,
    BigInteger,
    ColumnElement,
    DateTime,
    Float,
    Integer,
    Update,
    and_,
    any_,
    bindparam,
    case,
    cast,
    column,
    exists,
    false,
    func,
    literal,
    or_,
    select,
    text,
    true,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session

from horde.classes.base.waiting_prompt import (
    PRIORITY_PER_SECOND,
    REQUEST_TTL,
    WPAllowedWorkers,
    WPModels,
    WPTrickedWorkers,
)
from horde.classes.base.worker import WORKER_ONLINE_SECONDS
from horde.classes.kobold.class_index import ClassIndex
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt, select_as_sent
from horde.classes.kobold.worker import (
    REPORTED_SKIP_REASONS,
    EligibilityInputs,
    SkipReason,
    TextRequestFacts,
    TextWorker,
    get_text_worker_lease_capacity,
)
from horde.db import after_commit, build_detached, table_of
from horde.hot_session import keep
from horde.runtime import Part
from horde.text_work import TextWork, publish_text_work

CONTESTED_WAIT_MILLISECONDS = 1000  # a claim or a reply holds a row for some milliseconds
CANDIDATES_PER_CLASS = 20  # enough that workers popping at once each find an unlocked row
MAX_CACHED_CLASSES = 20_000
MANY_CLASSES = 200
MAX_BELIEVED_SECONDS = 1.0
TEXT_FAMILY = "text"
# JSONB containment: messages of which one has such a part.
AN_IMAGE_PART = [{"content": [{"type": "image_url"}]}]

requests = table_of(TextWaitingPrompt)

# A loose index scan: one probe of the queue's index for each class that has a waiting request,
# however deep it is.
_SCAN_CLASSES = keep(
    text("""
    WITH RECURSIVE classes AS (
        (SELECT queue_class FROM waiting_prompts
         WHERE active AND NOT faulted AND n > 0 AND wp_type = 'text' AND queue_class IS NOT NULL
         ORDER BY queue_class LIMIT 1)
        UNION ALL
        SELECT (SELECT later.queue_class FROM waiting_prompts AS later
                WHERE later.active AND NOT later.faulted AND later.n > 0 AND later.wp_type = 'text'
                  AND later.queue_class > classes.queue_class
                ORDER BY later.queue_class LIMIT 1)
        FROM classes WHERE classes.queue_class IS NOT NULL
    )
    SELECT queue_class FROM classes WHERE queue_class IS NOT NULL
    """)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServableClass:
    """A class of requests that a worker may take, with the bounds the claim compares row by row;
    lengths are tokens.
    """

    number: int
    models: tuple[str, ...]  # as its requests list them
    max_length: int
    max_context_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServableQueue:
    """What of the queue a worker may take, class by class."""

    classes: tuple[ServableClass, ...]
    lease_capacity: float  # tokens of a chat job that the worker finishes in time
    only_user_id: int | None  # a worker in maintenance serves its owner alone
    priority_user_ids: tuple[int, ...]
    # Requests kept from the worker, by reason, given the requests of each class.
    count_skipped: Callable[[Mapping[int, int]], dict[str, int]]
    is_empty: bool  # nothing waits for anybody
    # Whether anything waits for its models, be it kept from the worker or not.
    is_work_left: bool = False
    # Whether the list of classes was read for it, and is not one that was believed for a while.
    is_fresh: bool = True

    def get_models(self, queue_class: int) -> tuple[str, ...]:
        """The models that requests of one of its classes list."""
        return next(servable.models for servable in self.classes if servable.number == queue_class)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRequest:
    """A request of which `taken` generations were claimed; the caller writes a job for each in the
    same transaction.

    `request` is a copy that belongs to no session, with the columns that a job needs.
    """

    request: TextWaitingPrompt
    models: tuple[str, ...]
    taken: int
    remaining: int


class _ClassFacts:
    """The facts behind each class, in process memory: a class is the hash of its facts, so they
    never change.
    """

    def __init__(self) -> None:
        self._facts: OrderedDict[int, TextRequestFacts] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, queue_classes: Iterable[int]) -> dict[int, TextRequestFacts]:
        with self._lock:
            return {
                number: self._facts[number] for number in queue_classes if number in self._facts
            }

    def remember(self, facts: dict[int, TextRequestFacts]) -> None:
        with self._lock:
            self._facts.update(facts)
            while len(self._facts) > MAX_CACHED_CLASSES:
                self._facts.popitem(last=False)


_class_facts = _ClassFacts()


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


def text_wp_speed_gate_clause(
    request: Any, lease_capacity: ColumnElement[float]
) -> ColumnElement[bool]:
    """Whether a worker of this lease capacity (tokens) finishes the request in time; text jobs are
    not gated.
    """
    return or_(~request.is_chat, request.max_length <= lease_capacity)


class _ClassList:
    """The classes as last read, believed for a while only where there are so many that reading them
    costs milliseconds.
    """

    def __init__(self) -> None:
        # Together, since threads replace them.
        self.latest: tuple[list[int], ClassIndex] = [], ClassIndex({})
        self.believed_until = float("-inf")

    def believe(self, seconds_to_read: float) -> None:
        if len(self.latest[0]) >= MANY_CLASSES:
            # So that reading takes a tenth of the time at most; on a machine with too much to do it
            # takes long, and no job shall wait for that.
            seconds = min(10 * seconds_to_read, MAX_BELIEVED_SECONDS)
            self.believed_until = time.monotonic() + seconds


_class_list: Part[_ClassList] = Part(_ClassList)


def get_class_index(session: Session) -> tuple[ClassIndex, bool]:
    """Every class with a waiting request, and whether they were read just now.

    Reading grows with the classes, not with the requests, and the index is made anew only when they
    changed.
    """
    held = _class_list.get()
    started = time.monotonic()
    if started < held.believed_until:
        return held.latest[1], False
    classes = list(session.execute(_SCAN_CLASSES).scalars())
    seconds_to_read = time.monotonic() - started
    known, index = held.latest
    if classes != known:
        facts = get_queue_class_facts(session, classes)
        index = ClassIndex(facts, index)
        # One whose last request went meanwhile has no facts, and may come back.
        held.latest = (classes if len(facts) == len(classes) else [], index)
    held.believe(seconds_to_read)
    return index, True


def get_queue_class_facts(
    session: Session, queue_classes: Sequence[int]
) -> dict[int, TextRequestFacts]:
    """The facts of each class, read from one of its requests the first time a process meets it."""
    known = _class_facts.find(queue_classes)
    unknown = [number for number in queue_classes if number not in known]
    if unknown:
        read = _read_class_facts(session, unknown)
        _class_facts.remember(read)
        known |= read
    return known


def _read_class_facts(session: Session, queue_classes: list[int]) -> dict[int, TextRequestFacts]:
    sample = (
        select(TextWaitingPrompt.id, TextWaitingPrompt.queue_class)
        .where(is_live(TextWaitingPrompt), TextWaitingPrompt.queue_class.in_(queue_classes))
        .distinct(TextWaitingPrompt.queue_class)
        .order_by(TextWaitingPrompt.queue_class)
    ).subquery()
    rows = session.execute(
        select(*_fact_columns()).where(TextWaitingPrompt.id.in_(select(sample.c.id)))
    ).all()
    return {row.queue_class: build_request_facts(row) for row in rows}


def _fact_columns() -> tuple[Any, ...]:
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


def build_request_facts(row: Any) -> TextRequestFacts:
    """Facts from a row of `_fact_columns`."""
    return TextRequestFacts(
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


def find_request_facts(session: Session, wp_id: UUID) -> TextRequestFacts | None:
    """What decides who may serve a stored request; None when it is gone."""
    row = session.execute(
        select(*_fact_columns()).where(TextWaitingPrompt.id == wp_id)
    ).one_or_none()
    return None if row is None else build_request_facts(row)


def build_text_work(facts: TextRequestFacts, count: int) -> TextWork:
    """What the queue gains by so many generations of a request."""
    return TextWork(facts.models, facts.is_chat, count, facts.max_length, facts.max_context_length)


_FIND_WORK = keep(
    select(
        select(func.array_agg(aggregate_order_by(WPModels.model, WPModels.id)))
        .where(WPModels.wp_id == requests.c.id)
        .scalar_subquery()
        .label("models"),
        requests.c.is_chat,
        requests.c.max_length,
        requests.c.max_context_length,
    ).where(requests.c.id == bindparam("wp_id"))
)


def announce_returned_work(session: Session, wp_id: UUID) -> None:
    """Tell of a generation that was given back to its request, after the commit."""
    row = session.execute(_FIND_WORK, {"wp_id": wp_id}).one_or_none()
    if row is not None:
        work = TextWork(
            tuple(row.models or ()), row.is_chat, 1, row.max_length, row.max_context_length
        )
        after_commit(session, partial(publish_text_work, work))


def list_unclassified_requests(session: Session, limit: int) -> list[tuple[UUID, TextRequestFacts]]:
    """Live requests without a class, as a server of an older version writes them."""
    statement = (
        select(*_fact_columns())
        .where(
            is_live(TextWaitingPrompt),
            TextWaitingPrompt.wp_type == TEXT_FAMILY,
            TextWaitingPrompt.queue_class.is_(None),
        )
        .limit(limit)
    )
    return [(row.id, build_request_facts(row)) for row in session.execute(statement)]


def get_sorted_text_wp_filtered_to_worker(
    session: Session,
    worker: TextWorker,
    inputs: EligibilityInputs,
    chat_inputs: EligibilityInputs,
    priority_user_ids: Collection[int],
) -> ServableQueue:
    """What of the waiting requests this worker may take, judged class by class.

    The rules are those of `TextWorker.can_generate_with_eligibility_inputs`, asked of the smallest
    request of each class; `claim_next_request` compares the lengths of each row and takes them in
    queue order.
    """
    only_user_id = worker.user_id if worker.maintenance or worker.paused else None

    def judge(least: TextRequestFacts) -> SkipReason | None:
        if only_user_id is not None:
            # Whose it is, the claim compares row by row.
            least = replace(least, user_id=only_user_id)
        refusal = worker.can_generate_with_eligibility_inputs(
            least, chat_inputs if least.is_chat else inputs
        )
        return None if refusal is None else refusal.reason

    index, is_fresh = get_class_index(session)
    own = index.list_for(inputs.models, worker.chat_model_id if worker.accepts_chat_jobs else None)
    verdicts = [(indexed, judge(indexed.least)) for indexed in own]

    def count_skipped(counts: Mapping[int, int]) -> dict[str, int]:
        skipped: Counter[SkipReason] = Counter()
        for indexed, reason in verdicts:
            if reason is not None:
                skipped[reason] += counts.get(indexed.number, 1)
        for kind, count in index.count_others(own, counts).items():
            reason = judge(kind)
            if reason is not None:
                skipped[reason] += count
        return {
            reason.value: count
            for reason, count in skipped.items()
            if reason in REPORTED_SKIP_REASONS
        }

    return ServableQueue(
        classes=tuple(
            _build_servable_class(indexed.number, indexed.facts, worker)
            for indexed, reason in verdicts
            if reason is None
        ),
        lease_capacity=get_text_worker_lease_capacity(worker.gate_speed),
        only_user_id=only_user_id,
        priority_user_ids=(worker.user_id, *priority_user_ids),
        count_skipped=count_skipped,
        is_empty=index.is_empty,
        is_work_left=bool(own),
        is_fresh=is_fresh,
    )


def _build_servable_class(
    number: int, facts: TextRequestFacts, worker: TextWorker
) -> ServableClass:
    if facts.is_chat:
        max_length, max_context_length = (
            worker.chat_max_length or 0,
            worker.chat_max_context_length or 0,
        )
    else:
        max_length, max_context_length = worker.max_length, worker.max_context_length
    return ServableClass(
        number=number,
        models=facts.models,
        max_length=max_length,
        max_context_length=max_context_length,
    )


_CLAIMED_COLUMNS = (
    "id",
    "user_id",
    "queue_class",
    "prompt",
    "gen_payload",
    "is_chat",
    "chat_messages_offloaded",
    "max_length",
    "max_context_length",
    "created",
    "sharedkey_id",
)
_CLAIMED_DOCUMENTS = ("messages", "chat_extras")


def _list_claimed_columns(columns: Any) -> list[ColumnElement[Any]]:
    """What a job needs of its request; `columns` has the columns as attributes."""
    return [
        *(getattr(columns, name) for name in _CLAIMED_COLUMNS),
        *(select_as_sent(columns, name) for name in _CLAIMED_DOCUMENTS),
    ]


def _copy_claimed(row: Any) -> TextWaitingPrompt:
    """The request of a claim's row; it belongs to no session."""
    names = (*_CLAIMED_COLUMNS, *_CLAIMED_DOCUMENTS)
    return build_detached(TextWaitingPrompt, {name: getattr(row, name) for name in names})


def _build_claim() -> Any:
    """The claim as one statement, built once: candidates unlocked in queue order, the best of them
    that nobody holds locked and taken.

    One row when there are candidates, with the id of the best of them; its other columns are null
    when others hold all of them.
    """
    waiting = requests.alias("waiting").c
    servable = (
        func.unnest(
            cast(bindparam("pop_classes"), ARRAY(BigInteger)),
            cast(bindparam("pop_max_lengths"), ARRAY(Integer)),
            cast(bindparam("pop_max_context_lengths"), ARRAY(Integer)),
        )
        .table_valued(
            column("queue_class", BigInteger),
            column("max_length", Integer),
            column("max_context_length", Integer),
            name="servable",
        )
        .render_derived()
    )
    rank = get_rank(waiting)
    is_allowed = and_(
        is_live(waiting),
        waiting.wp_type == TEXT_FAMILY,
        waiting.queue_class == servable.c.queue_class,
        # Both lengths are in the index: rows too long cost no visit.
        waiting.max_length <= servable.c.max_length,
        waiting.max_context_length <= servable.c.max_context_length,
        waiting.expiry > bindparam("pop_now", type_=DateTime),
        text_wp_speed_gate_clause(waiting, bindparam("pop_lease_capacity", type_=Float)),
    )
    only_user_id = cast(bindparam("pop_only_user_id"), Integer)
    of_each_class = (
        select(waiting.id, rank.label("rank"), waiting.created)
        .where(is_allowed, only_user_id.is_(None))
        .order_by(rank.desc(), waiting.created, waiting.id)
        .limit(CANDIDATES_PER_CLASS)
        .lateral("of_each_class")
    )
    general = (
        select(
            literal(0).label("is_priority"),
            of_each_class.c.id,
            of_each_class.c.rank,
            of_each_class.c.created,
        )
        .select_from(servable)
        .join(of_each_class, true())
        .order_by(of_each_class.c.rank.desc(), of_each_class.c.created, of_each_class.c.id)
        .limit(CANDIDATES_PER_CLASS)
    )
    preferred = (
        select(literal(1).label("is_priority"), waiting.id, rank.label("rank"), waiting.created)
        .where(
            is_allowed,
            or_(only_user_id.is_(None), waiting.user_id == only_user_id),
            waiting.user_id == any_(cast(bindparam("pop_priority_user_ids"), ARRAY(Integer))),
        )
        .order_by(rank.desc())
        .limit(CANDIDATES_PER_CLASS)
    )
    candidates = union_all(general.subquery().select(), preferred.subquery().select()).subquery(
        "candidates"
    )
    best = (
        select(
            candidates.c.id,
            func.max(candidates.c.is_priority).label("is_priority"),
            func.max(candidates.c.rank).label("rank"),
            func.min(candidates.c.created).label("created"),
        )
        .group_by(candidates.c.id)
        .cte("best")
    )
    order = (best.c.is_priority.desc(), best.c.rank.desc(), best.c.created, best.c.id)
    locking = requests.alias("locked")
    chosen = (
        select(locking.c.id, locking.c.n)
        .select_from(locking)
        .join(best, best.c.id == locking.c.id)
        .where(is_live(locking.c))
        .order_by(*order)
        .limit(1)
        .with_for_update(of=locking, skip_locked=True, key_share=True)
    ).cte("chosen")
    taken = _build_taking(chosen).cte("taken")
    first = select(best.c.id).order_by(*order).limit(1).subquery("first")
    return select(first.c.id.label("first_id"), *taken.c).select_from(
        first.outerjoin(taken, true())
    )


def _build_claim_of_one() -> Any:
    """The claim of one request by its id, which waits for whoever holds its row."""
    chosen = (
        select(requests.c.id, requests.c.n)
        .where(requests.c.id == bindparam("pop_request_id"), is_live(requests.c), _waits_briefly)
        .with_for_update(key_share=True)
    ).cte("chosen")
    return _build_taking(chosen)


def _build_taking(chosen: CTE) -> Update:
    """The update that takes generations of the one row that `chosen` locked."""
    stored = requests.c
    taken = case(
        (stored.is_chat, 1), else_=func.least(chosen.c.n, bindparam("pop_wanted", type_=Integer))
    )
    return (
        update(requests)
        .where(stored.id == chosen.c.id)
        .values(
            n=stored.n - taken,
            expiry=func.greatest(stored.expiry, bindparam("pop_new_expiry", type_=DateTime)),
        )
        .returning(
            (chosen.c.n - stored.n).label("taken"),
            stored.n.label("remaining"),
            *_list_claimed_columns(stored),
        )
    )


# The setting ends with the transaction. Inside the statement it costs no statement of its own.
_waits_briefly = func.set_config("lock_timeout", str(CONTESTED_WAIT_MILLISECONDS), True).is_not(
    None
)

_CLAIM = keep(_build_claim())
_CLAIM_OF_ONE = keep(_build_claim_of_one())


class QueueContestedError(Exception):
    """Others hold the rows of everything a worker may take; `request_id` is the best of it.

    Raised through the transaction: a lock it kept on a row that it passed over would let two
    workers wait for each other.
    """

    def __init__(self, request_id: UUID) -> None:
        super().__init__("every request is being claimed")
        self.request_id = request_id


def claim_next_request(
    session: Session, queue: ServableQueue, *, wanted: int, now: datetime
) -> ClaimedRequest | None:
    """Take up to `wanted` generations of the best request this worker may serve; None when nothing
    is free.

    One conditional statement that waits for nobody: rows being claimed by others are skipped, so
    two pops never take the same generation. Raises QueueContestedError when others hold them all.
    Nothing is taken until the caller commits it with its job rows; until then the caller holds no
    other row.
    """
    if not queue.classes:
        return None
    values = {
        "pop_classes": [servable.number for servable in queue.classes],
        "pop_max_lengths": [servable.max_length for servable in queue.classes],
        "pop_max_context_lengths": [servable.max_context_length for servable in queue.classes],
        "pop_now": now,
        "pop_lease_capacity": queue.lease_capacity,
        "pop_only_user_id": queue.only_user_id,
        "pop_priority_user_ids": list(queue.priority_user_ids),
        "pop_wanted": wanted,
        "pop_new_expiry": now + REQUEST_TTL,
    }
    row = session.execute(_CLAIM, values).one_or_none()
    if row is None:
        return None
    if row.id is None:
        raise QueueContestedError(row.first_id)
    return _build_claimed_request(row, queue)


def claim_contested_request(
    session: Session, queue: ServableQueue, request_id: UUID, *, wanted: int, now: datetime
) -> ClaimedRequest | None:
    """Take up to `wanted` generations of a request whose row others held; None when they took all.

    Waits for them, a second at most: raises RowsLocked then. The caller's transaction must hold no
    row yet, so that whoever waits is waited for by nobody.
    """
    values = {
        "pop_request_id": request_id,
        "pop_wanted": wanted,
        "pop_new_expiry": now + REQUEST_TTL,
    }
    row = session.execute(_CLAIM_OF_ONE, values).one_or_none()
    return None if row is None else _build_claimed_request(row, queue)


def _build_claimed_request(row: Any, queue: ServableQueue) -> ClaimedRequest:
    return ClaimedRequest(
        request=_copy_claimed(row),
        models=queue.get_models(row.queue_class),
        taken=row.taken,
        remaining=row.remaining,
    )


def show_request_to_paused(
    session: Session, queue: ServableQueue, worker: TextWorker, *, wanted: int, now: datetime
) -> ClaimedRequest | None:
    """The best text request of another user for a paused worker's fake jobs; None when it has seen
    them all.

    Nothing is taken from the request, and the worker is never shown it again. Its owner's own
    requests are claimed.
    """
    request, tricked = TextWaitingPrompt, WPTrickedWorkers
    row = session.execute(
        select(request.n, *_list_claimed_columns(request))
        .where(
            is_live(request),
            request.wp_type == TEXT_FAMILY,
            ~request.is_chat,
            request.expiry > now,
            request.max_length <= worker.max_length,
            request.max_context_length <= worker.max_context_length,
            request.queue_class.in_([servable.number for servable in queue.classes]),
            request.user_id != queue.only_user_id,
            ~exists().where(tricked.wp_id == request.id, tricked.worker_id == worker.id),
        )
        .order_by(get_rank(request).desc(), request.created, request.id)
        .limit(1)
    ).one_or_none()
    if row is None:
        return None
    session.add(WPTrickedWorkers(wp_id=row.id, worker_id=worker.id))
    return ClaimedRequest(
        request=_copy_claimed(row),
        models=queue.get_models(row.queue_class),
        taken=min(wanted, row.n),
        remaining=row.n,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationClaim:
    """The request that holds an operation key."""

    id: UUID
    fingerprint: str
    kudos: int  # the quote its 202 carried


def find_chat_operation_claim(
    session: Session, user_id: int, operation_key: UUID
) -> OperationClaim | None:
    """The request of this user that claimed the key, as long as its row lives."""
    row = session.execute(
        select(
            TextWaitingPrompt.id, TextWaitingPrompt.operation_fingerprint, TextWaitingPrompt.kudos
        ).where(
            TextWaitingPrompt.user_id == user_id, TextWaitingPrompt.operation_key == operation_key
        )
    ).one_or_none()
    if row is None:
        return None
    return OperationClaim(id=row.id, fingerprint=row.operation_fingerprint, kudos=round(row.kudos))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatModelOffer:
    """What the online chat workers of one model offer together."""

    workers: int
    max_context_length: int
    max_length: int
    features: tuple[str, ...]
    created: int | None  # Unix seconds of the earliest of them


def online_since(now: datetime) -> datetime:
    """A worker that polled at or after this moment is online."""
    return now - timedelta(seconds=WORKER_ONLINE_SECONDS)


def is_chat_model_served(session: Session, model: str, now: datetime) -> bool:
    """Whether an online worker declared chat jobs with exactly this name."""
    statement = select(
        exists().where(
            TextWorker.accepts_chat_jobs,
            TextWorker.chat_model_id == model,
            TextWorker.last_check_in >= online_since(now),
        )
    )
    return bool(session.scalar(statement))


def get_chat_model_offers(session: Session, now: datetime) -> dict[str, ChatModelOffer]:
    """What each model served by an online chat worker out of maintenance offers, by its name."""
    rows = session.execute(
        select(
            TextWorker.chat_model_id,
            TextWorker.chat_max_context_length,
            TextWorker.chat_max_length,
            TextWorker.chat_features,
            TextWorker.created,
        ).where(
            TextWorker.accepts_chat_jobs,
            ~TextWorker.maintenance,
            ~TextWorker.paused,
            TextWorker.last_check_in >= online_since(now),
        )
    ).all()
    by_model: dict[str, list[Any]] = {}
    for row in rows:
        by_model.setdefault(row.chat_model_id, []).append(row)
    return {model: _build_offer(workers) for model, workers in by_model.items()}


def _build_offer(workers: Sequence[Any]) -> ChatModelOffer:
    created = min(
        (worker.created for worker in workers if worker.created is not None), default=None
    )
    return ChatModelOffer(
        workers=len(workers),
        max_context_length=max(worker.chat_max_context_length for worker in workers),
        max_length=max(worker.chat_max_length for worker in workers),
        features=tuple(
            sorted({feature for worker in workers for feature in worker.chat_features or ()})
        ),
        created=None if created is None else int(created.replace(tzinfo=UTC).timestamp()),
    )
