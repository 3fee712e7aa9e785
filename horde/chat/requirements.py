# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a request asks of its worker: who may serve it, and what that worker has to declare.

Source: docs/reference/chat_requests.md, "Chat declaration on pop".
"""

from dataclasses import dataclass

from horde_sdk.generation_parameters.text.chat_limits import (
    CHAT_SAMPLING_DEFAULTS,
    DEFAULT_PARALLEL_TOOL_CALLS,
)
from horde_sdk.generation_parameters.text.chat_policy import (
    ChatFeature,
    ChatRequestTraits,
    ChatResponseFormatType,
    ChatToolChoiceMode,
    required_chat_guarantees,
)

from horde.chat.flattening import count_image_parts
from horde.chat.messages import carries_tool_turn
from horde.chat.request import ChatRequest
from horde.chat.strict_schema import find_strict_schema
from horde.chat.wire import ToolChoice
from horde.chat_contract import ChatHordeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWorkerTargeting:
    """Who may serve a request. `worker_ids` are as sent and not looked up: an allow list, or a deny
    list.
    """

    worker_ids: tuple[str, ...]
    is_deny_list: bool
    trusted_workers: bool
    validated_backends: bool
    slow_workers: bool


def build_worker_targeting(horde: ChatHordeOptions) -> ChatWorkerTargeting:
    """The restrictions of the `horde` object in the terms of a text request's worker list."""
    return ChatWorkerTargeting(
        worker_ids=tuple(horde.only or horde.ignore or ()),
        is_deny_list=horde.ignore is not None,
        trusted_workers=horde.trusted_workers,
        validated_backends=horde.validated_backends,
        slow_workers=horde.slow_workers,
    )


def build_chat_request_traits(chat: ChatRequest) -> ChatRequestTraits:
    """What decides the guarantees and limits of a request, after OpenAI's defaults."""
    response_format = chat.response_format
    return ChatRequestTraits(
        offers_tools=bool(chat.tools),
        tool_choice_mode=_get_tool_choice_mode(chat.tool_choice),
        parallel_tool_calls=(
            DEFAULT_PARALLEL_TOOL_CALLS
            if chat.parallel_tool_calls is None
            else chat.parallel_tool_calls
        ),
        response_format_type=(
            None if response_format is None else ChatResponseFormatType(response_format["type"])
        ),
        strict_schema=find_strict_schema(response_format) is not None,
        temperature=chat.text_params.get(
            "temperature", float(CHAT_SAMPLING_DEFAULTS["temperature"])
        ),
    )


def _get_tool_choice_mode(tool_choice: ToolChoice | None) -> ChatToolChoiceMode:
    if tool_choice is None:
        return ChatToolChoiceMode.AUTO
    return (
        ChatToolChoiceMode(tool_choice)
        if isinstance(tool_choice, str)
        else ChatToolChoiceMode.FUNCTION
    )


def required_chat_features(chat: ChatRequest) -> list[str]:
    """Every feature and guarantee a worker has to declare, sorted: the only place that derives
    them.
    """
    traits = build_chat_request_traits(chat)
    needed: dict[ChatFeature, bool] = {
        ChatFeature.SEED: "seed" in chat.text_params,
        ChatFeature.REASONING_EFFORT: "reasoning_effort" in chat.text_params,
        ChatFeature.PRESENCE_PENALTY: chat.text_params.get("presence_penalty", 0) != 0,
        ChatFeature.FREQUENCY_PENALTY: chat.text_params.get("frequency_penalty", 0) != 0,
        ChatFeature.VISION: count_image_parts(chat.messages) > 0,
        ChatFeature.TOOLS: traits.forwards_tools or carries_tool_turn(chat.messages),
        ChatFeature.JSON_OBJECT: traits.response_format_type is ChatResponseFormatType.JSON_OBJECT,
        ChatFeature.JSON_SCHEMA: traits.response_format_type is ChatResponseFormatType.JSON_SCHEMA,
        ChatFeature.TOOLS_WITH_RESPONSE_FORMAT: (
            traits.forwards_tools and traits.response_format_type is not None
        ),
    }
    features = {feature.value for feature, is_needed in needed.items() if is_needed}
    return sorted(
        features
        | {
            guarantee.value
            for guarantee in required_chat_guarantees(traits, chat.horde.conformance)
        }
    )


def chat_tools_temperature(chat: ChatRequest) -> float | None:
    """The temperature the job carries when it forwards tools, which a worker's tool limit is
    compared with.
    """
    traits = build_chat_request_traits(chat)
    return traits.temperature if traits.forwards_tools else None
