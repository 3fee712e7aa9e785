# SPDX-License-Identifier: AGPL-3.0-or-later
"""Readers of keys that several forms of the front share.

A reader takes a key, its value and the whole body, and gives what is submitted, or `ABSENT`. It
raises RequestRefused, or ChatRequestRefused of the shared validation. Source:
docs/reference/chat_front.md, "Request".
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from horde_sdk.generation_parameters.text.chat_limits import (
    MAX_CHAT_MAX_TOKENS,
    MIN_CHAT_MAX_TOKENS,
    OPENAI_SAMPLING_RANGES,
    SUPPORTED_CHAT_CHOICE_COUNT,
)
from horde_sdk.generation_parameters.text.chat_policy import ChatReasoningEffort

from horde.chat_contract import (
    MAX_CHAT_MODEL_COUNT,
    MAX_STOP_SEQUENCE_CHARACTERS,
    MAX_STOP_SEQUENCE_COUNT,
    JsonObject,
    parse_horde_options,
)
from horde.oai.errors import RequestRefused, shorten_param
from horde.oai.leniency import CACHE_HINT, drop_keys

ABSENT: Final = object()
# Accepted by type and otherwise not read: they concern OpenAI's platform alone.
IGNORED_TYPES: Final[Mapping[str, tuple[type, str]]] = MappingProxyType(
    {
        "user": (str, "a string"),
        "metadata": (dict, "an object"),
        "store": (bool, "a boolean"),
        "safety_identifier": (str, "a string"),
        "prompt_cache_key": (str, "a string"),
        "prompt_cache_retention": (str, "a string"),
        "prompt_cache_options": (dict, "an object"),
        "service_tier": (str, "a string"),
    }
)

# Every chat job carries its own neutral samplers, so any other value could not be honoured.
NEUTRAL_SAMPLERS: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        "top_k": (0, -1),
        **dict.fromkeys(("min_p", "top_a"), (0,)),
        **dict.fromkeys(("repetition_penalty", "rep_pen", "repeat_penalty"), (1,)),
        **dict.fromkeys(("typical_p", "typical", "tfs", "tfs_z"), (1,)),
    }
)
_REASONING_EFFORTS: Final = tuple(effort.value for effort in ChatReasoningEffort)

SEED_BITS: Final = 63  # a signed 64-bit integer
STREAM_OPTIONS: Final = frozenset(
    {"include_usage", "include_obfuscation", "continuous_usage_stats"}
)


type Reader = Callable[[str, Any, JsonObject], object]


def read_keys(body: object, readers: Mapping[str, Reader], refuse: Reader) -> JsonObject:
    """The keys to submit, each checked at its place in the body; null is absent. `refuse` reads the
    keys that have no reader.
    """
    if not isinstance(body, dict):
        raise RequestRefused("invalid_json", "The body has to be a JSON object.")
    forwarded: JsonObject = {}
    for key, value in body.items():
        if value is None:
            continue
        accepted = readers.get(key, refuse)(key, value, body)
        if accepted is not ABSENT:
            forwarded[key] = accepted
    return forwarded


def require_model(body: JsonObject) -> None:
    """Refuse a body that names no model."""
    if body.get("model") is None and body.get("models") is None:
        raise RequestRefused(
            "missing_required_parameter", "You must provide a model parameter.", "model"
        )


def unsupported(key: str, advice: str | None = None) -> RequestRefused:
    """400 of a key that the horde does not honour."""
    name = shorten_param(key)
    message = f"Unsupported parameter: '{name}' is not supported by the horde" + (
        f"; {advice}." if advice else ". Leave it out."
    )
    return RequestRefused("unsupported_parameter", message, name)


def unsupported_value(key: str, message: str) -> RequestRefused:
    """400 of a value that the horde does not honour."""
    return RequestRefused("unsupported_value", f"Unsupported value: '{key}' {message}.", key)


def missing(path: str) -> RequestRefused:
    """400 of a key that has to be there."""
    return RequestRefused(
        "missing_required_parameter", f"Missing required parameter: '{path}'.", path
    )


def wrong_type(key: str, expectation: str) -> RequestRefused:
    """400 of a value of another type."""
    return RequestRefused("invalid_type", f"Invalid type for '{key}': expected {expectation}.", key)


def is_integer(value: object) -> bool:
    """Whether a value is a whole number as JSON writes one; a boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a number; a boolean is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_model(key: str, value: Any, body: JsonObject) -> object:
    """The one model."""
    if not isinstance(value, str):
        raise wrong_type(key, "a string")
    if not value:
        raise RequestRefused(
            "missing_required_parameter", "You must provide a model parameter.", "model"
        )
    check_one_way_to_name_models(key, "models", body)
    return value


