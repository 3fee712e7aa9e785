# SPDX-License-Identifier: AGPL-3.0-or-later
"""The rules that the native route and the front share."""

from typing import Any

import pytest

from horde.chat.flattening import (
    FlattenedChat,
    count_image_parts,
    estimate_flattened_tokens,
)
from horde.chat.strict_schema import check_strict_schemas
from horde.chat.tool_history import check_tool_history
from horde.chat.tools import (
    parse_response_format,
    parse_tool_choice,
    parse_tools,
)
from horde.chat_contract import (
    ChatRequestRefused,
    parse_horde_options,
)
from horde.return_codes import ReturnCode
from horde.token_estimate import TextSize

USER = {"role": "user", "content": "Weather in Oslo?"}


def build_call(call_id: str = "call_1") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "lookup_weather", "arguments": '{"city":"Oslo"}'},
    }


def build_calls(*ids: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [build_call(call_id) for call_id in ids],
    }


def build_answer(call_id: str = "call_1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "Rain"}


UNANSWERED = (
    "An assistant message with 'tool_calls' must be followed by tool messages responding to each"
    " 'tool_call_id'. The following tool_call_ids did not have response messages: "
)
NO_OPEN_CALL = (
    "Invalid parameter: messages with role 'tool' must be a response to a preceding message with"
    " 'tool_calls'."
)


@pytest.mark.parametrize(
    ("messages", "path", "detail"),
    [
        ([USER, build_calls("call_1")], "messages", UNANSWERED + "call_1"),
        ([USER, build_calls("a", "b"), build_answer("b")], "messages", UNANSWERED + "a"),
        ([USER, build_calls("a", "b"), USER], "messages[2].role", UNANSWERED + "a, b"),
        (
            [USER, build_calls("call_1"), build_answer("call_9")],
            "messages[2].tool_call_id",
            (
                "Invalid parameter: 'tool_call_id' of 'call_9' not found in 'tool_calls' of"
                " previous message."
            ),
        ),
        (
            [USER, build_calls("call_1"), build_answer(), build_answer()],
            "messages[3].role",
            NO_OPEN_CALL,
        ),
        (
            [USER, build_calls("a", "b"), build_answer("a"), build_answer("a")],
            "messages[3].role",
            NO_OPEN_CALL,
        ),
        ([USER, build_answer()], "messages[1].role", NO_OPEN_CALL),
        (
            [USER, build_calls("call_1", "call_1")],
            "messages[1].tool_calls",
            "The tool call id 'call_1' is repeated within one assistant message.",
        ),
    ],
)
def test_each_break_of_the_tool_history_has_its_path_and_openais_words(
    messages: list[dict[str, Any]], path: str, detail: str
) -> None:
    with pytest.raises(ChatRequestRefused) as refused:
        check_tool_history(messages)
    error = refused.value
    assert (error.rc, error.path, error.detail) == (
        ReturnCode.UNSUPPORTED_CHAT_PARAMETER,
        path,
        detail,
    )
    assert error.message == f"{path}: {detail}"


def test_calls_may_be_answered_in_any_order_and_ids_may_recur_in_a_later_round() -> None:
    one_round = [build_calls("a", "b"), build_answer("b"), build_answer("a")]
    check_tool_history([USER, *one_round, *one_round, USER])


def build_strict_format(schema: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "colour", "schema": schema, "strict": True, **changes},
    }


OPEN_OBJECT = {"type": "object", "properties": {}}


def build_closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


NOT_CLOSED = "'additionalProperties' is required to be supplied and to be false."


@pytest.mark.parametrize(
    ("schema", "context"),
    [
        (OPEN_OBJECT, "()"),
        (build_closed(shade=OPEN_OBJECT), "('properties', 'shade')"),
        (
            build_closed(shades={"type": "array", "items": OPEN_OBJECT}),
            "('properties', 'shades', 'items')",
        ),
        (build_closed() | {"$defs": {"shade": OPEN_OBJECT}}, "('$defs', 'shade')"),
        (
            build_closed(shade={"anyOf": [{"type": "null"}, OPEN_OBJECT]}),
            "('properties', 'shade', 'anyOf', '1')",
        ),
        ({"type": ["object", "null"], "additionalProperties": True}, "()"),
        ({"properties": {}}, "()"),
    ],
)
def test_strict_schema_closes_every_object(schema: dict[str, Any], context: str) -> None:
    with pytest.raises(ChatRequestRefused) as refused:
        check_strict_schemas([], build_strict_format(schema))
    assert refused.value.rc is ReturnCode.UNSUPPORTED_CHAT_PARAMETER
    assert (
        refused.value.message
        == f"Invalid schema for response_format 'colour': In context={context}, {NOT_CLOSED}"
    )


