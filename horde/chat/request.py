# SPDX-License-Identifier: AGPL-3.0-or-later
"""A chat request: from the client's body to what is queued.

The checks stand in the contract's order. Source: docs/reference/chat_requests.md, "Request body".
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast
from uuid import UUID

from horde_sdk.generation_parameters.text.chat_policy import ChatResponseFormatType

from horde.chat.flattening import FlattenedChat, iter_message_texts
from horde.chat.images import list_image_parts, measure_data_urls
from horde.chat.messages import build_stored_messages, parse_messages
from horde.chat.parameters import (
    check_choice_count,
    check_known_keys,
    check_unapplied_keys,
    parse_decimal,
    parse_models,
    parse_reasoning_effort,
    parse_seed,
    parse_stop,
    parse_stream,
    parse_token_limit,
)
from horde.chat.strict_schema import check_strict_schemas
from horde.chat.tools import (
    check_tool_spec_size,
    parse_parallel_tool_calls,
    parse_response_format,
    parse_tool_choice,
    parse_tools,
)
from horde.chat.wire import Message, ResponseFormat, Tool, ToolChoice
from horde.chat_contract import (
    MAX_CHAT_IMAGE_TOTAL_BYTES,
    ChatHordeOptions,
    malformed_value,
    parse_horde_options,
    request_conflict,
)
from horde.exceptions import PayloadInvalid
from horde.shapes.text_params import (
    CHAT_PENALTY_RANGES,
    DEFAULT_MAX_CONTEXT_LENGTH,
    TEXT_PARAM_RANGES,
    TextParams,
    find_range_error,
)

# OpenAI clients usually send no limit, and text's 80 is too short for a reply.
DEFAULT_CHAT_MAX_LENGTH: Final = 512
_SAMPLING_RANGES: Final = {
    **{
        key: TEXT_PARAM_RANGES[key]
        for key in ("max_length", "max_context_length", "temperature", "top_p")
    },
    **CHAT_PENALTY_RANGES,
}
_JSON_WORD: Final = re.compile("json", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A validated chat request, before anything is known about its user or the workers.

    `messages` as stored; `text_params` holds the mapped names the client sent and always
    `max_length`; the tool keys and the format as the client sent them.
    """

    models: tuple[str, ...]
    messages: list[Message]
    flattened: FlattenedChat  # of the messages and the tools
    text_params: TextParams
    horde: ChatHordeOptions
    tools: list[Tool]
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    response_format: ResponseFormat | None
    stream: bool
    lists_models: bool = False  # sent as `models`, so that a refusal names the entry

    @property
    def operation_key(self) -> UUID | None:
        """The key that identifies the submission for its user."""
        return self.horde.operation_key

    @property
    def requested_max_length(self) -> int:
        """Tokens of output the client asked for, or the default."""
        return self.text_params["max_length"]

    @property
    def requested_context_length(self) -> int:
        """Tokens of context the client asked for, or the default."""
        return self.text_params.get("max_context_length", DEFAULT_MAX_CONTEXT_LENGTH)


def parse_chat_request(body: object) -> ChatRequest:
    """Validate a decoded body and map it.

    Raises:
        ChatRequestRefused: UnsupportedChatParameter, ChatRequestConflict or BadRequest, with the
        path in its message. PayloadInvalid: numbers outside their ranges, by `params.<name>`.
    """
    if not isinstance(body, dict):
        raise malformed_value("body", "has to be a JSON object")
    check_known_keys(body)
    check_unapplied_keys(body)
    _read(body, "n", check_choice_count)
    horde = parse_horde_options(body.get("horde"))
    tools = parse_tools(body.get("tools"))
    models = parse_models(body)
    messages = build_stored_messages(parse_messages(body.get("messages")))
    measure_data_urls(list_image_parts(messages), MAX_CHAT_IMAGE_TOTAL_BYTES)
    text_params = build_text_params(body, horde)
    tool_choice = parse_tool_choice(body.get("tool_choice"), tools)
    parallel_tool_calls = parse_parallel_tool_calls(body.get("parallel_tool_calls"), tools)
    response_format = parse_response_format(body.get("response_format"))
    stream = _read(body, "stream", parse_stream) or False
    check_tool_spec_size(body.get("tools"), body.get("tool_choice"), body.get("response_format"))
    check_strict_schemas(tools, response_format)
    chat = ChatRequest(
        models=models,
        messages=messages,
        flattened=FlattenedChat.read(messages, tools),
        text_params=text_params,
        horde=horde,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
        response_format=response_format,
        stream=stream,
        lists_models=body.get("models") is not None,
    )
    _check_openai_guards(chat)
    return chat


def _read[T](body: Mapping[str, object], key: str, parse: Callable[[object], T]) -> T | None:
    """A key's value; null is absent."""
    value = body.get(key)
    return None if value is None else parse(value)


def _check_openai_guards(chat: ChatRequest) -> None:
    response_format = chat.response_format
    asks_for_object = (
        response_format is not None
        and response_format["type"] == ChatResponseFormatType.JSON_OBJECT
    )
    if not chat.horde.openai_guards or not asks_for_object:
        return
    if not any(
        _JSON_WORD.search(text) for message in chat.messages for text in iter_message_texts(message)
    ):
        message = (
            "'messages' must contain the word 'json' in some form, to use 'response_format' of type"
            " 'json_object'."
        )
        raise request_conflict("messages", message)


def build_text_params(body: Mapping[str, object], horde: ChatHordeOptions) -> TextParams:
    """The text parameters a chat body maps to, under their native names and in their ranges.

    Only what the client sent, and always `max_length`. Raises PayloadInvalid for a number outside
    its range.
    """
    token_limit = parse_token_limit(body)
    numbers = {
        "max_length": DEFAULT_CHAT_MAX_LENGTH if token_limit is None else token_limit,
        "max_context_length": horde.max_context_length,
        "temperature": parse_decimal(body, "temperature"),
        "top_p": parse_decimal(body, "top_p"),
        "frequency_penalty": parse_decimal(body, "frequency_penalty"),
        "presence_penalty": parse_decimal(body, "presence_penalty"),
    }
    sent = {
        **numbers,
        "stop_sequence": _read(body, "stop", parse_stop) or None,
        "seed": _read(body, "seed", parse_seed),
        "reasoning_effort": _read(body, "reasoning_effort", parse_reasoning_effort),
    }

    errors = {
        f"params.{key}": error
        for key, number_range in _SAMPLING_RANGES.items()
        if (number := numbers.get(key)) is not None
        and (error := find_range_error(number, number_range)) is not None
    }
    if errors:
        raise PayloadInvalid(errors)
    return cast(TextParams, {key: value for key, value in sent.items() if value is not None})