def read_models(key: str, value: Any, body: JsonObject) -> object:
    """Several models, of which the first free one serves."""
    if not isinstance(value, list):
        raise wrong_type(key, "an array of strings")
    if not 1 <= len(value) <= MAX_CHAT_MODEL_COUNT or not all(
        isinstance(model, str) and model for model in value
    ):
        message = (
            f"Invalid value: 'models' has to hold 1 to {MAX_CHAT_MODEL_COUNT} non-empty strings."
        )
        raise RequestRefused("invalid_value", message, key)
    if len(set(value)) != len(value):
        raise RequestRefused("invalid_value", "Invalid value: 'models' lists a model twice.", key)
    check_one_way_to_name_models(key, "model", body)
    return value


def check_one_way_to_name_models(key: str, other: str, body: JsonObject) -> None:
    """The later of the two is the one at fault."""
    if body.get(other) is not None and stands_before(other, key, body):
        raise RequestRefused(
            "conflicting_parameters", "'model' and 'models' cannot be combined.", "models"
        )


def stands_before(first: str, second: str, body: JsonObject) -> bool:
    """Which of two keys comes first in a body that has one of them."""
    return next(key for key in body if key in (first, second)) == first


def read_token_limit(key: str, value: Any, body: JsonObject) -> object:
    """The length of a reply in tokens, under either of its names."""
    if not is_integer(value):
        raise wrong_type(key, "an integer")
    check_range(key, value, MIN_CHAT_MAX_TOKENS, MAX_CHAT_MAX_TOKENS, kind="integer")
    other = "max_completion_tokens" if key == "max_tokens" else "max_tokens"
    twin = body.get(other)
    if is_integer(twin) and twin != value and stands_before(other, key, body):
        message = "'max_tokens' and 'max_completion_tokens' have to be equal when both are sent."
        raise RequestRefused("conflicting_parameters", message, "max_tokens")
    return value


def out_of_range(code: str, key: str, value: float, bound: str) -> RequestRefused:
    """400 of a number beyond a bound, which completes "a value of …"."""
    shown = str(value) if len(str(value)) <= 40 else "a number of many digits"
    return RequestRefused(
        code, f"Invalid '{key}': expected a value of {bound}, but got {shown} instead.", key
    )


def read_sampling(key: str, value: Any, _body: JsonObject) -> object:
    """A number in OpenAI's range of its key."""
    if not is_number(value):
        raise wrong_type(key, "a number")
    check_range(key, value, *OPENAI_SAMPLING_RANGES[key], kind="decimal")
    return value


def check_range(key: str, value: float, least: float, most: float, *, kind: str) -> None:
    """Refuse a number outside a range; `kind`, `integer` or `decimal`, is part of the code."""
    if value < least:
        raise out_of_range(f"{kind}_below_min_value", key, value, f"at least {least}")
    if value > most:
        raise out_of_range(f"{kind}_above_max_value", key, value, f"at most {most}")


def read_seed(key: str, value: Any, _body: JsonObject) -> object:
    """A signed 64-bit integer."""
    if not is_integer(value):
        raise wrong_type(key, "an integer")
    bound = 1 << SEED_BITS
    check_range(key, value, -bound, bound - 1, kind="integer")
    return value


