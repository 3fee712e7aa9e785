# SPDX-License-Identifier: AGPL-3.0-or-later
"""Bodies and query strings of small routes, checked against a pydantic model."""

from collections.abc import Mapping

from flask import request
from pydantic import BaseModel, ValidationError

from horde.apis.requests import read_json_object
from horde.exceptions import PayloadInvalid


def read_body[M: BaseModel](model: type[M]) -> M:
    """The JSON object of the request as `model`; raises PayloadInvalid naming each bad key."""
    return _validate(model, read_json_object())


def read_query[M: BaseModel](model: type[M]) -> M:
    """The query string as `model`, an empty value being as absent; raises PayloadInvalid naming
    each bad key.
    """
    return _validate(model, {name: value for name, value in request.args.items() if value != ""})


def _validate[M: BaseModel](model: type[M], values: Mapping[str, object]) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # The messages of pydantic name types and bounds; the values themselves, which may be
        # secrets, are left out.
        found = error.errors(include_input=False, include_url=False, include_context=False)
        raise PayloadInvalid(
            {".".join(str(part) for part in entry["loc"]): entry["msg"] for entry in found}
        ) from None
