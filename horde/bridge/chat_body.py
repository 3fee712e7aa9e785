# SPDX-License-Identifier: AGPL-3.0-or-later
"""The backend's request of a chat job."""

from collections.abc import Mapping
from enum import Enum
from typing import cast

from horde_sdk.generation_parameters.text.chat_policy import ChatToolChoiceMode
from horde_sdk.worker.chat_declaration import ChatJobPayload

from horde.bridge.dialects import DIALECTS, BackendKind, Dialect
from horde.bridge.plan import ServingPlan
from horde.bridge.tool_grammar import build_tool_call_schema
from horde.bridge.wire import OfferedTool
from horde.json_text import JsonObject

# What changes nothing, and is the default of OpenAI's routes.
_NEUTRAL = {"top_k": 0, "min_p": 0.0, "rep_pen": 1.0}
_NEUTRAL_PENALTIES = ("frequency_penalty", "presence_penalty")


class ReplyForm(Enum):
    """What the backend is asked for: what the client will get, or JSON that the bridge turns into
    it. The latter is for backends that enforce schemas better than calls.
    """

    REPLY = "reply"
    CALL = "call"
    CALL_OR_ANSWER = "call or answer"


def choose_form(chat: ChatJobPayload, plan: ServingPlan) -> ReplyForm:
    """Only llama.cpp needs the bridge's schemas; others are taken at the operator's word."""
    if plan.profile.kind is not BackendKind.LLAMA_CPP or not chat.tools:
        return ReplyForm.REPLY
    mode = chat.requirements.traits.tool_choice_mode
    if mode in (ChatToolChoiceMode.REQUIRED, ChatToolChoiceMode.FUNCTION):
        return ReplyForm.CALL
    has_format = (chat.response_format or {}).get("type") in ("json_object", "json_schema")
    return ReplyForm.CALL_OR_ANSWER if has_format else ReplyForm.REPLY


def build_chat_body(chat: ChatJobPayload, plan: ServingPlan, form: ReplyForm) -> JsonObject:
    """The backend's request.

    A backend whose sampling keys are known gets every value, so that no default of its own
    applies. Others get what changes something, and temperature and top_p, whose defaults differ.
    """
    body: JsonObject = {
        "model": plan.profile.backend_model,
        "messages": [_drop_nulls(message) for message in chat.messages],
        "max_tokens": chat.max_length,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
        **_build_sampling(chat, DIALECTS[plan.profile.kind]),
        "stream": False,
    }
    optional = {
        "stop": chat.stop_sequence,
        "seed": chat.seed,
        "response_format": chat.response_format,
    }
    body |= {key: value for key, value in optional.items() if value is not None}
    if chat.reasoning_effort is not None:
        body["reasoning_effort"] = chat.reasoning_effort
        if chat.reasoning_effort == "none":
            # the templates' own switch
            body["chat_template_kwargs"] = {"enable_thinking": False}
    if chat.tools:
        body |= _build_tool_keys(chat, form)
    return body


def get_answer_schema(chat: ChatJobPayload) -> object:
    """The schema of the answer that a response format asks for."""
    shape = (chat.response_format or {}).get("json_schema")
    schema = shape.get("schema") if isinstance(shape, Mapping) else None
    return {"type": "object"} if schema is None else schema


def _build_sampling(chat: ChatJobPayload, dialect: Dialect) -> JsonObject:
    values: JsonObject = {
        key: getattr(chat, key)
        for key in _NEUTRAL_PENALTIES
        if dialect.takes_neutral or getattr(chat, key)
    }
    for ours, theirs in dialect.chat_sampling.items():
        value = getattr(chat, ours)
        if dialect.takes_neutral or value != _NEUTRAL[ours]:
            values |= dict.fromkeys(theirs, value)
    return values


def _build_tool_keys(chat: ChatJobPayload, form: ReplyForm) -> JsonObject:
    """The tools, so that the template renders them; an enforced call is asked for as JSON instead
    of as a call.
    """
    keys: JsonObject = {"tools": list(chat.tools or ())}
    if form is not ReplyForm.REPLY:
        answer = get_answer_schema(chat) if form is ReplyForm.CALL_OR_ANSWER else None
        schema = build_tool_call_schema(cast(list[OfferedTool], keys["tools"]), answer)
        shape = {"name": "tool_call", "strict": True, "schema": schema}
        response_format = {"type": "json_schema", "json_schema": shape}
        return {**keys, "tool_choice": "none", "response_format": response_format}
    if chat.tool_choice is not None:
        keys["tool_choice"] = chat.tool_choice
    if chat.parallel_tool_calls is not None:
        keys["parallel_tool_calls"] = chat.parallel_tool_calls
    return keys


def _drop_nulls(message: Mapping[str, object]) -> JsonObject:
    """A null content stays, beside calls it is the rule; any other null key makes llama.cpp answer
    500.
    """
    return {key: value for key, value in message.items() if value is not None or key == "content"}
