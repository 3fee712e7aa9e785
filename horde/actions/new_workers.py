# SPDX-License-Identifier: AGPL-3.0-or-later
"""Who may run a worker, under which name, and how many of them."""

from datetime import datetime
from uuid import uuid4

from sqlalchemy.orm import Session

from horde.classes.base.worker import DEFAULT_MAINTENANCE_MESSAGE, SPEED_BASELINE
from horde.classes.kobold.worker import TextWorker
from horde.database.check_ins import count_recent_workers, lock_worker_places
from horde.database.stats import get_horde_modes
from horde.database.users import Caller
from horde.exceptions import BadRequest, Forbidden
from horde.return_codes import ReturnCode
from horde.shapes.jobs import TextPopBody
from horde.shown_text import is_profane

RESERVED_NAME_WORDS = ("colab", "tpu", "google")
UNTRUSTED_WORKER_COUNT = 3  # a fourth is still accepted
TRUSTED_WORKER_COUNT = 20


def check_owner(caller: Caller) -> None:
    """Refuse accounts that run no workers. Raises Forbidden."""
    if caller.is_deleted:
        raise Forbidden(
            "This account is scheduled for deletion and cannot run workers.",
            ReturnCode.DELETED_USER,
        )
    if caller.is_flagged:
        message = "This account was flagged by a moderator, so its workers get no jobs."
        raise Forbidden(message, ReturnCode.WORKER_FLAGGED_MAINTENANCE)
    if caller.is_anonymous:
        raise Forbidden(
            "Workers need an account of their own.",
            ReturnCode.ANON_FORBIDDEN_WORKER,
        )


def check_worker_owner(worker: TextWorker, caller: Caller) -> None:
    """Refuse a name that belongs to somebody else. Raises Forbidden."""
    if worker.user_id != caller.id:
        message = (
            f"The worker name '{worker.name}' belongs to another user. Choose a name of your own."
        )
        raise Forbidden(message, ReturnCode.WRONG_CREDENTIALS)


def check_new_worker(
    session: Session, body: TextPopBody, caller: Caller, address: str, now: datetime
) -> None:
    """Refuse a new worker by its name or by how many its owner and its address have.

    Raises BadRequest or Forbidden.
    """
    name = body.clean_name
    if not name:
        raise BadRequest("A worker needs a name.")
    if is_profane(name):
        raise BadRequest("The worker's name contains profanity.", ReturnCode.PROFANE_WORKER_NAME)
    if is_profane(body.clean_agent):
        raise BadRequest("The bridge agent contains profanity.", ReturnCode.PROFANE_BRIDGE_AGENT)
    if any(word in name.lower() for word in RESERVED_NAME_WORDS):
        raise BadRequest(f"A worker's name cannot contain {', '.join(RESERVED_NAME_WORDS)}.")
    _check_worker_counts(session, name, caller, address, now)


def claim_worker_place(
    session: Session, worker: TextWorker, caller: Caller, address: str, now: datetime
) -> None:
    """Look again whether there is room for a new worker, with nobody else bringing one meanwhile:
    many names that pop at once would all have found room. Raises Forbidden.
    """
    lock_worker_places(session, caller.id, address)
    _check_worker_counts(session, worker.name, caller, address, now)


def _check_worker_counts(
    session: Session, name: str, caller: Caller, address: str, now: datetime
) -> None:
    own, same_address = count_recent_workers(session, caller.id, address, now, besides=name)
    modes = get_horde_modes(session)
    invited = caller.worker_invited
    if modes.invite_only and own >= invited:
        message = "The horde takes new workers by invitation only at the moment."
        raise Forbidden(message, ReturnCode.WORKER_INVITE_ONLY)
    if not caller.is_trusted and own > max(UNTRUSTED_WORKER_COUNT, invited):
        message = f"Only trusted users may run more than {UNTRUSTED_WORKER_COUNT + 1} workers."
        raise Forbidden(message, ReturnCode.TOO_MANY_WORKERS)
    if own > TRUSTED_WORKER_COUNT and own > invited:
        message = f"You already run {own} workers."
        raise Forbidden(message, ReturnCode.TOO_MANY_WORKERS_TRUSTED)
    allowed = TRUSTED_WORKER_COUNT if caller.is_trusted else UNTRUSTED_WORKER_COUNT
    if same_address > allowed and same_address > invited:
        message = "There are too many workers on your address."
        raise Forbidden(message, ReturnCode.TOO_MANY_SAME_IPS)


def build_worker(body: TextPopBody, caller: Caller, now: datetime) -> TextWorker:
    """A new worker as its first pop describes it, not stored yet."""
    return TextWorker(
        id=uuid4(),
        user_id=caller.id,
        name=body.clean_name,
        created=now,
        last_check_in=now,
        last_aborted_job=now,
        uptime=0,
        last_reward_uptime=0,
        paused=False,
        maintenance=False,
        maintenance_msg=DEFAULT_MAINTENANCE_MESSAGE,
        speed=SPEED_BASELINE,
        threads=body.threads,
        bridge_agent=body.clean_agent,
        accepts_chat_jobs=False,
        accepts_prompt_jobs=True,
    )
