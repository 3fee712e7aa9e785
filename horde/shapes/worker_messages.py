# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the messages to workers."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from horde.shapes.base import Body, ModelType, Query, SparseAnswer, WholeNumber

MAX_MESSAGE_LENGTH = 10_240
MAX_ORIGIN_LENGTH = 255
MAX_EXPIRY_HOURS = 720
MAX_ADDRESSED_WORKERS = 100

type WorkerId = Annotated[str, Field(min_length=36, max_length=36)]


class Validity(StrEnum):
    """Which messages are listed."""

    ACTIVE = "active"
    EXPIRED = "expired"
    ALL = "all"


class WorkerMessageInput(Body):
    """A message to one worker, to several, to all of a kind, or to all there are."""

    worker_id: Annotated[WorkerId | None, Field(description="One worker.")] = None
    worker_ids: Annotated[
        list[WorkerId] | None,
        Field(min_length=1, max_length=MAX_ADDRESSED_WORKERS, description="Several workers."),
    ] = None
    worker_type: Annotated[
        ModelType | None,
        Field(strict=False, description="All workers of a kind; moderators only."),
    ] = None
    message: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE_LENGTH)]
    origin: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=MAX_ORIGIN_LENGTH,
            description="Whom it is from; only moderators choose.",
        ),
    ] = None
    expiry: Annotated[
        WholeNumber, Field(ge=1, le=MAX_EXPIRY_HOURS, description="Hours it is delivered for.")
    ] = 12


class WorkerMessagesQuery(Query):
    """The query string of the list."""

    user_id: Annotated[int | None, Field(description="Messages that this account wrote.")] = None
    worker_id: Annotated[str | None, Field(description="Messages to this worker.")] = None
    validity: Validity = Validity.ACTIVE
    page: Annotated[int, Field(ge=1, le=10_000, description="50 messages a page.")] = 1


class WorkerMessageDetails(SparseAnswer):
    """A message. Without `worker_id` it is for all workers, or for all of `worker_type`."""

    id: str
    worker_id: str | None = None
    worker_type: ModelType | None = None
    user_id: str
    message: str
    origin: str
    expiry: Annotated[str, Field(description="RFC 822")]
    created: Annotated[str, Field(description="RFC 822")]


class PostedWorkerMessage(WorkerMessageDetails):
    """The message as it was posted; to several workers, the first of as many messages."""

    ids: Annotated[
        list[str] | None, Field(description="With `worker_ids`: the messages, in their order.")
    ] = None
