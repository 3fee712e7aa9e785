# SPDX-License-Identifier: AGPL-3.0-or-later
"""How a completion fails, and the error each failure is answered with.

Failures are raised where the fact is known, without HTTP; `horde.oai.app` turns them into answers
with the tables here. Source: docs/reference/chat_front.md, "Errors".
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from horde_sdk.generation_parameters.text.chat_limits import MIN_CHAT_MAX_TOKENS

from horde.chat_contract import ChatRequestRefused, RefusalKind, build_gap_advice
from horde.json_text import JsonObject
from horde.return_codes import ReturnCode

NO_RETRY: Final[Mapping[str, str]] = MappingProxyType({"x-should-retry": "false"})
MAINTENANCE_RETRY_SECONDS: Final = 60
MAX_PARAM_CHARACTERS: Final = 256  # a refused key may be megabytes long; the answer is not
MAX_MESSAGE_CHARACTERS: Final = 4096  # the same of a message, which may quote several

_TYPES_BY_STATUS: Final[Mapping[int, str]] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        504: "timeout_error",
    }
)


_QUOTED_NAME: Final = re.compile(r"'([A-Za-z_]+(?:\[\d+\]|\.[A-Za-z_]+)*)'")


class WaitFailure(StrEnum):
    """Why a queued request gives no completion."""

    DECLARATION_GAP = "declaration_gap"
    FAIL_FAST_NOBODY = "fail_fast_nobody"
    FAIL_FAST_WAIT = "fail_fast_wait"
    NO_WORKER_GRACE = "no_worker_grace"
    DEADLINE = "deadline"
    FAULTED = "faulted"
    NO_GENERATION = "no_generation"
    REQUEST_LOST = "request_lost"
    STREAM_DIVERGED = "stream_diverged"
    GENERATION_RESTARTED = "generation_restarted"
    SHUTTING_DOWN = "shutting_down"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """An error as clients get it, in a response or in a stream. `headers` are those that belong to
    the error.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def build_body(self) -> JsonObject:
        """`{"error": {message, type, param, code}}`, with `metadata` when there is some."""
        kind = _TYPES_BY_STATUS.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error: JsonObject = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        if self.metadata:
            error["metadata"] = dict(self.metadata)
        return {"error": error}


def build_defect(request_id: str | None) -> ErrorAnswer:
    """500 of a defect in the front; once there is a native request, another try would queue, and be
    charged, again.
    """
    metadata, headers = ({}, {}) if request_id is None else ({"request_id": request_id}, NO_RETRY)
    message = (
        "The front failed to serve this request. Try again; if it goes on failing, tell its"
        " operator"
        " the 'x-request-id'."
    )
    return ErrorAnswer(
        status=500, code="internal_error", message=message, metadata=metadata, headers=headers
    )


class FrontFailure(Exception):
    """Every foreseen way in which a call of the front fails."""


class RequestRefused(FrontFailure):
    """The call as sent can never be served: found by the front, before anything was submitted.

    What it quotes of the call is shortened, since the client may have sent megabytes.
    """

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        metadata: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.code, self.status = code, status
        self.message = _shorten(message, MAX_MESSAGE_CHARACTERS)
        self.param = None if param is None else shorten_param(param)
        self.metadata, self.headers = metadata or {}, headers or {}
        super().__init__(self.message)


class NativeRefused(FrontFailure):
    """A definite refusal of the native API. `body` is its JSON object, `rate_limits` are headers
    for the client.
    """

    def __init__(
        self,
        status: int,
        body: Mapping[str, object],
        retry_after: str | None = None,
        rate_limits: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"native {status}")
        self.status, self.body, self.retry_after, self.rate_limits = (
            status,
            body,
            retry_after,
            rate_limits or {},
        )

    @property
    def rc(self) -> str | None:
        """The machine-readable reason, when there is one."""
        value = self.body.get("rc")
        return value if isinstance(value, str) else None

    @property
    def message(self) -> str:
        """The text for people."""
        value = self.body.get("message")
        return value if isinstance(value, str) and value else "The horde refused the request."