def read_stop(key: str, value: Any, _body: JsonObject) -> object:
    """Stop sequences as a list, each once."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong_type(key, "a string or an array of strings")
    stops = list(dict.fromkeys(stops))
    if "" in stops:
        raise RequestRefused(
            "invalid_value",
            f"Invalid value: '{key}' holds an empty string, which would end every reply.",
            key,
        )
    if len(stops) > MAX_STOP_SEQUENCE_COUNT:
        message = (
            f"Invalid value: '{key}' may hold at most {MAX_STOP_SEQUENCE_COUNT} distinct sequences."
        )
        raise RequestRefused("invalid_value", message, key)
    if sum(map(len, stops)) > MAX_STOP_SEQUENCE_CHARACTERS:
        message = (
            f"Invalid value: the sequences of '{key}' may hold at most"
            f" {MAX_STOP_SEQUENCE_CHARACTERS} characters together."
        )
        raise RequestRefused("invalid_value", message, key)
    return stops or ABSENT


def read_stream(key: str, value: Any, _body: JsonObject) -> object:
    """Whether to stream."""
    if not isinstance(value, bool):
        raise wrong_type(key, "a boolean")
    return True if value else ABSENT


def read_stream_options(key: str, value: Any, _body: JsonObject) -> object:
    """Checked here, and read by the front alone."""
    if not isinstance(value, dict):
        raise wrong_type(key, "an object")
    for name, member in drop_keys(value, CACHE_HINT).items():
        if name not in STREAM_OPTIONS:
            raise unsupported(f"{key}.{name}")
        if not isinstance(member, bool):
            raise wrong_type(f"{key}.{name}", "a boolean")
    return ABSENT


def read_ignored(key: str, value: Any, _body: JsonObject) -> object:
    """A key that is held to its type and otherwise not read."""
    kind, expectation = IGNORED_TYPES[key]
    if not isinstance(value, kind):
        raise wrong_type(key, expectation)
    return ABSENT


def drop(_key: str, _value: Any, _body: JsonObject) -> object:
    """A key that is not even held to a type."""
    return ABSENT


def read_absent_at(neutral: object, refuse: Callable[[str], RequestRefused]) -> Reader:
    """A reader of a key that asks for nothing at one value, and is refused at any other."""

    def read(key: str, value: Any, _body: JsonObject) -> object:
        if type(value) is type(neutral) and value == neutral:
            return ABSENT
        raise refuse(key)

    return read


def read_choice_count(key: str, value: Any, _body: JsonObject) -> object:
    """One reply to a request, which asks for nothing."""
    if not is_integer(value):
        raise wrong_type(key, "an integer")
    if value != SUPPORTED_CHAT_CHOICE_COUNT:
        raise unsupported_value(key, "has to be 1: the horde gives one reply to a request")
    return ABSENT


def read_horde(_key: str, value: Any, _body: JsonObject) -> object:
    """The horde's own options, as they were sent."""
    parse_horde_options(value)
    return drop_keys(value) or ABSENT


def read_neutral_sampler(key: str, value: Any, _body: JsonObject) -> object:
    """A sampler key of local models at the value that changes nothing."""
    neutral = NEUTRAL_SAMPLERS[key]
    if is_number(value) and value in neutral:
        return ABSENT
    raise unsupported(
        key, f"only {' or '.join(map(str, neutral))}, which changes nothing, is accepted"
    )


def read_logprobs(key: str, value: Any, _body: JsonObject) -> object:
    """No probabilities of tokens."""
    # Some web UIs send the number of the old completions.
    if value is False or (is_number(value) and value == 0):
        return ABSENT
    raise unsupported(key)


def read_top_logprobs(key: str, value: Any, _body: JsonObject) -> object:
    """No probabilities of other tokens."""
    if is_number(value) and value == 0:
        return ABSENT
    raise unsupported(key)


def read_reasoning_effort(key: str, value: Any, _body: JsonObject) -> object:
    """How much the model is to think; `key` is the client's name of it."""
    if not isinstance(value, str):
        raise wrong_type(key, "a string")
    if value not in _REASONING_EFFORTS:
        message = f"Invalid value: '{key}' has to be one of {', '.join(_REASONING_EFFORTS)}."
        raise RequestRefused("invalid_value", message, key)
    return value
