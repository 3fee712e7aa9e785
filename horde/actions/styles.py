# SPDX-License-Identifier: AGPL-3.0-or-later
"""Styles for text: who makes them, changes them and deletes them, and what they may say."""

from collections.abc import Sequence
from typing import cast
from uuid import UUID, uuid4

from sqlalchemy.orm import Session

from horde import clock
from horde.actions.actors import Actor, By, require_actor
from horde.actions.acts import record_act
from horde.classes.base.style import (
    DECIDED_BY_REQUEST,
    PROMPT_FIELD,
    RESERVED_FIELDS,
    DeclaredField,
    ParameterOverride,
    Style,
    StyleCollection,
    StylePolicy,
    find_param_above_ceiling,
    find_strange_field,
    list_template_fields,
)
from horde.database import styles
from horde.database.styles import TEXT_TYPE
from horde.database.users import Caller
from horde.database.workers import parse_id
from horde.db import after_commit, run_transaction, transaction
from horde.exceptions import BadRequest, Forbidden, PayloadInvalid
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode
from horde.shapes.acts import ModeratorAction
from horde.shapes.base import SimpleResponse
from horde.shapes.styles import (
    MAX_STYLE_MODELS,
    MAX_STYLE_TAGS,
    MAX_TEMPLATE_FIELDS,
    Ceilings,
    ParamContract,
    ParameterPolicy,
    StyleContract,
    StyleModify,
    StylesQuery,
    TemplateField,
    TextStyleContract,
    TextStyleDetails,
    TextStyleInput,
    TextStylePatch,
)
from horde.shapes.text_params import (
    DEFAULT_MAX_CONTEXT_LENGTH,
    DEFAULT_TEXT_MAX_LENGTH,
    TEXT_PARAM_LISTS,
    TEXT_PARAM_RANGES,
    TEXT_PARAM_SWITCHES,
    TextParams,
    check_text_param_rules,
    parse_text_params,
)
from horde.shown_text import clean_shown_text, is_profane

_PARAM_NAMES = frozenset({*TEXT_PARAM_RANGES, *TEXT_PARAM_SWITCHES, *TEXT_PARAM_LISTS})


def list_text_styles(query: StylesQuery) -> list[TextStyleDetails]:
    """A page of the public styles."""
    with transaction() as session:
        return styles.list_text_styles(session, query)


def show_text_style(style_id: str) -> TextStyleDetails:
    """One style by its id. Errors: NotFound, BadRequest for one of another type."""
    with transaction() as session:
        return styles.find_text_style(session, style_id)


def show_text_style_by_name(name: str) -> TextStyleDetails:
    """One style by any of its names. Errors: NotFound, BadRequest for one of another type."""
    with transaction() as session:
        return styles.find_text_style_by_name(session, name)


def show_style_contract() -> StyleContract:
    """What a style may say, for programs that help to write one."""
    ranges = {
        name: ParamContract(
            type="integer" if bounds.is_integer else "number",
            minimum=bounds.minimum,
            maximum=bounds.maximum,
        )
        for name, bounds in TEXT_PARAM_RANGES.items()
        if name != "n"
    }
    switches = {name: ParamContract(type="boolean") for name in sorted(TEXT_PARAM_SWITCHES)}
    lists = {name: ParamContract(type="array") for name in TEXT_PARAM_LISTS}
    return StyleContract(
        text=TextStyleContract(
            params=ranges | switches | lists,
            decided_by_request=list(DECIDED_BY_REQUEST),
            overrides=list(ParameterOverride),
            ceilings=list(Ceilings.model_fields),
            prompt_field=PROMPT_FIELD,
            reserved_fields=sorted(RESERVED_FIELDS),
            max_template_fields=MAX_TEMPLATE_FIELDS,
            max_models=MAX_STYLE_MODELS,
            max_tags=MAX_STYLE_TAGS,
        )
    )


def create_text_style(by: By, body: TextStyleInput) -> StyleModify:
    """A new style of a trusted account or a customizer.

    Errors: Unauthorized, Forbidden for who may not, BadRequest for what cannot be.
    """

    def work(session: Session) -> StyleModify:
        author = require_author(require_actor(session, by), needs_role=True)
        now = clock.utcnow()
        style = Style(
            id=uuid4(),
            style_type=TEXT_TYPE,
            user_id=author.id,
            name=clean_name(body.name),
            info=None if body.info is None else clean_info(body.info),
            prompt=body.prompt,
            params=_clean_params(body.params or {}),
            public=body.public is not False,
            nsfw=body.nsfw is True,
            use_count=0,
            created=now,
            last_active=now,
        )
        _apply_contract(style, body.parameter_policy, body.template_fields)
        _attach_sharedkey(session, style, body.sharedkey)
        _check_contract(style)
        styles.save_named(session, style)
        styles.replace_models(session, style.id, _drop_repeats(body.models))
        styles.replace_tags(session, style.id, clean_tags(body.tags or []))
        after_commit(session, styles.forget_lists)
        return StyleModify(id=str(style.id))

    return run_transaction(work)


