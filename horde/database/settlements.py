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
    Update,
    bindparam,
    func,
    insert,
    text,
    update,
)
from sqlalchemy.orm import Session

from horde.classes.base.kudos import (
    POSTING_ARGUMENTS,
    Movements,
    build_posting_parameters,
    upfront_hold_id,
)
from horde.classes.base.stats import TextGenState, TextGenStatistic
from horde.classes.base.waiting_prompt import REQUEST_TTL
from horde.classes.kobold.pricing import (
    build_generation_movements,
    compute_generation_charge,
    compute_text_kudos,
    count_text_tokens,
)
from horde.classes.kobold.processing_generation import (
    CHAT_REPLY_COLUMNS,
    TextProcessingGeneration,
    compute_speed_sample,
    seconds_since,
)
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.database.job_endings import settle_cancelled
from horde.database.kudos import append_movements
from horde.database.text_jobs import TextJob
from horde.database.users import charge_shared_key
from horde.db import table_of
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
    """Store a reply and everything it moves, once and as one statement; None for the loser of a
    race, who wrote nothing.
    """
    movements = _build_movements(job, kudos, is_censored=submitted.is_censored)
    charge = compute_generation_charge(kudos, censored=submitted.is_censored)
    seconds = seconds_since(job.start_time, now)
    values = {
        **_NO_REPLY,
        **submitted.columns,
        **build_posting_parameters(movements, now),
        "censored": submitted.is_censored,
        "job_id": job.id,
        "wp_id": job.wp_id,
        "charge": round(charge),
        "hold_id": upfront_hold_id(job.wp_id),
        "speed": compute_speed_sample(submitted.tokens, seconds),
        "generated_tokens": submitted.generated_tokens,
        "seconds": max(seconds, 0.0),  # another host's clock may be behind
        "things": submitted.tokens,
        "prompt_length": job.prompt_characters,
        "bridge_agent": job.bridge_agent,
        "new_expiry": now + REQUEST_TTL,
    }
    row = session.execute(_SETTLE, values).one_or_none()
    if row is None:
        return None
    if job.is_streamed:
        TextProcessingGeneration.end_progress_after_submit(session, job_id=job.id)
    if job.sharedkey_id is not None:
        charge_shared_key(session, job.sharedkey_id, charge)
    return Settlement(kudos=kudos, finished_count=row.finished_count, is_done=row.is_done)


# Either kind of reply has columns that the other lacks.
_NO_REPLY: dict[str, Any] = dict.fromkeys(("seed", *CHAT_REPLY_COLUMNS))

# The function's statements each see what was committed before them, so its lock comes before its
# counts: one statement with all of it would count as of its begin.
_SETTLE = keep(
    text(f"""
    SELECT finished_count, is_done FROM settle_reply(
        job => :job_id, request => :wp_id, reply => :generation, metadata => :gen_metadata,
        seed => :seed, censored => :censored, message => :message, finish_reason => :finish_reason,
        native_finish_reason => :native_finish_reason, prompt_tokens => :prompt_tokens,
        completion_tokens => :completion_tokens, reasoning_tokens => :reasoning_tokens,
        charge_basis => :charge_basis, charge => :charge, hold => :hold_id, speed => :speed,
        generated_tokens => :generated_tokens, seconds => :seconds, things => :things,
        prompt_length => :prompt_length, bridge_agent => :bridge_agent, new_expiry => :new_expiry,
        {POSTING_ARGUMENTS}
    )
    """).bindparams(
        *(bindparam(name, type_=jobs.c[name].type) for name in ("gen_metadata", "message"))
    )
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


def build_unserved_statistic(job: TextJob, state: TextGenState, now: datetime) -> JsonObject:
    """The columns of the statistic of a job that ended without a reply."""
    return {
        "finished": now,
        "created": job.start_time,
        "model": job.model,
        "max_length": job.max_length,
        "max_context_length": job.max_context_length,
        "softprompt": job.softprompt,
        "style_id": job.style_id,
        "prompt_length": job.prompt_characters,
        "client_agent": job.client_agent,
        "bridge_agent": job.bridge_agent,
        "state": state,
    }
