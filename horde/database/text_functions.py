# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a worker may take of the text queue, who holds an operation key, who serves a chat model."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, exists, or_, select
from sqlalchemy.orm import Session

from horde.classes.base.worker import online_since
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.classes.kobold.worker import (
    REPORTED_SKIP_REASONS,
    EligibilityInputs,
    RequestNeeds,
    SkipReason,
    TextWorker,
    get_text_worker_lease_capacity,
)
from horde.database.queue_classes import ClassLook


@dataclass(frozen=True, slots=True, kw_only=True)
class ServableClass:
    """A class of requests that a worker may take, with the bounds the claim compares row by row;
    lengths are tokens.
    """

    number: int
    is_chat: bool
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


def text_wp_speed_gate_clause(
    request: Any, lease_capacity: ColumnElement[float]
) -> ColumnElement[bool]:
    """Whether a worker of this lease capacity (tokens) finishes the request in time; text jobs are
    not gated.
    """
    return or_(~request.is_chat, request.max_length <= lease_capacity)


def get_sorted_text_wp_filtered_to_worker(
    session: Session,
    worker: TextWorker,
    inputs: EligibilityInputs,
    chat_inputs: EligibilityInputs,
    priority_user_ids: Collection[int],
    look: ClassLook | None = None,
) -> ServableQueue:
    """What of the waiting requests this worker may take, judged class by class.

    `look` is one that was begun before, with what it brought.

    The rules are those of `TextWorker.can_generate_with_eligibility_inputs`, asked of the smallest
    request of each class; `claim_next_request` compares the lengths of each row and takes them in
    queue order.
    """
    only_user_id = worker.user_id if worker.maintenance or worker.paused else None

    def judge(least: RequestNeeds) -> SkipReason | None:
        if only_user_id is not None:
            # Whose it is, the claim compares row by row.
            least = replace(least, user_id=only_user_id)
        refusal = worker.can_generate_with_eligibility_inputs(
            least, chat_inputs if least.is_chat else inputs
        )
        return None if refusal is None else refusal.reason

    look = look or ClassLook()
    index = look.get_index(session)
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
            _build_servable_class(indexed.number, indexed.needs, worker)
            for indexed, reason in verdicts
            if reason is None
        ),
        lease_capacity=get_text_worker_lease_capacity(worker.gate_speed),
        only_user_id=only_user_id,
        priority_user_ids=(worker.user_id, *priority_user_ids),
        count_skipped=count_skipped,
        is_empty=index.is_empty,
        is_work_left=bool(own),
        is_fresh=look.is_needed,
    )


def _build_servable_class(number: int, needs: RequestNeeds, worker: TextWorker) -> ServableClass:
    if needs.is_chat:
        max_length, max_context_length = (
            worker.chat_max_length or 0,
            worker.chat_max_context_length or 0,
        )
    else:
        max_length, max_context_length = worker.max_length, worker.max_context_length
    return ServableClass(
        number=number,
        is_chat=needs.is_chat,
        models=needs.models,
        max_length=max_length,
        max_context_length=max_context_length,
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