def change_text_style(by: By, style_id: str, body: TextStylePatch) -> StyleModify:
    """Change a style as its author; what is left out stays.

    Errors: Unauthorized, NotFound, Forbidden, BadRequest.
    """

    def work(session: Session) -> StyleModify:
        actor = require_actor(session, by)
        author = require_author(actor, needs_role=False)
        style = styles.lock_style(session, style_id)
        if style.user_id != author.id:
            raise Forbidden(
                f"Style '{style.name}' is not yours. Use the key of its author.",
                ReturnCode.FORBIDDEN,
            )
        if style.style_type != TEXT_TYPE:
            raise BadRequest("This style is not for text.", ReturnCode.STYLE_MISMATCH)
        _apply_patch(session, style, body)
        _check_contract(style)
        styles.save_named(session, style)
        if body.models is not None:
            styles.replace_models(session, style.id, _drop_repeats(body.models))
        if body.tags is not None:
            styles.replace_tags(session, style.id, clean_tags(body.tags))
        after_commit(session, styles.forget_lists)
        return StyleModify(id=str(style.id))

    return run_transaction(work)


def delete_text_style(by: By, style_id: str, reason: str | None = None) -> SimpleResponse:
    """Delete a style, as its author or a moderator. Errors: Unauthorized, NotFound, Forbidden."""

    def work(session: Session) -> SimpleResponse:
        actor = require_actor(session, by)
        style = styles.lock_style(session, style_id)
        return delete_owned(session, actor, style, ModeratorAction.STYLE_DELETED, reason)

    return run_transaction(work)


# What collections ask too


def require_author(actor: Actor, *, needs_role: bool) -> Caller:
    """The account that writes a style or a collection; raises Forbidden for who may not."""
    account = actor.account
    if account is None or account.is_anonymous:
        raise Forbidden(
            "Anonymous cannot write styles or collections.", ReturnCode.STYLES_ANON_FORBIDDEN
        )
    if account.is_deleted:
        raise Forbidden("This account is scheduled for deletion.", ReturnCode.DELETED_USER)
    if needs_role and not (account.is_trusted or account.is_customizer):
        raise Forbidden(
            "Only trusted users and customizers can create styles.",
            ReturnCode.STYLES_REQUIRES_CUSTOMIZER,
        )
    return account


def delete_owned(
    session: Session,
    actor: Actor,
    row: Style | StyleCollection,
    action: ModeratorAction,
    reason: str | None,
) -> SimpleResponse:
    """Delete a locked style or collection, as its author or a moderator; raises Forbidden."""
    is_anonymous = actor.account is not None and actor.account.is_anonymous
    if not actor.is_moderator and (is_anonymous or not actor.owns(row.user_id)):
        raise Forbidden(
            f"'{row.name}' is not yours. Use the key of its author.", ReturnCode.FORBIDDEN
        )
    styles.delete_row(session, row)
    if not actor.owns(row.user_id):
        record_act(session, actor, action, f"{row.__tablename__} {row.id}", reason, name=row.name)
    after_commit(session, styles.forget_lists)
    return SimpleResponse()


def clean_name(name: str) -> str:
    """The name as it is shown; raises BadRequest for one that cannot be."""
    name = clean_shown_text(name)
    if not name:
        raise PayloadInvalid({"name": "String should have at least 1 visible character"})
    if is_profane(name):
        raise BadRequest("The name holds profanity.", ReturnCode.PROFANITY)
    return name


def clean_info(info: str) -> str:
    """The info as it is shown; raises BadRequest for one that cannot be."""
    info = clean_shown_text(info)
    if is_profane(info):
        raise BadRequest("The info holds profanity.", ReturnCode.PROFANITY)
    return info


def clean_tags(tags: Sequence[str]) -> list[str]:
    """The tags as they are shown, each once; raises BadRequest for one that cannot be."""
    cleaned = list(dict.fromkeys(filter(None, map(clean_shown_text, tags))))
    if any(map(is_profane, cleaned)):
        raise BadRequest("A tag holds profanity.", ReturnCode.PROFANITY)
    return cleaned


# What a style may say


def _apply_patch(session: Session, style: Style, body: TextStylePatch) -> None:
    if body.name is not None:
        style.name = clean_name(body.name)
    if body.info is not None:
        style.info = clean_info(body.info)
    if body.prompt is not None:
        style.prompt = body.prompt
    if body.params is not None:
        style.params = _clean_params(body.params)
    if body.public is not None:
        style.public = body.public
    if body.nsfw is not None:
        style.nsfw = body.nsfw
    _apply_contract(style, body.parameter_policy, body.template_fields)
    _attach_sharedkey(session, style, body.sharedkey)


