# SPDX-License-Identifier: AGPL-3.0-or-later
"""Styles, collections of them, and the rules of templates and policies."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, NotRequired, TypedDict, cast
from uuid import UUID, uuid4

from sqlalchemy import (
    Boolean,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    UniqueConstraint,
    Uuid,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from horde.clock import utcnow
from horde.db import Base
from horde.shapes.text_params import TextParams

PROMPT_FIELD: Final = "p"
RESERVED_FIELDS: Final = frozenset({PROMPT_FIELD, "np"})
STYLE_KIND, COLLECTION_KIND = "style", "collection"
# Params that a request decides where its style says nothing of them.
DECIDED_BY_REQUEST: Final = ("n", "max_length", "max_context_length")

# `{name}`, and no part of `{{name}}` or of `{{[NAME]}}`, which frontends of KoboldAI fill in.
_FIELD: Final = re.compile(r"(?<!\{)\{([A-Za-z_][A-Za-z0-9_]{0,63})\}(?!\})")
# What looks like a field of Python's format and is more or less than a name.
_STRANGE_FIELD: Final = re.compile(r"(?<!\{)\{(?:|\d[^{}]*|[A-Za-z_]\w*[.\[!:][^{}\s]*)\}(?!\})")


class StylePolicy(TypedDict, total=False):
    """What requests may change of a style's params; `ceilings` are by param."""

    override: str
    overridable: list[str]
    ceilings: dict[str, int]


class DeclaredField(TypedDict):
    """A field of the template that requests fill in."""

    name: str
    description: NotRequired[str]
    required: NotRequired[bool]


class Style(Base):
    """A template, params and models that requests name; `style_type` is `text` or `image`."""

    __tablename__ = "styles"
    __table_args__ = (UniqueConstraint("user_id", "name", name="styles_user_id_name"),)

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=uuid4)
    style_type: Mapped[str] = mapped_column(String(30), index=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(100), index=True)
    info: Mapped[str | None] = mapped_column(String(1000))
    prompt: Mapped[str] = mapped_column(Text)
    params: Mapped[TextParams] = mapped_column(JSONB, default=dict)
    public: Mapped[bool] = mapped_column(Boolean, default=True)
    nsfw: Mapped[bool] = mapped_column(Boolean, default=False)
    use_count: Mapped[int] = mapped_column(Integer, default=0)
    sharedkey_id: Mapped[UUID | None] = mapped_column(
        ForeignKey("user_sharedkeys.id", ondelete="SET NULL"), index=True
    )
    parameter_policy: Mapped[StylePolicy | None] = mapped_column(JSONB(none_as_null=True))
    template_fields: Mapped[list[DeclaredField] | None] = mapped_column(JSONB(none_as_null=True))
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    last_active: Mapped[datetime] = mapped_column(DateTime, default=utcnow)


class StyleModel(Base):
    """A model that a style asks for."""

    __tablename__ = "style_models"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    style_id: Mapped[UUID] = mapped_column(ForeignKey("styles.id", ondelete="CASCADE"), index=True)
    model: Mapped[str] = mapped_column(String(255), index=True)


class StyleTag(Base):
    """A word that a style is found by."""

    __tablename__ = "style_tags"

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    style_id: Mapped[UUID] = mapped_column(ForeignKey("styles.id", ondelete="CASCADE"), index=True)
    tag: Mapped[str] = mapped_column(String(255), index=True)


class StyleCollection(Base):
    """Styles of one type under one name; a request that names it runs under any of them."""

    __tablename__ = "style_collections"
    __table_args__ = (UniqueConstraint("user_id", "name", name="style_collections_user_id_name"),)

    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=uuid4)
    style_type: Mapped[str] = mapped_column(String(30), index=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(100), index=True)
    info: Mapped[str | None] = mapped_column(String(1000))
    public: Mapped[bool] = mapped_column(Boolean, default=True)
    use_count: Mapped[int] = mapped_column(Integer, default=0)
    created: Mapped[datetime] = mapped_column(DateTime, default=utcnow)
    last_active: Mapped[datetime] = mapped_column(DateTime, default=utcnow)


