# SPDX-License-Identifier: AGPL-3.0-or-later
"""Sampling parameters of text and chat requests: types, ranges and the rules across them.

Source: docs/reference/text_requests.md, "Params"; docs/reference/chat_requests.md, "Request body".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypedDict, cast

from horde_sdk.generation_parameters.text.chat_limits import OPENAI_SAMPLING_RANGES

from horde.chat_contract import (
    MAX_CONTEXT_LENGTH,
    MAX_STOP_SEQUENCE_CHARACTERS,
    MAX_STOP_SEQUENCE_COUNT,
)
from horde.exceptions import BadRequest, PayloadInvalid
from horde.return_codes import ReturnCode

DEFAULT_TEXT_MAX_LENGTH: Final = 80
DEFAULT_MAX_CONTEXT_LENGTH: Final = 2048
MAX_SAMPLER_ORDER_COUNT: Final = 64  # backends know about seven samplers; a repeat is allowed
MIN_SAMPLER_ORDER_COUNT: Final = 7  # a backend applies an incomplete order as garbage


class TextParams(TypedDict, total=False):
    """The parameters of a request that were sent, each in its range; lengths are tokens."""

    n: int
    max_length: int
    max_context_length: int
    temperature: float
    top_p: float
    top_k: int
    top_a: float
    min_p: float
    tfs: float
    typical: float
    rep_pen: float
    rep_pen_range: int
    rep_pen_slope: float
    smoothing_factor: float
    dynatemp_range: float
    dynatemp_exponent: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    reasoning_effort: str
    stop_sequence: list[str]
    sampler_order: list[int]
    singleline: bool
    frmtadsnsp: bool
    frmtrmblln: bool
    frmtrmspch: bool
    frmttriminc: bool
    use_default_badwordsids: bool


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Inclusive bounds of one parameter."""

    minimum: float
    maximum: float
    is_integer: bool = False


TEXT_PARAM_RANGES: Final[Mapping[str, NumberRange]] = MappingProxyType(
    {
        "n": NumberRange(1, 20, is_integer=True),
        "max_length": NumberRange(16, 16384, is_integer=True),
        "max_context_length": NumberRange(80, MAX_CONTEXT_LENGTH, is_integer=True),
        "temperature": NumberRange(0, 5.0),
        "top_p": NumberRange(0.001, 1.0),
        "top_k": NumberRange(0, 200, is_integer=True),
        "top_a": NumberRange(0, 1.0),
        "min_p": NumberRange(0, 1.0),
        "tfs": NumberRange(0, 1.0),
        "typical": NumberRange(0, 1.0),
        "rep_pen": NumberRange(1, 3),
        "rep_pen_range": NumberRange(0, 4096, is_integer=True),
        "rep_pen_slope": NumberRange(0, 10),
        "smoothing_factor": NumberRange(0, 10.0),
        "dynatemp_range": NumberRange(0, 5.0),
        "dynatemp_exponent": NumberRange(0, 5.0),
    }
)
# Chat alone accepts these, in OpenAI's ranges; they travel beside the text parameters.
CHAT_PENALTY_RANGES: Final[Mapping[str, NumberRange]] = MappingProxyType(
    {
        key: NumberRange(*OPENAI_SAMPLING_RANGES[key])
        for key in ("frequency_penalty", "presence_penalty")
    }
)
# What the document of the routes says beside the ranges.
PARAM_NOTES: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "n": {"default": 1, "description": "Generations."},
        "max_length": {"default": DEFAULT_TEXT_MAX_LENGTH, "description": "Tokens to generate."},
        "max_context_length": {"default": DEFAULT_MAX_CONTEXT_LENGTH},
    }
)
TEXT_PARAM_LISTS: Final = ("sampler_order", "stop_sequence")
TEXT_PARAM_SWITCHES: Final = frozenset(
    {
        "singleline",
        "frmtadsnsp",
        "frmtrmblln",
        "frmtrmspch",
        "frmttriminc",
        "use_default_badwordsids",
    }
)


def build_params_schema() -> dict[str, object]:
    """The parameters in JSON Schema, for the document of the routes."""
    numbers = {
        name: {
            "type": "integer" if bounds.is_integer else "number",
            "minimum": bounds.minimum,
            "maximum": bounds.maximum,
            **PARAM_NOTES.get(name, {}),
        }
        for name, bounds in TEXT_PARAM_RANGES.items()
    }
    lists = {
        "sampler_order": {
            "type": "array",
            "items": {"type": "integer"},
            "description": f"At least {MIN_SAMPLER_ORDER_COUNT} different samplers.",
        },
        "stop_sequence": {
            "type": "array",
            "items": {"type": "string"},
            "description": (
                f"At most {MAX_STOP_SEQUENCE_COUNT}, {MAX_STOP_SEQUENCE_CHARACTERS} characters"
                " together."
            ),
        },
    }
    switches = {name: {"type": "boolean"} for name in sorted(TEXT_PARAM_SWITCHES)}
    return {"type": "object", "properties": {**numbers, **lists, **switches}}


