# SPDX-License-Identifier: AGPL-3.0-or-later
"""The claim: the best waiting request that a worker may serve is taken from the text queue."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import (
    ColumnElement,
    Integer,
    Text,
    Uuid,
    bindparam,
    column,
    exists,
    func,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session

from horde.chat.job import select_chat_transport
from horde.classes.base.waiting_prompt import REQUEST_TTL, WPModels, WPTrickedWorkers
from horde.classes.kobold.processing_generation import TextProcessingGeneration
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt, select_as_sent
from horde.classes.kobold.worker import TextWorker
from horde.database.queue_classes import TEXT_FAMILY, get_rank, is_live
from horde.database.text_functions import ServableClass, ServableQueue
from horde.db import WrittenJson, after_commit, build_detached, table_of
from horde.hot_session import keep
from horde.text_work import TextWork, publish_text_work

CONTESTED_WAIT_MILLISECONDS = 1000  # a claim or a reply holds a row for some milliseconds

requests = table_of(TextWaitingPrompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedRequest:
    """A request of which a generation was claimed for each of the jobs, all with the same model.

    `request` is a copy that belongs to no session, with the columns that a job needs.
    """

    request: TextWaitingPrompt
    model: str
    job_ids: tuple[UUID, ...]
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
    """The claim as one statement: the best row that nobody holds is taken, and its jobs written.

    One row when there are candidates, with the id of the best of them; its other columns are null
    when others hold all of them.
    """
    call = text("""
    SELECT * FROM claim_request(
        classes => :classes, max_lengths => :max_lengths,
        max_context_lengths => :max_context_lengths, models => :models,
        lease_capacity => :lease_capacity, only_user => :only_user_id,
        preferred_users => :priority_user_ids, contested => :contested_id, wait => :wait,
        wanted => :wanted, job_ids => :job_ids, worker => :worker_id,
        chat_max_context_length => :chat_max_context_length, chat_max_length => :chat_max_length,
        transports => :transports, ttl => :ttl, moment => :now, new_expiry => :new_expiry
    )
    """)
    return call.columns(
        column("first_id", Uuid),
        column("taken", Integer),
        column("remaining", Integer),
        column("model", Text),
        *(column(name, requests.c[name].type) for name in _CLAIMED_COLUMNS),
        *(column(name, WrittenJson) for name in _CLAIMED_DOCUMENTS),
    )


_CLAIM = keep(_build_claim())


class QueueContestedError(Exception):
    """Others hold the rows of everything a worker may take; `request_id` is the best of it.

    Raised through the transaction: a lock it kept on a row that it passed over would let two
    workers wait for each other.
    """

    def __init__(self, request_id: UUID) -> None:
        super().__init__("every request is being claimed")
        self.request_id = request_id


def claim_next_request(
    session: Session,
    queue: ServableQueue,
    worker: TextWorker,
    models: Sequence[str],
    *,
    wanted: int,
    now: datetime,
    contested_id: UUID | None = None,
) -> ClaimedRequest | None:
    """Take up to `wanted` generations of the best request this worker may serve, and write a job
    for each; None when nothing is free.

    One statement, which waits for nobody: rows being claimed by others are skipped, so two pops
    never take the same generation. Raises QueueContestedError when others hold them all. The model
    is chosen from those that this pop offers; on chat it is the one that the worker declared.

    With `contested_id` it takes that request alone and waits for whoever holds it, a second at
    most: raises RowsLocked then.
    """
    if not queue.classes:
        return None
    choose = _ModelChoice(worker, models)
    job_ids = tuple(uuid4() for _ in range(wanted))
    values = {
        "classes": [servable.number for servable in queue.classes],
        "max_lengths": [servable.max_length for servable in queue.classes],
        "max_context_lengths": [servable.max_context_length for servable in queue.classes],
        "models": [choose(servable) for servable in queue.classes],
        "lease_capacity": queue.lease_capacity,
        "only_user_id": queue.only_user_id,
        "priority_user_ids": list(queue.priority_user_ids),
        "contested_id": contested_id,
        "wait": str(CONTESTED_WAIT_MILLISECONDS),
        "wanted": wanted,
        "job_ids": list(job_ids),
        "worker_id": worker.id,
        "chat_max_context_length": worker.chat_max_context_length,
        "chat_max_length": worker.chat_max_length,
        "transports": _list_transports(worker),
        "ttl": TextProcessingGeneration.set_job_ttl(),
        "now": now,
        "new_expiry": now + REQUEST_TTL,
    }
    row = session.execute(_CLAIM, values).one_or_none()
    if row is None:
        return None
    if row.id is None:
        raise QueueContestedError(row.first_id)
    return ClaimedRequest(
        request=_copy_claimed(row),
        model=row.model,
        job_ids=job_ids[: row.taken],
        remaining=row.remaining,
    )


class _ModelChoice:
    """The model of a job of each class, chosen once for all classes that list the same ones."""

    def __init__(self, worker: TextWorker, models: Sequence[str]) -> None:
        self._worker, self._models = worker, models
        self._chosen: dict[tuple[str, ...], str] = {}

    def __call__(self, servable: ServableClass) -> str:
        if servable.is_chat:
            return self._worker.chat_model_id or ""
        if servable.models not in self._chosen:
            wanted = set(servable.models)
            named = [model for model in self._models if model in wanted] if wanted else self._models
            self._chosen[servable.models] = random.choice(named)
        return self._chosen[servable.models]


def _list_transports(worker: TextWorker) -> list[str | None]:
    """How the worker gets what a chat keeps in the store: of nothing, images, the whole, both."""
    transports = (
        select_chat_transport(
            worker.image_transports or (), has_images=has_images, is_offloaded=is_offloaded
        )
        for is_offloaded in (False, True)
        for has_images in (False, True)
    )
    return [None if transport is None else transport.value for transport in transports]


def show_request_to_paused(
    session: Session,
    queue: ServableQueue,
    worker: TextWorker,
    models: Sequence[str],
    *,
    wanted: int,
    now: datetime,
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
    servable = next(each for each in queue.classes if each.number == row.queue_class)
    return ClaimedRequest(
        request=_copy_claimed(row),
        model=_ModelChoice(worker, models)(servable),
        job_ids=tuple(uuid4() for _ in range(min(wanted, row.n))),
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
