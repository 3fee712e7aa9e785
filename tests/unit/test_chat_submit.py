# SPDX-License-Identifier: AGPL-3.0-or-later
"""A worker's structured submit: which bodies are one, their shape, and what is stored of them."""

from typing import Any

import pytest

from horde.classes.kobold.chat_request import (
    CHAT_WORKER_FAULT_MESSAGES,
    SubmissionState,
    build_stored_reply,
    chat_reply_characters,
    chat_reply_finish_reason,
    check_submitted_model,
    check_text_job_submission,
    is_chat_submission,
    parse_chat_submission,
)
from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode

CALL: dict[str, Any] = {
    "id": "call_bergen",
    "type": "function",
    "function": {"name": "lookup_weather", "arguments": '{"city":"Bergen"}'},
}
REPLY: dict[str, Any] = {
    "id": "job",
    "message": {"role": "assistant", "content": "Blue."},
    "finish_reason": "stop",
    "model_id": "m",
    "state": "ok",
}
FAULT = {"id": "job", "state": "faulted", "model_id": "m", "fault_reason": "prompt_overflow"}


def with_message(**keys: Any) -> dict[str, Any]:
    return REPLY | {"message": REPLY["message"] | keys}


def refusal_of(body: dict[str, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        parse_chat_submission(body)
    assert refused.value.rc is ReturnCode.CHAT_SUBMIT_INVALID
    return refused.value


@pytest.mark.parametrize(
    ("body", "is_chat"),
    [
        (REPLY, True),
        (FAULT, True),
        ({"id": "job", "generation": "x", "model_id": "m"}, True),
        ({"id": "job", "generation": "x", "state": "ok"}, False),
        ({"id": "job", "generation": "x", "message": None, "model_id": None}, False),
    ],
)
def test_body_with_a_chat_key_is_a_chat_submit(body: dict[str, Any], is_chat: bool) -> None:
    assert is_chat_submission(body) is is_chat


@pytest.mark.parametrize("key", ["message", "finish_reason", "model_id"])
@pytest.mark.parametrize("is_null", [True, False])
def test_reply_needs_each_required_key(key: str, is_null: bool) -> None:
    body = (
        REPLY | {key: None}
        if is_null
        else {name: value for name, value in REPLY.items() if name != key}
    )
    assert refusal_of(body).message == f"A chat job's submission needs '{key}'."


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"message": "Blue."}, "message"),
        ({"message": {"content": "Blue."}}, "message.role"),
        ({"message": {"role": "user", "content": "Blue."}}, "message.role"),
        ({"message": {"role": "assistant"}}, "message.content"),
        ({"message": {"role": "assistant", "content": None}}, "message.content"),
        ({"message": {"role": "assistant", "content": ["Blue."]}}, "message.content"),
        ({"message": {"role": "assistant", "content": "", "tool_calls": []}}, "message.tool_calls"),
        (
            {"message": {"role": "assistant", "content": "", "tool_calls": [CALL] * 129}},
            "message.tool_calls",
        ),
        (
            {"message": {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": ""}]}},
            "message.tool_calls[0].id",
        ),
        (
            {
                "message": {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [CALL | {"id": "x" * 257}],
                }
            },
            "tool_calls[0].id",
        ),
        (
            {
                "message": {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [CALL | {"type": "custom"}],
                }
            },
            "tool_calls[0].type",
        ),
        (
            {"message": {"role": "assistant", "content": "", "tool_calls": ["x"]}},
            "message.tool_calls[0]",
        ),
        (
            {"message": {"role": "assistant", "content": "", "reasoning_content": 1}},
            "message.reasoning_content",
        ),
        (
            {"message": {"role": "assistant", "content": "", "reasoning_content": "é" * 524_289}},
            "message.reasoning_content",
        ),
        ({"finish_reason": "eos"}, "finish_reason"),
        ({"finish_reason": "tool_calls"}, "tool_calls"),
        ({"finish_reason": 1}, "finish_reason"),
        ({"native_finish_reason": "x" * 33}, "native_finish_reason"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"completion_tokens": 10_000_001}, "completion_tokens"),
        ({"reasoning_tokens": True}, "reasoning_tokens"),
        ({"prompt_tokens": 21.0}, "prompt_tokens"),
        ({"state": "done"}, "state"),
        ({"model_id": 1}, "model_id"),
        ({"generation": "Blue."}, "generation"),
    ],
)
def test_malformed_submit_names_its_field(changes: dict[str, Any], field: str) -> None:
    assert field in refusal_of(REPLY | changes).message


def test_empty_content_and_zero_counts_are_a_complete_reply() -> None:
    submission = parse_chat_submission(
        with_message(content="") | {"prompt_tokens": 0, "reasoning_tokens": 0}
    )
    assert submission.message == {"role": "assistant", "content": ""}
    assert (
        submission.prompt_tokens,
        submission.completion_tokens,
        submission.reasoning_tokens,
    ) == (0, None, 0)


