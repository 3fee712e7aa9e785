# SPDX-License-Identifier: AGPL-3.0-or-later
"""Streams that are not quite OpenAI's: what is understood is served, what is not is a fault that
says why, and nothing becomes an empty success.
"""

import json
import string
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horde.bridge.chat_stream import ChatStream
from horde.bridge.refusals import BackendRefusal, BackendUnavailable, UnreadableAnswer
from horde.bridge.replies import ChatReply
from horde.bridge.sse import Event, iter_events
from horde.bridge.streamed_reply import StreamedReply, TextJoiner
from tests.unit.bridge.servers import DONE, USAGE, call, piece, sse

EXPECTED_ERRORS = (BackendRefusal, BackendUnavailable, UnreadableAnswer)
END = piece("stop")


def read(
    text: str | bytes,
    *,
    content_type: str = "text/event-stream",
    offered: frozenset[str] = frozenset({"now", "later"}),
) -> ChatReply:
    """The reply in an answer; its text only ever grows."""
    content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    response = httpx.Response(200, content=content, headers={"Content-Type": content_type})
    client = httpx.Client(transport=httpx.MockTransport(lambda _: response))
    stream = ChatStream(client, "http://backend.test", {}, httpx.Timeout(5))
    reply = StreamedReply(opens_reasoning=None, offered=offered)
    seen = ("", "")
    for chunk in stream.read_chunks():
        reply.add_chunk(chunk)
        assert reply.content.startswith(seen[0])
        assert reply.reasoning.startswith(seen[1])
        seen = reply.content, reply.reasoning
    reply.finish()
    assert reply.content.startswith(seen[0])
    return reply.build()


def read_calls(*chunks: Any) -> list[tuple[str, str]]:
    calls = read(sse(*chunks, DONE)).tool_calls
    assert len({one["id"] for one in calls}) == len(calls)
    return [(one["function"]["name"], one["function"]["arguments"]) for one in calls]


