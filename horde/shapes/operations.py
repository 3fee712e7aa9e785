# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the routes by which moderators refuse addresses."""

from typing import Annotated

from pydantic import Field

from horde.shapes.base import Answer, ReasonBody, WholeNumber

MAX_TIMEOUT_HOURS = 720
MAX_TIMEOUT_DAYS = 30

type AddressText = Annotated[
    str,
    Field(
        min_length=2,
        max_length=50,
        description="An IPv4 or IPv6 address, or a network such as 198.51.100.0/24.",
    ),
]


class IPTimeout(Answer):
    """An address or a network that is refused."""

    ipaddr: str
    seconds: Annotated[int, Field(description="For how long yet.")]


class AddTimeoutIPInput(ReasonBody):
    """An address to refuse."""

    ipaddr: AddressText
    hours: Annotated[WholeNumber, Field(ge=1, le=MAX_TIMEOUT_HOURS)]


class DeleteTimeoutIPInput(ReasonBody):
    """An address to refuse no longer."""

    ipaddr: AddressText


class AddWorkerTimeout(ReasonBody):
    """For how long a worker's address is refused."""

    days: Annotated[WholeNumber, Field(ge=1, le=MAX_TIMEOUT_DAYS)]
