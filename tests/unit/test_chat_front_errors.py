# SPDX-License-Identifier: AGPL-3.0-or-later
"""Every failure as OpenAI's error: the tables of the front's reference, row by row."""

import re
from typing import Any

import pytest

from horde.chat_contract import WORKER_FAULT_MESSAGES
from horde.oai.app import ChatFrontError, _kudos_cap_error, _wait_error, build_error
from horde.oai.errors import (
    NativeRefused,
    NativeUnavailable,
    RequestRefused,
    WaitDetails,
    WaitFailed,
    WaitFailure,
    build_defect,
    build_snake_case,
)

GAP = {
    "kind": "declaration_gap",
    "missing_declarations": ["reasoning_effort"],
    "exceeded_limits": [],
}


def refuse(
    status: int, rc: str | None, message: str = "native text", **extra: Any
) -> ChatFrontError:
    body = {"message": message, **extra} | ({} if rc is None else {"rc": rc})
    return build_error(NativeRefused(status, body))


def name_as_sent(param: str) -> str:
    return "max_completion_tokens" if param == "max_tokens" else param


ROWS: list[tuple[int, str | None, str, int, str, str | None]] = [
    (401, "InvalidAPIKey", "m", 401, "invalid_api_key", None),
    (401, "SharedKeyInvalid", "m", 401, "invalid_api_key", None),
    (401, None, "m", 401, "invalid_api_key", None),
    (
        400,
        "BadRequest",
        "'tools[0].function.name' is required.",
        400,
        "invalid_value",
        "tools[0].function.name",
    ),
    (400, "BadRequest", "The body is not JSON.", 400, "invalid_value", None),
    (
        400,
        "UnsupportedChatParameter",
        "'logprobs' is not supported on chat requests.",
        400,
        "unsupported_parameter",
        "logprobs",
    ),
    (
        400,
        "UnsupportedChatParameter",
        "'n=2' is not supported on chat requests.",
        400,
        "unsupported_value",
        "n",
    ),
    (
        400,
        "UnsupportedChatParameter",
        "'messages[0].role=banana' is not supported on chat requests.",
        400,
        "unsupported_value",
        "messages[0].role",
    ),
    (
        400,
        "UnsupportedChatParameter",
        "'messages' may hold at most 1024 messages.",
        400,
        "unsupported_value",
        "messages",
    ),
    (
        400,
        "UnsupportedChatParameter",
        "messages[2].role: An assistant message with ...",
        400,
        "invalid_value",
        "messages[2].role",
    ),
    (
        400,
        "UnsupportedChatParameter",
        "messages: An assistant message with ...",
        400,
        "invalid_value",
        "messages",
    ),
    (
        400,
        "UnsupportedChatParameter",
        "Invalid schema for function 'f': In context=(), no",
        400,
        "invalid_function_parameters",
        "tools",
    ),
    (
        400,
        "UnsupportedChatParameter",
        "Invalid schema for response_format 'f': In context=(), no",
        400,
        "invalid_json_schema",
        "response_format",
    ),
    (
        400,
        "ChatRequestConflict",
        (
            "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are"
            " specified."
        ),
        400,
        "conflicting_parameters",
        "tool_choice",
    ),
    (
        400,
        "ChatRequestConflict",
        (
            "'messages' must contain the word 'json' in some form, to use 'response_format' of type"
            " 'json_object'."
        ),
        400,
        "conflicting_parameters",
        "messages",
    ),
    (
        400,
        "ChatRequestConflict",
        "'horde.only' and 'horde.ignore' cannot be combined.",
        400,
        "conflicting_parameters",
        "horde.only",
    ),
    (400, "OperationKeyConflict", "m", 400, "operation_key_conflict", "horde.operation_key"),
    (400, "PromptExceedsContext", "m", 400, "context_length_exceeded", "messages"),
    (400, "InvalidPromptSize", "m", 400, "context_length_exceeded", "messages"),
    (400, "TokenOverflow", "m", 400, "context_length_exceeded", "max_tokens"),
    (400, "TooManyStopSequences", "m", 400, "invalid_value", "stop"),
    (400, "ExcessiveStopSequence", "m", 400, "invalid_value", "stop"),
    (400, "TooManyExtraSourceImages", "m", 400, "too_many_images", "messages"),
    (400, "SourceImageSizeExceeded", "m", 400, "image_too_large", "messages"),
    (400, "SourceImageResolutionExceeded", "m", 400, "image_too_large", "messages"),
    (400, "SourceImageUnreadable", "m", 400, "invalid_image", "messages"),
    (400, "SourceImageUrlInvalid", "m", 400, "invalid_image_url", "messages"),
    (400, "SourceImageUrlRefused", "m", 400, "invalid_image_url", "messages"),
    (400, "CorruptPrompt", "m", 400, "content_policy_violation", "messages"),
    (400, "NulByteInPayload", "m", 400, "invalid_value", None),
    (400, "InvalidPromptEncoding", "m", 400, "invalid_prompt_encoding", None),
    (403, "KudosUpfront", "m", 403, "insufficient_kudos", "max_tokens"),
    (403, "SharedKeyInsufficientKudos", "m", 403, "insufficient_kudos", None),
    (403, "SharedKeyEmpty", "m", 403, "insufficient_kudos", None),
    (403, "SharedKeyExpired", "m", 403, "key_not_allowed", None),
    (403, "SharedKeyAssignedStyles", "m", 403, "key_not_allowed", None),
    (403, "DeletedUser", "m", 403, "account_disabled", None),
    (403, "TimeoutIP", "m", 403, "address_timeout", None),
    (404, "UnknownChatModel", "Nobody knows 'a'.", 404, "model_not_found", "model"),
    (
        404,
        "UnknownChatModel",
        "'models[1]': nobody knows 'a'.",
        404,
        "model_not_found",
        "models[1]",
    ),
    (404, "WorkerNotFound", "m", 404, "worker_not_found", "horde.only"),
    (403, "NoEligibleWorker", "m", 503, "no_worker_available", "model"),
    (413, "RequestTooLarge", "m", 413, "request_too_large", None),
    (429, "TooManyPrompts", "m", 429, "rate_limit_exceeded", None),
    (429, None, "m", 429, "rate_limit_exceeded", None),
    (400, "MaintenanceMode", "m", 503, "maintenance_mode", None),
    (503, "ChatAdmissionDisabled", "m", 503, "admission_disabled", None),
    (503, "ChatImageStorageUnavailable", "m", 503, "image_storage_unavailable", None),
    (500, None, "m", 502, "upstream_error", None),
    (501, "SomethingNew", "m", 502, "upstream_error", None),
    # SDKs would repeat it as if the client had been slow.
    (408, "SomethingNew", "m", 502, "upstream_error", None),
    (409, "SomethingNew", "m", 502, "upstream_error", None),
    (418, "SomethingNewHere", "m", 418, "something_new_here", None),
]


