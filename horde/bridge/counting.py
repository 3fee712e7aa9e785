# SPDX-License-Identifier: AGPL-3.0-or-later
"""How many tokens a prompt has: as the backend renders it, as its tokeniser counts the bare text,
or by an estimate that leans to the safe side.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from horde.bridge.backend import Backend
from horde.bridge.config import TokenCounting
from horde.bridge.dialects import BackendKind
from horde.bridge.inputs import leave_out_images
from horde.bridge.plan import BackendProfile
from horde.bridge.refusals import BackendRefusal
from horde.bridge.wire import get_messages
from horde.json_text import JsonObject

# What a chat template writes around texts, at most: for the chat, for each message, for tools.
_CHAT_TOKENS, _MESSAGE_TOKENS, _TOOLS_TOKENS = 64, 12, 256
# An estimate may be this much under what the horde's own estimate lets in: 3 letters a token there.
ESTIMATE_MARGIN = 1.5
_LETTERS = re.compile(r"[A-Za-z ]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPrompt:
    """A chat's prompt. ``opens_reasoning`` says whether the template itself opens the model's
    reasoning block; None when nobody knows.
    """

    token_count: int
    is_estimate: bool = False
    opens_reasoning: bool | None = None


def counts_texts(backend: Backend, kind: BackendKind) -> bool:
    """Whether the backend's tokeniser can be asked, now, about a bare text."""
    count = _COUNT_TEXT.get(kind)
    return count is not None and count(backend, "a") is not None


def find_chat_prompt(
    backend: Backend, profile: BackendProfile, body: JsonObject
) -> CountedPrompt | None:
    """Count a chat request without running it; None where that is not possible.

    Images are left out: nobody but the backend can count them. Raises as ``Backend`` does.
    """
    body = {**body, "messages": leave_out_images(get_messages(body))}
    if profile.kind is BackendKind.LLAMA_CPP:
        return _render(backend, profile, body)
    if profile.kind is BackendKind.VLLM:
        keys = ("model", "messages", "tools", "chat_template_kwargs")
        answer = backend.find("/tokenize", {key: body[key] for key in keys if key in body})
        return None if answer is None else CountedPrompt(token_count=len(_get_tokens(answer)))
    if profile.token_counting is TokenCounting.OFF:
        return None
    return _count_bare(backend, profile, body)


def find_text_tokens(backend: Backend, profile: BackendProfile, prompt: str) -> list[int] | None:
    """The tokens of a bare prompt, special ones included; None where the backend cannot tell.

    Raises as ``Backend`` does.
    """
    question: JsonObject = {"content": prompt, "add_special": True, "parse_special": True}
    if profile.kind is BackendKind.VLLM:
        question = {"model": profile.backend_model, "prompt": prompt}
    elif profile.kind is not BackendKind.LLAMA_CPP:
        return None
    answer = backend.find("/tokenize", question)
    return None if answer is None else _get_tokens(answer)


def _render(backend: Backend, profile: BackendProfile, body: JsonObject) -> CountedPrompt | None:
    rendered = backend.find("/apply-template", body)
    prompt = "" if rendered is None else str(rendered.get("prompt") or "")
    tokens = None if rendered is None else find_text_tokens(backend, profile, prompt)
    if tokens is None:
        return None
    opens_reasoning = prompt.rstrip().endswith("<think>")
    return CountedPrompt(token_count=len(tokens), opens_reasoning=opens_reasoning)


def _count_bare(backend: Backend, profile: BackendProfile, body: JsonObject) -> CountedPrompt:
    """The tokens of all texts, and what a template may add."""
    messages = get_messages(body)
    tools = json.dumps(body["tools"], ensure_ascii=False) if body.get("tools") else ""
    text = "\n".join((*list_texts(messages), tools))
    count = _COUNT_TEXT.get(profile.kind)
    tokens = count(backend, text) if count is not None else None
    is_estimate = tokens is None  # also where a route has gone since the probe
    counted = estimate_tokens(text) if tokens is None else tokens
    around = _CHAT_TOKENS + _MESSAGE_TOKENS * len(messages) + (_TOOLS_TOKENS if tools else 0)
    return CountedPrompt(token_count=counted + around, is_estimate=is_estimate)


def list_texts(messages: Iterable[Mapping[str, object]]) -> list[str]:
    """All text of messages: contents, names, and calls as JSON."""
    texts = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            texts.append(text if isinstance(text, str) else "")
        if calls := message.get("tool_calls"):
            texts.append(json.dumps(calls, ensure_ascii=False))
    return texts


def estimate_tokens(text: str) -> int:
    """Tokens a text has at most, nearly always: a third of its letters, and each other character
    of ASCII by itself, as digits and brackets are cut; of other scripts three bytes a token.
    """
    letters = sum(map(len, _LETTERS.findall(text)))
    ascii_count = sum(character < "\x80" for character in text)
    other_bytes = len(text.encode("utf-8", "replace")) - ascii_count
    return math.ceil(letters / 3 + (ascii_count - letters) + other_bytes / 3)


def _count_koboldcpp(backend: Backend, text: str) -> int | None:
    answer = backend.find("/api/extra/tokencount", {"prompt": text})
    return None if answer is None else _require_count(answer, "value")


def _count_tabby_api(backend: Backend, text: str) -> int | None:
    answer = backend.find("/v1/token/encode", {"text": text})
    return None if answer is None else _require_count(answer, "length")


_COUNT_TEXT: Mapping[BackendKind, Callable[[Backend, str], int | None]] = {
    BackendKind.KOBOLDCPP: _count_koboldcpp,
    BackendKind.TABBY_API: _count_tabby_api,
}


def _require_count(answer: JsonObject, key: str) -> int:
    count = answer.get(key)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise BackendRefusal(200, "the tokenizer's answer has no count")
    return count


def _get_tokens(answer: JsonObject) -> list[int]:
    tokens = answer.get("tokens")
    if not isinstance(tokens, list):
        raise BackendRefusal(200, "the tokenizer's answer has no tokens")
    return tokens
