# SPDX-License-Identifier: AGPL-3.0-or-later
"""The last step of a reply's verification: its text has the form that the request asks for.

Apart from the other steps, since a strict schema is compiled in a helper process.
Source: docs/reference/chat_requests.md, "Reply verification".
"""

import json
from typing import NoReturn

from horde.chat.reply import nonconformant_reply
from horde.chat.strict_schema import find_strict_schema
from horde.chat.wire import ChatExtras, Reply
from horde.classes.kobold.reply_schema import SchemaVerdict, judge_content_by_schema


def check_response_format(message: Reply, extras: ChatExtras) -> None:
    """The text has the form the request asks for; a reply that only calls is exempt."""
    response_format = extras.get("response_format")
    content = message.get("content") or ""
    if response_format is None or (not content and message.get("tool_calls")):
        return
    json_schema = find_strict_schema(response_format)
    if json_schema is not None:
        _check_schema(content, json_schema["schema"])
    elif not _is_json_object(content):
        raise nonconformant_reply(
            f"The request's 'response_format' is '{response_format['type']}', so the reply has to"
            " be a JSON object."
        )


def _check_schema(content: str, schema: object) -> None:
    verdict = judge_content_by_schema(content, schema)
    if verdict is SchemaVerdict.UNCOMPILABLE:
        raise nonconformant_reply(
            "The reply cannot be checked: the request's 'response_format' schema cannot be"
            " compiled."
        )
    if verdict is SchemaVerdict.NOT_JSON:
        raise nonconformant_reply(
            "The request's 'response_format' is 'json_schema', so the reply has to be JSON."
        )
    if verdict is SchemaVerdict.MISMATCH:
        raise nonconformant_reply(
            "The reply does not match the request's 'response_format' schema."
        )


def _is_json_object(content: str) -> bool:
    try:
        return isinstance(json.loads(content, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
