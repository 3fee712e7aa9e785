# SPDX-License-Identifier: AGPL-3.0-or-later
"""The claim: the best waiting request that a worker may serve is taken from the text queue."""

from dataclasses import dataclass
from datetime import datetime
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
    func,
    literal,
    or_,
    select,
    true,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session

from horde.classes.base.waiting_prompt import REQUEST_TTL, WPModels, WPTrickedWorkers
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt, select_as_sent
from horde.classes.kobold.worker import TextWorker
from horde.database.queue_classes import TEXT_FAMILY, get_rank, is_live
from horde.database.text_functions import ServableQueue, text_wp_speed_gate_clause
from horde.db import after_commit, build_detached, table_of
from horde.hot_session import keep
from horde.text_work import TextWork, publish_text_work

CONTESTED_WAIT_MILLISECONDS = 1000  # a claim or a reply holds a row for some milliseconds
CANDIDATES_PER_CLASS = 20  # enough that workers popping at once each find an unlocked row

requests = table_of(TextWaitingPrompt)


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
