# SPDX-License-Identifier: AGPL-3.0-or-later
"""What of a message reaches the worker, and what is refused. Numbers are those of the form's
checklist.
"""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from devtools.services import ServiceAddresses
from horde.classes.base.waiting_prompt import WaitingPrompt
from tests.integration._fake_chat_worker import Body, build_call, start_anew
from tests.integration.chat_front import FrontStack, run_front_stack
from tests.integration.messages_front import (
    IMAGE,
    TOOL,
    build_message,
    complete,
    get_payload,
    post,
    read_error,
    refuse,
    refuse_value,
    serve,
)
from tests.integration.text_horde import count_rows

ALL_DECLARED: Body = {
    "chat_features": [
        *("prompt_overflow_refused", "tools", "json_schema", "reasoning_effort", "vision"),
        *("tool_choice_enforced", "single_tool_call_enforced", "structured_output_enforced"),
    ]
}
USER: Body = {"role": "user", "content": "Name one colour."}
CALL: Body = {
    "type": "tool_use",
    "id": "toolu_1",
    "name": "lookup_weather",
    "input": {"b": 1, "a": 2},
}
REASONING: Body = {"reasoning_content": "The sky."}


@pytest.fixture(scope="module")
def stack(service_urls: ServiceAddresses) -> Iterator[FrontStack]:
    with run_front_stack(service_urls, "messages_requests", models_cache_seconds=0.0) as stack:
        yield stack


@pytest.fixture(autouse=True)
def _anew(stack: FrontStack) -> None:
    start_anew()


def take(stack: FrontStack, **changes: Any) -> Body:
    """The job of a message, by a worker that declares everything."""
    return get_payload(stack, pop=ALL_DECLARED, **changes)


def take_messages(stack: FrontStack, *messages: Body, **changes: Any) -> list[Body]:
    """The messages of the job that these become."""
    return list(take(stack, messages=list(messages), **changes)["messages"])


def build_result(content: Any = "Rain.", call_id: str = "toolu_1", **more: Any) -> Body:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content} | more


