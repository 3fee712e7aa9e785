# SPDX-License-Identifier: AGPL-3.0-or-later
"""The worker routes: who serves, and what owners and moderators change."""

from typing import Any

from flask_restx import Api, Namespace, Resource
from pydantic import Field
from sqlalchemy.orm import Session

from horde import clock
from horde.apis.bodies import Body, Query, read_body, read_query
from horde.apis.models.workers import (
    build_deleted_worker,
    build_modify_worker,
    build_modify_worker_input,
    build_worker_details,
)
from horde.apis.requests import find_api_key, require_api_key
from horde.apis.v2.base import ModelType
from horde.classes.base.worker import DEFAULT_MAINTENANCE_MESSAGE
from horde.classes.kobold.worker import TextWorker
from horde.database.users import Caller, find_caller
from horde.database.workers import (
    MODERATOR,
    OWNER,
    PUBLIC,
    WorkerRecord,
    announce_worker_change,
    clean_shown_text,
    delete_worker,
    find_team_name,
    find_worker_record,
    find_worker_record_by_name,
    get_online_worker_records,
    is_profane,
    narrow_details,
    parse_id,
    rename_worker,
    require_worker,
)
from horde.db import run_transaction, transaction
from horde.exceptions import BadRequest, Forbidden, NotFound, PayloadInvalid, Unauthorized
from horde.limiter import limit_worker
from horde.return_codes import ReturnCode

MIN_NAME_LENGTH = 5
MAX_NAME_LENGTH = 100
MAX_INFO_LENGTH = 1000

namespace = Namespace("workers", description="Those who serve.", path="/v2/workers")
worker_details = build_worker_details(namespace)
modify_worker_input = build_modify_worker_input(namespace)
modify_worker = build_modify_worker(namespace)
deleted_worker = build_deleted_worker(namespace)

OPTIONAL_KEY = {
    "apikey": {"in": "header", "description": "The owner's or a moderator's key shows more."}
}
REQUIRED_KEY = {"apikey": {"in": "header", "required": True}}

type Details = dict[str, Any]


class WorkersQuery(Query):
    """The query string of the worker list."""

    type: ModelType | None = None
    name: str | None = None


class WorkerChanges(Body):
    """What a request to change a worker asks for. The longest name and info have codes of their
    own.
    """

    maintenance: bool | None = None
    maintenance_msg: str | None = Field(None, max_length=300)
    paused: bool | None = None
    info: str | None = None
    name: str | None = Field(None, min_length=MIN_NAME_LENGTH)
    team: str | None = Field(None, max_length=36)


@namespace.route("")
class Workers(Resource):
    """The online workers."""

    @namespace.doc(
        params={
            **OPTIONAL_KEY,
            "type": {"in": "query", "enum": [*ModelType]},
            "name": {
                "in": "query",
                "description": "One worker's name, in any case; the type is then ignored.",
            },
        }
    )
    @namespace.response(200, "The workers", [worker_details])
    def get(self) -> list[Details]:
        """List the online workers; about half a minute old."""
        query = read_query(WorkersQuery)
        with transaction() as session:
            caller = find_caller(session, find_api_key())
            records = get_online_worker_records(session, clock.utcnow())
        privilege = MODERATOR if caller is not None and caller.is_moderator else PUBLIC
        return [narrow_details(record, privilege) for record in records if is_wanted(record, query)]


