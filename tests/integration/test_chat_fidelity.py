# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a client sends reaches the worker in the order and the form in which it was sent."""

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from uuid import UUID

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select, text, update
from werkzeug.test import TestResponse

from devtools.services import ServiceAddresses
from horde import r2
from horde.bridge.horde_api import HordeApi
from horde.bridge.job import Connections, parse_job
from horde.bridge.jobs import serve_job
from horde.classes.kobold.waiting_prompt import TextWaitingPrompt
from horde.db import transaction
from horde.json_text import read_json, survives_jsonb
from tests.integration._fake_chat_worker import (
    MODEL,
    Body,
    ChatHorde,
    build_pop_body,
    start_anew,
)
from tests.integration.chat_front import (
    PATIENCE_SECONDS,
    FrontStack,
    get_error,
    run_front_stack,
)
from tests.json_documents import describe, documents, find_members, objects
from tests.unit.bridge.scripted import (
    Script,
    build_backend,
    build_inputs,
    build_plan,
    completion,
    llama_script,
)

EVERYTHING = [
    "prompt_overflow_refused",
    "tools",
    "tool_choice_enforced",
    "json_schema",
    "tools_with_response_format",
    "structured_output_enforced",
]
ANSWER_AFTER_REASONING = (
    '{"type":"object","properties":{"reasoning":{"type":"string"},"final_answer":{"type":"number",'
    '"multipleOf":1e-2,"maximum":1.0},"z":{"const":100}},"additionalProperties":false,'
    '"required":["reasoning","final_answer","z"]}'
)
DECISION = (
    '{"type":"object","properties":{"reasoning":{"type":"string"},"decision":{"enum":[1.0,1e2,'
    '123456789012345678901234567890]},"id":{"type":"integer"}}}'
)
CASES = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    native: dict[str, Any] = {
        "s3_endpoint": service_urls.s3_endpoint,
        "chat_messages_offload_enabled": True,
        "chat_messages_offload_bytes": 2000,
        "chat_messages_offload_gzip": True,
    }
    with run_front_stack(service_urls, "fidelity", native=native) as stack:
        yield stack


@pytest.fixture
def horde(stack: FrontStack) -> ChatHorde:
    start_anew()
    stack.horde.take_nothing(chat_features=EVERYTHING)
    return stack.horde


def write_tool(parameters: str) -> str:
    function = '{"parameters":' + parameters + ',"description":"d","name":"decide"}'
    return '{"function":' + function + ',"type":"function"}'


def write_format(schema: str, strict: str = "false") -> str:
    json_schema = '{"strict":' + strict + ',"schema":' + schema + ',"name":"answer"}'
    return '{"json_schema":' + json_schema + ',"type":"json_schema"}'


def write_body(**members: str) -> str:
    model, messages = json.dumps(MODEL), '[{"content":"Answer as JSON.","role":"user"}]'
    written = {"model": model, "messages": messages, "max_tokens": "64"} | members
    return "{" + ",".join(f'"{key}":{value}' for key, value in written.items()) + "}"


def post_text(horde: ChatHorde, body: str) -> TestResponse:
    headers = {"apikey": horde.requester_key}
    return horde.client.post(
        "/api/v2/generate/chat/async", data=body, content_type="application/json", headers=headers
    )


def submit(horde: ChatHorde, body: str) -> str:
    answer = post_text(horde, body)
    assert answer.status_code == 202, answer.text
    assert answer.json is not None
    return str(answer.json["id"])


def take_text(horde: ChatHorde, **changes: Any) -> str:
    """The text of a pop's answer, whose job is then given back to nobody."""
    answer = horde.pop(**{"chat_features": EVERYTHING, **changes})
    assert answer.status_code == 200, answer.text
    job = answer.json
    assert job is not None
    assert job["id"] is not None, answer.text
    horde.reply(job["id"], "{}")
    return answer.text


def find_payload(popped: str, *path: str) -> Any:
    return find_members(describe(popped), "payload", *path)


