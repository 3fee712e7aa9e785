# SPDX-License-Identifier: AGPL-3.0-or-later
"""Bodies of responses: what the horde is asked, what is shown again, and what is refused where.

Numbers are those of the form's checklist.
"""

from typing import Any

import pytest

from horde.oai.errors import RequestRefused
from horde.oai.readers import NEUTRAL_SAMPLERS
from horde.oai.responses_form.request import ResponsesRequest
from horde.oai.responses_form.schema import READERS

DEFAULT_MAX_TOKENS = 4096
STRICT = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOSE = {"type": "object", "properties": {"city": {"type": "string"}}}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}

type Body = dict[str, Any]


def parse(**changes: Any) -> ResponsesRequest:
    body = {"model": "m", "input": "Name one colour."} | changes
    return ResponsesRequest.parse(
        {key: value for key, value in body.items() if value is not ...}, DEFAULT_MAX_TOKENS
    )


def refuse(**changes: Any) -> tuple[str, str | None]:
    """(code, param)"""
    with pytest.raises(RequestRefused) as refused:
        parse(**changes)
    return refused.value.code, refused.value.param


def read_message(**changes: Any) -> str:
    with pytest.raises(RequestRefused) as refused:
        parse(**changes)
    return refused.value.message


def function(name: str = "a", **more: Any) -> Body:
    return {"type": "function", "name": name, "parameters": LOOSE} | more


def custom(name: str = "apply_patch", **more: Any) -> Body:
    return {"type": "custom", "name": name, "description": "Patches."} | more


def say(text: str = "hi", role: str = "user") -> Body:
    return {"role": role, "content": text}


def call(call_id: str = "c1", name: str = "a", **more: Any) -> Body:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"} | more


def output(call_id: str = "c1", text: Any = "done") -> Body:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def converse(*items: Body, **changes: Any) -> list[Body]:
    """The messages of an input."""
    return list(parse(input=list(items), **changes).native_body["messages"])


def describe(messages: list[Body]) -> list[str]:
    """Each message by its role, with the ids of its calls or of the one it answers."""
    return [
        f"{message['role']}:{message['tool_call_id']}"
        if "tool_call_id" in message
        else f"{message['role']}:{','.join(call['id'] for call in message['tool_calls'])}"
        if "tool_calls" in message
        else message["role"]
        for message in messages
    ]