def build_image(url: str | None = None) -> Body:
    if url is not None:
        return {"type": "image", "source": {"type": "url", "url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    return {"type": "image", "source": source}


def say(*blocks: Body, role: str = "user") -> Body:
    return {"role": role, "content": list(blocks)}


def text(value: str, **more: Any) -> Body:
    return {"type": "text", "text": value} | more


# --- keys of the caller
# -------------------------------------------------------------------------------------


def test_6_and_7_either_header_brings_the_key_and_the_bearer_wins(stack: FrontStack) -> None:
    key = stack.horde.requester_key
    for headers in (
        {"x-api-key": key},
        {"authorization": f"Bearer {key}"},
        {"x-api-key": key, "authorization": f"Bearer {key}"},
        {"x-api-key": "stale", "authorization": f"Bearer {key}"},
        {"x-api-key": key, "authorization": "Bearer"},
        {"apikey": key},
    ):
        serve(stack, headers=headers)
    wrong = {"x-api-key": key, "authorization": "Bearer of-nobody"}
    answer = post(stack, headers=wrong)
    assert (answer.status_code, read_error(answer)["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("headers", [{}, {"x-api-key": ""}, {"authorization": "Bearer"}])
def test_8_without_a_key_nothing_is_read(stack: FrontStack, headers: dict[str, str]) -> None:
    answer = post(stack, b"not even JSON", headers=headers)
    error = read_error(answer)
    assert (answer.status_code, error["type"]) == (401, "authentication_error")
    assert "0000000000" in error["message"]
    assert count_rows(WaitingPrompt) == 0


def test_8_the_sdk_raises_its_authentication_error(stack: FrontStack) -> None:
    client = anthropic.Anthropic(base_url=stack.url, api_key="of-nobody", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as raised:
        client.messages.create(**build_message())
    assert raised.value.request_id


def test_9_versions_and_betas_are_not_judged(stack: FrontStack) -> None:
    key = {"x-api-key": stack.horde.requester_key}
    serve(stack, headers=key)
    serve(stack, headers=key | {"anthropic-version": "1999-01-01", "anthropic-beta": "a-b-2026,c"})


def test_10_every_answer_names_the_request(stack: FrontStack) -> None:
    answer, _ = serve(stack)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    for refused in (post(stack, b"{"), post(stack, headers={}), post(stack, model=...)):
        read_error(refused)


# --- keys of the body
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["model", "messages", "max_tokens"])
@pytest.mark.parametrize("value", [..., None])
def test_11_what_has_to_be_there(stack: FrontStack, key: str, value: Any) -> None:
    assert refuse_value(stack, **{key: value}) == f"{key}: Field required"


def test_12_and_13_lengths_are_brought_into_the_range_of_the_horde(stack: FrontStack) -> None:
    assert take(stack, max_tokens=1)["max_length"] == 16
    assert take(stack, max_tokens=64000)["max_length"] == 1024  # what the worker declares


def test_14_a_length_of_none_asks_for_nothing(stack: FrontStack) -> None:
    message = post(stack, max_tokens=0).json()
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["output_tokens"] == 0
    assert count_rows(WaitingPrompt) == 0
    assert refuse_value(stack, max_tokens=0, stream=True).startswith("max_tokens: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 1.5),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 1.01),
        ("top_k", 40),
        ("top_k", 0.5),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "64"),
        ("stop_sequences", "END"),
        ("stop_sequences", [1]),
        ("stop_sequences", ["x" * 2001]),
        ("stream", "true"),
        ("model", 1),
        ("model", ""),
        ("messages", []),
        ("messages", {}),
        ("metadata", "a"),
        ("service_tier", 1),
        ("inference_geo", "us"),
        ("container", "a"),
        ("container", {}),
        ("mcp_servers", [{}]),
        ("context_management", []),
        ("thread", {"id": "a"}),
        ("fallbacks", [{}]),
        ("seed", 1),
        ("n", 1),
        ("horde", 1),
        ("output_config", 1),
        ("thinking", True),
        ("tools", {}),
        ("tool_choice", "auto"),
    ],
)
def test_15_and_16_and_19_and_21_what_is_refused(stack: FrontStack, key: str, value: Any) -> None:
    assert refuse_value(stack, **{key: value}).startswith((f"{key}:", f"{key}."))


def test_a_stop_sequence_of_blanks_is_refused(stack: FrontStack) -> None:
    message = refuse_value(stack, stop_sequences=["a", " \n"])
    assert message.startswith("stop_sequences.1: ")


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
def test_21_a_conversation_held_by_the_server_is_refused_with_its_own_code(
    stack: FrontStack, thread: Body
) -> None:
    details = read_error(post(stack, thread=thread))["details"]
    assert details["error_code"] == "thread_unsupported_request"
    assert details["unsupported"] == ["thread"]


def test_metadata_is_held_to_its_type(stack: FrontStack) -> None:
    assert refuse_value(stack, metadata={"user_id": 1}).startswith("metadata.user_id: ")


def test_16_and_17_and_18_and_20_what_changes_nothing(stack: FrontStack) -> None:
    plain = take(stack)
    hint = {"type": "ephemeral", "ttl": "1h"}
    ignored = {
        "top_k": 0,
        "stop_sequences": [],
        "tools": [],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": "a person", "other": 1},
        "service_tier": "auto",
        "speed": "fast",
        "inference_geo": "global",
        "cache_control": hint,
        "diagnostics": {"a": 1},
        "betas": ["a"],
        "anthropic_version": "vertex-2023-10-16",
        "mcp_servers": [],
        "fallbacks": [],
        "system": [text(" ", cache_control=hint)],
        "messages": [say(text("Name one colour.", cache_control="nonsense", citations=None))],
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "stream": False,
        "container": None,
        "thinking": None,
        "temperature": None,
        "output_config": {"task_budget": {"type": "tokens", "total": 1}},
    }
    assert take(stack, **ignored) == plain


def test_16_and_17_what_reaches_the_worker(stack: FrontStack) -> None:
    payload = take(stack, stop_sequences=["END", "X"], temperature=0.25, top_p=0.5, top_k=-1)
    assert payload["stop_sequence"] == ["END", "X"]
    assert (payload["temperature"], payload["top_p"], payload["top_k"]) == (0.25, 0.5, 0)


def test_22_edits_that_ask_for_something_are_named(stack: FrontStack) -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    message = complete(stack, context_management=edits)
    assert message["x_horde"]["dropped_hints"] == ["context_management"]


SCHEMA: Body = {
    "type": "object",
    "properties": {"b": {"type": "string"}, "a": {"type": "integer"}},
    "required": ["b", "a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("key", ["output_config", "output_format"])
@pytest.mark.parametrize("is_strict", [True, False])
def test_23_a_schema_reaches_the_worker(stack: FrontStack, key: str, *, is_strict: bool) -> None:
    schema = SCHEMA if is_strict else SCHEMA | {"required": []}
    form = {"type": "json_schema", "schema": schema}
    sent = {"output_config": {"format": form}} if key == "output_config" else {key: form}
    payload = get_payload(stack, content='{"b": "c", "a": 1}', pop=ALL_DECLARED, **sent)
    named = payload["response_format"]["json_schema"]
    assert (named["name"], named["schema"]) == ("output", schema)
    assert list(named["schema"]["properties"]) == ["b", "a"]
    assert named.get("strict", False) is is_strict


def test_23_two_schemas_or_none_are_refused(stack: FrontStack) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    both = refuse_value(stack, output_config={"format": form}, output_format=form)
    assert both.startswith("output_format: ")
    for wrong in ({"type": "text", "schema": SCHEMA}, {"type": "json_schema"}, {"a": 1}):
        message = refuse_value(stack, output_config={"format": wrong})
        assert message.startswith("output_config.format.")


def test_24_an_effort_reaches_those_who_take_it(stack: FrontStack) -> None:
    effort = {"effort": "max"}
    assert take(stack, output_config=effort)["reasoning_effort"] == "xhigh"
    start_anew()
    message = complete(stack, output_config=effort)
    assert message["x_horde"]["dropped_hints"] == ["output_config.effort"]
    assert refuse_value(stack, output_config={"effort": "most"}).startswith("output_config.effort")


@pytest.mark.parametrize(
    ("thinking", "effort", "is_shown"),
    [
        (None, None, False),
        ({"type": "disabled"}, "none", False),
        ({"type": "adaptive"}, None, True),
        ({"type": "enabled", "budget_tokens": 100}, "low", True),
        ({"type": "enabled", "budget_tokens": 2048}, "low", True),
        ({"type": "enabled", "budget_tokens": 2049}, "medium", True),
        ({"type": "enabled", "budget_tokens": 8193}, "high", True),
        ({"type": "adaptive", "display": "omitted"}, None, False),
    ],
)
def test_25_and_26_thinking(
    stack: FrontStack, thinking: Body | None, effort: str | None, *, is_shown: bool
) -> None:
    answer, payload = serve(stack, pop=ALL_DECLARED, reply=REASONING, thinking=thinking)
    assert payload.get("reasoning_effort") == effort
    kinds = [block["type"] for block in answer.json()["content"]]
    assert kinds == (["thinking", "text"] if is_shown else ["text"])


def test_25_a_worker_that_reports_no_thoughts_gives_none(stack: FrontStack) -> None:
    message = complete(stack, thinking={"type": "enabled", "budget_tokens": 4000})
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["x_horde"]["dropped_hints"] == ["thinking"]


def test_24_an_effort_wins_over_a_budget_and_not_over_none(stack: FrontStack) -> None:
    thinking = {"type": "enabled", "budget_tokens": 100}
    payload = take(stack, thinking=thinking, output_config={"effort": "high"})
    assert payload["reasoning_effort"] == "high"
    payload = take(stack, thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert payload["reasoning_effort"] == "none"


def test_the_horde_s_own_option_shows_or_hides_thoughts(stack: FrontStack) -> None:
    shown = complete(stack, reply=REASONING, horde={"include_reasoning": True})
    assert shown["content"][0]["type"] == "thinking"
    hidden = complete(
        stack, reply=REASONING, horde={"include_reasoning": False}, thinking={"type": "adaptive"}
    )
    assert hidden["content"][0]["type"] == "text"


@pytest.mark.parametrize(
    "thinking",
    [{"type": "sometimes"}, {"type": "enabled"}, {"type": "enabled", "budget_tokens": "a"}, {}],
)
def test_thinking_of_another_shape_is_refused(stack: FrontStack, thinking: Body) -> None:
    assert refuse_value(stack, thinking=thinking).startswith("thinking.")


def test_27_options_of_the_horde(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    quote = post(stack, horde={"dry_run": True}).json()
    assert (quote["content"], quote["stop_reason"]) == ([], None)
    assert quote["x_horde"]["dry_run"] is True
    assert quote["x_horde"]["kudos"] > 0
    assert quote["usage"]["input_tokens"] == quote["x_horde"]["resolved"]["estimated_prompt_tokens"]
    assert count_rows(WaitingPrompt) == 0
    stream = refuse_value(stack, horde={"dry_run": True}, stream=True)
    assert stream.startswith("horde.dry_run: ")
    answer = post(stack, horde={"max_kudos": 1}, max_tokens=512)
    error = read_error(answer)
    assert answer.status_code == 400
    assert error["message"].startswith("horde.max_kudos: ")
    assert error["details"]["error_code"] == "max_kudos_exceeded"
    assert error["details"]["metadata"]["max_kudos"] == 1
    assert refuse_value(stack, horde={"a": 1}).startswith("horde.a: ")


# --- messages
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["Be brief.\n\nBe kind.", [text("Be brief."), text("Be kind.")]])
def test_28_the_system_prompt_comes_first(stack: FrontStack, system: Any) -> None:
    messages = take_messages(stack, USER, system=system)
    assert messages == [{"role": "system", "content": "Be brief.\n\nBe kind."}, USER]


def test_28_an_image_in_the_system_prompt_is_refused(stack: FrontStack) -> None:
    assert refuse_value(stack, system=[build_image()]).startswith("system.0.type: ")


def test_29_the_line_that_accounts_for_a_call_is_left_out(stack: FrontStack) -> None:
    system = [text("x-anthropic-billing-header: cc_version=1;"), text("Be brief.")]
    messages = take_messages(stack, USER, system=system)
    assert messages[0] == {"role": "system", "content": "Be brief."}


def test_30_a_later_system_message_is_the_user_s_text(stack: FrontStack) -> None:
    messages = take_messages(
        stack,
        {"role": "system", "content": "Before."},
        USER,
        {"role": "system", "content": [text("Later.")]},
        system="First.",
    )
    assert messages == [
        {"role": "system", "content": "First.\n\nBefore."},
        {"role": "user", "content": "Name one colour.\n<system>\nLater.\n</system>"},
    ]


def test_31_a_system_message_does_not_part_a_call_from_its_result(stack: FrontStack) -> None:
    messages = take_messages(
        stack,
        USER,
        say(CALL, role="assistant"),
        {"role": "system", "content": "Note."},
        say(build_result()),
        tools=[TOOL],
    )
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[3]["content"] == "<system>\nNote.\n</system>"


@pytest.mark.parametrize("role", ["tool", "developer", "function", 1, None])
def test_32_other_roles_are_refused(stack: FrontStack, role: Any) -> None:
    message = refuse_value(stack, messages=[USER, {"role": role, "content": "a"}])
    assert message.startswith("messages.1.role: ")


def test_32_other_keys_of_a_message_are_refused(stack: FrontStack) -> None:
    message = refuse_value(stack, messages=[USER | {"name": "a"}])
    assert message == "messages.0.name: Extra inputs are not permitted"


def test_33_images_reach_the_worker(stack: FrontStack) -> None:
    messages = take_messages(stack, say(text("What is it?"), build_image(), build_image()))
    kinds = [part["type"] for part in messages[0]["content"]]
    assert kinds == ["text", "image_url", "image_url"]


def test_33_an_image_by_url_is_fetched_by_the_horde(stack: FrontStack) -> None:
    stack.horde.take_nothing(**ALL_DECLARED)
    answer = post(stack, messages=[say(build_image("http://127.0.0.1/a.png"))])
    error = read_error(answer)
    assert answer.status_code == 400
    assert error["details"]["error_code"] == "invalid_image_url"
    assert error["message"].startswith("messages: ")


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ({"type": "file", "file_id": "a"}, "type"),
        ({"type": "other"}, "type"),
        ({"type": "base64", "media_type": "image/tiff", "data": "a"}, "media_type"),
        ({"type": "base64", "media_type": "image/png"}, "data"),
        ({"type": "url"}, "url"),
    ],
)
def test_34_other_sources_are_refused(stack: FrontStack, source: Body, path: str) -> None:
    message = refuse_value(stack, messages=[say({"type": "image", "source": source})])
    assert message.startswith(f"messages.0.content.0.source.{path}: ")


def test_34_transformed_images_and_those_of_an_assistant_are_refused(stack: FrontStack) -> None:
    transformed = build_image() | {"transformations": [{}]}
    message = refuse_value(stack, messages=[say(transformed)])
    assert message.startswith("messages.0.content.0.transformations: ")
    message = refuse_value(stack, messages=[USER, say(build_image(), role="assistant")])
    assert message.startswith("messages.1.content.0.type: ")


def test_35_empty_texts_are_left_out(stack: FrontStack) -> None:
    messages = take_messages(
        stack, say(text(""), text("One.")), say(text(" \n"), role="assistant"), say(text("Two."))
    )
    assert messages == [{"role": "user", "content": "One.\nTwo."}]


def test_36_documents_of_text_arrive_as_text(stack: FrontStack) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Long ago."}
    whole = {"type": "content", "content": [text("Once."), build_image()]}
    messages = take_messages(
        stack,
        say(
            {"type": "document", "source": plain, "title": "Tale", "context": "Old."},
            {"type": "document", "source": whole, "title": None, "citations": {"enabled": False}},
            {"type": "search_result", "title": "Hit", "source": "web", "content": [text("Found.")]},
        ),
    )
    first, second, image, third = messages[0]["content"]
    assert first == text("Tale\nOld.\nLong ago.")
    assert second == text("Once.")
    assert image["type"] == "image_url"
    assert third == text("Hit\nweb\nFound.")


@pytest.mark.parametrize("kind", ["base64", "url", "file"])
def test_36_other_documents_are_refused(stack: FrontStack, kind: str) -> None:
    block = {"type": "document", "source": {"type": kind, "media_type": "application/pdf"}}
    for content, path in (
        ([text("a"), block], "messages.0.content.1"),
        ([build_result([block])], "messages.0.content.0.content.0"),
    ):
        message = refuse_value(stack, messages=[{"role": "user", "content": content}])
        assert (
            message == f"{path}.source.type: PDF documents are not supported; send text or images"
        )


def test_36_citations_are_refused(stack: FrontStack) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Long ago."}
    block = {"type": "document", "source": plain, "citations": {"enabled": True}}
    message = refuse_value(stack, messages=[say(block)])
    assert message.startswith("messages.0.content.0.citations: ")


def test_37_calls_and_results_reach_the_worker(stack: FrontStack) -> None:
    messages = take_messages(
        stack,
        USER,
        say(text("Let me see."), CALL, role="assistant"),
        say(build_result([text("Rain."), text("Wind.")])),
        tools=[TOOL],
    )
    called = build_call(call_id="toolu_1", arguments='{"b":1,"a":2}')
    assert messages[1:] == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [called]},
        {"role": "tool", "content": "Rain.\nWind.", "tool_call_id": "toolu_1"},
    ]


def test_38_and_41_images_and_texts_follow_the_results(stack: FrontStack) -> None:
    second = CALL | {"id": "toolu_2"}
    messages = take_messages(
        stack,
        USER,
        say(CALL, second, role="assistant"),
        say(
            text("And?"),
            build_result([text("Rain."), build_image()]),
            build_result([build_image(), {"type": "tool_reference", "tool_name": "a"}], "toolu_2"),
        ),
        tools=[TOOL],
    )
    assert [message["role"] for message in messages[2:]] == ["tool", "tool", "user"]
    assert messages[2]["content"] == "Rain.\n[image 1 of this result follows]"
    assert messages[3]["content"] == "[image 1 of this result follows]\nTool available: a"
    kinds = [part["type"] for part in messages[4]["content"]]
    assert kinds == ["image_url", "image_url", "text"]


def test_39_and_40_errors_and_nothing_of_a_tool(stack: FrontStack) -> None:
    results = [
        (build_result(is_error=True), "The tool reported an error:\nRain."),
        (build_result(is_error=False), "Rain."),
        (build_result(None), ""),
        (build_result([]), ""),
        (build_result(None, is_error=True), "The tool reported an error:"),
    ]
    for result, told in results:
        messages = take_messages(
            stack, USER, say(CALL, role="assistant"), say(result), tools=[TOOL]
        )
        assert messages[2]["content"] == told


def test_42_calls_and_results_are_pairs(stack: FrontStack) -> None:
    called = say(CALL, role="assistant")
    for turns, path, named in (
        ([USER, called], "messages.1", "toolu_1"),
        ([USER, called, USER], "messages.1", "toolu_1"),
        ([USER, called, say(build_result(call_id="other"))], "messages.2.content.0", "other"),
        ([USER, say(text("a"), build_result())], "messages.1.content.1", "toolu_1"),
        ([USER, called, say(build_result(), build_result())], "messages.2.content.1", "toolu_1"),
        ([USER, say(CALL, CALL, role="assistant")], "messages.1.content.1.id", "toolu_1"),
    ):
        message = refuse_value(stack, messages=turns, tools=[TOOL])
        assert message.startswith(f"{path}: "), message
        assert named in message
    assert count_rows(WaitingPrompt) == 0


def test_43_past_thoughts_are_left_out(stack: FrontStack) -> None:
    thoughts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "of somebody else"},
        {"type": "redacted_thinking", "data": "abc"},
    ]
    messages = take_messages(stack, USER, say(*thoughts, text("Blue."), role="assistant"), USER)
    assert messages[1] == {"role": "assistant", "content": "Blue."}
    messages = take_messages(stack, USER, say(*thoughts, role="assistant"), USER)
    assert messages == [{"role": "user", "content": "Name one colour.\nName one colour."}]