@pytest.mark.parametrize(("status", "rc", "message", "front_status", "code", "param"), ROWS)
def test_a_native_refusal_has_its_row(
    status: int, rc: str | None, message: str, front_status: int, code: str, param: str | None
) -> None:
    answer = refuse(status, rc, message).answer
    assert (answer.status, answer.code, answer.param, answer.message) == (
        front_status,
        code,
        param,
        message,
    )
    assert answer.metadata == ({} if rc is None else {"rc": rc})


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("params.max_length", "max_tokens"),
        ("params.stop_sequence", "stop"),
        ("params.max_context_length", "horde.max_context_length"),
        ("params.top_p", "top_p"),
    ],
)
def test_a_native_range_has_the_name_of_the_client(path: str, param: str) -> None:
    answer = refuse(
        400, "BadRequest", "Input payload validation failed", errors={path: "is too small"}
    ).answer
    assert (answer.code, answer.param) == ("invalid_value", param)
    assert answer.message.startswith("Input payload validation failed")
    assert "is too small" in answer.message


def test_the_client_s_own_name_of_the_token_limit_is_used() -> None:
    refused = NativeRefused(403, {"message": "m", "rc": "KudosUpfront"})
    assert build_error(refused, name_as_sent).answer.param == "max_completion_tokens"
    both = RequestRefused("conflicting_parameters", "m", "max_tokens")
    assert build_error(both, name_as_sent).answer.param == "max_tokens"


