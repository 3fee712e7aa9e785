# SPDX-License-Identifier: AGPL-3.0-or-later
"""A request is flattened once and each of its texts measured once, at the API and in every form of
the front; estimates, trimming, moderation and the stored prompt ask what was found then.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from horde.chat import flattening
from horde.chat.context import size_chat_context
from horde.chat.fingerprint import build_operation_fingerprint
from horde.chat.job import required_chat_features
from horde.chat.request import parse_chat_request
from horde.chat_contract import ChatContextFit
from horde.oai.anthropic.request import MessagesRequest
from horde.oai.responses_form.request import ResponsesRequest
from horde.oai.schema import ChatCompletionRequest

TEXTS = ["Be brief.", "One?", "Two.", "Three?"]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}}
CHAT = {
    "model": "m",
    "messages": [
        {"role": role, "content": text}
        for role, text in zip(("system", "user", "assistant", "user"), TEXTS, strict=True)
    ],
    "tools": [TOOL],
}
RESPONSE = {
    "model": "m",
    "instructions": TEXTS[0],
    "input": [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant", "user"), TEXTS[1:], strict=True)
    ],
    "tools": [{"type": "function", "name": "lookup", "parameters": PARAMETERS}],
    "store": False,
}
MESSAGE = {
    "model": "m",
    "max_tokens": 64,
    "system": TEXTS[0],
    "messages": RESPONSE["input"],
    "tools": [{"name": "lookup", "input_schema": PARAMETERS}],
}


class Counts:
    """How often conversations were flattened, and what was measured."""

    def __init__(self) -> None:
        self.read_count = 0
        self.measured: list[str] = []


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counts = Counts()
    read, measure = flattening.FlattenedChat.read, flattening.measure_text

    def count_read(messages: Sequence[Any], tools: Sequence[Any] | None = None) -> Any:
        counts.read_count += 1
        return read(messages, tools)

    def count_measured(text: str) -> Any:
        counts.measured.append(text)
        return measure(text)

    monkeypatch.setattr(flattening.FlattenedChat, "read", count_read)
    monkeypatch.setattr(flattening, "measure_text", count_measured)
    return counts


def check(counts: Counts) -> None:
    assert counts.read_count == 1
    assert len(counts.measured) == len(TEXTS) + 1  # the tools are the last
    for text, measured in zip(TEXTS, counts.measured, strict=False):
        assert text in measured


@pytest.mark.parametrize("context_fit", list(ChatContextFit))
def test_the_api_flattens_a_request_once_until_it_is_stored(
    counts: Counts, context_fit: ChatContextFit
) -> None:
    chat = parse_chat_request(CHAT)
    sized = size_chat_context(
        chat.messages,
        chat.flattened,
        context_fit=context_fit,
        requested_max_length=16,
        requested_context_length=4096,
        declared_max_length=16,
        declared_context_length=8192,
    )
    assert chat.flattened.join() == sized.prompt
    required_chat_features(chat)
    build_operation_fingerprint(chat)
    check(counts)


def test_trimming_asks_what_was_measured(counts: Counts) -> None:
    chat = parse_chat_request(CHAT)
    budget = chat.flattened.estimate_tokens() - 1
    sized = size_chat_context(
        chat.messages,
        chat.flattened,
        context_fit=ChatContextFit.TRUNCATE_OLDEST,
        requested_max_length=16,
        requested_context_length=budget + 16,
        declared_max_length=16,
        declared_context_length=budget + 16,
    )
    assert sized.dropped_message_count == 2
    assert TEXTS[1] not in sized.prompt
    check(counts)


@pytest.mark.parametrize(
    "parse",
    [
        lambda: ChatCompletionRequest.parse(CHAT),
        lambda: ResponsesRequest.parse(RESPONSE, 512),
        lambda: MessagesRequest.parse(MESSAGE, ChatContextFit.GROW),
    ],
    ids=["chat", "responses", "messages"],
)
def test_the_front_flattens_a_request_once(counts: Counts, parse: Callable[[], Any]) -> None:
    assert parse().estimated_prompt_tokens > 0
    check(counts)