def test_strict_schema_lists_every_property_as_required() -> None:
    with pytest.raises(
        ChatRequestRefused, match=r"In context=\(\), 'required' is required .* Missing 'shade'\."
    ):
        check_strict_schemas(
            [], build_strict_format(build_closed(shade={"type": "string"}) | {"required": []})
        )


@pytest.mark.parametrize(
    "response_format",
    [
        build_strict_format(OPEN_OBJECT, strict=False),
        build_strict_format(build_closed(count={"type": "integer", "minimum": 1})),
        build_strict_format(build_closed(kind={"enum": [OPEN_OBJECT], "default": OPEN_OBJECT})),
        None,
    ],
)
def test_schema_without_strict_and_other_keywords_are_free(
    response_format: dict[str, Any] | None,
) -> None:
    check_strict_schemas([], response_format)


def test_strict_tool_follows_the_same_rules() -> None:
    loose = {"type": "function", "function": {"name": "loose", "parameters": OPEN_OBJECT}}
    strict = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": OPEN_OBJECT, "strict": True},
    }
    with pytest.raises(ChatRequestRefused) as refused:
        check_strict_schemas([loose, strict], None)
    assert refused.value.path == "tools[1].function.parameters"
    assert (
        refused.value.message
        == f"Invalid schema for function 'get_weather': In context=(), {NOT_CLOSED}"
    )


@pytest.mark.parametrize(
    ("options", "path", "rc"),
    [
        ({"models": []}, "horde.models", ReturnCode.UNSUPPORTED_CHAT_PARAMETER),
        ({"models": None}, "horde.models", ReturnCode.UNSUPPORTED_CHAT_PARAMETER),
        ({"only": ["a"], "ignore": ["b"]}, "horde.only", ReturnCode.CHAT_REQUEST_CONFLICT),
        ({"only": []}, "horde.only", ReturnCode.BAD_REQUEST),
        ({"only": ["a"] * 6}, "horde.only", ReturnCode.BAD_REQUEST),
        ({"only": [1]}, "horde.only[0]", ReturnCode.BAD_REQUEST),
        ({"context_fit": "ignore"}, "horde.context_fit", ReturnCode.BAD_REQUEST),
        ({"conformance": "loose"}, "horde.conformance", ReturnCode.BAD_REQUEST),
        ({"availability_mode": 1}, "horde.availability_mode", ReturnCode.BAD_REQUEST),
        ({"operation_key": "string"}, "horde.operation_key", ReturnCode.BAD_REQUEST),
        ({"max_kudos": 0}, "horde.max_kudos", ReturnCode.BAD_REQUEST),
        ({"max_kudos": 1.0}, "horde.max_kudos", ReturnCode.BAD_REQUEST),
        ({"max_context_length": True}, "horde.max_context_length", ReturnCode.BAD_REQUEST),
        ({"max_context_length": -1}, "horde.max_context_length", ReturnCode.BAD_REQUEST),
        ({"dry_run": "true"}, "horde.dry_run", ReturnCode.BAD_REQUEST),
        ([], "horde", ReturnCode.BAD_REQUEST),
    ],
)
def test_horde_options_refuse_what_they_do_not_define(
    options: object, path: str, rc: ReturnCode
) -> None:
    with pytest.raises(ChatRequestRefused) as refused:
        parse_horde_options(options)
    assert (refused.value.path, refused.value.rc) == (path, rc)
    assert refused.value.message.startswith(f"'{path}'")


def test_null_in_horde_options_is_the_default() -> None:
    defaults = parse_horde_options(None)
    assert parse_horde_options(dict.fromkeys(type(defaults).model_fields)) == defaults
    assert (defaults.context_fit, defaults.conformance, defaults.availability_mode) == (
        "truncate_oldest",
        "strict",
        "wait",
    )
    assert (defaults.slow_workers, defaults.include_reasoning, defaults.dry_run) == (
        True,
        True,
        False,
    )


TOOL = {
    "type": "function",
    "function": {"name": "lookup_weather", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "é", "a\n"])
def test_tool_name_is_1_to_64_plain_characters(name: str) -> None:
    with pytest.raises(ChatRequestRefused, match=r"^'tools\[0\]\.function\.name'"):
        parse_tools([{"type": "function", "function": {"name": name}}])


def test_tools_are_kept_as_sent_without_the_nulls_of_their_own_keys() -> None:
    parameters = {"type": "object", "default": None}
    sent = {
        "type": "function",
        "function": {"name": "a", "description": None, "strict": None, "parameters": parameters},
    }
    assert parse_tools([sent]) == [
        {"type": "function", "function": {"name": "a", "parameters": parameters}}
    ]
    assert parse_tools(None) == parse_tools([]) == []


