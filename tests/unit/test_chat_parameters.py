# SPDX-License-Identifier: AGPL-3.0-or-later
"""A bad key is refused by API and front alike: in the API's words with its path, at the front with
OpenAI's code.
"""

from typing import Any

import pytest

from horde.chat_contract import ChatRequestRefused
from horde.classes.kobold.chat_request import parse_chat_request
from horde.oai.errors import RequestRefused
from horde.oai.schema import ChatCompletionRequest

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LARGE = 1 << 63


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"model": ""}, "model", "missing_required_parameter"),
        ({"model": 5}, "model", "invalid_type"),
        ({"model": None, "models": "a"}, "models", "invalid_type"),
        ({"model": None, "models": []}, "models", "invalid_value"),
        ({"models": ["a"]}, "models", "conflicting_parameters"),
        ({"max_tokens": "64"}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_completion_tokens": 64.0}, "max_completion_tokens", "invalid_type"),
        (
            {"max_tokens": 64, "max_completion_tokens": 65},
            "max_tokens",
            "conflicting_parameters",
        ),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"top_p": False}, "top_p", "invalid_type"),
        ({"seed": 1.0}, "seed", "invalid_type"),
        ({"seed": -LARGE - 1}, "seed", "integer_below_min_value"),
        ({"seed": LARGE}, "seed", "integer_above_max_value"),
        ({"stop": 5}, "stop", "invalid_type"),
        ({"stop": ["a", 5]}, "stop", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"n": "1"}, "n", "invalid_type"),
        ({"n": 2}, "n", "unsupported_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"reasoning_effort": 1}, "reasoning_effort", "invalid_type"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "invalid_value"),
        ({"user": 5}, "user", "invalid_type"),
        ({"metadata": []}, "metadata", "invalid_type"),
        ({"stream_options": True}, "stream_options", "invalid_type"),
    ],
)
def test_a_bad_key_is_refused_alike(changes: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ChatRequestRefused) as native:
        parse_chat_request(BODY | changes)
    assert native.value.path.partition("=")[0] == param
    assert f"'{param}" in native.value.message
    with pytest.raises(RequestRefused) as refused:
        ChatCompletionRequest.parse(BODY | changes)
    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize(
    ("changes", "is_whole", "bound"),
    [
        ({"max_tokens": 15}, True, "below_min"),
        ({"max_tokens": 16385}, True, "above_max"),
        ({"temperature": -0.5}, False, "below_min"),
        ({"temperature": 3}, False, "above_max"),
        ({"presence_penalty": -2.5}, False, "below_min"),
    ],
)
def test_a_number_out_of_range_has_a_code_for_its_bound(
    changes: dict[str, Any], is_whole: bool, bound: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        ChatCompletionRequest.parse(BODY | changes)
    kind = "integer" if is_whole else "decimal"
    assert refused.value.code == f"{kind}_{bound}_value"


def test_one_reply_is_explained_at_the_front() -> None:
    with pytest.raises(RequestRefused, match="one reply to a request"):
        ChatCompletionRequest.parse(BODY | {"n": 2})
