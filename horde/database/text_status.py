# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the status routes tell of a text or chat request."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Boolean, DateTime, Select, bindparam, func, select
from sqlalchemy.orm import Session

from horde.classes.base.waiting_prompt import TerminalOutcome
from horde.classes.base.worker import Worker
from horde.classes.kobold.processing_generation import (
    CHAT_REPLY_COLUMNS,
    TextProcessingGeneration,
)
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.database.functions import (
    WorkerAvailability,
    compute_longest_remaining_seconds,
    estimate_wait_of_stored_request,
    get_stored_request_availability,
)
from horde.database.queue_classes import TEXT_FAMILY
from horde.database.text_queue import get_queue_snapshot
from horde.db import table_of
from horde.exceptions import NotFound
from horde.hot_session import keep
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode

CSAM_METADATA = {"type": "censorship", "value": "csam"}


jobs, requests, workers = (
    table_of(TextProcessingGeneration),
    table_of(TextWaitingPrompt),
    table_of(Worker),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """Where a request stands, with its jobs, read in one statement, so that all is of one moment.
    Fakes are in no count.
    """

    id: UUID
    n: int
    jobs: int
    finished: int
    processing: int
    restarted: int
    faulted: bool
    is_cancelled: bool
    consumed_kudos: int
    max_length: int
    created: datetime
    context_adjustments: list[JsonObject] | None
    chat_fault_reason: str | None
    chat_fault_rc: str | None
    job_rows: tuple[Any, ...] = field(repr=False)  # the finished, then the running, oldest first

    @property
    def waiting(self) -> int:
        """Generations still to be handed out: never more than is missing, and none of a request
        that has ended.
        """
        if self.faulted or self.is_cancelled:
            return 0
        return max(0, min(self.n, self.jobs - self.processing - self.finished))

    @property
    def is_done(self) -> bool:
        """Faulted, or nothing waiting or in flight with every result there or the missing ones
        cancelled.
        """
        if self.faulted:
            return True
        return (
            self.n == 0
            and self.processing == 0
            and (self.finished >= self.jobs or self.is_cancelled)
        )


def parse_request_id(text: str) -> UUID:
    """A request id from a path; raises the same NotFound as an unknown one."""
    try:
        parsed = UUID(text)
    except ValueError:
        raise request_not_found(text) from None
    if str(parsed) != text.lower():
        raise request_not_found(text)
    return parsed


def request_not_found(text: str) -> NotFound:
    """404 of a request that is malformed, unknown, expired or of another family: none tells
    which.
    """
    return NotFound(f"Request with ID '{text[:64]}' not found.", ReturnCode.REQUEST_NOT_FOUND)


def _build_find_progress(*chat_columns: str) -> Select[Any]:
    """A row for each job of the request with what the request has itself; one row without jobs."""
    is_cancelled = func.coalesce(requests.c.terminal_outcome, "") == TerminalOutcome.CANCELLED
    return (
        select(
            requests.c.id,
            requests.c.n,
            requests.c.jobs,
            requests.c.faulted,
            is_cancelled.label("is_cancelled"),
            requests.c.consumed_kudos,
            requests.c.max_length,
            requests.c.created,
            requests.c.context_adjustments,
            requests.c.chat_fault_reason,
            requests.c.chat_fault_rc,
            jobs.c.id.label("job_id"),
            jobs.c.generation,
            jobs.c.faulted.label("job_faulted"),
            jobs.c.cancelled.label("job_cancelled"),
            jobs.c.seed,
            jobs.c.gen_metadata,
            jobs.c.worker_id,
            workers.c.name.label("worker_name"),
            workers.c.speed,
            jobs.c.model,
            jobs.c.censored,
            jobs.c.start_time,
            *(jobs.c[name] for name in chat_columns),
        )
        .select_from(requests)
        .outerjoin(jobs, (jobs.c.wp_id == requests.c.id) & ~jobs.c.fake)
        .outerjoin(workers, workers.c.id == jobs.c.worker_id)
        .where(
            requests.c.id == bindparam("wp_id"),
            requests.c.wp_type == TEXT_FAMILY,
            requests.c.active,
            requests.c.is_chat == bindparam("is_chat", type_=Boolean),
            requests.c.expiry > bindparam("now", type_=DateTime),
        )
        .order_by(jobs.c.created, jobs.c.id)
    )


_FIND_TEXT_PROGRESS = keep(_build_find_progress())
_FIND_CHAT_PROGRESS = keep(_build_find_progress(*CHAT_REPLY_COLUMNS))


def require_request_progress(
    session: Session, request_id: str, *, is_chat: bool, now: datetime
) -> RequestProgress:
    """The progress of an active request of the family; raises NotFound."""
    facts = {"wp_id": parse_request_id(request_id), "is_chat": is_chat, "now": now}
    statement = _FIND_CHAT_PROGRESS if is_chat else _FIND_TEXT_PROGRESS
    rows = session.execute(statement, facts).all()
    if not rows:
        raise request_not_found(request_id)
    return _build_progress(rows)


def _build_progress(rows: Sequence[Any]) -> RequestProgress:
    request = rows[0]
    stored = [row for row in rows if row.job_id is not None]
    finished = [row for row in stored if row.generation is not None]
    unfinished = [row for row in stored if row.generation is None]
    processing = [row for row in unfinished if not row.job_faulted]
    return RequestProgress(
        id=request.id,
        n=request.n,
        jobs=request.jobs,
        finished=len(finished),
        processing=len(processing),
        restarted=sum(row.job_faulted and not row.job_cancelled for row in unfinished),
        faulted=request.faulted,
        is_cancelled=request.is_cancelled,
        consumed_kudos=request.consumed_kudos,
        max_length=request.max_length,
        created=request.created,
        context_adjustments=request.context_adjustments,
        chat_fault_reason=request.chat_fault_reason,
        chat_fault_rc=request.chat_fault_rc,
        job_rows=(*finished, *processing),
    )


def build_text_status(
    session: Session,
    progress: RequestProgress,
    *,
    is_chat: bool,
    validated_backends: Collection[str],
    now: datetime,
) -> JsonObject:
    """The body of a status route. A chat status adds its own keys; nulls are sent."""
    generations, running = _list_jobs(progress, is_chat=is_chat)
    availability = WorkerAvailability(workers=())
    if not progress.faulted:
        availability = get_stored_request_availability(
            session, progress.id, validated_backends=validated_backends, now=now
        )
    position = get_queue_snapshot(session).get_position(progress.id) if progress.waiting else 0
    status: JsonObject = {"generations": generations}
    if is_chat:
        status |= _build_chat_keys(progress, availability)
    return status | {
        "finished": progress.finished,
        "processing": progress.processing,
        "restarted": progress.restarted,
        "waiting": progress.waiting,
        "done": progress.is_done,
        "faulted": progress.faulted,
        "wait_time": _estimate_wait(session, progress, availability, running, now),
        "queue_position": position,
        "kudos": progress.consumed_kudos,
        "is_possible": (
            not progress.faulted and (progress.processing > 0 or availability.worker_count > 0)
        ),
        "eligible_workers": availability.worker_count,
        "eligible_worker_threads": availability.thread_count,
        "might_stall": False,  # no hand-out history is kept, and without it the answer is no
    }


def _build_chat_keys(progress: RequestProgress, availability: WorkerAvailability) -> JsonObject:
    is_impossible = not availability.workers and progress.processing == 0 and not progress.is_done
    longest = availability.largest_max_length
    speed_limit = {"speed_limit": {"largest_max_length": longest}}
    return (speed_limit if is_impossible and longest is not None else {}) | {
        "context_adjustments": progress.context_adjustments,
        "impossible_reason": availability.declaration_gap if is_impossible else None,
        "fault_reason": progress.chat_fault_reason if progress.faulted else None,
        "fault_rc": progress.chat_fault_rc if progress.faulted else None,
    }


def _estimate_wait(
    session: Session,
    progress: RequestProgress,
    availability: WorkerAvailability,
    running: list[tuple[float, datetime]],
    now: datetime,
) -> int:
    if progress.is_done:
        return 0
    return estimate_wait_of_stored_request(
        session,
        availability,
        wp_id=progress.id,
        own_tokens=progress.waiting * progress.max_length,
        own_jobs=progress.waiting,
        running_seconds=compute_longest_remaining_seconds(progress.max_length, running, now),
        now=now,
    )


def _list_jobs(
    progress: RequestProgress, *, is_chat: bool
) -> tuple[list[JsonObject], list[tuple[float, datetime]]]:
    """The finished generations as shown, and (worker speed, start) of each running job."""
    finished = [
        _build_generation(row, progress, is_chat=is_chat)
        for row in progress.job_rows
        if row.generation is not None
    ]
    running = [(row.speed, row.start_time) for row in progress.job_rows if row.generation is None]
    return finished, running


def _build_generation(row: Any, progress: RequestProgress, *, is_chat: bool) -> JsonObject:
    shown: JsonObject = {}
    if is_chat:
        waited = (row.start_time - progress.created).total_seconds()
        shown = {
            "message": row.message,
            "finish_reason": row.finish_reason,
            "native_finish_reason": row.native_finish_reason,
            "prompt_tokens": row.prompt_tokens,
            "completion_tokens": row.completion_tokens,
            "reasoning_tokens": row.reasoning_tokens,
            "charge_basis": row.charge_basis,
            "queue_wait_seconds": max(0.0, round(waited, 2)),
        }
    metadata = row.gen_metadata or []
    return shown | {
        "text": row.generation,
        "seed": row.seed,
        "gen_metadata": metadata,
        "worker_id": str(row.worker_id),
        "worker_name": row.worker_name,
        "model": row.model,
        "state": get_generation_state(row.censored, metadata),
    }


def get_generation_state(censored: bool, metadata: Sequence[Mapping[str, object]]) -> str:
    """The `state` of a finished generation as requesters see it."""
    if any(
        entry.get("type") == CSAM_METADATA["type"] and entry.get("value") == CSAM_METADATA["value"]
        for entry in metadata
    ):
        return "csam"
    return "censored" if censored else "ok"
