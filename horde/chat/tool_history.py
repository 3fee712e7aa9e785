# SPDX-License-Identifier: AGPL-3.0-or-later
"""The calls of a conversation and their answers.

Source: docs/reference/chat_requests.md, "Tools".
"""

from collections.abc import Mapping, Sequence

from horde.chat.wire import Message
from horde.chat_contract import ChatRequestRefused, RefusalKind
from horde.return_codes import ReturnCode


def check_tool_history(messages: Sequence[Message]) -> None:
    """Each call of an assistant message is answered at once, exactly once, by its id.

    Takes messages whose own shape was checked. Raises with OpenAI's wording, prefixed with the
    path.
    """
    issued: set[str] = set()
    unanswered: dict[str, None] = {}
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            _answer_call(index, message["tool_call_id"], issued, unanswered)
            continue
        if unanswered:
            raise _unanswered_calls(f"messages[{index}].role", unanswered)
        ids = [call["id"] for call in message.get("tool_calls") or ()]
        issued, unanswered = set(ids), dict.fromkeys(ids)
        if len(issued) != len(ids):
            repeated = next(call_id for call_id in issued if ids.count(call_id) > 1)
            detail = f"The tool call id '{repeated}' is repeated within one assistant message."
            raise _broken_history(f"messages[{index}].tool_calls", detail)
    if unanswered:
        raise _unanswered_calls("messages", unanswered)


def _answer_call(index: int, call_id: str, issued: set[str], unanswered: dict[str, None]) -> None:
    if not unanswered or (call_id in issued and call_id not in unanswered):
        detail = (
            "Invalid parameter: messages with role 'tool' must be a response to a preceding message"
            " with 'tool_calls'."
        )
        raise _broken_history(f"messages[{index}].role", detail)
    if call_id not in issued:
        detail = (
            f"Invalid parameter: 'tool_call_id' of '{call_id}' not found in 'tool_calls' of"
            " previous message."
        )
        raise _broken_history(f"messages[{index}].tool_call_id", detail)
    del unanswered[call_id]


def _unanswered_calls(path: str, unanswered: Mapping[str, None]) -> ChatRequestRefused:
    detail = (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to"
        " each 'tool_call_id'. "
        f"The following tool_call_ids did not have response messages: {', '.join(unanswered)}"
    )
    return _broken_history(path, detail)


def _broken_history(path: str, detail: str) -> ChatRequestRefused:
    message = f"{path}: {detail}"
    return ChatRequestRefused(
        path,
        message,
        ReturnCode.UNSUPPORTED_CHAT_PARAMETER,
        detail=detail,
        kind=RefusalKind.HISTORY,
    )
