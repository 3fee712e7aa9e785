# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a completion's body becomes natively, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horde.oai.errors import RequestRefused
from horde.oai.readers import NEUTRAL_SAMPLERS
from horde.oai.schema import ChatCompletionRequest

USER = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "lookup", "arguments": "{}"},
}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


def parse(**changes: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.parse({"model": "m", "messages": [USER]} | changes)


def forward(**changes: Any) -> dict[str, Any]:
    """What is submitted beside the model and the messages."""
    body = parse(**changes).native_body
    return {key: value for key, value in body.items() if key not in {"model", "messages"}}


def refuse(**changes: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestRefused) as raised:
        parse(**changes)
    return raised.value.code, raised.value.param


OPTIONAL_KEYS = (
    *(
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
    ),
    *(
        "presence_penalty",
        "frequency_penalty",
        "reasoning_effort",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    ),
    *(
        "response_format",
        "metadata",
        "user",
        "store",
        "service_tier",
        "logprobs",
        "audio",
        "functions",
        "nonsense",
        "horde",
    ),
)


def test_17_null_is_absent() -> None:
    assert forward(**dict.fromkeys(OPTIONAL_KEYS)) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 1),
        ("logprobs", False),
        ("logprobs", 0),
        ("top_logprobs", 0),
        ("logit_bias", {}),
        ("modalities", ["text"]),
        ("verbosity", "medium"),
        ("functions", []),
        ("function_call", "none"),
        ("stop", []),
        ("stream", False),
        ("tools", []),
        ("response_format", {"type": "text"}),
        ("horde", {}),
        ("stream_options", {"include_usage": True, "include_obfuscation": False}),
        *((key, value) for key, values in NEUTRAL_SAMPLERS.items() for value in values),
        ("top_k", 0.0),
        ("repetition_penalty", 1.0),
    ],
)
def test_19_and_22_and_35_a_value_that_asks_for_nothing_is_absent(key: str, value: Any) -> None:
    assert forward(**{key: value}) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("store", True),
        ("metadata", {"a": 1}),
        ("user", "me"),
        ("safety_identifier", "me"),
        ("prompt_cache_key", "k"),
        ("prompt_cache_retention", "24h"),
        ("prompt_cache_options", {}),
        ("service_tier", "auto"),
    ],
)
def test_20_what_concerns_only_the_platform_is_not_forwarded(key: str, value: Any) -> None:
    assert forward(**{key: value}) == {}


def test_what_the_horde_honours_is_forwarded_as_it_is() -> None:
    sent = {
        "max_completion_tokens": 64,
        "temperature": 0,
        "top_p": 0.5,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "seed": -5,
        "stream": True,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "lookup"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_object"},
        "reasoning_effort": "xhigh",
        "horde": {"max_kudos": 3, "slow_workers": False, "include_reasoning": False},
    }
    assert forward(**sent) == sent


def test_29_stop_becomes_a_list_without_repeats() -> None:
    assert forward(stop="a") == {"stop": ["a"]}
    assert forward(stop=["a", "b", "a"]) == {"stop": ["a", "b"]}


def test_25_both_names_of_the_token_limit_may_agree() -> None:
    assert forward(max_tokens=64, max_completion_tokens=64) == {
        "max_tokens": 64,
        "max_completion_tokens": 64,
    }
    assert parse(max_completion_tokens=64).token_limit_key == "max_completion_tokens"
    assert parse(max_tokens=64).token_limit_key == "max_tokens"
    assert parse().token_limit_key == "max_tokens"
    assert (
        parse(max_tokens=None, max_completion_tokens=64).token_limit_key == "max_completion_tokens"
    )


def test_15_a_list_takes_the_place_of_the_model() -> None:
    request = parse(model=None, models=["a", "b"])
    assert (request.model, request.native_body["models"]) == (None, ["a", "b"])
    assert "model" not in request.native_body


def test_usage_is_asked_for_by_the_stream_options() -> None:
    assert parse(stream_options={"include_usage": True}).include_usage
    assert not parse(stream_options={"include_usage": False}).include_usage
    assert not parse().include_usage