class NativeUnavailable(FrontFailure):
    """The native API cannot be reached, or answers what it never answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitDetails:
    """What was last known of a request that failed; None is unknown."""

    queue_position: int | None = None
    wait_time: float | None = None
    impossible_reason: Mapping[str, object] | None = None
    fault_reason: str | None = None
    fault_rc: str | None = None
    largest_max_length: int | None = None  # tokens, while the workers' speed alone is the reason


class WaitFailed(FrontFailure):
    """A queued request that gives no completion."""

    def __init__(
        self, kind: WaitFailure, request_id: str, details: WaitDetails | None = None
    ) -> None:
        super().__init__(kind.value)
        self.kind, self.request_id, self.details = kind, request_id, details or WaitDetails()


# --- refusals of the shared validation
# --------------------------------------------------------------------------------

_KINDS: Final[Mapping[RefusalKind, str]] = MappingProxyType(
    {
        RefusalKind.TYPE: "invalid_type",
        RefusalKind.MISSING: "missing_required_parameter",
        RefusalKind.VALUE: "invalid_value",
        RefusalKind.LIMIT: "unsupported_value",
        RefusalKind.UNSUPPORTED: "unsupported_parameter",
        RefusalKind.CONFLICT: "conflicting_parameters",
        RefusalKind.HISTORY: "invalid_value",
        RefusalKind.SCHEMA: "invalid_function_parameters",
        RefusalKind.INTEGER_BELOW: "integer_below_min_value",
        RefusalKind.INTEGER_ABOVE: "integer_above_max_value",
        RefusalKind.DECIMAL_BELOW: "decimal_below_min_value",
        RefusalKind.DECIMAL_ABOVE: "decimal_above_max_value",
    }
)


def build_contract_refusal(refused: ChatRequestRefused) -> RequestRefused:
    """What the shared validation refuses, with OpenAI's code and parameter."""
    param, code = refused.path, _KINDS[refused.kind]
    if refused.kind is RefusalKind.UNSUPPORTED and "=" in param:
        param, code = param.partition("=")[0], "unsupported_value"
    if refused.rc is ReturnCode.TOO_MANY_EXTRA_SOURCE_IMAGES:
        code = "too_many_images"
    if refused.kind is RefusalKind.SCHEMA and param == "response_format":
        code = "invalid_json_schema"
    return RequestRefused(code, refused.detail, param)


def locate_names(message: str, locate: Callable[[str], str]) -> str:
    """A message with the client's own names in its quotes; `locate` gives them."""
    return _QUOTED_NAME.sub(lambda name: f"'{locate(name.group(1))}'", message)


def shorten_param(param: str) -> str:
    """A parameter that fits into an answer, whatever was sent as a key."""
    return _shorten(param, MAX_PARAM_CHARACTERS)


def _shorten(text: str, limit_characters: int) -> str:
    return text if len(text) <= limit_characters else f"{text[:limit_characters]}…"


# --- refusals of the native API
# ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """How one native code is answered; a `param` of None is none."""

    status: int
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


