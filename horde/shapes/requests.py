# SPDX-License-Identifier: AGPL-3.0-or-later
"""Requests for text and chat, and what is answered to them."""

from typing import Annotated, Any, NotRequired, TypedDict

from pydantic import Field


class RequestAccepted(TypedDict):
    """The answer to a queued request."""

    id: Annotated[
        str, Field(description="Follow the request with it; whoever has it can read the reply.")
    ]
    kudos: Annotated[float, Field(description="The price to expect.")]
    message: NotRequired[
        Annotated[str, Field(description="Only when no online worker can take the request.")]
    ]


class RequestQuote(TypedDict):
    """The answer to a dry run, or to a repeated operation key."""

    kudos: float
    id: NotRequired[str]
    resolved: NotRequired[
        Annotated[dict[str, Any], Field(description="The request as it would run.")]
    ]
