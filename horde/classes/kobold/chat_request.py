# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a chat request is: from the client's body to the stored request, the worker's job and the
verified reply.

Pure: nothing here reads a database, a clock or a setting. The routes call these functions in the
contract's order. Source: docs/reference/chat_requests.md.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final
from uuid import UUID

from horde_sdk.generation_parameters.text.chat_limits import (
    CHAT_SAMPLING_DEFAULTS,
    DEFAULT_PARALLEL_TOOL_CALLS,
)
from horde_sdk.generation_parameters.text.chat_policy import (
    ChatConformance,
    ChatFeature,
    ChatRequestTraits,
    ChatResponseFormatType,
    ChatToolChoiceMode,
    required_chat_guarantees,
)
from horde_sdk.worker.chat_declaration import ChatFinishReason, ChatImageTransport

from horde.chat.context import (
    SizedContext,
    find_dropped_messages,
    lower_max_length,
    size_chat_context,
)
from horde.chat.declaration import ChatDeclaration, parse_chat_declaration_fields
from horde.chat.flattening import (
    FlattenedChat,
    count_image_parts,
    iter_message_texts,
)
from horde.chat.images import check_total_of_data_urls, list_image_parts, rewrite_image_urls
from horde.chat.messages import (
    build_stored_messages,
    carries_tool_turn,
    parse_messages,
    rewrite_message_texts,
)
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
from horde.chat.reply_rules import (
    check_call_ids,
    check_called_functions,
    check_tool_choice,
    keep_single_call,
)
from horde.chat.stored_objects import (
    ChatMessagesOffload,
    build_chat_image_key,
    build_chat_image_reference,
    build_offload,
)
from horde.chat.strict_schema import check_strict_schemas, find_strict_schema
from horde.chat.submission import (
    ChatSubmission,
    check_submitted_model,
    check_text_job_submission,
    is_chat_submission,
    parse_chat_submission,
)
from horde.chat.tools import (
    check_tool_spec_size,
    parse_parallel_tool_calls,
    parse_response_format,
    parse_tool_choice,
    parse_tools,
)
from horde.chat.wire import (
    ChatExtras,
    Message,
    Reply,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)
from horde.chat_contract import (
    MAX_CHAT_IMAGE_TOTAL_BYTES,
    WORKER_FAULT_MESSAGES,
    ChatHordeOptions,
    JsonObject,
    malformed_value,
    parse_horde_options,
    request_conflict,
)
from horde.classes.kobold.reply_format import check_response_format
from horde.exceptions import PayloadInvalid
from horde.json_body import replace_unstorable
from horde.shapes.jobs import SubmissionState
from horde.shapes.text_params import (
    CHAT_PENALTY_RANGES,
    DEFAULT_MAX_CONTEXT_LENGTH,
    TEXT_PARAM_RANGES,
    find_range_error,
)

__all__ = [
    "CHAT_STREAM_PROGRESS_KEY",
    "CHAT_WORKER_FAULT_MESSAGES",
    "DEFAULT_CHAT_MAX_LENGTH",
    "MAX_CHAT_FAULT_REASON_LENGTH",
    "OPERATION_FINGERPRINT_EXCLUDED_HORDE_KEYS",
    "ChatDeclaration",
    "ChatMessagesOffload",
    "ChatRequest",
    "ChatSubmission",
    "ChatWorkerTargeting",
    "SizedContext",
    "SubmissionState",
    "VerifiedChatReply",
    "build_chat_extras",
    "build_chat_job_payload",
    "build_chat_messages_offload",
    "build_chat_request_traits",
    "build_operation_fingerprint",
    "build_stored_chat_extras",
    "build_stored_reply",
    "build_text_params",
    "build_worker_chat_extras",
    "build_worker_targeting",
    "chat_reply_characters",
    "chat_reply_finish_reason",
    "chat_tools_temperature",
    "check_submitted_model",
    "check_text_job_submission",
    "estimate_chat_prompt_tokens",
    "flatten_messages",
    "is_chat_submission",
    "list_reply_texts",
    "lower_max_length",
    "parse_chat_declaration_fields",
    "parse_chat_request",
    "parse_chat_submission",
    "replace_image_urls",
    "required_chat_features",
    "rewrite_message_texts",
    "select_chat_transport",
    "size_chat_context",
    "streams_progress",
    "truncate_oldest_messages",
    "verify_chat_reply",
]

