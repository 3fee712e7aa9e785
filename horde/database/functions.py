# SPDX-License-Identifier: AGPL-3.0-or-later
"""Who can serve a request, how long it waits, and what keeps it from being served."""

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any
from uuid import UUID

from horde_sdk.generation_parameters.text.chat_policy import ChatServiceGapKind
from sqlalchemy import Boolean, DateTime, Row, Select, bindparam, case, exists, func, select
from sqlalchemy.orm import Session

from horde.chat.wire import ImpossibleReason
from horde.classes.base.user import UserRole, UserRoleTypes
from horde.classes.base.worker import WorkerModel, is_online, online_since
from horde.classes.kobold.pricing import estimate_queue_wait_seconds
from horde.classes.kobold.worker import (
    ChatRefusal,
    EligibilityInputs,
    RequestNeeds,
    SkipReason,
    TextWorker,
    get_effective_text_worker_speed,
    get_minimum_text_speed,
)
from horde.database.queue_classes import ClassLook, find_request_needs
from horde.database.text_queue import (
    QueueGroup,
    QueueSnapshot,
    get_needs_of_groups,
    get_queue_snapshot,
)
from horde.database.worker_messages import (
    ShownMessage,
    build_active_messages,
    show_active_messages,
)
from horde.db import build_detached, table_of
from horde.hot_session import keep
from horde.model_reference import get_text_model_multiplier
from horde.pop_epochs import WORKERS, move_marks
from horde.redis_ctrl import get_counter, increment_counter
from horde.runtime import Part