class StyleCollectionMember(Base):
    """A style of a collection."""

    __tablename__ = "style_collection_mapping"

    style_id: Mapped[UUID] = mapped_column(
        ForeignKey("styles.id", ondelete="CASCADE"), primary_key=True
    )
    collection_id: Mapped[UUID] = mapped_column(
        ForeignKey("style_collections.id", ondelete="CASCADE"), primary_key=True
    )


Index("ix_style_collection_mapping_collection_id", StyleCollectionMember.collection_id)


class ParameterOverride(StrEnum):
    """Which of the style's params a request may replace."""

    NONE = "none"
    LISTED = "listed"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class StyleName:
    """A style or collection as it is named: `kind` and `owner_id` only when they were said."""

    name: str
    kind: str | None = None
    owner_id: int | None = None


def parse_style_name(text: str) -> StyleName:
    """Read `name`, `kind::name`, `alias#id::name`, and both prefixes in either order.

    A prefix that is neither a kind nor an alias belongs to the name, which may hold colons.
    """
    kind: str | None = None
    owner_id: int | None = None
    rest = text
    while (parts := rest.partition("::"))[1]:
        prefix, _, after = parts
        if kind is None and prefix in (STYLE_KIND, COLLECTION_KIND):
            kind = prefix
        elif owner_id is None and (found := _parse_owner(prefix)) is not None:
            owner_id = found
        else:
            break
        rest = after
    return StyleName(name=rest, kind=kind, owner_id=owner_id)


def _parse_owner(alias: str) -> int | None:
    _, mark, number = alias.rpartition("#")
    is_id = bool(mark) and number.isascii() and number.isdecimal() and len(number) <= 9
    return int(number) if is_id else None


def build_unique_name(alias: str, kind: str, name: str) -> str:
    """How a style or collection is named so that nobody else's is meant."""
    return f"{alias}::{kind}::{name}"


def list_template_fields(template: str) -> list[str]:
    """The names in braces of a template, each once, in order."""
    return list(dict.fromkeys(_FIELD.findall(template)))


def find_strange_field(template: str) -> str | None:
    """A placeholder of a template that is no bare name, such as `{p.x}` or `{0}`; None for none."""
    found = _STRANGE_FIELD.search(template)
    return None if found is None else found.group()


def fill_template(template: str, prompt: str, fields: Mapping[str, str]) -> str:
    """The template with the prompt and the fields in their places.

    A name without a value becomes nothing; other braces stay. What is put in is not read again.
    """
    values = {**fields, PROMPT_FIELD: prompt}
    return _FIELD.sub(lambda found: values.get(found.group(1), ""), template)


def merge_params(
    style: TextParams,
    requested: TextParams,
    policy: StylePolicy | None,
    *,
    kept: Iterable[str],
) -> TextParams:
    """The params of a request under a style: the style's, and of the request's what may be.

    `kept` are those the request decides wherever the style says nothing.
    """
    overridable = get_overridable(requested, policy)
    own = {
        key: value
        for key, value in requested.items()
        if key in overridable or (key in kept and key not in style)
    }
    return cast(TextParams, {**style, **own})


def get_overridable(
    requested: Sequence[str] | TextParams, policy: StylePolicy | None
) -> frozenset[str]:
    """Those of the params that a request may replace."""
    override = ParameterOverride((policy or {}).get("override", "none"))
    if override is ParameterOverride.ALL:
        return frozenset(requested)
    if override is ParameterOverride.LISTED:
        return frozenset((policy or {}).get("overridable") or ())
    return frozenset()


def find_param_above_ceiling(
    params: Mapping[str, object], policy: StylePolicy | None
) -> tuple[str, int] | None:
    """A param above the style's ceiling for it, with that ceiling; None when all keep within."""
    ceilings = (policy or {}).get("ceilings") or {}
    for key, top in ceilings.items():
        value = params.get(key)
        if isinstance(value, int | float) and value > top:
            return key, top
    return None
