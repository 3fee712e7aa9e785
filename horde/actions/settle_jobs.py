# SPDX-License-Identifier: AGPL-3.0-or-later
"""Storing a reply, paying for it once, and telling whoever waits for it."""

from dataclasses import replace
from datetime import datetime
from functools import partial

from sqlalchemy.orm import Session

from horde import metrics, tally
from horde.actions.evidence import keep_reported_prompt
from horde.actions.job_faults import build_lost_refusal
from horde.actions.job_rewards import compute_reward
from horde.chat_signal import ChatEvent, publish_chat_event
from horde.classes.base.suspicion import Suspicion
from horde.classes.kobold.processing_generation import (
    GateShadowOutcome,
    build_gate_shadow_attributes,
    seconds_since,
)
from horde.classes.kobold.speed_limits import is_unreasonably_fast
from horde.config import Config
from horde.database.settlements import Settlement, Submitted, settle_job, store_fake_reply
from horde.database.suspects import suspect_worker
from horde.database.text_jobs import TextJob, find_job
from horde.database.text_status import CSAM_METADATA, get_generation_state
from horde.db import after_commit, reading, run_single_statement, run_transaction
from horde.json_text import JsonObject
from horde.logger import get_logger
from horde.model_reference import get_text_model_multiplier, is_known_text_model
from horde.webhooks import queue_webhook

logger = get_logger(__name__)


class _JobLostError(Exception):
    """Rolls a settlement back whose job ended meanwhile."""


_JobLost = _JobLostError()


def settle_or_refuse(
    job: TextJob,
    submitted: Submitted,
    *,
    dropped_tool_calls: int = 0,
    config: Config,
    now: datetime,
) -> float:
    """As `settle`; the loser of a race reads how the job ended and raises that refusal."""
    try:
        return settle(job, submitted, dropped_tool_calls=dropped_tool_calls, config=config, now=now)
    except _JobLostError:
        pass
    with reading() as session:
        ended = find_job(session, job.id)
    raise build_lost_refusal(replace(job, is_faulted=True) if ended is None else ended)


def settle(
    job: TextJob, submitted: Submitted, *, dropped_tool_calls: int, config: Config, now: datetime
) -> float:
    """Store a reply and pay for it, once, and tell whoever waits; the reward in kudos.

    A fake job is answered alike and moves nothing. Raises BadRequest for the loser of a race.
    """
    kudos = compute_reward(job, submitted.tokens, config)
    if job.is_fake:
        is_stored = run_transaction(partial(store_fake_reply, job=job, submitted=submitted))
        if not is_stored:
            raise _JobLost
        return float(kudos)

    def work(session: Session) -> Settlement:
        settlement = settle_job(session, job, submitted, kudos, now)
        if settlement is None:
            raise _JobLost
        if is_too_fast(job, submitted, now):
            after_commit(
                session,
                partial(
                    suspect_worker,
                    job.worker_id,
                    job.worker_owner_id,
                    Suspicion.UNREASONABLY_FAST,
                ),
            )
        return settlement

    # The budget of a shared key is a statement of its own.
    run = run_single_statement if job.sharedkey_id is None else run_transaction
    settlement = run(work)
    _report_stored(job, submitted, settlement, dropped_tool_calls, now)
    if CSAM_METADATA in (submitted.columns["gen_metadata"] or ()):
        keep_reported_prompt(job.id, config)
    return float(kudos)


def is_too_fast(job: TextJob, submitted: Submitted, now: datetime) -> bool:
    """Whether the reply came faster than its model can write."""
    return is_unreasonably_fast(
        generated_tokens=submitted.generated_tokens,
        seconds=seconds_since(job.start_time, now),
        model=job.model,
        multiplier=get_text_model_multiplier(job.model),
        is_known=is_known_text_model(job.model),
        owner_trusted=job.worker_owner_trusted,
    )


def _report_stored(
    job: TextJob,
    submitted: Submitted,
    settlement: Settlement,
    dropped_tool_calls: int,
    now: datetime,
) -> None:
    """Log, count and tell of a stored reply, after its commit. Best effort."""
    extra = {"job": str(job.id), "worker": str(job.worker_id), "chat": job.is_chat}
    if dropped_tool_calls:
        extra["dropped_tool_calls"] = dropped_tool_calls
    logger.info("horde.job_submit.done", extra=extra)
    _count_stored(job, submitted, now)
    if job.is_chat:
        publish_chat_event(job.wp_id, ChatEvent.GENERATION, settlement.finished_count)
        if settlement.is_done:
            publish_chat_event(job.wp_id, ChatEvent.DONE, settlement.finished_count)
    elif job.webhook is not None:
        queue_webhook(job.webhook, build_webhook_body(job, submitted, settlement))


def build_webhook_body(job: TextJob, submitted: Submitted, settlement: Settlement) -> JsonObject:
    """What a webhook is told of a text generation: as on the status, with the ids and the worker's
    reward.
    """
    metadata = submitted.columns["gen_metadata"] or []
    return {
        "text": submitted.columns["generation"],
        "seed": submitted.columns["seed"],
        "worker_id": str(job.worker_id),
        "worker_name": job.worker_name,
        "model": job.model,
        "id": str(job.id),
        "state": get_generation_state(submitted.is_censored, metadata),
        "gen_metadata": metadata,
        "request": str(job.wp_id),
        "kudos": float(settlement.kudos),
    }


def _count_stored(job: TextJob, submitted: Submitted, now: datetime) -> None:
    tally.count(tally.DONE)
    tally.count(tally.TOKENS, submitted.generated_tokens)
    has_calls = bool((submitted.columns.get("message") or {}).get("tool_calls"))
    if submitted.columns["generation"] == "" and not has_calls:
        label = job.model if is_known_text_model(job.model) else "other"
        metrics.text_empty_generations.add(1, {"horde.model": label})
    if job.is_over_capacity:
        attributes = build_gate_shadow_attributes(
            owner_trusted=job.worker_owner_trusted, max_length=job.max_length
        )
        metrics.gate_shadow_service_seconds.record(seconds_since(job.start_time, now), attributes)
        outcome = GateShadowOutcome.COMPLETED.value
        metrics.gate_shadow_outcomes.add(1, attributes | {"horde.outcome": outcome})
