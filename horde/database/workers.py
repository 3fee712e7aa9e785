# SPDX-License-Identifier: AGPL-3.0-or-later
"""Workers as the API shows them, and what their owners and moderators may change."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    DateTime,
    Select,
    Subquery,
    Text,
    Uuid,
    cast,
    column,
    delete,
    exists,
    func,
    literal,
    null,
    select,
    table,
    update,
)
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from horde.classes.base.processing_generation import ProcessingGeneration
from horde.classes.base.team import Team
from horde.classes.base.user import User, UserRole, UserRoleTypes
from horde.classes.base.worker import (
    SPEED_BASELINE,
    WorkerModel,
    WorkerStats,
    is_online,
    online_since,
)
from horde.classes.kobold.worker import TextWorker
from horde.database.caches import (
    SharedAnswers,
    TimedCache,
    forget_shared,
    read_shared,
    write_shared,
)
from horde.database.functions import note_text_workers_changed
from horde.database.stats import forget_model_figures
from horde.database.worker_messages import build_active_messages, show_active_messages
from horde.db import after_commit, table_of
from horde.exceptions import BadRequest, Locked, NotFound
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode
from horde.written_answer import WrittenAnswer

PUBLIC, OWNER, MODERATOR = 0, 1, 2  # how much of a worker a caller sees

DETAILS_KEY_TTL_SECONDS = 30
DETAILS_SECONDS = 1.0  # a process's own copy is short, so that a change made on another node shows
WORKERS_KEY = "worker_list_privileged_"
WORKERS_KEY_TTL_SECONDS = 300
WORKERS_REBUILD_SECONDS = 30.0
SHARED_READ_SECONDS = 2.0

NO_SAMPLES = "No requests fulfilled yet"
_OWNER_KEYS = frozenset({"owner", "messages"})
_MODERATOR_KEYS = frozenset({"paused", "suspicious", "ipaddr", "contact"})

TEXT_WORKER = "text_worker"
_workers = table_of(TextWorker)
# Tables of parts this horde only shows.
_suspicions = table("worker_suspicions", column("worker_id", Uuid()))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker as a moderator sees it, and what decides who else sees how much of it."""

    owner_id: int
    is_public: bool  # the owner shows who runs it
    details: JsonObject


_details = TimedCache[UUID | str, WorkerRecord | None](DETAILS_SECONDS)
# By whether a moderator reads it. An AI Horde's keys hold records of another form.
_lists = SharedAnswers[bool](
    WORKERS_KEY, lifetime_seconds=SHARED_READ_SECONDS, compute_seconds=WORKERS_REBUILD_SECONDS
)


def parse_id(text: str) -> UUID | None:
    """The id in its canonical form; None for anything else, which is an id that nothing has."""
    try:
        parsed = UUID(text)
    except ValueError:
        return None
    return parsed if str(parsed) == text.lower() else None


def find_worker_record(session: Session, worker_id: UUID, now: datetime) -> WorkerRecord | None:
    """The text worker with this id, online or not; at most 30 s old. None when there is none."""

    def read() -> WorkerRecord | None:
        key = _get_details_key(worker_id)
        shared = read_shared(key, lambda record: WorkerRecord(**record))
        if shared is not None:
            return shared
        records = _read_records(session, now, _workers.c.id == worker_id, with_messages=True)
        if not records:
            return None
        write_shared(key, _dump(records[0]), DETAILS_KEY_TTL_SECONDS)
        return records[0]

    return _details.get(worker_id, read)


def find_worker_record_by_name(session: Session, name: str, now: datetime) -> WorkerRecord | None:
    """The text worker with exactly this name. None when there is none."""

    def read() -> WorkerRecord | None:
        worker_id = session.scalar(select(TextWorker.id).where(TextWorker.name == name))
        return None if worker_id is None else find_worker_record(session, worker_id, now)

    return _details.get(name, read)


def get_online_workers(session: Session, now: datetime, *, is_privileged: bool) -> WrittenAnswer:
    """Every online text worker, oldest first, as everybody or as moderators see them; about half a
    minute old.
    """

    def compute() -> list[JsonObject]:
        return narrow_list(compute_online_worker_records(session, now), is_privileged=is_privileged)

    return _lists.get(is_privileged, compute)


def compute_online_worker_records(session: Session, now: datetime) -> list[WorkerRecord]:
    """Every online text worker as stored, oldest first; without their messages, which would make
    the list as long as anybody cares to write.
    """
    return _read_records(session, now, _workers.c.last_check_in >= online_since(now))


