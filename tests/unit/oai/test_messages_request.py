# SPDX-License-Identifier: AGPL-3.0-or-later
"""The body of a message as a chat request: what a test with a worker cannot see."""

from typing import Any

import pytest

from horde.chat_contract import ChatContextFit
from horde.oai.anthropic.request import MessagesRequest
from horde.oai.errors import RequestRefused
from horde.setting_kinds import CONTEXT_FITS
from tests.integration.messages_front import TOOL, build_message


def get_functions(request: MessagesRequest) -> list[dict[str, Any]]:
    tools: Any = request.native_body["tools"]
    return [tool["function"] for tool in tools]


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


def nest(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("key", ["output_format", "output_config.format"])
def test_a_format_is_named_by_the_key_it_came_in(key: str) -> None:
    def build(schema: object) -> dict[str, object]:
        form = {"type": "json_schema", "schema": schema}
        return {key: form} if key == "output_format" else {"output_config": {"format": form}}

    assert parse(**build({})).locate("response_format") == key
    with pytest.raises(RequestRefused) as raised:
        parse(**build(nest(20)))
    assert raised.value.param == f"{key}.schema"
    assert f"'{key}.schema'" in raised.value.message


BASH = {"type": "bash_20250124", "name": "bash"}
EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}


@pytest.mark.parametrize("tool", [BASH, EDITOR, TOOL], ids=["bash", "editor", "custom"])
def test_any_tool_of_the_client_may_say_the_same(tool: dict[str, object]) -> None:
    [plain] = get_functions(parse(tools=[tool]))
    example = {"command": "view", "path": "a"}
    hints = {"strict": True, "input_examples": [example], "allowed_callers": ["direct"]}
    request = parse(tools=[tool | hints])
    [function] = get_functions(request)
    line = '{"command":"view","path":"a"}'
    assert function == plain | {"description": f"{plain['description']}\n{line}"}
    assert request.dropped_hints == ["tools.0.strict"]
    with pytest.raises(RequestRefused) as raised:
        parse(tools=[tool | {"allowed_callers": ["code_execution_20250825"]}])
    assert raised.value.param == "tools.0.allowed_callers"


SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize("tools", [[SEARCH], [SEARCH, TOOL]])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_a_count_takes_the_choice_of_a_tool_that_it_only_counts(
    tools: list[object], choice: dict[str, object]
) -> None:
    body = build_message(tools=tools, tool_choice=choice)
    counted = MessagesRequest.parse_for_estimate(body).estimated_prompt_tokens
    without = build_message(tools=tools)
    assert counted == MessagesRequest.parse_for_estimate(without).estimated_prompt_tokens
    for tool_set in (tools, []):
        body = build_message(tools=tool_set, tool_choice={"type": "tool", "name": "another"})
        with pytest.raises(RequestRefused):
            MessagesRequest.parse_for_estimate(body)
