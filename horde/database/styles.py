# SPDX-License-Identifier: AGPL-3.0-or-later
"""Styles and collections as they are found, shown, made and changed."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Select, delete, exists, func, insert, select, update
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from horde.classes.base.style import (
    COLLECTION_KIND,
    STYLE_KIND,
    DeclaredField,
    Style,
    StyleCollection,
    StyleCollectionMember,
    StyleModel,
    StyleName,
    StylePolicy,
    StyleTag,
    build_unique_name,
    parse_style_name,
)
from horde.classes.base.user import User, UserSharedKey
from horde.database.caches import TimedCache
from horde.database.workers import parse_id
from horde.exceptions import BadRequest, NotFound
from horde.return_codes import ReturnCode
from horde.shapes.styles import (
    STYLES_A_PAGE,
    CollectionDetails,
    CollectionsQuery,
    CollectionStyle,
    CollectionType,
    StyleSort,
    StylesQuery,
    TextStyleDetails,
)
from horde.shapes.text_params import TextParams

TEXT_TYPE = "text"
TEXT_LIST_SECONDS = 1.0
COLLECTION_LIST_SECONDS = 30.0

_style_lists = TimedCache[StylesQuery, list[TextStyleDetails]](TEXT_LIST_SECONDS)
_collection_lists = TimedCache[CollectionsQuery, list[CollectionDetails]](COLLECTION_LIST_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStyle:
    """A style that a request runs under, with what its author decided. `collection_id` is the
    collection it was taken from.
    """

    id: UUID
    style_type: str
    unique_name: str
    author_id: int
    prompt: str
    params: TextParams
    models: tuple[str, ...]
    sharedkey_id: UUID | None
    collection_id: UUID | None = None
    parameter_policy: StylePolicy | None = None
    template_fields: Sequence[DeclaredField] = field(default_factory=tuple)

    def accepts_fields(self, names: Collection[str]) -> bool:
        """Whether a request may fill in exactly these fields: all known, none missing."""
        known = {entry["name"] for entry in self.template_fields}
        required = {entry["name"] for entry in self.template_fields if entry.get("required")}
        return set(names) <= known and required <= set(names)


def list_text_styles(session: Session, query: StylesQuery) -> list[TextStyleDetails]:
    """A page of the public styles for text; about a second old. One statement."""

    def read() -> list[TextStyleDetails]:
        statement = _select_styles().where(Style.public, Style.style_type == TEXT_TYPE)
        if query.tag is not None:
            tagged = exists().where(StyleTag.style_id == Style.id, StyleTag.tag == query.tag)
            statement = statement.where(tagged)
        if query.model is not None:
            asking = exists().where(
                StyleModel.style_id == Style.id, StyleModel.model == query.model
            )
            statement = statement.where(asking)
        rows = session.execute(_page(statement, Style, query.sort, query.page))
        return [_build_style(row) for row in rows]

    return _style_lists.get(query, read)


def find_text_style(session: Session, style_id: str) -> TextStyleDetails:
    """A style for text by its id. Errors: NotFound, BadRequest for a style of another type."""
    parsed = parse_id(style_id)
    row = None
    if parsed is not None:
        row = session.execute(_select_styles().where(Style.id == parsed)).one_or_none()
    return _require_text(row, style_id)


def find_text_style_by_name(session: Session, name: str) -> TextStyleDetails:
    """A style for text by any of its names, the most used of several. Errors: NotFound,
    BadRequest.
    """
    wanted = parse_style_name(name)
    row = None
    if wanted.kind != COLLECTION_KIND:
        statement = _select_styles().where(*_is_named(Style, wanted))
        row = session.execute(statement.order_by(*_best_first(Style)).limit(1)).one_or_none()
    return _require_text(row, name)


def list_collections(session: Session, query: CollectionsQuery) -> list[CollectionDetails]:
    """A page of the public collections; at most half a minute old. One statement."""

    def read() -> list[CollectionDetails]:
        statement = _select_collections().where(StyleCollection.public)
        if query.type is not CollectionType.ALL:
            statement = statement.where(StyleCollection.style_type == query.type)
        rows = session.execute(_page(statement, StyleCollection, query.sort, query.page))
        return [_build_collection(row) for row in rows]

    return _collection_lists.get(query, read)


def find_collection(session: Session, collection_id: str) -> CollectionDetails:
    """A collection by its id. Errors: NotFound."""
    parsed = parse_id(collection_id)
    row = None
    if parsed is not None:
        statement = _select_collections().where(StyleCollection.id == parsed)
        row = session.execute(statement).one_or_none()
    if row is None:
        raise collection_not_found(collection_id)
    return _build_collection(row)


def find_collection_by_name(session: Session, name: str) -> CollectionDetails:
    """A collection by any of its names, the most used of several. Errors: NotFound."""
    wanted = parse_style_name(name)
    row = None
    if wanted.kind != STYLE_KIND:
        statement = _select_collections().where(*_is_named(StyleCollection, wanted))
        best = statement.order_by(*_best_first(StyleCollection)).limit(1)
        row = session.execute(best).one_or_none()
    if row is None:
        raise collection_not_found(name)
    return _build_collection(row)


def forget_lists() -> None:
    """List styles and collections anew. Call it after the commit; other processes follow."""
    _style_lists.clear()
    _collection_lists.clear()


def style_not_found(name: str) -> NotFound:
    """404 of an id or a name that no style has."""
    return NotFound(f"Style '{name[:64]}' not found.", ReturnCode.STYLE_NOT_FOUND)


def collection_not_found(name: str) -> NotFound:
    """404 of an id or a name that no collection has."""
    return NotFound(f"Collection '{name[:64]}' not found.", ReturnCode.COLLECTION_NOT_FOUND)


# What a request runs under


def find_request_styles(session: Session, name: str) -> list[FoundStyle]:
    """The styles that a request may run under by what it names: one, or those of a collection.

    By id first, then by name, a style before a collection. Errors: NotFound.
    """
    collection_id = None
    style_ids = _find_style_ids(session, name)
    if not style_ids:
        collection_id = _find_collection_id(session, name)
        if collection_id is None:
            raise style_not_found(name)
        members = select(StyleCollectionMember.style_id).where(
            StyleCollectionMember.collection_id == collection_id
        )
        style_ids = list(session.scalars(members))
    rows = session.execute(_select_styles().where(Style.id.in_(style_ids)).order_by(Style.id))
    found = [_build_found(row, collection_id) for row in rows]
    if not found:
        raise style_not_found(name)
    return found


def choose_style(styles: Sequence[FoundStyle]) -> FoundStyle:
    """One of them, each as likely as the others."""
    return random.choice(styles)


def count_use(session: Session, style: FoundStyle, now: datetime) -> None:
    """Count a request that ran under a style, for its collection too."""
    used: list[tuple[Any, UUID | None]] = [
        (Style, style.id),
        (StyleCollection, style.collection_id),
    ]
    for row, row_id in used:
        if row_id is not None:
            session.execute(
                update(row)
                .where(row.id == row_id)
                .values(use_count=row.use_count + 1, last_active=now)
                .execution_options(synchronize_session=False)
            )


def _find_style_ids(session: Session, name: str) -> list[UUID]:
    parsed = parse_id(name)
    if parsed is not None:
        return list(session.scalars(select(Style.id).where(Style.id == parsed)))
    wanted = parse_style_name(name)
    if wanted.kind == COLLECTION_KIND:
        return []
    best = select(Style.id).where(*_is_named(Style, wanted)).order_by(*_best_first(Style))
    return list(session.scalars(best.limit(1)))


def _find_collection_id(session: Session, name: str) -> UUID | None:
    parsed = parse_id(name)
    if parsed is not None:
        return session.scalar(select(StyleCollection.id).where(StyleCollection.id == parsed))
    wanted = parse_style_name(name)
    if wanted.kind == STYLE_KIND:
        return None
    # Of a name that several have, not one whose styles are all deleted.
    has_members = exists().where(StyleCollectionMember.collection_id == StyleCollection.id)
    best = (
        select(StyleCollection.id)
        .where(*_is_named(StyleCollection, wanted), has_members)
        .order_by(*_best_first(StyleCollection))
    )
    return session.scalar(best.limit(1))


# Changes


def lock_style(session: Session, style_id: str) -> Style:
    """The style with this id, its row locked. Errors: NotFound."""
    parsed = parse_id(style_id)
    style = None if parsed is None else session.get(Style, parsed, with_for_update=True)
    if style is None:
        raise style_not_found(style_id)
    return style


def lock_collection(session: Session, collection_id: str) -> StyleCollection:
    """The collection with this id, its row locked. Errors: NotFound."""
    parsed = parse_id(collection_id)
    collection = (
        None if parsed is None else session.get(StyleCollection, parsed, with_for_update=True)
    )
    if collection is None:
        raise collection_not_found(collection_id)
    return collection


def save_named(session: Session, row: Style | StyleCollection) -> None:
    """Write a new or changed row, whose name no other of its owner may have. Errors: BadRequest."""
    name = row.name
    try:
        with session.begin_nested():
            session.add(row)
            session.flush()
    except IntegrityError:
        raise BadRequest(
            f"You already have something named '{name}'.", ReturnCode.NAME_ALREADY_EXISTS
        ) from None


def replace_models(session: Session, style_id: UUID, models: Sequence[str]) -> None:
    """Store what models a style asks for, in place of those before."""
    session.execute(delete(StyleModel).where(StyleModel.style_id == style_id))
    session.execute(
        insert(StyleModel), [{"style_id": style_id, "model": model} for model in models]
    )


def replace_tags(session: Session, style_id: UUID, tags: Sequence[str]) -> None:
    """Store the tags of a style, in place of those before."""
    session.execute(delete(StyleTag).where(StyleTag.style_id == style_id))
    if tags:
        session.execute(insert(StyleTag), [{"style_id": style_id, "tag": tag} for tag in tags])


def replace_members(session: Session, collection_id: UUID, style_ids: Sequence[UUID]) -> None:
    """Store the styles of a collection, in place of those before."""
    member = StyleCollectionMember
    session.execute(delete(member).where(member.collection_id == collection_id))
    session.execute(
        insert(member),
        [{"collection_id": collection_id, "style_id": style_id} for style_id in style_ids],
    )


def delete_row(session: Session, row: Style | StyleCollection) -> None:
    """Delete a style or a collection with what hangs from it; requests under it go on."""
    session.execute(delete(type(row)).where(type(row).id == row.id))


def require_members(session: Session, names: Sequence[str]) -> dict[UUID, str]:
    """The styles of these ids or names, each once, with their types. Errors: NotFound."""
    found: dict[UUID, str] = {}
    for name in names:
        ids = _find_style_ids(session, name)
        if not ids:
            raise style_not_found(name)
        found[ids[0]] = ""
    rows = session.execute(select(Style.id, Style.style_type).where(Style.id.in_(found)))
    return {row.id: row.style_type for row in rows}


def find_own_sharedkey(session: Session, sharedkey_id: UUID, user_id: int) -> UserSharedKey | None:
    """A shared key of this account; None when it has no such key."""
    statement = select(UserSharedKey).where(
        UserSharedKey.id == sharedkey_id, UserSharedKey.user_id == user_id
    )
    return session.scalar(statement)


# Statements and what is built of their rows


def _is_named(row: Any, wanted: StyleName) -> list[ColumnElement[bool]]:
    conditions = [row.name == wanted.name]
    if wanted.owner_id is not None:
        conditions.append(row.user_id == wanted.owner_id)
    return conditions


def _best_first(row: Any) -> tuple[Any, ...]:
    return row.use_count.desc(), row.created, row.id


def _page(statement: Select[Any], row: Any, sort: StyleSort, page: int) -> Select[Any]:
    order = _best_first(row) if sort is StyleSort.POPULAR else (row.created, row.id)
    return statement.order_by(*order).offset((page - 1) * STYLES_A_PAGE).limit(STYLES_A_PAGE)


def _select_styles() -> Select[Any]:
    models = select(func.array_agg(aggregate_order_by(StyleModel.model, StyleModel.id))).where(
        StyleModel.style_id == Style.id
    )
    tags = select(func.array_agg(aggregate_order_by(StyleTag.tag, StyleTag.id))).where(
        StyleTag.style_id == Style.id
    )
    return select(
        Style.id,
        Style.style_type,
        Style.user_id,
        Style.name,
        Style.info,
        Style.prompt,
        Style.params,
        Style.public,
        Style.nsfw,
        Style.use_count,
        Style.sharedkey_id,
        Style.parameter_policy,
        Style.template_fields,
        User.username,
        models.correlate(Style).scalar_subquery().label("models"),
        tags.correlate(Style).scalar_subquery().label("tags"),
    ).join(User, User.id == Style.user_id)


def _select_collections() -> Select[Any]:
    collection, member = StyleCollection, StyleCollectionMember
    author = User.__table__.alias("author")
    style = func.json_build_object(
        "id",
        Style.id,
        "name",
        Style.name,
        "alias",
        func.concat(author.c.username, "#", author.c.id),
    )
    styles = (
        select(func.json_agg(aggregate_order_by(style, Style.name, Style.id)))
        .select_from(member)
        .join(Style, Style.id == member.style_id)
        .join(author, author.c.id == Style.user_id)
        .where(member.collection_id == collection.id)
        .correlate(collection)
        .scalar_subquery()
    )
    return select(
        collection.id,
        collection.name,
        collection.style_type,
        collection.info,
        collection.public,
        collection.use_count,
        styles.label("styles"),
    )


def _require_text(row: Any, name: str) -> TextStyleDetails:
    if row is None:
        raise style_not_found(name)
    if row.style_type != TEXT_TYPE:
        raise BadRequest(f"Style '{name[:64]}' is not for text.", ReturnCode.STYLE_GET_MISMATCH)
    return _build_style(row)


def _build_style(row: Any) -> TextStyleDetails:
    return TextStyleDetails(
        id=str(row.id),
        name=row.name,
        info=row.info,
        prompt=row.prompt,
        params=row.params,
        public=row.public,
        nsfw=row.nsfw,
        tags=row.tags or [],
        models=row.models or [],
        use_count=row.use_count,
        creator=f"{row.username}#{row.user_id}",
        parameter_policy=row.parameter_policy,
        template_fields=row.template_fields,
    )


def _build_found(row: Any, collection_id: UUID | None) -> FoundStyle:
    return FoundStyle(
        id=row.id,
        style_type=row.style_type,
        unique_name=build_unique_name(f"{row.username}#{row.user_id}", STYLE_KIND, row.name),
        author_id=row.user_id,
        prompt=row.prompt,
        params=row.params,
        models=tuple(row.models or ()),
        sharedkey_id=row.sharedkey_id,
        collection_id=collection_id,
        parameter_policy=row.parameter_policy,
        template_fields=tuple(row.template_fields or ()),
    )


def _build_collection(row: Any) -> CollectionDetails:
    return CollectionDetails(
        id=str(row.id),
        name=row.name,
        type=row.style_type,
        info=row.info,
        public=row.public,
        styles=[
            CollectionStyle(
                id=style["id"], name=build_unique_name(style["alias"], STYLE_KIND, style["name"])
            )
            for style in row.styles or ()
        ],
        use_count=row.use_count,
    )
