# SPDX-License-Identifier: AGPL-3.0-or-later
"""Where a text or chat request stands, and a text request read back."""

from horde.clock import utcnow
from horde.config import Config
from horde.database.text_admission import UNKNOWN_KEY
from horde.database.text_retrieval import require_sent_text_request
from horde.database.text_status import build_text_status, require_request_progress
from horde.database.users import find_generate_caller
from horde.db import reading
from horde.exceptions import Forbidden, Unauthorized
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode


def show_request_status(request_id: str, config: Config, *, is_chat: bool) -> JsonObject:
    """The status of a request of one family; no key is needed, the id is the secret."""
    now = utcnow()
    with reading() as session:
        progress = require_request_progress(session, request_id, is_chat=is_chat, now=now)
        return build_text_status(
            session,
            progress,
            is_chat=is_chat,
            validated_backends=config.validated_backends,
            now=now,
        )


def read_sent_request(request_id: str, api_key: str) -> JsonObject:
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
