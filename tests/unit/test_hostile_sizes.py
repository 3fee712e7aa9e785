# SPDX-License-Identifier: AGPL-3.0-or-later
"""A body of very many bad values is refused as quickly, and as briefly, as one of a single bad
value.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from horde.classes.kobold.chat_request import parse_chat_request
from horde.classes.kobold.text_request import parse_text_request
from horde.exceptions import BadRequest
from horde.json_body import MAX_JSON_VALUE_COUNT, parse_json_body
from horde.shapes.base import parse_shape
from horde.shapes.jobs import TextPopBody, TextSubmitBody

COUNT = 200_000
# Of the processor, which a busy machine does not stretch.
LONGEST_SECONDS = 0.5  # one error for each value took seconds of a whole process
MANY: list[Any] = [1] * COUNT
KEYS = {f"k{number}": 0 for number in range(COUNT)}
USER = [{"role": "user", "content": "x"}]


def parse_pop(body: Any) -> object:
    return parse_shape(TextPopBody, body)


def parse_submit(body: Any) -> object:
    return parse_shape(TextSubmitBody, body)


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_pop, {"name": "a", "models": MANY}),
        (parse_pop, {"name": "a", "models": ["m"], "priority_usernames": MANY}),
        (parse_submit, {"id": "a", "generation": "", "gen_metadata": MANY}),
        (parse_submit, {"id": "a", "generation": "", "gen_metadata": [{}] * COUNT}),
        (parse_text_request, {"prompt": "a", "models": MANY}),
        (parse_text_request, {"prompt": "a", "models": [1] * 1000}),
        (parse_text_request, {"prompt": "a", "workers": [1] * 1000}),
        (parse_text_request, {"prompt": "a", "params": {"sampler_order": ["a"] * COUNT}}),
        (parse_chat_request, {"model": "m", "messages": USER, "horde": KEYS}),
        (parse_chat_request, {"model": "m", "messages": USER, "horde": {"only": MANY}}),
        (parse_chat_request, {"model": "m", "messages": USER, "tools": [KEYS]}),
        (
            parse_chat_request,
            {
                "model": "m",
                "messages": USER,
                "tools": [{"type": "function", "function": KEYS}] * 128,
            },
        ),
        (
            parse_chat_request,
            {
                "model": "m",
                "messages": USER,
                "tools": [{"type": "function", "function": {"name": "f"} | KEYS}],
            },
        ),
        (parse_chat_request, {"model": "m", "messages": USER, "response_format": KEYS}),
        (
            parse_chat_request,
            {"model": "m", "messages": [{"role": "assistant", "tool_calls": [KEYS]}]},
        ),
        (parse_chat_request, {"model": "m", "messages": [{"role": "user", "content": MANY}]}),
        (parse_chat_request, {"model": "m", "messages": [{"role": "user", "content": "x"} | KEYS]}),
        (parse_chat_request, {"models": MANY, "messages": USER}),
        (parse_chat_request, {"model": "m", "messages": USER, "stop": MANY}),
        (parse_chat_request, {"model": "m", "messages": USER} | KEYS),
    ],
)
def test_very_many_bad_values_are_refused_at_once(
    parse: Callable[[Any], object], body: Any
) -> None:
    started = time.process_time()
    with pytest.raises(BadRequest) as refused:
        parse(body)
    assert time.process_time() - started < LONGEST_SECONDS
    assert len(json.dumps([refused.value.message, refused.value.extra])) < 2000


def test_an_unknown_key_is_named_among_very_many_good_ones() -> None:
    with pytest.raises(BadRequest, match=r"'horde\.typo' is not supported"):
        parse_chat_request(
            {"model": "m", "messages": USER, "horde": {"dry_run": True, "typo": 1, "other": 2}}
        )


def test_commas_in_a_text_are_no_values() -> None:
    prompt = ',[{\\"' * MAX_JSON_VALUE_COUNT
    assert parse_json_body(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}


@pytest.mark.parametrize("value", ["0", '"a,b"', "{}", '"\\""', '"\\\\"'])
def test_the_bound_on_values_counts_what_stands_outside_of_texts(value: str) -> None:
    allowed = MAX_JSON_VALUE_COUNT // 2 - 1
    assert len(parse_json_body(f"[{','.join([value] * allowed)}]".encode())) == allowed
    with pytest.raises(BadRequest):
        parse_json_body(f"[{','.join([value] * (MAX_JSON_VALUE_COUNT + 1))}]".encode())
