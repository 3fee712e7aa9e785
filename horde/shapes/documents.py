# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of what an operator has to say: documents and news."""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from horde.shapes.base import Answer, Query, SparseAnswer


class DocumentName(StrEnum):
    """The documents a horde has."""

    TERMS = "terms"
    PRIVACY = "privacy"
    SPONSORS = "sponsors"


class DocumentFormat(StrEnum):
    """How a document is sent."""

    HTML = "html"
    MARKDOWN = "markdown"


class DocumentQuery(Query):
    """The query string of a document."""

    format: DocumentFormat = DocumentFormat.HTML


class HordeDocument(SparseAnswer):
    """A document in the format that was asked for."""

    html: str | None = None
    markdown: str | None = None


class Newspiece(Answer):
    """A piece of news."""

    date_published: Annotated[str, Field(description="YYYY-MM-DD")]
    title: str
    newspiece: str
    importance: str
    tags: list[str]
    more_info_urls: list[str]


class NewsEntry(BaseModel):
    """A piece of news as the operator writes it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    date_published: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    title: str
    newspiece: str
    importance: str = "Information"
    tags: list[str] = Field(default_factory=list)
    more_info_urls: list[str] = Field(default_factory=list)
