# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the list of what moderators did."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from horde.shapes.base import Answer, Query


class ModeratorAction(StrEnum):
    """What a moderator or the operator did."""

    USER_CHANGED = "user.changed"
    USER_MARKED_FOR_DELETION = "user.marked_for_deletion"
    USER_WIPED = "user.wiped"
    KEY_RESET = "user.key_reset"
    WORKER_CHANGED = "worker.changed"
    WORKER_DELETED = "worker.deleted"
    TEAM_CHANGED = "team.changed"
    TEAM_DELETED = "team.deleted"
    MESSAGE_POSTED = "message.posted"
    MESSAGE_DELETED = "message.deleted"
    STYLE_DELETED = "style.deleted"
    COLLECTION_DELETED = "collection.deleted"
    MODES_CHANGED = "modes.changed"
    KUDOS_AWARDED = "kudos.awarded"
    KUDOS_MOVED = "kudos.moved"
    FILTER_ADDED = "filter.added"
    FILTER_CHANGED = "filter.changed"
    FILTER_DELETED = "filter.deleted"
    ADDRESS_BLOCKED = "address.blocked"
    ADDRESS_UNBLOCKED = "address.unblocked"
    EVIDENCE_READ = "evidence.read"
    EVIDENCE_NOTED = "evidence.noted"


class ActsQuery(Query):
    """The query string of the list."""

    page: Annotated[int, Field(ge=1, le=10_000, description="50 acts a page, newest first.")] = 1
    user_id: Annotated[int | None, Field(description="Acts of this account.")] = None
    action: Annotated[ModeratorAction | None, Field(description="Acts of this kind.")] = None
    subject: Annotated[str | None, Field(description="Acts on this, such as `user 12`.")] = None


class ModeratorActDetails(Answer):
    """One act."""

    id: int
    created: Annotated[str, Field(description="RFC 822")]
    user_id: Annotated[int | None, Field(description="Who; null for the operator.")]
    username: str
    action: str
    subject: Annotated[str, Field(description="To what, such as `user 12`.")]
    reason: Annotated[str | None, Field(description="Why, when it was said.")]
    details: dict[str, object]
