# SPDX-License-Identifier: AGPL-3.0-or-later
"""Who may queue a text or chat request, and how its output is paid for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from horde import metrics
from horde.chat.wire import ImpossibleReason
from horde.chat_contract import build_gap_advice
from horde.classes.base.kudos import upfront_hold_id
from horde.classes.base.user import ANONYMOUS_ID
from horde.classes.kobold.pricing import AllowanceLimits
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt, UpfrontNeeds, UpfrontOutcome
from horde.classes.kobold.worker import RequestNeeds
from horde.config import Config
from horde.database.functions import WorkerAvailability, estimate_wait_for_new_request
from horde.database.kudos import get_available_kudos, hold_kudos
from horde.database.users import Caller, SharedKey, find_account, find_generate_caller
from horde.exceptions import BadRequest, Forbidden, Unauthorized
from horde.json_text import JsonObject
from horde.model_reference import get_text_model_multiplier, is_known_text_model
from horde.return_codes import ReturnCode

UNKNOWN_KEY = "No user matching sent API Key. Have you remembered to register?"

_IS_BOUND_TO_STYLE = text("SELECT EXISTS (SELECT 1 FROM styles WHERE sharedkey_id = :sharedkey_id)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """The account a request runs and pays as; with a shared key it is the key's owner.

    `sender` is whose key came with it, where somebody else pays.
    """

    caller: Caller
    sender: Caller | None = None
    sharedkey: SharedKey | None = None
    is_sharedkey_of_style: bool = False  # its author decided about it, so it has no limit for a job
    is_downgraded: bool = False  # queued behind everybody, because a shared key did not cover it

    @property
    def sharedkey_id(self) -> UUID | None:
        """The shared key that is charged along."""
        return None if self.sharedkey is None else self.sharedkey.id

    @property
    def is_flagged(self) -> bool:
        """Whether who sends it or who pays is held back: nobody gets rid of a flag by a style."""
        return self.caller.is_flagged or (self.sender is not None and self.sender.is_flagged)

    @property
    def is_deleted(self) -> bool:
        """Whether who sends it or who pays is scheduled for deletion."""
        return self.caller.is_deleted or (self.sender is not None and self.sender.is_deleted)

    @property
    def kind(self) -> str:
        """The metric attribute of who asks."""
        if self.sharedkey is not None:
            return "shared_key"
        return "anonymous" if self.caller.is_anonymous else "registered"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaidAdmission:
    """How a request got in. `needs` differ from what was asked when it was lowered to the free
    allowance.
    """

    outcome: UpfrontOutcome
    allowance: int
    needs: RequestNeeds
    submitter: Submitter


def require_submitter(
    session: Session,
    api_key: str,
    *,
    allow_downgrade: bool,
    style_sharedkey_id: UUID | None = None,
    now: datetime,
) -> Submitter:
    """The account behind a key on a generate route, or behind the shared key of a style, which pays
    for whoever sends it.

    An empty shared key is refused, or with `allow_downgrade` asks as Anonymous, behind everybody.
    A style's key that is empty or expired leaves the request to whoever sent it. Raises Forbidden
    for a shared key that may not be used, Unauthorized for an unknown key.
    """
    caller = find_generate_caller(session, api_key)
    if caller is None:
        raise Unauthorized(UNKNOWN_KEY, ReturnCode.INVALID_API_KEY)
    if style_sharedkey_id is not None:
        payer = find_generate_caller(session, str(style_sharedkey_id))
        key = None if payer is None else payer.sharedkey
        if payer is not None and key is not None and not (key.is_empty or key.is_expired(now)):
            return Submitter(caller=payer, sender=caller, sharedkey=key, is_sharedkey_of_style=True)
    submitter = Submitter(caller=caller, sharedkey=caller.sharedkey)
    if caller.sharedkey is not None:
        submitter = _require_usable_sharedkey(
            session, submitter, caller.sharedkey, allow_downgrade=allow_downgrade, now=now
        )
    return submitter


def _require_usable_sharedkey(
    session: Session,
    submitter: Submitter,
    sharedkey: SharedKey,
    *,
    allow_downgrade: bool,
    now: datetime,
) -> Submitter:
    if sharedkey.is_empty:
        anonymous = find_account(session, ANONYMOUS_ID) if allow_downgrade else None
        if anonymous is None:
            raise Forbidden("This shared key has run out of kudos.", ReturnCode.SHARED_KEY_EMPTY)
        return Submitter(caller=anonymous, sender=submitter.caller, is_downgraded=True)
    if sharedkey.is_expired(now):
        raise Forbidden("This shared key has expired.", ReturnCode.SHARED_KEY_EXPIRED)
    if session.scalar(_IS_BOUND_TO_STYLE, {"sharedkey_id": sharedkey.id}):
        message = "This shared key is attached to a style and cannot be used directly."
        raise Forbidden(message, ReturnCode.SHARED_KEY_ASSIGNED_STYLES)
    return submitter


def build_allowance_limits(config: Config) -> AllowanceLimits:
    """The free output allowance as the operator set it."""
    return AllowanceLimits(
        ceiling_tokens=config.free_output_ceiling,
        floor_tokens=config.free_output_floor,
        full_wait_seconds=config.free_output_wait_full_seconds,
        floor_wait_seconds=config.free_output_wait_floor_seconds,
    )


def admit_output(
    session: Session,
    submitter: Submitter,
    needs: RequestNeeds,
    *,
    wp_id: UUID,
    n: int,
    availability: WorkerAvailability,
    allow_downgrade: bool,
    is_dry_run: bool,
    config: Config,
    now: datetime,
) -> PaidAdmission:
    """Let a request's output in: free within its allowance, else held, else lowered, else refused.

    A dry run is judged the same and takes no hold. Raises Forbidden with SharedKeyInsufficientKudos
    or KudosUpfront, or with NoEligibleWorker in their place while no online worker could serve the
    request anyway.
    """
    wait_seconds = estimate_wait_for_new_request(session, availability)
    upfront = TextWaitingPrompt.require_upfront_kudos(
        max_length=needs.max_length,
        n=n,
        multipliers=[get_text_model_multiplier(model) for model in needs.models],
        wait_seconds=wait_seconds,
        limits=build_allowance_limits(config),
        slow_workers=needs.slow_workers,
        lists_workers=bool(needs.worker_ids),
        holds_for_worker_lists=config.upfront_kudos_on_workerlist,
    )
    try:
        admission = _pay(
            session,
            submitter,
            needs,
            upfront,
            wp_id,
            availability,
            allow_downgrade,
            is_dry_run,
            now,
        )
    except Forbidden:
        if not is_dry_run:
            _record_decision("refused", submitter, needs, upfront)
            _record_wait(wait_seconds, submitter, needs)
        raise
    if submitter.sharedkey is not None and not submitter.is_sharedkey_of_style:
        _check_sharedkey_tokens(submitter.sharedkey, admission.needs.max_length)
    if not is_dry_run:
        _record_decision(admission.outcome.value, submitter, needs, upfront)
        _record_wait(wait_seconds, submitter, needs)
    return admission


def _pay(
    session: Session,
    submitter: Submitter,
    needs: RequestNeeds,
    upfront: UpfrontNeeds,
    wp_id: UUID,
    availability: WorkerAvailability,
    allow_downgrade: bool,
    is_dry_run: bool,
    now: datetime,
) -> PaidAdmission:
    if submitter.sharedkey is not None and not submitter.sharedkey.covers(upfront.estimate):
        if not allow_downgrade:
            message = (
                f"This shared key has {submitter.sharedkey.kudos} kudos and the request needs"
                f" {upfront.estimate}."
            )
            raise _build_kudos_refusal(
                message, ReturnCode.SHARED_KEY_INSUFFICIENT_KUDOS, needs, availability
            )
        submitter = replace(submitter, is_downgraded=True)
    admission = PaidAdmission(
        outcome=UpfrontOutcome.FREE, allowance=upfront.allowance, needs=needs, submitter=submitter
    )
    if not upfront.is_hold_required:
        return admission
    payer = submitter.caller.id
    if submitter.caller.is_anonymous:
        is_held = False  # what everybody shares is nobody's to hold: it rides at its floor
    elif is_dry_run:
        is_held = get_available_kudos(session, payer) >= upfront.estimate
    else:
        is_held = hold_kudos(
            session,
            user_id=payer,
            business_id=upfront_hold_id(wp_id),
            amount=upfront.estimate,
            now=now,
        )
    if is_held:
        return replace(admission, outcome=UpfrontOutcome.FUNDED)
    if allow_downgrade and upfront.can_downgrade:
        lowered = replace(
            needs, max_length=min(needs.max_length, upfront.allowance), slow_workers=True
        )
        return replace(admission, outcome=UpfrontOutcome.DOWNGRADED, needs=lowered)
    message = (
        f"This request needs {upfront.estimate} kudos available upfront. Requests of at most"
        f" {upfront.allowance} tokens that allow slow workers need none at the moment."
    )
    raise _build_kudos_refusal(message, ReturnCode.KUDOS_UPFRONT, needs, availability)


def _build_kudos_refusal(
    message: str, rc: ReturnCode, needs: RequestNeeds, availability: WorkerAvailability
) -> Forbidden:
    """The refusal for kudos; while no online worker could serve the request, kudos would not help,
    so that is said instead.
    """
    if availability.workers:
        return Forbidden(message, rc)
    gap = availability.declaration_gap if needs.is_chat else None
    extra: JsonObject = {} if gap is None else {"impossible_reason": gap}
    return Forbidden(describe_no_eligible_worker(gap), ReturnCode.NO_ELIGIBLE_WORKER, **extra)


def describe_no_eligible_worker(gap: ImpossibleReason | None) -> str:
    """The refusal's sentence, with the gap when the workers' declarations are the cause."""
    reasons = []
    if gap is not None and gap["missing_declarations"]:
        reasons.append(
            f"no online worker serving the model declares {', '.join(gap['missing_declarations'])}"
        )
    if gap is not None and gap["exceeded_limits"]:
        limits = ", ".join(gap["exceeded_limits"])
        reasons.append(
            f"the request exceeds the {limits} limit of every online worker serving the model"
        )
    advice = (
        "" if gap is None else build_gap_advice(gap["missing_declarations"], gap["exceeded_limits"])
    )
    return (
        "No online worker can serve this request"
        + (f": {'; '.join(reasons)}" if reasons else "")
        + f".{advice}"
    )


def _check_sharedkey_tokens(sharedkey: SharedKey, max_length: int) -> None:
    if -1 < sharedkey.max_text_tokens < max_length:
        raise BadRequest(
            f"This shared key allows {sharedkey.max_text_tokens} tokens per job and the request"
            f" asks for {max_length}."
        )


def _record_decision(
    outcome: str, submitter: Submitter, needs: RequestNeeds, upfront: UpfrontNeeds
) -> None:
    metrics.free_allowance_decisions.add(
        1,
        {
            "horde.requester": submitter.kind,
            "horde.outcome": outcome,
            "horde.requested_bucket": metrics.get_text_length_bucket(needs.max_length),
            "horde.allowance_bucket": metrics.get_text_length_bucket(upfront.allowance),
            "horde.chat": needs.is_chat,
        },
    )


def _record_wait(wait_seconds: float | None, submitter: Submitter, needs: RequestNeeds) -> None:
    if wait_seconds is not None:
        attributes: dict[str, str | bool] = {
            "horde.chat": needs.is_chat,
            "horde.requester": submitter.kind,
        }
        metrics.free_allowance_estimated_wait_seconds.record(wait_seconds, attributes)


def list_model_figures(models: Sequence[str]) -> list[tuple[float, bool]]:
    """(multiplier, is known) of each listed model, for the quote."""
    return [(get_text_model_multiplier(model), is_known_text_model(model)) for model in models]
