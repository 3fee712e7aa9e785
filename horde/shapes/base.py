# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the shapes of bodies, query strings and answers have in common."""

from enum import StrEnum
from typing import Annotated, Any, NotRequired, TypedDict

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)

from horde.exceptions import PayloadInvalid

MAX_MODEL_NAME_LENGTH = 255

# Of the values of an array the first bad one alone is reported: a million errors take the whole
# process for half a minute.
type Values[T] = Annotated[list[T], FailFast()]


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


class LenientBody(Body):
    """A body of the text routes: null is as absent wherever a key is optional."""

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, data: object) -> Any:
        """Clients serialise unset options as null."""
        return (
            {key: value for key, value in data.items() if value is not None}
            if isinstance(data, dict)
            else data
        )


class Query(BaseModel):
    """A query string: values arrive as text, so numbers and booleans are read from it."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Answer(BaseModel):
    """What a route answers with; an action builds it."""

    model_config = ConfigDict(frozen=True)

    def dump(self) -> dict[str, object]:
        """The JSON object, null values included."""
        return self.model_dump(mode="json")


class SparseAnswer(Answer):
    """An answer that leaves out the keys without a value."""

    def dump(self) -> dict[str, object]:
        """The JSON object without its null values."""
        return self.model_dump(mode="json", exclude_none=True)


class RequestError(TypedDict):
    """A refusal."""

    message: Annotated[str, Field(description="For people.")]
    rc: NotRequired[
        Annotated[str, Field(description="For programs; see the list of return codes.")]
    ]
    errors: NotRequired[
        Annotated[
            dict[str, str],
            Field(description="From path to text, when the body breaks its schema."),
        ]
    ]


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


def parse_shape[M: BaseModel](shape: type[M], values: object) -> M:
    """What was sent as `shape`; raises PayloadInvalid with a dotted path for each fault."""
    try:
        return shape.model_validate(values)
    except ValidationError as error:
        # The messages of pydantic name types and bounds; the values themselves, which may be
        # secrets, are left out.
        found = error.errors(include_input=False, include_url=False, include_context=False)
        raise PayloadInvalid(
            {".".join(str(part) for part in fault["loc"]): fault["msg"] for fault in found}
        ) from None