def parse_text_params(params: object) -> TextParams:
    """The `params` of a text request: known keys without nulls, whole numbers as int.

    Unknown keys are left out, as older clients send many; `64.0` counts as a whole number.
    Raises PayloadInvalid with one entry per bad key, such as `params.max_length`.
    """
    if params is None:
        return {}
    if not isinstance(params, dict):
        raise PayloadInvalid({"params": "has to be an object"})
    parsed: dict[str, object] = {}
    errors: dict[str, str] = {}
    for key, value in params.items():
        if value is None:
            continue
        try:
            if (accepted := _parse_param(key, value)) is not None:
                parsed[key] = accepted
        except ValueError as error:
            errors[f"params.{key}"] = str(error)
    if errors:
        raise PayloadInvalid(errors)
    return cast(TextParams, parsed)


def _parse_param(key: str, value: object) -> object:
    """The value as stored; None for a key that is not known. Raises ValueError with the text of the
    refusal.
    """
    if (number_range := TEXT_PARAM_RANGES.get(key)) is not None:
        number = _parse_number(value, number_range)
        if (refusal := find_range_error(number, number_range)) is not None:
            raise ValueError(refusal)
        return number
    if key in TEXT_PARAM_SWITCHES:
        return _require_type(value, bool, "has to be a boolean")
    if key == "stop_sequence":
        if not isinstance(value, list) or not all(isinstance(stop, str) for stop in value):
            raise ValueError("has to be an array of strings")
        # Repeats end a reply no sooner, and would be stored and sent.
        return list(dict.fromkeys(value))
    if key == "sampler_order":
        if not isinstance(value, list) or len(value) > MAX_SAMPLER_ORDER_COUNT:
            raise ValueError(f"has to be an array of at most {MAX_SAMPLER_ORDER_COUNT} integers")
        return [_parse_integer(sampler) for sampler in value]
    return None


def _require_type(value: object, kind: type, expectation: str) -> object:
    if not isinstance(value, kind):
        raise ValueError(expectation)
    return value


def _parse_number(value: object, number_range: NumberRange) -> int | float:
    if number_range.is_integer:
        return _parse_integer(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("has to be a number")
    return value


def _parse_integer(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("has to be an integer")
    return value


def find_range_error(value: int | float, number_range: NumberRange) -> str | None:
    """What is wrong with a number; None when it lies inside. NaN never does."""
    if value > number_range.maximum:
        return f"{value} is greater than the maximum of {_write_bound(number_range.maximum)}"
    if not value >= number_range.minimum:
        return f"{value} is less than the minimum of {_write_bound(number_range.minimum)}"
    return None


def _write_bound(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def check_text_param_rules(
    params: Mapping[str, object], *, max_length: int, max_context_length: int
) -> None:
    """The rules that a range cannot say, checked after sizing. For text and chat alike.

    Raises BadRequest with TokenOverflow, MissingFullSamplerOrder, TooManyStopSequences or
    ExcessiveStopSequence.
    """
    if max_length > max_context_length:
        message = (
            f"The requested length of {max_length} tokens is above the context of"
            f" {max_context_length} tokens."
        )
        raise BadRequest(message, ReturnCode.TOKEN_OVERFLOW)
    order = params.get("sampler_order")
    if isinstance(order, list) and len(set(order)) < MIN_SAMPLER_ORDER_COUNT:
        message = (
            f"'sampler_order' has to hold at least {MIN_SAMPLER_ORDER_COUNT} distinct samplers."
        )
        raise BadRequest(message, ReturnCode.MISSING_FULL_SAMPLER_ORDER)
    stops = params.get("stop_sequence")
    if isinstance(stops, list):
        _check_stop_sequences(set(stops))


def _check_stop_sequences(stops: set[str]) -> None:
    if len(stops) > MAX_STOP_SEQUENCE_COUNT:
        message = f"A request may carry at most {MAX_STOP_SEQUENCE_COUNT} distinct stop sequences."
        raise BadRequest(message, ReturnCode.TOO_MANY_STOP_SEQUENCES)
    if sum(len(stop) for stop in stops) > MAX_STOP_SEQUENCE_CHARACTERS:
        message = (
            f"The stop sequences of a request may hold at most {MAX_STOP_SEQUENCE_CHARACTERS}"
            " characters together."
        )
        raise BadRequest(message, ReturnCode.EXCESSIVE_STOP_SEQUENCE)
