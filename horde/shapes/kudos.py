# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the kudos routes: gifts from account to account, and awards."""

from typing import Annotated

from pydantic import Field

from horde.shapes.base import Answer, Body, ReasonBody, WholeNumber
from horde.shapes.users import MAX_ADJUSTMENT

MAX_IDEMPOTENCY_KEY_LENGTH = 255


class KudosTransferInput(Body):
    """A gift."""

    username: Annotated[
        str, Field(description="Who gets them: an alias, name#id, or the id of a shared key.")
    ]
    amount: Annotated[WholeNumber, Field(le=MAX_ADJUSTMENT, description="Whole kudos.")] = 100


class KudosTransferred(Answer):
    """What was given."""

    transferred: int


class KudosAwardInput(ReasonBody):
    """An award."""

    username: Annotated[str, Field(description="Who gets them: an alias, name#id.")]
    amount: Annotated[WholeNumber, Field(le=MAX_ADJUSTMENT, description="Whole kudos.")] = 100


class KudosAwarded(Answer):
    """What was awarded."""

    awarded: int
