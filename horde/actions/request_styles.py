# SPDX-License-Identifier: AGPL-3.0-or-later
"""The style that a text request names: found, and applied to what the request says itself."""

from collections.abc import Mapping
from dataclasses import replace

from sqlalchemy.orm import Session

from horde.classes.base.style import (
    DECIDED_BY_REQUEST,
    fill_template,
    find_param_above_ceiling,
    merge_params,
)
from horde.classes.kobold.text_request import TextRequest
from horde.database.styles import TEXT_TYPE, FoundStyle, choose_style, find_request_styles
from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode

MAX_TEMPLATE_WORDS = 7500


def find_style(session: Session, text: TextRequest) -> FoundStyle | None:
    """The style that a request names; of a collection one of those that take its fields.

    Raises NotFound, and BadRequest for a style that is not for text or takes other fields.
    """
    fields = text.body.template_fields
    if text.body.style is None:
        if fields:
            raise BadRequest(
                "'template_fields' fill in the template of a 'style': send both.",
                ReturnCode.TEMPLATE_FIELDS_REQUIRE_STYLE,
            )
        return None
    check_template_size(fields)
    found = find_request_styles(session, text.body.style)
    if any(style.style_type != TEXT_TYPE for style in found):
        raise BadRequest("This style is not for text.", ReturnCode.STYLE_MISMATCH)
    if found[0].collection_id is None:
        check_template_fields(found[0], fields)
        return found[0]
    fitting = [style for style in found if style.accepts_fields(fields)]
    if not fitting:
        raise BadRequest(
            "No style of the collection takes exactly these 'template_fields'.",
            ReturnCode.TEMPLATE_FIELDS_MATCH_NO_COLLECTION_STYLE,
        )
    return choose_style(fitting)


def check_template_size(fields: Mapping[str, str]) -> None:
    """The values of a template's fields have no more words than a prompt. Raises BadRequest."""
    if sum(len(value.split()) for value in fields.values()) > MAX_TEMPLATE_WORDS:
        raise BadRequest(
            f"'template_fields' have more than {MAX_TEMPLATE_WORDS} words.",
            ReturnCode.INVALID_PROMPT_SIZE,
        )


def check_template_fields(style: FoundStyle, fields: Mapping[str, str]) -> None:
    """The fields are those of the style, with none missing. Raises BadRequest."""
    known = {entry["name"]: bool(entry.get("required")) for entry in style.template_fields}
    unknown = sorted(fields.keys() - known.keys())
    if unknown:
        raise BadRequest(
            f"The style has no template field '{unknown[0][:64]}'.",
            ReturnCode.TEMPLATE_FIELD_UNKNOWN,
        )
    missing = sorted(
        name for name, is_required in known.items() if is_required and name not in fields
    )
    if missing:
        raise BadRequest(
            f"The style needs a value for its template field '{missing[0]}'.",
            ReturnCode.TEMPLATE_FIELD_MISSING,
        )


def apply_style(text: TextRequest, style: FoundStyle | None) -> TextRequest:
    """The request as the style makes it: its prompt in the template, the style's models and params.

    Of the request's own params stay `n`, the lengths where the style names none, and those that the
    style lets it replace. Raises BadRequest for one above a ceiling of the style.
    """
    if style is None:
        return text
    params = merge_params(
        style.params, text.params, style.parameter_policy, kept=DECIDED_BY_REQUEST
    )
    above = find_param_above_ceiling(params, style.parameter_policy)
    if above is not None:
        raise BadRequest(
            f"The style allows '{above[0]}' of at most {above[1]}.",
            ReturnCode.STYLE_PARAMETER_ABOVE_CEILING,
        )
    prompt = fill_template(style.prompt, text.body.prompt, text.body.template_fields)
    body = text.body.model_copy(update={"prompt": prompt, "models": list(style.models)})
    return replace(text, body=body, params=params)