_ROWS: Final[Mapping[str, _Row]] = MappingProxyType(
    {
        ReturnCode.INVALID_API_KEY: _Row(401, "invalid_api_key"),
        "SharedKeyInvalid": _Row(401, "invalid_api_key"),
        ReturnCode.OPERATION_KEY_CONFLICT: _Row(
            400, "operation_key_conflict", "horde.operation_key"
        ),
        ReturnCode.PROMPT_EXCEEDS_CONTEXT: _Row(400, "context_length_exceeded", "messages"),
        "InvalidPromptSize": _Row(400, "context_length_exceeded", "messages"),
        ReturnCode.TOKEN_OVERFLOW: _Row(400, "context_length_exceeded", "max_tokens"),
        ReturnCode.TOO_MANY_STOP_SEQUENCES: _Row(400, "invalid_value", "stop"),
        ReturnCode.EXCESSIVE_STOP_SEQUENCE: _Row(400, "invalid_value", "stop"),
        ReturnCode.TOO_MANY_EXTRA_SOURCE_IMAGES: _Row(400, "too_many_images", "messages"),
        "SourceImageSizeExceeded": _Row(400, "image_too_large", "messages"),
        "SourceImageResolutionExceeded": _Row(400, "image_too_large", "messages"),
        "SourceImageUnreadable": _Row(400, "invalid_image", "messages"),
        "SourceImageUrlInvalid": _Row(400, "invalid_image_url", "messages"),
        "SourceImageUrlRefused": _Row(400, "invalid_image_url", "messages"),
        ReturnCode.CORRUPT_PROMPT: _Row(400, "content_policy_violation", "messages"),
        ReturnCode.NUL_BYTE_IN_PAYLOAD: _Row(400, "invalid_value"),
        ReturnCode.KUDOS_UPFRONT: _Row(403, "insufficient_kudos", "max_tokens"),
        ReturnCode.SHARED_KEY_INSUFFICIENT_KUDOS: _Row(403, "insufficient_kudos"),
        ReturnCode.SHARED_KEY_EMPTY: _Row(403, "insufficient_kudos"),
        ReturnCode.SHARED_KEY_EXPIRED: _Row(403, "key_not_allowed"),
        ReturnCode.SHARED_KEY_ASSIGNED_STYLES: _Row(403, "key_not_allowed"),
        ReturnCode.DELETED_USER: _Row(403, "account_disabled"),
        ReturnCode.TIMEOUT_IP: _Row(403, "address_timeout"),
        ReturnCode.WORKER_NOT_FOUND: _Row(404, "worker_not_found", "horde.only"),
        ReturnCode.REQUEST_TOO_LARGE: _Row(413, "request_too_large"),
        ReturnCode.TOO_MANY_PROMPTS: _Row(429, "rate_limit_exceeded"),
        ReturnCode.MAINTENANCE_MODE: _Row(503, "maintenance_mode", None, NO_RETRY),
        ReturnCode.CHAT_ADMISSION_DISABLED: _Row(503, "admission_disabled", None, NO_RETRY),
        "ChatImageStorageUnavailable": _Row(503, "image_storage_unavailable"),
    }
)
_PARAMS_BY_NATIVE_NAME: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_length": "max_tokens",
        "stop_sequence": "stop",
        "max_context_length": "horde.max_context_length",
    }
)
_QUOTED_PATH: Final = re.compile(r"'([^']+)'")
_HISTORY_PATH: Final = re.compile(r"(messages(?:\[\d+\])?(?:\.\w+)?): ")
_CONFLICTING_KEYS: Final = (
    "tool_choice",
    "parallel_tool_calls",
    "horde.only",
    "max_tokens",
    "models",
)
_LIMIT_WORDS: Final = "' may "
_RETRIED_STATUSES: Final = frozenset({408, 409})  # the SDKs take them for something that passes
_WORD_START: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def build_native_refusal(refused: NativeRefused) -> ErrorAnswer:
    """The answer to a definite refusal of the native API; `max_tokens` stands for either of its
    names.
    """
    metadata: dict[str, object] = {} if refused.rc is None else {"rc": refused.rc}
    row, message = _find_row(refused)
    headers = dict(row.headers)
    if refused.retry_after is not None and row.status in {429, 503}:
        # A gateway's 0 would make clients come back at once.
        headers["Retry-After"] = "1" if refused.retry_after == "0" else refused.retry_after
    elif refused.rc == ReturnCode.MAINTENANCE_MODE:
        headers["Retry-After"] = str(MAINTENANCE_RETRY_SECONDS)
    param = None if row.param is None else shorten_param(row.param)
    return ErrorAnswer(
        status=row.status,
        code=row.code,
        message=message,
        param=param,
        metadata=metadata,
        headers=headers,
    )


def _find_row(refused: NativeRefused) -> tuple[_Row, str]:
    rc, message = refused.rc, refused.message
    errors = refused.body.get("errors")
    if isinstance(errors, Mapping) and errors:
        path, text = next(iter(errors.items()))
        return _Row(
            400, "invalid_value", _get_param_of_native_path(str(path))
        ), f"{message}: {text}"
    if rc is not None and rc in _ROWS:
        return _ROWS[rc], message
    found = _find_row_by_message(rc, message)
    if found is None and (refused.status >= 500 or refused.status in _RETRIED_STATUSES):
        found = _Row(502, "upstream_error")
    if found is None and refused.status == 429:
        found = _Row(429, "rate_limit_exceeded")
    if found is None and refused.status == 401:
        found = _Row(401, "invalid_api_key")
    return found or _Row(
        refused.status, build_snake_case(rc) if rc else "upstream_refused"
    ), message