def test_44_neighbours_of_one_role_are_one_message(stack: FrontStack) -> None:
    messages = take_messages(
        stack, USER, USER, {"role": "assistant", "content": "A"}, say(text("B"), role="assistant")
    )
    assert messages == [
        {"role": "user", "content": "Name one colour.\nName one colour."},
        {"role": "assistant", "content": "A\nB"},
    ]


def test_45_a_reply_can_be_begun(stack: FrontStack) -> None:
    messages = take_messages(stack, USER, {"role": "assistant", "content": "The colour is "})
    assert messages[1] == {"role": "assistant", "content": "The colour is "}
    messages = take_messages(stack, {"role": "assistant", "content": "Hello."}, USER)
    assert [message["role"] for message in messages] == ["assistant", "user"]


@pytest.mark.parametrize(
    "kind", ["server_tool_use", "web_search_tool_result", "container_upload", "nonsense"]
)
def test_47_other_blocks_are_refused_by_their_type(stack: FrontStack, kind: str) -> None:
    for role in ("user", "assistant"):
        message = refuse_value(stack, messages=[USER, say(text("a"), {"type": kind}, role=role)])
        assert message.startswith("messages.1.content.1.type: ")
        assert kind in message


def test_47_a_compaction_is_the_user_s_text(stack: FrontStack) -> None:
    messages = take_messages(
        stack,
        USER,
        say({"type": "compaction", "content": "So far."}, text("Blue."), role="assistant"),
        say({"type": "compaction", "content": None}, text("Go on.")),
    )
    assert messages == [
        {"role": "user", "content": "Name one colour.\nSo far."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Go on."},
    ]


# --- tools
# --------------------------------------------------------------------------------------------------


def take_tools(stack: FrontStack, *tools: Body, **changes: Any) -> list[Body]:
    return [tool["function"] for tool in take(stack, tools=list(tools), **changes)["tools"]]


@pytest.mark.parametrize("kind", [{}, {"type": "custom"}, {"type": None}])
def test_48_a_tool_reaches_the_worker(stack: FrontStack, kind: Body) -> None:
    schema = {"type": "object", "properties": {"b": {"const": 1}, "a": {}}, "$defs": {"x": {}}}
    [function] = take_tools(stack, TOOL | kind | {"input_schema": schema, "cache_control": {}})
    assert function == {
        "name": "lookup_weather",
        "description": "The weather of a city.",
        "parameters": schema,
    }
    assert list(function["parameters"]["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"input_schema": {"type": "array"}}, "tools.0.input_schema"),
        ({"input_schema": {}}, "tools.0.input_schema"),
        ({"input_schema": None}, "tools.0.input_schema"),
        ({"input_schema": []}, "tools.0.input_schema"),
        ({"name": "a b"}, "tools.0.name"),
        ({"name": ""}, "tools.0.name"),
        ({"name": "a" * 129}, "tools.0.name"),
        ({"name": None}, "tools.0.name"),
        ({"description": 1}, "tools.0.description"),
        ({"strict": "yes"}, "tools.0.strict"),
        ({"allowed_callers": ["code_execution_20250825"]}, "tools.0.allowed_callers"),
        ({"other": 1}, "tools.0.other"),
        ({"type": 1}, "tools.0.type"),
    ],
)
def test_49_tools_of_another_shape_are_refused(stack: FrontStack, changes: Body, path: str) -> None:
    assert refuse_value(stack, tools=[TOOL | changes]).startswith(f"{path}: ")


def test_49_two_tools_of_one_name_and_too_deep_schemas_are_refused(stack: FrontStack) -> None:
    assert refuse_value(stack, tools=[TOOL, TOOL]).startswith("tools.1.name: ")
    deep: Body = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    message = refuse_value(stack, tools=[search, TOOL | {"input_schema": deep}])
    assert message.startswith("tools.1.input_schema: ")
    many = [TOOL | {"name": f"tool_{number}"} for number in range(129)]
    assert refuse_value(stack, tools=many).startswith("tools: ")


def test_50_a_long_name_works_both_ways(stack: FrontStack) -> None:
    name = "mcp__" + "a" * 95
    answer, payload = serve(
        stack,
        None,
        pop=ALL_DECLARED,
        tools=[TOOL | {"name": name}],
        tool_choice={"type": "tool", "name": name},
        messages=[USER, say(CALL | {"name": name}, role="assistant"), say(build_result())],
        reply={
            "tool_calls": [build_call(name=SHORT_NAME)],
            "finish_reason": "stop",
        },
    )
    assert payload["tools"][0]["function"]["name"] == SHORT_NAME
    assert payload["messages"][1]["tool_calls"][0]["function"]["name"] == SHORT_NAME
    assert answer.json()["content"][0]["name"] == name


# The start of the name above, and the first digits of its SHA-256.
SHORT_NAME = "mcp__" + "a" * 50 + "_893e0360"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("web_search_20250305", "runs on Anthropic's servers and is not offered here"),
        ("web_fetch_20250910", "runs on Anthropic's servers and is not offered here"),
        ("code_execution_20250825", "runs on Anthropic's servers and is not offered here"),
        ("computer_20250124", "is not supported; send a custom tool with input_schema"),
        ("memory_20250818", "is not supported; send a custom tool with input_schema"),
        ("mcp_toolset", "is not supported; send a custom tool with input_schema"),
        ("anything", "is not supported; send a custom tool with input_schema"),
    ],
)
def test_51_tools_that_run_elsewhere_are_refused(stack: FrontStack, kind: str, words: str) -> None:
    message = refuse_value(stack, tools=[TOOL, {"type": kind, "name": "a"}])
    assert message == f"tools.1.type: {kind} {words}"


