# SPDX-License-Identifier: AGPL-3.0-or-later
"""Text parameters: types, ranges, and the rules across them."""

import pytest

from horde.exceptions import BadRequest, PayloadInvalid
from horde.return_codes import ReturnCode
from horde.shapes.text_params import check_text_param_rules, parse_text_params


@pytest.mark.parametrize(
    ("key", "lowest", "highest", "too_low", "too_high"),
    [
        ("n", 1, 20, 0, 21),
        ("max_length", 16, 16384, 15, 16385),
        ("max_context_length", 80, 1048576, 79, 1048577),
        ("temperature", 0, 5.0, -0.1, 5.1),
        ("top_p", 0.001, 1.0, 0, 1.1),
        ("top_k", 0, 200, -1, 201),
        ("rep_pen", 1, 3, 0.9, 3.1),
        ("rep_pen_range", 0, 4096, -1, 4097),
        ("dynatemp_exponent", 0, 5.0, -1, 6),
    ],
)
def test_bounds_are_inclusive_and_named_by_their_path(
    key: str, lowest: float, highest: float, too_low: float, too_high: float
) -> None:
    assert parse_text_params({key: lowest}) == {key: lowest}
    assert parse_text_params({key: highest}) == {key: highest}
    for value in (too_low, too_high):
        with pytest.raises(PayloadInvalid) as refused:
            parse_text_params({key: value})
        assert list(refused.value.extra["errors"]) == [f"params.{key}"]


def test_range_refusal_says_the_bound_in_plain_digits() -> None:
    with pytest.raises(PayloadInvalid) as refused:
        parse_text_params({"max_context_length": 2**21, "max_length": 8})
    assert refused.value.extra["errors"] == {
        "params.max_context_length": "2097152 is greater than the maximum of 1048576",
        "params.max_length": "8 is less than the minimum of 16",
    }


def test_whole_decimals_are_integers_nulls_absent_and_unknown_keys_ignored() -> None:
    params = parse_text_params(
        {"max_length": 64.0, "temperature": None, "quiet": True, "singleline": True, "n": 2}
    )
    assert params == {"max_length": 64, "singleline": True, "n": 2}
    assert isinstance(params["max_length"], int)
    assert parse_text_params(None) == {}


@pytest.mark.parametrize(
    "params",
    [
        {"n": True},
        {"n": "2"},
        {"n": 1.5},
        {"top_p": "1"},
        {"top_p": False},
        {"temperature": float("nan")},
        {"stop_sequence": "x"},
        {"stop_sequence": [1]},
        {"sampler_order": [0] * 65},
        {"sampler_order": [0.5]},
        {"singleline": 1},
        [],
    ],
)
def test_wrong_types_are_refused(params: object) -> None:
    with pytest.raises(PayloadInvalid):
        parse_text_params(params)


@pytest.mark.parametrize(
    ("params", "rc"),
    [
        ({"sampler_order": [0, 1, 2, 3, 4, 5, 5]}, ReturnCode.MISSING_FULL_SAMPLER_ORDER),
        (
            {"stop_sequence": [str(number) for number in range(129)]},
            ReturnCode.TOO_MANY_STOP_SEQUENCES,
        ),
        ({"stop_sequence": ["x" * 1000, "y" * 1001]}, ReturnCode.EXCESSIVE_STOP_SEQUENCE),
    ],
)
def test_rules_across_parameters_have_their_codes(
    params: dict[str, object], rc: ReturnCode
) -> None:
    with pytest.raises(BadRequest) as refused:
        check_text_param_rules(params, max_length=80, max_context_length=2048)
    assert refused.value.rc is rc


def test_length_above_the_context_is_a_token_overflow() -> None:
    with pytest.raises(BadRequest) as refused:
        check_text_param_rules({}, max_length=81, max_context_length=80)
    assert refused.value.rc is ReturnCode.TOKEN_OVERFLOW


def test_repeated_stops_are_kept_once_in_their_order() -> None:
    assert parse_text_params({"stop_sequence": ["b", "a", "b"]})["stop_sequence"] == ["b", "a"]


def test_only_distinct_stops_count() -> None:
    check_text_param_rules(
        {"stop_sequence": ["x" * 1500] * 200}, max_length=80, max_context_length=80
    )
