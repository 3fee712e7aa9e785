# SPDX-License-Identifier: AGPL-3.0-or-later
"""The moderators' rules for prompts: listed, tried, added, changed and deleted."""

from sqlalchemy.orm import Session

from horde.actions.actors import By, require_moderator
from horde.actions.acts import record_act
from horde.classes.base.user import MAX_USER_ID
from horde.database import filters
from horde.database.filters import StoredFilter, find_filter, find_same_filter, list_filters
from horde.database.moderation import SCREENING_SECONDS, ScreeningBudget, forget_replacement_rules
from horde.database.prompt_suspicion import (
    check_regex,
    combine_regexes,
    forget_rules,
    search_prompt,
)
from horde.db import after_commit, reading, run_transaction
from horde.exceptions import BadRequest, NotFound
from horde.return_codes import ReturnCode
from horde.shapes.acts import ModeratorAction
from horde.shapes.base import SimpleResponse
from horde.shapes.filters import (
    FilterDetails,
    FilterPromptSuspicion,
    FilterRegex,
    FilterRegexQuery,
    FiltersQuery,
    PatchExistingFilter,
    PutNewFilter,
    TriedPrompt,
)


def list_rules(by: By, query: FiltersQuery) -> list[FilterDetails]:
    """The rules, in the order they are applied in."""
    with reading() as session:
        require_moderator(session, by)
        stored = list_filters(session, filter_type=query.filter_type, contains=query.contains)
    return [_show(rule) for rule in stored]


def list_combined_rules(by: By, query: FilterRegexQuery) -> list[FilterRegex]:
    """The rules of each known type as one expression."""
    with reading() as session:
        require_moderator(session, by)
        stored = list_filters(session, filter_type=query.filter_type)
    return [
        FilterRegex(filter_type=kind, regex=combined)
        for kind, combined in combine_regexes(stored).items()
    ]


def show_rule(by: By, filter_id: str) -> FilterDetails:
    """A rule. Errors: NotFound."""
    with reading() as session:
        require_moderator(session, by)
        return _show(_require_filter(session, filter_id))


def try_prompt(by: By, body: TriedPrompt) -> FilterPromptSuspicion:
    """How suspicious a prompt is; nothing is kept of it.

    Errors: BadRequest, `CorruptPrompt`, when the rules take too long over it.
    """
    with reading() as session:
        require_moderator(session, by)
        found = search_prompt(
            session,
            body.prompt,
            budget=ScreeningBudget(SCREENING_SECONDS),
            filter_type=body.filter_type,
        )
    return FilterPromptSuspicion(suspicion=found.groups, matches=list(found.matches))


def add_rule(by: By, body: PutNewFilter) -> FilterDetails:
    """Add a rule; one with the same expression and type is answered as it is.

    Errors: BadRequest for an expression that cannot be compiled.
    """

    def work(session: Session) -> FilterDetails:
        actor = require_moderator(session, by)
        check_regex(body.regex)
        same = find_same_filter(session, regex=body.regex, filter_type=body.filter_type)
        if same is not None:
            return _show(_require_filter(session, str(same)))
        columns = body.model_dump(exclude={"reason"})
        filter_id = filters.add_filter(session, columns, actor.user_id)
        record_act(
            session,
            actor,
            ModeratorAction.FILTER_ADDED,
            describe_filter(filter_id),
            body.reason,
            **columns,
        )
        after_commit(session, _forget_rules)
        return _show(_require_filter(session, str(filter_id)))

    return run_transaction(work)


def change_rule(by: By, filter_id: str, body: PatchExistingFilter) -> FilterDetails:
    """Change a rule. Errors: NotFound, BadRequest."""

    def work(session: Session) -> FilterDetails:
        actor = require_moderator(session, by)
        stored = _require_filter(session, filter_id)
        changes = body.model_dump(exclude_none=True, exclude={"reason"})
        if not changes:
            raise BadRequest("No change was selected.", ReturnCode.NO_FILTER_MOD_SELECTED)
        if body.regex is not None:
            check_regex(body.regex)
        if not filters.change_filter(session, stored.id, changes, actor.user_id):
            raise _filter_not_found(filter_id)
        record_act(
            session,
            actor,
            ModeratorAction.FILTER_CHANGED,
            describe_filter(stored.id),
            body.reason,
            changes=changes,
        )
        after_commit(session, _forget_rules)
        return _show(_require_filter(session, filter_id))

    return run_transaction(work)


def delete_rule(by: By, filter_id: str, reason: str | None = None) -> SimpleResponse:
    """Delete a rule. Errors: NotFound."""

    def work(session: Session) -> SimpleResponse:
        actor = require_moderator(session, by)
        stored = _require_filter(session, filter_id)
        if not filters.delete_filter(session, stored.id):
            raise _filter_not_found(filter_id)
        record_act(
            session,
            actor,
            ModeratorAction.FILTER_DELETED,
            describe_filter(stored.id),
            reason,
            regex=stored.regex,
            filter_type=stored.filter_type,
            replacement=stored.replacement,
        )
        after_commit(session, _forget_rules)
        return SimpleResponse()

    return run_transaction(work)


def describe_filter(filter_id: int) -> str:
    """The rule as the subject of an act."""
    return f"filter {filter_id}"


def _forget_rules() -> None:
    forget_rules()
    forget_replacement_rules()


def _require_filter(session: Session, filter_id: str) -> StoredFilter:
    is_number = filter_id.isascii() and filter_id.isdecimal() and len(filter_id) <= 10
    number = int(filter_id) if is_number else None
    is_storable = number is not None and number <= MAX_USER_ID
    stored = find_filter(session, number) if is_storable and number is not None else None
    if stored is None:
        raise _filter_not_found(filter_id)
    return stored


def _filter_not_found(filter_id: str) -> NotFound:
    return NotFound(f"Filter with ID '{filter_id[:64]}' not found.", ReturnCode.FILTER_NOT_FOUND)


def _show(stored: StoredFilter) -> FilterDetails:
    return FilterDetails(
        id=str(stored.id),
        regex=stored.regex,
        filter_type=stored.filter_type,
        description=stored.description,
        replacement=stored.replacement,
        user=stored.author,
    )
