# SPDX-License-Identifier: AGPL-3.0-or-later
from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import Any

import pytest

from horde.bridge.reasoning import ReasoningSplitter, SurrogateJoiner, split_reasoning
from horde.bridge.streamed_reply import StreamedReply

REPLIES = [
    "Blue.",
    "",
    " \n",
    " Blue. ",
    "<th",
    "<think>a b </think>\n\nc ",
    "\n<think>\n a\n",
    "<think></think>x",
    "<think> </think> ",
    "<think>a</thin",
    "<think>a </b> c</think>d</think>",
    "a</think> b",
    "a b </think>",
    "a <think>b</think> c",
    "<think>a<think>b</think>c",
]


def cut(text: str, pieces: int = 3) -> Iterator[list[str]]:
    """Every way to cut a text into at most so many pieces, and into single characters."""
    yield list(text)
    for places in combinations(range(len(text) + 1), pieces - 1):
        bounds = [0, *places, len(text)]
        yield [text[start:end] for start, end in pairwise(bounds)]


def split(pieces: list[str], opens_reasoning: bool | None, is_cut: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(opens_reasoning=opens_reasoning)
    parts = [splitter.add(piece) for piece in pieces]
    parts.append(splitter.finish(is_cut=is_cut))
    return "".join(content for content, _ in parts), "".join(reasoning for _, reasoning in parts)


@pytest.mark.parametrize("text", REPLIES)
@pytest.mark.parametrize("opens_reasoning", [True, False])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_reply_is_parted_the_same_however_it_is_cut(
    text: str, opens_reasoning: bool, is_cut: bool
) -> None:
    expected = split_reasoning(text, opens_reasoning=opens_reasoning, is_cut=is_cut)
    assert {split(pieces, opens_reasoning, is_cut) for pieces in cut(text)} == {expected}


@pytest.mark.parametrize("text", REPLIES)
def test_a_template_nobody_knows_counts_as_one_that_opens_nothing(text: str) -> None:
    assert {split(pieces, None, False) for pieces in cut(text)} == {
        split_reasoning(text, opens_reasoning=False, is_cut=False)
    }


def test_text_is_let_out_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter(opens_reasoning=None)
    pieces = ["<thi", "nk>Hm", ", a ", "sky</t", "hink>", "\n", "Blue", " sky "]
    assert [splitter.add(piece) for piece in pieces] == [
        ("", ""),
        ("", "Hm"),
        ("", ", a"),
        ("", " sky"),
        ("", ""),
        ("", ""),
        ("Blue", ""),
        (" sky ", ""),
    ]


def test_a_character_in_two_halves_is_let_out_whole() -> None:
    joiner = SurrogateJoiner()
    assert [
        joiner.add("a\ud83d"),
        joiner.add("\ude00b"),
        joiner.add("\ud83d"),
        joiner.finish(),
    ] == ["a", "😀b", "", "�"]


def chunk(finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def read(*chunks: dict[str, Any], opens_reasoning: bool | None = None) -> StreamedReply:
    """Read a stream, checking at each chunk that the text only grows."""
    reply = StreamedReply(opens_reasoning=opens_reasoning)
    seen = ("", "")
    for piece in chunks:
        reply.add_chunk(piece)
        assert (reply.content.startswith(seen[0]), reply.reasoning.startswith(seen[1])) == (
            True,
            True,
        )
        seen = reply.content, reply.reasoning
    reply.finish()
    assert (reply.content.startswith(seen[0]), reply.reasoning.startswith(seen[1])) == (True, True)
    return reply


def test_the_chunks_of_llama_cpp_become_a_reply() -> None:
    usage = {"prompt_tokens": 21, "completion_tokens": 3}
    reply = read(
        chunk(role="assistant", content=None),
        chunk(content="Bl"),
        chunk(content="ue."),
        chunk("stop"),
        {"choices": [], "usage": usage},
    ).build()
    assert (reply.content, reply.reasoning, reply.tool_calls) == ("Blue.", None, [])
    assert (reply.finish_reason, reply.native_finish_reason) == ("stop", "stop")
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (21, 3)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_the_backend_parts_is_kept_and_the_content_is_left_alone(key: str) -> None:
    reply = read(
        chunk(**{key: "Hm"}),
        chunk(**{key: ". "}),
        chunk(content="<think> is"),
        chunk("stop", content=" a tag."),
    )
    assert (reply.content, reply.reasoning) == ("<think> is a tag.", "Hm. ")


def test_text_before_the_backends_own_reasoning_is_no_longer_held() -> None:
    reply = read(chunk(content="<thi"), chunk(reasoning_content="Hm"), chunk("stop", content="s>"))
    assert (reply.content, reply.reasoning) == ("<this>", "Hm")


def test_calls_are_put_together_by_their_index() -> None:
    first = {
        "index": 0,
        "id": "a",
        "type": "function",
        "function": {"name": "now", "arguments": ""},
    }
    second = {
        "index": 1,
        "id": "b",
        "type": "function",
        "function": {"name": "then", "arguments": '{"x":'},
    }
    reply = read(
        chunk(content="Let me look."),
        chunk(tool_calls=[first]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        chunk(tool_calls=[second]),
        chunk(
            tool_calls=[
                {"index": 0, "function": {"arguments": "}"}},
                {"index": 1, "function": {"arguments": "1}"}},
            ]
        ),
        chunk("tool_calls"),
    ).build()
    assert [(call["id"], call["function"]) for call in reply.tool_calls] == [
        ("a", {"name": "now", "arguments": "{}"}),
        ("b", {"name": "then", "arguments": '{"x":1}'}),
    ]
    assert (reply.content, reply.finish_reason) == ("Let me look.", "tool_calls")


def test_calls_without_an_index_begin_with_their_name() -> None:
    reply = read(
        chunk(tool_calls=[{"function": {"name": "now", "arguments": {"a": 1}}}]),
        chunk(tool_calls=[{"function": {"name": "then", "arguments": "{"}}]),
        chunk(tool_calls=[{"function": {"arguments": "}"}}, {"function": None}]),
        chunk("tool_calls"),
    ).build()
    assert [call["function"] for call in reply.tool_calls] == [
        {"name": "now", "arguments": '{"a":1}'},
        {"name": "then", "arguments": "{}"},
    ]
    assert reply.content is None


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": [None]},
        {"choices": [{"delta": None}]},
        {"choices": [{"delta": {}}]},
        {"choices": [{"index": 0, "delta": {"role": "assistant", "tool_calls": None}}]},
        {"usage": None},
        {"type": "ping"},
    ],
)
def test_a_chunk_without_a_piece_is_passed_over(broken: dict[str, Any]) -> None:
    assert read(broken, chunk(content="x")).content == "x"