def test_more_than_128_tools_are_unsupported() -> None:
    parse_tools([TOOL] * 128)
    with pytest.raises(ChatRequestRefused, match="at most 128 tools") as refused:
        parse_tools([TOOL] * 129)
    assert refused.value.rc is ReturnCode.UNSUPPORTED_CHAT_PARAMETER


def build_nested_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "enum": ["deepest"]}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"child": schema}}
    return schema


def test_schema_nests_at_most_10_levels_strict_or_not() -> None:
    parse_response_format(
        {"type": "json_schema", "json_schema": {"name": "a", "schema": build_nested_schema(10)}}
    )
    too_deep = build_nested_schema(11)
    with pytest.raises(ChatRequestRefused) as refused:
        parse_response_format(
            {"type": "json_schema", "json_schema": {"name": "a", "schema": too_deep}}
        )
    assert (refused.value.path, refused.value.rc) == (
        "response_format.json_schema.schema",
        ReturnCode.UNSUPPORTED_CHAT_PARAMETER,
    )
    with pytest.raises(
        ChatRequestRefused, match=r"^'tools\[0\]\.function\.parameters' may nest at most 10 levels"
    ):
        parse_tools([{"type": "function", "function": {"name": "a", "parameters": too_deep}}])


@pytest.mark.parametrize(
    "choice", ["none", "auto", "required", {"type": "function", "function": {"name": "a"}}]
)
def test_tool_choice_needs_tools(choice: object) -> None:
    with pytest.raises(ChatRequestRefused) as refused:
        parse_tool_choice(choice, [])
    assert refused.value.rc is ReturnCode.CHAT_REQUEST_CONFLICT
    assert (
        refused.value.message
        == "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are"
        " specified."
    )


def test_forced_function_has_to_be_defined() -> None:
    forced = {"type": "function", "function": {"name": "lookup_weather"}}
    assert parse_tool_choice(forced, [TOOL]) == forced
    with pytest.raises(ChatRequestRefused) as refused:
        parse_tool_choice({"type": "function", "function": {"name": "other"}}, [TOOL])
    assert refused.value.rc is ReturnCode.CHAT_REQUEST_CONFLICT


@pytest.mark.parametrize(
    ("value", "path", "rc"),
    [
        ({"type": "grammar"}, "response_format.type", ReturnCode.BAD_REQUEST),
        ({"type": "json_schema"}, "response_format.json_schema", ReturnCode.BAD_REQUEST),
        (
            {"type": "json_schema", "json_schema": {"name": "a"}},
            "response_format.json_schema.schema",
            ReturnCode.BAD_REQUEST,
        ),
        (
            {"type": "json_object", "extra": 1},
            "response_format.extra",
            ReturnCode.UNSUPPORTED_CHAT_PARAMETER,
        ),
        (
            {"type": "text", "json_schema": {"name": "a", "schema": {}}},
            "response_format.json_schema",
            "UnsupportedChatParameter",
        ),
        ("json", "response_format", ReturnCode.BAD_REQUEST),
    ],
)
def test_response_format_is_one_of_three_shapes(value: object, path: str, rc: str) -> None:
    with pytest.raises(ChatRequestRefused) as refused:
        parse_response_format(value)
    assert (refused.value.path, refused.value.rc) == (path, rc)


def test_text_format_is_the_same_as_none() -> None:
    assert parse_response_format({"type": "text"}) is parse_response_format(None) is None


def test_flattened_prompt_joins_roles_parts_calls_and_tools_by_newlines() -> None:
    messages = [
        {"role": "system", "content": "You are a terse assistant."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "ONE"},
                {"type": "image_url", "image_url": {"url": "x"}},
            ],
        },
        build_calls("call_é"),
        build_answer("call_é"),
    ]
    call = (
        '[{"id":"call_é","type":"function","function":'
        '{"name":"lookup_weather","arguments":"{\\"city\\":\\"Oslo\\"}"}}]'
    )
    tools = (
        '[{"type":"function","function":{"name":"lookup_weather","parameters":{"type":"object"}}}]'
    )
    assert (
        FlattenedChat.read(messages, [TOOL]).join()
        == f"system: You are a terse assistant.\nuser: ONE\n[image]\nassistant: {call}\ntool:"
        f" Rain\n{tools}"
    )
    assert count_image_parts(messages) == 1


@pytest.mark.parametrize(
    ("characters", "images", "tokens"),
    [(0, 0, 0), (1, 0, 1), (57, 0, 19), (58, 0, 20), (57, 2, 1043)],
)
def test_estimate_of_english_is_a_third_of_the_characters_and_512_for_each_image(
    characters: int, images: int, tokens: int
) -> None:
    assert estimate_flattened_tokens(TextSize(characters, characters), images) == tokens
