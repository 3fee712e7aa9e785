# SPDX-License-Identifier: AGPL-3.0-or-later
"""Readers of keys that several forms of the front share.

A reader takes a key, its value and the whole body, and gives what is submitted, or `ABSENT`. It
raises RequestRefused, or ChatRequestRefused of the shared validation. Source:
docs/reference/chat_front.md, "Request".
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from horde_sdk.generation_parameters.text.chat_limits import (
    MAX_CHAT_MAX_TOKENS,
    MIN_CHAT_MAX_TOKENS,
    OPENAI_SAMPLING_RANGES,
)

from horde.chat.parameters import (
    check_choice_count,
    check_range,
    is_integer,
    is_number,
    models_combined,
    parse_model,
    parse_model_list,
    parse_reasoning_effort,
    parse_seed,
    parse_stop,
    parse_stream,
    require,
    require_integer,
    require_number,
    token_limits_differ,
)
from horde.chat_contract import (
    MAX_STOP_SEQUENCE_CHARACTERS,
    MAX_STOP_SEQUENCE_COUNT,
    ChatRequestRefused,
    malformed_value,
    parse_horde_options,
)
from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused, shorten_param
from horde.oai.leniency import CACHE_HINT, drop_keys

ABSENT: Final = object()
# Accepted by type and otherwise not read: they concern OpenAI's platform alone.
IGNORED_TYPES: Final[Mapping[str, type]] = MappingProxyType(
    {
        "user": str,
        "metadata": dict,
        "store": bool,
        "safety_identifier": str,
        "prompt_cache_key": str,
        "prompt_cache_retention": str,
        "prompt_cache_options": dict,
        "service_tier": str,
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
STREAM_OPTIONS: Final = frozenset(
    {"include_usage", "include_obfuscation", "continuous_usage_stats"}
)


type Reader = Callable[[str, object, JsonObject], object]


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


def read_model(key: str, value: object, body: JsonObject) -> object:
    """The one model."""
    model = parse_model(value)
    _check_one_way_to_name_models(key, "models", body)
    return model


def read_models(key: str, value: object, body: JsonObject) -> object:
    """Several models, of which the first free one serves; what is wrong with one is wrong with the
    list.
    """
    try:
        models = parse_model_list(value)
    except ChatRequestRefused as refused:
        raise ChatRequestRefused(key, refused.message, kind=refused.kind) from None
    _check_one_way_to_name_models(key, "model", body)
    return list(models)


def _check_one_way_to_name_models(key: str, other: str, body: JsonObject) -> None:
    """The later of the two is the one at fault."""
    if body.get(other) is not None and stands_before(other, key, body):
        raise models_combined()


def stands_before(first: str, second: str, body: JsonObject) -> bool:
    """Which of two keys comes first in a body that has one of them."""
    return next(key for key in body if key in (first, second)) == first


def read_token_limit(key: str, value: object, body: JsonObject) -> object:
    """The length of a reply in tokens, under either of its names."""
    limit = require_integer(value, key)
    check_range(key, limit, MIN_CHAT_MAX_TOKENS, MAX_CHAT_MAX_TOKENS, is_whole=True)
    other = "max_completion_tokens" if key == "max_tokens" else "max_tokens"
    twin = body.get(other)
    if is_integer(twin) and twin != limit and stands_before(other, key, body):
        raise token_limits_differ()
    return limit


def read_sampling(key: str, value: object, _body: JsonObject) -> object:
    """A number in OpenAI's range of its key."""
    number = require_number(value, key)
    check_range(key, number, *OPENAI_SAMPLING_RANGES[key], is_whole=False)
    return number


def read_seed(key: str, value: object, _body: JsonObject) -> object:
    """A signed 64-bit integer."""
    return parse_seed(value, key)


def read_stop(key: str, value: object, _body: JsonObject) -> object:
    """Stop sequences as a list, each once; the API holds them to these limits further on."""
    stops = parse_stop(value, key)
    if len(stops) > MAX_STOP_SEQUENCE_COUNT:
        raise malformed_value(key, f"may hold at most {MAX_STOP_SEQUENCE_COUNT} distinct sequences")
    if sum(map(len, stops)) > MAX_STOP_SEQUENCE_CHARACTERS:
        limit = f"may hold sequences of at most {MAX_STOP_SEQUENCE_CHARACTERS} characters together"
        raise malformed_value(key, limit)
    return stops or ABSENT


def read_stream(key: str, value: object, _body: JsonObject) -> object:
    """Whether to stream."""
    return parse_stream(value, key) or ABSENT


def read_stream_options(key: str, value: object, _body: JsonObject) -> object:
    """Checked here, and read by the front alone."""
    require(value, key, dict)
    for name, member in drop_keys(value, CACHE_HINT).items():
        if name not in STREAM_OPTIONS:
            raise unsupported(f"{key}.{name}")
        require(member, f"{key}.{name}", bool)
    return ABSENT


def read_ignored(key: str, value: object, _body: JsonObject) -> object:
    """A key that is held to its type and otherwise not read."""
    require(value, key, IGNORED_TYPES[key])
    return ABSENT


def drop(_key: str, _value: object, _body: JsonObject) -> object:
    """A key that is not even held to a type."""
    return ABSENT


def is_neutral(value: object, *neutral: object) -> bool:
    """Whether a value asks for nothing; 0 is not false here."""
    return any(type(value) is type(other) and value == other for other in neutral)


def read_absent_at(neutral: object, refuse: Callable[[str], RequestRefused]) -> Reader:
    """A reader of a key that asks for nothing at one value, and is refused at any other."""

    def read(key: str, value: object, _body: JsonObject) -> object:
        if is_neutral(value, neutral):
            return ABSENT
        raise refuse(key)

    return read


def read_choice_count(_key: str, value: object, _body: JsonObject) -> object:
    """One reply to a request, which asks for nothing."""
    check_choice_count(value)
    return ABSENT


def read_horde(_key: str, value: object, _body: JsonObject) -> object:
    """The horde's own options, as they were sent."""
    parse_horde_options(value)
    return drop_keys(value) or ABSENT


def read_neutral_sampler(key: str, value: object, _body: JsonObject) -> object:
    """A sampler key of local models at the value that changes nothing."""
    neutral = NEUTRAL_SAMPLERS[key]
    if is_number(value) and value in neutral:
        return ABSENT
    raise unsupported(
        key, f"only {' or '.join(map(str, neutral))}, which changes nothing, is accepted"
    )


def read_logprobs(key: str, value: object, _body: JsonObject) -> object:
    """No probabilities of tokens."""
    # Some web UIs send the number of the old completions.
    if value is False or (is_number(value) and value == 0):
        return ABSENT
    raise unsupported(key)


def read_top_logprobs(key: str, value: object, _body: JsonObject) -> object:
    """No probabilities of other tokens."""
    if is_number(value) and value == 0:
        return ABSENT
    raise unsupported(key)


def read_reasoning_effort(key: str, value: object, _body: JsonObject) -> object:
    """How much the model is to think; `key` is the client's name of it."""
    return parse_reasoning_effort(value, key)
