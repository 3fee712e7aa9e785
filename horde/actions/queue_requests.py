# SPDX-License-Identifier: AGPL-3.0-or-later
"""What queueing a text request and queueing a chat request share, in the order in which the steps
may refuse.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from uuid import UUID, uuid4

from sqlalchemy.orm import Session

from horde.actions.prompt_rejections import RejectedPrompt, report_prompt_rejection
from horde.classes.kobold.pricing import compute_activation_tax, round_quote
from horde.classes.kobold.waiting_prompt import (
    OperationKeyClaim,
    TextWaitingPrompt,
)
from horde.classes.kobold.worker import RequestNeeds
from horde.config import Config
from horde.database.addresses import check_address_timeout
from horde.database.functions import (
    WorkerAvailability,
    get_worker_availability_for_request,
    remember_availability,
)
from horde.database.moderation import PromptRejected
from horde.database.queue_classes import build_text_work
from horde.database.stats import get_horde_modes
from horde.database.styles import FoundStyle
from horde.database.text_admission import (
    PaidAdmission,
    Submitter,
    admit_output,
    list_model_figures,
    require_submitter,
)
from horde.database.text_requests import (
    NewTextRequest,
    RequestContent,
    activate_text_request,
    check_concurrency,
    compute_starting_priority,
    delete_inactive_request,
    insert_text_request,
)
from horde.db import run_single_statement, run_transaction
from horde.exceptions import BadRequest, Forbidden, ServiceUnavailable
from horde.logger import surviving
from horde.return_codes import ReturnCode
from horde.shapes.requests import RequestAccepted, RequestQuote
from horde.text_work import publish_text_work

MAX_CLIENT_AGENT_LENGTH = 1000
NO_WORKER_WARNING = (
    "Warning: No available workers can fulfill this request. It will expire in 20 minutes. "
    "Change its parameters, or wait for a worker that can serve it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """What a request comes with beside its body: who sends it, from where, and under which
    settings.

    Limits and countermeasures apply to `address`; `is_proxied` where a service asks on behalf of
    whoever has it. `widen_limits` gives the address more room for a day.
    """

    api_key: str = field(repr=False)
    address: str
    is_proxied: bool
    client_agent: str
    config: Config
    widen_limits: Callable[[], None] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The answer to a request that was taken; a dry run or a repeated one is not `is_new`."""

    body: RequestAccepted | RequestQuote
    is_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRequest:
    """An inactive request between its two transactions."""

    id: UUID
    quote: int
    count: int  # generations
    image_count: int
    admission: PaidAdmission
    availability: WorkerAvailability
    style: FoundStyle | None = None

    @property
    def is_taxed_for_style(self) -> bool:
        """Whether it runs under a style of somebody else than who pays."""
        payer_id = self.admission.submitter.caller.id
        return self.style is not None and self.style.author_id != payer_id


def require_open_horde(session: Session) -> bool:
    """Refuse while the horde is in maintenance; True in a raid. Raises BadRequest."""
    modes = get_horde_modes(session)
    if modes.maintenance:
        message = (
            "The horde is in maintenance mode and takes no new requests. Please try again later."
        )
        raise BadRequest(message, ReturnCode.MAINTENANCE_MODE)
    return modes.raid


def trust_direct_address(submitter: Submitter, context: RequestContext) -> None:
    """Whitelist for a day the address a trusted, education or service account asks from
    directly.
    """
    caller = submitter.caller
    if (caller.is_trusted or caller.is_education or caller.is_service) and not context.is_proxied:
        context.widen_limits()


def require_allowed_submitter(
    session: Session,
    context: RequestContext,
    *,
    allow_downgrade: bool,
    proxied_account: str | None = None,
    style_sharedkey_id: UUID | None = None,
    now: datetime,
) -> Submitter:
    """The account that asks; raises what `require_submitter` raises, and who may neither ask nor
    ask for others.
    """
    submitter = require_submitter(
        session,
        context.api_key,
        allow_downgrade=allow_downgrade,
        style_sharedkey_id=style_sharedkey_id,
        now=now,
    )
    if proxied_account is not None and not submitter.caller.is_service:
        message = "Only service accounts may name a proxied account."
        raise BadRequest(message, ReturnCode.ONLY_SERVICE_ACCOUNT_PROXY)
    if submitter.is_deleted:
        raise Forbidden(
            "This account is scheduled for deletion and cannot send requests.",
            ReturnCode.DELETED_USER,
        )
    trust_direct_address(submitter, context)
    return submitter


def check_limits(
    session: Session,
    submitter: Submitter,
    context: RequestContext,
    *,
    n: int,
    models: Sequence[str],
) -> None:
    """The account has room, the address is not in timeout. Raises TooManyRequests or Forbidden."""
    check_concurrency(session, submitter.caller, n, models)
    check_address_timeout(context.address, for_worker=False)


