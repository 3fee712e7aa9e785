# SPDX-License-Identifier: AGPL-3.0-or-later
"""A reply as a message: content blocks, stop reason and usage. Pure.

Source: docs/reference/front_messages.md, "Message".
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from horde_sdk.worker.chat_declaration import ChatFinishReason

from horde.chat.wire import ToolCall
from horde.exceptions import BadRequest
from horde.json_body import parse_json_body
from horde.json_text import JsonObject
from horde.oai.anthropic.request import MessagesRequest
from horde.oai.errors import WaitDetails, WaitFailed, WaitFailure
from horde.oai.mapping import (
    CompletedReply,
    CompletionHead,
    build_quote_x_horde,
    build_usage,
    build_x_horde,
    get_quoted_tokens,
)
from horde.return_codes import ReturnCode

MESSAGE_ID_PREFIX: Final = "msg_"
SIGNATURE_PREFIX: Final = "aihorde-"
SIGNATURE_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What is fixed before the reply.

    `model` is the client's name of it, `names` the client's names of tools that were shortened, and
    `front_id` the front's own name of the call.
    """

    chat: CompletionHead
    model: str
    stop_sequences: tuple[str, ...]
    names: Mapping[str, str]
    dropped_hints: tuple[str, ...]
    front_id: str

    @classmethod
    def read(cls, request: MessagesRequest, request_id: str, created: int) -> "MessageHead":
        """The head of a request that the horde took."""
        chat = CompletionHead(
            request_id=request_id,
            created=created,
            model=request.model,
            estimated_prompt_tokens=request.estimated_prompt_tokens,
            include_reasoning=request.include_reasoning,
            include_usage=True,
        )
        return cls(
            chat=chat,
            model=request.model,
            stop_sequences=request.stop_sequences,
            names=request.tools.names,
            dropped_hints=tuple(request.dropped_hints),
            front_id=request.front_id,
        )

    @property
    def message_id(self) -> str:
        """The `id` of the message."""
        return MESSAGE_ID_PREFIX + self._hex_id

    @property
    def _hex_id(self) -> str:
        return self.chat.request_id.replace("-", "")

    def build_call_id(self, index: int) -> str:
        """The id of a call, which no other turn of a conversation has: those of workers repeat."""
        return f"toolu_{self._hex_id}_{index}"


def build_message(head: MessageHead, reply: CompletedReply) -> JsonObject:
    """The answer to a call that does not stream. Raises WaitFailed for unreadable arguments."""
    content: list[JsonObject] = []
    if reply.reasoning and head.chat.include_reasoning:
        content.append(build_thinking_block(reply.reasoning, sign(reply.reasoning)))
    if reply.content:
        content.append({"type": "text", "text": reply.content})
    content += [
        build_tool_use(head, index, call) | {"input": parse_input(head, call)}
        for index, call in enumerate(reply.tool_calls)
    ]
    return {
        **build_frame(head.message_id, head.model),
        "content": content or [{"type": "text", "text": ""}],
        **build_stop(head, reply),
        "usage": build_message_usage(head, reply),
        "x_horde": build_message_x_horde(head, reply),
    }


def build_frame(message_id: str, model: str) -> JsonObject:
    """What every message begins with."""
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}


def build_thinking_block(text: str, signature: str) -> JsonObject:
    """A block of thoughts."""
    return {"type": "thinking", "thinking": text, "signature": signature}


def sign(thinking: str) -> str:
    """What stands for Anthropic's signature: types ask for one, and some clients drop blocks with
    an empty one.
    """
    digest = hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).hexdigest()
    return SIGNATURE_PREFIX + digest[:SIGNATURE_DIGITS]


def build_tool_use(head: MessageHead, index: int, call: ToolCall) -> JsonObject:
    """The block of a call, with an empty input."""
    name = call["function"]["name"]
    return {
        "type": "tool_use",
        "id": head.build_call_id(index),
        "name": head.names.get(name, name),
        "input": {},
    }


def get_arguments(call: ToolCall) -> str:
    """The text of a call's input; none is an empty object."""
    return call["function"]["arguments"] or "{}"


def parse_input(head: MessageHead, call: ToolCall) -> JsonObject:
    """The input of a call. Raises WaitFailed when it is no object."""
    try:
        value = parse_json_body(get_arguments(call).encode("utf-8", "replace"))
    except BadRequest:
        value = None
    if isinstance(value, dict):
        return value
    reason = (
        "The reply cannot be given: the arguments of a call are no JSON object. Send the request"
        " again."
    )
    details = WaitDetails(fault_reason=reason, fault_rc=ReturnCode.CHAT_SUBMIT_NONCONFORMANT)
    raise WaitFailed(WaitFailure.FAULTED, head.chat.request_id, details)


def build_stop(head: MessageHead, reply: CompletedReply) -> JsonObject:
    """Why the reply ended; `stop_details` only where it was withheld."""
    reason, sequence = "end_turn", None
    if reply.finish_reason == ChatFinishReason.LENGTH:
        reason = "max_tokens"
    elif reply.finish_reason == ChatFinishReason.CONTENT_FILTER:
        details = {"type": "refusal", "category": None, "explanation": None}
        return {"stop_reason": "refusal", "stop_sequence": None, "stop_details": details}
    elif reply.tool_calls or reply.finish_reason == ChatFinishReason.TOOL_CALLS:
        reason = "tool_use"
    else:
        sequence = _find_stop_sequence(head, reply)
        reason = "end_turn" if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _find_stop_sequence(head: MessageHead, reply: CompletedReply) -> str | None:
    """The sequence that a text ends with; the horde does not say which one ended a text that was
    cut.
    """
    text = reply.content or ""
    found = [sequence for sequence in head.stop_sequences if text.endswith(sequence)]
    return max(found, key=len, default=None)


def build_usage_counts(input_tokens: int, output_tokens: int) -> JsonObject:
    """All four counts; clients add up those of caches, of which there are none."""
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def build_message_usage(head: MessageHead, reply: CompletedReply) -> JsonObject:
    """Tokens, as chat completions count them."""
    counted = build_usage(head.chat, reply)
    usage = build_usage_counts(counted["prompt_tokens"], counted["completion_tokens"])
    if reply.reasoning_tokens is not None:
        usage["output_tokens_details"] = {"thinking_tokens": reply.reasoning_tokens}
    return usage


def build_message_x_horde(head: MessageHead, reply: CompletedReply) -> JsonObject:
    """Who served, what it cost, and which hints nobody could follow."""
    x_horde = build_x_horde(head.chat, reply) | {"model": reply.model}
    if head.dropped_hints:
        x_horde["dropped_hints"] = list(head.dropped_hints)
    return x_horde


def build_warm_message(request: MessagesRequest) -> JsonObject:
    """The answer to a call that only wants a cache warm."""
    return {
        **build_frame(f"{MESSAGE_ID_PREFIX}{uuid4().hex}", request.model),
        "content": [],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": build_usage_counts(request.estimated_prompt_tokens, 0),
    }


def build_quote_message(
    request: MessagesRequest, quote: Mapping[str, object], model: str
) -> JsonObject:
    """The answer to a dry run: a message without content, so that nobody takes a quote for text."""
    x_horde = build_quote_x_horde(quote) | {"model": model}
    if request.dropped_hints:
        x_horde["dropped_hints"] = list(request.dropped_hints)
    tokens = get_quoted_tokens(quote)
    return {
        **build_frame(f"{MESSAGE_ID_PREFIX}dryrun_{uuid4().hex}", request.model),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": build_usage_counts(tokens, 0),
        "x_horde": x_horde,
    }
