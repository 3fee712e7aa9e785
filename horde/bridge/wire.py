# SPDX-License-Identifier: AGPL-3.0-or-later
"""Shapes of what the bridge has checked: functions that a job offers, and calls of a reply."""

from typing import Literal, NotRequired, TypedDict, cast

from horde.json_text import JsonObject


class OfferedFunction(TypedDict):
    """What a tool does and takes."""

    name: str
    parameters: NotRequired[JsonObject | None]


class OfferedTool(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    function: OfferedFunction


class CalledFunction(TypedDict):
    """The function of a call; `arguments` is the model's text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call in OpenAI's shape."""

    id: str
    type: Literal["function"]
    function: CalledFunction


def get_messages(body: JsonObject) -> list[JsonObject]:
    """The messages of a request that `build_chat_body` made."""
    return cast(list[JsonObject], body["messages"])


def require_payload(body: JsonObject) -> JsonObject:
    """The payload of a pop's answer. Raises KeyError or TypeError."""
    payload = body["payload"]
    if not isinstance(payload, dict):
        raise TypeError("the payload is no object")
    return payload
