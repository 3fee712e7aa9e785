# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the worker routes: which workers are listed, and how one is changed."""

from typing import Annotated

from pydantic import Field

from horde.shapes.base import ModelType, Query, ReasonBody, SparseAnswer

MIN_WORKER_NAME_LENGTH = 5
MAX_WORKER_NAME_LENGTH = 100
MAX_WORKER_INFO_LENGTH = 1000


class WorkersQuery(Query):
    """The query string of the worker list."""

    type: ModelType | None = None
    name: Annotated[
        str | None,
        Field(description="One worker's name, in any case; the type is then ignored."),
    ] = None


class ModifyWorkerInput(ReasonBody):
    """What may be changed of a worker. Too long a name or info has a code of its own."""

    maintenance: Annotated[bool | None, Field(description="It gets its owner's requests only.")] = (
        None
    )
    maintenance_msg: Annotated[
        str | None, Field(max_length=300, description="What its pops are told meanwhile.")
    ] = None
    paused: Annotated[bool | None, Field(description="Moderators only.")] = None
    info: Annotated[str | None, Field(description="At most 1000 characters.")] = None
    name: Annotated[
        str | None,
        Field(min_length=MIN_WORKER_NAME_LENGTH, description="At most 100 characters."),
    ] = None
    team: Annotated[
        str | None,
        Field(max_length=36, description="A team's id, or empty to leave the team."),
    ] = None


class ModifyWorker(SparseAnswer):
    """What was changed."""

    maintenance: bool | None = None
    maintenance_msg: str | None = None
    paused: bool | None = None
    info: str | None = None
    name: str | None = None
    team: Annotated[str | None, Field(description="The team's name, or the text None.")] = None


class DeletedWorker(SparseAnswer):
    """The worker that is gone."""

    deleted_id: str
    deleted_name: str
