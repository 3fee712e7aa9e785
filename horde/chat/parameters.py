# SPDX-License-Identifier: AGPL-3.0-or-later
"""Single keys of a chat request's body, each with its exact type, for API and front alike.

Booleans are never numbers here, `64.0` is no integer. A function that takes the body treats null
on its key as absent; one that takes a value is called for what was sent. Each raises
ChatRequestRefused. Source: docs/reference/chat_requests.md, "Request body".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeGuard

from horde_sdk.generation_parameters.text.chat_limits import SUPPORTED_CHAT_CHOICE_COUNT
from horde_sdk.generation_parameters.text.chat_policy import ChatReasoningEffort

from horde.chat_contract import (
    MAX_CHAT_MODEL_COUNT,
    ChatRequestRefused,
    RefusalKind,
    malformed_value,
    request_conflict,
    unsupported_parameter,
)

ACCEPTED_KEYS: Final = frozenset(
    {
        *(
            "model",
            "models",
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "stop",
            "n",
            "seed",
        ),
        *(
            "frequency_penalty",
            "presence_penalty",
            "reasoning_effort",
            "stream",
            "stream_options",
            "user",
            "metadata",
        ),
        *("tools", "tool_choice", "parallel_tool_calls", "response_format", "horde"),
    }
)
_REASONING_EFFORTS: Final = tuple(effort.value for effort in ChatReasoningEffort)
_SEED_BOUND: Final = 1 << 63  # a signed 64-bit integer
_EXPECTATIONS: Final[Mapping[type, str]] = MappingProxyType(
    {
        str: "has to be a string",
        bool: "has to be a boolean",
        dict: "has to be an object",
        list: "has to be an array",
    }
)


def require[T](value: object, key: str, kind: type[T]) -> T:
    """A string, boolean, object or array, by its type."""
    if not isinstance(value, kind):
        raise malformed_value(key, _EXPECTATIONS[kind], RefusalKind.TYPE)
    return value


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number as JSON writes one; a boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number; a boolean is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_integer(value: object, key: str) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise malformed_value(key, "has to be an integer", RefusalKind.TYPE)
    return value


def require_number(value: object, key: str) -> float:
    """A number, in the form in which it was read."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise malformed_value(key, "has to be a number", RefusalKind.TYPE)
    return value


def check_range(key: str, value: float, least: float, most: float, *, is_whole: bool) -> None:
    """Hold a number to both of its bounds; `is_whole` when it counts something."""
    if value < least:
        kind = RefusalKind.INTEGER_BELOW if is_whole else RefusalKind.DECIMAL_BELOW
        raise malformed_value(key, f"has to be at least {least}", kind)
    if value > most:
        kind = RefusalKind.INTEGER_ABOVE if is_whole else RefusalKind.DECIMAL_ABOVE
        raise malformed_value(key, f"has to be at most {most}", kind)


def check_known_keys(body: Mapping[str, object]) -> None:
    """Refuse the first key that a chat request does not have, null or not."""
    for key in body:
        if key not in ACCEPTED_KEYS:
            raise unsupported_parameter(key)


def check_unapplied_keys(body: Mapping[str, object]) -> None:
    """`stream_options`, `user` and `metadata` are accepted by type; their contents are not read and
    not stored.
    """
    for key, kind in (("user", str), ("metadata", dict), ("stream_options", dict)):
        if body.get(key) is not None:
            require(body[key], key, kind)


def check_choice_count(value: object) -> None:
    """`n` is 1: each further choice would need a job and a stored reply of its own."""
    if require_integer(value, "n") != SUPPORTED_CHAT_CHOICE_COUNT:
        detail = "'n' has to be 1: the horde gives one reply to a request."
        raise unsupported_parameter(f"n={value}", detail)


def parse_stream(value: object, key: str = "stream") -> bool:
    """Whether the worker is asked for progress."""
    return require(value, key, bool)


def parse_models(body: Mapping[str, object]) -> tuple[str, ...]:
    """The models that may serve the request, from exactly one of `model` and `models`."""
    model, models = body.get("model"), body.get("models")
    if model is not None:
        require(model, "model", str)
    if models is not None:
        require(models, "models", list)
    if model is not None and models is not None:
        raise models_combined()
    return (parse_model(model),) if models is None else parse_model_list(models)


def models_combined() -> ChatRequestRefused:
    """The refusal of a body that names its model in both ways."""
    return request_conflict("models", "'model' and 'models' cannot be combined.")


def parse_model(value: object) -> str:
    """The one model."""
    if value is None or value == "":
        expectation = "is required: send a model, or a list as 'models'"
        raise malformed_value("model", expectation, RefusalKind.MISSING)
    return require(value, "model", str)


def parse_model_list(value: object) -> tuple[str, ...]:
    """Several models, of which the first free one serves."""
    models = require(value, "models", list)
    if not 1 <= len(models) <= MAX_CHAT_MODEL_COUNT:
        raise malformed_value("models", f"has to hold 1 to {MAX_CHAT_MODEL_COUNT} models")
    parsed: list[str] = []
    for index, model in enumerate(models):
        if not isinstance(model, str) or not model:
            raise malformed_value(f"models[{index}]", "has to be a non-empty string")
        if model in parsed:
            raise malformed_value(f"models[{index}]", "is listed twice")
        parsed.append(model)
    return tuple(parsed)


def parse_token_limit(body: Mapping[str, object]) -> int | None:
    """`max_tokens` under either of its names; None when neither was sent. The range is checked with
    the others.
    """
    limits = {
        require_integer(body[key], key)
        for key in ("max_tokens", "max_completion_tokens")
        if body.get(key) is not None
    }
    if len(limits) > 1:
        raise token_limits_differ()
    return next(iter(limits), None)


def token_limits_differ() -> ChatRequestRefused:
    """The refusal of two names of one limit that say different lengths."""
    message = "'max_tokens' and 'max_completion_tokens' have to be equal when both are sent."
    return request_conflict("max_tokens", message)


def parse_decimal(body: Mapping[str, object], key: str) -> float | None:
    """A number that may have decimals. A negative zero is stored as zero, since both mean the same
    request.
    """
    if body.get(key) is None:
        return None
    try:
        return float(require_number(body[key], key)) + 0.0
    except OverflowError:
        raise malformed_value(key, "is beyond every accepted number") from None


def parse_seed(value: object, key: str = "seed") -> int:
    """Any signed 64-bit integer, forwarded exactly."""
    seed = require_integer(value, key)
    check_range(key, seed, -_SEED_BOUND, _SEED_BOUND - 1, is_whole=True)
    return seed


def parse_stop(value: object, key: str = "stop") -> list[str]:
    """Stop sequences in order, repeats once. An empty one would end every reply."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise malformed_value(key, "has to be a string or an array of strings", RefusalKind.TYPE)
    if "" in stops:
        raise malformed_value(key, "holds an empty string, which would end every reply")
    return list(dict.fromkeys(stops))


def parse_reasoning_effort(value: object, key: str = "reasoning_effort") -> str:
    """One of OpenAI's efforts, forwarded unchanged and without a default."""
    effort = require(value, key, str)
    if effort not in _REASONING_EFFORTS:
        raise malformed_value(key, f"has to be one of {', '.join(_REASONING_EFFORTS)}")
    return effort
