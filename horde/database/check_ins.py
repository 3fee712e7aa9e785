# SPDX-License-Identifier: AGPL-3.0-or-later
"""Workers that check in with a pop: found by name, made, and written where something changed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from uuid import uuid4

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

from horde.chat.declaration import ChatDeclaration
from horde.classes.base.worker import (
    Worker,
    WorkerModel,
    is_backend_validated,
    is_online,
    parse_bridge_name,
)
from horde.classes.kobold.pricing import build_uptime_movements, compute_uptime_reward
from horde.classes.kobold.worker import CheckIn, TextWorker
from horde.database.functions import (
    NamedTextWorker,
    find_named_text_worker,
    note_text_workers_changed,
)
from horde.database.kudos import append_movements
from horde.database.queue_classes import ClassLook
from horde.database.teams import add_team_uptime
from horde.database.users import Caller
from horde.db import after_commit, insert_rows, table_of
from horde.exceptions import BadRequest, Forbidden
from horde.hot_session import keep
from horde.json_text import JsonObject
from horde.model_reference import get_text_model_multiplier, is_known_text_model
from horde.return_codes import ReturnCode
from horde.shapes.jobs import TextPopBody

COUNTED_WORKER_AGE = timedelta(days=1)

workers, offers = table_of(TextWorker), table_of(WorkerModel)


def find_named_worker(
    session: Session, name: str, now: datetime, look: ClassLook | None = None
) -> NamedTextWorker | None:
    """The text worker of a name, and a look at the queue on the way. Raises BadRequest when a
    worker of another kind has the name.
    """
    known = find_named_text_worker(session, name, now, look)
    if known is None and session.scalar(
        select(Worker.id).where(Worker.name == name, Worker.worker_type != "text_worker")
    ):
        message = f"The name '{name}' belongs to a worker of another kind."
        raise BadRequest(message, ReturnCode.POLYMORPHIC_NAME_CONFLICT)
    return known


def lock_worker_places(session: Session, owner_id: int, address: str) -> None:
    """Let nobody else bring a worker of this account or from this address until the transaction
    ends.
    """
    keys = sorted((f"workers of {owner_id}", f"workers at {address}"))
    for key in keys:  # in one order everywhere
        session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(key, 0))))


def count_recent_workers(
    session: Session, owner_id: int, address: str, now: datetime, *, besides: str
) -> tuple[int, int]:
    """How many workers an account has, and how many an address, beside the one of a name.

    A worker that was not seen for a day takes no place: names change, and machines are replaced.
    """
    owned, here = Worker.user_id == owner_id, Worker.ipaddr == address
    counts = session.execute(
        select(func.count().filter(owned), func.count().filter(here)).where(
            or_(owned, here),
            Worker.last_check_in >= now - COUNTED_WORKER_AGE,
            Worker.name != besides,
        )
    )
    own, same_address = counts.one()
    return own, same_address


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCheckIn:
    """What a pop has to write of its worker before the queue is read."""

    seen_check_in: datetime
    declared: JsonObject  # columns of the chat declaration that changed
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
    address: str,
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
            ipaddr=address[:39],
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
    return keep(statement.values(values).returning(func.coalesce(stored, cast([], ARRAY(Text)))))


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


def write_check_in(
    session: Session,
    worker: TextWorker,
    pending: PendingCheckIn,
    models: Sequence[str],
    caller: Caller,
    validated_backends: Collection[str],
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
            _reward_uptime(session, worker, models, caller, validated_backends, now)
    if changes_service:
        after_commit(session, note_text_workers_changed)


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
    session: Session,
    worker: TextWorker,
    models: Sequence[str],
    caller: Caller,
    validated_backends: Collection[str],
    now: datetime,
) -> None:
    kudos = compute_uptime_reward(
        max_context_length=worker.max_context_length,
        multiplier=get_text_model_multiplier(models[0]),
        is_known=is_known_text_model(models[0]),
        validated=is_backend_validated(worker.bridge_agent, validated_backends),
    )
    movements = build_uptime_movements(
        kudos=kudos, worker_id=worker.id, owner_id=caller.id, owner_trusted=caller.is_trusted
    )
    append_movements(session, uuid4(), movements, now)
    if worker.team_id is not None:
        add_team_uptime(session, worker.team_id, now)