@CASES
@given(parameters=objects, schema=objects)
def test_any_schema_comes_out_of_the_pop_as_it_was_sent(
    horde: ChatHorde, parameters: str, schema: str
) -> None:
    start_anew()
    horde.take_nothing(chat_features=EVERYTHING)
    tool, response_format = write_tool(parameters), write_format(schema)
    submit(horde, write_body(tools=f"[{tool}]", response_format=response_format))
    popped = take_text(horde)
    assert find_payload(popped, "tools") == describe(f"[{tool}]")
    assert find_payload(popped, "response_format") == describe(response_format)


def write_shuffled(draw: Any, members: dict[str, str]) -> str:
    pairs = draw(st.permutations(sorted(members.items())))
    return "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"


@st.composite
def conversations(draw: Any) -> str:
    """Messages whose objects have their keys in any order."""
    said = json.dumps(draw(st.text(st.characters(exclude_characters="\x00", codec="utf-8"))))
    part = write_shuffled(draw, {"type": '"text"', "text": said})
    function = write_shuffled(draw, {"name": '"decide"', "arguments": '"{\\"z\\": 1e2}"'})
    call = write_shuffled(draw, {"id": '"a"', "type": '"function"', "function": function})
    messages = [
        write_shuffled(draw, {"role": '"user"', "content": f"[{part}]", "name": '"n"'}),
        write_shuffled(draw, {"role": '"assistant"', "content": said, "tool_calls": f"[{call}]"}),
        write_shuffled(draw, {"role": '"tool"', "tool_call_id": '"a"', "content": said}),
    ]
    return f"[{','.join(messages)}]"


@CASES
@given(messages=conversations())
def test_any_messages_come_out_of_the_pop_as_they_were_sent(
    horde: ChatHorde, messages: str
) -> None:
    start_anew()
    horde.take_nothing(chat_features=EVERYTHING)
    submit(horde, write_body(messages=messages))
    assert find_payload(take_text(horde), "messages") == describe(messages)


def test_the_properties_of_a_schema_stay_in_their_order_from_the_front_to_the_backend(
    stack: FrontStack, horde: ChatHorde
) -> None:
    response_format = write_format(ANSWER_AFTER_REASONING, "true")
    sent = complete_with_bridge(stack, response_format=response_format)
    assert find_members(sent, "response_format") == describe(response_format)

    tool = write_tool(DECISION)
    sent = complete_with_bridge(stack, tools=f"[{tool}]")
    assert find_members(sent, "tools") == describe(f"[{tool}]")


@settings(CASES, max_examples=10)
@given(parameters=objects, schema=objects)
def test_any_schema_comes_from_the_front_to_the_backend_as_it_was_sent(
    stack: FrontStack, horde: ChatHorde, parameters: str, schema: str
) -> None:
    start_anew()
    horde.take_nothing(chat_features=EVERYTHING)
    response_format, tool = write_format(schema), write_tool(parameters)
    sent = complete_with_bridge(stack, response_format=response_format)
    assert find_members(sent, "response_format") == describe(response_format)
    sent = complete_with_bridge(stack, tools=f"[{tool}]")
    assert find_members(sent, "tools") == describe(f"[{tool}]")


def test_the_parameters_of_a_forced_call_stay_in_their_order(
    stack: FrontStack, horde: ChatHorde
) -> None:
    """llama.cpp is asked for the call as JSON, to a schema that the bridge makes of the tool's."""
    call = '{"name":"decide","arguments":{"reasoning":"r","decision":1e2,"id":1}}'
    sent = complete_with_bridge(
        stack, tools=f"[{write_tool(DECISION)}]", tool_choice='"required"', reply=call
    )
    path = ("response_format", "json_schema", "schema", "$defs", "arguments_0")
    assert find_members(sent, *path) == describe(DECISION)


def complete_with_bridge(
    stack: FrontStack,
    *,
    reply: str = '{"reasoning":"r","final_answer":0.5,"z":100}',
    **members: str,
) -> Any:
    """What the backend was asked for a completion of these keys, described."""
    waiting = stack.threads.submit(stack.post, write_body(**members).encode())
    return serve_with_bridge(stack, reply, waiting)


