# SPDX-License-Identifier: AGPL-3.0-or-later
from typing import Any

import httpx
import pytest
from horde_sdk.generation_parameters.text.chat_policy import ChatFeature, ChatGuarantee

from horde.bridge.config import TokenCounting
from horde.bridge.counting import estimate_tokens
from horde.bridge.declaration import choose_features, explain_gaps
from horde.bridge.job import JobFault, parse_job
from horde.bridge.jobs import serve_job
from horde.bridge.plan import ServingPlan
from horde.bridge.refusals import BackendRefusal
from tests.unit.bridge.scripted import (
    TOOLS,
    Script,
    answer,
    build_config,
    build_connections,
    build_plan,
    chat_answer,
    completion,
    llama_script,
)

VOCABULARY = (*ChatFeature, *ChatGuarantee)
PLAIN = {"/v1/models": answer({"data": [{"id": "m"}]}), "/v1/chat/completions": completion()}
OLLAMA = {**PLAIN, "/v1/models": answer({"data": [{"id": "m", "owned_by": "library"}]})}
KOBOLDCPP = {
    **PLAIN,
    "/v1/models": answer({"data": [{"id": "m", "owned_by": "koboldcpp"}]}),
    "/api/extra/true_max_context_length": answer({"value": 1000}),
    "/api/extra/tokencount": lambda body: answer({"value": len(body["prompt"].split())}),
}
SHAPE = {
    "type": "json_schema",
    "json_schema": {"name": "n", "strict": True, "schema": {"type": "object", "required": ["a"]}},
}
REFUSED = ChatGuarantee.PROMPT_OVERFLOW_REFUSED


@pytest.mark.parametrize("value", VOCABULARY)
def test_an_operator_can_declare_each_value_of_the_vocabulary(value: Any) -> None:
    plan = build_plan(Script(PLAIN), max_context_length=4096, supports=frozenset({value}))
    assert value.value in plan.build_pop_body(build_config())["chat_features"]


@pytest.mark.parametrize("value", VOCABULARY)
def test_an_operator_can_withhold_each_value_and_what_stands_on_it(value: Any) -> None:
    left = choose_features(frozenset(VOCABULARY), frozenset({value}))
    assert value not in left
    assert choose_features(left, frozenset({value})) == left


def list_gaps(plan: ServingPlan, **changes: Any) -> dict[str, dict[str, str]]:
    gaps = explain_gaps(plan.profile, build_config(**changes), plan.declaration)
    return {gap["value"]: gap for gap in gaps}


def test_each_value_that_is_not_declared_says_which_chats_go_elsewhere_and_what_to_do() -> None:
    gaps = list_gaps(build_plan(Script(PLAIN), max_context_length=4096))
    stands_on_others = {"tool_choice_enforced", "single_tool_call_enforced"}
    stands_on_others |= {"tools_with_response_format", "structured_output_enforced"}
    assert set(gaps) == {value.value for value in VOCABULARY} - stands_on_others
    assert all(gap["chats"] and gap["why"] and "--" in gap["remedy"] for gap in gaps.values())
    excluded = {"exclude": frozenset({ChatFeature.TOOLS})}
    gaps = list_gaps(build_plan(**excluded), **excluded)
    assert gaps["tools"]["why"] == "--exclude tools"
    assert "tool_choice_enforced" not in gaps


def test_a_server_that_cuts_prompts_is_said_to_get_no_strict_chats() -> None:
    gap = list_gaps(build_plan(Script(OLLAMA), max_context_length=4096))[REFUSED.value]
    assert "all strict ones" in gap["chats"]
    assert "ollama cuts long prompts" in gap["why"]
    assert "--count-tokens estimate" in gap["remedy"]