def publish_online_worker_records(records: Sequence[WorkerRecord]) -> None:
    """Share the lists with every process. Best effort."""
    for is_privileged in (False, True):
        listed = narrow_list(records, is_privileged=is_privileged)
        _lists.publish(is_privileged, listed, WORKERS_KEY_TTL_SECONDS)


def forget_online_worker_records() -> None:
    """List the online workers anew when next asked. Call it after the commit."""
    _lists.forget(False, True)


def narrow_list(records: Sequence[WorkerRecord], *, is_privileged: bool) -> list[JsonObject]:
    """The details of a list, as everybody or as moderators see them."""
    privilege = MODERATOR if is_privileged else PUBLIC
    return [narrow_details(record, privilege) for record in records]


def narrow_details(record: WorkerRecord, privilege: int) -> JsonObject:
    """The details a caller of this privilege sees."""
    hidden: frozenset[str] = frozenset()
    if privilege < MODERATOR:
        hidden |= _MODERATOR_KEYS
    if privilege < OWNER and not record.is_public:
        hidden |= _OWNER_KEYS
    return {key: value for key, value in record.details.items() if key not in hidden}


def forget_worker_details(worker_id: UUID, *names: str) -> None:
    """Show a changed worker as it is now; other processes follow within a second. Call it after the
    commit.
    """
    forget_shared(_get_details_key(worker_id))
    _details.forget(worker_id)
    for name in names:
        _details.forget(name)


def announce_worker_change(session: Session, worker_id: UUID, *names: str) -> None:
    """Once committed, show a worker as it is now, and have everybody look anew at who serves what.

    `names` are those it has and had.
    """

    def announce() -> None:
        forget_worker_details(worker_id, *names)
        forget_online_worker_records()
        forget_model_figures()
        note_text_workers_changed()

    after_commit(session, announce)


def announce_owner_change(session: Session, user_id: int) -> None:
    """As `announce_worker_change` for every worker of an account whose roles changed."""
    rows = session.execute(
        select(TextWorker.id, TextWorker.name).where(TextWorker.user_id == user_id)
    )
    for row in rows:
        announce_worker_change(session, row.id, row.name)


def take_workers_offline(session: Session, condition: ColumnElement[bool], now: datetime) -> None:
    """End the time online of the text workers that fit, at once; their next check-in begins
    another.

    A check-in that read a worker before this commits writes nothing, since it needs the time of the
    last one that it read.
    """
    rows = session.execute(
        select(TextWorker.id, TextWorker.name)
        .where(condition, TextWorker.last_check_in >= online_since(now))
        .order_by(TextWorker.id)
        .with_for_update(key_share=True)
    ).all()
    session.execute(
        update(TextWorker)
        .where(TextWorker.id.in_([row.id for row in rows]))
        .values(last_check_in=online_since(now) - timedelta(seconds=1))
        .execution_options(synchronize_session=False)
    )
    for row in rows:
        announce_worker_change(session, row.id, row.name)


def describe_performance(speed: float) -> str:
    """A worker's speed in words; clients cut the unit off."""
    return NO_SAMPLES if speed == SPEED_BASELINE else f"{round(speed, 1)} tokens per second"


def require_worker(session: Session, worker_id: str) -> TextWorker:
    """The text worker with this id, to be changed. Errors: NotFound."""
    parsed = parse_id(worker_id)
    worker = None if parsed is None else session.get(TextWorker, parsed)
    if worker is None:
        raise NotFound(f"Worker with ID '{worker_id[:64]}' not found.", ReturnCode.WORKER_NOT_FOUND)
    return worker


def rename_worker(session: Session, worker: TextWorker, name: str) -> None:
    """Give a worker a name no other worker of any kind has. Errors: BadRequest when one has it."""
    previous = worker.name
    try:
        with session.begin_nested():
            worker.name = name
    except IntegrityError:
        worker.name = previous
        raise BadRequest(
            f"The name '{name}' is taken by another worker.", ReturnCode.WORKER_NAME_ALREADY_EXISTS
        ) from None


def delete_worker(session: Session, worker: TextWorker) -> None:
    """Delete a worker and what hangs from it. Errors: Locked while a job refers to it."""
    locked = Locked(
        f"Worker '{worker.name}' still has jobs. Put it into maintenance and try again in half an"
        " hour.",
        ReturnCode.LOCKED,
    )
    if session.scalar(select(exists().where(ProcessingGeneration.worker_id == worker.id))):
        raise locked
    try:
        with session.begin_nested():
            session.execute(
                delete(TextWorker)
                .where(TextWorker.id == worker.id)
                .execution_options(synchronize_session=False)
            )
    except IntegrityError:  # a pop was faster
        raise locked from None


