# SPDX-License-Identifier: AGPL-3.0-or-later
from typing import Any

import pytest
from horde_sdk.generation_parameters.text.chat_policy import ChatFeature, ChatGuarantee
from horde_sdk.worker.chat_declaration import ChatImageTransport

from horde.bridge.config import BRIDGE_AGENT_NAME
from horde.bridge.probe import ProbeError
from tests.unit.bridge.scripted import (
    LLAMA_PROPS,
    Script,
    answer,
    build_config,
    build_plan,
    llama_script,
)

LLAMA_FEATURES = {"seed", "presence_penalty", "frequency_penalty", "json_object", "json_schema"}
GUARANTEES = {"structured_output_enforced", "prompt_overflow_refused"}
TOOL_FEATURES = {
    "tools",
    "tool_choice_enforced",
    "single_tool_call_enforced",
    "tools_with_response_format",
}


def declared(plan: Any) -> set[str]:
    return {value.value for value in plan.declaration.features}


def test_llama_cpp_declares_what_it_was_seen_to_do() -> None:
    plan = build_plan()
    assert declared(plan) == LLAMA_FEATURES | GUARANTEES | TOOL_FEATURES
    assert (plan.profile.context_tokens, plan.profile.backend_model) == (2048, "tiny")


SEEING = {**LLAMA_PROPS, "modalities": {"vision": True, "audio": False}}


@pytest.mark.parametrize(
    ("props", "changes", "transports"),
    [
        (LLAMA_PROPS, {}, []),
        ({**LLAMA_PROPS, "modalities": {"vision": False}}, {}, []),
        (SEEING, {}, ["base64", "messages_url", "url"]),
        (SEEING, {"exclude": frozenset({ChatFeature.VISION})}, []),
        (SEEING, {"image_transports": frozenset({ChatImageTransport.BASE64})}, ["base64"]),
        (
            LLAMA_PROPS,
            {"supports": frozenset({ChatFeature.VISION})},
            ["base64", "messages_url", "url"],
        ),
    ],
)
def test_a_backend_that_sees_declares_vision_and_how_images_may_come(
    props: dict[str, Any], changes: dict[str, Any], transports: list[str]
) -> None:
    script = llama_script()
    script.answers["/props"] = answer(props)
    plan = build_plan(script, **changes)
    assert plan.build_pop_body(build_config(**changes))["image_transports"] == transports
    assert ("vision" in declared(plan)) == bool(transports)


def test_a_template_without_tools_declares_none() -> None:
    script = llama_script()
    script.answers["/props"] = answer(
        {**LLAMA_PROPS, "chat_template_caps": {"supports_tools": False}}
    )
    assert declared(build_plan(script)) == LLAMA_FEATURES | GUARANTEES


def test_vllm_declares_no_tools_unless_its_operator_says_so() -> None:
    script = Script(
        {"/v1/models": answer({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 8192}]})}
    )
    assert declared(build_plan(script)) == LLAMA_FEATURES | GUARANTEES
    plan = build_plan(script, supports=frozenset({ChatFeature.TOOLS}))
    assert declared(plan) - LLAMA_FEATURES - GUARANTEES == {"tools", "single_tool_call_enforced"}
    assert plan.declaration.limits.max_context_length == 8192


def test_an_unknown_backend_declares_nothing_but_what_its_operator_says() -> None:
    script = Script({"/v1/models": answer({"data": [{"id": "m", "owned_by": "somebody"}]})})
    assert declared(build_plan(script, max_context_length=4096)) == set()
    supports = frozenset({ChatFeature.SEED, ChatGuarantee.PROMPT_OVERFLOW_REFUSED})
    assert declared(build_plan(script, max_context_length=4096, supports=supports)) == {
        "seed",
        "prompt_overflow_refused",
    }


def test_the_operator_withholds() -> None:
    assert "json_schema" not in declared(build_plan(exclude=frozenset({ChatFeature.JSON_SCHEMA})))


@pytest.mark.parametrize(
    ("answers", "changes"),
    [
        ({"/v1/models": answer({"data": [{"id": "m"}]})}, {}),  # no context length
        # No room for a prompt.
        ({"/v1/models": answer({"data": [{"id": "m"}]})}, {"max_context_length": 512}),
    ],
)
def test_a_missing_fact_names_the_option_that_supplies_it(
    answers: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(ProbeError, match=r"max-context-length|backend-model|max-length"):
        build_plan(Script(answers), **changes)


def test_the_pop_announces_one_model_and_both_limits() -> None:
    config = build_config(model="org/Tiny", max_context_length=1024, tools_max_temperature=0.8)
    plan = build_plan(model="org/Tiny", max_context_length=1024, tools_max_temperature=0.8)
    body = plan.build_pop_body(config)
    assert (body["models"], body["model_id"], body["max_length"], body["max_context_length"]) == (
        ["org/Tiny"],
        "org/Tiny",
        512,
        1024,
    )
    assert body["chat_limits"] == {
        "max_length": 512,
        "max_context_length": 1024,
        "tools_max_temperature": 0.8,
    }
    assert body["bridge_agent"].split(":", 2)[0] == BRIDGE_AGENT_NAME
    assert (body["chat_jobs"], body["prompt_jobs"], body["image_transports"]) == (True, True, [])


def test_a_text_only_bridge_withdraws_the_declaration() -> None:
    body = build_plan(serves_chat=False).build_pop_body(build_config(serves_chat=False))
    assert (body["chat_jobs"], "chat_limits" in body, "model_id" in body) == (False, False, False)


def test_a_chat_only_bridge_takes_no_text() -> None:
    assert build_plan(serves_text=False).declaration.prompt_jobs is False


@pytest.mark.parametrize(
    "changes",
    [
        {"serves_chat": False, "serves_text": False},
        {"threads": 0},
        {"max_length": 0},
        {"tools_max_temperature": -0.1},
        {"grace_seconds": float("nan")},
        {"image_transports": frozenset({ChatImageTransport.MESSAGES_URL})},
        {"image_transports": frozenset()},
        {"bridge_agent": "no parts"},
    ],
)
def test_a_configuration_the_horde_would_refuse_is_refused_at_once(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\.$"):
        build_config(**changes)


def test_the_keys_do_not_show_in_the_configuration() -> None:
    assert "owner-key" not in repr(build_config(backend_key="owner-key"))
