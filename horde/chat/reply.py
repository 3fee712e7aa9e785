# SPDX-License-Identifier: AGPL-3.0-or-later
"""A reply as it is priced, stored and shown.

Source: docs/reference/chat_requests.md, "Structured submit" and "Pricing".
"""

from horde_sdk.worker.chat_declaration import ChatFinishReason

from horde.chat.wire import ChatExtras, Reply, ToolCall
from horde.json_body import replace_unstorable


def chat_reply_finish_reason(
    finish_reason: str, message: Reply, chat_extras: ChatExtras | None
) -> str:
    """The finish reason as stored: calls under a forced function finish with `stop`, as OpenAI's
    do.
    """
    is_forced = isinstance((chat_extras or {}).get("tool_choice"), dict)
    if is_forced and message.get("tool_calls") and finish_reason == ChatFinishReason.TOOL_CALLS:
        return str(ChatFinishReason.STOP)
    return finish_reason


def list_reply_texts(message: Reply) -> list[str]:
    """What the model wrote of a reply: content, reasoning, and each call's function name and
    arguments.
    """
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    called = [function[key] for function in functions for key in ("name", "arguments")]
    return [message.get("content") or "", message.get("reasoning_content") or "", *called]


def chat_reply_characters(message: Reply) -> int:
    """The characters a reply is priced by."""
    return sum(map(len, list_reply_texts(message)))


def build_stored_reply(message: Reply) -> Reply:
    """The reply as stored and shown: no character that Postgres refuses, calls and reasoning only
    when submitted.
    """
    stored: Reply = {"role": "assistant", "content": _replace_in(message.get("content"))}
    if message.get("tool_calls"):
        stored["tool_calls"] = [_build_stored_call(call) for call in message["tool_calls"]]
    if message.get("reasoning_content") is not None:
        stored["reasoning_content"] = replace_unstorable(message["reasoning_content"])
    return stored


def _replace_in(text: str | None) -> str | None:
    return None if text is None else replace_unstorable(text)


def _build_stored_call(call: ToolCall) -> ToolCall:
    function = call["function"]
    return {
        "id": replace_unstorable(call["id"]),
        "type": "function",
        "function": {
            "name": replace_unstorable(function["name"]),
            "arguments": replace_unstorable(function["arguments"]),
        },
    }