def test_a_native_gap_is_404_with_its_reason() -> None:
    answer = refuse(403, "NoEligibleWorker", impossible_reason=GAP).answer
    assert (answer.status, answer.code, answer.message) == (
        404,
        "no_worker_supports_features",
        "native text",
    )
    assert answer.metadata == {"rc": "NoEligibleWorker", "impossible_reason": GAP}
    too_long = {"missing_declarations": [], "exceeded_limits": ["max_length"]}
    answer = refuse(403, "NoEligibleWorker", impossible_reason=too_long).answer
    assert (answer.status, answer.code, answer.param) == (
        400,
        "context_length_exceeded",
        "max_tokens",
    )


def test_retry_after_is_passed_on() -> None:
    limited = build_error(NativeRefused(429, {"message": "m"}, "7")).answer
    assert limited.headers == {"Retry-After": "7"}
    assert refuse(429, None).answer.headers == {}
    maintenance = refuse(400, "MaintenanceMode").answer
    assert maintenance.headers == {"Retry-After": "60", "x-should-retry": "false"}


def test_a_defect_names_its_request_and_discourages_another_try() -> None:
    assert build_defect(None).build_body()["error"].keys() == {"message", "type", "param", "code"}
    queued = build_defect("id")
    assert (queued.status, queued.code, queued.metadata) == (
        500,
        "internal_error",
        {"request_id": "id"},
    )
    assert queued.headers == {"x-should-retry": "false"}


def test_a_new_try_is_discouraged_where_it_would_not_help() -> None:
    for rc in ("ChatAdmissionDisabled", "NoEligibleWorker"):
        assert refuse(503, rc).answer.headers["x-should-retry"] == "false"
    for rc in ("InvalidAPIKey", "TooManyPrompts", "ChatImageStorageUnavailable"):
        assert "x-should-retry" not in refuse(503, rc).answer.headers
    assert "x-should-retry" not in build_error(NativeUnavailable("gone")).answer.headers


def test_33_the_kudos_cap_reads_its_numbers() -> None:
    text = (
        "The request's kudos estimate at current pricing is 215, above its horde.max_kudos of 1. "
        "The estimate assumes the full max_tokens is generated."
    )
    answer = _kudos_cap_error(
        NativeRefused(400, {"message": text, "rc": "ChatKudosCapExceeded"})
    ).answer
    assert answer.build_body() == {
        "error": {
            "message": text,
            "type": "invalid_request_error",
            "param": "horde.max_kudos",
            "code": "max_kudos_exceeded",
            "metadata": {"rc": "ChatKudosCapExceeded", "kudos_estimate": 215, "max_kudos": 1},
        }
    }


@pytest.mark.parametrize(
    ("missing", "exceeded", "status", "code", "param", "text"),
    [
        (
            ["a", "b"],
            [],
            404,
            "no_worker_supports_features",
            None,
            "no online worker serving the model declares a, b.",
        ),
        (
            [],
            ["max_length"],
            400,
            "context_length_exceeded",
            "max_tokens",
            "it exceeds the limit max_length of every online worker serving the model.",
        ),
        (
            [],
            ["max_context_length", "max_length"],
            400,
            "context_length_exceeded",
            "messages",
            "max_context_length, max_length",
        ),
        (
            [],
            ["tools_max_temperature"],
            404,
            "no_worker_supports_features",
            None,
            "tools_max_temperature",
        ),
        (
            ["vision"],
            ["max_length"],
            404,
            "no_worker_supports_features",
            None,
            "declares vision and it exceeds the limit max_length",
        ),
    ],
)
def test_78_a_gap_says_what_is_missing(
    missing: list[str], exceeded: list[str], status: int, code: str, param: str | None, text: str
) -> None:
    details = WaitDetails(
        impossible_reason={"missing_declarations": missing, "exceeded_limits": exceeded}
    )
    answer = _wait_error(WaitFailed(WaitFailure.DECLARATION_GAP, "id", details)).answer
    assert (answer.status, answer.code, answer.param) == (status, code, param)
    assert answer.message.startswith("No worker can serve this request: ")
    assert text in answer.message
    assert answer.message.endswith(". The request was cancelled.")
    assert answer.metadata == {"request_id": "id"}