# --- keys
# ------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Body, str, str]] = [
    ("7 too few tokens", {"max_output_tokens": 8}, "integer_below_min_value", "max_output_tokens"),
    ("7 too many", {"max_output_tokens": 20000}, "integer_above_max_value", "max_output_tokens"),
    ("11 conversation", {"conversation": "c"}, "unsupported_parameter", "conversation"),
    ("11 prompt", {"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
    ("11 top_logprobs", {"top_logprobs": 1}, "unsupported_parameter", "top_logprobs"),
    (
        "13 include",
        {"include": ["message.output_text.logprobs"]},
        "unsupported_value",
        "include[0]",
    ),
    ("14 verbosity", {"text": {"verbosity": "low"}}, "unsupported_value", "text.verbosity"),
    (
        "16 two ways to cut",
        {"truncation": "disabled", "horde": {"context_fit": "truncate_oldest"}},
        "conflicting_parameters",
        "truncation",
    ),
    ("18 a nonsense option", {"horde": {"nonsense": 1}}, "unsupported_parameter", "horde.nonsense"),
    ("nothing to answer", {"input": ...}, "missing_required_parameter", "input"),
    ("an empty text", {"input": ""}, "invalid_value", "input"),
    ("no items", {"input": []}, "invalid_value", "input"),
    ("no model", {"model": ...}, "missing_required_parameter", "model"),
    ("instructions of parts", {"instructions": ["a"]}, "invalid_type", "instructions"),
    ("a number for a text", {"input": 7}, "invalid_type", "input"),
    ("effort", {"reasoning": {"effort": "max"}}, "invalid_value", "reasoning.effort"),
    ("summary", {"reasoning": {"summary": "long"}}, "invalid_value", "reasoning.summary"),
    ("reasoning mode", {"reasoning": {"mode": "x"}}, "unsupported_value", "reasoning.mode"),
    ("an unknown member", {"reasoning": {"x": 1}}, "unsupported_parameter", "reasoning.x"),
    ("metadata of numbers", {"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
    ("long metadata", {"metadata": {"a": "b" * 513}}, "invalid_value", "metadata"),
    ("store as text", {"store": "yes"}, "invalid_type", "store"),
    (
        "background unstored",
        {"background": True, "store": False},
        "conflicting_parameters",
        "store",
    ),
    (
        "a quote of a stream",
        {"horde": {"dry_run": True}, "stream": True},
        "conflicting_parameters",
        "horde.dry_run",
    ),
    (
        "a quote that is stored",
        {"horde": {"dry_run": True}, "store": True},
        "conflicting_parameters",
        "horde.dry_run",
    ),
    (
        "a nested schema",
        {"text": {"format": {"type": "json_schema", "json_schema": {}}}},
        "missing_required_parameter",
        "text.format.name",
    ),
    (
        "a grammar",
        {"text": {"format": {"type": "grammar"}}},
        "unsupported_value",
        "text.format.type",
    ),
    (
        "a loose strict schema",
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": LOOSE, "strict": True}}},
        "invalid_json_schema",
        "text.format.schema",
    ),
    ("truncation", {"truncation": "last"}, "invalid_value", "truncation"),
    ("several replies", {"n": 2}, "unsupported_value", "n"),
    (
        "context management",
        {"context_management": [{}]},
        "unsupported_parameter",
        "context_management",
    ),
    ("a key of its own", {"temprature": 1}, "unsupported_parameter", "temprature"),
]


@pytest.mark.parametrize(
    ("case", "changes", "code", "param"), REFUSED, ids=lambda case: str(case)[:40]
)
def test_a_key_is_refused_under_its_own_name(
    case: str, changes: Body, code: str, param: str
) -> None:
    assert refuse(**changes) == (code, param)


@pytest.mark.parametrize(
    ("key", "own"),
    [
        ("messages", "'input'"),
        ("max_tokens", "'max_output_tokens'"),
        ("response_format", "'text.format'"),
        ("reasoning_effort", "'reasoning.effort'"),
        ("functions", "'tools'"),
        ("conversation", "'previous_response_id'"),
    ],
)
def test_12_a_key_of_chat_names_the_one_of_this_form(key: str, own: str) -> None:
    assert own in read_message(**{key: [{}]})


NEUTRAL: list[Body] = [
    {"include": ["reasoning.encrypted_content", "web_search_call.results"]},
    {"text": {"verbosity": "medium"}},
    {"text": {"format": {"type": "text"}}},
    {"reasoning": {}},
    {"reasoning": {"summary": "auto", "context": "auto", "mode": "standard"}},
    {"top_logprobs": 0, "logprobs": False, "logit_bias": {}, "n": 1},
    {"context_management": [], "moderation": {}, "image": {}},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"store": False, "background": False},
    {"client_metadata": {"a": "b"}, "service_tier": "auto", "max_tool_calls": 3},
    *({key: value} for key, values in NEUTRAL_SAMPLERS.items() for value in values),
]


@pytest.mark.parametrize("changes", NEUTRAL, ids=str)
def test_what_asks_for_nothing_changes_nothing(changes: Body) -> None:
    assert parse(**changes).native_body == parse().native_body


@pytest.mark.parametrize("key", [key for key in READERS if key not in ("model", "input")])
def test_9_a_null_is_absent(key: str) -> None:
    assert parse(**{key: None}).native_body == parse().native_body


def test_what_is_asked_of_the_horde() -> None:
    body = parse(
        model=...,
        models=["a", "b"],
        temperature=0.5,
        seed=7,
        stop="x",
        stream=True,
        reasoning={"effort": "low"},
        horde={"max_kudos": 50},
    ).native_body
    assert body == {
        "models": ["a", "b"],
        "temperature": 0.5,
        "seed": 7,
        "stop": ["x"],
        "stream": True,
        "max_tokens": DEFAULT_MAX_TOKENS,
        "reasoning_effort": "low",
        "horde": {"context_fit": "grow", "max_kudos": 50},
        "messages": [{"role": "user", "content": "Name one colour."}],
    }


@pytest.mark.parametrize(
    ("changes", "fit"),
    [
        ({}, "grow"),
        ({"truncation": "disabled"}, "grow"),
        ({"truncation": "auto"}, "truncate_oldest"),
        ({"horde": {"context_fit": "reject"}}, "reject"),
        ({"horde": {"context_fit": "truncate_oldest"}, "truncation": "auto"}, "truncate_oldest"),
    ],
)
def test_what_is_too_long_is_cut_only_when_asked(changes: Body, fit: str) -> None:
    assert parse(**changes).native_body["horde"]["context_fit"] == fit


def test_a_schema_is_handed_on_nested() -> None:
    flat = {"type": "json_schema", "name": "n", "schema": STRICT, "strict": True}
    request = parse(text={"format": flat})
    assert request.native_body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": STRICT, "strict": True},
    }
    assert request.echo["text"]["format"] == flat


# --- tools
# ------------------------------------------------------------------------------------------


def test_19_a_flat_function_is_handed_on_nested() -> None:
    native = parse(tools=[function(description="d", strict=False)]).native_body["tools"]
    assert native == [
        {"type": "function", "function": {"name": "a", "description": "d", "parameters": LOOSE}}
    ]
    nested = {"type": "function", "function": {"name": "a"}}
    assert refuse(tools=[nested]) == ("missing_required_parameter", "tools[0].name")
    assert '"name"' in read_message(tools=[nested])


@pytest.mark.parametrize(
    ("sent", "schema", "in_force"),
    [
        (..., STRICT, True),
        (None, STRICT, True),
        (..., LOOSE, False),
        (False, STRICT, False),
        (True, STRICT, True),
        (..., None, False),
    ],
)
def test_20_and_21_strict_is_what_the_schema_allows(
    sent: Any, schema: Body | None, in_force: bool
) -> None:
    tool = function(parameters=schema, strict=sent)
    request = parse(tools=[{key: value for key, value in tool.items() if value is not ...}])
    (native,) = request.native_body["tools"]
    assert native["function"].get("strict", False) is in_force
    assert native["function"]["parameters"] == schema or schema is None
    assert request.echo["tools"][0]["strict"] is in_force
    assert request.echo["tools"][0]["parameters"] == schema


def test_22_a_strict_function_obeys_the_rules() -> None:
    tools = [{"type": "web_search"}, function(strict=True)]
    assert refuse(tools=tools) == ("invalid_function_parameters", "tools[1].parameters")


HOSTED = [
    *("web_search", "web_search_2025_08_26", "web_search_preview_2025_03_11", "file_search"),
    *("computer_use_preview", "mcp", "image_generation", "code_interpreter", "tool_search"),
]


@pytest.mark.parametrize("kind", HOSTED)
def test_23_a_tool_of_the_platform_is_dropped_beside_others(kind: str) -> None:
    tool = {"type": kind, "server_label": "x"}
    assert refuse(tools=[tool]) == ("unsupported_value", "tools[0].type")
    assert kind in read_message(tools=[tool])
    request = parse(tools=[function(), tool])
    assert len(request.native_body["tools"]) == 1
    assert request.tools.list_not_enforced() == ["tools[1]"]
    assert refuse(tools=[function(), tool], tool_choice={"type": kind}) == (
        "unsupported_value",
        "tools[1].type",
    )
    assert refuse(tools=[function()], tool_choice={"type": kind}) == (
        "unsupported_value",
        "tool_choice.type",
    )


@pytest.mark.parametrize("kind", ["local_shell", "shell", "apply_patch"])
def test_23_a_tool_of_the_agent_has_to_be_offered_as_its_own(kind: str) -> None:
    assert refuse(tools=[function(), {"type": kind}]) == ("unsupported_value", "tools[1].type")
    assert "'custom'" in read_message(tools=[{"type": kind}])


def test_24_to_26_the_choice() -> None:
    assert refuse(tools=[], tool_choice="required") == ("conflicting_parameters", "tool_choice")
    three = [function("a"), function("b"), custom("c")]
    assert parse(tools=three, tool_choice={"type": "function", "name": "b"}).native_body[
        "tool_choice"
    ] == {"type": "function", "function": {"name": "b"}}
    assert parse(tools=three, tool_choice={"type": "custom", "name": "c"}).native_body[
        "tool_choice"
    ] == {"type": "function", "function": {"name": "c"}}
    assert refuse(tools=three, tool_choice={"type": "function", "name": "x"}) == (
        "conflicting_parameters",
        "tool_choice",
    )
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "b"}],
    }
    request = parse(tools=three, tool_choice=allowed)
    assert [tool["function"]["name"] for tool in request.native_body["tools"]] == ["b"]
    assert request.native_body["tool_choice"] == "required"
    assert len(request.echo["tools"]) == 3
    assert request.echo["tool_choice"] == allowed
    lacking = allowed | {"tools": [{"type": "function", "name": "x"}]}
    assert refuse(tools=three, tool_choice=lacking) == ("invalid_value", "tool_choice.tools[0]")


