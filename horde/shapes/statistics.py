# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the statistics of text."""

from typing import Annotated

from pydantic import Field

from horde.shapes.base import Answer


class SinglePeriodTxtStat(Answer):
    """What ended within a period."""

    requests: Annotated[int, Field(description="Generations, those that failed included.")] = 0
    tokens: Annotated[int, Field(description="Tokens that were asked for.")] = 0


class StatsTxtTotals(Answer):
    """What ended within the last minute, hour, day and 30 days, and in all time."""

    minute: SinglePeriodTxtStat
    hour: SinglePeriodTxtStat
    day: SinglePeriodTxtStat
    month: SinglePeriodTxtStat
    total: SinglePeriodTxtStat


class TxtModelStats(Answer):
    """Generations by model, in the last day, in 30 days and in all time."""

    day: dict[str, int]
    month: dict[str, int]
    total: dict[str, int]
