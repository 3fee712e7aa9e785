# SPDX-License-Identifier: AGPL-3.0-or-later
"""The check behind ``structured_output_enforced``: does a reply match the schema its client sent?

Grammars leave keywords out without a word (llama.cpp: ``not``, patterns with look-ahead or without
anchors, ``uniqueItems``), so what the backend accepted proves nothing.
"""

import json
import re
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable


def matches_schema(content: str, schema: Any) -> bool:
    """Whether the text is JSON that satisfies the schema; False too when the schema itself makes no
    sense.

    Draft 2020-12 unless the schema names another. References resolve inside the schema only:
    nothing is fetched.
    """
    try:
        reply = json.loads(content, parse_constant=_refuse_constant)
        validator_class = validator_for(schema, default=Draft202012Validator)
        validator_class.check_schema(schema)
        validator_class(schema, registry=Registry()).validate(reply)
    except (ValueError, SchemaError, ValidationError, Unresolvable, RecursionError, re.error):
        return False
    return True


def _refuse_constant(constant: str) -> None:
    """NaN and the infinities are Python's, not JSON's."""
    raise ValueError(f"{constant} is not JSON")