def _apply_contract(
    style: Style, policy: ParameterPolicy | None, fields: Sequence[TemplateField] | None
) -> None:
    if policy is not None:
        style.parameter_policy = cast(StylePolicy, policy.model_dump(exclude_none=True))
    if fields is not None:
        declared = [entry.model_dump(exclude_none=True) for entry in fields]
        style.template_fields = cast(list[DeclaredField], declared) or None


def _clean_params(params: JsonObject) -> TextParams:
    """The params as stored: those of a text request, held to the same rules, without `n`."""
    parsed = parse_text_params({key: value for key, value in params.items() if key != "n"})
    lengths = {
        "max_length": parsed.get("max_length", DEFAULT_TEXT_MAX_LENGTH),
        "max_context_length": parsed.get("max_context_length", DEFAULT_MAX_CONTEXT_LENGTH),
    }
    if len(lengths.keys() & parsed.keys()) < len(lengths):
        # The request decides the other; only what the style says of both can clash.
        lengths = {"max_length": 0, "max_context_length": 0}
    check_text_param_rules(
        parsed,
        max_length=lengths["max_length"],
        max_context_length=lengths["max_context_length"],
    )
    return parsed


def _drop_repeats(models: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(models))


def _check_contract(style: Style) -> None:
    """What template, fields, policy and params say together; raises BadRequest."""
    if is_profane(style.prompt):
        raise BadRequest("The prompt holds profanity.", ReturnCode.PROFANITY)
    strange = find_strange_field(style.prompt)
    if strange is not None:
        raise BadRequest(
            f"The placeholder {strange[:64]} of the prompt has to be a bare name.",
            ReturnCode.STYLE_PROMPT_FIELD_INVALID,
        )
    used = list_template_fields(style.prompt)
    if PROMPT_FIELD not in used:
        raise BadRequest(
            "The prompt of a style has to contain {p}.", ReturnCode.STYLE_PROMPT_MISSING_VARS
        )
    _check_fields(style.template_fields or [], used)
    _check_policy(style.parameter_policy or {})
    above = find_param_above_ceiling(style.params, style.parameter_policy)
    if above is not None:
        raise BadRequest(
            f"The style's own {above[0]} is above its ceiling of {above[1]}.",
            ReturnCode.STYLE_PARAMETER_ABOVE_CEILING,
        )


def _check_fields(fields: Sequence[DeclaredField], used: Sequence[str]) -> None:
    names = [entry["name"] for entry in fields]
    problem = None
    if len(names) > MAX_TEMPLATE_FIELDS:
        problem = f"A style may declare at most {MAX_TEMPLATE_FIELDS} template fields."
    elif len(set(names)) != len(names):
        problem = "A template field is declared twice."
    elif taken := RESERVED_FIELDS.intersection(names):
        problem = f"'{min(taken)}' cannot be declared as a template field."
    elif unused := [name for name in names if name not in used]:
        problem = f"The prompt has no place {{{unused[0]}}} for a declared template field."
    if problem is not None:
        raise BadRequest(problem, ReturnCode.STYLE_DECLARATION_INVALID)


def _check_policy(policy: StylePolicy) -> None:
    override, overridable = policy.get("override", "none"), policy.get("overridable")
    if override not in list(ParameterOverride):
        raise BadRequest(
            f"'parameter_policy.override' has to be one of {', '.join(ParameterOverride)}.",
            ReturnCode.STYLE_DECLARATION_INVALID,
        )
    if (override == ParameterOverride.LISTED) != bool(overridable):
        raise BadRequest(
            "'parameter_policy.overridable' goes with an override of 'listed', and only with it.",
            ReturnCode.STYLE_POLICY_OVERRIDABLE_MISPLACED,
        )
    unknown = [name for name in overridable or () if name not in _PARAM_NAMES]
    if unknown:
        raise BadRequest(
            f"'{unknown[0][:64]}' is no param of a text request.",
            ReturnCode.STYLE_DECLARATION_INVALID,
        )


def _attach_sharedkey(session: Session, style: Style, sharedkey: str | None) -> None:
    """Let a shared key of the author pay for requests under the style; raises BadRequest.

    Of the author alone: whoever was given a key could else let everybody spend from it.
    """
    if sharedkey is None:
        return
    parsed: UUID | None = parse_id(sharedkey)
    key = None if parsed is None else styles.find_own_sharedkey(session, parsed, style.user_id)
    if key is None:
        raise BadRequest("You have no such shared key.", ReturnCode.SHARED_KEY_INVALID)
    if key.kudos == 0:
        raise BadRequest("This shared key has run out of kudos.", ReturnCode.SHARED_KEY_EMPTY)
    if key.expiry is not None and key.expiry < clock.utcnow():
        raise BadRequest("This shared key has expired.", ReturnCode.SHARED_KEY_EXPIRED)
    style.sharedkey_id = key.id
