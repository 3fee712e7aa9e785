# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a text completion's body becomes natively, and what is refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horde.oai.errors import RequestRefused
from horde.oai.text_mapping import TextHead, TextSample, build_choice
from horde.oai.text_schema import TextCompletionRequest


def parse(**changes: Any) -> TextCompletionRequest:
    body = {"model": "m", "prompt": "a"} | changes
    return TextCompletionRequest.parse(
        {key: value for key, value in body.items() if value is not ...}, 16
    )


def refuse(**changes: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestRefused) as raised:
        parse(**changes)
    assert raised.value.status == 400
    return raised.value.code, raised.value.param


def test_a_plain_body_asks_for_nothing_it_was_not_told() -> None:
    request = parse()
    assert request.native_body == {
        "models": ["m"],
        "params": {"n": 1, "max_length": 16},
        "context_fit": "grow",
    }
    assert (request.prompts, request.stream, request.echo) == (("a",), False, False)


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"model": ...}, "missing_required_parameter", "model"),
        ({"models": ["a"]}, "conflicting_parameters", "models"),
        ({"prompt": ...}, "missing_required_parameter", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": ["a", ""]}, "invalid_value", "prompt"),
        ({"prompt": [1, 2]}, "unsupported_value", "prompt"),
        ({"prompt": [[1], [2]]}, "unsupported_value", "prompt"),
        ({"prompt": ["a", 2]}, "unsupported_value", "prompt"),
        ({"prompt": [{}]}, "invalid_type", "prompt"),
        ({"prompt": 5}, "invalid_type", "prompt"),
        ({"prompt": ["a"] * 17}, "unsupported_value", "prompt"),
        ({"max_tokens": 8}, "integer_below_min_value", "max_tokens"),
        ({"max_tokens": 20000}, "integer_above_max_value", "max_tokens"),
        ({"temperature": 2.5}, "decimal_above_max_value", "temperature"),
        ({"n": 0}, "integer_below_min_value", "n"),
        ({"n": 21}, "integer_above_max_value", "n"),
        ({"n": 20, "prompt": ["a"] * 4}, "unsupported_value", "n"),
        ({"n": True}, "invalid_type", "n"),
        ({"best_of": 3}, "unsupported_value", "best_of"),
        ({"best_of": "1"}, "invalid_type", "best_of"),
        ({"echo": 1}, "invalid_type", "echo"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix"),
        ({"logprobs": 0}, "unsupported_parameter", "logprobs"),
        ({"logprobs": 5}, "unsupported_parameter", "logprobs"),
        ({"logit_bias": {"1": 2}}, "unsupported_parameter", "logit_bias"),
        ({"frequency_penalty": 1}, "unsupported_parameter", "frequency_penalty"),
        ({"presence_penalty": False}, "unsupported_parameter", "presence_penalty"),
        ({"seed": 1}, "unsupported_parameter", "seed"),
        ({"user": 1}, "invalid_type", "user"),
        ({"messages": []}, "unsupported_parameter", "messages"),
        ({"top_k": 201}, "integer_above_max_value", "top_k"),
        ({"top_k": 1.5}, "invalid_type", "top_k"),
        ({"min_p": 2}, "decimal_above_max_value", "min_p"),
        ({"rep_pen": 0.5}, "decimal_below_min_value", "rep_pen"),
        (
            {"rep_pen": 1.1, "repetition_penalty": 1.2},
            "conflicting_parameters",
            "repetition_penalty",
        ),
        ({"horde": 1}, "invalid_type", "horde"),
        ({"horde": {"nonsense": 1}}, "unsupported_parameter", "horde.nonsense"),
        ({"horde": {"max_kudos": 1}}, "unsupported_parameter", "horde.max_kudos"),
        ({"horde": {"conformance": "strict"}}, "unsupported_parameter", "horde.conformance"),
        ({"horde": {"context_fit": "truncate_oldest"}}, "invalid_value", "horde.context_fit"),
        ({"horde": {"context_fit": ["grow"]}}, "invalid_value", "horde.context_fit"),
        ({"horde": {"context_fit": ""}}, "invalid_value", "horde.context_fit"),
        ({"horde": {"context_fit": False}}, "invalid_value", "horde.context_fit"),
        (
            {"horde": {"only": ["a"], "ignore": ["b"]}},
            "conflicting_parameters",
            "horde.only",
        ),
        ({"horde": {"dry_run": True}, "stream": True}, "conflicting_parameters", "horde.dry_run"),
    ],
)
def test_what_cannot_be_honoured_is_refused(changes: dict[str, Any], code: str, param: str) -> None:
    assert refuse(**changes) == (code, param)