def test_52_tools_that_the_client_runs_become_functions(stack: FrontStack) -> None:
    bash, editor, oldest = take_tools(
        stack,
        {"type": "bash_20250124", "name": "bash"},
        {
            "type": "text_editor_20250728",
            "name": "str_replace_based_edit_tool",
            "max_characters": 10,
        },
        {"type": "text_editor_20241022", "name": "str_replace_editor"},
    )
    assert bash["name"] == "bash"
    assert set(bash["parameters"]["properties"]) == {"command", "restart"}
    assert editor["name"] == "str_replace_based_edit_tool"
    assert editor["parameters"]["required"] == ["command", "path"]
    commands = editor["parameters"]["properties"]["command"]["enum"]
    assert commands == ["view", "create", "str_replace", "insert"]
    assert oldest["parameters"]["properties"]["command"]["enum"] == [*commands, "undo_edit"]


def test_53_hints_about_loading_are_left_out(stack: FrontStack) -> None:
    loose = {
        "defer_loading": True,
        "eager_input_streaming": True,
        "allowed_callers": ["direct", "code_execution_20250825"],
        "input_examples": [{"city": "Oslo"}, {"city": "Rome"}],
    }
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    [function] = take_tools(stack, search, TOOL | loose)
    assert set(function) == {"name", "description", "parameters"}
    assert function["description"].splitlines() == [
        "The weather of a city.",
        '{"city":"Oslo"}',
        '{"city":"Rome"}',
    ]