def _find_row_by_message(rc: str | None, message: str) -> _Row | None:
    """The row of a code whose parameter, and sometimes whose code, stands only in the text."""
    leading = _QUOTED_PATH.match(message)
    if rc == ReturnCode.BAD_REQUEST:
        return _Row(400, "invalid_value", leading.group(1) if leading else None)
    if rc == ReturnCode.UNKNOWN_CHAT_MODEL:
        listed = leading.group(1) if leading else ""
        return _Row(404, "model_not_found", listed if listed.startswith("models[") else "model")
    if rc == ReturnCode.CHAT_REQUEST_CONFLICT:
        return _Row(400, "conflicting_parameters", _find_conflicting_key(message))
    if rc == ReturnCode.UNSUPPORTED_CHAT_PARAMETER:
        return _find_unsupported_row(message, leading.group(1) if leading else None)
    return None


def _find_conflicting_key(message: str) -> str | None:
    quoted: Sequence[str] = _QUOTED_PATH.findall(message)
    if "messages" in quoted:
        return "messages"
    return next((key for key in quoted if key in _CONFLICTING_KEYS), None)


def _find_unsupported_row(message: str, path: str | None) -> _Row:
    if message.startswith("Invalid schema for function "):
        return _Row(400, "invalid_function_parameters", "tools")
    if message.startswith("Invalid schema for response_format "):
        return _Row(400, "invalid_json_schema", "response_format")
    if history := _HISTORY_PATH.match(message):
        return _Row(400, "invalid_value", history.group(1))
    if path is not None and "=" in path:
        return _Row(400, "unsupported_value", path.partition("=")[0])
    return _Row(
        400, "unsupported_value" if _LIMIT_WORDS in message else "unsupported_parameter", path
    )


def _get_param_of_native_path(path: str) -> str:
    """The client's name for a path of a native `errors` map, such as `params.max_length`."""
    name = path.removeprefix("params.")
    return _PARAMS_BY_NATIVE_NAME.get(name, name)


def build_snake_case(rc: str) -> str:
    """`InvalidPromptEncoding` as `invalid_prompt_encoding`."""
    return _WORD_START.sub("_", rc).lower()


# --- failures of a queued request
# -------------------------------------------------------------------------------------

LENGTH_LIMITS: Final = frozenset({"max_length", "max_context_length"})


def build_gap_message(reason: Mapping[str, object]) -> str:
    """What no online worker of the model offers, as one clause, and what to change about it."""
    missing, exceeded = (
        list_names(reason, "missing_declarations"),
        list_names(reason, "exceeded_limits"),
    )
    clauses = []
    if missing:
        clauses.append(f"no online worker serving the model declares {', '.join(missing)}")
    if exceeded:
        limit = "limit" if len(exceeded) == 1 else "limits"
        clauses.append(
            f"it exceeds the {limit} {', '.join(exceeded)} of every online worker serving the model"
        )
    clause = " and ".join(clauses) or "no online worker serving the model accepts it"
    return f"{clause}.{build_gap_advice(missing, exceeded)}"


def describe_speed_limit(largest_max_length: int) -> str:
    """Why nobody takes a request that asks for more tokens than any online worker is fast enough
    for.
    """
    if largest_max_length < MIN_CHAT_MAX_TOKENS:
        return (
            "No online worker is fast enough now, not even for the least 'max_tokens' of"
            f" {MIN_CHAT_MAX_TOKENS}. Choose another model, or come back later."
        )
    return (
        "No online worker is fast enough for a reply of this length. Lower 'max_tokens' to"
        f" {largest_max_length} or less, or choose another model."
    )


def list_names(reason: Mapping[str, object], key: str) -> list[str]:
    """One of the lists of an impossible reason."""
    names = reason.get(key)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def build_gap_answer(
    reason: Mapping[str, object], message: str, metadata: Mapping[str, object]
) -> ErrorAnswer:
    """404 for what no worker offers; 400 when the request is only too long for all of them."""
    missing, exceeded = (
        list_names(reason, "missing_declarations"),
        list_names(reason, "exceeded_limits"),
    )
    if exceeded and not missing and LENGTH_LIMITS.issuperset(exceeded):
        param = "messages" if "max_context_length" in exceeded else "max_tokens"
        return ErrorAnswer(
            status=400,
            code="context_length_exceeded",
            message=message,
            param=param,
            metadata=metadata,
        )
    return ErrorAnswer(
        status=404, code="no_worker_supports_features", message=message, metadata=metadata
    )
