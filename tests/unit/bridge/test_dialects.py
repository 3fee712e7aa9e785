# SPDX-License-Identifier: AGPL-3.0-or-later
"""One table of servers, and what is true of the bridge before each of them."""

from typing import Any

import pytest
from horde_sdk.generation_parameters.text.chat_policy import ChatFeature

from horde.bridge.job import Connections, JobFault, parse_job
from horde.bridge.jobs import serve_job
from horde.bridge.probe import build_serving_plan
from tests.services import ROOT
from tests.unit.bridge.scripted import (
    Script,
    build_backend,
    build_config,
    build_inputs,
    chat_answer,
)
from tests.unit.bridge.servers import CHAT, SERVERS, Server, stream

NOW = [{"type": "function", "function": {"name": "now"}}]
every_server = pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)


def serve(script: Script, server: Server, **payload: Any) -> dict[str, Any]:
    """Probe the server and serve one streamed job of it."""
    config = build_config(
        max_context_length=None if server.context else 4096,
        supports=frozenset({ChatFeature.TOOLS, ChatFeature.SEED}),
    )
    backend = build_backend(script)
    plan = build_serving_plan(backend, config)
    job = parse_job(chat_answer(stream_progress=True, **payload), plan)
    accepted = Connections(backend=backend, inputs=build_inputs(), post_progress=lambda _: False)
    return serve_job(job, accepted, plan)


@every_server
def test_a_server_is_recognised_and_declared_as_the_table_says(server: Server) -> None:
    config = build_config(max_context_length=None if server.context else 4096)
    plan = build_serving_plan(build_backend(server.build_script(stream(server.text))), config)
    assert plan.profile.kind == server.kind
    assert plan.profile.context_tokens == (server.context or 4096)
    assert {value.value for value in plan.declaration.features} == server.declares


@every_server
def test_its_stream_is_read(server: Server) -> None:
    reply = serve(server.build_script(stream(server.text)), server)
    assert (reply["message"]["content"], reply["finish_reason"]) == ("Blue.", "stop")
    has_reasoning = "Hm." in server.text
    assert reply["message"].get("reasoning_content") == ("Hm." if has_reasoning else None)


@every_server
def test_its_calls_are_read(server: Server) -> None:
    reply = serve(server.build_script(stream(server.calls)), server, tools=NOW)
    (one,) = reply["message"]["tool_calls"]
    assert one["function"] == {"name": "now", "arguments": "{}"}
    assert (reply["finish_reason"], reply["message"]["content"]) == ("tool_calls", None)


@every_server
def test_its_words_for_a_prompt_that_is_too_long_are_understood(server: Server) -> None:
    with pytest.raises(JobFault) as caught:
        serve(server.build_script(server.overflow), server)
    assert caught.value.reason == "prompt_overflow"


@every_server
def test_a_key_it_does_not_know_is_left_out(server: Server) -> None:
    def chat(body: dict[str, Any]) -> Any:
        return server.unknown_key if "top_k" in body else stream(server.text)

    script = server.build_script(chat)
    reply = serve(script, server, top_k=40, temperature=0.5, seed=7)
    assert reply["message"]["content"] == "Blue."
    *_, served = script.bodies(CHAT)
    assert (served["temperature"], served["seed"]) == (0.5, 7)


@every_server
def test_the_how_to_names_it(server: Server) -> None:
    page = (ROOT / "docs/how-to/serve-jobs-with-the-bridge.md").read_text()
    assert server.name.removesuffix("'s compatible route") in page