def test_48_strictness_is_a_wish(stack: FrontStack) -> None:
    strict = TOOL | {"strict": True, "input_schema": SCHEMA}
    loose = TOOL | {"strict": True, "name": "other"}
    answer, payload = serve(stack, pop=ALL_DECLARED, tools=[strict, loose])
    assert [tool["function"].get("strict") for tool in payload["tools"]] == [True, None]
    assert answer.json()["x_horde"]["dropped_hints"] == ["tools.1.strict"]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "lookup_weather"}, "required"),
    ],
)
def test_54_a_choice_reaches_the_worker(stack: FrontStack, choice: Body, told: Any) -> None:
    reply = {"tool_calls": [build_call()], "finish_reason": "tool_calls"}
    _, payload = serve(
        stack,
        None,
        pop=ALL_DECLARED,
        reply=reply,
        tools=[TOOL | {"name": "other"}, TOOL],
        tool_choice=choice,
    )
    assert payload["tool_choice"] == told
    # Of a worker that may call one function alone, the horde offers no other.
    assert len(payload["tools"]) == (1 if choice["type"] == "tool" else 2)


def test_54_with_the_choice_of_none_no_tool_is_offered(stack: FrontStack) -> None:
    assert "tools" not in take(stack, tools=[TOOL], tool_choice={"type": "none"})


