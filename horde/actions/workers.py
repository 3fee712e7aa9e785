# SPDX-License-Identifier: AGPL-3.0-or-later
"""Workers as they are read, and what their owners and moderators change."""

from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from horde import clock
from horde.actions.actors import Actor, By, require_actor
from horde.actions.acts import record_act
from horde.classes.base.worker import DEFAULT_MAINTENANCE_MESSAGE
from horde.classes.kobold.worker import TextWorker
from horde.database import workers
from horde.database.teams import find_team_name_to_join
from horde.database.users import find_caller
from horde.database.workers import (
    MODERATOR,
    OWNER,
    PUBLIC,
    WorkerRecord,
    announce_worker_change,
    find_worker_record,
    find_worker_record_by_name,
    get_online_workers,
    narrow_details,
    parse_id,
    rename_worker,
    require_worker,
)
from horde.db import reading, run_transaction, transaction
from horde.exceptions import BadRequest, Forbidden, NotFound, PayloadInvalid
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode
from horde.shapes.acts import ModeratorAction
from horde.shapes.base import ModelType
from horde.shapes.workers import (
    MAX_WORKER_INFO_LENGTH,
    MAX_WORKER_NAME_LENGTH,
    MIN_WORKER_NAME_LENGTH,
    DeletedWorker,
    ModifyWorker,
    ModifyWorkerInput,
    WorkersQuery,
)
from horde.shown_text import clean_shown_text, is_profane
from horde.written_answer import WrittenAnswer

type Details = JsonObject


def list_workers(by: By | None, query: WorkersQuery) -> WrittenAnswer | list[Details]:
    """The online workers, as whoever has the key may see them; about half a minute old."""
    now = clock.utcnow()
    with reading() as session:
        viewer = _find_viewer(session, by)
        is_privileged = viewer is not None and viewer.is_moderator
        listed = get_online_workers(session, now, is_privileged=is_privileged)
    if query.name is None:
        return listed if query.type in {None, ModelType.TEXT} else []
    name = query.name.casefold()
    return [details for details in listed.read() if details["name"].casefold() == name]


def show_worker(by: By | None, worker_id: str) -> Details:
    """A worker, online or not; at most 30 seconds old. Errors: NotFound."""
    parsed = parse_id(worker_id)
    with transaction() as session:
        viewer = _find_viewer(session, by)
        record = None if parsed is None else find_worker_record(session, parsed, clock.utcnow())
    if record is None:
        raise NotFound(f"Worker with ID '{worker_id[:64]}' not found.", ReturnCode.WORKER_NOT_FOUND)
    return narrow_details(record, _get_privilege(viewer, record))


def show_worker_by_name(by: By | None, name: str) -> Details:
    """As `show_worker`, by the exact name."""
    with transaction() as session:
        viewer = _find_viewer(session, by)
        record = find_worker_record_by_name(session, name, clock.utcnow())
    if record is None:
        raise NotFound(
            f"Worker with name '{name[:MAX_WORKER_NAME_LENGTH]}' not found.",
            ReturnCode.WORKER_NOT_FOUND,
        )
    return narrow_details(record, _get_privilege(viewer, record))


def change_worker(by: By, worker_id: str, body: ModifyWorkerInput) -> ModifyWorker:
    """Change a worker, as its owner or a moderator; the keys of the answer are those that were
    sent.

    Errors: NotFound, Unauthorized, Forbidden for who may not, BadRequest for what cannot be.
    """

    def work(session: Session) -> ModifyWorker:
        worker = require_worker(session, worker_id)
        actor = _require_manager(session, by)
        changes = body.model_dump(exclude_none=True, exclude={"reason"})
        names = {worker.name, body.name or worker.name}
        _check_may_change(actor, worker, changes)
        answer = _apply_changes(session, worker, body)
        if not actor.owns(worker.user_id) or "paused" in changes:
            record_act(
                session,
                actor,
                ModeratorAction.WORKER_CHANGED,
                describe_worker(worker.id),
                body.reason,
                name=worker.name,
                changes=changes,
            )
        announce_worker_change(session, worker.id, *names)
        return answer

    return run_transaction(work)


def delete_worker(by: By, worker_id: str, reason: str | None = None) -> DeletedWorker:
    """Delete a worker, as its owner or a moderator.

    Errors: NotFound, Unauthorized, Forbidden, and Locked while a job refers to it.
    """

    def work(session: Session) -> DeletedWorker:
        worker = require_worker(session, worker_id)
        actor = _require_manager(session, by)
        if not _manages(actor, worker):
            raise Forbidden(f"Worker '{worker.name}' is not yours.", ReturnCode.NOT_MODERATOR)
        workers.delete_worker(session, worker)
        if not actor.owns(worker.user_id):
            record_act(
                session,
                actor,
                ModeratorAction.WORKER_DELETED,
                describe_worker(worker.id),
                reason,
                name=worker.name,
            )
        announce_worker_change(session, worker.id, worker.name)
        return DeletedWorker(deleted_id=str(worker.id), deleted_name=worker.name)

    return run_transaction(work)