def test_the_estimate_is_that_of_the_api() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    assert parse(messages=messages).estimated_prompt_tokens == -(
        -len("system: Be brief.\nuser: hi") // 3
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with_image = [{"role": "user", "content": [image]}]
    assert parse(messages=with_image).estimated_prompt_tokens == 512 + -(-len("user: [image]") // 3)


def test_37_and_38_a_message_the_front_returned_is_accepted_back() -> None:
    echoed = {
        "role": "assistant",
        "content": "Blue.",
        "reasoning_content": "hm",
        "reasoning": "hm",
        "reasoning_details": [{"type": "x"}],
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
        "tool_calls": None,
        "parsed": {"colour": "blue"},
    }
    parsed = CALL | {
        "index": 0,
        "function": CALL["function"] | {"parsed_arguments": {"a": 1}, "strict": None},
    }
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [parsed],
        "refusal": None,
        "annotations": None,
    }
    answered = {"role": "tool", "content": "x", "tool_call_id": "call_1", "name": "lookup"}
    messages = parse(messages=[USER, echoed, USER, called, answered]).native_body["messages"]
    assert messages[1] == {"role": "assistant", "content": "Blue."}
    assert messages[3] == {"role": "assistant", "tool_calls": [CALL]}
    assert messages[4] == {"role": "tool", "content": "x", "tool_call_id": "call_1"}


def test_a_prefill_is_forwarded() -> None:
    messages = [USER, {"role": "assistant", "content": "Once"}]
    assert parse(messages=messages).native_body["messages"] == messages


def test_parts_are_kept_in_order() -> None:
    parts = [{"type": "text", "text": "ONE"}, {"type": "text", "text": "TWO"}]
    image = {
        "type": "image_url",
        "image_url": {"url": "https://example.com/a.png", "detail": "low"},
    }
    content = parse(messages=[{"role": "user", "content": [*parts, image]}]).native_body[
        "messages"
    ][0]["content"]
    assert content == [*parts, image]


def test_a_tool_that_is_malformed_is_reported_at_its_own_place() -> None:
    assert refuse(tool_choice="auto", tools=[{"type": "function", "function": {"name": 5}}]) == (
        "invalid_type",
        "tools[0].function.name",
    )


def test_the_later_of_two_keys_that_disagree_is_the_one_at_fault() -> None:
    assert refuse(max_tokens=64, n=2, max_completion_tokens=65) == ("unsupported_value", "n")
    assert refuse(n=2, models=["a"]) == ("unsupported_value", "n")


@pytest.mark.parametrize("body", [None, [], "hi", 5, True])
def test_a_body_is_an_object(body: object) -> None:
    with pytest.raises(RequestRefused) as raised:
        ChatCompletionRequest.parse(body)
    assert raised.value.code == "invalid_json"


def test_a_refused_key_of_megabytes_is_not_repeated() -> None:
    with pytest.raises(RequestRefused) as raised:
        parse(**{"k" * 1_000_000: 1})
    assert len(raised.value.message) < 1000
    assert len(raised.value.param or "") < 300


def find_refusal(body: object) -> RequestRefused | None:
    try:
        ChatCompletionRequest.parse(body)
    except RequestRefused as refused:
        return refused
    return None


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 20000)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *OPTIONAL_KEYS,
        *NEUTRAL_SAMPLERS,
        *(
            "model",
            "models",
            "messages",
            "logit_bias",
            "modalities",
            "verbosity",
            "top_logprobs",
            "prediction",
        ),
    ]
)
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(
            ["role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations"]
        ),
        st.sampled_from(["user", "assistant", "tool", "system"]) | JSON,
        max_size=4,
    ),
    max_size=3,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=5), MESSAGES)
def test_any_body_is_parsed_or_refused_with_a_code(
    changes: dict[str, Any], messages: list[Any]
) -> None:
    for body in (
        changes,
        {"model": "m", "messages": messages} | changes,
        {"model": "m", "messages": [USER]} | changes,
    ):
        refused = find_refusal(body)
        assert refused is None or (refused.status == 400 and refused.code)


# --- extras of real clients
# ------------------------------------------------------------------------------------------

HINT = {"type": "ephemeral"}