def serve_with_bridge(stack: FrontStack, reply: str, waiting: "Future[httpx.Response]") -> Any:
    """What the backend was asked, described, once the front's client has its answer."""
    script, asked = llama_script(chat=completion(reply)), []

    class Recorder(Script):
        def handle(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/chat/completions":
                asked.append(request.content)
            return super().handle(request)

    recorder = Recorder(script.answers)
    connections = Connections(
        backend=build_backend(recorder), inputs=build_inputs(), post_progress=lambda _: False
    )
    api = HordeApi(stack.native_url, stack.horde.owner_key, "agent:1:url")
    plan = build_plan()
    try:
        answer = None
        while answer is None:
            answer = api.pop(build_pop_body(chat_features=EVERYTHING))
        api.submit(serve_job(parse_job(answer, plan), connections, plan))
    finally:
        api.close()
    completed = waiting.result(PATIENCE_SECONDS)
    assert completed.status_code == 200, completed.text
    (body,) = asked
    return describe(body)


def test_offloaded_messages_are_the_object_as_they_were_sent(horde: ChatHorde) -> None:
    long = json.dumps("so and so on, " * 300)
    messages = '[{"name":"n","content":' + long + ',"role":"user"}]'
    request_id = submit(horde, write_body(messages=messages))
    stored = gzip.decompress(r2.get_object(f"{request_id}_chat_messages.json"))
    assert describe(stored) == describe(messages)
    assert find_payload(take_text(horde), "messages") == describe(messages)


def test_a_forced_function_is_sent_as_it_was_written(horde: ChatHorde) -> None:
    tool = write_tool(DECISION)
    other = '{"type":"function","function":{"name":"other"}}'
    choice = '{"function":{"name":"decide"},"type":"function"}'
    submit(horde, write_body(tools=f"[{other},{tool}]", tool_choice=choice))
    answer = horde.pop(chat_features=EVERYTHING)
    assert find_payload(answer.text, "tools") == describe(f"[{tool}]")


def test_a_field_mask_keeps_the_form_of_a_job(horde: ChatHorde) -> None:
    tool = write_tool(DECISION)
    submit(horde, write_body(tools=f"[{tool}]"))
    answer = horde.post(
        "/generate/text/pop",
        build_pop_body(chat_features=EVERYTHING),
        horde.owner_key,
        **{"X-Fields": "payload{tools}"},
    )
    assert describe(answer.text) == (
        "object",
        ("payload", ("object", ("tools", describe(f"[{tool}]")))),
    )


def test_the_same_documents_in_another_order_are_the_same_operation(horde: ChatHorde) -> None:
    """The fingerprint is the contract's: it sorts keys."""
    key = '{"operation_key":"7b3f1a52-6a62-4a3e-9b8e-0d5a5c2b7e11"}'
    tool = '{"type":"function","function":{"name":"decide","parameters":{"a":1,"b":1e2}}}'
    turned = '{"function":{"parameters":{"b":100.0,"a":1},"name":"decide"},"type":"function"}'
    first = submit(horde, write_body(tools=f"[{tool}]", horde=key))
    again = post_text(horde, write_body(tools=f"[{turned}]", horde=key))
    assert (again.status_code, (again.json or {})["id"]) == (200, first)


def test_a_reply_is_checked_by_the_schema_as_it_was_sent(horde: ChatHorde) -> None:
    """jsonb writes 1e300 as an integer of 301 digits, which no float equals."""
    schema = (
        '{"type":"object","properties":{"a":{"const":1e300}},"additionalProperties":false,'
        '"required":["a"]}'
    )
    submit(horde, write_body(response_format=write_format(schema, "true")))
    job = horde.take(chat_features=EVERYTHING)
    assert horde.reply(job["id"], '{"a":1e300}').status_code == 200


def find_stored(request_id: str) -> Any:
    columns = TextWaitingPrompt.messages_text, TextWaitingPrompt.chat_extras_text
    with transaction() as session:
        return session.execute(
            select(*columns).where(TextWaitingPrompt.id == UUID(request_id))
        ).one()


def test_a_request_whose_order_the_database_keeps_is_stored_once(horde: ChatHorde) -> None:
    messages = '[{"role":"user","content":"Name one colour."}]'
    stored = find_stored(submit(horde, write_body(messages=messages, stream="true")))
    assert tuple(stored) == (None, None)


def test_a_row_without_the_text_is_served_from_its_columns(horde: ChatHorde) -> None:
    """As a server of the version before writes it."""
    tool = write_tool(DECISION)
    request_id = submit(horde, write_body(tools=f"[{tool}]"))
    with transaction() as session:
        statement = update(TextWaitingPrompt).where(TextWaitingPrompt.id == UUID(request_id))
        session.execute(statement.values(messages_text=None, chat_extras_text=None))
    payload: Body = json.loads(take_text(horde))["payload"]
    assert payload["tools"] == [json.loads(tool)]
    assert payload["messages"] == [{"role": "user", "content": "Answer as JSON."}]


@settings(CASES, max_examples=150)
@given(document=documents)
def test_the_database_keeps_what_is_said_to_survive_it(horde: ChatHorde, document: str) -> None:
    if not survives_jsonb(read_json(document)):
        return
    with transaction() as session:
        kept = session.scalar(
            text("SELECT CAST(CAST(:document AS jsonb) AS text)"), {"document": document}
        )
    assert describe(str(kept)) == describe(document)


def nest(levels: int) -> str:
    """A schema of so many levels, each of two JSON containers."""
    return '{"properties":{"a":' * levels + "{}" + "}}" * levels


@pytest.mark.parametrize("levels", [11, 48, 100, 250])
@pytest.mark.parametrize(
    ("key", "param"),
    [
        ("tools", "tools[0].function.parameters"),
        ("response_format", "response_format.json_schema.schema"),
    ],
)
def test_a_schema_nested_too_deep_is_told_where_and_how_deep_it_may_be(
    stack: FrontStack, horde: ChatHorde, key: str, param: str, levels: int
) -> None:
    written = f"[{write_tool(nest(levels))}]" if key == "tools" else write_format(nest(levels))
    body = write_body(**{key: written})
    answer = post_text(horde, body)
    assert answer.json is not None
    assert (answer.status_code, answer.json["rc"]) == (400, "UnsupportedChatParameter")
    assert f"'{param}' may nest at most 10 levels" in answer.json["message"]
    refused = get_error(stack.post(body.encode()))
    assert (refused["param"], "10 levels" in refused["message"]) == (param, True)


@pytest.mark.parametrize(
    ("member", "rc"),
    [
        ({"tool_choice": nest(200)}, "BadRequest"),
        ({"stop": nest(200)}, "BadRequest"),
        ({"messages": '[{"role":"user","content":' + nest(200) + "}]"}, "BadRequest"),
        ({"horde": '{"only":' + nest(200) + "}"}, "BadRequest"),
        ({"odd": nest(200)}, "UnsupportedChatParameter"),
    ],
)
def test_a_deep_value_is_refused_by_the_rule_of_its_key(
    stack: FrontStack, horde: ChatHorde, member: dict[str, str], rc: str
) -> None:
    body = write_body(**member)
    answer = post_text(horde, body)
    assert answer.json is not None
    assert (answer.status_code, answer.json["rc"]) == (400, rc)
    (key,) = member
    assert f"'{key}" in answer.json["message"]
    refused = get_error(stack.post(body.encode()))
    assert str(refused["param"]).startswith(key)


def test_a_body_nested_beyond_every_rule_is_no_server_error(
    stack: FrontStack, horde: ChatHorde
) -> None:
    horde.take_nothing(chat_features=EVERYTHING)
    for levels in (255, 256, 5_000):
        answer = stack.post(write_body(metadata=nest(levels)).encode(), key="no such key")
        assert answer.status_code in {400, 401}, answer.text
        get_error(answer)