@namespace.route("/<string:worker_id>")
class Worker(Resource):
    """One worker, by its id."""

    @namespace.doc(params=OPTIONAL_KEY)
    @namespace.response(200, "The worker", worker_details)
    @namespace.response(404, "WorkerNotFound")
    @limit_worker
    def get(self, worker_id: str) -> Details:
        """Details of a worker, online or not; at most 30 seconds old."""
        parsed = parse_id(worker_id)
        with transaction() as session:
            caller = find_caller(session, find_api_key())
            record = None if parsed is None else find_worker_record(session, parsed, clock.utcnow())
        if record is None:
            raise NotFound(
                f"Worker with ID '{worker_id[:64]}' not found.", ReturnCode.WORKER_NOT_FOUND
            )
        return narrow_details(record, get_privilege(caller, record))

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.expect(modify_worker_input, validate=False)
    @namespace.response(200, "What was changed", modify_worker)
    @namespace.response(
        400,
        "NoWorkerModSelected, ProfaneWorkerInfo, ProfaneWorkerName, TooLongWorkerName, WorkerNameAlreadyExists",
    )
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbiddenWorker, NotOwner, NotModerator")
    @namespace.response(404, "WorkerNotFound, TeamNotFound")
    @limit_worker
    def put(self, worker_id: str) -> Details:
        """Change a worker, as its owner or a moderator; only moderators pause. Answers with what
        was changed.
        """
        changes = read_body(WorkerChanges)
        api_key = require_api_key()

        def work(session: Session) -> Details:
            worker = require_worker(session, worker_id)
            caller = require_manager(session, api_key)
            names = {worker.name, changes.name or worker.name}
            check_may_change(caller, worker, changes)
            answer = change_worker(session, worker, changes)
            announce_worker_change(session, worker.id, *names)
            return answer

        return run_transaction(work)

    @namespace.doc(params=REQUIRED_KEY)
    @namespace.response(200, "The worker is gone", deleted_worker)
    @namespace.response(401, "InvalidAPIKey")
    @namespace.response(403, "AnonForbiddenWorker, NotModerator")
    @namespace.response(404, "WorkerNotFound")
    @namespace.response(423, "Locked")
    @limit_worker
    def delete(self, worker_id: str) -> Details:
        """Delete a worker, as its owner or a moderator; refused while a job refers to it."""
        api_key = require_api_key()

        def work(session: Session) -> Details:
            worker = require_worker(session, worker_id)
            caller = require_manager(session, api_key)
            if not manages(caller, worker):
                raise Forbidden(f"Worker '{worker.name}' is not yours.", ReturnCode.NOT_MODERATOR)
            answer = {"deleted_id": str(worker.id), "deleted_name": worker.name}
            delete_worker(session, worker)
            announce_worker_change(session, worker.id, worker.name)
            return answer

        return run_transaction(work)


@namespace.route("/name/<path:worker_name>")
class WorkerByName(Resource):
    """One worker, by its exact name."""

    @namespace.doc(params=OPTIONAL_KEY)
    @namespace.response(200, "The worker", worker_details)
    @namespace.response(404, "WorkerNotFound")
    def get(self, worker_name: str) -> Details:
        """As by its id."""
        with transaction() as session:
            caller = find_caller(session, find_api_key())
            record = find_worker_record_by_name(session, worker_name, clock.utcnow())
        if record is None:
            raise NotFound(
                f"Worker with name '{worker_name[:MAX_NAME_LENGTH]}' not found.",
                ReturnCode.WORKER_NOT_FOUND,
            )
        return narrow_details(record, get_privilege(caller, record))


def is_wanted(record: WorkerRecord, query: WorkersQuery) -> bool:
    """Whether the list asked for shows the worker."""
    if query.name is not None:
        return str(record.details["name"]).casefold() == query.name.casefold()
    return query.type is None or query.type == record.details["type"]


def get_privilege(caller: Caller | None, record: WorkerRecord) -> int:
    """How much of the worker the caller sees."""
    if caller is None:
        return PUBLIC
    if caller.is_moderator:
        return MODERATOR
    return OWNER if caller.id == record.owner_id and not caller.is_anonymous else PUBLIC


def require_manager(session: Session, api_key: str) -> Caller:
    """The account behind a key, which has to be one that can own workers."""
    caller = find_caller(session, api_key)
    if caller is None:
        raise Unauthorized("No user with this API key.", ReturnCode.INVALID_API_KEY)
    if caller.is_anonymous:
        raise Forbidden("Anonymous cannot manage workers.", ReturnCode.ANON_FORBIDDEN_WORKER)
    return caller


