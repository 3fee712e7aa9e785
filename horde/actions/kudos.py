# SPDX-License-Identifier: AGPL-3.0-or-later
"""Gifts of kudos from account to account, and awards.

Source: docs/reference/kudos.md.
"""

from datetime import datetime, timedelta
from decimal import Decimal
from uuid import UUID, uuid4, uuid5

from sqlalchemy.orm import Session

from horde import clock
from horde.actions.actors import OPERATOR, By, require_actor
from horde.actions.acts import record_act
from horde.actions.user_changes import describe_user
from horde.classes.base.kudos_gifts import build_award_movements, build_transfer_movements
from horde.database.kudos import append_movements, get_available_kudos, lock_payers
from horde.database.kudos_transfers import (
    Transfer,
    add_transfer,
    find_transfer,
    has_given_since,
    raise_shared_key_budget,
)
from horde.database.suspicions import list_suspicious_users
from horde.database.users import Caller, find_account_by_alias, find_shared_key_caller, parse_uuid
from horde.db import run_transaction
from horde.exceptions import BadRequest, Forbidden, PayloadInvalid
from horde.return_codes import ReturnCode
from horde.shapes.acts import ModeratorAction
from horde.shapes.kudos import (
    MAX_IDEMPOTENCY_KEY_LENGTH,
    KudosAwarded,
    KudosAwardInput,
    KudosTransferInput,
    KudosTransferred,
)

REVERSE_WINDOW = timedelta(seconds=60)  # a gift cannot be sent back while others still see it move
AWARDING_USER_ID = 1  # the horde's first account
TRANSFER_EVENTS = UUID("8a3d2b60-6f0e-4b39-9d0a-0e6a6f4c1c57")  # any namespace nobody else uses


def transfer_kudos(
    api_key: str, body: KudosTransferInput, idempotency_key: str | None = None
) -> KudosTransferred:
    """Give kudos to an account, or to a shared key and its owner.

    Sent again with the same `idempotency_key` it moves nothing and answers the same.
    Errors: Unauthorized, else BadRequest with the code of what stands against it.
    """
    if idempotency_key is not None and len(idempotency_key) > MAX_IDEMPOTENCY_KEY_LENGTH:
        limit = f"String should have at most {MAX_IDEMPOTENCY_KEY_LENGTH} characters"
        raise PayloadInvalid({"Idempotency-Key": limit})

    def work(session: Session) -> KudosTransferred:
        source = require_actor(session, api_key).account
        assert source is not None
        return _transfer(session, source, body, idempotency_key)

    return run_transaction(work)


def move_kudos(source: str, body: KudosTransferInput, reason: str | None) -> KudosTransferred:
    """Give kudos of one account to another as the operator; it is recorded.

    Errors: BadRequest with the code of what stands against it, as for the account itself.
    """

    def work(session: Session) -> KudosTransferred:
        giver = find_account_by_alias(session, source)
        if giver is None:
            raise BadRequest("The giver is no account.", ReturnCode.INVALID_TARGET_USERNAME)
        moved = _transfer(session, giver, body, None)
        record_act(
            session,
            OPERATOR,
            ModeratorAction.KUDOS_MOVED,
            describe_user(giver.id),
            reason,
            target=body.username,
            amount=body.amount,
        )
        return moved

    return run_transaction(work)


def _transfer(
    session: Session, source: Caller, body: KudosTransferInput, idempotency_key: str | None
) -> KudosTransferred:
    now = clock.utcnow()
    if source.is_anonymous:
        raise BadRequest(
            "The anonymous account cannot give kudos.", ReturnCode.KUDOS_TRANSFER_FROM_ANON
        )
    dest = _require_target(session, body.username, now)
    _check_accounts_differ(source, dest)
    # Both, in one order: what the two give each other at the same moment is judged in turn.
    lock_payers(session, [source.id, dest.id])
    _check_may_transfer(session, source, dest, now)
    _check_amount(body.amount)
    transfer = Transfer(
        source_id=source.id,
        dest_id=dest.id,
        kudos=body.amount,
        sharedkey_id=None if dest.sharedkey is None else dest.sharedkey.id,
    )
    event_id = _build_event_id(source.id, idempotency_key)
    earlier = None if idempotency_key is None else find_transfer(session, event_id)
    if earlier is None:
        _book(session, event_id, transfer, source=source, dest=dest, now=now)
    elif earlier != transfer:
        raise BadRequest(
            "This Idempotency-Key was used for another transfer.",
            ReturnCode.IDEMPOTENCY_KEY_CONFLICT,
        )
    return KudosTransferred(transferred=body.amount)


def _require_target(session: Session, username: str, now: datetime) -> Caller:
    """The account that gets the gift; with `sharedkey` when it was sent to one."""
    sharedkey_id = parse_uuid(username)
    dest = None if sharedkey_id is None else find_shared_key_caller(session, sharedkey_id)
    if dest is None:
        dest = find_account_by_alias(session, username)
    if dest is None:
        raise BadRequest(
            "There is no account or shared key of this name.", ReturnCode.INVALID_TARGET_USERNAME
        )
    if dest.sharedkey is not None and dest.sharedkey.is_expired(now):
        raise BadRequest("The shared key has expired.", ReturnCode.SHARED_KEY_EXPIRED)
    return dest