TEXT_WORKER_TYPE = "text_worker"
WORKERS_EPOCH_KEY = "horde:text_workers:epoch"
WORKERS_COPY_SECONDS = 5.0  # how long a copy lives while no worker changed
VERDICT_SECONDS = 60.0
# By the queue query: it never asks such a worker.
_QUEUE_REFUSALS = frozenset({SkipReason.BRIDGE_VERSION, SkipReason.SLOW})
MAX_CACHED_VERDICTS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineTextWorker:
    """An online text worker with what eligibility needs beside its row."""

    worker: TextWorker
    models: frozenset[str]
    owner_trusted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAvailability:
    """Who may serve a request now."""

    workers: tuple[OnlineTextWorker, ...]
    declaration_gap: ImpossibleReason | None = None
    # Tokens of output that a worker would serve whose speed alone rules the request out; None when
    # somebody may serve it, or when nobody is kept from it by speed.
    largest_max_length: int | None = None

    @property
    def worker_count(self) -> int:
        """Eligible workers."""
        return len(self.workers)

    @property
    def thread_count(self) -> int:
        """Threads they advertise, each worker at least one."""
        return sum(max(online.worker.threads, 1) for online in self.workers)

    @property
    def tokens_per_second(self) -> float:
        """Their speed together, each counted once a thread; an unmeasured worker at its assumed
        speed.
        """
        return sum(
            get_effective_text_worker_speed(online.worker.speed) * max(online.worker.threads, 1)
            for online in self.workers
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWorkerBounds:
    """How many online workers serve a list of models, and the most any of them takes; None with
    none.
    """

    worker_count: int
    max_context_length: int | None
    max_length: int | None


class _WorkersCopy:
    """The online workers as this runtime last read them; valid while the shared epoch stands
    still.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.workers: tuple[OnlineTextWorker, ...] = ()
        self.epoch: int | None = None
        self.made = float("-inf")


_copy: Part[_WorkersCopy] = Part(_WorkersCopy)


def note_text_workers_changed() -> None:
    """Make every process look anew at who may serve what. Best effort.

    Whatever decides it calls this after its commit: a worker that comes, leaves or is deleted, its
    maintenance and pause, what it offers and declares, its speed, and the roles of its owner.
    """
    _copy.get().made = float("-inf")
    if get_counter(WORKERS_EPOCH_KEY) is None:
        _verdicts.get().forget()
    increment_counter(WORKERS_EPOCH_KEY)
    move_marks([WORKERS])


def _build_list_online_workers() -> Select[Any]:
    is_trusted = (
        (roles.c.user_id == workers.c.user_id)
        & (roles.c.user_role == UserRoleTypes.TRUSTED)
        & roles.c.value
    )
    models = (
        select(func.array_agg(offers.c.model))
        .where(offers.c.worker_id == workers.c.id)
        .scalar_subquery()
    )
    return select(
        *workers.c, models.label("models"), exists().where(is_trusted).label("owner_trusted")
    ).where(
        workers.c.worker_type == TEXT_WORKER_TYPE,
        workers.c.last_check_in >= bindparam("online_since", type_=DateTime),
    )


workers, offers, roles = table_of(TextWorker), table_of(WorkerModel), table_of(UserRole)
_LIST_ONLINE_WORKERS = keep(_build_list_online_workers())


def list_online_text_workers(session: Session, now: datetime) -> tuple[OnlineTextWorker, ...]:
    """Every text worker that polled within the online window, in one statement; the rows belong to
    no session.
    """
    rows = session.execute(_LIST_ONLINE_WORKERS, {"online_since": online_since(now)})
    return tuple(
        OnlineTextWorker(
            worker=build_stored_text_worker(row),
            models=frozenset(row.models or ()),
            owner_trusted=row.owner_trusted,
        )
        for row in rows
    )


_WORKER_COLUMNS = tuple(workers.c.keys())


def build_stored_text_worker(row: Row[Any]) -> TextWorker:
    """A worker that belongs to no session, from a row with all its columns."""
    return build_detached(TextWorker, {name: getattr(row, name) for name in _WORKER_COLUMNS})


_FIND_NAMED_WORKER = keep(
    select(
        *workers.c,
        build_active_messages(workers, bindparam("now", type_=DateTime)).label("messages"),
        case((bindparam("lists_classes", type_=Boolean), func.list_queue_classes())).label(
            "classes"
        ),
    ).where(workers.c.name == bindparam("name"), workers.c.worker_type == TEXT_WORKER_TYPE)
)


@dataclass(frozen=True, slots=True)
class NamedTextWorker:
    """A text worker, belonging to no session, and what it is to be told."""

    worker: TextWorker
    messages: list[ShownMessage] = field(default_factory=list)


def find_named_text_worker(
    session: Session, name: str, now: datetime, look: ClassLook | None = None
) -> NamedTextWorker | None:
    """The text worker of exactly this name, in one statement, which looks at the queue on its way
    where that is needed.
    """
    lists_classes = look is not None and look.is_needed
    facts = {"name": name, "now": now, "lists_classes": lists_classes}
    row = session.execute(_FIND_NAMED_WORKER, facts).one_or_none()
    if row is None:
        return None
    if look is not None:
        look.classes = row.classes
    return NamedTextWorker(build_stored_text_worker(row), show_active_messages(row.messages))


def get_online_text_workers(session: Session, now: datetime) -> tuple[OnlineTextWorker, ...]:
    """The online text workers: from memory while none changed, else in one statement.

    Workers that change raise a counter on Redis, so that a process never answers from before the
    change; without Redis every call reads. Speeds, which drift slowly, may be a few seconds old.
    """
    copy = _copy.get()
    epoch = get_counter(WORKERS_EPOCH_KEY)
    if (
        epoch is not None
        and epoch == copy.epoch
        and time.monotonic() - copy.made < WORKERS_COPY_SECONDS
    ):
        return copy.workers
    with copy.lock:
        copy.workers = list_online_text_workers(session, now)
        copy.epoch, copy.made = epoch, time.monotonic()
        return copy.workers


def get_highest_text_worker_limits(
    session: Session, models: Collection[str], *, is_chat: bool, now: datetime
) -> TextWorkerBounds:
    """Online workers serving any of `models`, and the largest lengths among them.

    Chat counts workers that declared chat jobs with a model, by their chat limits; text counts
    workers offering a model (any worker when none is named), by their text limits. Maintenance and
    pause do not matter here.
    """
    online = get_online_text_workers(session, now)
    if is_chat:
        limits = [
            (worker.worker.chat_max_context_length, worker.worker.chat_max_length)
            for worker in online
            if worker.worker.accepts_chat_jobs and worker.worker.chat_model_id in models
        ]
    else:
        limits = [
            (worker.worker.max_context_length, worker.worker.max_length)
            for worker in online
            if not models or not worker.models.isdisjoint(models)
        ]
    return TextWorkerBounds(
        worker_count=len(limits),
        max_context_length=_find_highest(context for context, _ in limits),
        max_length=_find_highest(length for _, length in limits),
    )


def _find_highest(lengths: Iterable[int | None]) -> int | None:
    return max((length for length in lengths if length is not None), default=None)


def build_eligibility_inputs(
    online: OnlineTextWorker, *, is_chat: bool, validated_backends: Collection[str], now: datetime
) -> EligibilityInputs:
    """What eligibility needs of a stored worker; its minimum speed follows the model it would serve
    with.
    """
    if is_chat:
        multiplier = (
            get_text_model_multiplier(online.worker.chat_model_id)
            if online.worker.chat_model_id
            else None
        )
    else:
        multiplier = min(
            (get_text_model_multiplier(model) for model in online.models), default=None
        )
    return EligibilityInputs(
        models=online.models,
        owner_trusted=online.owner_trusted,
        validated_backends=validated_backends,
        minimum_speed=get_minimum_text_speed(multiplier),
        now=now,
    )


def get_worker_availability_for_request(
    session: Session,
    request: RequestNeeds,
    *,
    validated_backends: Collection[str],
    now: datetime,
) -> WorkerAvailability:
    """The online workers that may serve a request, and the declaration gap when declarations are
    why none may.
    """
    eligible: list[OnlineTextWorker] = []
    refusals: list[ChatRefusal] = []
    for online in get_online_text_workers(session, now):
        if not _is_asked(online, request):
            continue
        inputs = build_eligibility_inputs(
            online, is_chat=request.is_chat, validated_backends=validated_backends, now=now
        )
        refusal = online.worker.can_generate_with_eligibility_inputs(request, inputs)
        if refusal is None:
            eligible.append(online)
        elif refusal.reason not in _QUEUE_REFUSALS:
            refusals.append(refusal)
    if eligible or not request.is_chat:
        return WorkerAvailability(workers=tuple(eligible))
    lengths = [refusal.largest_max_length for refusal in refusals]
    return WorkerAvailability(
        workers=(),
        declaration_gap=find_chat_declaration_gap(refusals),
        largest_max_length=max((length for length in lengths if length is not None), default=None),
    )


def _is_asked(online: OnlineTextWorker, request: RequestNeeds) -> bool:
    """Whether the queue query would put the request before this worker at all: its refusal then
    tells something.
    """
    worker = online.worker
    if (worker.maintenance or worker.paused) and worker.user_id != request.user_id:
        return False
    if request.worker_ids and (worker.id in request.worker_ids) == request.worker_blacklist:
        return False
    if request.is_chat:
        return worker.accepts_chat_jobs and worker.chat_model_id in request.models
    return not request.models or bool(online.models.intersection(request.models))


def find_chat_declaration_gap(refusals: Sequence[ChatRefusal]) -> ImpossibleReason | None:
    """What the workers' declarations lack for a request, when that and nothing else keeps every one
    of them from it.

    None with no worker left to refuse, or when one refuses for a reason that can change while the
    request waits.
    """
    if not refusals or any(
        not (refusal.missing_declarations or refusal.exceeded_limits) for refusal in refusals
    ):
        return None
    return {
        "kind": ChatServiceGapKind.DECLARATION_GAP.value,
        "missing_declarations": sorted(
            {name for refusal in refusals for name in refusal.missing_declarations}
        ),
        "exceeded_limits": sorted(
            {name for refusal in refusals for name in refusal.exceeded_limits}
        ),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Who could serve a request when it was last asked, and how long that answer stands."""

    needs: RequestNeeds
    availability: WorkerAvailability
    epoch: int | None
    made: float

    def stands(self, epoch: int | None, now: datetime) -> bool:
        """Whether nothing that decides it can have changed since.

        Every process answers alike then, so that a request is not possible at one reading and
        impossible at the next. Without the epoch a no is asked again each time, since clients give
        up on the first, and a yes soon.
        """
        age = time.monotonic() - self.made
        workers = self.availability.workers
        if workers and not any(is_online(online.worker.last_check_in, now) for online in workers):
            return False
        if epoch is None:
            return bool(workers) and age < WORKERS_COPY_SECONDS
        return epoch == self.epoch and age < VERDICT_SECONDS


class _Verdicts:
    """The latest verdict of each request; the needs in it spare their reading when it is asked
    again.
    """

    def __init__(self) -> None:
        self._by_request: dict[UUID, _Verdict] = {}
        self._lock = threading.Lock()

    def find(self, wp_id: UUID) -> _Verdict | None:
        return self._by_request.get(wp_id)

    def remember(self, wp_id: UUID, verdict: _Verdict) -> None:
        with self._lock:
            if len(self._by_request) >= MAX_CACHED_VERDICTS:
                self._by_request.clear()
            self._by_request[wp_id] = verdict

    def forget(self) -> None:
        with self._lock:
            self._by_request.clear()


_verdicts: Part[_Verdicts] = Part(_Verdicts)


def remember_availability(
    wp_id: UUID, needs: RequestNeeds, availability: WorkerAvailability
) -> None:
    """Keep what was measured at creation for the request's first status reads.

    Only who can serve it: a worker may have appeared since "nobody" was measured, and clients give
    up on the first no.
    """
    if availability.workers:
        _remember(wp_id, needs, availability, _copy.get().epoch)


def _remember(
    wp_id: UUID, needs: RequestNeeds, availability: WorkerAvailability, epoch: int | None
) -> None:
    verdict = _Verdict(needs=needs, availability=availability, epoch=epoch, made=time.monotonic())
    _verdicts.get().remember(wp_id, verdict)


def get_stored_request_availability(
    session: Session, wp_id: UUID, *, validated_backends: Collection[str], now: datetime
) -> WorkerAvailability:
    """The availability of a stored request, measured once a minute and whenever workers changed;
    none when the request is gone.
    """
    # Before the workers are read: a change meanwhile ends what is read now.
    epoch = get_counter(WORKERS_EPOCH_KEY)
    known = _verdicts.get().find(wp_id)
    if known is not None and known.stands(epoch, now):
        return known.availability
    needs = find_request_needs(session, wp_id) if known is None else known.needs
    if needs is None:
        return WorkerAvailability(workers=())
    availability = get_worker_availability_for_request(
        session, needs, validated_backends=validated_backends, now=now
    )
    _remember(wp_id, needs, availability, epoch)
    return availability


def forget_cached_availability() -> None:
    """Drop every copy this runtime keeps of workers and verdicts."""
    copy = _copy.get()
    copy.made = float("-inf")
    copy.epoch = None
    _verdicts.get().forget()


def estimate_wait_for_new_request(session: Session, availability: WorkerAvailability) -> int | None:
    """Seconds until the eligible workers have done all that competes for them now; None with no
    eligible worker.

    This sizes the free output allowance, so the request's own output is left out.
    """
    if not availability.workers:
        return None
    snapshot = get_queue_snapshot(session)
    tokens, jobs = _get_competing_work(session, snapshot, availability, before=None)
    return _estimate(availability, tokens, jobs)


def estimate_wait_of_stored_request(
    session: Session,
    availability: WorkerAvailability,
    *,
    wp_id: UUID,
    own_tokens: int,
    own_jobs: int,
    running_seconds: float,
    now: datetime,
) -> int:
    """Seconds until a stored request is done: what competes ahead of it, its own output, its
    running jobs.

    Without an eligible worker the figures are those of the whole horde.
    """
    if own_jobs == 0:
        return round(running_seconds)
    snapshot = get_queue_snapshot(session)
    if availability.workers:
        tokens, jobs = _get_competing_work(session, snapshot, availability, before=wp_id)
        return _estimate(availability, tokens + own_tokens, jobs + own_jobs, running_seconds)
    everybody = WorkerAvailability(workers=get_online_text_workers(session, now))
    tokens, jobs = snapshot.get_work(snapshot.groups, before=wp_id)
    return _estimate(everybody, tokens + own_tokens, jobs + own_jobs, running_seconds)


def _estimate(
    availability: WorkerAvailability, tokens: int, jobs: int, running_seconds: float = 0.0
) -> int:
    return estimate_queue_wait_seconds(
        competing_tokens=tokens,
        competing_jobs=jobs,
        tokens_per_second=availability.tokens_per_second,
        eligible_threads=availability.thread_count,
        running_seconds=running_seconds,
    )


def _get_competing_work(
    session: Session, snapshot: QueueSnapshot, availability: WorkerAvailability, before: UUID | None
) -> tuple[int, int]:
    """Queued work that any of the eligible workers could take, judged by models, kind of job and
    lengths.
    """
    capabilities = frozenset(_get_capability(online) for online in availability.workers)

    @cache
    def get_needs() -> dict[int, RequestNeeds]:
        return get_needs_of_groups(session, snapshot)

    def competes(group: QueueGroup) -> bool:
        request = get_needs().get(group.queue_class)
        return request is not None and any(
            _could_take(capability, request, group) for capability in capabilities
        )

    return snapshot.get_work(snapshot.choose_groups(capabilities, competes), before)


type _Capability = tuple[frozenset[str], bool, int, int, str | None, int, int]


def _get_capability(online: OnlineTextWorker) -> _Capability:
    worker = online.worker
    return (
        online.models,
        worker.accepts_prompt_jobs,
        worker.max_length,
        worker.max_context_length,
        worker.chat_model_id if worker.accepts_chat_jobs else None,
        worker.chat_max_length or 0,
        worker.chat_max_context_length or 0,
    )


def _could_take(capability: _Capability, request: RequestNeeds, group: QueueGroup) -> bool:
    (
        models,
        takes_text,
        max_length,
        max_context_length,
        chat_model,
        chat_max_length,
        chat_max_context_length,
    ) = capability
    if request.is_chat:
        return (
            chat_model in request.models
            and group.max_length <= chat_max_length
            and group.max_context_length <= chat_max_context_length
        )
    return (
        takes_text
        and group.max_length <= max_length
        and group.max_context_length <= max_context_length
        and (not request.models or bool(models.intersection(request.models)))
    )


def compute_longest_remaining_seconds(
    max_length: int, running: Iterable[tuple[float, datetime]], now: datetime
) -> float:
    """The most seconds any running job of a request still needs, from (worker speed, start) of
    each.
    """
    return max(
        (
            max(
                0.0,
                max_length / get_effective_text_worker_speed(speed) - (now - start).total_seconds(),
            )
            for speed, start in running
        ),
        default=0.0,
    )