def test_27_a_grammar_is_told_and_named() -> None:
    request = parse(tools=[function(), custom(format=LARK)])
    told = request.native_body["tools"][1]["function"]
    assert told["parameters"]["required"] == ["input"]
    assert told["strict"] is True
    assert told["description"] == (
        "Patches.\n\nThe argument `input` is the raw text. Grammar (lark):\nstart: /.+/"
    )
    assert request.tools.list_not_enforced() == ["tools[1].format"]
    assert parse(tools=[custom()]).tools.list_not_enforced() == []
    wrong = LARK | {"syntax": "ebnf"}
    assert refuse(tools=[custom(format=wrong)]) == ("invalid_value", "tools[0].format.syntax")


def test_30_a_group_is_flattened() -> None:
    group = {"type": "namespace", "name": "ns", "description": "d", "tools": [function("a")]}
    request = parse(tools=[group])
    assert request.native_body["tools"][0]["function"]["name"] == "ns__a"
    found = request.tools.find("ns__a")
    assert found is not None
    assert (found.name, found.namespace) == ("a", "ns")
    assert converse(say(), call(name="a", namespace="ns"), output(), tools=[group])[1][
        "tool_calls"
    ][0]["function"]["name"] == ("ns__a")
    broken = group | {"tools": [function("a", strict=True)]}
    assert refuse(tools=[broken]) == (
        "invalid_function_parameters",
        "tools[0].tools[0].parameters",
    )


