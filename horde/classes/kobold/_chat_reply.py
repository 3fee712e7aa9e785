# SPDX-License-Identifier: AGPL-3.0-or-later
"""The steps of a reply's verification, each over the reply and the request's stored extras.

Source: docs/reference/chat_requests.md, "Reply verification".
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from horde_sdk.generation_parameters.text.chat_policy import (
    ChatResponseFormatType,
    ChatToolChoiceMode,
)

from horde.chat_contract import JsonObject
from horde.classes.kobold._chat_schema import SchemaVerdict, check_content_against_schema
from horde.classes.kobold._chat_submit import submission_invalid
from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode


def _nonconformant(message: str) -> BadRequest:
    return BadRequest(message, ReturnCode.CHAT_SUBMIT_NONCONFORMANT)


def explain_cut_reply(refused: BadRequest, max_length: int) -> BadRequest:
    """The refusal of a strict reply that ended at its limit of tokens: the cut is what broke its
    form, and the requester can mend it.
    """
    return _nonconformant(
        f"The reply was cut at the limit of {max_length} tokens before it was complete. Raise"
        f" 'max_tokens', or ask for a shorter reply. {refused.message}"
    )


def keep_single_call(message: JsonObject, extras: Mapping[str, Any]) -> tuple[JsonObject, int]:
    """The reply with its first call alone when parallel calls are off, and how many calls went."""
    calls = message.get("tool_calls") or []
    if extras.get("parallel_tool_calls") is not False or len(calls) < 2:
        return message, 0
    return message | {"tool_calls": calls[:1]}, len(calls) - 1


def check_called_functions(message: JsonObject, extras: Mapping[str, Any]) -> None:
    """Every call names a function that the request defined."""
    offered = {tool["function"]["name"] for tool in extras.get("tools") or ()}
    for name in _list_called_names(message):
        if name not in offered:
            raise submission_invalid(
                f"The reply calls '{name[:64]}', which is not among the request's tools."
            )


def check_call_ids(message: JsonObject) -> None:
    """No two calls share an id, or the client could not answer them apart."""
    ids = [call["id"] for call in message.get("tool_calls") or ()]
    if len(set(ids)) != len(ids):
        raise submission_invalid("Two of the reply's 'tool_calls' have the same 'id'.")


def check_tool_choice(message: JsonObject, extras: Mapping[str, Any]) -> None:
    """The calls are those the request's tool choice asks for."""
    choice = extras.get("tool_choice")
    names = _list_called_names(message)
    if choice == ChatToolChoiceMode.NONE.value and names:
        raise _nonconformant(
            "The request's 'tool_choice' is 'none', so the reply cannot carry 'tool_calls'."
        )
    if choice == ChatToolChoiceMode.REQUIRED.value and not names:
        raise _nonconformant(
            "The request's 'tool_choice' is 'required', so the reply needs 'tool_calls'."
        )
    if isinstance(choice, dict):
        forced = choice["function"]["name"]
        if not names or any(name != forced for name in names):
            raise _nonconformant(
                f"The request's 'tool_choice' is the function '{forced}', so the reply has to call"
                " it alone."
            )


def _list_called_names(message: JsonObject) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls") or ()]


def check_response_format(message: JsonObject, extras: Mapping[str, Any]) -> None:
    """The text has the form the request asks for; a reply that only calls is exempt."""
    response_format = extras.get("response_format")
    content = message.get("content") or ""
    if response_format is None or (not content and message.get("tool_calls")):
        return
    json_schema = response_format.get("json_schema") or {}
    if (
        response_format["type"] == ChatResponseFormatType.JSON_SCHEMA.value
        and json_schema.get("strict") is True
    ):
        _check_schema(content, json_schema["schema"])
    elif not _is_json_object(content):
        raise _nonconformant(
            f"The request's 'response_format' is '{response_format['type']}', so the reply has to"
            " be a JSON object."
        )


def _check_schema(content: str, schema: object) -> None:
    verdict = check_content_against_schema(content, schema)
    if verdict is SchemaVerdict.UNCOMPILABLE:
        raise _nonconformant(
            "The reply cannot be checked: the request's 'response_format' schema cannot be"
            " compiled."
        )
    if verdict is SchemaVerdict.NOT_JSON:
        raise _nonconformant(
            "The request's 'response_format' is 'json_schema', so the reply has to be JSON."
        )
    if verdict is SchemaVerdict.MISMATCH:
        raise _nonconformant("The reply does not match the request's 'response_format' schema.")


def _is_json_object(content: str) -> bool:
    try:
        return isinstance(json.loads(content, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