@pytest.mark.parametrize(
    "missing", [["prompt_overflow_refused"], ["structured_output_enforced", "tool_choice_enforced"]]
)
def test_a_gap_of_guarantees_alone_says_what_goes_without_them(missing: list[str]) -> None:
    """A strict request finds workers that promise less when it asks for them."""
    reason = {"missing_declarations": missing, "exceeded_limits": []}
    failed = WaitFailed(WaitFailure.DECLARATION_GAP, "id", WaitDetails(impossible_reason=reason))
    assert 'horde.conformance: "best_effort"' in _wait_error(failed).answer.message
    mixed = {"missing_declarations": [*missing, "vision"], "exceeded_limits": []}
    failed = WaitFailed(WaitFailure.DECLARATION_GAP, "id", WaitDetails(impossible_reason=mixed))
    assert "best_effort" not in _wait_error(failed).answer.message


@pytest.mark.parametrize(
    ("exceeded", "advice"),
    [
        ("max_length", "'max_tokens'"),
        ("max_context_length", "'horde.max_context_length'"),
        ("tools_max_temperature", "'temperature'"),
    ],
)
def test_a_gap_of_a_limit_says_what_to_lower(exceeded: str, advice: str) -> None:
    reason = {"missing_declarations": [], "exceeded_limits": [exceeded]}
    failed = WaitFailed(WaitFailure.DECLARATION_GAP, "id", WaitDetails(impossible_reason=reason))
    assert advice in _wait_error(failed).answer.message


@pytest.mark.parametrize(
    "kind",
    [WaitFailure.NO_WORKER_GRACE, WaitFailure.FAIL_FAST_NOBODY, WaitFailure.DEADLINE],
)
def test_a_request_that_speed_alone_rules_out_is_told_the_length_that_is_served(
    kind: WaitFailure,
) -> None:
    """Under the client's own name of the key."""
    failed = WaitFailed(kind, "id", WaitDetails(largest_max_length=120))
    answer = build_error(failed, name_as_sent).answer
    assert "'max_completion_tokens' to 120 or less" in answer.message
    assert answer.param == "max_completion_tokens"
    assert answer.metadata["largest_max_length"] == 120
    hopeless = WaitFailed(kind, "id", WaitDetails(largest_max_length=3))
    assert "to 3" not in build_error(hopeless).answer.message


@pytest.mark.parametrize("kind", sorted(set(WaitFailure) - {WaitFailure.DECLARATION_GAP}))
def test_every_failure_of_a_queued_request_says_what_to_do(kind: WaitFailure) -> None:
    message = _wait_error(WaitFailed(kind, "id")).answer.message
    assert re.search(r"Send |Choose |Lower |come back|can be read", message)


def test_a_retry_is_never_asked_for_at_once() -> None:
    refused = NativeRefused(429, {"message": "2 per 1 second"}, retry_after="0")
    assert build_error(refused).answer.headers["Retry-After"] == "1"


