# SPDX-License-Identifier: AGPL-3.0-or-later
"""Bodies and query strings of small routes, checked against a pydantic model."""

from flask import request
from pydantic import BaseModel

from horde.apis.requests import read_json_object
from horde.shapes.base import parse_shape


def read_body[M: BaseModel](model: type[M]) -> M:
    """The JSON object of the request as `model`; raises PayloadInvalid naming each bad key."""
    return parse_shape(model, read_json_object())


def read_query[M: BaseModel](model: type[M]) -> M:
    """The query string as `model`, an empty value being as absent; raises PayloadInvalid naming
    each bad key.
    """
    return parse_shape(model, {name: value for name, value in request.args.items() if value != ""})
