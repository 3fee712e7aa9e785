# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the team routes."""

from typing import Annotated

from pydantic import Field

from horde.shapes.base import Answer, ModelType, ReasonBody, SparseAnswer

MIN_TEAM_TEXT_LENGTH = 3
MAX_TEAM_NAME_LENGTH = 100
MAX_TEAM_INFO_LENGTH = 1000

type TeamName = Annotated[
    str, Field(min_length=MIN_TEAM_TEXT_LENGTH, max_length=MAX_TEAM_NAME_LENGTH)
]
type TeamInfo = Annotated[
    str,
    Field(
        min_length=MIN_TEAM_TEXT_LENGTH,
        max_length=MAX_TEAM_INFO_LENGTH,
        description="What the team is for, shown to everybody.",
    ),
]


class CreateTeamInput(ReasonBody):
    """A new team."""

    name: TeamName
    info: TeamInfo | None = None


class ModifyTeamInput(ReasonBody):
    """What may be changed of a team."""

    name: TeamName | None = None
    info: TeamInfo | None = None


class ModifyTeam(SparseAnswer):
    """The team as it was made, or what of it was changed."""

    id: str
    name: str | None = None
    info: str | None = None


class DeletedTeam(Answer):
    """The team that is gone."""

    deleted_id: str
    deleted_name: str


class TeamWorker(Answer):
    """A worker of a team."""

    type: ModelType
    name: str
    id: str
    online: bool


class TeamModel(Answer):
    """A model that workers of a team serve."""

    name: str
    count: Annotated[int, Field(description="Online workers of the team that serve it.")]


class TeamDetails(SparseAnswer):
    """A team as everybody sees it."""

    name: str
    id: str
    info: str | None = None
    requests_fulfilled: int
    kudos: float
    uptime: Annotated[int, Field(description="Seconds its workers were online, together.")]
    creator: str
    worker_count: int
    workers: list[TeamWorker]
    models: list[TeamModel]