def manages(caller: Caller, worker: TextWorker) -> bool:
    """Whether the caller owns the worker or looks after all of them."""
    return caller.is_moderator or caller.id == worker.user_id


def check_may_change(caller: Caller, worker: TextWorker, changes: WorkerChanges) -> None:
    """Refuse changes the caller may not make, and a request that makes none."""
    wanted = changes.model_dump(exclude_none=True).keys()
    if not wanted:
        raise BadRequest("No change of the worker was selected.", ReturnCode.NO_WORKER_MOD_SELECTED)
    if "paused" in wanted and not caller.is_moderator:
        raise Forbidden("Only a moderator can pause a worker.", ReturnCode.NOT_MODERATOR)
    if manages(caller, worker):
        return
    if wanted == {"name"}:
        raise Forbidden(f"Worker '{worker.name}' is not yours to rename.", ReturnCode.NOT_MODERATOR)
    raise Forbidden(f"Worker '{worker.name}' is not yours.", ReturnCode.NOT_OWNER)


def change_worker(session: Session, worker: TextWorker, changes: WorkerChanges) -> Details:
    """Apply the changes; the keys of the answer are those that were sent."""
    answer: Details = {}
    if changes.maintenance is not None:
        answer["maintenance"] = worker.maintenance = changes.maintenance
        worker.maintenance_msg = DEFAULT_MAINTENANCE_MESSAGE
    if changes.maintenance_msg is not None:
        answer["maintenance_msg"] = worker.maintenance_msg = clean_shown_text(
            changes.maintenance_msg
        )
    if changes.paused is not None:
        answer["paused"] = worker.paused = changes.paused
    if changes.info is not None:
        answer["info"] = worker.info = check_info(changes.info)
    if changes.name is not None:
        rename_worker(session, worker, check_name(changes.name))
        answer["name"] = worker.name
    if changes.team is not None:
        answer["team"] = change_team(session, worker, changes.team)
    return answer


def check_info(info: str) -> str:
    """The description as it is shown; raises BadRequest when it is not fit to be."""
    info = clean_shown_text(info)
    if len(info) > MAX_INFO_LENGTH:
        raise BadRequest(
            f"The info is longer than {MAX_INFO_LENGTH} characters.",
            ReturnCode.TOO_LONG_WORKER_NAME,
        )
    if is_profane(info):
        raise BadRequest("The info holds profanity.", ReturnCode.PROFANE_WORKER_INFO)
    return info


def check_name(name: str) -> str:
    """The name as a pop would store it too; raises BadRequest when it is not fit to be shown."""
    name = clean_shown_text(name)
    if len(name) < MIN_NAME_LENGTH:
        raise PayloadInvalid(
            {"name": f"String should have at least {MIN_NAME_LENGTH} visible characters"}
        )
    if len(name) > MAX_NAME_LENGTH:
        raise BadRequest(
            f"The name is longer than {MAX_NAME_LENGTH} characters.",
            ReturnCode.TOO_LONG_WORKER_NAME,
        )
    if is_profane(name):
        raise BadRequest("The name holds profanity.", ReturnCode.PROFANE_WORKER_NAME)
    return name


def change_team(session: Session, worker: TextWorker, team: str) -> str:
    """Join a team by its id, or leave with an empty one; the team's name, or the text None."""
    if team == "":
        worker.team_id = None
        return "None"
    team_id = parse_id(team)
    team_name = None if team_id is None else find_team_name(session, team_id)
    if team_name is None:
        raise NotFound(f"Team with ID '{team[:64]}' not found.", ReturnCode.TEAM_NOT_FOUND)
    worker.team_id = team_id
    return team_name


def register(api: Api) -> None:
    """Add the routes."""
    api.add_namespace(namespace)
