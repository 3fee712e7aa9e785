# SPDX-License-Identifier: AGPL-3.0-or-later
"""A text worker's pop: who it is, its check-in, the queue, the job.

Source: docs/reference/workers.md and docs/reference/chat_requests.md.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import cast
from uuid import UUID

from horde_sdk.worker.chat_declaration import ChatImageTransport
from sqlalchemy.orm import Session

from horde import metrics, r2, tally
from horde.actions.idle_pops import KnownIdle, begin_look, find_idle, keep_idle
from horde.actions.job_faults import UNREADABLE_INPUT, give_back_unreadable
from horde.actions.new_workers import (
    build_worker,
    check_new_worker,
    check_owner,
    check_worker_owner,
    claim_worker_place,
)
from horde.chat.declaration import ChatDeclaration, parse_chat_declaration_fields
from horde.chat.tools import write_schemas
from horde.chat.wire import JobPayload
from horde.classes.base.suspicion import Suspicion
from horde.classes.base.worker import CHECK_IN_SECONDS
from horde.classes.kobold.processing_generation import LeaseOwner, TextProcessingGeneration
from horde.classes.kobold.waiting_prompt import TEXT_PAYLOAD_DEFAULTS, TextWaitingPrompt
from horde.classes.kobold.worker import (
    EligibilityInputs,
    TextWorker,
    get_minimum_text_speed,
    worker_may_be_speed_gated,
)
from horde.config import Config
from horde.database.addresses import (
    check_address_timeout,
    check_network_block,
    check_worker_address,
    is_safe_worker_address,
)
from horde.database.check_ins import (
    PendingCheckIn,
    find_named_worker,
    take_check_in,
    write_check_in,
)
from horde.database.queue_claims import (
    ClaimedRequest,
    QueueContestedError,
    claim_next_request,
    show_request_to_paused,
)
from horde.database.queue_classes import ClassLook
from horde.database.stats import get_horde_modes
from horde.database.suspects import suspect_worker, suspect_worker_name
from horde.database.text_admission import UNKNOWN_KEY
from horde.database.text_functions import ServableQueue, get_sorted_text_wp_filtered_to_worker
from horde.database.text_jobs import AssignedJobs, assign_jobs
from horde.database.text_queue import get_queue_snapshot
from horde.database.users import Caller, build_lease_key_of, find_caller
from horde.database.worker_messages import ShownMessage
from horde.database.workers import take_workers_offline
from horde.db import RowsLocked, after_commit, reading, run_single_statement, run_transaction
from horde.exceptions import (
    BadRequest,
    Forbidden,
    HordeError,
    ServiceUnavailable,
    Unauthorized,
)
from horde.json_text import JsonObject
from horde.model_reference import get_text_model_multiplier
from horde.r2 import StoreUnavailable
from horde.return_codes import ReturnCode
from horde.shapes.jobs import TextPopBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Pop:
    """A pop as it came: what its worker says of itself, and where it came from.

    `raw_body` still holds the keys of the chat declaration, which are judged after the account.
    """

    body: TextPopBody
    raw_body: Mapping[str, object]
    api_key: str = field(repr=False)
    address: str
    config: Config
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class PoppedJobs:
    """The jobs of a pop with their payload; None when there was nothing for the worker."""

    jobs: AssignedJobs | None = None
    payload: JobPayload = field(
        default_factory=lambda: cast(JobPayload, dict(TEXT_PAYLOAD_DEFAULTS))
    )
    is_chat: bool = False
    request: TextWaitingPrompt | None = field(default=None, repr=False)
    # How the worker gets what lies in the store; None when nothing does.
    transport: ChatImageTransport | None = None
    skipped: dict[str, int] = field(default_factory=dict)
    messages: Sequence[ShownMessage] = ()  # for the worker's owner
    is_work_left: bool = False  # whether requests wait for its models, kept from it or not
    # Whether nobody held a row that the worker may take, so that only news can change the answer.
    is_settled: bool = True

    def dump(self) -> JsonObject:
        """The body of the answer; a chat job alone carries `chat`."""
        jobs = self.jobs
        ids = [] if jobs is None else [str(job_id) for job_id in jobs.ids]
        body: JsonObject = {
            "payload": write_schemas(self.payload) if self.is_chat else self.payload,
            "id": ids[0] if ids else None,
            "ids": ids,
            "messages": list(self.messages),
            "ttl": None if jobs is None else jobs.ttl_seconds,
            "extra_source_images": None,
            "skipped": self.skipped if jobs is None else {},
            "softprompt": None,
            "model": None if jobs is None else jobs.model,
        }
        return body | {"chat": True} if self.is_chat else body


@dataclass(frozen=True, slots=True, kw_only=True)
class PoppingWorker:
    """A worker whose pop was let in, and what it may look for."""

    worker: TextWorker
    models: Sequence[str]
    caller: Caller
    priority_user_ids: Sequence[int]
    messages: Sequence[ShownMessage]


def pop_text_jobs(pop: Pop) -> PoppedJobs:
    """Hand jobs to a worker, after its check-in; without a look where nothing can have changed
    since its last.

    Raises Unauthorized, BadRequest, Forbidden (also for a worker in maintenance that its owner has
    nothing for), and ServiceUnavailable when the store has what the job needs and is away.
    """
    look = begin_look(pop.api_key, pop.address, pop.raw_body, pop.body.known_models)
    known = find_idle(look, pop.now)
    if known is not None:
        return repeat_idle(pop, known)
    priority_user_ids = parse_priority_user_ids(pop.body.priority_usernames)
    with reading() as session:
        caller = require_owner(session, pop.api_key)
        is_raid = find_raid(session, pop.config)
    if pop.body.leaving:
        run_transaction(partial(take_leave, pop=pop, caller=caller))
        return PoppedJobs()
    popping, queue = check_in(pop, caller, priority_user_ids, is_raid=is_raid)

    popped = PoppedJobs()
    if queue.classes:
        popped = take_jobs(pop, popping, queue)
    if popped.jobs is None and popping.worker.maintenance:
        raise Forbidden(popping.worker.maintenance_msg, ReturnCode.WORKER_MAINTENANCE)
    popped = load_stored_input(popped, pop.now)
    report_assignment(popping.worker, popped, caller)
    popped = replace(popped, messages=popping.messages, is_work_left=queue.is_work_left)
    if popped.jobs is None and not queue.is_empty:
        with reading() as session:
            counts = get_queue_snapshot(session).class_counts
        popped = replace(popped, skipped=queue.count_skipped(counts))
    if look.marks is not None and popped.jobs is None and popped.is_settled and queue.is_fresh:
        known = KnownIdle(
            marks=look.marks,
            ends_at=compute_idle_end(popping),
            answer=popped,
            caller=caller,
            is_speed_limited=is_speed_limited(popping.worker),
        )
        keep_idle(look, known)
    return popped


def repeat_idle(pop: Pop, known: KnownIdle) -> PoppedJobs:
    """The answer of the worker's last look. A timeout of its address would have moved a mark; what
    else is held against the address is judged: blocked networks have no mark, and a switch that was
    just set is not known yet to a look that follows at once. Raises Forbidden.
    """
    check_network_block(pop.address)
    with reading() as session:
        is_raid = find_raid(session, pop.config)
    check_worker_address(
        pop.address, is_exempt=is_address_exempt(known.caller), raid=is_raid, config=pop.config
    )
    if known.is_speed_limited:
        _count_lease_capacity_limited()
    answer: PoppedJobs = known.answer
    return answer


def find_raid(session: Session, config: Config) -> bool:
    """Whether there is a raid, at most a second old. Only the checker of addresses needs to know:
    without one it is never asked.
    """
    return bool(config.ip_checker) and get_horde_modes(session).raid


def compute_idle_end(popping: PoppingWorker) -> datetime:
    """Until when an idle answer holds by the clock alone: the next check-in, or the end of a
    message. A worker in its first seconds checks in at each pop.
    """
    worker = popping.worker
    ends = [worker.last_check_in + timedelta(seconds=CHECK_IN_SECONDS)]
    if worker.is_young(worker.last_check_in):
        ends.append(worker.last_check_in)
    ends += [
        parsedate_to_datetime(message["expiry"]).astimezone(UTC).replace(tzinfo=None)
        for message in popping.messages
    ]
    return min(ends)


def require_owner(session: Session, api_key: str) -> Caller:
    """The account that a worker runs for. Raises Unauthorized or Forbidden."""
    caller = find_caller(session, api_key)
    if caller is None:
        raise Unauthorized(UNKNOWN_KEY, ReturnCode.INVALID_API_KEY)
    check_owner(caller)
    return caller


def parse_priority_user_ids(usernames: Sequence[str]) -> list[int]:
    """The user ids of `name#id` aliases; an id that cannot be one matches nobody. Raises BadRequest
    without a `#`.
    """
    ids = []
    for username in usernames:
        if "#" not in username:
            message = f"Priority username '{username[:64]}' needs the form name#id."
            raise BadRequest(message, ReturnCode.INVALID_PRIORITY_USERNAME)
        number = username.rpartition("#")[2]
        if number.isascii() and number.isdecimal() and len(number) <= 10 and int(number) < 2**31:
            ids.append(int(number))
    return ids


def take_leave(session: Session, pop: Pop, caller: Caller) -> None:
    """Take a worker offline that says it will pop no more. Raises Forbidden for another user's.

    Its jobs in flight may still be submitted, and its next pop brings it back. A name that no
    worker has leaves nothing behind.
    """
    known = find_named_worker(session, pop.body.clean_name, pop.now)
    if known is not None:
        check_worker_owner(known.worker, caller)
        take_workers_offline(session, TextWorker.id == known.worker.id, pop.now)


def check_in(
    pop: Pop, caller: Caller, priority_user_ids: Sequence[int], *, is_raid: bool
) -> tuple[PoppingWorker, ServableQueue]:
    """Let a worker in, store what it says of itself, and read what of the queue it may take.

    The statement that finds the worker looks at the queue. Raises BadRequest or Forbidden.
    """
    address_refusal = find_address_refusal(pop, caller, is_raid=is_raid)
    look = ClassLook()
    with reading() as session:
        known = find_named_worker(session, pop.body.clean_name, pop.now, look)
        if address_refusal is not None:
            raise address_refusal
        if known is None:
            check_new_worker(session, pop.body, caller, pop.address, pop.now)
        else:
            check_worker_owner(known.worker, caller)
        declaration: ChatDeclaration | None = parse_chat_declaration_fields(pop.raw_body)
        popping = PoppingWorker(
            worker=build_worker(pop.body, caller, pop.now) if known is None else known.worker,
            models=require_models(pop.body, caller),
            caller=caller,
            priority_user_ids=priority_user_ids,
            messages=() if known is None else known.messages,
        )
        pending = take_check_in(
            popping.worker,
            pop.body,
            declaration,
            is_new=known is None,
            address=pop.address,
            now=pop.now,
        )
        if not pending.is_needed:
            return popping, read_queue(session, pop, popping, look)

    def write(session: Session) -> None:
        if pending.is_new:
            claim_worker_place(session, popping.worker, caller, pop.address, pop.now)
        write_check_in(
            session,
            popping.worker,
            pending,
            popping.models,
            caller,
            pop.config.validated_backends,
            pop.now,
        )

    run_transaction(write)  # before anything is claimed: nobody waits for the worker's row
    suspect_check_in(pop, popping, pending, is_raid=is_raid)
    with reading() as session:
        return popping, read_queue(session, pop, popping, look)


def require_models(body: TextPopBody, caller: Caller) -> list[str]:
    """The models of a pop: at least one, of storable length, none reserved to another user. Raises
    BadRequest.
    """
    models = body.known_models
    if not models:
        raise BadRequest("A worker has to offer at least one model.")
    for model in models:
        if not 1 <= len(model) <= 255:
            raise BadRequest("A model name has 1 to 255 characters.")
        alias = model.rpartition("::")[2] if "::" in model else ""
        if "#" in alias and alias != caller.alias:
            raise BadRequest(f"The model '{model[:64]}' is reserved to its user.")
    return models


def find_address_refusal(pop: Pop, caller: Caller, *, is_raid: bool) -> HordeError | None:
    """The refusal of a worker's address in timeout, or called unsafe by the checker; None when it
    may work.

    May wait for the checker, so no transaction may be open; the pop raises it in its place among
    the checks.
    """
    try:
        check_address_timeout(pop.address, for_worker=True)
        check_worker_address(
            pop.address, is_exempt=is_address_exempt(caller), raid=is_raid, config=pop.config
        )
    except HordeError as refusal:
        return refusal
    return None


def is_address_exempt(caller: Caller) -> bool:
    """Whether the workers of an account may have any address."""
    return caller.is_trusted or caller.is_vpn or caller.is_patron


def suspect_check_in(
    pop: Pop, popping: PoppingWorker, pending: PendingCheckIn, *, is_raid: bool
) -> None:
    """Give points for a worker's name and, in a raid, for an address it would be refused for
    otherwise. Call it after the check-in is committed.
    """
    worker, caller = popping.worker, popping.caller
    if pending.is_new:
        suspect_worker_name(worker.id, caller.id, pop.body.name)
    if is_raid and pending.check_in is not None and not is_address_exempt(caller):
        with suppress(HordeError):  # the checker cannot tell now
            if not is_safe_worker_address(pop.address, pop.config):
                suspect_worker(worker.id, caller.id, Suspicion.UNSAFE_IP)


def read_queue(
    session: Session, pop: Pop, popping: PoppingWorker, look: ClassLook
) -> ServableQueue:
    """What of the queue this pop may take. Models are those of the pop, limits those of the stored
    worker.
    """
    worker, models = popping.worker, popping.models

    def build_inputs(minimum_speed: float) -> EligibilityInputs:
        return EligibilityInputs(
            models=frozenset(models),
            owner_trusted=popping.caller.is_trusted,
            validated_backends=pop.config.validated_backends,
            minimum_speed=minimum_speed,
            now=pop.now,
            is_store_away=r2.is_circuit_open(),
        )

    text_speed = get_minimum_text_speed(get_text_model_multiplier(models[0]))
    chat_speed = text_speed
    if worker.chat_model_id is not None:
        chat_speed = get_minimum_text_speed(get_text_model_multiplier(worker.chat_model_id))
        if is_speed_limited(worker):
            after_commit(session, _count_lease_capacity_limited)
    return get_sorted_text_wp_filtered_to_worker(
        session,
        worker,
        build_inputs(text_speed),
        build_inputs(chat_speed),
        popping.priority_user_ids,
        look,
    )


def is_speed_limited(worker: TextWorker) -> bool:
    """Whether its speed keeps chat jobs from a worker that it declared to take."""
    return worker.chat_model_id is not None and worker_may_be_speed_gated(
        worker.gate_speed, worker.chat_max_length or 0
    )


def _count_lease_capacity_limited() -> None:
    metrics.pop_lease_capacity_limited.add(1, {"horde.gentype": "text"})


def take_jobs(pop: Pop, popping: PoppingWorker, queue: ServableQueue) -> PoppedJobs:
    """Claim a request and write its jobs, in a transaction; without one, an idle pop.

    Where others are just taking or settling all there is, the best of it is waited for, in a
    transaction of its own: they mostly leave something, and an idle answer would keep the worker
    away for seconds.
    """

    def take(session: Session, contested_id: UUID | None = None) -> PoppedJobs:
        claimed = claim_next_request(
            session,
            queue,
            popping.worker,
            popping.models,
            wanted=pop.body.amount,
            now=pop.now,
            contested_id=contested_id,
        )
        return assign(session, claimed, pop, popping, queue)

    # Fakes are statements of their own.
    run = run_transaction if popping.worker.paused else run_single_statement
    try:
        return run(take)
    except QueueContestedError as contested:
        wait_and_take = partial(take, contested_id=contested.request_id)
    try:
        taken = run(wait_and_take)
    except RowsLocked:
        taken = PoppedJobs()
    return replace(taken, is_settled=False)


def assign(
    session: Session,
    claimed: ClaimedRequest | None,
    pop: Pop,
    popping: PoppingWorker,
    queue: ServableQueue,
) -> PoppedJobs:
    """The jobs of a claim; without a claim, an idle pop.

    A paused worker gets jobs of its owner, else fakes, so that whoever runs it does not learn that
    it is paused.
    """
    worker = popping.worker
    is_fake = claimed is None and worker.paused and not worker.maintenance
    if is_fake:
        claimed = show_request_to_paused(
            session, queue, worker, popping.models, wanted=pop.body.amount, now=pop.now
        )
    if claimed is None:
        return PoppedJobs()
    owner = LeaseOwner(build_lease_key_of(pop.api_key), popping.caller.is_trusted)
    jobs = assign_jobs(session, claimed, worker, pop.now, owner=owner, is_fake=is_fake)
    request = claimed.request
    if not is_fake:
        after_commit(session, partial(_record_queue_wait, request, pop.now))
    return PoppedJobs(
        jobs=jobs,
        payload=request.get_pop_payload(),
        is_chat=request.is_chat,
        request=request,
        transport=request.select_transport(worker),
    )


def _record_queue_wait(request: TextWaitingPrompt, now: datetime) -> None:
    registered = "anonymous" if request.user_id == 0 else "registered"
    waited_seconds = max(0.0, (now - request.created).total_seconds())
    tally.count_seconds(tally.WAIT, waited_seconds)
    metrics.text_queue_wait_seconds.record(
        waited_seconds,
        {
            "horde.requester": "shared_key" if request.sharedkey_id else registered,
            "horde.chat": request.is_chat,
            "horde.requested_bucket": metrics.get_text_length_bucket(request.max_length),
        },
    )


def load_stored_input(popped: PoppedJobs, now: datetime) -> PoppedJobs:
    """Sign or read what the job's request keeps in the store: after the commit, so that no row is
    locked meanwhile.

    A job whose images cannot be read is given back, as one is whose worker cannot fetch them.
    Raises ServiceUnavailable then.
    """
    if popped.jobs is None or popped.request is None or popped.transport is None:
        return popped
    try:
        payload = popped.request.get_pop_payload(
            transport=popped.transport, ttl_seconds=popped.jobs.ttl_seconds, store=r2
        )
    except StoreUnavailable as error:
        for job_id in popped.jobs.ids:
            give_back_unreadable(job_id, now)
        raise ServiceUnavailable(
            UNREADABLE_INPUT, ReturnCode.CHAT_IMAGE_STORAGE_UNAVAILABLE
        ) from error
    return replace(popped, payload=payload)


def report_assignment(worker: TextWorker, popped: PoppedJobs, caller: Caller) -> None:
    """Record the legacy text jobs assigned over their worker's capacity, which the speed gate
    would have withheld.
    """
    if popped.jobs is None or not popped.jobs.is_over_capacity:
        return
    for job_id in popped.jobs.ids:
        TextProcessingGeneration._record_over_capacity_assignment(
            job_id=job_id,
            wp_id=popped.jobs.wp_id,
            worker_id=worker.id,
            owner_trusted=caller.is_trusted,
            max_length=popped.payload["max_length"],
            speed=worker.gate_speed,
        )