@pytest.mark.parametrize(
    ("tool", "code", "param"),
    [
        (7, "invalid_type", "tools[0]"),
        ({}, "missing_required_parameter", "tools[0].type"),
        (function("a b"), "invalid_value", "tools[0].name"),
        (function("a" * 65), "invalid_value", "tools[0].name"),
        (function(parameters=[]), "invalid_type", "tools[0].parameters"),
        (function(strict=1), "invalid_type", "tools[0].strict"),
        (function(defer_loading=True), "unsupported_parameter", "tools[0].defer_loading"),
        ({"type": "telepathy"}, "unsupported_value", "tools[0].type"),
    ],
)
def test_a_tool_is_refused_at_its_place(tool: Any, code: str, param: str) -> None:
    assert refuse(tools=[tool]) == (code, param)


def test_two_tools_need_two_names() -> None:
    assert refuse(tools=[function(), custom("a")]) == ("invalid_value", "tools[1].name")
    assert refuse(tools=[function(f"f{number}") for number in range(129)])[1] == "tools"


def test_what_asks_for_nothing_may_stand_on_a_tool() -> None:
    extra = {"defer_loading": False, "async": False, "output_schema": None, "cache_control": {}}
    assert parse(tools=[function(**extra, allowed_callers=["direct"])]).native_body["tools"]


# --- items
# ------------------------------------------------------------------------------------------


def test_31_and_32_a_text_an_easy_message_and_a_typed_one_are_the_same() -> None:
    easy = converse(say())
    assert easy == parse(input="hi").native_body["messages"]
    assert easy == converse({"type": "message", "id": "msg_1", "status": "completed", **say()})
    assert converse(say(role="developer"))[0]["role"] == "developer"
    parts = [{"type": "input_text", "text": "hi"}]
    assert converse({"role": "user", "content": parts}) == [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    ]


def test_33_an_image_is_handed_on() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}
    (message,) = converse({"role": "user", "content": [image]})
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
    ]
    place = "input[0].content[0]"
    by_id = {"type": "input_image", "file_id": "f"}
    assert refuse(input=[{"role": "user", "content": [by_id]}]) == (
        "unsupported_parameter",
        f"{place}.file_id",
    )
    original = image | {"detail": "original"}
    assert refuse(input=[{"role": "user", "content": [original]}]) == (
        "unsupported_value",
        f"{place}.detail",
    )


