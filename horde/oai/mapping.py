# SPDX-License-Identifier: AGPL-3.0-or-later
"""From what the native API says to OpenAI's objects: completions, their usage, and model cards.
Pure.

Source: docs/reference/chat_front.md, "Completion" and "Models".
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, NotRequired, TypedDict, cast

from horde_sdk.generation_parameters.text.chat_policy import ChatFeature, ChatGuarantee
from horde_sdk.worker.chat_declaration import ChatFinishReason

from horde.chat.wire import Reply, ToolCall
from horde.chat_contract import ChatContextAdjustmentReason
from horde.json_text import JsonObject
from horde.oai.native import NativeModel, NativeOffer

COMPLETION_ID_PREFIX: Final = "chatcmpl-"
MODEL_OWNER: Final = "aihorde"
CHARACTERS_PER_COMPLETION_TOKEN: Final = 4
_FINGERPRINT_DIGITS: Final = 10


class Usage(TypedDict):
    """Tokens of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: NotRequired[dict[str, int]]


class TopProvider(TypedDict):
    """The largest lengths that a worker of a model offers; tokens."""

    context_length: int | None
    max_completion_tokens: int | None


class ModelCard(TypedDict):
    """OpenAI's model object with OpenRouter's extensions."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int | None
    architecture: JsonObject
    top_provider: TopProvider
    supported_parameters: list[str]
    x_horde: JsonObject


class ListedModels(TypedDict):
    """The answer of `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHead:
    """What is fixed before the reply; the body itself is dropped once it is submitted.

    `model` is None when the client sent a list. `created` is in whole Unix seconds.
    """

    request_id: str
    created: int
    model: str | None
    estimated_prompt_tokens: int
    include_reasoning: bool
    include_usage: bool

    @property
    def completion_id(self) -> str:
        """The `id` of the completion and of each of its chunks."""
        return COMPLETION_ID_PREFIX + self.request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedReply:
    """A stored reply and its request, as OpenAI's fields need them; a count of None was not
    reported.
    """

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    native_finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    reasoning_tokens: int | None
    model: str
    worker_id: str
    worker_name: str
    charge_basis: str | None
    queue_wait_seconds: float | None
    kudos: float
    context_adjustments: tuple[JsonObject, ...] | None

    @property
    def is_lowered(self) -> bool:
        """Whether `max_tokens` was lowered to what workers declare."""
        reason = ChatContextAdjustmentReason.WORKER_MAX_LENGTH
        return any(entry.get("reason") == reason for entry in self.context_adjustments or ())


def parse_completed_reply(status: Mapping[str, object]) -> CompletedReply | None:
    """The first reply of a native status; None while it has none."""
    generations = status.get("generations")
    if not isinstance(generations, list) or not generations or not isinstance(generations[0], dict):
        return None
    generation = generations[0]
    message = cast(Reply, _get_mapping(generation, "message"))  # checked by the API
    content, tool_calls = message.get("content"), tuple(message.get("tool_calls") or ())
    reasoning = message.get("reasoning_content") or None
    if generation.get("state") == "csam":
        content, tool_calls, reasoning = "", (), None
    if content is None and not tool_calls:
        content = generation.get("text") or ""
    adjustments = cast(Sequence[JsonObject] | None, status.get("context_adjustments"))
    return CompletedReply(
        content=content,
        reasoning=reasoning,
        tool_calls=tool_calls,
        finish_reason=_get_finish_reason(generation, has_calls=bool(tool_calls)),
        native_finish_reason=generation.get("native_finish_reason"),
        prompt_tokens=generation.get("prompt_tokens"),
        completion_tokens=generation.get("completion_tokens"),
        reasoning_tokens=generation.get("reasoning_tokens"),
        model=str(generation.get("model")),
        worker_id=str(generation.get("worker_id")),
        worker_name=str(generation.get("worker_name")),
        charge_basis=generation.get("charge_basis"),
        queue_wait_seconds=generation.get("queue_wait_seconds"),
        kudos=get_kudos(status),
        context_adjustments=tuple(adjustments) if adjustments else None,
    )


def get_quoted_model(quote: Mapping[str, object]) -> str:
    """The first model of a native quote, for a client that sent a list."""
    models = _get_mapping(quote, "resolved").get("models")
    return str(models[0]) if isinstance(models, list) and models else ""


def get_kudos(answer: Mapping[str, object]) -> float:
    """What a status or a quote says it costs."""
    kudos = answer.get("kudos")
    return kudos if isinstance(kudos, int | float) else 0


def get_quoted_tokens(quote: Mapping[str, object]) -> int:
    """The estimate of the prompt in a native quote."""
    tokens = _get_mapping(quote, "resolved").get("estimated_prompt_tokens")
    return tokens if isinstance(tokens, int) else 0


def _get_mapping(body: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = body.get(key)
    return value if isinstance(value, Mapping) else {}


def _get_finish_reason(generation: Mapping[str, object], *, has_calls: bool) -> str:
    if generation.get("state") in {"censored", "csam"}:
        return str(ChatFinishReason.CONTENT_FILTER)
    stored = generation.get("finish_reason")
    if isinstance(stored, str) and stored:
        return stored
    return str(ChatFinishReason.TOOL_CALLS if has_calls else ChatFinishReason.STOP)


def build_completion(head: CompletionHead, reply: CompletedReply) -> JsonObject:
    """The answer to a call that does not stream."""
    choice = {
        "index": 0,
        "message": build_message(head, reply),
        "finish_reason": reply.finish_reason,
        "native_finish_reason": reply.native_finish_reason,
        "logprobs": None,
    }
    return {
        "id": head.completion_id,
        "object": "chat.completion",
        "created": head.created,
        "model": reply.model,
        "choices": [choice],
        "usage": build_usage(head, reply),
        "system_fingerprint": build_system_fingerprint(reply.worker_id, reply.model),
        "x_horde": build_x_horde(head, reply),
    }


def build_message(head: CompletionHead, reply: CompletedReply) -> JsonObject:
    """The assistant's message; keys that say nothing are left out."""
    message: JsonObject = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None and head.include_reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = list(reply.tool_calls)
    return message


def build_usage(head: CompletionHead, reply: CompletedReply) -> Usage:
    """Tokens: the worker's counts, and an estimate for each that it did not report."""
    prompt_tokens = (
        _estimate_prompt_tokens(head, reply) if reply.prompt_tokens is None else reply.prompt_tokens
    )
    completion_tokens = reply.completion_tokens
    if completion_tokens is None:
        completion_tokens = -(-_count_reply_characters(reply) // CHARACTERS_PER_COMPLETION_TOKEN)
    usage: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if reply.reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reply.reasoning_tokens}
    return usage


def is_usage_estimated(reply: CompletedReply) -> bool:
    """Whether either count is not the worker's own."""
    return reply.prompt_tokens is None or reply.completion_tokens is None


def _estimate_prompt_tokens(head: CompletionHead, reply: CompletedReply) -> int:
    """The estimate of what was sent, or of what was left of it when old turns were dropped."""
    reason = ChatContextAdjustmentReason.TRUNCATE_OLDEST
    kept = [
        entry.get("to")
        for entry in reply.context_adjustments or ()
        if entry.get("reason") == reason
    ]
    return kept[-1] if kept and isinstance(kept[-1], int) else head.estimated_prompt_tokens


def _count_reply_characters(reply: CompletedReply) -> int:
    functions = [call["function"] for call in reply.tool_calls]
    called = sum(len(function["name"]) + len(function["arguments"]) for function in functions)
    return len(reply.content or "") + len(reply.reasoning or "") + called


def build_x_horde(_facts: CompletionHead, reply: CompletedReply) -> JsonObject:
    """Who served and what it cost; `context_adjustments` only when something was adjusted."""
    x_horde: JsonObject = {
        "request_id": _facts.request_id,
        "worker_id": reply.worker_id,
        "worker_name": reply.worker_name,
        "kudos": reply.kudos,
        "charge_basis": reply.charge_basis,
        "estimated_usage": is_usage_estimated(reply),
        "queue_wait_seconds": reply.queue_wait_seconds,
    }
    if reply.context_adjustments is not None:
        x_horde["context_adjustments"] = list(reply.context_adjustments)
    return x_horde


@lru_cache(maxsize=4096)  # a chunk has one
def build_system_fingerprint(worker_id: str, model: str) -> str:
    """Changes exactly when the worker or the model that wrote the text does."""
    digest = hashlib.sha256(
        f"{worker_id.lower()}:{model}".encode("utf-8", "surrogatepass")
    ).hexdigest()
    return f"fp_{digest[:_FINGERPRINT_DIGITS]}"


def build_dry_run_completion(
    quote: Mapping[str, object], *, completion_id: str, created: int, model: str
) -> JsonObject:
    """The answer to `horde.dry_run`: a completion without choices, so that nobody takes a quote for
    text.
    """
    prompt_tokens = get_quoted_tokens(quote)
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 0,
            "total_tokens": prompt_tokens,
        },
        "system_fingerprint": None,
        "x_horde": build_quote_x_horde(quote),
    }


def build_quote_x_horde(quote: Mapping[str, object]) -> JsonObject:
    """What a native quote says, in the place of who served; `resolved` is the request as queued."""
    resolved = _get_mapping(quote, "resolved")
    return {
        "request_id": None,
        "worker_id": None,
        "worker_name": None,
        "kudos": quote.get("kudos"),
        "charge_basis": None,
        "estimated_usage": True,
        "queue_wait_seconds": None,
        "dry_run": True,
        "resolved": {key: value for key, value in resolved.items() if key != "prompt"},
    }


# --- models
# --------------------------------------------------------------------------------------------------

_ALWAYS: Final = frozenset[str]()
_SUPPORTED_PARAMETERS: Final[tuple[tuple[tuple[str, ...], frozenset[str]], ...]] = (
    (("max_tokens", "temperature", "top_p", "stop"), _ALWAYS),
    (("seed",), frozenset({ChatFeature.SEED})),
    (("reasoning_effort",), frozenset({ChatFeature.REASONING_EFFORT})),
    (("presence_penalty",), frozenset({ChatFeature.PRESENCE_PENALTY})),
    (("frequency_penalty",), frozenset({ChatFeature.FREQUENCY_PENALTY})),
    (
        ("tools", "parallel_tool_calls"),
        # Either guarantee presupposes tools.
        frozenset(
            {
                ChatFeature.TOOLS,
                ChatGuarantee.TOOL_CHOICE_ENFORCED,
                ChatGuarantee.SINGLE_TOOL_CALL_ENFORCED,
            }
        ),
    ),
    (("tool_choice",), frozenset({ChatGuarantee.TOOL_CHOICE_ENFORCED})),
    (("response_format",), _ALWAYS),  # plain text is one, and every worker serves it
    (
        ("structured_outputs",),
        frozenset({ChatFeature.JSON_SCHEMA, ChatGuarantee.STRUCTURED_OUTPUT_ENFORCED}),
    ),
)
"""Entries in their order, with the features of which any one is enough; an empty set is always
there.
"""

_INPUTS: Final[Mapping[bool, tuple[str, tuple[str, ...]]]] = MappingProxyType(
    {True: ("text+image->text", ("text", "image")), False: ("text->text", ("text",))}
)


def build_model_card(entry: NativeModel) -> ModelCard:
    """OpenAI's model object with OpenRouter's extensions, from one entry of the native list.

    It joins what different workers declare: each limit and parameter is offered by one of them at
    least.
    """
    chat = entry.get("chat") or NativeOffer()
    features = frozenset(chat.get("features") or ())
    modality, inputs = _INPUTS[ChatFeature.VISION in features]
    return {
        "id": entry["name"],
        "object": "model",
        "created": chat.get("created") or 0,
        "owned_by": MODEL_OWNER,
        "context_length": chat.get("max_context_length"),
        "architecture": {
            "modality": modality,
            "input_modalities": list(inputs),
            "output_modalities": ["text"],
        },
        "top_provider": {
            "context_length": chat.get("max_context_length"),
            "max_completion_tokens": chat.get("max_length"),
        },
        "supported_parameters": list_supported_parameters(features),
        "x_horde": {"workers": chat.get("workers"), "queued": entry.get("queued")},
    }


def list_supported_parameters(features: frozenset[str]) -> list[str]:
    """The request keys that at least one worker with these features and guarantees honours."""
    return [
        name
        for names, any_of in _SUPPORTED_PARAMETERS
        if not any_of or any_of & features
        for name in names
    ]


def build_model_list(cards: Iterable[ModelCard]) -> ListedModels:
    """The answer of `GET /v1/models`, sorted by id."""
    return {"object": "list", "data": sorted(cards, key=lambda card: str(card["id"]))}