# OpenAI clients usually send no limit, and text's 80 is too short for a reply.
DEFAULT_CHAT_MAX_LENGTH: Final = 512
CHAT_STREAM_PROGRESS_KEY: Final = "stream_progress"
OPERATION_FINGERPRINT_EXCLUDED_HORDE_KEYS: Final = frozenset(
    {"availability_mode", "dry_run", "include_reasoning", "max_kudos", "operation_key"}
)
MAX_CHAT_FAULT_REASON_LENGTH: Final = 1000

CHAT_WORKER_FAULT_MESSAGES: Final = WORKER_FAULT_MESSAGES

_SAMPLING_RANGES: Final = {
    **{
        key: TEXT_PARAM_RANGES[key]
        for key in ("max_length", "max_context_length", "temperature", "top_p")
    },
    **CHAT_PENALTY_RANGES,
}
_IMAGE_MARK: Final = "\x00"  # no string of a body has a NUL, so nothing that was sent looks like it
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
    text_params: JsonObject
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
        return int(self.text_params["max_length"])

    @property
    def requested_context_length(self) -> int:
        """Tokens of context the client asked for, or the default."""
        return int(self.text_params.get("max_context_length", DEFAULT_MAX_CONTEXT_LENGTH))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedChatReply:
    """A reply that may be stored, and how many calls the single-call rule took out of it."""

    message: Reply
    dropped_tool_call_count: int = 0


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
    check_total_of_data_urls(list_image_parts(messages), MAX_CHAT_IMAGE_TOTAL_BYTES)
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


def build_text_params(body: Mapping[str, object], horde: ChatHordeOptions) -> JsonObject:
    """The text parameters a chat body maps to, under their native names and in their ranges.

    Only what the client sent, and always `max_length`. Raises PayloadInvalid for a number outside
    its range.
    """
    token_limit = parse_token_limit(body)
    sent: JsonObject = {
        "max_length": DEFAULT_CHAT_MAX_LENGTH if token_limit is None else token_limit,
        "max_context_length": horde.max_context_length,
        "temperature": parse_decimal(body, "temperature"),
        "top_p": parse_decimal(body, "top_p"),
        "frequency_penalty": parse_decimal(body, "frequency_penalty"),
        "presence_penalty": parse_decimal(body, "presence_penalty"),
        "stop_sequence": _read(body, "stop", parse_stop) or None,
        "seed": _read(body, "seed", parse_seed),
        "reasoning_effort": _read(body, "reasoning_effort", parse_reasoning_effort),
    }
    params = {key: value for key, value in sent.items() if value is not None}
    errors = {
        f"params.{key}": error
        for key, number_range in _SAMPLING_RANGES.items()
        if key in params and (error := find_range_error(params[key], number_range)) is not None
    }
    if errors:
        raise PayloadInvalid(errors)
    return params


def build_worker_targeting(horde: ChatHordeOptions) -> ChatWorkerTargeting:
    """The restrictions of the `horde` object in the terms of a text request's worker list."""
    return ChatWorkerTargeting(
        worker_ids=tuple(horde.only or horde.ignore or ()),
        is_deny_list=horde.ignore is not None,
        trusted_workers=horde.trusted_workers,
        validated_backends=horde.validated_backends,
        slow_workers=horde.slow_workers,
    )


# --- prompt and context
# ---------------------------------------------------------------------------------------------


