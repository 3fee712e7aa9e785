# SPDX-License-Identifier: AGPL-3.0-or-later
"""Keeping why a chat job brought no reply, which the status tells once the request is faulted."""

from collections.abc import Callable

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from horde.database.job_faults import record_job_refusal
from horde.database.request_endings import record_chat_refusal, record_chat_worker_fault
from horde.database.text_jobs import TextJob
from horde.db import run_transaction
from horde.exceptions import HordeError, ServiceUnavailable
from horde.logger import get_logger
from horde.return_codes import ReturnCode

logger = get_logger(__name__)

RECORDED_REFUSALS = frozenset(
    {
        ReturnCode.CHAT_SUBMIT_INVALID,
        ReturnCode.CHAT_SUBMIT_NONCONFORMANT,
        ReturnCode.CHAT_MODEL_MISMATCH,
    }
)


def record_refusal(job: TextJob, refused: HordeError) -> None:
    """Keep why a reply was refused, in a commit of its own before the refusal is sent. Best
    effort.
    """
    rc = refused.rc
    if rc is None or rc not in RECORDED_REFUSALS or not job.is_pending or job.is_fake:
        return

    def write(session: Session) -> None:
        record_chat_refusal(session, job.wp_id, refused.message, rc)
        record_job_refusal(session, job, rc.value)

    _write_quietly(write)


def record_worker_fault(job: TextJob, fault_reason: str | None) -> None:
    """Keep the sentence for a known reason before the fault is applied; a stored refusal is more
    specific.
    """
    if fault_reason is None or not job.is_pending or job.is_fake or job.chat_refusal_rc is not None:
        return
    _write_quietly(lambda session: record_chat_worker_fault(session, job.wp_id, fault_reason))


def _write_quietly(write: Callable[[Session], object]) -> None:
    """Run a write whose failure must not change the answer."""
    try:
        run_transaction(write)
    except (ServiceUnavailable, DBAPIError):
        logger.warning("horde.job_submit.record_failed")
