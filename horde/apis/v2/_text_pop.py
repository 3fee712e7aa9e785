# SPDX-License-Identifier: AGPL-3.0-or-later
"""The steps of a text worker's pop: who it is, its check-in, the queue, the job."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Annotated, Any
from uuid import UUID, uuid4

from horde_sdk.worker.chat_declaration import ChatImageTransport
from pydantic import Field
from sqlalchemy import (
    ARRAY,
    Text,
    Update,
    bindparam,
    cast,
    delete,
    func,
    inspect,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from horde import metrics, r2
from horde.apis.requests import get_config, get_peer_address
from horde.chat.tools import write_schemas
from horde.classes.base.suspicion import Suspicion
from horde.classes.base.worker import (
    DEFAULT_MAINTENANCE_MESSAGE,
    MAX_BRIDGE_AGENT_LENGTH,
    SPEED_BASELINE,
    UNKNOWN_BRIDGE_AGENT,
    Worker,
    WorkerModel,
    is_backend_validated,
    is_online,
    parse_bridge_name,
)
from horde.classes.kobold.chat_request import ChatDeclaration
from horde.classes.kobold.pricing import build_uptime_movements, compute_uptime_reward
from horde.classes.kobold.processing_generation import LeaseOwner
from horde.classes.kobold.text_request import LenientBody, Values, WholeNumber
from horde.classes.kobold.waiting_prompt import TEXT_PAYLOAD_DEFAULTS, TextWaitingPrompt
from horde.classes.kobold.worker import (
    CheckIn,
    EligibilityInputs,
    TextWorker,
    get_minimum_text_speed,
    worker_may_be_speed_gated,
)
from horde.database.addresses import (
    check_address_timeout,
    check_worker_address,
    is_safe_worker_address,
)
from horde.database.functions import (
    NamedTextWorker,
    find_named_text_worker,
    note_text_workers_changed,
)
from horde.database.kudos import append_movements
from horde.database.stats import HordeModes, get_horde_modes
from horde.database.suspects import suspect_worker, suspect_worker_name
from horde.database.teams import add_team_uptime
from horde.database.text_functions import (
    ClaimedRequest,
    QueueContestedError,
    ServableQueue,
    claim_contested_request,
    claim_next_request,
    get_sorted_text_wp_filtered_to_worker,
    show_request_to_paused,
)
from horde.database.text_jobs import AssignedJobs, assign_jobs
from horde.database.users import Caller
from horde.database.workers import clean_shown_text, is_profane, take_workers_offline
from horde.db import RowsLocked, after_commit, insert_rows, run_transaction, table_of
from horde.exceptions import BadRequest, Forbidden, HordeError
from horde.model_reference import get_text_model_multiplier, is_known_text_model
from horde.return_codes import ReturnCode

MAX_POPPED_MODELS = 200
MAX_WORKER_NAME_LENGTH = 100
RESERVED_NAME_WORDS = ("colab", "tpu", "google")
UNTRUSTED_WORKER_COUNT = 3  # a fourth is still accepted
TRUSTED_WORKER_COUNT = 20
COUNTED_WORKER_AGE = timedelta(days=1)

CountedName = Annotated[str, Field(max_length=4096)]


class TextPopBody(LenientBody):
    """The keys of a text pop; the chat declaration is checked by
    `parse_chat_declaration_fields`.
    """

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    models: Values[CountedName] = Field(default_factory=list)
    bridge_agent: str = UNKNOWN_BRIDGE_AGENT
    threads: Annotated[WholeNumber, Field(ge=1, le=50)] = 1
    amount: Annotated[WholeNumber, Field(ge=1, le=20)] = 1
    nsfw: bool = True
    priority_usernames: Values[CountedName] = Field(default_factory=list)
    max_length: Annotated[WholeNumber, Field(ge=1, le=2**31 - 1)] = 512
    max_context_length: Annotated[WholeNumber, Field(ge=1, le=2**31 - 1)] = 2048
    leaving: bool = False

    @property
    def clean_name(self) -> str:
        """The worker's name as it is shown, cut to what the column holds."""
        return clean_shown_text(self.name)[:MAX_WORKER_NAME_LENGTH].rstrip()

    @property
    def clean_agent(self) -> str:
        """The bridge agent without markup; a long one is cut, since one worker's grows with every
        reload.
        """
        return clean_shown_text(self.bridge_agent)[:MAX_BRIDGE_AGENT_LENGTH]

    @property
    def known_models(self) -> list[str]:
        """The models offered, each once, in order; the first 200 count."""
        return list(dict.fromkeys(self.models[:MAX_POPPED_MODELS]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoppedJobs:
    """The jobs of a pop with their payload; None when there was nothing for the worker."""

    jobs: AssignedJobs | None
    payload: dict[str, Any]
    is_chat: bool = False
    request: TextWaitingPrompt | None = field(default=None, repr=False)
    # How the worker gets what lies in the store; None when nothing does.
    transport: ChatImageTransport | None = None
    skipped: dict[str, int]


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


def check_models(body: TextPopBody, caller: Caller) -> list[str]:
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


def find_named_worker(session: Session, name: str, now: datetime) -> NamedTextWorker | None:
    """The text worker of a name; raises BadRequest when a worker of another kind has it."""
    known = find_named_text_worker(session, name, now)
    if known is None and session.scalar(
        select(Worker.id).where(Worker.name == name, Worker.worker_type != "text_worker")
    ):
        message = f"The name '{name}' belongs to a worker of another kind."
        raise BadRequest(message, ReturnCode.POLYMORPHIC_NAME_CONFLICT)
    return known


def find_address_refusal(caller: Caller, *, is_raid: bool) -> HordeError | None:
    """The refusal of a worker's address in timeout, or called unsafe by the checker; None when it
    may work.

    May wait for the checker, so no transaction may be open; the pop raises it in its place among
    the checks.
    """
    address = get_peer_address()
    try:
        check_address_timeout(address, for_worker=True)
        check_worker_address(
            address, is_exempt=is_address_exempt(caller), raid=is_raid, config=get_config()
        )
    except HordeError as refusal:
        return refusal
    return None


def is_address_exempt(caller: Caller) -> bool:
    """Whether the workers of an account may have any address."""
    return caller.is_trusted or caller.is_vpn or caller.is_patron


def check_worker_owner(worker: TextWorker, caller: Caller) -> None:
    """Refuse a name that belongs to somebody else. Raises Forbidden."""
    if worker.user_id != caller.id:
        message = (
            f"The worker name '{worker.name}' belongs to another user. Choose a name of your own."
        )
        raise Forbidden(message, ReturnCode.WRONG_CREDENTIALS)


def take_leave(session: Session, body: TextPopBody, caller: Caller, now: datetime) -> None:
    """Take a worker offline that says it will pop no more. Raises Forbidden for another user's.

    Its jobs in flight may still be submitted, and its next pop brings it back. A name that no
    worker has leaves nothing behind.
    """
    known = find_named_worker(session, body.clean_name, now)
    if known is not None:
        check_worker_owner(known.worker, caller)
        take_workers_offline(session, TextWorker.id == known.worker.id, now)


def check_new_worker(session: Session, body: TextPopBody, caller: Caller, now: datetime) -> None:
    """Refuse a new worker by its name or by how many its owner has. Raises BadRequest or
    Forbidden.
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
    # A worker that was not seen for a day takes no place: names change, and machines are replaced.
    owned, here = Worker.user_id == caller.id, Worker.ipaddr == get_peer_address()
    own, same_address = session.execute(
        select(func.count().filter(owned), func.count().filter(here)).where(
            or_(owned, here), Worker.last_check_in >= now - COUNTED_WORKER_AGE
        )
    ).one()
    _check_worker_counts(own, same_address, caller, get_horde_modes(session))


def _check_worker_counts(own: int, same_address: int, caller: Caller, modes: HordeModes) -> None:
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


def insert_worker(session: Session, worker: TextWorker, caller: Caller) -> bool:
    """Store a new worker; False when its owner's other thread was first, whose row this pop then
    goes on with.

    Raises Forbidden when somebody else took the name at this very moment.
    """
    columns = {
        name: value for name, value in vars(worker).items() if name in inspect(TextWorker).columns
    }
    statement = insert(TextWorker).values(**columns)
    if (
        session.scalar(
            statement.on_conflict_do_nothing(index_elements=["name"]).returning(TextWorker.id)
        )
        is not None
    ):
        return True
    first = session.execute(
        select(TextWorker.id, TextWorker.user_id).where(TextWorker.name == worker.name)
    ).one_or_none()
    if first is None or first.user_id != caller.id:
        raise Forbidden("This worker name was just taken.", ReturnCode.WRONG_CREDENTIALS)
    worker.id = first.id
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCheckIn:
    """What a pop has to write of its worker before the queue is read."""

    seen_check_in: datetime
    declared: dict[str, Any]  # columns of the chat declaration that changed
    check_in: CheckIn | None  # None inside the 30 s in which the row is left alone
    is_new: bool
    changes_service: bool  # others have to look anew at who serves what

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.declared) or self.check_in is not None


def take_check_in(
    worker: TextWorker,
    body: TextPopBody,
    declaration: ChatDeclaration | None,
    *,
    is_new: bool,
    now: datetime,
) -> PendingCheckIn:
    """What the pop changes of its worker; the copy at hand is changed along.

    The declaration is compared at every pop, the rest every 30 s.
    """
    seen, was_online = worker.last_check_in, is_online(worker.last_check_in, now) and not is_new
    old_service = describe_service(worker)
    declared = worker.take_chat_declaration(declaration)
    check_in = None
    if is_new or worker.is_check_in_due(now):
        check_in = worker.check_in(
            now=now,
            ipaddr=get_peer_address()[:39],
            bridge_agent=body.clean_agent,
            threads=body.threads,
            nsfw=body.nsfw,
            limits=(body.max_length, body.max_context_length),
        )
    return PendingCheckIn(
        seen_check_in=seen,
        declared=declared,
        check_in=check_in,
        is_new=is_new,
        changes_service=bool(declared)
        or not was_online
        or (check_in is not None and describe_service(worker) != old_service),
    )


def describe_service(worker: TextWorker) -> tuple[object, ...]:
    """What a check-in says that decides whose requests a worker may serve, beside its models."""
    program = parse_bridge_name(worker.bridge_agent)
    return worker.max_length, worker.max_context_length, worker.nsfw, program


workers, offers = table_of(TextWorker), table_of(WorkerModel)


@cache
def build_worker_update(names: frozenset[str], *, is_check_in: bool) -> Update:
    """The one update of a pop, for the columns that changed; a check-in needs the `last_check_in`
    that was read.

    Returns the models stored so far, in one row; no row for the loser of a race.
    """
    statement = update(workers).where(workers.c.id == bindparam("worker_id"))
    if is_check_in:
        statement = statement.where(workers.c.last_check_in == bindparam("seen_check_in"))
    values = {name: bindparam(f"new_{name}", type_=workers.c[name].type) for name in names}
    stored = (
        select(func.array_agg(offers.c.model))
        .where(offers.c.worker_id == bindparam("worker_id"))
        .scalar_subquery()
    )
    return statement.values(values).returning(func.coalesce(stored, cast([], ARRAY(Text))))


def write_check_in(
    session: Session,
    worker: TextWorker,
    pending: PendingCheckIn,
    models: Sequence[str],
    caller: Caller,
    now: datetime,
) -> None:
    """Write a check-in; of two pops of one worker at once, one counts. The caller commits before
    the queue is read.
    """
    changes_service = pending.changes_service
    columns = pending.declared | ({} if pending.check_in is None else pending.check_in.columns)
    stored_models: list[str] | None = []
    if pending.is_new:
        if not insert_worker(session, worker, caller):
            return
    else:
        statement = build_worker_update(
            frozenset(columns), is_check_in=pending.check_in is not None
        )
        values = {f"new_{name}": value for name, value in columns.items()}
        seen = {"worker_id": worker.id, "seen_check_in": pending.seen_check_in}
        stored_models = session.scalar(
            statement, values | (seen if pending.check_in is not None else {"worker_id": worker.id})
        )
        if stored_models is None:
            return
    if pending.check_in is not None:
        changes_service |= _write_models(session, worker, models, set(stored_models or ()))
        if pending.check_in.is_rewarded:
            _reward_uptime(session, worker, models, caller, now)
    if changes_service:
        after_commit(session, note_text_workers_changed)


def suspect_check_in(
    worker: TextWorker,
    body: TextPopBody,
    pending: PendingCheckIn,
    caller: Caller,
    *,
    is_raid: bool,
) -> None:
    """Give points for a worker's name and, in a raid, for an address it would be refused for
    otherwise. Call it after the check-in is committed.
    """
    if pending.is_new:
        suspect_worker_name(worker.id, caller.id, body.name)
    if is_raid and pending.check_in is not None and not is_address_exempt(caller):
        with suppress(HordeError):  # the checker cannot tell now
            if not is_safe_worker_address(get_peer_address(), get_config()):
                suspect_worker(worker.id, caller.id, Suspicion.UNSAFE_IP)


def _write_models(
    session: Session, worker: TextWorker, models: Sequence[str], stored: set[str]
) -> bool:
    """Store the offered models if the set changed; True when it did."""
    if stored == set(models):
        return False
    if stored - set(models):
        session.execute(
            delete(WorkerModel).where(
                WorkerModel.worker_id == worker.id, WorkerModel.model.in_(stored - set(models))
            )
        )
    added = [model for model in models if model not in stored]
    insert_rows(session, offers, [{"worker_id": worker.id, "model": model} for model in added])
    return True


def _reward_uptime(
    session: Session, worker: TextWorker, models: Sequence[str], caller: Caller, now: datetime
) -> None:
    kudos = compute_uptime_reward(
        max_context_length=worker.max_context_length,
        multiplier=get_text_model_multiplier(models[0]),
        is_known=is_known_text_model(models[0]),
        validated=is_backend_validated(worker.bridge_agent, get_config().validated_backends),
    )
    movements = build_uptime_movements(
        kudos=kudos, worker_id=worker.id, owner_id=caller.id, owner_trusted=caller.is_trusted
    )
    append_movements(session, uuid4(), movements, now)
    if worker.team_id is not None:
        add_team_uptime(session, worker.team_id, now)


def read_queue(
    session: Session,
    worker: TextWorker,
    models: Sequence[str],
    caller: Caller,
    priority_user_ids: Sequence[int],
    now: datetime,
) -> ServableQueue:
    """What of the queue this pop may take. Models are those of the pop, limits those of the stored
    worker.
    """
    config = get_config()

    def build_inputs(minimum_speed: float) -> EligibilityInputs:
        return EligibilityInputs(
            models=frozenset(models),
            owner_trusted=caller.is_trusted,
            validated_backends=config.validated_backends,
            minimum_speed=minimum_speed,
            now=now,
            is_store_away=r2.is_left_alone(),
        )

    text_speed = get_minimum_text_speed(get_text_model_multiplier(models[0]))
    chat_speed = text_speed
    if worker.chat_model_id is not None:
        chat_speed = get_minimum_text_speed(get_text_model_multiplier(worker.chat_model_id))
        if worker_may_be_speed_gated(worker.gate_speed, worker.chat_max_length or 0):
            after_commit(session, _count_lease_capacity_limited)
    return get_sorted_text_wp_filtered_to_worker(
        session, worker, build_inputs(text_speed), build_inputs(chat_speed), priority_user_ids
    )


def _count_lease_capacity_limited() -> None:
    metrics.pop_lease_capacity_limited.add(1, {"horde.gentype": "text"})


def build_idle_pop(queue: ServableQueue | None = None) -> PoppedJobs:
    """What a pop without a job answers."""
    skipped = {} if queue is None else queue.skipped
    return PoppedJobs(jobs=None, payload=dict(TEXT_PAYLOAD_DEFAULTS), skipped=skipped)


def take_jobs(
    worker: TextWorker,
    queue: ServableQueue,
    models: Sequence[str],
    *,
    owner: LeaseOwner,
    amount: int,
    now: datetime,
) -> PoppedJobs:
    """Claim a request and write its jobs, in a transaction; without one, the body of an idle pop.

    Where others are just taking or settling all there is, the best of it is waited for, in a
    transaction of its own: they mostly leave something, and an idle answer would keep the worker
    away for seconds.
    """

    def take(session: Session, contested_id: UUID | None = None) -> PoppedJobs:
        if contested_id is None:
            claimed = claim_next_request(session, queue, wanted=amount, now=now)
        else:
            claimed = claim_contested_request(session, queue, contested_id, wanted=amount, now=now)
        return write_jobs(
            session, claimed, worker, queue, models, owner=owner, amount=amount, now=now
        )

    try:
        return run_transaction(take)
    except QueueContestedError as contested:
        wait_and_take = partial(take, contested_id=contested.request_id)
    try:
        return run_transaction(wait_and_take)
    except RowsLocked:
        return build_idle_pop(queue)


def write_jobs(
    session: Session,
    claimed: ClaimedRequest | None,
    worker: TextWorker,
    queue: ServableQueue,
    models: Sequence[str],
    *,
    owner: LeaseOwner,
    amount: int,
    now: datetime,
) -> PoppedJobs:
    """Write the jobs of a claim in its transaction; without a claim, the body of an idle pop.

    A paused worker gets jobs of its owner, else fakes, so that whoever runs it does not learn that
    it is paused.
    """
    is_fake = claimed is None and worker.paused and not worker.maintenance
    if is_fake:
        claimed = show_request_to_paused(session, queue, worker, wanted=amount, now=now)
    if claimed is None:
        return build_idle_pop(queue)
    jobs = assign_jobs(session, claimed, worker, models, now, owner=owner, is_fake=is_fake)
    request = claimed.request
    waited = max(0.0, (now - request.created).total_seconds())
    kind = (
        "shared_key"
        if request.sharedkey_id
        else ("anonymous" if request.user_id == 0 else "registered")
    )
    bucket = metrics.get_text_length_bucket(request.max_length)

    def count() -> None:
        metrics.text_queue_wait_seconds.record(
            waited,
            {
                "horde.requester": kind,
                "horde.chat": request.is_chat,
                "horde.requested_bucket": bucket,
            },
        )

    if not is_fake:
        after_commit(session, count)
    return PoppedJobs(
        jobs=jobs,
        payload=request.get_pop_payload(),
        is_chat=request.is_chat,
        request=request,
        transport=request.select_transport(worker),
        skipped=queue.skipped,
    )


def add_stored_input(popped: PoppedJobs) -> PoppedJobs:
    """The job with what its request keeps in the store. Call it after the commit; raises
    StoreUnavailable.
    """
    if popped.jobs is None or popped.request is None or popped.transport is None:
        return popped
    payload = popped.request.get_pop_payload(
        transport=popped.transport, ttl_seconds=popped.jobs.ttl_seconds, store=r2
    )
    return replace(popped, payload=payload)


def build_pop_response(
    popped: PoppedJobs, messages: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """The body of a pop; a chat job alone carries `chat`."""
    jobs = popped.jobs
    ids = [] if jobs is None else [str(job_id) for job_id in jobs.ids]
    body: dict[str, Any] = {
        "payload": write_schemas(popped.payload) if popped.is_chat else popped.payload,
        "id": ids[0] if ids else None,
        "ids": ids,
        "messages": list(messages),
        "ttl": None if jobs is None else jobs.ttl_seconds,
        "extra_source_images": None,
        "skipped": popped.skipped if jobs is None else {},
        "softprompt": None,
        "model": None if jobs is None else jobs.model,
    }
    return body | {"chat": True} if popped.is_chat else body
