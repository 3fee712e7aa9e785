# SPDX-License-Identifier: AGPL-3.0-or-later
"""Teams: who makes them, changes them and dissolves them."""

from uuid import UUID

from sqlalchemy.orm import Session

from horde import clock
from horde.actions.actors import Actor, By, require_actor, require_moderator
from horde.actions.acts import record_act
from horde.classes.base.team import Team
from horde.database import teams
from horde.database.workers import announce_worker_change, parse_id
from horde.db import after_commit, run_transaction, transaction
from horde.exceptions import BadRequest, Forbidden, PayloadInvalid
from horde.return_codes import ReturnCode
from horde.shapes.acts import ModeratorAction
from horde.shapes.teams import (
    MIN_TEAM_TEXT_LENGTH,
    CreateTeamInput,
    DeletedTeam,
    ModifyTeam,
    ModifyTeamInput,
    TeamDetails,
)
from horde.shown_text import clean_shown_text, is_profane
from horde.written_answer import WrittenAnswer


def list_teams() -> WrittenAnswer:
    """Every team, oldest first."""
    with transaction() as session:
        return teams.get_teams(session, clock.utcnow())


def show_team(by: By | None, team_id: str) -> TeamDetails:
    """One team. Errors: NotFound; Unauthorized and Forbidden for a key that no moderator has."""
    parsed = parse_id(team_id)
    with transaction() as session:
        if by is not None:
            require_moderator(session, by)
        details = (
            None if parsed is None else teams.find_team_details(session, parsed, clock.utcnow())
        )
    if details is None:
        raise teams.team_not_found(team_id)
    return details


def create_team(by: By, body: CreateTeamInput) -> ModifyTeam:
    """A new team of a trusted account.

    Errors: Unauthorized, Forbidden for who may not, BadRequest for a name or an info that cannot
    be.
    """

    def work(session: Session) -> ModifyTeam:
        actor = require_actor(session, by)
        owner_id = _require_founder(actor)
        now = clock.utcnow()
        team = Team(
            name=_claim_name(session, body.name),
            info=None if body.info is None else _clean_info(body.info),
            owner_id=owner_id,
            contributions=0,
            fulfilments=0,
            kudos=0,
            uptime=0,
            created=now,
            last_active=now,
        )
        session.add(team)
        session.flush()
        _show_changed(session, team.id)
        return ModifyTeam(id=str(team.id), name=team.name, info=team.info)

    return run_transaction(work)


def change_team(by: By, team_id: str, body: ModifyTeamInput) -> ModifyTeam:
    """Change a team, as its owner or a moderator; what was changed.

    Errors: Unauthorized, Forbidden, NotFound, BadRequest.
    """

    def work(session: Session) -> ModifyTeam:
        actor = require_actor(session, by)
        team = teams.lock_team(session, team_id)
        changes = body.model_dump(exclude_none=True, exclude={"reason"})
        if not changes:
            raise BadRequest("No change of the team was selected.", ReturnCode.NO_TEAM_MOD_SELECTED)
        if not _manages(actor, team):
            rc = ReturnCode.NOT_MODERATOR if changes.keys() == {"name"} else ReturnCode.NOT_OWNER
            raise Forbidden(f"Team '{team.name}' is not yours.", rc)
        if body.name is not None:
            changes["name"] = team.name = _claim_name(session, body.name, besides=team.id)
        if body.info is not None:
            changes["info"] = team.info = _clean_info(body.info)
        _record(session, actor, ModeratorAction.TEAM_CHANGED, team, body.reason, changes=changes)
        _show_changed(session, team.id)
        return ModifyTeam(id=str(team.id), **changes)

    return run_transaction(work)


def delete_team(by: By, team_id: str, reason: str | None = None) -> DeletedTeam:
    """Dissolve a team, as its owner or a moderator; its workers leave it.

    Errors: Unauthorized, Forbidden, NotFound.
    """

    def work(session: Session) -> DeletedTeam:
        actor = require_actor(session, by)
        team = teams.lock_team(session, team_id)
        if not _manages(actor, team):
            raise Forbidden(f"Team '{team.name}' is not yours.", ReturnCode.NOT_MODERATOR)
        answer = DeletedTeam(deleted_id=str(team.id), deleted_name=team.name)
        _record(session, actor, ModeratorAction.TEAM_DELETED, team, reason)
        for worker_id, worker_name in teams.delete_team(session, team):
            announce_worker_change(session, worker_id, worker_name)
        _show_changed(session, team.id)
        return answer

    return run_transaction(work)


def _require_founder(actor: Actor) -> int:
    """The account a team is made for; the operator's belong to nobody, so they cannot be made."""
    account = actor.account
    if account is None or account.is_anonymous:
        raise Forbidden("Anonymous cannot create a team.", ReturnCode.ANON_FORBIDDEN)
    if account.is_deleted:
        raise Forbidden("This account is scheduled for deletion.", ReturnCode.DELETED_USER)
    if not account.is_trusted:
        raise Forbidden("Only trusted users can create a team.", ReturnCode.UNTRUSTED_TEAM_CREATION)
    return account.id


def _manages(actor: Actor, team: Team) -> bool:
    is_anonymous = actor.account is not None and actor.account.is_anonymous
    return actor.is_moderator or (actor.owns(team.owner_id) and not is_anonymous)


def _claim_name(session: Session, name: str, *, besides: UUID | None = None) -> str:
    """The name as it is shown, claimed for the transaction; raises BadRequest for one that cannot
    be.
    """
    name = _clean("name", name)
    if is_profane(name):
        raise BadRequest("The team's name holds profanity.", ReturnCode.PROFANE_TEAM_NAME)
    if not teams.claim_team_name(session, name, besides=besides):
        raise BadRequest(
            f"The name '{name}' is taken by another team.", ReturnCode.TEAM_NAME_ALREADY_EXISTS
        )
    return name


def _clean_info(info: str) -> str:
    """The info as it is shown; raises BadRequest for one that cannot be."""
    info = _clean("info", info)
    if is_profane(info):
        raise BadRequest("The team's info holds profanity.", ReturnCode.PROFANE_TEAM_INFO)
    return info


def _clean(key: str, text: str) -> str:
    text = clean_shown_text(text)
    if len(text) < MIN_TEAM_TEXT_LENGTH:
        raise PayloadInvalid(
            {key: f"String should have at least {MIN_TEAM_TEXT_LENGTH} visible characters"}
        )
    return text


def _record(
    session: Session,
    actor: Actor,
    action: ModeratorAction,
    team: Team,
    reason: str | None,
    **details: object,
) -> None:
    """Record an act on a team of somebody else."""
    if not actor.owns(team.owner_id):
        record_act(session, actor, action, f"team {team.id}", reason, name=team.name, **details)


def _show_changed(session: Session, team_id: UUID) -> None:
    after_commit(session, lambda: teams.forget_team(team_id))
