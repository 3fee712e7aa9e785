# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the shared key routes."""

from typing import Annotated

from pydantic import Field

from horde.shapes.base import Answer, Body, WholeNumber

NEVER = -1
MAX_BUDGET = 50_000_000
MAX_EXPIRY_DAYS = 36_500
LARGEST_LIMIT = 2**31 - 1  # what the columns hold

# The bounds stand inside the optional: outside of it pydantic compares null with them.
Budget = Annotated[WholeNumber, Field(ge=-1, le=MAX_BUDGET)]
Days = Annotated[WholeNumber, Field(ge=NEVER, le=MAX_EXPIRY_DAYS)]
Limit = Annotated[WholeNumber, Field(ge=-1, le=LARGEST_LIMIT)]


class SharedKeyInput(Body):
    """What its owner sets of a shared key; what is left out keeps its value, or has its default on
    a new key.
    """

    kudos: Annotated[
        Budget | None, Field(description="The budget, 5000 by default; -1 is unlimited, 0 empty.")
    ] = None
    expiry: Annotated[
        Days | None, Field(description="Days from now; -1, the default, is never.")
    ] = None
    name: Annotated[
        str | None, Field(min_length=3, max_length=255, description="What the key is for.")
    ] = None
    max_image_pixels: Annotated[Limit | None, Field(description="Of one image; -1 is any.")] = None
    max_image_steps: Annotated[Limit | None, Field(description="Of one image; -1 is any.")] = None
    max_text_tokens: Annotated[
        Limit | None, Field(description="Output of one text or chat job; -1 is any.")
    ] = None


class SharedKeyDetails(Answer):
    """A shared key as everybody sees it."""

    id: Annotated[str, Field(description="The key itself.")]
    username: Annotated[str, Field(description="Its owner, name#id.")]
    name: str | None
    kudos: Annotated[int, Field(description="What is left of the budget; -1 is unlimited.")]
    expiry: Annotated[str | None, Field(description="As in RFC 822; null is never.")]
    utilized: Annotated[int, Field(description="Kudos spent by it.")]
    max_image_pixels: int
    max_image_steps: int
    max_text_tokens: int
