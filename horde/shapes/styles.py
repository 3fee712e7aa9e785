# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of the style and collection routes."""

from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from horde.shapes.base import Answer, Body, Query, SparseAnswer, WholeNumber

STYLES_A_PAGE = 25
MAX_STYLE_NAME_LENGTH = 100
MAX_STYLE_INFO_LENGTH = 1000
MAX_STYLE_PROMPT_LENGTH = 100_000
MAX_STYLE_MODELS = 5
MAX_STYLE_TAGS = 10
MAX_STYLE_TAG_LENGTH = 25
MAX_TEMPLATE_FIELDS = 16
MAX_COLLECTION_STYLES = 100

type StyleId = Annotated[str, Field(min_length=36, max_length=36)]
type ShortName = Annotated[str, Field(min_length=1, max_length=MAX_STYLE_NAME_LENGTH)]
type Template = Annotated[
    str,
    Field(
        max_length=MAX_STYLE_PROMPT_LENGTH,
        description="With `{p}` for the request's prompt, and `{name}` for each field.",
    ),
]
type Tags = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STYLE_TAG_LENGTH)]],
    Field(max_length=MAX_STYLE_TAGS),
]
type Models = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=255)]],
    Field(min_length=1, max_length=MAX_STYLE_MODELS),
]


class StyleSort(StrEnum):
    """Orders of the lists: the most used first, or the oldest first."""

    POPULAR = "popular"
    AGE = "age"


class CollectionType(StrEnum):
    """Which collections are listed."""

    ALL = "all"
    IMAGE = "image"
    TEXT = "text"


class StylesQuery(Query):
    """The query string of the list of styles."""

    sort: Annotated[StyleSort, Field(description="Most used or oldest first.")] = StyleSort.POPULAR
    page: Annotated[int, Field(ge=1, le=10_000, description="25 styles a page.")] = 1
    tag: Annotated[str | None, Field(description="Styles with this tag.")] = None
    model: Annotated[str | None, Field(description="Styles that ask for this model.")] = None


class CollectionsQuery(Query):
    """The query string of the list of collections."""

    sort: Annotated[StyleSort, Field(description="Most used or oldest first.")] = StyleSort.POPULAR
    page: Annotated[int, Field(ge=1, le=10_000, description="25 collections a page.")] = 1
    type: Annotated[CollectionType, Field(description="Of which styles.")] = CollectionType.ALL


class Ceilings(Body):
    """The most a request under the style may ask for."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    max_length: Annotated[WholeNumber, Field(ge=16, le=16384)] | None = None
    max_context_length: Annotated[WholeNumber, Field(ge=80, le=1048576)] | None = None
    n: Annotated[WholeNumber, Field(ge=1, le=20)] | None = None


class ParameterPolicy(Body):
    """What requests under the style may change of its params."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    override: Annotated[str, Field(description="`none`, `listed` or `all`.")] = "none"
    overridable: Annotated[
        list[str] | None, Field(max_length=64, description="With `listed`: the params' names.")
    ] = None
    ceilings: Ceilings | None = None


class TemplateField(Body):
    """A field of the template that requests fill in."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: Annotated[str | None, Field(max_length=500)] = None
    required: bool = False


class _StyleOptions(Body):
    params: Annotated[
        dict[str, object] | None, Field(description="As of a text request, without `n`.")
    ] = None
    public: bool | None = None
    nsfw: bool | None = None
    tags: Tags | None = None
    sharedkey: Annotated[
        StyleId | None, Field(description="A shared key of yours that pays for its requests.")
    ] = None
    parameter_policy: ParameterPolicy | None = None
    # The bound keeps a refusal short; more than 16 has a code of its own.
    template_fields: Annotated[list[TemplateField] | None, Field(max_length=64)] = None


class TextStyleInput(_StyleOptions):
    """A new style for text."""

    name: ShortName
    info: Annotated[str | None, Field(min_length=10, max_length=MAX_STYLE_INFO_LENGTH)] = None
    prompt: Annotated[Template, Field(min_length=3)] = "{p}"
    models: Models


class TextStylePatch(_StyleOptions):
    """What may be changed of a style; what is left out stays."""

    name: ShortName | None = None
    info: Annotated[str | None, Field(min_length=1, max_length=MAX_STYLE_INFO_LENGTH)] = None
    prompt: Annotated[Template, Field(min_length=3)] | None = None
    models: Models | None = None


class StyleModify(Answer):
    """The style or collection that was made or changed."""

    id: str
    message: str = "OK"
    warnings: list[dict[str, object]] = Field(default_factory=list)


class TextStyleDetails(SparseAnswer):
    """A style for text, as everybody sees it."""

    id: str
    name: str
    info: str | None = None
    prompt: str
    params: dict[str, object]
    public: bool
    nsfw: bool
    tags: list[str]
    models: list[str]
    use_count: int
    creator: str
    parameter_policy: dict[str, object] | None = None
    template_fields: list[dict[str, object]] | None = None


class CollectionInput(Body):
    """A new collection."""

    name: ShortName
    info: Annotated[str | None, Field(min_length=1, max_length=MAX_STYLE_INFO_LENGTH)] = None
    public: bool = True
    styles: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]],
        Field(
            min_length=1,
            max_length=MAX_COLLECTION_STYLES,
            description="Ids or names of styles, all of one type.",
        ),
    ]


class CollectionPatch(Body):
    """What may be changed of a collection; what is left out stays."""

    name: ShortName | None = None
    info: Annotated[str | None, Field(min_length=1, max_length=MAX_STYLE_INFO_LENGTH)] = None
    public: bool | None = None
    styles: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]] | None,
        Field(min_length=1, max_length=MAX_COLLECTION_STYLES),
    ] = None


class CollectionStyle(Answer):
    """A style of a collection, by the name that means nobody else's."""

    name: str
    id: str


class CollectionDetails(SparseAnswer):
    """A collection as everybody sees it."""

    id: str
    name: str
    type: Annotated[str, Field(description="`image` or `text`.")]
    info: str | None = None
    public: bool
    styles: list[CollectionStyle]
    use_count: int


class ParamContract(SparseAnswer):
    """What a param of a style may be."""

    type: Annotated[str, Field(description="`integer`, `number`, `boolean` or `array`.")]
    minimum: float | None = None
    maximum: float | None = None


class TextStyleContract(Answer):
    """What a style for text may say."""

    params: dict[str, ParamContract]
    decided_by_request: Annotated[
        list[str], Field(description="Params of the request, where the style names none.")
    ]
    overrides: list[str]
    ceilings: list[str]
    prompt_field: str
    reserved_fields: list[str]
    max_template_fields: int
    max_models: int
    max_tags: int


class StyleContract(SparseAnswer):
    """What styles may say, by the type of style; this horde has none for images yet."""

    schema_version: int = 1
    text: TextStyleContract
    image: dict[str, object] = Field(default_factory=dict)
