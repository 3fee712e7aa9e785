# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the switches of the whole horde."""

from typing import Annotated

from pydantic import Field

from horde.shapes.base import ReasonBody, SparseAnswer


class HordeModesInput(ReasonBody):
    """The switches to set."""

    maintenance_mode: Annotated[
        bool | None, Field(description="Admins. New requests are refused, waiting ones end.")
    ] = None
    invite_only_mode: Annotated[
        bool | None, Field(description="Moderators. New workers need an invitation.")
    ] = None
    raid_mode: Annotated[
        bool | None, Field(description="Moderators. Nobody registers; unsafe workers are let in.")
    ] = None


class HordeModes(SparseAnswer):
    """The switches as they are, or those that were set."""

    maintenance_mode: bool | None = None
    invite_only_mode: bool | None = None
    raid_mode: Annotated[bool | None, Field(description="With a moderator's key.")] = None
