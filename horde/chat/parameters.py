# SPDX-License-Identifier: AGPL-3.0-or-later
"""Single keys of a chat request's body, each with its exact type.

Booleans are never numbers here, `64.0` is no integer, and null on an accepted key is the same as
absent. Source: docs/reference/chat_requests.md, "Request body".
"""

from collections.abc import Mapping
from typing import Final

from horde_sdk.generation_parameters.text.chat_limits import SUPPORTED_CHAT_CHOICE_COUNT
from horde_sdk.generation_parameters.text.chat_policy import ChatReasoningEffort

from horde.chat_contract import (
    MAX_CHAT_MODEL_COUNT,
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
_SEED_BITS: Final = 63  # a signed 64-bit integer


def check_known_keys(body: Mapping[str, object]) -> None:
    """Refuse the first key that a chat request does not have, null or not."""
    for key in body:
        if key not in ACCEPTED_KEYS:
            raise unsupported_parameter(key)


def check_unapplied_keys(body: Mapping[str, object]) -> None:
    """`stream_options`, `user` and `metadata` are accepted by type; their contents are not read and
    not stored.
    """
    for key, kind, expectation in (
        ("user", str, "has to be a string"),
        ("metadata", dict, "has to be an object"),
        ("stream_options", dict, "has to be an object"),
    ):
        value = body.get(key)
        if value is not None and not isinstance(value, kind):
            raise malformed_value(key, expectation)


def check_choice_count(value: object) -> None:
    """`n` is 1: each further choice would need a job and a stored reply of its own."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise malformed_value("n", "has to be an integer")
    if value != SUPPORTED_CHAT_CHOICE_COUNT:
        raise unsupported_parameter(f"n={value}")


def parse_stream(value: object) -> bool:
    """Whether the worker is asked for progress."""
    if value is None:
        return False
    if not isinstance(value, bool):
        raise malformed_value("stream", "has to be a boolean")
    return value


def parse_models(body: Mapping[str, object]) -> tuple[str, ...]:
    """The models that may serve the request, from exactly one of `model` and `models`."""
    model, models = body.get("model"), body.get("models")
    if model is not None and not isinstance(model, str):
        raise malformed_value("model", "has to be a string")
    if models is not None and not isinstance(models, list):
        raise malformed_value("models", "has to be an array of strings")
    if model is not None and models is not None:
        raise request_conflict("models", "'model' and 'models' cannot be combined.")
    if models is None:
        if not model:
            raise malformed_value("model", "is required: send a model, or a list as 'models'")
        return (model,)
    return _parse_model_list(models)


def _parse_model_list(models: list[object]) -> tuple[str, ...]:
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
    limits = {}
    for key in ("max_tokens", "max_completion_tokens"):
        value = body.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise malformed_value(key, "has to be an integer")
        limits[key] = value
    if len(set(limits.values())) > 1:
        raise request_conflict(
            "max_tokens",
            "'max_tokens' and 'max_completion_tokens' have to be equal when both are sent.",
        )
    return next(iter(limits.values()), None)


def parse_decimal(body: Mapping[str, object], key: str) -> float | None:
    """A number that may have decimals. A negative zero is stored as zero, since both mean the same
    request.
    """
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise malformed_value(key, "has to be a number")
    try:
        return float(value) + 0.0
    except OverflowError:
        raise malformed_value(key, "is beyond every accepted number") from None


def parse_seed(value: object) -> int | None:
    """Any signed 64-bit integer, forwarded exactly."""
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not -(1 << _SEED_BITS) <= value < 1 << _SEED_BITS
    ):
        raise malformed_value("seed", "has to be a signed 64-bit integer")
    return value


def parse_stop(value: object) -> list[str] | None:
    """Stop sequences in order, repeats once; null and an empty array are none. An empty one would
    end every reply.
    """
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise malformed_value("stop", "has to be a non-empty string or an array of them")
    return list(dict.fromkeys(stops)) or None


def parse_reasoning_effort(value: object) -> str | None:
    """One of OpenAI's efforts, forwarded unchanged and without a default."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in _REASONING_EFFORTS:
        raise malformed_value(
            "reasoning_effort", f"has to be one of {', '.join(_REASONING_EFFORTS)}"
        )
    return value