def _get_details_key(worker_id: UUID) -> str:
    return f"cached_worker_{worker_id}"


def _dump(record: WorkerRecord) -> JsonObject:
    return {"owner_id": record.owner_id, "is_public": record.is_public, "details": record.details}


def _read_records(
    session: Session, now: datetime, condition: ColumnElement[bool], *, with_messages: bool = False
) -> list[WorkerRecord]:
    """Records of the workers that fit, oldest first, in one statement.

    What hangs from a worker is grouped once for all of them: subqueries by worker would take five
    times as long for two thousand.
    """
    worker = _workers
    condition &= worker.c.worker_type == TEXT_WORKER
    fitting = select(worker.c.id).where(condition)
    owners = select(worker.c.user_id).where(condition)
    models = _group(
        WorkerModel.worker_id,
        fitting,
        func.array_agg(aggregate_order_by(WorkerModel.model, WorkerModel.id)).label("models"),
    )
    rewards = _group(
        WorkerStats.worker_id,
        fitting,
        func.json_object_agg(WorkerStats.action, WorkerStats.value).label("kudos_details"),
    )
    points = _group(_suspicions.c.worker_id, fitting, func.count().label("suspicious"))
    roles = _group(
        UserRole.user_id,
        owners,
        func.array_agg(cast(UserRole.user_role, Text)).label("roles"),
        UserRole.value.is_(True),
    )
    messages = build_active_messages(worker, literal(now, DateTime())) if with_messages else null()
    statement = (
        select(
            *worker.c,
            User.username,
            User.public_workers,
            User.contact,
            roles.c.roles,
            models.c.models,
            rewards.c.kudos_details,
            points.c.suspicious,
            Team.name.label("team_name"),
            messages.label("messages"),
        )
        .select_from(worker)
        .join(User, User.id == worker.c.user_id)
        .outerjoin(Team, Team.id == worker.c.team_id)
        .outerjoin(models, models.c.key == worker.c.id)
        .outerjoin(rewards, rewards.c.key == worker.c.id)
        .outerjoin(points, points.c.key == worker.c.id)
        .outerjoin(roles, roles.c.key == worker.c.user_id)
        .where(condition)
        .order_by(worker.c.created, worker.c.id)
    )
    return [_build_record(row, now) for row in session.execute(statement)]


def _group(
    key: Any, keys: Select[Any], column: ColumnElement[Any], *conditions: ColumnElement[bool]
) -> Subquery:
    """One row of a value for each of the keys that have rows."""
    grouped = select(key.label("key"), column).where(key.in_(keys), *conditions)
    return grouped.group_by(key).subquery()


def _build_record(row: Any, now: datetime) -> WorkerRecord:
    worker, roles = row, row.roles or ()
    rewards = row.kudos_details or {}
    details = {
        "type": "text",
        "name": worker.name,
        "id": str(worker.id),
        "online": is_online(worker.last_check_in, now),
        "requests_fulfilled": worker.fulfilments,
        "uncompleted_jobs": worker.uncompleted_jobs,
        "nonconformant_replies": worker.nonconformant_replies,
        "kudos_rewards": worker.kudos,
        "kudos_details": {
            "generated": rewards.get("generated", 0),
            "uptime": rewards.get("uptime", 0),
        },
        "performance": describe_performance(worker.speed),
        "threads": worker.threads,
        "uptime": worker.uptime,
        "maintenance_mode": worker.maintenance,
        "paused": worker.paused,
        "info": worker.info,
        "nsfw": worker.nsfw,
        "owner": f"{row.username}#{worker.user_id}",
        "ipaddr": worker.ipaddr,
        "trusted": UserRoleTypes.TRUSTED.name in roles,
        "flagged": UserRoleTypes.FLAGGED.name in roles,
        "suspicious": row.suspicious or 0,
        "contact": row.contact,
        "models": row.models or [],
        "team": {
            "name": row.team_name,
            "id": None if worker.team_id is None else str(worker.team_id),
        },
        "bridge_agent": worker.bridge_agent,
        "max_length": worker.max_length,
        "max_context_length": worker.max_context_length,
        "accepts_chat_jobs": worker.accepts_chat_jobs,
        "accepts_prompt_jobs": worker.accepts_prompt_jobs,
        "chat": TextWorker.get_chat_details(worker),  # a row has the columns of the class
        "messages": show_active_messages(row.messages) or None,
    }
    return WorkerRecord(
        owner_id=worker.user_id,
        is_public=row.public_workers,
        details={key: value for key, value in details.items() if value is not None},
    )
