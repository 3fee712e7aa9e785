# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the shapes of bodies, query strings and answers have in common."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class ModelType(StrEnum):
    """Kinds of models and of their workers; this horde serves text."""

    IMAGE = "image"
    TEXT = "text"
    INTERROGATION = "interrogation"


class Body(BaseModel):
    """A body: unknown keys are ignored, null is as absent where a key is optional, and a string is
    never a number.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Query(BaseModel):
    """A query string: values arrive as text, so numbers and booleans are read from it."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Answer(BaseModel):
    """What a route answers with; an action builds it."""

    model_config = ConfigDict(frozen=True)

    def dump(self) -> dict[str, Any]:
        """The JSON object, null values included."""
        return self.model_dump(mode="json")


class SparseAnswer(Answer):
    """An answer that leaves out the keys without a value."""

    def dump(self) -> dict[str, Any]:
        """The JSON object without its null values."""
        return self.model_dump(mode="json", exclude_none=True)


class SimpleResponse(Answer):
    """The answer of an act that has nothing to show."""

    message: str = "OK"


class ReasonBody(Body):
    """A body of a moderator's act, which may say why."""

    reason: Annotated[
        str | None, Field(max_length=500, description="Why; kept in the list of acts.")
    ] = None


class ReasonQuery(Query):
    """The query of a moderator's act without a body, which may say why."""

    reason: Annotated[str | None, Field(max_length=500)] = None


def _read_whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_read_whole)]
"""An integer, also when a client writes it as 1.0."""
