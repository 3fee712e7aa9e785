# SPDX-License-Identifier: AGPL-3.0-or-later
"""A worker's structured submit: which bodies are one, and their shape.

Source: docs/reference/chat_requests.md, "Structured submit" and "Reasoning".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from horde_sdk.generation_parameters.text.chat_limits import MAX_CHAT_TEXT_BYTES
from horde_sdk.worker.chat_declaration import ChatFinishReason

from horde.chat.flattening import count_utf8_bytes
from horde.chat.wire import Reply, ToolCall
from horde.chat_contract import (
    MAX_CHAT_TOOL_CALL_COUNT,
    MAX_CHAT_TOOL_CALL_ID_CHARACTERS,
)
from horde.exceptions import BadRequest
from horde.json_body import replace_unstorable
from horde.return_codes import ReturnCode
from horde.shapes.jobs import SubmissionState

MAX_NATIVE_FINISH_REASON_CHARACTERS: Final = 32
MAX_REPORTED_TOKENS: Final = 10_000_000
MAX_CHAT_FAULT_REASON_LENGTH: Final = 1000  # as it is stored
_CHAT_KEYS: Final = ("message", "model_id", "finish_reason", "fault_reason")
_FINISH_REASONS: Final = tuple(reason.value for reason in ChatFinishReason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSubmission:
    """A chat job's submit with its shape checked.

    With state `faulted` there is neither message nor finish reason, `fault_reason` is the worker's
    own word and never stored, and `model_id` is None on the form of old worker libraries.
    """

    state: SubmissionState
    model_id: str | None
    message: Reply | None = None
    finish_reason: str | None = None
    native_finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    fault_reason: str | None = None


def submission_invalid(message: str) -> BadRequest:
    """400 of a submit that cannot be a reply."""
    return BadRequest(message, ReturnCode.CHAT_SUBMIT_INVALID)


def is_chat_submission(body: Mapping[str, object]) -> bool:
    """Whether a body is read as a chat submit, which needs no `generation`."""
    return any(body.get(key) is not None for key in _CHAT_KEYS)


def check_text_job_submission(body: Mapping[str, object]) -> None:
    """A text job takes no structured reply."""
    if body.get("message") is not None:
        raise submission_invalid("A text job's submission cannot carry 'message'.")


def parse_chat_submission(body: Mapping[str, object]) -> ChatSubmission:
    """The submit of a chat job; null counts as absent, keys that are not known are left out.

    Raises BadRequest with ChatSubmitInvalid, naming the field.
    """
    state = _parse_state(body.get("state"))
    if state is SubmissionState.FAULTED:
        return _parse_fault(body)
    if body.get("generation") is not None:
        raise submission_invalid(
            "A chat job's submission carries 'message' and cannot carry 'generation'."
        )
    message = parse_reply_message(_require(body, "message"))
    return ChatSubmission(
        state=state,
        message=message,
        finish_reason=_parse_finish_reason(_require(body, "finish_reason"), message),
        model_id=_parse_string(_require(body, "model_id"), "model_id"),
        native_finish_reason=_parse_native_finish_reason(body.get("native_finish_reason")),
        prompt_tokens=_parse_count(body, "prompt_tokens"),
        completion_tokens=_parse_count(body, "completion_tokens"),
        reasoning_tokens=_parse_count(body, "reasoning_tokens"),
    )


def check_submitted_model(submission: ChatSubmission, assigned_model: str | None) -> None:
    """The model named is the one the job was assigned; a fault in the old form names none."""
    if submission.model_id is not None and submission.model_id != assigned_model:
        message = f"'model_id' has to be '{assigned_model}', the model this job was assigned."
        raise BadRequest(message, ReturnCode.CHAT_MODEL_MISMATCH)


def _parse_state(value: object) -> SubmissionState:
    if value is None:
        return SubmissionState.OK
    if not isinstance(value, str) or value not in SubmissionState:
        raise submission_invalid(f"'state' has to be one of {', '.join(SubmissionState)}.")
    return SubmissionState(value)


def _parse_fault(body: Mapping[str, object]) -> ChatSubmission:
    if body.get("message") is not None:
        raise submission_invalid("A faulted submission cannot carry 'message'.")
    model_id = body.get("model_id")
    # Worker libraries that predate chat end any job with a `generation`; the job must be able to
    # end.
    if model_id is None and body.get("generation") is None:
        _require(body, "model_id")
    fault_reason = body.get("fault_reason")
    return ChatSubmission(
        state=SubmissionState.FAULTED,
        model_id=None if model_id is None else _parse_string(model_id, "model_id"),
        fault_reason=None if fault_reason is None else _parse_string(fault_reason, "fault_reason"),
    )


def _require(body: Mapping[str, object], key: str) -> object:
    value: object = body.get(key)
    if value is None:
        raise submission_invalid(f"A chat job's submission needs '{key}'.")
    return value


def _parse_string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise submission_invalid(f"'{path}' has to be a string.")
    return value


def _parse_finish_reason(value: object, message: Reply) -> str:
    if not isinstance(value, str) or value not in _FINISH_REASONS:
        raise submission_invalid(f"'finish_reason' has to be one of {', '.join(_FINISH_REASONS)}.")
    if value == ChatFinishReason.TOOL_CALLS and "tool_calls" not in message:
        raise submission_invalid(
            "The 'finish_reason' is 'tool_calls', so the reply needs 'tool_calls'."
        )
    return value


def _parse_native_finish_reason(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_NATIVE_FINISH_REASON_CHARACTERS:
        limit = MAX_NATIVE_FINISH_REASON_CHARACTERS
        raise submission_invalid(
            f"'native_finish_reason' has to be a string of at most {limit} characters."
        )
    return replace_unstorable(value)


def _parse_count(body: Mapping[str, object], key: str) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 0 <= value <= MAX_REPORTED_TOKENS
    ):
        raise submission_invalid(f"'{key}' has to be an integer from 0 to {MAX_REPORTED_TOKENS}.")
    return value


def parse_reply_message(value: object) -> Reply:
    """The reply: role, content, and calls and reasoning when submitted. Everything else a backend
    adds is left out.
    """
    if not isinstance(value, dict):
        raise submission_invalid("'message' has to be an object.")
    if value.get("role") != "assistant":
        raise submission_invalid("'message.role' has to be 'assistant'.")
    content = value.get("content")
    message: Reply = {
        "role": "assistant",
        "content": None if content is None else _parse_string(content, "message.content"),
    }
    if value.get("tool_calls") is not None:
        message["tool_calls"] = _parse_calls(value["tool_calls"])
    if content is None and "tool_calls" not in message:
        raise submission_invalid(
            "'message.content' has to be a string unless the reply carries 'tool_calls'."
        )
    if value.get("reasoning_content") is not None:
        message["reasoning_content"] = _parse_reasoning(value["reasoning_content"])
    return message


def _parse_reasoning(value: object) -> str:
    reasoning = _parse_string(value, "message.reasoning_content")
    if count_utf8_bytes(reasoning) > MAX_CHAT_TEXT_BYTES:
        raise submission_invalid(
            f"'message.reasoning_content' may hold at most {MAX_CHAT_TEXT_BYTES} bytes."
        )
    return reasoning


def _parse_calls(value: object) -> list[ToolCall]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHAT_TOOL_CALL_COUNT:
        raise submission_invalid(
            f"'message.tool_calls' has to be an array of 1 to {MAX_CHAT_TOOL_CALL_COUNT} calls."
        )
    return [_parse_call(call, f"message.tool_calls[{index}]") for index, call in enumerate(value)]


def _parse_call(value: object, path: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise submission_invalid(f"'{path}' has to be an object with a 'function'.")
    if value.get("type") != "function":
        raise submission_invalid(f"'{path}.type' has to be 'function'.")
    call_id = _parse_string(value.get("id"), f"{path}.id")
    if not 1 <= len(call_id) <= MAX_CHAT_TOOL_CALL_ID_CHARACTERS:
        raise submission_invalid(
            f"'{path}.id' has to hold 1 to {MAX_CHAT_TOOL_CALL_ID_CHARACTERS} characters."
        )
    return {
        "id": call_id,
        "type": "function",
        "function": {
            "name": _parse_string(function.get("name"), f"{path}.function.name"),
            "arguments": _parse_string(function.get("arguments"), f"{path}.function.arguments"),
        },
    }
