# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the worker routes: which workers are listed, and how one is changed."""

from typing import Annotated, TypedDict

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


class WorkerKudosDetails(TypedDict, total=False):
    """What a worker earned, by what for."""

    generated: float
    uptime: float


class TeamDetailsLite(TypedDict):
    """A worker's team."""

    name: str | None
    id: str | None


class ChatLimits(TypedDict, total=False):
    """How much a worker takes of a chat job."""

    max_context_length: int
    max_length: int
    tools_max_temperature: float


class WorkerChatDeclaration(TypedDict, total=False):
    """What a worker declares for chat jobs."""

    model_id: str
    features: list[str]
    limits: ChatLimits
    image_transports: list[str]


class WorkerDetails(TypedDict, total=False):
    """A worker. Keys without a value are left out, but for those of `team`."""

    type: ModelType
    name: str
    id: str
    online: Annotated[bool, Field(description="It polled within the last 300 seconds.")]
    requests_fulfilled: int
    uncompleted_jobs: Annotated[int, Field(description="Jobs it took and did not finish.")]
    nonconformant_replies: Annotated[
        int, Field(description="Replies refused for breaking a strict chat request.")
    ]
    kudos_rewards: float
    kudos_details: WorkerKudosDetails
    performance: Annotated[str, Field(description="Such as: 14.2 tokens per second.")]
    threads: int
    uptime: Annotated[int, Field(description="Seconds.")]
    maintenance_mode: bool
    info: str
    nsfw: bool
    trusted: bool
    flagged: bool
    models: list[str]
    team: TeamDetailsLite
    bridge_agent: str
    max_length: Annotated[int, Field(description="Tokens, of text jobs.")]
    max_context_length: Annotated[int, Field(description="Tokens, of text jobs.")]
    accepts_chat_jobs: bool
    accepts_prompt_jobs: bool
    chat: Annotated[
        WorkerChatDeclaration, Field(description="Absent when the worker takes no chat jobs.")
    ]
    owner: Annotated[
        str, Field(description="When the owner shows it, and to the owner and moderators.")
    ]
    messages: Annotated[list[dict[str, object]], Field(description="As owner.")]
    paused: Annotated[bool, Field(description="Moderators only.")]
    suspicious: Annotated[int, Field(description="Moderators only.")]
    ipaddr: Annotated[str, Field(description="Moderators only.")]
    contact: Annotated[str, Field(description="Moderators only.")]
