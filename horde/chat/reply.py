# SPDX-License-Identifier: AGPL-3.0-or-later
"""A reply: the steps of its verification, each over the reply and the request's stored extras, and
how it is priced, stored and shown.

Source: docs/reference/chat_requests.md, "Reply verification", "Structured submit" and "Pricing".
"""

from horde_sdk.generation_parameters.text.chat_policy import ChatToolChoiceMode
from horde_sdk.worker.chat_declaration import ChatFinishReason

from horde.chat.submission import submission_invalid
from horde.chat.wire import ChatExtras, Reply, ToolCall
from horde.exceptions import BadRequest
from horde.json_body import replace_unstorable
from horde.return_codes import ReturnCode


def nonconformant_reply(message: str) -> BadRequest:
    """400 of a reply that breaks a strict request's form."""
    return BadRequest(message, ReturnCode.CHAT_SUBMIT_NONCONFORMANT)


def explain_cut_reply(refused: BadRequest, max_length: int) -> BadRequest:
    """The refusal of a strict reply that ended at its limit of tokens: the cut is what broke its
    form, and the requester can mend it.
    """
    return nonconformant_reply(
        f"The reply was cut at the limit of {max_length} tokens before it was complete. Raise"
        f" 'max_tokens', or ask for a shorter reply. {refused.message}"
    )


def keep_single_call(message: Reply, extras: ChatExtras) -> tuple[Reply, int]:
    """The reply with its first call alone when parallel calls are off, and how many calls went."""
    calls = message.get("tool_calls") or []
    if extras.get("parallel_tool_calls") is not False or len(calls) < 2:
        return message, 0
    return message | {"tool_calls": calls[:1]}, len(calls) - 1


def check_called_functions(message: Reply, extras: ChatExtras) -> None:
    """Every call names a function that the request defined."""
    offered = {tool["function"]["name"] for tool in extras.get("tools") or ()}
    for name in _list_called_names(message):
        if name not in offered:
            raise submission_invalid(
                f"The reply calls '{name[:64]}', which is not among the request's tools."
            )


def check_call_ids(message: Reply) -> None:
    """No two calls share an id, or the client could not answer them apart."""
    ids = [call["id"] for call in message.get("tool_calls") or ()]
    if len(set(ids)) != len(ids):
        raise submission_invalid("Two of the reply's 'tool_calls' have the same 'id'.")


def check_tool_choice(message: Reply, extras: ChatExtras) -> None:
    """The calls are those the request's tool choice asks for."""
    choice = extras.get("tool_choice")
    names = _list_called_names(message)
    if choice == ChatToolChoiceMode.NONE.value and names:
        raise nonconformant_reply(
            "The request's 'tool_choice' is 'none', so the reply cannot carry 'tool_calls'."
        )
    if choice == ChatToolChoiceMode.REQUIRED.value and not names:
        raise nonconformant_reply(
            "The request's 'tool_choice' is 'required', so the reply needs 'tool_calls'."
        )
    if isinstance(choice, dict):
        forced = choice["function"]["name"]
        if not names or any(name != forced for name in names):
            raise nonconformant_reply(
                f"The request's 'tool_choice' is the function '{forced}', so the reply has to call"
                " it alone."
            )


def _list_called_names(message: Reply) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls") or ()]


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