def serve(plan: ServingPlan, script: Script, text: str, **payload: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    job = parse_job(chat_answer(messages=messages, **payload), plan)
    return serve_job(job, build_connections(script), plan)


def test_a_backend_that_cuts_prompts_can_be_made_to_refuse_by_its_own_tokeniser() -> None:
    script = Script(KOBOLDCPP)
    plan = build_plan(script, max_length=64)
    assert REFUSED in plan.declaration.features
    assert "message" in serve(plan, script, "word " * 500)
    with pytest.raises(JobFault) as caught:
        serve(plan, script, "word " * 950)
    assert caught.value.reason == "prompt_overflow"
    assert len(script.bodies("/v1/chat/completions")) == 1


def test_a_backend_without_a_tokeniser_can_be_made_to_refuse_by_an_estimate() -> None:
    script = Script(OLLAMA)
    options = {"max_context_length": 3000, "token_counting": TokenCounting.ESTIMATE}
    plan = build_plan(script, **options)
    assert REFUSED in plan.declaration.features
    assert plan.declaration.limits is not None
    declared = plan.declaration.limits.max_context_length
    assert declared == 2000
    # What the horde takes to fit, three letters a token, is served; what cannot fit is not.
    fits = "letters and blanks " * ((declared - 64) * 3 // 19 - 1)
    assert "message" in serve(plan, script, fits, max_context_length=declared)
    for text in ("letters and blanks " * 500, "[1,2] " * 600, "漢字" * 1500):
        with pytest.raises(JobFault) as caught:
            serve(plan, script, text, max_context_length=declared)
        assert caught.value.reason == "prompt_overflow"


@pytest.mark.parametrize(
    ("script", "changes"),
    [
        (OLLAMA, {}),
        (KOBOLDCPP, {"token_counting": TokenCounting.OFF}),
        (KOBOLDCPP, {"exclude": frozenset({REFUSED})}),
        ({**KOBOLDCPP, "/api/extra/tokencount": answer({}, 404)}, {}),
    ],
)
def test_nothing_is_promised_that_nobody_keeps(script: Any, changes: dict[str, Any]) -> None:
    plan = build_plan(Script(script), max_context_length=1000, **changes)
    assert REFUSED not in plan.declaration.features
    assert plan.profile.token_counting is TokenCounting.OFF


def test_an_operators_word_is_enough() -> None:
    script = Script(OLLAMA)
    supports = frozenset({REFUSED})
    plan = build_plan(script, max_context_length=1000, supports=supports)
    assert "message" in serve(plan, script, "word " * 5000)


@pytest.mark.parametrize(
    ("text", "least"),
    [("the cat sat ", 4), ("a1b2c3", 4), ("{[()]}", 6), ("漢字", 2), ("Привет", 4), ("", 0)],
)
def test_an_estimate_leans_to_the_safe_side(text: str, least: int) -> None:
    assert least <= estimate_tokens(text) <= len(text.encode())


CALL = '{"name": "now", "arguments": {"a": 1e2}}'


@pytest.mark.parametrize(
    ("content", "finish_reason", "message"),
    [
        (CALL, "stop", {"content": None, "call": '{"a": 1e2}'}),
        ('{"answer": {"a": 1.0} }', "stop", {"content": '{"a": 1.0}', "call": None}),
        ('{"answer": {"a": [1, 2', "length", {"content": '{"a": [1, 2', "call": None}),
        ('{"ans', "length", {"content": "", "call": None}),
    ],
)
def test_tools_beside_a_format_are_a_call_or_an_answer(
    content: str, finish_reason: str, message: dict[str, Any]
) -> None:
    script = llama_script(chat=completion(content, finish_reason))
    plan = build_plan()
    reply = serve(plan, script, "Hi", tools=TOOLS, response_format=SHAPE)
    (sent,) = script.bodies("/v1/chat/completions")
    schema = sent["response_format"]["json_schema"]["schema"]
    assert (sent["tools"], sent["tool_choice"], len(schema["anyOf"])) == (TOOLS, "none", 3)
    assert schema["$defs"]["answer"] == SHAPE["json_schema"]["schema"]  # type: ignore[index]
    assert reply["message"]["content"] == message["content"]
    calls = [call["function"]["arguments"] for call in reply["message"].get("tool_calls", [])]
    assert calls == ([] if message["call"] is None else [message["call"]])


@pytest.mark.parametrize("content", ["prose", '{"answer": {"b": 1}}', '{"other": 1}'])
def test_what_is_neither_a_call_nor_an_answer_in_the_format_is_given_back(content: str) -> None:
    plan = build_plan()
    with pytest.raises(JobFault):
        serve(
            plan, llama_script(chat=completion(content)), "Hi", tools=TOOLS, response_format=SHAPE
        )


def test_another_backend_gets_tools_and_format_as_they_are() -> None:
    script = Script(PLAIN)
    supports = frozenset({ChatFeature.TOOLS_WITH_RESPONSE_FORMAT})
    script.answers["/v1/chat/completions"] = completion('{"a": 1}')
    plan = build_plan(script, max_context_length=4096, supports=supports)
    reply = serve(plan, script, "Hi", tools=TOOLS, tool_choice="auto", response_format=SHAPE)
    (sent,) = script.bodies("/v1/chat/completions")
    assert (sent["tool_choice"], sent["response_format"]) == ("auto", SHAPE)
    assert reply["message"]["content"] == '{"a": 1}'


def test_an_answer_without_a_schema_is_an_object() -> None:
    body = chat_answer(tools=TOOLS, response_format={"type": "json_object"})
    script = llama_script(chat=completion('{"answer": {}}'))
    plan = build_plan()
    serve_job(parse_job(body, plan), build_connections(script), plan)
    (sent,) = script.bodies("/v1/chat/completions")
    schema = sent["response_format"]["json_schema"]["schema"]
    assert schema["$defs"]["answer"] == {"type": "object"}


@pytest.mark.parametrize(
    ("shown", "running", "context"),
    [
        ({"parameters": "num_ctx 8192"}, [], 8192),
        ({"parameters": "num_ctx 8192"}, [{"name": "m", "context_length": 4096}], 4096),
        ({"parameters": None}, [{"name": "x", "context_length": 4096}], None),
        ({"model_info": {"llama.context_length": 131072}}, [], None),
    ],
)
def test_the_context_of_ollama_is_what_it_runs_with(
    shown: Any, running: Any, context: int | None
) -> None:
    routes = {"/api/show": answer(shown), "/api/ps": answer({"models": running})}
    changes = {} if context else {"max_context_length": 2048}
    plan = build_plan(Script({**OLLAMA, **routes}), **changes)
    assert plan.profile.context_tokens == (context or 2048)


def test_a_loading_ollama_is_waited_for() -> None:
    routes = {"/api/show": httpx.Response(503, json={"error": "loading"})}
    with pytest.raises(BackendRefusal):
        build_plan(Script({**OLLAMA, **routes}), max_context_length=2048)