def flatten_messages(messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
    """The prompt column of a chat request; workers never receive it."""
    return FlattenedChat.read(messages, tools).join()


def estimate_chat_prompt_tokens(
    messages: Sequence[Message], tools: Sequence[Tool] | None = None
) -> int:
    """The tokens of the flattened prompt and 512 for each image; an estimate, since no tokenizer is
    known here.
    """
    return FlattenedChat.read(messages, tools).estimate_tokens()


def truncate_oldest_messages(
    messages: Sequence[Message], tools: Sequence[Tool] | None = None, *, token_budget: int
) -> list[Message]:
    """The messages that stay when whole turns go, oldest first, until the estimate is within the
    budget.

    System messages, the latest user message and everything after it always stay, so the result may
    still be too long.
    """
    dropped = find_dropped_messages(
        messages, FlattenedChat.read(messages, tools), token_budget=token_budget
    )
    return [message for index, message in enumerate(messages) if index not in dropped]


def replace_image_urls(messages: Sequence[Message], request_id: UUID) -> list[Message]:
    """Copies of the messages as they are stored: each image by the key it is stored under, counted
    from 0.

    No submitted URL is left in them.
    """
    counter = count()

    def refer(_url: str) -> str:
        return build_chat_image_reference(build_chat_image_key(request_id, next(counter)))

    return rewrite_image_urls(messages, refer)


# --- requirements
# --------------------------------------------------------------------------------------------------


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
        temperature=float(
            chat.text_params.get("temperature", CHAT_SAMPLING_DEFAULTS["temperature"])
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


# --- stored extras, job payload, fingerprint
# ------------------------------------------------------------------------


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


def build_chat_job_payload(
    *,
    messages: Sequence[Message],
    text_params: Mapping[str, Any],
    chat_extras: ChatExtras | None,
    max_length: int,
    max_context_length: int,
    messages_url: str | None = None,
) -> JsonObject:
    """The payload of a chat job, with the messages or the URL of them.

    Every sampling key is present, so that a worker's own defaults never apply.
    """
    payload: JsonObject = (
        {"messages": list(messages)} if messages_url is None else {"messages_url": messages_url}
    )
    payload |= build_worker_chat_extras(chat_extras)
    payload |= {
        key: text_params.get(key, default) for key, default in CHAT_SAMPLING_DEFAULTS.items()
    }
    payload |= {
        key: text_params[key]
        for key in ("stop_sequence", "seed", "reasoning_effort")
        if key in text_params
    }
    payload |= {"max_length": max_length, "max_context_length": max_context_length, "n": 1}
    if streams_progress(chat_extras):
        payload[CHAT_STREAM_PROGRESS_KEY] = True
    return payload


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


def build_chat_messages_offload(
    request_id: UUID,
    messages: Sequence[Message],
    jpegs: Mapping[str, bytes],
    *,
    largest_inline_bytes: int,
    packs: bool,
) -> ChatMessagesOffload | None:
    """The messages as one object, when they are above the threshold as a base64 worker receives
    them; else None.

    `messages` are as stored, with references; `jpegs` are the stored images by key. Sizes are bytes
    of compact JSON.
    """
    return build_offload(
        request_id, messages, jpegs, largest_inline_bytes=largest_inline_bytes, packs=packs
    )


def build_operation_fingerprint(chat: ChatRequest) -> str:
    """SHA-256, in hex, of what makes two submissions of one key the same operation.

    Sampling values and tool keys at their defaults count as left out, as the `horde` options do.
    Streaming is no part.
    """
    image_urls = [image.image_url["url"] for image in list_image_parts(chat.messages)]
    identity: JsonObject = {
        "messages": rewrite_image_urls(chat.messages, lambda _url: _IMAGE_MARK),
        "params": {
            key: value
            for key, value in chat.text_params.items()
            if CHAT_SAMPLING_DEFAULTS.get(key) != value
        },
        "models": sorted(chat.models),
        "horde": chat.horde.model_dump(
            mode="json", exclude=set(OPERATION_FINGERPRINT_EXCLUDED_HORDE_KEYS)
        ),
    }
    extras = build_chat_extras(chat)
    if extras.get("tool_choice") == ChatToolChoiceMode.AUTO.value:
        del extras["tool_choice"]
    if extras.get("parallel_tool_calls") is DEFAULT_PARALLEL_TOOL_CALLS:
        del extras["parallel_tool_calls"]
    if extras:
        identity["chat_extras"] = extras
    pieces = _write_canonical(identity).split(_write_canonical(_IMAGE_MARK))
    digest = hashlib.sha256(pieces[0].encode("utf-8", "surrogatepass"))
    for url, piece in zip(image_urls, pieces[1:], strict=True):
        digest.update(_write_canonical(url).encode("utf-8", "surrogatepass"))
        digest.update(piece.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _write_canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


# --- reply
# --------------------------------------------------------------------------------------------------


def verify_chat_reply(
    message: Reply,
    chat_extras: ChatExtras | None,
    conformance: ChatConformance,
    state: SubmissionState = SubmissionState.OK,
) -> VerifiedChatReply:
    """Check a reply against what the client asked for, whatever its worker declared.

    A censored reply is held to the rules of every reply alone: a withheld text cannot match a
    schema. Runs a helper process for a strict schema, so no transaction may be open. Raises
    BadRequest with ChatSubmitInvalid, or with ChatSubmitNonconformant under strict.
    """
    extras = chat_extras or {}
    is_strict = conformance is ChatConformance.STRICT and state is SubmissionState.OK
    kept, dropped_count = keep_single_call(message, extras) if is_strict else (message, 0)
    check_called_functions(kept, extras)
    check_call_ids(kept)
    if is_strict:
        check_tool_choice(kept, extras)
        check_response_format(kept, extras)
    return VerifiedChatReply(message=kept, dropped_tool_call_count=dropped_count)


def chat_reply_finish_reason(
    finish_reason: str, message: Reply, chat_extras: ChatExtras | None
) -> str:
    """The finish reason as stored: calls under a forced function finish with `stop`, as OpenAI's
    do.
    """
    is_forced = isinstance((chat_extras or {}).get("tool_choice"), dict)
    if is_forced and message.get("tool_calls") and finish_reason == ChatFinishReason.TOOL_CALLS:
        return str(ChatFinishReason.STOP)
    return finish_reason


def list_reply_texts(message: Reply) -> list[str]:
    """What the model wrote of a reply: content, reasoning, and each call's function name and
    arguments.
    """
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    called = [function[key] for function in functions for key in ("name", "arguments")]
    return [message.get("content") or "", message.get("reasoning_content") or "", *called]


def chat_reply_characters(message: Reply) -> int:
    """The characters a reply is priced by."""
    return sum(map(len, list_reply_texts(message)))


def build_stored_reply(message: Reply) -> Reply:
    """The reply as stored and shown: no character that Postgres refuses, calls and reasoning only
    when submitted.
    """
    stored: Reply = {"role": "assistant", "content": _replace_in(message.get("content"))}
    if message.get("tool_calls"):
        stored["tool_calls"] = [_build_stored_call(call) for call in message["tool_calls"]]
    if message.get("reasoning_content") is not None:
        stored["reasoning_content"] = replace_unstorable(message["reasoning_content"])
    return stored


def _replace_in(text: str | None) -> str | None:
    return None if text is None else replace_unstorable(text)


def _build_stored_call(call: ToolCall) -> ToolCall:
    function = call["function"]
    return {
        "id": replace_unstorable(call["id"]),
        "type": "function",
        "function": {
            "name": replace_unstorable(function["name"]),
            "arguments": replace_unstorable(function["arguments"]),
        },
    }
