# SPDX-License-Identifier: AGPL-3.0-or-later
"""The object and the events of a response: silence, errors, what another process takes up.

Numbers are those of the form's checklist.
"""

import json
from typing import Any

import pytest

from horde.oai.errors import ErrorAnswer
from horde.oai.mapping import CompletedReply
from horde.oai.relay import Delta, DeltaKind, Relay, RelayBroken, Remainder, Source
from horde.oai.responses_form.answer import ResponseAnswer, ResponseHead, build_object_error
from horde.oai.responses_form.output import parse_custom_input
from horde.oai.responses_form.runs import parse_frame, split_frames
from horde.oai.responses_form.tools import NO_TOOLS, ToolSet, parse_tools
from horde.oai.sse import KEEP_ALIVE

ID = "00000000-0000-0000-0000-000000000001"
SOURCE = Source("w", "m")


def build_head(*, background: bool = False, tools: ToolSet = NO_TOOLS) -> ResponseHead:
    return ResponseHead(
        request_id=ID,
        created=1,
        model="m",
        echo={},
        tools=tools,
        not_enforced=(),
        estimated_prompt_tokens=1,
        include_reasoning=True,
        store=background,
        background=background,
    )


def build_reply(content: str | None = "Blue.", **changes: Any) -> CompletedReply:
    values: dict[str, Any] = {
        "content": content,
        "reasoning": None,
        "tool_calls": (),
        "finish_reason": "stop",
        "native_finish_reason": None,
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "reasoning_tokens": None,
        "model": "m",
        "worker_id": "w",
        "worker_name": "w",
        "charge_basis": None,
        "queue_wait_seconds": None,
        "kudos": 1,
        "context_adjustments": None,
    }
    return CompletedReply(**values | changes)


def read(body: bytes) -> list[dict[str, Any]]:
    return [parse_frame(frame) for frame in split_frames(body)]


def content(text: str) -> Delta:
    return Delta(DeltaKind.CONTENT, text, SOURCE)


def test_57_long_silence_is_broken_by_an_event_that_clients_count() -> None:
    now = 0.0
    answer = ResponseAnswer(build_head(), clock=lambda: now)
    answer.open()
    spoken = []
    for _ in range(5):
        now += 15.0
        spoken.append(answer.fill_silence())
    assert spoken[:3] == [KEEP_ALIVE] * 3
    (event,) = read(spoken[3])
    assert (event["type"], event["sequence_number"]) == ("response.in_progress", 2)
    assert spoken[4] == KEEP_ALIVE


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin"}', "*** Begin"),
        ('"*** Begin"', "*** Begin"),
        ("*** Begin", "*** Begin"),
        ('{"inputs": 1}', '{"inputs": 1}'),
        ('{"input": 1}', '{"input": 1}'),
        ("[" * 100_000, "[" * 100_000),
        ("", ""),
    ],
)
def test_29_what_a_model_passed_in_another_shape_comes_as_it_is(arguments: str, text: str) -> None:
    assert parse_custom_input(arguments) == text


@pytest.mark.parametrize(
    ("status", "code", "shown"),
    [
        (404, "no_worker_supports_features", "invalid_prompt"),
        (400, "unbuildable_grammar", "invalid_prompt"),
        (400, "context_length_exceeded", "context_length_exceeded"),
        (429, "anything", "rate_limit_exceeded"),
        (502, "generation_failed", "generation_failed"),
    ],
)
def test_an_agent_does_not_try_a_final_refusal_again(status: int, code: str, shown: str) -> None:
    error = build_object_error(ErrorAnswer(status=status, code=code, message="no"))
    assert (error["code"], error["message"]) == (shown, "no")
    assert error.get("metadata", {}).get("code", shown) in (code, shown)


def test_a_failure_keeps_what_there_is_as_incomplete() -> None:
    answer = ResponseAnswer(build_head())
    answer.write_deltas([Delta(DeltaKind.REASONING, "Sky.", SOURCE), content("Bl")])
    (event,) = read(answer.fail(ErrorAnswer(status=504, code="wait_timeout", message="late")))
    assert [item["status"] for item in event["response"]["output"]] == ["incomplete"] * 2
    assert event["response"]["status"] == "failed"


def test_the_object_of_a_stream_is_that_of_the_plain_call() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    reply = build_reply("Blue.", reasoning="Sky.", tool_calls=(call,), finish_reason="tool_calls")
    plain = ResponseAnswer(build_head()).render(reply)
    streamed = ResponseAnswer(build_head())
    streamed.write_deltas([Delta(DeltaKind.REASONING, "Sk", SOURCE)])
    event = read(streamed.finish(reply, Remainder("y.", "Blue.")))[-1]
    assert event["response"]["output"] == plain["output"]
    assert len(plain["output"]) == 3


def test_an_empty_reply_is_an_empty_message_and_a_filtered_one_none() -> None:
    (message,) = ResponseAnswer(build_head()).render(build_reply(""))["output"]
    assert message["content"][0]["text"] == ""
    filtered = build_reply("", finish_reason="content_filter")
    assert ResponseAnswer(build_head()).render(filtered)["output"] == []


def test_a_cut_call_is_incomplete() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": '{"x'}}
    reply = build_reply(None, tool_calls=(call,), finish_reason="length")
    (item,) = ResponseAnswer(build_head()).render(reply)["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"x')


def test_a_call_of_a_group_says_its_group() -> None:
    function = {"type": "function", "name": "a", "parameters": None}
    tools = parse_tools([{"type": "namespace", "name": "ns", "tools": [function]}])
    call = {"id": "c", "type": "function", "function": {"name": "ns__a", "arguments": "{}"}}
    reply = build_reply(None, tool_calls=(call,), finish_reason="tool_calls")
    (item,) = ResponseAnswer(build_head(tools=tools)).render(reply)["output"]
    assert (item["name"], item["namespace"]) == ("a", "ns")


def test_another_process_goes_on_where_the_events_end() -> None:
    first = ResponseAnswer(build_head(background=True))
    told = first.open() + first.note_running()
    told += first.write_deltas([Delta(DeltaKind.REASONING, "Sky.", SOURCE), content("Bl")])
    second = ResponseAnswer(build_head(background=True))
    second.restore(read(told))
    assert second.get_text(DeltaKind.REASONING) == "Sky."
    assert second.get_text(DeltaKind.CONTENT) == "Bl"
    more = second.write_deltas([content("ue")]) + second.finish(build_reply(), Remainder("", "."))
    events = read(told) + read(more)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert done[1]["content"][0]["text"] == "Blue."
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]


def test_a_relay_that_is_taken_up_continues_or_breaks() -> None:
    def take_up() -> Relay:
        relay = Relay(requested_model="m", include_reasoning=True)
        relay.resume(reasoning="", content="Bl")
        return relay

    assert take_up().finish(build_reply("Blue.")) == Remainder("", "ue.")
    with pytest.raises(RelayBroken):
        take_up().finish(build_reply("Red."))


def test_a_cancelled_response_keeps_what_came_meanwhile() -> None:
    answer = ResponseAnswer(build_head(background=True))
    last = read(answer.cancel(build_reply()))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "cancelled"
    assert last["response"]["output"][0]["content"][0]["text"] == "Blue."
    assert last["response"]["completed_at"] is None


def test_frames_are_told_apart_whatever_they_hold() -> None:
    answer = ResponseAnswer(build_head())
    text = "one\n\ntwo\u2028: three\r\n\r\ndata: four"
    body = answer.write_deltas([content(text)]) + KEEP_ALIVE
    events = read(body)
    assert events[-1]["delta"] == text
    assert json.dumps(events)