def test_34_a_part_of_chat_names_the_one_of_this_form() -> None:
    content = [{"type": "text", "text": "hi"}]
    asked = {"input": [{"role": "user", "content": content}]}
    assert refuse(**asked) == ("unsupported_value", "input[0].content[0].type")
    assert "'input_text'" in read_message(**asked)


REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        (
            [say(), call("1"), call("2"), output("1"), output("2")],
            "user assistant:1,2 tool:1 tool:2",
        ),
        (
            [say(), call("1"), call("2"), output("2"), output("1")],
            "user assistant:1,2 tool:1 tool:2",
        ),
        ([say("I look.", "assistant"), call("1"), output("1")], "assistant:1 tool:1"),
        ([say("I look.", "assistant"), REASONING, call("1"), output("1")], "assistant:1 tool:1"),
        (
            [call("1"), REASONING, call("2"), output("1"), output("2")],
            "assistant:1,2 tool:1 tool:2",
        ),
        ([call("1"), say(), output("1"), say()], "assistant:1 tool:1 user user"),
        (
            [call("1"), say(), call("2"), output("1"), output("2")],
            "assistant:1,2 tool:1 tool:2 user",
        ),
        ([call("1"), output("1"), call("2"), output("2")], "assistant:1 tool:1 assistant:2 tool:2"),
        ([call("1"), output("1"), call("1"), output("1")], "assistant:1 tool:1 assistant:1 tool:1"),
        ([say("a", "assistant"), say("b", "assistant")], "assistant assistant"),
    ],
    ids=str,
)
def test_35_to_38_calls_and_outputs_find_each_other(items: list[Body], messages: str) -> None:
    assert describe(converse(*items)) == messages.split()


def test_37_the_text_before_a_call_is_its_message_s() -> None:
    message = converse(say("I look.", "assistant"), call("1", arguments=""), output("1"))[0]
    assert message["content"] == "I look."
    assert message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_39_what_was_received_is_accepted_back() -> None:
    received: list[Body] = [
        REASONING | {"status": "completed", "encrypted_content": None},
        {
            "type": "message",
            "id": "msg_1",
            "status": "incomplete",
            "role": "assistant",
            "phase": None,
            "content": [
                {
                    "type": "output_text",
                    "text": "Blue.",
                    "annotations": [],
                    "logprobs": [],
                    "parsed": {"a": 1},
                }
            ],
        },
        call("1", id="fc_1", status="completed", parsed_arguments={"a": 1}, caller=None),
        {
            "type": "custom_tool_call",
            "id": "ctc_1",
            "status": "completed",
            "call_id": "2",
            "name": "apply_patch",
            "input": 'say "x"',
        },
        output("1"),
        {"type": "custom_tool_call_output", "call_id": "2", "output": "ok", "name": "apply_patch"},
    ]
    messages = converse(say(), *received)
    assert describe(messages) == ["user", "assistant:1,2", "tool:1", "tool:2"]
    assert messages[1]["tool_calls"][1]["function"]["arguments"] == '{"input": "say \\"x\\""}'


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([say(), output("9")], "input[1].call_id"),
        ([call("1"), output("1"), output("1")], "input[2].call_id"),
        ([call("1"), call("1")], "input[1].call_id"),
        ([call("1"), output("1"), say(), output("1")], "input[3].call_id"),
        ([say(), call("call_lost")], "input"),
    ],
)
def test_40_a_call_and_its_output_need_each_other(items: list[Body], param: str) -> None:
    assert refuse(input=items) == ("invalid_value", param)
    assert param != "input" or "call_lost" in read_message(input=items)