def test_keys_that_backends_add_are_dropped() -> None:
    body = with_message(
        refusal=None, annotations=[], tool_calls=[CALL | {"index": 0}], content=None
    ) | {"logprobs": {}}
    assert parse_chat_submission(body).message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
    }


@pytest.mark.parametrize("state", ["censored", "csam"])
def test_censored_reply_needs_a_message(state: str) -> None:
    assert parse_chat_submission(REPLY | {"state": state}).state == state
    assert "message" in refusal_of({"id": "job", "state": state, "model_id": "m"}).message


def test_fault_carries_neither_message_nor_finish_reason() -> None:
    submission = parse_chat_submission(FAULT)
    assert (submission.state, submission.model_id, submission.fault_reason, submission.message) == (
        SubmissionState.FAULTED,
        "m",
        "prompt_overflow",
        None,
    )
    assert "message" in refusal_of(FAULT | {"message": REPLY["message"]}).message
    assert "fault_reason" in refusal_of(FAULT | {"fault_reason": 1}).message


def test_fault_in_the_form_of_old_libraries_has_no_reason() -> None:
    submission = parse_chat_submission({"id": "job", "state": "faulted", "generation": "faulted"})
    assert (submission.state, submission.model_id, submission.fault_reason) == (
        SubmissionState.FAULTED,
        None,
        None,
    )
    check_submitted_model(submission, "m")


def test_reply_in_the_form_of_old_libraries_is_refused() -> None:
    assert "generation" in refusal_of({"id": "job", "state": "ok", "generation": "Blue."}).message


def test_text_job_takes_no_message() -> None:
    check_text_job_submission({"generation": "Blue.", "model_id": "m", "message": None})
    with pytest.raises(BadRequest) as refused:
        check_text_job_submission(REPLY)
    assert refused.value.rc is ReturnCode.CHAT_SUBMIT_INVALID


@pytest.mark.parametrize("body", [REPLY, FAULT])
def test_other_model_than_the_assigned_one_is_a_mismatch(body: dict[str, Any]) -> None:
    submission = parse_chat_submission(body)
    check_submitted_model(submission, "m")
    with pytest.raises(BadRequest) as refused:
        check_submitted_model(submission, "<model-name>")
    assert refused.value.rc is ReturnCode.CHAT_MODEL_MISMATCH
    assert (
        refused.value.message
        == "'model_id' has to be '<model-name>', the model this job was assigned."
    )


def test_priced_characters_are_content_reasoning_names_and_arguments() -> None:
    message = {
        "role": "assistant",
        "content": "Blue",
        "reasoning_content": "Hm",
        "tool_calls": [CALL, CALL],
    }
    assert chat_reply_characters(message) == 4 + 2 + 2 * (
        len("lookup_weather") + len('{"city":"Bergen"}')
    )
    assert chat_reply_characters({"role": "assistant", "content": None, "tool_calls": [CALL]}) == 31


def test_stored_reply_replaces_what_postgres_refuses_in_every_string() -> None:
    call = {"id": "a\x00", "type": "function", "function": {"name": "f\x00", "arguments": "\ud800"}}
    message = {
        "role": "assistant",
        "content": "a\x00b",
        "tool_calls": [call],
        "reasoning_content": "\x00",
    }
    assert build_stored_reply(message) == {
        "role": "assistant",
        "content": "a\ufffdb",
        "tool_calls": [
            {
                "id": "a\ufffd",
                "type": "function",
                "function": {"name": "f\ufffd", "arguments": "\ufffd"},
            }
        ],
        "reasoning_content": "\ufffd",
    }


def test_stored_reply_has_reasoning_only_when_it_was_submitted() -> None:
    assert build_stored_reply({"role": "assistant", "content": ""}) == {
        "role": "assistant",
        "content": "",
    }
    stored = build_stored_reply(
        {"role": "assistant", "content": "", "reasoning_content": "Let me think"}
    )
    assert stored == {"role": "assistant", "content": "", "reasoning_content": "Let me think"}


FORCED = {"tool_choice": {"type": "function", "function": {"name": "lookup_weather"}}}


@pytest.mark.parametrize(
    ("finish_reason", "extras", "stored"),
    [
        ("tool_calls", FORCED, "stop"),
        ("length", FORCED, "length"),
        ("tool_calls", {"tool_choice": "required"}, "tool_calls"),
        ("tool_calls", None, "tool_calls"),
    ],
)
def test_calls_under_a_forced_function_finish_with_stop(
    finish_reason: str, extras: Any, stored: str
) -> None:
    assert (
        chat_reply_finish_reason(finish_reason, {"content": None, "tool_calls": [CALL]}, extras)
        == stored
    )


def test_fault_messages_are_found_by_the_workers_word() -> None:
    assert (
        CHAT_WORKER_FAULT_MESSAGES.get("prompt_overflow")
        == "The worker could not fit the prompt into its context."
    )
    assert CHAT_WORKER_FAULT_MESSAGES.get("disk full on alice-pc") is None
    assert len(CHAT_WORKER_FAULT_MESSAGES) == 5
