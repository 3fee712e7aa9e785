# SPDX-License-Identifier: AGPL-3.0-or-later
"""Operation keys: a chat request that is sent again with its key is answered as the first
one was.
"""

import time

from sqlalchemy.orm import Session

from horde.actions.queue_requests import Queued
from horde.chat.fingerprint import build_operation_fingerprint
from horde.chat.request import ChatRequest
from horde.classes.kobold.waiting_prompt import OperationKeyClaim
from horde.database.text_functions import OperationClaim, find_chat_operation_claim
from horde.database.users import find_generate_caller
from horde.db import reading
from horde.exceptions import BadRequest, HordeError
from horde.return_codes import ReturnCode
from horde.shapes.requests import RequestQuote

# Refusals that a request can owe to its own twin, which took the kudos or the last place first.
RACED_REFUSALS = frozenset(
    {
        ReturnCode.KUDOS_UPFRONT,
        ReturnCode.SHARED_KEY_INSUFFICIENT_KUDOS,
        ReturnCode.NO_ELIGIBLE_WORKER,
        ReturnCode.TOO_MANY_PROMPTS,
    }
)
TWIN_WAIT_SECONDS = (0.0, 0.05, 0.15)  # between a twin's hold and its activation lie milliseconds


def build_claim(chat: ChatRequest) -> OperationKeyClaim | None:
    """The key this submission claims; a dry run claims none."""
    if chat.operation_key is None or chat.horde.dry_run:
        return None
    return OperationKeyClaim(key=chat.operation_key, fingerprint=build_operation_fingerprint(chat))


def find_claim(
    session: Session, api_key: str, claim: OperationKeyClaim | None
) -> OperationClaim | None:
    """The earlier request of the same account and key; an unknown account has none and is refused
    later.
    """
    caller = find_generate_caller(session, api_key) if claim is not None else None
    if claim is None or caller is None:
        return None
    return find_chat_operation_claim(session, caller.id, claim.key)


def answer_repeat(claimed: OperationClaim, claim: OperationKeyClaim) -> Queued:
    """The first request's id and price; raises BadRequest when what was sent differs."""
    if claimed.fingerprint != claim.fingerprint:
        message = "This operation key was used for another request."
        raise BadRequest(message, ReturnCode.OPERATION_KEY_CONFLICT)
    return Queued(body=RequestQuote(id=str(claimed.id), kudos=claimed.kudos))


def find_twin(
    refused: HordeError, api_key: str, claim: OperationKeyClaim | None
) -> OperationClaim | None:
    """The request that was sent with the same key at the same moment and won what this one was
    refused for.
    """
    if claim is None or refused.rc not in RACED_REFUSALS:
        return None
    for seconds in TWIN_WAIT_SECONDS:
        time.sleep(seconds)
        with reading() as session:
            twin = find_claim(session, api_key, claim)
        if twin is not None:
            return twin
    return None


def find_winner(caller_id: int, claim: OperationKeyClaim | None) -> Queued | None:
    """What the loser of a race for its key is answered; None when there was no such race."""
    if claim is None:
        return None
    with reading() as session:
        winner = find_chat_operation_claim(session, caller_id, claim.key)
    return None if winner is None else answer_repeat(winner, claim)