WAITS: list[tuple[WaitFailure, WaitDetails, int, str, str | None, dict[str, Any]]] = [
    (
        WaitFailure.FAIL_FAST_NOBODY,
        WaitDetails(wait_time=3),
        503,
        "no_worker_available",
        "horde.availability_mode",
        {},
    ),
    (
        WaitFailure.FAIL_FAST_WAIT,
        WaitDetails(wait_time=900, queue_position=3),
        503,
        "wait_exceeds_budget",
        "horde.availability_mode",
        {"wait_time": 900},
    ),
    (WaitFailure.NO_WORKER_GRACE, WaitDetails(), 503, "no_worker_available", None, {}),
    (
        WaitFailure.DEADLINE,
        WaitDetails(wait_time=9, queue_position=2),
        504,
        "wait_timeout",
        None,
        {"queue_position": 2, "wait_time": 9},
    ),
    (WaitFailure.DEADLINE, WaitDetails(), 504, "wait_timeout", None, {}),
    (
        WaitFailure.FAULTED,
        WaitDetails(
            fault_reason=WORKER_FAULT_MESSAGES["prompt_overflow"], fault_rc="ChatWorkerFault"
        ),
        400,
        "context_length_exceeded",
        "messages",
        {"rc": "ChatWorkerFault"},
    ),
    (
        WaitFailure.FAULTED,
        WaitDetails(
            fault_reason=WORKER_FAULT_MESSAGES["unbuildable_grammar"], fault_rc="ChatWorkerFault"
        ),
        400,
        "unbuildable_grammar",
        None,
        {"rc": "ChatWorkerFault"},
    ),
    (
        WaitFailure.FAULTED,
        WaitDetails(fault_reason="no JSON", fault_rc="ChatSubmitNonconformant"),
        502,
        "nonconformant_reply",
        None,
        {"rc": "ChatSubmitNonconformant"},
    ),
    (WaitFailure.FAULTED, WaitDetails(), 502, "generation_failed", None, {}),
    (
        WaitFailure.NO_GENERATION,
        WaitDetails(),
        502,
        "no_generation",
        None,
        {"rc": "ChatRequestNoGeneration"},
    ),
    (
        WaitFailure.REQUEST_LOST,
        WaitDetails(fault_rc="RequestNotFound"),
        502,
        "request_lost",
        None,
        {"rc": "RequestNotFound"},
    ),
    (WaitFailure.STREAM_DIVERGED, WaitDetails(), 502, "stream_diverged", None, {}),
    (WaitFailure.GENERATION_RESTARTED, WaitDetails(), 502, "generation_restarted", None, {}),
    (WaitFailure.SHUTTING_DOWN, WaitDetails(), 503, "front_shutting_down", None, {}),
]


@pytest.mark.parametrize(("kind", "details", "status", "code", "param", "metadata"), WAITS)
def test_a_failed_wait_has_its_row(
    kind: WaitFailure,
    details: WaitDetails,
    status: int,
    code: str,
    param: str | None,
    metadata: dict[str, Any],
) -> None:
    answer = _wait_error(WaitFailed(kind, "id", details)).answer
    assert (answer.status, answer.code, answer.param) == (status, code, param)
    assert answer.metadata == {"request_id": "id"} | metadata
    assert answer.headers == {"x-should-retry": "false"}


def test_the_reason_of_a_fault_is_the_message() -> None:
    failed = WaitFailed(
        WaitFailure.FAULTED,
        "id",
        WaitDetails(fault_reason="The worker's backend failed while generating."),
    )
    assert _wait_error(failed).answer.message == "The worker's backend failed while generating."


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, "invalid_request_error") for status in (400, 405, 413, 415, 422)),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        *((status, "server_error") for status in (500, 502, 503)),
        (504, "timeout_error"),
    ],
)
def test_the_type_follows_the_status(status: int, kind: str) -> None:
    body = build_error(RequestRefused("c", "m", status=status)).answer.build_body()
    assert body == {"error": {"message": "m", "type": kind, "param": None, "code": "c"}}


def test_codes_in_snake_case() -> None:
    assert build_snake_case("InvalidPromptEncoding") == "invalid_prompt_encoding"
    assert build_snake_case("InvalidAPIKey") == "invalid_api_key"
