# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the evidence that moderators read, and of their notes on it.

A query holds texts: what is wrong with each of them has a code of its own, so the use case reads
them.
"""

from typing import Annotated, Any

from pydantic import Field

from horde.shapes.base import Answer, Body, Query

MAX_EVENTS_A_PAGE = 100
DEFAULT_EVENTS_A_PAGE = 50
MAX_NOTE_LENGTH = 2000


class EvidenceQuery(Query):
    """The query string of the list."""

    event_id: Annotated[str | None, Field(description="This event alone.")] = None
    user_id: Annotated[str | None, Field(description="Prompts of this account.")] = None
    proxied_account: Annotated[
        str | None, Field(description="Prompts that a service sent for this account of its own.")
    ] = None
    ipaddr: Annotated[
        str | None, Field(description="Prompts from this address, or of IPv6 from its /64.")
    ] = None
    ip_subject_key: Annotated[
        str | None, Field(description="As `ipaddr`, by what an event shows of its address.")
    ] = None
    worker_id: Annotated[str | None, Field(description="What this worker reported.")] = None
    since: Annotated[str | None, Field(description="From this moment on (ISO 8601, UTC).")] = None
    until: Annotated[str | None, Field(description="Before this moment (ISO 8601, UTC).")] = None
    limit: Annotated[
        str | None, Field(description="Events of the answer, 1 to 100; 50 unless it is sent.")
    ] = None
    before_id: Annotated[
        str | None, Field(description="Events older than this one, to go on after a page.")
    ] = None


class EvidencePrompts(Answer):
    """A prompt in its stages, each cut after 16,000 characters."""

    submitted: Annotated[str, Field(description="As it was sent.")]
    moderation: Annotated[str | None, Field(description="As it was judged, in its template.")]
    effective: Annotated[str | None, Field(description="What a worker got, or would have got.")]


class EvidenceNote(Answer):
    """What a moderator noted."""

    id: int
    created: Annotated[str, Field(description="RFC 822")]
    user_id: Annotated[int | None, Field(description="Who; null for the operator.")]
    username: str
    note: str


class EvidenceEvent(Answer):
    """A prompt that was refused or reported."""

    id: int
    created: Annotated[str, Field(description="RFC 822")]
    reason: Annotated[
        str, Field(description="`filter_rejection`, `model_rejection` or `worker_csam`.")
    ]
    user_id: int | None
    proxied_account: str | None
    ipaddr: Annotated[str | None, Field(description="Null once its time is over.")]
    ip_subject_key: Annotated[
        str | None, Field(description="The same for events of one address, which it does not tell.")
    ]
    worker_id: str | None
    models: list[str]
    is_chat: bool
    is_anonymised: Annotated[bool, Field(description="Whether nothing names anybody any more.")]
    text: Annotated[
        str,
        Field(
            description="`none` when no text was kept, `waiting` or `stored` while it is,"
            " `unavailable` when the store does not hand it out, `deleting` and `deleted` after."
        ),
    ]
    prompts: EvidencePrompts | None
    notes: list[EvidenceNote]


class EvidenceNoteInput(Body):
    """A note."""

    # Of any type: what is no text of the right length is refused with a code of its own.
    note: Annotated[
        Any,
        Field(
            description=f"A text of 1 to {MAX_NOTE_LENGTH} characters.",
            json_schema_extra={"type": "string", "minLength": 1, "maxLength": MAX_NOTE_LENGTH},
        ),
    ] = None