def compute_quote(needs: RequestNeeds, n: int, image_count: int = 0) -> int:
    """The whole kudos a dry run answers and a 202 tells."""
    quote = TextWaitingPrompt.calculate_kudos(
        max_length=needs.max_length,
        max_context_length=needs.max_context_length,
        models=list_model_figures(needs.models),
        n=n,
        image_count=image_count,
    )
    return round_quote(quote)


def admit(
    session: Session,
    submitter: Submitter,
    needs: RequestNeeds,
    *,
    n: int,
    image_count: int = 0,
    allow_downgrade: bool,
    is_dry_run: bool,
    config: Config,
    now: datetime,
) -> StoredRequest:
    """Measure who can serve the request and let its output in; a hold is part of the caller's
    transaction.
    """
    wp_id = uuid4()

    def measure(request: RequestNeeds) -> WorkerAvailability:
        return get_worker_availability_for_request(
            session, request, validated_backends=config.validated_backends, now=now
        )

    availability = measure(needs)
    admission = admit_output(
        session,
        submitter,
        needs,
        wp_id=wp_id,
        n=n,
        availability=availability,
        allow_downgrade=allow_downgrade,
        is_dry_run=is_dry_run,
        config=config,
        now=now,
    )
    if admission.needs != needs:  # lowered: other workers may serve it now
        availability = measure(admission.needs)
    quote = compute_quote(admission.needs, n, image_count)
    return StoredRequest(
        id=wp_id,
        quote=quote,
        count=n,
        image_count=image_count,
        admission=admission,
        availability=availability,
    )


def store(
    session: Session,
    stored: StoredRequest,
    content: RequestContent,
    context: RequestContext,
    now: datetime,
) -> None:
    """Write the inactive row beside its hold."""
    submitter = stored.admission.submitter
    new = NewTextRequest(
        content=content,
        needs=stored.admission.needs,
        quote=stored.quote,
        ipaddr=context.address[:39],
        client_agent=context.client_agent[:MAX_CLIENT_AGENT_LENGTH],
        sharedkey_id=submitter.sharedkey_id,
        sender=submitter.sender,
    )
    insert_text_request(session, stored.id, new, now)


@contextmanager
def taking_back(stored: StoredRequest, now: datetime) -> Iterator[list[str]]:
    """However the block ends without having activated the stored request: take back its row, its
    hold and its objects, and raise what ended it.

    The block notes in the list each key that it sends to the store. No key that was never sent is
    deleted: a long outage would fill the retry set with them. What cannot be taken back now, the
    cleaner takes.
    """
    sent: list[str] = []
    try:
        yield sent
    except BaseException:
        with surviving("taking back a request"):
            run_transaction(
                partial(delete_inactive_request, wp_id=stored.id, now=now, object_keys=sent)
            )
        raise


def activate(stored: StoredRequest, *, claim: OperationKeyClaim | None, now: datetime) -> None:
    """Show the stored request to the workers, in a transaction of its own that a deadlock repeats.

    Call it in a block of `taking_back`. Raises IntegrityError when another request of the user
    claimed the key first.
    """
    submitter = stored.admission.submitter

    def work(session: Session) -> bool:
        return activate_text_request(
            session,
            stored.id,
            caller=submitter.caller,
            sharedkey_id=submitter.sharedkey_id,
            tax=compute_activation_tax(stored.image_count, is_styled=stored.is_taxed_for_style),
            priority=compute_starting_priority(
                submitter.caller, is_downgraded=submitter.is_downgraded
            ),
            claim=claim,
            style=stored.style,
            now=now,
        )

    # The budget of a shared key and the uses of a style are statements of their own.
    is_alone = submitter.sharedkey_id is None and stored.style is None
    run = run_single_statement if is_alone else run_transaction
    if not run(work):  # the cleaner took the row for abandoned
        raise ServiceUnavailable("The request could not be queued. Try again.")
    publish_text_work(build_text_work(stored.admission.needs, stored.count))
    remember_availability(stored.id, stored.admission.needs, stored.availability)


def build_accepted(stored: StoredRequest, *, is_raid: bool) -> Queued:
    """The answer to a queued request: a `message` warns while nobody online can serve it, except in
    a raid.
    """
    body = RequestAccepted(id=str(stored.id), kudos=stored.quote)
    if not stored.availability.workers and not is_raid:
        body["message"] = NO_WORKER_WARNING
    return Queued(body=body, is_new=True)


@contextmanager
def reporting_rejected_prompts(
    context: RequestContext,
    models: Sequence[str],
    *,
    is_chat: bool,
    proxied_account: str | None = None,
) -> Iterator[None]:
    """Count a prompt that moderation refuses against who sent it, and keep it as evidence; the
    refusal goes on.
    """
    try:
        yield
    except PromptRejected as refused:
        report_prompt_rejection(
            context.api_key,
            RejectedPrompt(
                refused.reason,
                models=models,
                is_chat=is_chat,
                proxied_account=proxied_account,
                prompts=refused.prompts,
            ),
            address=context.address,
            is_proxied=context.is_proxied,
            config=context.config,
        )
        raise
