# SPDX-License-Identifier: AGPL-3.0-or-later
"""Collections of styles: who makes them, changes them and deletes them."""

from collections.abc import Sequence
from uuid import UUID, uuid4

from sqlalchemy.orm import Session

from horde import clock
from horde.actions.actors import By, require_actor
from horde.actions.styles import clean_info, clean_name, delete_owned, require_author
from horde.classes.base.style import StyleCollection
from horde.database import styles
from horde.db import after_commit, run_transaction, transaction
from horde.exceptions import BadRequest, Forbidden
from horde.return_codes import ReturnCode
from horde.shapes.acts import ModeratorAction
from horde.shapes.base import SimpleResponse
from horde.shapes.styles import (
    CollectionDetails,
    CollectionInput,
    CollectionPatch,
    CollectionsQuery,
    StyleModify,
)


def list_collections(query: CollectionsQuery) -> list[CollectionDetails]:
    """A page of the public collections."""
    with transaction() as session:
        return styles.list_collections(session, query)


def show_collection(collection_id: str) -> CollectionDetails:
    """One collection by its id. Errors: NotFound."""
    with transaction() as session:
        return styles.find_collection(session, collection_id)


def show_collection_by_name(name: str) -> CollectionDetails:
    """One collection by any of its names. Errors: NotFound."""
    with transaction() as session:
        return styles.find_collection_by_name(session, name)


def create_collection(by: By, body: CollectionInput) -> StyleModify:
    """A new collection of any account. Errors: Unauthorized, Forbidden, NotFound, BadRequest."""

    def work(session: Session) -> StyleModify:
        author = require_author(require_actor(session, by), needs_role=False)
        members, style_type = _require_one_type(session, body.styles)
        now = clock.utcnow()
        collection = StyleCollection(
            id=uuid4(),
            style_type=style_type,
            user_id=author.id,
            name=clean_name(body.name),
            info=None if body.info is None else clean_info(body.info),
            public=body.public,
            use_count=0,
            created=now,
            last_active=now,
        )
        styles.save_named(session, collection)
        styles.replace_members(session, collection.id, members)
        after_commit(session, styles.forget_lists)
        return StyleModify(id=str(collection.id))

    return run_transaction(work)


def change_collection(by: By, collection_id: str, body: CollectionPatch) -> StyleModify:
    """Change a collection as its author; what is left out stays.

    Errors: Unauthorized, NotFound, Forbidden, BadRequest.
    """

    def work(session: Session) -> StyleModify:
        author = require_author(require_actor(session, by), needs_role=False)
        collection = styles.lock_collection(session, collection_id)
        if collection.user_id != author.id:
            raise Forbidden(
                f"Collection '{collection.name}' is not yours. Use the key of its author.",
                ReturnCode.FORBIDDEN,
            )
        if body.styles is not None:
            members, collection.style_type = _require_one_type(session, body.styles)
            styles.replace_members(session, collection.id, members)
        if body.name is not None:
            collection.name = clean_name(body.name)
        if body.info is not None:
            collection.info = clean_info(body.info)
        if body.public is not None:
            collection.public = body.public
        styles.save_named(session, collection)
        after_commit(session, styles.forget_lists)
        return StyleModify(id=str(collection.id))

    return run_transaction(work)


def delete_collection(by: By, collection_id: str, reason: str | None = None) -> SimpleResponse:
    """Delete a collection, as its author or a moderator; its styles stay.

    Errors: Unauthorized, NotFound, Forbidden.
    """

    def work(session: Session) -> SimpleResponse:
        actor = require_actor(session, by)
        collection = styles.lock_collection(session, collection_id)
        return delete_owned(session, actor, collection, ModeratorAction.COLLECTION_DELETED, reason)

    return run_transaction(work)


def _require_one_type(session: Session, names: Sequence[str]) -> tuple[list[UUID], str]:
    """The styles of these ids or names and their one type; raises NotFound or BadRequest."""
    found = styles.require_members(session, names)
    types = set(found.values())
    if len(types) != 1:
        raise BadRequest("A collection holds styles of one type only.", ReturnCode.STYLE_MISMATCH)
    return list(found), types.pop()