def test_55_calls_one_at_a_time(stack: FrontStack) -> None:
    for kind in ("auto", "any"):
        choice = {"type": kind, "disable_parallel_tool_use": True}
        reply = {"tool_calls": [build_call()], "finish_reason": "tool_calls"}
        _, payload = serve(
            stack, None, pop=ALL_DECLARED, reply=reply, tools=[TOOL], tool_choice=choice
        )
        assert payload["parallel_tool_calls"] is False
    choice = {"type": "auto", "disable_parallel_tool_use": False}
    assert "parallel_tool_calls" not in take(stack, tools=[TOOL], tool_choice=choice)


@pytest.mark.parametrize(
    ("choice", "path"),
    [
        ({"type": "any"}, "tool_choice"),
        ({"type": "tool", "name": "a"}, "tool_choice"),
        ({"type": "other"}, "tool_choice.type"),
        ({}, "tool_choice.type"),
        ({"type": "tool"}, "tool_choice.name"),
    ],
)
def test_56_a_choice_without_tools_is_refused(stack: FrontStack, choice: Body, path: str) -> None:
    assert refuse_value(stack, tool_choice=choice).startswith(f"{path}: ")


def test_56_a_choice_of_an_unknown_tool_is_refused(stack: FrontStack) -> None:
    choice = {"type": "tool", "name": "other"}
    assert refuse_value(stack, tools=[TOOL], tool_choice=choice).startswith("tool_choice.name: ")


