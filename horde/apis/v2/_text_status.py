# SPDX-License-Identifier: AGPL-3.0-or-later
"""The steps of a status and of a cancel, of text and chat alike, and of reading a text request back."""

from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from horde.apis.requests import get_config
from horde.apis.v2 import _chat_cancel as cancelling
from horde.chat_progress import cancel_progress_streams
from horde.chat_signal import ChatEvent, publish_chat_event
from horde.clock import utcnow
from horde.database.text_admission import UNKNOWN_KEY
from horde.database.text_requests import cancel_text_request
from horde.database.text_retrieval import require_sent_text_request
from horde.database.text_status import RequestProgress, build_text_status, require_request_progress
from horde.database.users import find_generate_caller
from horde.db import reading, run_transaction
from horde.exceptions import Forbidden, Unauthorized
from horde.return_codes import ReturnCode


def answer_status(request_id: str, *, is_chat: bool) -> dict[str, Any]:
    """The status of a request of one family; no key is needed, the id is the secret."""
    now = utcnow()
    with reading() as session:

        def read() -> dict[str, Any]:
            progress = require_request_progress(session, request_id, is_chat=is_chat, now=now)
            backends = get_config().validated_backends
            return build_text_status(
                session, progress, is_chat=is_chat, validated_backends=backends, now=now
            )

        status = read()
        # A reply that was stored between the two statements: its price and the end of the request
        # belong to it.
        return status if len(status["generations"]) == status["finished"] else read()


def answer_request(request_id: str, api_key: str) -> dict[str, Any]:
    """A text request as it was sent, to whoever sent it. Raises Unauthorized, Forbidden or
    NotFound.
    """
    with reading() as session:
        caller = find_generate_caller(session, api_key)
        if caller is None:
            raise Unauthorized(UNKNOWN_KEY, ReturnCode.INVALID_API_KEY)
        if caller.is_anonymous:
            message = "Anonymous is everybody, so its requests cannot be read back."
            raise Forbidden(message, ReturnCode.ANON_FORBIDDEN)
        return require_sent_text_request(session, request_id, caller, utcnow()).body


def answer_cancel(request_id: str, *, is_chat: bool) -> dict[str, Any]:
    """Cancel a request; the status as it was before. Repeated calls answer alike and change
    nothing.

    The jobs of a streamed request that are in flight are settled with the cancel, on what they had
    posted before it.
    """
    now = utcnow()
    posted = cancelling.read_posted_characters(request_id) if is_chat else {}

    def work(session: Session) -> tuple[dict[str, Any], RequestProgress, bool, list[UUID]]:
        progress = require_request_progress(session, request_id, is_chat=is_chat, now=now)
        status = build_text_status(
            session,
            progress,
            is_chat=is_chat,
            validated_backends=get_config().validated_backends,
            now=now,
        )
        is_cancelled = not progress.is_done and cancel_text_request(session, progress.id, now)
        streamed = (
            cancelling.settle_streamed_jobs(session, progress.id, posted, now)
            if is_chat and is_cancelled
            else []
        )
        return status, progress, is_cancelled, streamed

    status, progress, is_cancelled, streamed = run_transaction(work)
    if is_chat and is_cancelled:
        cancel_progress_streams(streamed)
        publish_chat_event(progress.id, ChatEvent.CANCELLED, progress.finished)
    return status
