# SPDX-License-Identifier: AGPL-3.0-or-later
"""The body of a completion: what of it the horde is asked, what is ignored, and what is refused.

Four rules decide every key: null is absent; a key that changes the reply and cannot be honoured is
refused; a key at the value that asks for nothing is absent; a key that concerns only OpenAI's
platform is ignored. The first key at fault, in the order of the body, is the one reported. Source:
docs/reference/chat_front.md, "Request".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self, TypedDict, TypeGuard, cast

from horde_sdk.generation_parameters.text.chat_limits import (
    OPENAI_SAMPLING_RANGES,
)

from horde.chat.flattening import FlattenedChat
from horde.chat.messages import build_stored_messages, parse_messages
from horde.chat.strict_schema import check_strict_schemas
from horde.chat.tools import (
    check_tool_spec_size,
    parse_parallel_tool_calls,
    parse_response_format,
    parse_tool_choice,
    parse_tools,
)
from horde.chat.wire import Message, Tool
from horde.chat_contract import (
    ChatHordeOptions,
    ChatRequestRefused,
    parse_horde_options,
)
from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused, build_contract_refusal
from horde.oai.leniency import CACHE_HINT, ECHOED_MESSAGES, drop_keys
from horde.oai.readers import (
    ABSENT,
    IGNORED_TYPES,
    NEUTRAL_SAMPLERS,
    Reader,
    drop,
    read_absent_at,
    read_choice_count,
    read_horde,
    read_ignored,
    read_keys,
    read_logprobs,
    read_model,
    read_models,
    read_neutral_sampler,
    read_reasoning_effort,
    read_sampling,
    read_seed,
    read_stop,
    read_stream,
    read_stream_options,
    read_token_limit,
    read_top_logprobs,
    require_model,
    unsupported,
    unsupported_value,
    wrong_type,
)

_REPLACEMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "functions": "use 'tools'",
        "function_call": "use 'tool_choice'",
        "include_reasoning": "use 'horde.include_reasoning'",
        "reasoning": "use 'reasoning_effort', and 'horde.include_reasoning' to hide it",
    }
)
_TOKEN_LIMITS: Final = frozenset({"max_tokens", "max_completion_tokens"})
_ALLOWED_TOOLS_MODES: Final = ("auto", "required")


class _Forwarded(TypedDict, total=False):
    """What the front itself reads of the keys that are submitted."""

    model: str
    messages: list[Message]
    tools: list[Tool]
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionRequest:
    """A validated body.

    `native_body` holds what is submitted, without an operation key; `model` is None when the client
    sent a list. `token_limit_key` is the name under which the client sent `max_tokens`, or that
    name when it sent neither.
    """

    native_body: JsonObject
    model: str | None
    stream: bool
    include_usage: bool
    horde: ChatHordeOptions
    estimated_prompt_tokens: int
    token_limit_key: str

    @property
    def include_reasoning(self) -> bool:
        """Whether the client is shown what the model thought."""
        return self.horde.include_reasoning

    @property
    def is_length_open(self) -> bool:
        """Whether the client chose no length."""
        return not self.native_body.keys() & _TOKEN_LIMITS

    def locate(self, param: str) -> str:
        """The name under which the client sent a parameter."""
        return self.token_limit_key if param == "max_tokens" else param

    @classmethod
    def parse(cls, body: object) -> Self:
        """Validate a decoded body. Raises RequestRefused for the first key at fault."""
        try:
            native_body = read_keys(body, _READERS, _refuse_key)
            forwarded = cast(_Forwarded, native_body)
            assert isinstance(body, dict)
            _narrow_tools(forwarded, body.get("tool_choice"))
            _require_models_and_messages(body)
            horde = parse_horde_options(body.get("horde"))
        except ChatRequestRefused as refused:
            raise build_contract_refusal(refused) from None
        if horde.dry_run and forwarded.get("stream"):
            message = "A dry run has nothing to stream: send 'horde.dry_run' without 'stream'."
            raise RequestRefused("conflicting_parameters", message, "horde.dry_run")
        stored = build_stored_messages(forwarded["messages"])
        return cls(
            native_body=native_body,
            model=forwarded.get("model"),
            stream=bool(forwarded.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            horde=horde,
            estimated_prompt_tokens=FlattenedChat.read(
                stored, forwarded.get("tools")
            ).estimate_tokens(),
            token_limit_key="max_completion_tokens"
            if native_body.keys() & _TOKEN_LIMITS == {"max_completion_tokens"}
            else "max_tokens",
        )


def _narrow_tools(forwarded: _Forwarded, choice: object) -> None:
    """Offer no tools but those that the choice allows."""
    if _is_allowed_tools(choice):
        _, names = _parse_allowed_tools(choice, forwarded["tools"])
        forwarded["tools"] = [
            tool for tool in forwarded["tools"] if tool["function"]["name"] in names
        ]


def _require_models_and_messages(body: JsonObject) -> None:
    require_model(body)
    if body.get("messages") is None:
        raise RequestRefused(
            "missing_required_parameter", "Missing required parameter: 'messages'.", "messages"
        )


def _refuse_key(key: str, _value: object, _body: JsonObject) -> object:
    raise unsupported(key, _REPLACEMENTS.get(key))


# --- readers: the value to submit, or ABSENT
# -------------------------------------------------------------------------


def _read_messages(_key: str, value: object, _body: JsonObject) -> object:
    return parse_messages(value, ECHOED_MESSAGES)


def _read_tools(_key: str, value: object, body: JsonObject) -> object:
    tools = parse_tools(_drop_cache_hints(value))
    check_tool_spec_size(value, body.get("tool_choice"), body.get("response_format"))
    check_strict_schemas(tools, None)
    return tools or ABSENT


def _drop_cache_hints(tools: object) -> Any:
    """The tools without hints on themselves and their functions; schemas stay as they are."""
    if not isinstance(tools, list):
        return tools
    return [
        {
            key: drop_keys(member, CACHE_HINT) if key == "function" else member
            for key, member in tool.items()
            if key != CACHE_HINT
        }
        if isinstance(tool, dict)
        else tool
        for tool in tools
    ]


def _read_tool_choice(_key: str, value: object, body: JsonObject) -> object:
    tools = _guess_tools(body)
    if _is_allowed_tools(value):
        mode, _ = _parse_allowed_tools(value, tools)
        return parse_tool_choice(mode, tools)
    choice = parse_tool_choice(drop_keys(value, CACHE_HINT), tools)
    return ABSENT if choice is None else choice


def _is_allowed_tools(choice: object) -> TypeGuard[JsonObject]:
    return isinstance(choice, dict) and choice.get("type") == "allowed_tools"


def _parse_allowed_tools(choice: JsonObject, tools: list[Tool]) -> tuple[str, frozenset[str]]:
    """The mode and the names of a choice among some of the tools.

    The horde has no such choice: offering those tools alone, with the mode as the choice, asks for
    the same. Raises RequestRefused.
    """
    path = "tool_choice.allowed_tools"
    _refuse_members("tool_choice", choice, {"type", "allowed_tools"})
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise wrong_type(path, "an object of 'mode' and 'tools'")
    _refuse_members(path, allowed, {"mode", "tools"})
    mode, entries = allowed.get("mode"), allowed.get("tools")
    if mode not in _ALLOWED_TOOLS_MODES:
        message = (
            f"Invalid value: '{path}.mode' has to be one of {', '.join(_ALLOWED_TOOLS_MODES)}."
        )
        raise RequestRefused("invalid_value", message, f"{path}.mode")
    if not isinstance(entries, list) or not entries:
        raise wrong_type(f"{path}.tools", "a non-empty array of functions")
    names = [
        _parse_allowed_name(entry, f"{path}.tools[{index}]", tools)
        for index, entry in enumerate(entries)
    ]
    return str(mode), frozenset(names)


def _parse_allowed_name(entry: object, path: str, tools: list[Tool]) -> str:
    if not isinstance(entry, dict):
        raise wrong_type(path, 'an object such as {"type": "function", "function": {"name": …}}')
    try:
        parse_tool_choice(drop_keys(entry, CACHE_HINT), tools)
    except ChatRequestRefused as refused:
        raise _move_refusal(refused, path) from None
    return str(entry["function"]["name"])


def _move_refusal(refused: ChatRequestRefused, path: str) -> ChatRequestRefused:
    """A refusal of a tool choice as one of an entry that has the same form."""
    return ChatRequestRefused(
        path + refused.path.removeprefix("tool_choice"),
        refused.message,
        detail=refused.detail.replace("'tool_choice", f"'{path}"),
        kind=refused.kind,
    )


def _refuse_members(path: str, value: JsonObject, known: set[str]) -> None:
    for name in drop_keys(value, CACHE_HINT):
        if name not in known:
            raise unsupported(f"{path}.{name}")


def _read_parallel_tool_calls(_key: str, value: object, body: JsonObject) -> object:
    return parse_parallel_tool_calls(value, _guess_tools(body))


def _guess_tools(body: JsonObject) -> list[Tool]:
    """The tools as far as they can be read: what is wrong with them is reported at their own
    place.
    """
    tools = body.get("tools")
    if not isinstance(tools, list):
        return []
    named = [
        tool for tool in tools if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
    ]
    return [
        {"type": "function", "function": {"name": tool["function"].get("name")}} for tool in named
    ]


def _read_response_format(_key: str, value: object, body: JsonObject) -> object:
    response_format = parse_response_format(drop_keys(value, CACHE_HINT))
    check_tool_spec_size(body.get("tools"), body.get("tool_choice"), value)
    check_strict_schemas((), response_format)
    return ABSENT if response_format is None else response_format


def _refuse_modalities(key: str) -> RequestRefused:
    return unsupported_value(key, 'has to be ["text"]')


def _refuse_verbosity(key: str) -> RequestRefused:
    return unsupported_value(key, "has to be 'medium'")


def _refuse_replaced(key: str) -> RequestRefused:
    return unsupported(key, _REPLACEMENTS.get(key))


_READERS: Final[Mapping[str, Reader]] = MappingProxyType(
    {
        "model": read_model,
        "models": read_models,
        "messages": _read_messages,
        "max_tokens": read_token_limit,
        "max_completion_tokens": read_token_limit,
        **dict.fromkeys(OPENAI_SAMPLING_RANGES, read_sampling),
        "seed": read_seed,
        "stop": read_stop,
        "stream": read_stream,
        "stream_options": read_stream_options,
        "n": read_choice_count,
        "tools": _read_tools,
        "tool_choice": _read_tool_choice,
        "parallel_tool_calls": _read_parallel_tool_calls,
        "response_format": _read_response_format,
        "reasoning_effort": read_reasoning_effort,
        "horde": read_horde,
        **dict.fromkeys(IGNORED_TYPES, read_ignored),
        CACHE_HINT: drop,
        **dict.fromkeys(NEUTRAL_SAMPLERS, read_neutral_sampler),
        "logprobs": read_logprobs,
        "top_logprobs": read_top_logprobs,
        "logit_bias": read_absent_at({}, unsupported),
        "modalities": read_absent_at(["text"], _refuse_modalities),
        "verbosity": read_absent_at("medium", _refuse_verbosity),
        "functions": read_absent_at([], _refuse_replaced),
        "function_call": read_absent_at("none", _refuse_replaced),
    }
)
