# SPDX-License-Identifier: AGPL-3.0-or-later
"""Chunks in their order, and events that survive every line splitter."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.oai.errors import ErrorAnswer
from horde.oai.mapping import (
    CompletedReply,
    CompletionHead,
    build_system_fingerprint,
    build_usage,
    build_x_horde,
)
from horde.oai.relay import Delta, DeltaKind, Remainder, Source
from horde.oai.sse import (
    DONE,
    KEEP_ALIVE,
    build_completion_events,
    build_delta_events,
    build_error_events,
    encode_event,
    encode_events,
    encode_wait_comment,
)

WORKER, MODEL = "00000000-0000-0000-0000-000000000001", "koboldcpp/model"
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"city":"Oslo"}'},
}


def facts(**changes: Any) -> CompletionHead:
    values: dict[str, Any] = {
        "request_id": "an-id",
        "created": 1793463889,
        "model": MODEL,
        "estimated_prompt_tokens": 7,
        "include_reasoning": True,
        "include_usage": False,
    }
    return CompletionHead(**values | changes)


def reply(content: str | None = "Blue.", **changes: Any) -> CompletedReply:
    values: dict[str, Any] = {
        "content": content,
        "reasoning": None,
        "tool_calls": (),
        "finish_reason": "stop",
        "native_finish_reason": None,
        "prompt_tokens": 21,
        "completion_tokens": 3,
        "reasoning_tokens": None,
        "model": MODEL,
        "worker_id": WORKER,
        "worker_name": "a worker",
        "charge_basis": "output_estimate",
        "queue_wait_seconds": 0.2,
        "kudos": 12,
        "context_adjustments": None,
    }
    return CompletedReply(**values | changes)


def deltas_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]


def test_a_whole_reply_is_role_reasoning_content_calls_and_finish() -> None:
    second = CALL | {"id": "call_2"}
    chunks = list(
        build_completion_events(facts(), reply("Wait.", reasoning="Hm.", tool_calls=(CALL, second)))
    )
    assert deltas_of(chunks) == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"content": "Wait."},
        {"tool_calls": [{"index": 0, **CALL}]},
        {"tool_calls": [{"index": 1, **second}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]


@pytest.mark.parametrize("content", ["", None])
def test_an_empty_reply_has_no_content_chunk(content: str | None) -> None:
    assert deltas_of(list(build_completion_events(facts(), reply(content)))) == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_reasoning_is_left_out_when_hidden() -> None:
    chunks = list(build_completion_events(facts(include_reasoning=False), reply(reasoning="Hm.")))
    assert "Hm." not in json.dumps(chunks)


def test_a_relayed_stream_is_completed_without_a_second_role() -> None:
    chunks = list(
        build_completion_events(
            facts(), reply(), Remainder(reasoning="", content="e."), has_begun=True
        )
    )
    assert deltas_of(chunks) == [{"content": "e."}, {}]


def test_relayed_text_begins_with_the_role_once() -> None:
    deltas = [
        Delta(DeltaKind.REASONING, "Hm.", Source(WORKER, MODEL)),
        Delta(DeltaKind.CONTENT, "Blu", Source(WORKER, MODEL)),
    ]
    expected = [{"reasoning_content": "Hm."}, {"content": "Blu"}]
    assert deltas_of(list(build_delta_events(facts(), deltas, has_begun=False))) == [
        {"role": "assistant", "content": ""},
        *expected,
    ]
    assert deltas_of(list(build_delta_events(facts(), deltas, has_begun=True))) == expected


def test_every_chunk_names_who_wrote_it() -> None:
    other = Source("00000000-0000-0000-0000-000000000002", "another/model")
    chunks = list(
        build_delta_events(facts(), [Delta(DeltaKind.CONTENT, "Blu", other)], has_begun=False)
    )
    chunks += build_completion_events(facts(), reply(), has_begun=True)
    assert {chunk["system_fingerprint"] for chunk in chunks[:2]} == {
        build_system_fingerprint(other.worker_id, other.model)
    }
    assert {chunk["system_fingerprint"] for chunk in chunks[2:]} == {"fp_66d806c83a"}
    assert [chunk["model"] for chunk in chunks[1:3]] == [other.model, MODEL]
    assert {(chunk["id"], chunk["object"], chunk["created"]) for chunk in chunks} == {
        ("chatcmpl-an-id", "chat.completion.chunk", 1793463889)
    }


def test_only_the_finish_chunk_tells_of_the_horde() -> None:
    chunks = list(build_completion_events(facts(include_usage=True), reply()))
    assert [chunk.get("x_horde") for chunk in chunks] == [
        None,
        None,
        build_x_horde(facts(), reply()),
        None,
    ]


def test_usage_is_there_only_when_asked_for_and_then_last() -> None:
    assert all("usage" not in chunk for chunk in build_completion_events(facts(), reply()))
    asked = facts(include_usage=True)
    chunks = list(build_completion_events(asked, reply()))
    assert [chunk["usage"] for chunk in chunks] == [None, None, None, build_usage(asked, reply())]
    assert [chunk["choices"] == [] for chunk in chunks] == [False, False, False, True]


def test_an_error_ends_the_stream_without_a_finish() -> None:
    error = ErrorAnswer(
        status=502, code="generation_failed", message="No.", metadata={"request_id": "an-id"}
    )
    first, second, rest = build_error_events(error).split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: ")) == error.build_body()
    assert (second, rest) == (b"data: [DONE]", b"")


def test_constant_events_end_with_a_blank_line() -> None:
    assert (KEEP_ALIVE, DONE) == (b": keep-alive\n\n", b"data: [DONE]\n\n")


def test_text_beyond_ascii_stays_short() -> None:
    assert "Blåbær 🫐".encode() in encode_event({"content": "Blåbær 🫐"})


@given(st.text() | st.text('\x00\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\\"ü🫐', max_size=20))
def test_an_event_is_one_line_for_every_splitter(text: str) -> None:
    event = encode_event({"content": text})
    lines = event.decode().splitlines()
    assert len(lines) == 2
    assert lines[1] == ""
    assert json.loads(lines[0].removeprefix("data: ")) == {"content": text}


def test_half_of_a_surrogate_pair_is_escaped() -> None:
    assert encode_events([{"content": "\ud83e"}]) == b'data: {"content":"\\ud83e"}\n\n'


def test_a_comment_tells_how_a_request_waits_on_one_line() -> None:
    wait = {"queue_position": 3, "wait_time": None, "kudos": 1.5}
    comment = b': waiting {"queue_position":3,"wait_time":null,"kudos":1.5}\n\n'
    assert encode_wait_comment(wait) == comment