WHOLE = {"choices": [{"message": {"content": "Blue."}, "finish_reason": "stop"}]}
UNDERSTOOD = {
    "without done": sse(piece(content="Blue."), END),
    "done in another case": sse(piece(content="Blue."), END, "data: [done]\n\n"),
    "done without a finish reason": sse(piece(content="Blue."), DONE),
    "done in quotes": sse(piece(content="Blue."), 'data: "[DONE]"\n\n'),
    "no blank before the value": sse(piece(content="Blue."), END, DONE).replace("data: ", "data:"),
    "carriage returns": sse(piece(content="Blue."), END, DONE, newline="\r\n"),
    "lone carriage returns": sse(piece(content="Blue."), END, DONE, newline="\r"),
    "a byte-order mark": "\ufeff" + sse(piece(content="Blue."), END, DONE),
    "one line break between events": sse(piece(content="Blue."), END, DONE).replace("\n\n", "\n"),
    "lines of JSON": sse(piece(content="Blue."), END, DONE).replace("data: ", ""),
    "comments": ": ping\n\n" + sse(piece(content="Blue."), ": ping\n", END, ":\n\n", DONE),
    "named events": sse(piece(content="Blue."), END, before="id: 1\nevent: message\nretry: 9\n"),
    "empty events": "data:\n\n" + sse(piece(content="Blue."), "data: \n\n", END),
    "null chunks": sse("data: null\n\n", {"choices": None}, piece(content="Blue."), END),
    "role alone": sse(piece(role="assistant"), piece(content="Blue."), END),
    "the role each time": sse(piece(role="assistant", content="Blue."), piece("stop", role="x")),
    "empty finish reasons": sse(piece("", content="Bl"), piece("", content="ue."), END),
    "null as a word": sse(piece("null", content="Blue."), END),
    "choices as an object": sse({"choices": {"delta": {"content": "Blue."}}}, END),
    "no index": sse({"choices": [{"delta": {"content": "Blue."}}]},
        {"choices": [{"finish_reason": "stop"}]}),
    "another index": sse(piece(index=7, content="Blue."), piece("stop", index=7)),
    "a second choice": sse(piece(content="Blue."), piece(index=1, content="Red."), END),
    "content as parts": sse(piece(content=[{"type": "text", "text": "Blue."}]), END),
    "content as one part": sse(piece(content={"type": "text", "text": "Blue."}), END),
    "content as strings": sse(piece(content=["Bl", "ue."]), END),
    "text of completions": sse({"choices": [{"text": "Blue.", "finish_reason": "stop"}]}),
    "delta as a string": sse({"choices": [{"delta": "Blue."}]}, END),
    "message in place of delta": sse(
        {"choices": [{"message": {"content": "Bl"}}]},
        {"choices": [{"message": {"content": "Blue."}}]}, END
    ),
    "messages in place of deltas": sse(
        {"message": {"content": "Bl"}, "done": False},
        {"message": {"content": "ue."}, "done": False},
        {"message": {"content": ""}, "done": True, "done_reason": "stop"},
    ),
    "messages with a finish reason each": sse(
        {"choices": [{"message": {"content": "Bl"}, "finish_reason": "stop"}]},
        {"choices": [{"message": {"content": "ue."}, "finish_reason": "stop"}]},
    ),
    "a whole at the end in other white space": sse(
        piece(content="Blue."),
        {"choices": [{"message": {"content": " Blue."}, "finish_reason": "stop"}]}
    ),
    "the whole at the end": sse(
        piece(content="Bl"),
        piece(content="ue."),
        {"choices": [{"delta": {}, "message": {"content": "Blue."}, "finish_reason": "stop"}]},
    ),
    "refusal": sse(piece(refusal="Bl"), piece(refusal="ue."), END),
    "Ollama's own": sse({"message": {"content": "Blue."}, "done": True, "done_reason": "stop"}),
    "chunks in an array": sse([piece(content="Bl"), piece(content="ue.")], [END]),
    "null keys": sse(piece(content="Blue.", tool_calls=None, function_call=None, refusal=None),
        END),
    "reasoning twice": sse(piece(reasoning="Hm.", reasoning_content="Hm."), piece(content="Blue."),
        END),
    "indented JSON": json.dumps(WHOLE, indent=1),
    "a whole under a stream's name": json.dumps(WHOLE),
    "a whole as an event": sse(WHOLE),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_an_odd_stream_is_understood(name: str) -> None:
    reply = read(UNDERSTOOD[name])
    assert (reply.content, reply.finish_reason) == ("Blue.", "stop")


def test_a_stream_under_the_name_of_json_is_understood() -> None:
    reply = read(sse(piece(content="Blue."), END, DONE), content_type="application/json")
    assert reply.content == "Blue."


UNREADABLE = {
    "nothing at all": "",
    "only done": sse(DONE),
    "only a role": sse(piece(role="assistant"), DONE),
    "only counts": sse(USAGE, DONE),
    "only comments": ": ping\n\n" * 9,
    "broken off": sse(piece(content="Bl")),
    "no JSON": sse(piece(content="Bl"), "data: {no json\n\n", END),
    "a number": sse("data: 7\n\n", END),
    "a page": "<html><body>It works!</body></html>",
    "content as a number": sse(piece(content=7), END),
    "content as a boolean": sse(piece(content=True), END),
    "a part that is no text": sse(piece(content=[{"type": "audio", "data": "x"}]), END),
    "a part of a new kind": sse(piece(content=[{"type": "hologram", "text": "x"}]), END),
    "choices as a word": sse({"choices": "x"}, END),
    "a choice as a word": sse({"choices": ["x"]}, END),
    "delta as a number": sse({"choices": [{"delta": 7}]}, END),
    "another API": sse({"response": "Blue.", "done": False}, DONE),
    "a completion of llama.cpp's own": sse({"content": "Blue.", "stop": True}),
    "calls as words": sse(piece(tool_calls=["now"]), END),
    "a call without a name": sse(piece(tool_calls=[call("{}", None)]), piece("tool_calls")),
    "arguments as a number": sse(piece(tool_calls=[call(7)]), piece("tool_calls")),
    "announced calls": sse(piece(content="now()"), piece("tool_calls")),
    "an error's finish reason": sse(piece(content="Bl"), piece("error")),
    "an abort": sse(piece(content="Bl"), piece({"type": "abort"})),
    "an error": sse(piece(content="Bl"), {"error": {"message": "x"}}),
    "an error as a word": sse(piece(content="Bl"), {"error": "x"}, END),
    "an error event": sse(piece(content="Bl"), 'event: error\ndata: "x"\n\n', END),
    "an error field": sse(piece(content="Bl"), 'error: {"message": "x"}\n\n', END),
    "an error event in words": sse(piece(content="Bl"), "event: error\ndata: out of memory\n\n"),
    "vLLM's error": sse({"object": "error", "message": "x", "code": 500}, DONE),
    "FastAPI's error": sse({"detail": "x"}, DONE),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_not_understood_is_a_fault_with_a_reason(name: str) -> None:
    with pytest.raises(EXPECTED_ERRORS) as caught:
        read(UNREADABLE[name])
    assert str(caught.value)


def test_an_empty_reply_that_the_backend_ended_is_a_reply() -> None:
    assert read(sse(piece(content=""), END, DONE)).content == ""


@pytest.mark.parametrize(
    ("chunks", "calls"),
    [
        # Two under one index with ids of their own.
        (
            [
                piece(tool_calls=[call('{"a":', id="a")]),
                piece(tool_calls=[call("1}", None, id=None)]),
                piece(tool_calls=[call("{}", "later", id="b")]),
            ],
            [("now", '{"a":1}'), ("later", "{}")],
        ),
        ([piece(tool_calls=[call("{}", id="a"), call("{}", id="b")])], [("now", "{}")] * 2),
        # The id first, the name after it.
        (
            [
                piece(tool_calls=[call("{}", id="a")]),
                piece(tool_calls=[{"index": 0, "id": "b"}]),
                piece(tool_calls=[call("{}", "later", id=None)]),
            ],
            [("now", "{}"), ("later", "{}")],
        ),
        # The name, or all, with each piece.
        (
            [piece(tool_calls=[call("{", id="a")]), piece(tool_calls=[call("}", id="a")])],
            [("now", "{}")],
        ),
        (
            [piece(tool_calls=[call(text, id=None)]) for text in ('{"a', '{"a":', '{"a":1}')],
            [("now", '{"a":1}')],
        ),
        # No ids.
        (
            [piece(tool_calls=[call("{}", id=None)]),
                piece(tool_calls=[call("{}", "later", id=None)])],
            [("now", "{}"), ("later", "{}")],
        ),
        (
            [piece(tool_calls=[call("", id=None)]), piece(tool_calls=[call("", "later", id=None)])],
            [("now", "{}"), ("later", "{}")],
        ),
        ([piece(tool_calls=[call("{}", id=""), call("{}", id="")])], [("now", "{}")] * 2),
        # No index, an index as text, indexes in another order.
        (
            [piece(tool_calls=[{"function": {"name": "now"}}, {"function": {"name": "now"}}])],
            [("now", "{}")] * 2,
        ),
        (
            [
                piece(tool_calls=[call("{", index="0")]),
                piece(tool_calls=[call("}", None, index=0.0, id=None)]),
            ],
            [("now", "{}")],
        ),
        (
            [
                piece(tool_calls=[call("{}", "later", index=1, id="b")]),
                piece(tool_calls=[call("{}", index=0, id="a")]),
            ],
            [("now", "{}"), ("later", "{}")],
        ),
        # A name in pieces.
        (
            [
                piece(tool_calls=[call("", "lat", id="a")]),
                piece(tool_calls=[call("{}", "er", id="a")]),
            ],
            [("later", "{}")],
        ),
        # Arguments as an object, as text of text, or under another name.
        ([piece(tool_calls=[call({"a": 1})])], [("now", '{"a":1}')]),
        ([piece(tool_calls=[call(json.dumps('{"a":1}'))])], [("now", '{"a":1}')]),
        ([piece(tool_calls=[{"function": {"name": "now", "parameters": {}}}])], [("now", "{}")]),
        # Flat, as the models write it; as one object; as OpenAI's first models called.
        ([piece(tool_calls=[{"name": "now", "arguments": {}}])], [("now", "{}")]),
        ([piece(tool_calls={"0": call("{}")})], [("now", "{}")]),
        (
            [
                piece(function_call={"name": "now", "arguments": "{"}),
                piece("function_call", function_call={"arguments": "}"}),
            ],
            [("now", "{}")],
        ),
        # Once more as a whole at the end.
        (
            [
                piece(tool_calls=[call("{}")]),
                {"choices": [{"delta": {}, "message": {"tool_calls": [call("{}")]}}]},
            ],
            [("now", "{}")],
        ),
    ],
)  # fmt: skip
def test_odd_calls_are_put_together(chunks: list[Any], calls: list[tuple[str, str]]) -> None:
    assert read_calls(*chunks) == calls


def test_a_call_that_is_cut_before_its_name_is_left_out() -> None:
    chunks = [piece(tool_calls=[call("{}")]), piece("length", tool_calls=[{"index": 1, "id": "b"}])]
    reply = read(sse(*chunks))
    assert ([one["id"] for one in reply.tool_calls], reply.finish_reason) == (["a"], "length")


@pytest.mark.parametrize(
    "pieces",
    [
        ["Bl", "Blue", "Blue, o", "Blue, or red."],
        ["Blue", "Blue, or red."],
        ["Blue, or red, or green.", "Blue, or red, or green."],
        ["B", "Bl", "Blue, or", "Blue, or ", "Blue, or red", "Blue, or red."],
    ],
)
def test_a_backend_that_repeats_the_text_with_each_piece_is_read_once(pieces: list[str]) -> None:
    chunks = [piece(content=text) for text in pieces]
    assert read(sse(*chunks, END)).content == pieces[-1]


@pytest.mark.parametrize(
    "pieces",
    [
        ["ha", "ha", "ha"],
        ["1", "11", " 2"],
        ["\n", "\n\n", "x"],
        ["a", "ab"],
        ["a"] * 40,
        ["=" * 9] * 3,
    ],
)
def test_a_text_that_repeats_itself_is_kept(pieces: list[str]) -> None:
    assert read(sse(*[piece(content=text) for text in pieces], END)).content == "".join(pieces)


def test_a_backend_that_goes_back_on_what_it_repeated_is_not_believed() -> None:
    pieces = ["Blue", "Blue, or", "Blue, or red", "Blue, or red, or", "Green after all"]
    with pytest.raises(UnreadableAnswer):
        read(sse(*[piece(content=text) for text in pieces], END))


@given(st.lists(st.text(alphabet="ab \n", min_size=1, max_size=3), max_size=12))
def test_joining_never_takes_back_what_it_let_out(pieces: list[str]) -> None:
    joiner = TextJoiner()
    out = [joiner.add(text) for text in pieces] + [joiner.finish()]
    text = "".join(out)
    assert text == "".join(pieces) or (pieces and text == pieces[-1])


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    for start, end in pairwise(bounds):
        yield data[start:end]


@given(
    st.lists(st.text(alphabet=string.ascii_letters + " é😀\u2028", max_size=9), max_size=6),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(min_value=0, max_value=999), max_size=20),
)
def test_events_are_the_same_however_their_bytes_are_cut(
    texts: list[str], newline: str, places: list[int]
) -> None:
    data = sse(*[{"text": text} for text in texts], newline=newline).encode()
    expected = [Event(json.dumps({"text": text})) for text in texts]
    assert list(iter_events(cut(data, places))) == expected


KEYS = (
    "choices delta message content type text index id error tool_calls function name arguments"
    " finish_reason usage reasoning function_call x_groq detail object code"
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.lists(JSON | JSON.map(lambda value: {"choices": [{"delta": value}]}), max_size=4))
def test_no_chunk_of_json_surprises_the_reader(chunks: list[Any]) -> None:
    """Whatever comes is a reply or one of the errors that a job ends with."""
    try:
        reply = read(sse(*chunks, END, DONE))
    except EXPECTED_ERRORS:
        return
    assert isinstance(reply.content, str) or reply.tool_calls
    json.dumps(reply.build_message(), ensure_ascii=False).encode()


@given(st.binary(max_size=200) | st.text(alphabet='data: {}[]"\n\r,x', max_size=60).map(str.encode))
def test_no_bytes_surprise_the_reader(data: bytes) -> None:
    with pytest.raises(EXPECTED_ERRORS):
        read(data)
