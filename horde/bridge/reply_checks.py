# SPDX-License-Identifier: AGPL-3.0-or-later
"""What has to be true of a reply before it is submitted, and what the bridge makes so."""

from dataclasses import replace

from horde_sdk.generation_parameters.text.chat_policy import (
    ChatResponseFormatType,
    ChatToolChoiceMode,
)
from horde_sdk.worker.chat_declaration import ChatFaultReason, ChatFinishReason, ChatJobPayload

from horde.bridge.chat_body import ReplyForm
from horde.bridge.job import JobFault
from horde.bridge.replies import ChatReply
from horde.bridge.schema_check import matches_schema
from horde.bridge.tool_calls import build_tool_call
from horde.bridge.tool_grammar import parse_answer, parse_forced_call


def read_form(reply: ChatReply, form: ReplyForm) -> ChatReply:
    """The reply as the client gets it. Raises ``JobFault`` for one without the call it needs."""
    if form is ReplyForm.REPLY:
        return reply
    content = reply.content or ""
    is_cut = reply.finish_reason is ChatFinishReason.LENGTH
    if (call := parse_forced_call(content)) is not None:
        return replace(
            reply,
            content=None,
            tool_calls=[build_tool_call(call["name"], call["arguments"])],
            finish_reason=ChatFinishReason.LENGTH if is_cut else ChatFinishReason.TOOL_CALLS,
        )
    answer = parse_answer(content) if form is ReplyForm.CALL_OR_ANSWER else None
    if answer is None and not (is_cut and form is ReplyForm.CALL_OR_ANSWER):
        raise JobFault(ChatFaultReason.TOOL_VIOLATION, "no call in a reply that needs one")
    return replace(reply, content=answer or "")


def limit_calls(reply: ChatReply, chat: ChatJobPayload) -> ChatReply:
    """Keep the first call where the client wants no parallel ones: that is what
    ``single_tool_call_enforced`` promises.
    """
    if chat.requirements.traits.parallel_tool_calls or len(reply.tool_calls) < 2:
        return reply
    return replace(reply, tool_calls=reply.tool_calls[:1])


def check_reply_tools(reply: ChatReply, chat: ChatJobPayload) -> None:
    """Give back a reply that calls what was not offered, or calls nothing where a call is
    required.
    """
    offered = list_offered(chat)
    if any(call["function"]["name"] not in offered for call in reply.tool_calls):
        raise JobFault(ChatFaultReason.TOOL_VIOLATION, "a call to a function that was not offered")
    needs_call = (
        offered and chat.requirements.traits.tool_choice_mode is not ChatToolChoiceMode.AUTO
    )
    if needs_call and not reply.tool_calls:
        raise JobFault(ChatFaultReason.TOOL_VIOLATION, "no call in a reply that needs one")


def check_reply_schema(reply: ChatReply, chat: ChatJobPayload) -> None:
    """Give back a reply that a strict schema rules out: the backend's grammar left a part of the
    schema out.

    A reply cut at its length is not judged. It is unfinished JSON by necessity: a strict request
    has it refused by the horde, which records why, and any other client gets what OpenAI would
    send.
    """
    traits = chat.requirements.traits
    if (
        traits.response_format_type is not ChatResponseFormatType.JSON_SCHEMA
        or not traits.strict_schema
    ):
        return
    if reply.finish_reason is ChatFinishReason.LENGTH or (reply.tool_calls and not reply.content):
        return
    schema = (chat.response_format or {})["json_schema"].get("schema")
    if not matches_schema(reply.content or "", schema):
        raise JobFault(ChatFaultReason.UNBUILDABLE_GRAMMAR, "the reply does not match the schema")


def list_offered(chat: ChatJobPayload) -> frozenset[str]:
    """The names of the functions that may be called."""
    return frozenset(tool["function"]["name"] for tool in chat.tools or ())