def _check_accounts_differ(source: Caller, dest: Caller) -> None:
    if dest.is_anonymous:
        raise BadRequest(
            "The anonymous account cannot receive kudos.", ReturnCode.KUDOS_TRANSFER_TO_ANON
        )
    if dest.id == source.id:
        raise BadRequest("Kudos cannot be given to yourself.", ReturnCode.KUDOS_TRANSFER_TO_SELF)


def _check_may_transfer(session: Session, source: Caller, dest: Caller, now: datetime) -> None:
    if has_given_since(session, source_id=dest.id, dest_id=source.id, since=now - REVERSE_WINDOW):
        raise BadRequest(
            "This account has just given you kudos. Wait a minute before giving some back.",
            ReturnCode.TOO_FAST_KUDOS_TRANSFERS,
        )
    untrusted = {account.id for account in (source, dest) if not account.is_trusted}
    suspicious = list_suspicious_users(session, untrusted)
    # What stands against an account under suspicion is not told: it would learn from it.
    if source.id in suspicious:
        raise BadRequest("The kudos cannot be sent.", ReturnCode.FAULT_WHEN_KUDOS_SENDING)
    if source.is_flagged:
        raise BadRequest(
            "Your account is flagged, so it cannot give kudos.",
            ReturnCode.SOURCE_ACCOUNT_FLAGGED,
        )
    if source.is_education:
        raise BadRequest(
            "Accounts of schools cannot give kudos.", ReturnCode.EDUCATION_CANNOT_SEND_KUDOS
        )
    if dest.id in suspicious:
        raise BadRequest("The kudos cannot be received.", ReturnCode.FAULT_WHEN_KUDOS_RECEIVING)
    if dest.is_flagged:
        raise BadRequest(
            "The target account is flagged, so it cannot receive kudos.",
            ReturnCode.TARGET_ACCOUNT_FLAGGED,
        )
    for account in (dest, source):
        if account.is_deleted:
            raise BadRequest(f"{account.alias} is scheduled for deletion.", ReturnCode.DELETED_USER)


def _check_amount(amount: int) -> None:
    if amount < 0:
        raise BadRequest("The amount is negative.", ReturnCode.NEGATIVE_KUDOS_TRANSFER)
    if amount == 0:
        raise BadRequest("The amount is 0.", ReturnCode.INVALID_KUDOS_TRANSFER_AMOUNT)


def _build_event_id(source_id: int, idempotency_key: str | None) -> UUID:
    """The event of the postings: for one key of one sender always the same."""
    if idempotency_key is None:
        return uuid4()
    return uuid5(TRANSFER_EVENTS, f"{source_id}:{idempotency_key}")


def _book(
    session: Session,
    event_id: UUID,
    transfer: Transfer,
    *,
    source: Caller,
    dest: Caller,
    now: datetime,
) -> None:
    """Move the kudos. The caller holds the payers' locks, so nothing else spends them meanwhile."""
    if get_available_kudos(session, source.id) < transfer.kudos:
        raise BadRequest(
            "You do not have as many kudos to give.", ReturnCode.KUDOS_TRANSFER_NOT_ENOUGH
        )
    movements = build_transfer_movements(
        source_id=source.id,
        dest_id=dest.id,
        amount=Decimal(transfer.kudos),
        is_donation=dest.is_education,
    )
    append_movements(session, event_id, movements, now)
    add_transfer(session, event_id, transfer, now)
    if transfer.sharedkey_id is not None:
        raise_shared_key_budget(session, transfer.sharedkey_id, transfer.kudos)


def award_kudos(by: By, body: KudosAwardInput) -> KudosAwarded:
    """Give an account kudos that come from nobody; the horde's first account alone may.

    Errors: Unauthorized, Forbidden, BadRequest.
    """

    def work(session: Session) -> KudosAwarded:
        actor = require_actor(session, by)
        if actor.account is not None and actor.account.is_deleted:
            raise Forbidden("This account is scheduled for deletion.", ReturnCode.DELETED_USER)
        if actor.account is not None and actor.account.id != AWARDING_USER_ID:
            raise Forbidden("Only the first account awards kudos.", ReturnCode.NOT_ALLOWED_AWARDS)
        dest = find_account_by_alias(session, body.username)
        if dest is None:
            raise BadRequest("There is no account of this name.", ReturnCode.INVALID_AWARD_USERNAME)
        if dest.is_anonymous:
            raise BadRequest(
                "The anonymous account cannot be awarded kudos.", ReturnCode.KUDOS_AWARD_TO_ANON
            )
        _check_amount(body.amount)
        movements = build_award_movements(dest_id=dest.id, amount=Decimal(body.amount))
        append_movements(session, uuid4(), movements, clock.utcnow())
        record_act(
            session,
            actor,
            ModeratorAction.KUDOS_AWARDED,
            describe_user(dest.id),
            body.reason,
            amount=body.amount,
        )
        return KudosAwarded(awarded=body.amount)

    return run_transaction(work)