def test_41_images_of_an_output_follow_it() -> None:
    parts = [
        {"type": "input_text", "text": "a view"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA"},
    ]
    messages = converse(call("1"), output("1", parts), say())
    assert describe(messages) == ["assistant:1", "tool:1", "user", "user"]
    assert messages[1]["content"] == "a view"
    text, image = messages[2]["content"]
    assert "1" in text["text"]
    assert image["image_url"] == {"url": "data:image/png;base64,AA"}
    assert converse(call("1"), output("1", parts[1:]))[1]["content"] == "(image)"


@pytest.mark.parametrize(
    "kind",
    [
        *("web_search_call", "compaction", "local_shell_call", "mcp_call", "program", "nonsense"),
        *("additional_tools", "apply_patch_call_output", "tool_search_output"),
    ],
)
def test_42_an_item_that_has_no_place_is_refused(kind: str) -> None:
    assert refuse(input=[say(), {"type": kind}]) == ("unsupported_value", "input[1].type")


@pytest.mark.parametrize(
    ("item", "code", "param"),
    [
        (7, "invalid_type", "input[0]"),
        ({}, "missing_required_parameter", "input[0].type"),
        ({"role": "user"}, "missing_required_parameter", "input[0].content"),
        ({"role": "tool", "content": "a"}, "unsupported_value", "input[0].role"),
        ({"role": "user", "content": []}, "invalid_value", "input[0].content"),
        ({"role": "user", "content": "a", "name": "n"}, "unsupported_parameter", "input[0].name"),
        (call(arguments={}), "invalid_type", "input[0].arguments"),
        (call(call_id=""), "invalid_value", "input[0].call_id"),
        (call(call_id="c" * 257), "invalid_value", "input[0].call_id"),
        (call(name=""), "invalid_value", "input[0].name"),
        (output(text=None), "missing_required_parameter", "input[0].output"),
        (output(text=[{"type": "input_file"}]), "unsupported_value", "input[0].output[0].type"),
        (call(**{"async": True}), "unsupported_parameter", "input[0].async"),
    ],
)
def test_an_item_is_refused_at_its_place(item: Any, code: str, param: str) -> None:
    assert refuse(input=[item]) == (code, param)


def test_43_what_the_horde_says_of_a_message_is_said_of_its_item() -> None:
    image = {"type": "input_image", "image_url": "x"}
    request = parse(
        instructions="Be brief.",
        input=[
            REASONING,
            call("1"),
            output("1"),
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]},
        ],
        tools=[{"type": "web_search"}, function("a")],
    )
    for native, own in (
        ("messages", "input"),
        ("messages[0].content", "instructions"),
        ("messages[1].tool_calls[0].id", "input[1]"),
        ("messages[2].tool_call_id", "input[2].call_id"),
        ("messages[3].content[1].image_url.url", "input[3].content[1].image_url"),
        ("messages[99]", "input"),
        ("max_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("tools[0].function.parameters", "tools[1].parameters"),
        ("reasoning_effort", "reasoning.effort"),
        ("horde.only", "horde.only"),
        ("stop", "stop"),
    ):
        assert request.locate(native) == own


def test_43_what_the_horde_says_of_an_image_is_said_of_the_part_of_its_output() -> None:
    image = {"type": "input_image", "image_url": "x", "detail": "low"}
    text = {"type": "input_text", "text": "a"}
    outputs = [output("2") | {"output": [text, image]}, output("1") | {"output": [image, image]}]
    request = parse(input=[say(), call("1"), call("2"), *outputs])
    for native, own in (
        ("messages[2].content", "input[4]"),
        ("messages[4].content", "input[4]"),
        ("messages[4].content[1].image_url.url", "input[4].output[0].image_url"),
        ("messages[4].content[2].image_url.detail", "input[4].output[1].detail"),
        ("messages[4].content[4].image_url.url", "input[3].output[1].image_url"),
        ("messages[4].content[99].image_url.url", "input[4]"),
    ):
        assert request.locate(native) == own


@pytest.mark.parametrize("zero", ["async", "defer_loading"])
def test_a_zero_is_no_false(zero: str) -> None:
    assert parse(tools=[function("a", **{zero: False})]).native_body["tools"]
    assert refuse(tools=[function("a", **{zero: 0})]) == (
        "unsupported_parameter",
        f"tools[0].{zero}",
    )


def test_a_reference_may_have_what_any_item_may_have() -> None:
    reference = {"type": "item_reference", "id": "msg_1", "status": "completed"}
    assert parse(input=[reference]).needs_items
    assert refuse(input=[reference | {"other": 1}]) == ("unsupported_parameter", "input[0].other")


def test_too_many_messages_are_refused_under_their_own_name() -> None:
    assert refuse(input=[say()] * 1025) == ("unsupported_value", "input")
    assert refuse(input=[REASONING] * 5000) == ("unsupported_value", "input")
