# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a request asks of its worker, what it stores for that beside its messages, and the job that
the worker gets of it.

Source: docs/reference/chat_requests.md, "Chat declaration on pop", "Tools" and "Chat job pop
response".
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

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
from horde_sdk.worker.chat_declaration import ChatImageTransport

from horde.chat.flattening import count_image_parts
from horde.chat.messages import carries_tool_turn
from horde.chat.request import ChatRequest
from horde.chat.strict_schema import find_strict_schema
from horde.chat.wire import ChatExtras, JobPayload, Message, ToolChoice
from horde.chat_contract import ChatHordeOptions
from horde.json_text import JsonObject
from horde.shapes.text_params import TextParams

CHAT_STREAM_PROGRESS_KEY: Final = "stream_progress"


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


def build_chat_extras(chat: ChatRequest) -> ChatExtras:
    """The tool keys and the format that change the answer, as the client sent them."""
    extras: ChatExtras = {"tools": chat.tools} if chat.tools else {}
    if chat.tool_choice is not None:
        extras["tool_choice"] = chat.tool_choice
    if chat.parallel_tool_calls is not None:
        extras["parallel_tool_calls"] = chat.parallel_tool_calls
    if chat.response_format is not None:
        extras["response_format"] = chat.response_format
    return extras


def build_stored_chat_extras(chat: ChatRequest) -> ChatExtras | None:
    """What `chat_extras` holds: the extras and the stream hint; None when there is neither."""
    extras = build_chat_extras(chat)
    if chat.stream:
        extras[CHAT_STREAM_PROGRESS_KEY] = True
    return extras or None


def streams_progress(chat_extras: ChatExtras | None) -> bool:
    """Whether a stored request asks its worker for progress."""
    return bool(chat_extras and chat_extras.get(CHAT_STREAM_PROGRESS_KEY))


def build_worker_chat_extras(chat_extras: ChatExtras | None) -> ChatExtras:
    """The extras as a worker gets them: without the tools under `none`, only the one tool of a
    function choice.
    """
    extras: ChatExtras = {**chat_extras} if chat_extras else {}
    extras.pop("stream_progress", None)
    choice = extras.get("tool_choice")
    if choice == ChatToolChoiceMode.NONE.value:
        response_format = extras.get("response_format")
        return {} if response_format is None else {"response_format": response_format}
    if choice is not None and not isinstance(choice, str):
        name = choice["function"]["name"]
        extras["tools"] = [tool for tool in extras["tools"] if tool["function"]["name"] == name]
        extras["tool_choice"] = ChatToolChoiceMode.REQUIRED.value
    return extras


def build_text_job_payload(text_params: TextParams, prompt: str) -> JobPayload:
    """The payload of a text job: its parameters, the prompt, and one generation."""
    return cast(JobPayload, {**text_params, "prompt": prompt, "n": 1})


def build_chat_job_payload(
    *,
    messages: Sequence[Message],
    text_params: TextParams,
    chat_extras: ChatExtras | None,
    max_length: int,
    max_context_length: int,
    messages_url: str | None = None,
) -> JobPayload:
    """The payload of a chat job, with the messages or the URL of them.

    Every sampling key is present, so that a worker's own defaults never apply.
    """
    payload: JsonObject = (
        {"messages": list(messages)} if messages_url is None else {"messages_url": messages_url}
    )
    payload |= build_worker_chat_extras(chat_extras)
    sent: Mapping[str, object] = text_params
    payload |= {key: sent.get(key, default) for key, default in CHAT_SAMPLING_DEFAULTS.items()}
    payload |= {
        key: sent[key] for key in ("stop_sequence", "seed", "reasoning_effort") if key in sent
    }
    payload |= {"max_length": max_length, "max_context_length": max_context_length, "n": 1}
    if streams_progress(chat_extras):
        payload[CHAT_STREAM_PROGRESS_KEY] = True
    return cast(JobPayload, payload)


def select_chat_transport(
    image_transports: Collection[str], *, has_images: bool, is_offloaded: bool
) -> ChatImageTransport | None:
    """How a worker with this declaration gets the images or the whole messages of a request; None
    sends them inline.

    A request that is stored whole goes that way to whoever can fetch it, with or without images.
    """
    if is_offloaded and ChatImageTransport.MESSAGES_URL.value in image_transports:
        return ChatImageTransport.MESSAGES_URL
    if not has_images:
        return None
    return (
        ChatImageTransport.URL
        if ChatImageTransport.URL.value in image_transports
        else ChatImageTransport.BASE64
    )
