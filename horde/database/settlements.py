# SPDX-License-Identifier: AGPL-3.0-or-later
"""Settling a job: a stored reply, or what a cancelled one posted, and everything that it moves."""

from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import cache
from typing import Any

from sqlalchemy import (
    DateTime,
    Integer,
    TextClause,
    Update,
    bindparam,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.orm import Session

from horde.classes.base.kudos import APPENDING, Movements, build_posting_parameters, upfront_hold_id
from horde.classes.base.stats import TextGenState, TextGenStatistic
from horde.classes.base.waiting_prompt import REQUEST_TTL
from horde.classes.kobold.pricing import (
    build_generation_movements,
    compute_generation_charge,
    compute_text_kudos,
    count_text_tokens,
)
from horde.classes.kobold.processing_generation import (
    TextProcessingGeneration,
    compute_speed_sample,
    seconds_since,
)
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.database.job_endings import settle_cancelled
from horde.database.kudos import append_movements
from horde.database.text_jobs import TextJob
from horde.database.users import charge_shared_key
from horde.db import execute_later, table_of
from horde.hot_session import keep
from horde.json_text import JsonObject

jobs = table_of(TextProcessingGeneration)
requests = table_of(TextWaitingPrompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What a stored reply moved. `is_done` when it was the request's last."""

    kudos: Decimal
    finished_count: int
    is_done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A verified reply, ready to be stored: the job's columns, the tokens it is priced by, and
    those its worker is timed by.
    """

    columns: dict[str, Any] = field(repr=False)
    tokens: int
    generated_tokens: int
    is_censored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the model reference says of the model that served a job; multiplier in billions of
    parameters.
    """

    multiplier: float
    is_known: bool
    is_validated: bool  # the worker's program is one whose results are taken at full value
    is_targeted: bool = False  # the horde pays a fixed sum for requests that list workers


def compute_job_kudos(job: TextJob, tokens: int, model: ServedModel) -> Decimal:
    """What a reply of so many tokens to a job earns its worker."""
    return compute_text_kudos(
        reply_tokens=tokens,
        prompt_tokens=count_text_tokens(job.prompt_characters, job.max_length),
        multiplier=model.multiplier,
        is_known=model.is_known,
        owner_trusted=job.worker_owner_trusted,
        validated=model.is_validated,
        targeted=model.is_targeted,
    )


def settle_job(
    session: Session, job: TextJob, submitted: Submitted, kudos: Decimal, now: datetime
) -> Settlement | None:
    """Store a reply and everything it moves, once; None for the loser of a race, whose transaction
    must be rolled back.

    Locks the request first, so that whoever stores the last reply sees all others and ends the
    request.
    """
    charge = compute_generation_charge(kudos, censored=submitted.is_censored)
    movements = _build_movements(job, kudos, is_censored=submitted.is_censored)
    execute_later(session, _LOCK_REQUEST, {"wp_id": job.wp_id})
    columns = submitted.columns | {"censored": submitted.is_censored}
    values = {
        **{f"new_{name}": value for name, value in columns.items()},
        **_build_samples(job, submitted, now),
        **build_posting_parameters(job.id, movements, now),
        "job_id": job.id,
        "wp_id": job.wp_id,
        "charge": round(charge),
        "new_expiry": now + REQUEST_TTL,
        "hold_id": upfront_hold_id(job.wp_id),
    }
    row = session.execute(_build_settlement(frozenset(columns)), values).one_or_none()
    if row is None:
        return None
    if job.is_streamed:
        TextProcessingGeneration.end_progress_after_submit(session, job_id=job.id)
    if job.sharedkey_id is not None:
        charge_shared_key(session, job.sharedkey_id, charge)
    return Settlement(kudos=kudos, finished_count=row.finished_count, is_done=row.is_done)


_LOCK_REQUEST = keep(
    select(requests.c.id).where(requests.c.id == bindparam("wp_id")).with_for_update(key_share=True)
)


@cache
def _build_settlement(names: frozenset[str]) -> TextClause:
    """Everything that a stored reply moves as one statement, for the columns that a text or a chat
    reply has: the job, its request, its hold, four samples and the postings.

    No row, and nothing written, when the job is no longer pending. The request's row has to be
    locked before: the counts are as of the statement's begin.
    """
    stored = ", ".join(f"{name} = :new_{name}" for name in sorted(names))
    settlement = text(f"""
    WITH claimed AS (
        UPDATE processing_gens SET {stored}
        WHERE id = :job_id AND generation IS NULL AND NOT faulted
        RETURNING id
    ), others AS (
        SELECT count(*) FILTER (WHERE generation IS NOT NULL) AS finished,
            count(*) FILTER (WHERE generation IS NULL AND NOT faulted) AS pending
        FROM processing_gens WHERE wp_id = :wp_id AND id <> :job_id AND NOT fake
    ), counted AS (
        SELECT others.finished + 1 AS finished_count, others.pending = 0 AS is_idle,
            request.faulted,
            request.n = 0 AND (
                others.finished + 1 >= request.jobs OR request.terminal_outcome IS NOT NULL
            ) AS is_complete
        FROM claimed, others, waiting_prompts AS request WHERE request.id = :wp_id
    ), outcome AS (
        SELECT finished_count, is_idle AND is_complete AND NOT faulted AS is_done,
            is_idle AND (is_complete OR faulted) AS is_end
        FROM counted
    ), charged AS (
        UPDATE waiting_prompts AS request SET
            consumed_kudos = request.consumed_kudos + :charge,
            expiry = greatest(request.expiry, :new_expiry),
            terminal_outcome = CASE
                WHEN is_end THEN coalesce(request.terminal_outcome, 'completed')
                ELSE request.terminal_outcome END,
            terminal_recorded_at = CASE
                WHEN is_end AND request.terminal_outcome IS NULL THEN :now
                ELSE request.terminal_recorded_at END
        FROM outcome WHERE request.id = :wp_id
    ), released AS (
        UPDATE kudos_reservations SET active = false, released_at = :now
        FROM outcome WHERE is_end AND business_id = :hold_id AND active
    ), worker_sample AS (
        INSERT INTO worker_performances (worker_id, performance, generated_tokens, seconds, created)
        SELECT :worker_id, :speed, :generated_tokens, :seconds, :now FROM outcome
    ), model_sample AS (
        INSERT INTO model_performances (model, performance, created)
        SELECT :model, :speed, :now FROM outcome
    ), fulfilment AS (
        INSERT INTO horde_fulfillments (things, thing_type, deliver_time, created)
        SELECT :things, 'text', :deliver_time, :now FROM outcome
    ), statistic AS (
        INSERT INTO text_gen_stats (
            finished, created, model, max_length, max_context_length, softprompt, prompt_length,
            client_agent, bridge_agent, state, style_id
        )
        SELECT :now, :start_time, :model, :max_length, :max_context_length, :softprompt,
            :prompt_length,
            :client_agent, :bridge_agent, CAST(:state AS textgenstate), CAST(:style_id AS uuid)
        FROM outcome
    ), {APPENDING.format(source="outcome")}
    SELECT finished_count, is_done FROM outcome
    """)
    types = {name: jobs.c[name].type for name in names}
    return keep(
        settlement.bindparams(*(bindparam(f"new_{name}", type_=types[name]) for name in names))
    )


def _build_movements(job: TextJob, kudos: Decimal, *, is_censored: bool = False) -> Movements:
    """What a job earned its worker and costs its requester."""
    return build_generation_movements(
        kudos=kudos,
        max_length=job.max_length,
        worker_id=job.worker_id,
        owner_id=job.worker_owner_id,
        owner_trusted=job.worker_owner_trusted,
        requester_id=job.requester_id,
        requester_usage_multiplier=job.requester_usage_multiplier,
        reservation_id=upfront_hold_id(job.wp_id) if job.has_hold else None,
        censored=is_censored,
    )


def settle_cancelled_job(
    session: Session, job: TextJob, *, character_count: int, kudos: Decimal, now: datetime
) -> bool:
    """Pay for what a streamed job had posted when its request was cancelled, and end it; False when
    it had ended before.

    The caller cancelled the request in this transaction, so its row is locked and no submit is
    between the two steps. It is no sample of a speed, no drop of its worker, and is not restarted.
    """
    if not settle_cancelled(session, job_id=job.id, character_count=character_count):
        return False
    charge = compute_generation_charge(kudos)
    _charge_request(session, job, charge, now)
    session.execute(
        insert(TextGenStatistic).values(build_unserved_statistic(job, TextGenState.CANCELLED, now))
    )
    append_movements(session, job.id, _build_movements(job, kudos), now)
    if job.sharedkey_id is not None:
        charge_shared_key(session, job.sharedkey_id, charge)
    return True


_CHARGE_REQUEST = keep(
    update(requests)
    .where(requests.c.id == bindparam("wp_id"))
    .values(
        consumed_kudos=requests.c.consumed_kudos + bindparam("charge", type_=Integer),
        expiry=func.greatest(requests.c.expiry, bindparam("new_expiry", type_=DateTime)),
    )
)


def store_fake_reply(session: Session, job: TextJob, submitted: Submitted) -> bool:
    """End a fake job as a real one ends, so that its worker cannot tell them apart; nothing is paid
    or counted.
    """
    columns = submitted.columns | {"censored": submitted.is_censored}
    values = {f"new_{name}": value for name, value in columns.items()}
    statement = _build_reply_of_fake(frozenset(columns))
    is_stored = session.scalar(statement, {"job_id": job.id, **values}) is not None
    if is_stored and job.is_streamed:
        TextProcessingGeneration.end_progress_after_submit(session, job_id=job.id)
    return is_stored


def _charge_request(session: Session, job: TextJob, charge: Decimal, now: datetime) -> None:
    """Add the charge to what a request has cost so far; its life is extended as by a pop."""
    facts = {"wp_id": job.wp_id, "charge": round(charge), "new_expiry": now + REQUEST_TTL}
    session.execute(_CHARGE_REQUEST, facts)


@cache
def _build_reply_of_fake(names: frozenset[str]) -> Update:
    return keep(
        update(jobs)
        .where(jobs.c.id == bindparam("job_id"), jobs.c.generation.is_(None), ~jobs.c.faulted)
        .values({name: bindparam(f"new_{name}", type_=jobs.c[name].type) for name in names})
        .returning(jobs.c.id)
    )


def _build_samples(job: TextJob, submitted: Submitted, now: datetime) -> JsonObject:
    seconds = seconds_since(job.start_time, now)
    speed = compute_speed_sample(submitted.tokens, seconds)
    state = TextGenState.CENSORED if submitted.is_censored else TextGenState.OK
    return build_statistic(job, state, now) | {
        "worker_id": job.worker_id,
        "speed": speed,
        "seconds": max(seconds, 0.0),  # another host's clock may be behind
        "generated_tokens": submitted.generated_tokens,
        "things": submitted.tokens,
        "deliver_time": job.start_time,
        "now": now,
    }


def build_statistic(job: TextJob, state: TextGenState, now: datetime) -> JsonObject:
    """What the settling statement binds for the statistic of a job."""
    return {
        "finished": now,
        "start_time": job.start_time,
        "model": job.model,
        "max_length": job.max_length,
        "max_context_length": job.max_context_length,
        "softprompt": job.softprompt,
        "style_id": job.style_id,
        "prompt_length": job.prompt_characters,
        "client_agent": job.client_agent,
        "bridge_agent": job.bridge_agent,
        "state": state.name,
    }


def build_unserved_statistic(job: TextJob, state: TextGenState, now: datetime) -> JsonObject:
    """The columns of the statistic of a job that ended without a reply."""
    statistic = build_statistic(job, state, now)
    return statistic | {"state": state, "created": statistic.pop("start_time")}
