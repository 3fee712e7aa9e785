# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the account routes: who an account is, how it is changed, and lists of accounts."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from horde.shapes.base import Body, Query, ReasonBody, SparseAnswer, WholeNumber

ANONYMOUS_KEY = "0000000000"
MAX_USERNAME_LENGTH = 30
MAX_ADJUSTMENT = 10**12
"""Kudos in one administrative change: far above any balance, far below what a column holds."""
MAX_MONTHLY_KUDOS = 10**9
MAX_WORKER_INVITED = 10_000


class UserSort(StrEnum):
    """Orders of the list: the richest first, or the oldest first."""

    KUDOS = "kudos"
    AGE = "age"


class UsersQuery(Query):
    """The query string of the list."""

    page: Annotated[int, Field(ge=1, description="25 accounts a page.")] = 1
    sort: Annotated[UserSort, Field(description="Richest or oldest first.")] = UserSort.KUDOS


class UserKudosDetails(SparseAnswer):
    """Signed sums by why kudos moved: what was given is negative."""

    accumulated: int = 0
    gifted: int = 0
    donated: int = 0
    admin: int = 0
    received: int = 0
    recurring: int = 0
    awarded: int = 0
    styled: int = 0


class MonthlyKudos(SparseAnswer):
    """What an account gets every month."""

    amount: int
    last_received: Annotated[str | None, Field(description="RFC 822")] = None


class UserThingRecords(SparseAnswer):
    """Work by kind."""

    megapixelsteps: Annotated[float, Field(description="Image work.")] = 0
    tokens: Annotated[int, Field(description="Text work.")] = 0


class UserAmountRecords(SparseAnswer):
    """Counts by kind of work."""

    image: int = 0
    text: int = 0
    interrogation: int = 0


class UserRecords(SparseAnswer):
    """Lifetime records."""

    usage: UserThingRecords = UserThingRecords()
    contribution: UserThingRecords = UserThingRecords()
    fulfillment: UserAmountRecords = UserAmountRecords()
    request: UserAmountRecords = UserAmountRecords()
    style: UserAmountRecords = UserAmountRecords()


class UserActiveGenerations(SparseAnswer):
    """Requests that are not done, by kind; those of chat are left out."""

    text: list[str] = Field(default_factory=list)
    image: list[str] = Field(default_factory=list)
    alchemy: list[str] = Field(default_factory=list)


class ResponseModelStylesUser(SparseAnswer):
    """A style of the account."""

    name: str
    id: str
    type: str


OWNER = "Owner and moderators."
MODERATORS = "Moderators only."


class UserDetails(SparseAnswer):
    """An account as its viewer may see it."""

    username: Annotated[str, Field(description="The public name, name#id.")]
    id: Annotated[int, Field(description="0 is the anonymous account.")]
    kudos: Annotated[int, Field(description="The balance as folded last, within seconds.")]
    evaluating_kudos: Annotated[
        int | None,
        Field(description="Moderators only. Rewards held until the account is trusted."),
    ] = None
    concurrency: Annotated[int, Field(description="Generations that may wait at once.")]
    worker_invited: Annotated[int, Field(description="Workers beyond the usual number.")]
    moderator: bool
    kudos_details: UserKudosDetails
    worker_count: int
    worker_ids: Annotated[
        list[str] | None, Field(description="For the owner, or with public_workers.")
    ] = None
    styles: list[ResponseModelStylesUser]
    sharedkey_ids: Annotated[list[str] | None, Field(description=OWNER)] = None
    active_generations: Annotated[UserActiveGenerations | None, Field(description=OWNER)] = None
    monthly_kudos: Annotated[MonthlyKudos | None, Field(description=MODERATORS)] = None
    trusted: bool
    flagged: bool
    vpn: Annotated[bool | None, Field(description=OWNER)] = None
    service: bool
    education: bool
    customizer: bool
    special: Annotated[bool | None, Field(description=OWNER)] = None
    deleted: Annotated[bool, Field(description="Marked for deletion.")]
    suspicious: Annotated[int | None, Field(description=MODERATORS)] = None
    pseudonymous: Annotated[bool, Field(description="Registered without an identity provider.")]
    contact: Annotated[str | None, Field(description=OWNER)] = None
    admin_comment: Annotated[str | None, Field(description=MODERATORS)] = None
    proxy_passkey: Annotated[str | None, Field(description=MODERATORS)] = None
    account_age: Annotated[int, Field(description="Seconds since it was made.")]
    usage: dict[str, object] = Field(
        default_factory=dict, description="Superseded by records; empty."
    )
    contributions: dict[str, object] = Field(
        default_factory=dict, description="Superseded by records; empty."
    )
    records: UserRecords