def describe_worker(worker_id: UUID) -> str:
    """The worker as the subject of an act."""
    return f"worker {worker_id}"


def _find_viewer(session: Session, by: By | None) -> Actor | None:
    """Who looks; an unknown key sees what everybody sees."""
    if isinstance(by, Actor):
        return by
    caller = find_caller(session, by)
    return None if caller is None else Actor(caller)


def _get_privilege(viewer: Actor | None, record: WorkerRecord) -> int:
    if viewer is None:
        return PUBLIC
    if viewer.is_moderator:
        return MODERATOR
    return OWNER if viewer.owns(record.owner_id) and not _is_anonymous(viewer) else PUBLIC


def _is_anonymous(actor: Actor) -> bool:
    return actor.account is not None and actor.account.is_anonymous


def _require_manager(session: Session, by: By) -> Actor:
    """Who acts, being somebody who can own workers."""
    actor = require_actor(session, by)
    if _is_anonymous(actor):
        raise Forbidden("Anonymous cannot manage workers.", ReturnCode.ANON_FORBIDDEN_WORKER)
    return actor


def _manages(actor: Actor, worker: TextWorker) -> bool:
    """Whether the actor owns the worker or looks after all of them."""
    return actor.is_moderator or actor.owns(worker.user_id)


def _check_may_change(actor: Actor, worker: TextWorker, changes: Details) -> None:
    """Refuse changes the actor may not make, and a request that makes none."""
    if not changes:
        raise BadRequest("No change of the worker was selected.", ReturnCode.NO_WORKER_MOD_SELECTED)
    if "paused" in changes and not actor.is_moderator:
        raise Forbidden("Only a moderator can pause a worker.", ReturnCode.NOT_MODERATOR)
    if _manages(actor, worker):
        return
    if changes.keys() == {"name"}:
        raise Forbidden(f"Worker '{worker.name}' is not yours to rename.", ReturnCode.NOT_MODERATOR)
    raise Forbidden(f"Worker '{worker.name}' is not yours.", ReturnCode.NOT_OWNER)


def _apply_changes(session: Session, worker: TextWorker, body: ModifyWorkerInput) -> ModifyWorker:
    answer: dict[str, Any] = {}
    if body.maintenance is not None:
        answer["maintenance"] = worker.maintenance = body.maintenance
        worker.maintenance_msg = DEFAULT_MAINTENANCE_MESSAGE
    if body.maintenance_msg is not None:
        answer["maintenance_msg"] = worker.maintenance_msg = clean_shown_text(body.maintenance_msg)
    if body.paused is not None:
        answer["paused"] = worker.paused = body.paused
    if body.info is not None:
        answer["info"] = worker.info = _clean_info(body.info)
    if body.name is not None:
        rename_worker(session, worker, _clean_name(body.name))
        answer["name"] = worker.name
    if body.team is not None:
        answer["team"] = _change_team(session, worker, body.team)
    return ModifyWorker(**answer)


def _clean_info(info: str) -> str:
    """The description as it is shown; raises BadRequest when it is not fit to be."""
    info = clean_shown_text(info)
    if len(info) > MAX_WORKER_INFO_LENGTH:
        raise BadRequest(
            f"The info is longer than {MAX_WORKER_INFO_LENGTH} characters.",
            ReturnCode.TOO_LONG_WORKER_NAME,
        )
    if is_profane(info):
        raise BadRequest("The info holds profanity.", ReturnCode.PROFANE_WORKER_INFO)
    return info


def _clean_name(name: str) -> str:
    """The name as a pop would store it too; raises BadRequest when it is not fit to be shown."""
    name = clean_shown_text(name)
    if len(name) < MIN_WORKER_NAME_LENGTH:
        raise PayloadInvalid(
            {"name": f"String should have at least {MIN_WORKER_NAME_LENGTH} visible characters"}
        )
    if len(name) > MAX_WORKER_NAME_LENGTH:
        raise BadRequest(
            f"The name is longer than {MAX_WORKER_NAME_LENGTH} characters.",
            ReturnCode.TOO_LONG_WORKER_NAME,
        )
    if is_profane(name):
        raise BadRequest("The name holds profanity.", ReturnCode.PROFANE_WORKER_NAME)
    return name


def _change_team(session: Session, worker: TextWorker, team: str) -> str:
    """Join a team by its id, or leave with an empty one; the team's name, or the text None."""
    if team == "":
        worker.team_id = None
        return "None"
    team_id = parse_id(team)
    team_name = None if team_id is None else find_team_name_to_join(session, team_id)
    if team_name is None:
        raise NotFound(f"Team with ID '{team[:64]}' not found.", ReturnCode.TEAM_NOT_FOUND)
    worker.team_id = team_id
    return team_name
