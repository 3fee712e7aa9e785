# SPDX-License-Identifier: AGPL-3.0-or-later
"""Whatever a client sends, and wherever: a refusal names it briefly."""

from collections.abc import Callable
from typing import Any

import pytest

from horde.chat_contract import ChatContextFit
from horde.oai.anthropic.request import MessagesRequest
from horde.oai.errors import MAX_MESSAGE_CHARACTERS, MAX_PARAM_CHARACTERS, RequestRefused
from horde.oai.responses_form.request import ResponsesRequest
from horde.oai.schema import ChatCompletionRequest
from horde.oai.text_schema import TextCompletionRequest

LONG = "x" * 100_000
USER = {"role": "user", "content": "a"}
CHAT = {"model": "m", "messages": [USER]}
LOOSE = {"type": "object", "properties": {LONG: {}}, "required": [], "additionalProperties": False}
CALL = {"type": "function_call", "name": "a", "arguments": "{}"}

type Parse = Callable[[object], object]
FORMS: dict[str, tuple[Parse, dict[str, Any]]] = {
    "chat": (ChatCompletionRequest.parse, CHAT),
    "responses": (lambda body: ResponsesRequest.parse(body, 64), {"model": "m", "input": "a"}),
    "completions": (
        lambda body: TextCompletionRequest.parse(body, 16),
        {"model": "m", "prompt": "a"},
    ),
    "messages": (
        lambda body: MessagesRequest.parse(body, ChatContextFit.GROW),
        CHAT | {"max_tokens": 64},
    ),
}


def build_strict(**place: object) -> dict[str, Any]:
    return {"name": "a", "strict": True, **place}


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        *((form, {LONG: 1}) for form in FORMS),
        *((form, {"horde": {LONG: 1}}) for form in FORMS),
        *((form, {"horde": {"context_fit": LONG}}) for form in FORMS),
        ("chat", {"messages": [USER | {LONG: 1}]}),
        ("chat", {"tools": [{"type": "function", "function": build_strict(parameters=LOOSE)}]}),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": build_strict(schema=LOOSE)}},
        ),
        ("responses", {"metadata": {LONG: 1}}),
        ("responses", {"input": [{"type": LONG}]}),
        ("responses", {"input": [USER | {LONG: 1}]}),
        ("responses", {"input": [CALL | {"call_id": str(n) * 256} for n in range(10)]}),
        ("responses", {"tools": [{"type": "function"} | build_strict(parameters=LOOSE)]}),
        ("responses", {"text": {"format": {"type": "json_schema"} | build_strict(schema=LOOSE)}}),
        ("messages", {"messages": [USER | {LONG: 1}]}),
        ("messages", {"tools": [{"type": LONG}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_is_brief(form: str, changes: dict[str, Any]) -> None:
    parse, body = FORMS[form]
    with pytest.raises(RequestRefused) as raised:
        parse(body | changes)
    assert len(raised.value.param or "") <= MAX_PARAM_CHARACTERS + 1
    assert len(raised.value.message) <= MAX_MESSAGE_CHARACTERS + 1