class ModifyUserInput(ReasonBody):
    """What may be changed of an account; each key says who may."""

    kudos: Annotated[
        float | None,
        Field(
            ge=-MAX_ADJUSTMENT,
            le=MAX_ADJUSTMENT,
            description="Admins. Added to the balance; may be negative.",
        ),
    ] = None
    monthly_kudos: Annotated[
        WholeNumber | None,
        Field(
            ge=-MAX_MONTHLY_KUDOS,
            le=MAX_MONTHLY_KUDOS,
            description="Admins. Added to the monthly amount; a gain is paid at once too.",
        ),
    ] = None
    usage_multiplier: Annotated[
        float | None,
        Field(ge=0.1, le=10, description="Admins. Scales the usage record, not the charge."),
    ] = None
    moderator: Annotated[bool | None, Field(description="Admins. Implies trusted.")] = None

    concurrency: Annotated[WholeNumber | None, Field(ge=0, le=500, description="Moderators.")] = (
        None
    )
    worker_invited: Annotated[
        WholeNumber | None, Field(ge=0, le=MAX_WORKER_INVITED, description="Moderators.")
    ] = None
    trusted: Annotated[bool | None, Field(description="Moderators.")] = None
    flagged: Annotated[bool | None, Field(description="Moderators.")] = None
    customizer: Annotated[bool | None, Field(description="Moderators.")] = None
    vpn: Annotated[bool | None, Field(description="Moderators.")] = None
    service: Annotated[bool | None, Field(description="Moderators.")] = None
    education: Annotated[bool | None, Field(description="Moderators.")] = None
    special: Annotated[bool | None, Field(description="Moderators.")] = None
    reset_suspicion: Annotated[
        bool | None, Field(description="Moderators. Any value: forgets the points of suspicion.")
    ] = None
    admin_comment: Annotated[
        str | None, Field(min_length=5, max_length=500, description="Moderators.")
    ] = None

    public_workers: Annotated[bool | None, Field(description="Owner or moderators.")] = None
    username: Annotated[
        str | None, Field(min_length=3, max_length=100, description="Owner or moderators.")
    ] = None
    contact: Annotated[
        str | None, Field(min_length=5, max_length=500, description="Owner or moderators.")
    ] = None
    generate_proxy_passkey: Annotated[
        bool | None, Field(description="Owner or moderators, of a service account.")
    ] = None
    undelete: Annotated[
        bool | None, Field(description="Owner or moderators, of an account marked for deletion.")
    ] = None

    def list_changes(self) -> dict[str, object]:
        """What was sent; the two acts of owners count only when they are asked for."""
        sent = self.model_dump(exclude_none=True, exclude={"reason"})
        return {
            key: value
            for key, value in sent.items()
            if value or key not in ("generate_proxy_passkey", "undelete")
        }


class ModifyUser(SparseAnswer):
    """The new values of what was changed."""

    new_kudos: Annotated[
        float | None, Field(description="The balance with everything that is still queued.")
    ] = None
    monthly_kudos: int | None = None
    usage_multiplier: float | None = None
    concurrency: int | None = None
    worker_invited: int | None = None
    moderator: bool | None = None
    trusted: bool | None = None
    flagged: bool | None = None
    customizer: bool | None = None
    vpn: bool | None = None
    service: bool | None = None
    education: bool | None = None
    special: bool | None = None
    new_suspicion: int | None = None
    admin_comment: str | None = None
    public_workers: bool | None = None
    username: str | None = None
    contact: str | None = None
    proxy_passkey: Annotated[str | None, Field(description="Shown once.")] = None
    undeleted: bool | None = None


class TestUserInput(Body):
    """The account a test asks for."""

    username: Annotated[str, Field(min_length=1, max_length=MAX_USERNAME_LENGTH)] = "test_user"
    oauth_id: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=50,
            description="The same id answers with the same account and a new key.",
        ),
    ] = None
    moderator: bool = True
    trusted: bool = True
    kudos: Annotated[
        WholeNumber | None,
        Field(
            ge=-MAX_ADJUSTMENT,
            le=MAX_ADJUSTMENT,
            description="The balance to have; null leaves it.",
        ),
    ] = 10_000


class TestUser(SparseAnswer):
    """A test's account and its key."""

    api_key: str
    user_id: str
    username: str
    alias: str
    kudos: int
    trusted: bool
    moderator: bool
    created: Annotated[bool, Field(description="Whether the account is new.")]
