# SPDX-License-Identifier: AGPL-3.0-or-later
"""Teams as they are shown, made and dissolved."""

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, delete, exists, func, literal, select, update
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.orm import Session

from horde.classes.base.team import Team
from horde.classes.base.user import User
from horde.classes.base.worker import UPTIME_REWARD_SECONDS, Worker, WorkerModel, online_since
from horde.database.caches import TimedCache, write_answer
from horde.database.workers import parse_id
from horde.exceptions import NotFound
from horde.return_codes import ReturnCode
from horde.shapes.base import ModelType
from horde.shapes.teams import TeamDetails, TeamModel, TeamWorker
from horde.written_answer import WrittenAnswer

TEAM_LIST_SECONDS = 10.0
TEAM_SECONDS = 3.0
MAX_SHOWN_WORKERS = 1000  # of one team; bounds the answer
_WORKER_TYPES = {
    "stable_worker": ModelType.IMAGE,
    "text_worker": ModelType.TEXT,
    "interrogation_worker": ModelType.INTERROGATION,
}

_lists = TimedCache[None, WrittenAnswer](TEAM_LIST_SECONDS)
_details = TimedCache[UUID, TeamDetails | None](TEAM_SECONDS)


def get_teams(session: Session, now: datetime) -> WrittenAnswer:
    """Every team, oldest first; at most ten seconds old. One statement."""

    def read() -> WrittenAnswer:
        rows = session.execute(_select_details(now).order_by(Team.created, Team.id))
        return write_answer([_build_details(row).dump() for row in rows])

    return _lists.get(None, read)


def find_team_details(session: Session, team_id: UUID, now: datetime) -> TeamDetails | None:
    """One team; at most three seconds old. None when there is no such team. One statement."""

    def read() -> TeamDetails | None:
        row = session.execute(_select_details(now).where(Team.id == team_id)).one_or_none()
        return None if row is None else _build_details(row)

    return _details.get(team_id, read)


def forget_team(team_id: UUID) -> None:
    """Show a changed team as it is now. Call it after the commit; other processes follow within the
    time their copies live.
    """
    _lists.expire(None)
    _details.forget(team_id)


def lock_team(session: Session, team_id: str) -> Team:
    """The team with this id, to be changed or deleted, its row locked. Errors: NotFound."""
    parsed = parse_id(team_id)
    team = None if parsed is None else session.get(Team, parsed, with_for_update=True)
    if team is None:
        raise team_not_found(team_id)
    return team


def team_not_found(team_id: str) -> NotFound:
    """404 of an id that no team has."""
    return NotFound(f"Team with ID '{team_id[:64]}' not found.", ReturnCode.TEAM_NOT_FOUND)


def claim_team_name(session: Session, name: str, *, besides: UUID | None = None) -> bool:
    """Whether no other team has the name in any case; until the transaction ends nobody else gets
    it.
    """
    lowered = func.lower(literal(name))
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(lowered, 0))))
    is_taken = exists().where(func.lower(Team.name) == lowered, Team.id.is_distinct_from(besides))
    return not session.scalar(select(is_taken))


def find_team_name_to_join(session: Session, team_id: UUID) -> str | None:
    """The name of a team, which stays while the transaction lasts; None when there is no such
    team.
    """
    statement = select(Team.name).where(Team.id == team_id)
    return session.scalar(statement.with_for_update(read=True, key_share=True))


def delete_team(session: Session, team: Team) -> list[tuple[UUID, str]]:
    """Delete a team whose row is locked; its workers, (id, name) each, leave it."""
    left = session.execute(
        update(Worker)
        .where(Worker.team_id == team.id)
        .values(team_id=None)
        .returning(Worker.id, Worker.name)
        .execution_options(synchronize_session=False)
    )
    workers = [(row.id, row.name) for row in left]
    session.execute(delete(Team).where(Team.id == team.id))
    return workers


def add_team_uptime(session: Session, team_id: UUID, now: datetime) -> None:
    """Add what one of its workers was online for since that worker's last reward."""
    session.execute(
        update(Team)
        .where(Team.id == team_id)
        .values(uptime=Team.uptime + UPTIME_REWARD_SECONDS, last_active=now)
        .execution_options(synchronize_session=False)
    )


def _select_details(now: datetime) -> Select[Any]:
    online = Worker.last_check_in >= online_since(now)
    member = Worker.team_id == Team.id
    shown = (
        select(Worker.id, Worker.name, Worker.worker_type, online.label("online"), Worker.created)
        .where(member)
        .order_by(Worker.created, Worker.id)
        .limit(MAX_SHOWN_WORKERS)
        .correlate(Team)
        .lateral("shown")
    )
    worker = func.json_build_object(
        "id",
        shown.c.id,
        "name",
        shown.c.name,
        "type",
        shown.c.worker_type,
        "online",
        shown.c.online,
    )
    counted = (
        select(WorkerModel.model, func.count().label("workers"))
        .join(Worker, Worker.id == WorkerModel.worker_id)
        .where(member, online)
        .group_by(WorkerModel.model)
        .correlate(Team)
        .lateral("counted")
    )
    model = func.json_build_object("name", counted.c.model, "count", counted.c.workers)
    return select(
        Team.id,
        Team.name,
        Team.info,
        Team.fulfilments,
        Team.kudos,
        Team.uptime,
        Team.owner_id,
        User.username,
        _of_team(select(func.count()).select_from(Worker).where(member)).label("worker_count"),
        _of_team(
            select(func.json_agg(aggregate_order_by(worker, shown.c.created, shown.c.id)))
        ).label("workers"),
        _of_team(select(func.json_agg(aggregate_order_by(model, counted.c.model)))).label("models"),
    ).join(User, User.id == Team.owner_id)


def _of_team(statement: Select[Any]) -> ColumnElement[Any]:
    return statement.correlate(Team).scalar_subquery()


def _build_details(row: Any) -> TeamDetails:
    return TeamDetails(
        name=row.name,
        id=str(row.id),
        info=row.info,
        requests_fulfilled=row.fulfilments,
        kudos=row.kudos,
        uptime=row.uptime,
        creator=f"{row.username}#{row.owner_id}",
        worker_count=row.worker_count,
        workers=[
            TeamWorker(**worker | {"type": _WORKER_TYPES[worker["type"]]})
            for worker in row.workers or ()
            if worker["type"] in _WORKER_TYPES
        ],
        models=[TeamModel(**model) for model in row.models or ()],
    )