def test_hints_for_caches_are_left_out_wherever_they_stand() -> None:
    """They ask for nothing that the answer would show."""
    schema = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    hinted = parse(
        cache_control=HINT,
        messages=[
            {
                "role": "system",
                "cache_control": HINT,
                "content": [{"type": "text", "text": "a", "cache_control": HINT}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "image_url",
                        "cache_control": HINT,
                        "image_url": {"url": "https://a/b", "cache_control": None},
                    }
                ],
            },
            {
                "role": "assistant",
                "content": "b",
                "tool_calls": [
                    CALL
                    | {"cache_control": HINT, "function": CALL["function"] | {"cache_control": 1}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "c", "cache_control": HINT},
        ],
        tools=[
            {
                "cache_control": HINT,
                "type": "function",
                "function": {"name": "lookup", "parameters": schema, "cache_control": HINT},
            }
        ],
        tool_choice={
            "type": "function",
            "function": {"name": "lookup"},
            "cache_control": HINT,
        },
        stream=True,
        stream_options={"include_usage": True, "cache_control": HINT},
    ).native_body
    assert hinted.pop("tools") == [
        {"type": "function", "function": {"name": "lookup", "parameters": schema}}
    ]
    assert "cache_control" not in json.dumps(hinted)
    assert [set(message) for message in hinted["messages"]] == [
        {"role", "content"},
        {"role", "content"},
        {"role", "content", "tool_calls"},
        {"role", "content", "tool_call_id"},
    ]


@pytest.mark.parametrize("tools", [5, [5], [{"type": "function", "function": 5}], [None], "x"])
def test_tools_that_are_none_are_refused_at_their_place(tools: object) -> None:
    code, param = refuse(tools=tools)
    assert code in {"invalid_type", "invalid_value"}
    assert str(param).startswith("tools")


def test_the_format_of_an_image_and_statistics_within_a_stream_are_left_out() -> None:
    image = {"url": "data:image/png;base64,AA==", "format": "image/png", "detail": "low"}
    body = parse(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": image}]}],
        stream_options={"continuous_usage_stats": True},
    ).native_body
    assert body["messages"][0]["content"][0]["image_url"] == {
        "url": "data:image/png;base64,AA==",
        "detail": "low",
    }
    assert "stream_options" not in body
    assert refuse(stream_options={"continuous_usage_stats": 1}) == (
        "invalid_type",
        "stream_options.continuous_usage_stats",
    )


def test_no_parts_beside_calls_are_no_content() -> None:
    """And nowhere else."""
    answered = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    called = {"role": "assistant", "content": [], "tool_calls": [CALL]}
    body = parse(messages=[USER, called, answered]).native_body
    assert body["messages"][1] == {"role": "assistant", "tool_calls": [CALL]}
    assert refuse(messages=[USER, {"role": "assistant", "content": []}]) == (
        "invalid_value",
        "messages[1].content",
    )
    assert refuse(messages=[{"role": "user", "content": []}]) == (
        "invalid_value",
        "messages[0].content",
    )


def build_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def allow(mode: object, *names: str, **changes: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools} | changes}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("is_choice_first", [False, True])
def test_a_choice_among_some_tools_offers_those_alone(mode: str, is_choice_first: bool) -> None:
    """The tools are narrowed, and the mode is the choice."""
    tools = [build_tool(name) for name in ("a", "b", "c")]
    changes = {"tools": tools, "tool_choice": allow(mode, "c", "a")}
    body = forward(**dict(sorted(changes.items(), reverse=is_choice_first)))
    assert body == {"tools": [tools[0], tools[2]], "tool_choice": mode}


@pytest.mark.parametrize(
    ("choice", "code", "param"),
    [
        (allow("none", "a"), "invalid_value", "tool_choice.allowed_tools.mode"),
        (allow(["auto"], "a"), "invalid_value", "tool_choice.allowed_tools.mode"),
        (allow("auto"), "invalid_type", "tool_choice.allowed_tools.tools"),
        (allow("auto", "z"), "conflicting_parameters", "tool_choice.allowed_tools.tools[0]"),
        (
            allow("auto", tools=["auto"]),
            "invalid_type",
            "tool_choice.allowed_tools.tools[0]",
        ),
        (
            allow("auto", tools=[{"type": "function", "function": {}}]),
            "missing_required_parameter",
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        (allow("auto", "a", x=1), "unsupported_parameter", "tool_choice.allowed_tools.x"),
        (allow("auto", "a") | {"x": 1}, "unsupported_parameter", "tool_choice.x"),
        ({"type": "allowed_tools"}, "invalid_type", "tool_choice.allowed_tools"),
    ],
)
def test_a_choice_among_tools_that_makes_no_sense_is_refused_with_its_path(
    choice: dict[str, Any], code: str, param: str
) -> None:
    assert refuse(tools=[build_tool("a")], tool_choice=choice) == (code, param)


def test_a_choice_among_tools_needs_tools() -> None:
    assert refuse(tool_choice=allow("auto", "a"))[0] == "conflicting_parameters"


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"logprobs": True}, "logprobs"), ({"ignore_eos": True}, "ignore_eos")],
)
def test_what_would_change_the_reply_is_still_refused(changes: dict[str, Any], param: str) -> None:
    assert refuse(**changes) == ("unsupported_parameter", param)
    assert refuse(max_tokens=15) == ("integer_below_min_value", "max_tokens")


def nest(levels: int) -> dict[str, Any]:
    """A schema of objects, one within the other."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("levels", [11, 48, 100])
def test_a_schema_that_nests_too_deep_is_named(levels: int) -> None:
    """Whatever it is the schema of."""
    tool = {"type": "function", "function": {"name": "f", "parameters": nest(levels)}}
    assert refuse(tools=[tool]) == ("unsupported_value", "tools[0].function.parameters")
    wanted = {"type": "json_schema", "json_schema": {"name": "f", "schema": nest(levels)}}
    assert refuse(response_format=wanted) == (
        "unsupported_value",
        "response_format.json_schema.schema",
    )
