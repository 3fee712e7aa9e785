# SPDX-License-Identifier: AGPL-3.0-or-later
"""Replies against clients' JSON Schemas, in helper processes that a hostile schema may hang or
fill.

A `pattern` can backtrack for hours inside C code and a `$ref` can fan out without end, so the check
runs where it can be killed: two seconds on the clock, bounded memory, nothing fetched.
"""

import json
from enum import Enum
from pathlib import Path
from typing import Final

from horde.exceptions import ServiceUnavailable
from horde.helper_process import HelperPool, HelperUnavailable

MAX_HELPER_COUNT: Final = 2  # per process; further checks wait for a free one
# Beside those in a check: hostile replies sent at once must not hold every thread of a server.
MAX_WAITING_COUNT: Final = 8


class SchemaVerdict(Enum):
    """What the helper says of a reply; the values are its answers."""

    MATCH = b"M"
    MISMATCH = b"X"
    NOT_JSON = b"J"
    UNCOMPILABLE = b"U"


class SchemaHelperUnavailable(ServiceUnavailable):
    """No helper is free or can be started: trouble of this machine, which no reply is judged by.
    The worker sends it again.
    """

    def __init__(self) -> None:
        super().__init__("The reply cannot be checked at the moment. Send it again.")


_pool: Final = HelperPool(
    Path(__file__).with_name("reply_schema_helper.py"),
    max_count=MAX_HELPER_COUNT,
    max_waiting_count=MAX_WAITING_COUNT,
    wait_seconds=5.0,  # a free helper may still have to start
    answer_seconds=2.0,
)


def judge_content_by_schema(content: str, schema: object) -> SchemaVerdict:
    """Whether a reply's text is JSON that matches a schema, by the draft its `$schema` declares or
    else 2020-12.

    Takes up to two seconds; no transaction may be open. A schema that does not compile, whose
    references do not resolve inside it, or that is over time or memory, is UNCOMPILABLE. Raises
    SchemaHelperUnavailable, a 503, when no helper can be started or comes free.
    """
    try:
        answer = _pool.ask(json.dumps([content, schema]).encode())
    except HelperUnavailable:
        raise SchemaHelperUnavailable from None
    return SchemaVerdict.UNCOMPILABLE if answer is None else SchemaVerdict(answer)