# --- errors of the horde
# ------------------------------------------------------------------------------------


def test_79_an_overfull_prompt_is_refused_in_words_that_agents_read(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    long = {"role": "user", "content": "word " * 8000}
    status, kind, message = refuse(
        stack, messages=[long, {"role": "assistant", "content": "a"}, USER]
    )
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("prompt is too long: 13"), message
    assert " tokens > 8192 maximum. " in message
    assert count_rows(WaitingPrompt) == 0


def test_79_a_prompt_that_fits_without_its_reply_says_so(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    long = {"role": "user", "content": "word " * 4700}
    message = refuse_value(stack, messages=[long], max_tokens=1024)
    assert message.startswith("input length and `max_tokens` exceed context limit: 78"), message
    assert " + 1024 > 8192. " in message


def test_80_failures_of_workers_and_their_absence(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    waiting = stack.threads.submit(post, stack)
    for _ in range(3):
        stack.horde.fault(stack.await_job()["id"])
    answer = waiting.result(60)
    error = read_error(answer)
    assert (answer.status_code, error["type"]) == (502, "api_error")
    assert error["details"]["error_code"] == "generation_failed"
    assert answer.headers["x-should-retry"] == "false"


def test_80_nobody_there_is_an_overload(stack: FrontStack) -> None:
    stack.horde.take_nothing()
    known = "elinas/chronos-70b-v2"  # of the model reference, served by nobody
    answer = post(stack, model=known, horde={"availability_mode": "fail_fast"})
    error = read_error(answer)
    assert (answer.status_code, error["type"]) == (503, "overloaded_error"), error
    assert answer.headers["x-should-retry"] == "false"
