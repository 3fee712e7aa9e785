# SPDX-License-Identifier: AGPL-3.0-or-later
"""The body of a message as a chat request: what a test with a worker cannot see."""

import pytest

from horde.chat_contract import ChatContextFit
from horde.oai.anthropic.request import MessagesRequest
from horde.oai.errors import RequestRefused
from horde.setting_kinds import CONTEXT_FITS
from tests.integration.messages_front import TOOL, build_message


def parse(**changes: object) -> MessagesRequest:
    return MessagesRequest.parse(build_message(**changes), ChatContextFit.GROW)


def test_the_setting_knows_every_way_to_fit_a_context() -> None:
    assert set(CONTEXT_FITS) == {fit.value for fit in ChatContextFit}


@pytest.mark.parametrize(
    ("sent", "asked"), [(1, 16), (15, 16), (16, 16), (16384, 16384), (10**9, 16384)]
)
def test_lengths_are_brought_into_the_range_of_the_horde(sent: int, asked: int) -> None:
    assert parse(max_tokens=sent).native_body["max_tokens"] == asked


def test_the_context_grows_unless_the_client_or_the_operator_says_otherwise() -> None:
    assert parse().native_body["horde"] == {"context_fit": "grow"}
    own = {"context_fit": "reject", "slow_workers": False, "only": None}
    assert parse(horde=own).native_body["horde"] == {"context_fit": "reject", "slow_workers": False}
    request = MessagesRequest.parse(build_message(), ChatContextFit.REJECT)
    assert request.native_body["horde"] == {"context_fit": "reject"}


def test_paths_of_the_horde_are_those_of_the_client() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    call = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
    ]
    request = parse(messages=messages, tools=[search, TOOL])
    for native, own in {
        "messages[0].content": "system",
        "messages[1].content[0].image_url": "messages.1",
        "messages[2]": "messages.3",
        "messages[3].tool_call_id": "messages.4.content.0",
        "messages[99]": "messages",
        "messages": "messages",
        "tools[0].function.parameters": "tools.1.input_schema",
        "tools[0].function.name": "tools.1.name",
        "tools": "tools",
        "stop": "stop_sequences",
        "max_tokens": "max_tokens",
        "models[1]": "model",
        "response_format": "output_config.format",
        "horde.only": "horde.only",
    }.items():
        assert request.locate(native) == own


def test_the_first_key_at_fault_is_named_and_messages_come_last() -> None:
    body = build_message(messages=[{"role": "tool", "content": "a"}]) | {"seed": 1, "top_k": 5}
    with pytest.raises(RequestRefused) as raised:
        MessagesRequest.parse(body, ChatContextFit.GROW)
    assert raised.value.param == "seed"


def test_an_image_costs_what_the_horde_takes_for_one() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    plain = parse().estimated_prompt_tokens
    content = [{"type": "text", "text": "Name one colour."}, image]
    both = parse(messages=[{"role": "user", "content": content}]).estimated_prompt_tokens
    assert 512 <= both - plain <= 516