def test_values_that_ask_for_nothing_are_absent() -> None:
    nothing = {
        "suffix": "",
        "logprobs": False,
        "best_of": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "stop": [],
        "stream": False,
        "user": "u",
        "metadata": {},
        "store": True,
        "service_tier": "auto",
        "seed": None,
        "echo": None,
        "horde": {"context_fit": None, "max_kudos": None},
    }
    request = parse(**nothing)
    assert request.native_body["params"] == parse().native_body["params"]
    assert request.native_body["context_fit"] == "grow"
    assert parse(n=2, best_of=2).sample_count == 2


def test_two_names_of_one_sampler_may_say_the_same() -> None:
    params = parse(rep_pen=1.2, repeat_penalty=1.2, top_k=-1).native_body["params"]
    assert (params["rep_pen"], params["top_k"]) == (1.2, 0)


def test_options_become_native_keys() -> None:
    horde = {"only": ["a"], "trusted_workers": True, "slow_workers": False, "context_fit": "reject"}
    body = parse(horde=horde).native_body
    assert body["workers"] == ["a"]
    assert (body["worker_blacklist"], body["trusted_workers"]) == (False, True)
    assert (body["slow_workers"], body["context_fit"]) == (False, "reject")
    assert parse(horde={"ignore": ["a"]}).native_body["worker_blacklist"] is True


@pytest.mark.parametrize(
    ("native", "own"),
    [
        ("max_length", "max_tokens"),
        ("messages", "prompt"),
        ("rep_pen", "repetition_penalty"),
        ("stop_sequence", "stop"),
        ("model", "model"),
    ],
)
def test_native_names_are_told_as_the_client_s_own(native: str, own: str) -> None:
    assert parse(repetition_penalty=1.1).locate(native) == own


FACTS = TextHead(
    request_ids=("r",),
    created=1,
    prompts=("p",),
    sample_count=1,
    max_tokens=16,
    stops=("##", "END"),
    echo=False,
    include_usage=False,
)


@pytest.mark.parametrize(
    ("text", "state", "shown", "reason"),
    [
        (" blue", "ok", " blue", "stop"),
        ("a END b ## c", "ok", "a ", "stop"),
        ("##", "ok", "", "stop"),
        ("x" * 60, "ok", "x" * 60, "stop"),
        ("x" * 61, "ok", "x" * 61, "length"),
        ("x" * 61 + "##", "ok", "x" * 61, "stop"),
        ("x" * 99, "censored", "x" * 99, "content_filter"),
    ],
)
def test_a_text_ends_at_its_first_stop(text: str, state: str, shown: str, reason: str) -> None:
    sample = TextSample(text=text, state=state, worker_id="w", worker_name="n", model="m")
    choice = build_choice(FACTS, 0, sample)
    assert (choice.text, choice.finish_reason) == (shown, reason)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *("model", "models", "prompt", "max_tokens", "temperature", "top_p", "n", "best_of"),
        *("stop", "stream", "stream_options", "echo", "suffix", "logprobs", "logit_bias", "seed"),
        *("top_k", "min_p", "rep_pen", "repetition_penalty", "tfs", "horde", "user", "metadata"),
    ]
)


def find_refusal(body: dict[str, Any]) -> RequestRefused | None:
    try:
        TextCompletionRequest.parse(body, 16)
    except RequestRefused as refused:
        return refused
    return None


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=6))
def test_any_body_is_parsed_or_refused_with_a_code(changes: dict[str, Any]) -> None:
    for body in (changes, {"model": "m", "prompt": "a"} | changes):
        refused = find_refusal(body)
        assert refused is None or (refused.status == 400 and refused.code)
