# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the filter routes: rules that prompts are searched by, and what a search found."""

from typing import Annotated

from pydantic import Field

from horde.shapes.base import Answer, Query, ReasonBody, WholeNumber

MAX_REGEX_LENGTH = 4096
MAX_DESCRIPTION_LENGTH = 512
MAX_REPLACEMENT_LENGTH = 255
MAX_TRIED_PROMPT_LENGTH = 100_000

KINDS = "10 and 11 for two groups of words that count as one, 20 for the other; 10 also replaces."

type FilterType = Annotated[WholeNumber, Field(ge=10, le=29, description=KINDS)]
type Regex = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_LENGTH)]
type Description = Annotated[str, Field(max_length=MAX_DESCRIPTION_LENGTH)]
type Replacement = Annotated[
    str, Field(max_length=MAX_REPLACEMENT_LENGTH, description="What a match becomes.")
]


class FiltersQuery(Query):
    """The query string of the list."""

    filter_type: Annotated[int | None, Field(ge=10, le=29)] = None
    contains: Annotated[
        str | None, Field(description="Part of the expression or of the description.")
    ] = None


class FilterRegexQuery(Query):
    """The query string of the combined expressions."""

    filter_type: Annotated[int | None, Field(ge=10, le=29)] = None


class PutNewFilter(ReasonBody):
    """A new rule."""

    regex: Regex
    filter_type: FilterType
    description: Description | None = None
    replacement: Replacement = ""


class PatchExistingFilter(ReasonBody):
    """What may be changed of a rule."""

    regex: Regex | None = None
    filter_type: FilterType | None = None
    description: Description | None = None
    replacement: Replacement | None = None


class TriedPrompt(ReasonBody):
    """A prompt to search."""

    prompt: Annotated[str, Field(max_length=MAX_TRIED_PROMPT_LENGTH)]
    filter_type: Annotated[FilterType | None, Field(description="Only the rules of this type.")] = (
        None
    )


class FilterDetails(Answer):
    """A rule."""

    id: str
    regex: str
    filter_type: int
    description: str | None
    replacement: str
    user: Annotated[str, Field(description="Who added or last changed it.")]


class FilterPromptSuspicion(Answer):
    """What a search found."""

    suspicion: Annotated[
        int, Field(description="How many groups of rules match; from 2 on a prompt is refused.")
    ]
    matches: Annotated[list[str], Field(description="The parts that matched.")]


class FilterRegex(Answer):
    """The rules of one type as one expression."""

    filter_type: int
    regex: str
