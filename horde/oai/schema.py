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
from typing import Any, Final, Self

from horde_sdk.generation_parameters.text.chat_limits import (
    OPENAI_SAMPLING_RANGES,
    SUPPORTED_CHAT_CHOICE_COUNT,
)
from horde_sdk.generation_parameters.text.chat_policy import ChatReasoningEffort

from horde.chat.flattening import FlattenedChat
from horde.chat.strict_schema import check_strict_schemas
from horde.chat.tools import (
    check_tool_spec_size,
    parse_parallel_tool_calls,
    parse_response_format,
    parse_tool_choice,
    parse_tools,
)
from horde.chat.wire import Tool
from horde.chat_contract import (
    ChatHordeOptions,
    ChatRequestRefused,
    JsonObject,
    parse_horde_options,
)
from horde.oai._messages import CACHE_HINT, drop_keys, parse_messages
from horde.oai.errors import RequestRefused, build_contract_refusal
from horde.oai.readers import (
    ABSENT,
    IGNORED_TYPES,
    Reader,
    drop,
    is_integer,
    is_number,
    read_absent_at,
    read_ignored,
    read_keys,
    read_model,
    read_models,
    read_sampling,
    read_seed,
    read_stop,
    read_stream,
    read_stream_options,
    read_token_limit,
    require_model,
    unsupported,
    unsupported_value,
    wrong_type,
)

# Every chat job carries its own neutral samplers, so any other value could not be honoured.
NEUTRAL_SAMPLERS: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        "top_k": (0, -1),
        **dict.fromkeys(("min_p", "top_a"), (0,)),
        **dict.fromkeys(("repetition_penalty", "rep_pen", "repeat_penalty"), (1,)),
        **dict.fromkeys(("typical_p", "typical", "tfs", "tfs_z"), (1,)),
    }
)
_REPLACEMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "functions": "use 'tools'",
        "function_call": "use 'tool_choice'",
        "include_reasoning": "use 'horde.include_reasoning'",
        "reasoning": "use 'reasoning_effort', and 'horde.include_reasoning' to hide it",
    }
)
_REASONING_EFFORTS: Final = tuple(effort.value for effort in ChatReasoningEffort)
_TOKEN_LIMITS: Final = frozenset({"max_tokens", "max_completion_tokens"})
_ALLOWED_TOOLS_MODES: Final = ("auto", "required")


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

    def locate(self, param: str) -> str:
        """The name under which the client sent a parameter."""
        return self.token_limit_key if param == "max_tokens" else param

    @classmethod
    def parse(cls, body: object) -> Self:
        """Validate a decoded body. Raises RequestRefused for the first key at fault."""
        try:
            forwarded = read_keys(body, _READERS, _refuse_key)
            assert isinstance(body, dict)
            _narrow_tools(forwarded, body.get("tool_choice"))
            _require_models_and_messages(body)
            horde = parse_horde_options(body.get("horde"))
        except ChatRequestRefused as refused:
            raise build_contract_refusal(refused) from None
        if horde.dry_run and forwarded.get("stream"):
            message = "A dry run has nothing to stream: send 'horde.dry_run' without 'stream'."
            raise RequestRefused("conflicting_parameters", message, "horde.dry_run")
        messages, tools = forwarded["messages"], forwarded.get("tools")
        stored = [
            message | {"role": "system"} if message["role"] == "developer" else message
            for message in messages
        ]
        return cls(
            native_body=forwarded,
            model=forwarded.get("model"),
            stream=bool(forwarded.get("stream")),
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            horde=horde,
            estimated_prompt_tokens=FlattenedChat.read(stored, tools).estimate_tokens(),
            token_limit_key="max_completion_tokens"
            if forwarded.keys() & _TOKEN_LIMITS == {"max_completion_tokens"}
            else "max_tokens",
        )


def _narrow_tools(forwarded: JsonObject, choice: Any) -> None:
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


def _refuse_key(key: str, _value: Any, _body: JsonObject) -> object:
    raise unsupported(key, _REPLACEMENTS.get(key))


# --- readers: the value to submit, or ABSENT
# -------------------------------------------------------------------------


def _read_messages(_key: str, value: Any, _body: JsonObject) -> object:
    return parse_messages(value)


def _read_choice_count(key: str, value: Any, _body: JsonObject) -> object:
    if not is_integer(value):
        raise wrong_type(key, "an integer")
    if value != SUPPORTED_CHAT_CHOICE_COUNT:
        raise unsupported_value(key, "has to be 1: the horde gives one reply to a request")
    return ABSENT


def _read_tools(_key: str, value: Any, body: JsonObject) -> object:
    tools = parse_tools(_drop_cache_hints(value))
    check_tool_spec_size(value, body.get("tool_choice"), body.get("response_format"))
    check_strict_schemas(tools, None)
    return tools or ABSENT


def _drop_cache_hints(tools: Any) -> Any:
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


def _read_tool_choice(_key: str, value: Any, body: JsonObject) -> object:
    tools = _guess_tools(body)
    if _is_allowed_tools(value):
        mode, _ = _parse_allowed_tools(value, tools)
        return parse_tool_choice(mode, tools)
    choice = parse_tool_choice(drop_keys(value, CACHE_HINT), tools)
    return ABSENT if choice is None else choice


def _is_allowed_tools(choice: Any) -> bool:
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


def _read_parallel_tool_calls(_key: str, value: Any, body: JsonObject) -> object:
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


def _read_response_format(_key: str, value: Any, body: JsonObject) -> object:
    response_format = parse_response_format(drop_keys(value, CACHE_HINT))
    check_tool_spec_size(body.get("tools"), body.get("tool_choice"), value)
    check_strict_schemas((), response_format)
    return ABSENT if response_format is None else response_format


def _read_reasoning_effort(key: str, value: Any, _body: JsonObject) -> object:
    if not isinstance(value, str):
        raise wrong_type(key, "a string")
    if value not in _REASONING_EFFORTS:
        message = (
            f"Invalid value: 'reasoning_effort' has to be one of {', '.join(_REASONING_EFFORTS)}."
        )
        raise RequestRefused("invalid_value", message, key)
    return value


def _read_horde(_key: str, value: Any, _body: JsonObject) -> object:
    parse_horde_options(value)
    return drop_keys(value) or ABSENT


def _read_neutral_sampler(key: str, value: Any, _body: JsonObject) -> object:
    neutral = NEUTRAL_SAMPLERS[key]
    if is_number(value) and value in neutral:
        return ABSENT
    raise unsupported(
        key, f"only {' or '.join(map(str, neutral))}, which changes nothing, is accepted"
    )


def _read_logprobs(key: str, value: Any, _body: JsonObject) -> object:
    # Some web UIs send the number of the old completions.
    if value is False or (is_number(value) and value == 0):
        return ABSENT
    raise unsupported(key)


def _read_top_logprobs(key: str, value: Any, _body: JsonObject) -> object:
    if is_number(value) and value == 0:
        return ABSENT
    raise unsupported(key)


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
        "n": _read_choice_count,
        "tools": _read_tools,
        "tool_choice": _read_tool_choice,
        "parallel_tool_calls": _read_parallel_tool_calls,
        "response_format": _read_response_format,
        "reasoning_effort": _read_reasoning_effort,
        "horde": _read_horde,
        **dict.fromkeys(IGNORED_TYPES, read_ignored),
        CACHE_HINT: drop,
        **dict.fromkeys(NEUTRAL_SAMPLERS, _read_neutral_sampler),
        "logprobs": _read_logprobs,
        "top_logprobs": _read_top_logprobs,
        "logit_bias": read_absent_at({}, unsupported),
        "modalities": read_absent_at(["text"], _refuse_modalities),
        "verbosity": read_absent_at("medium", _refuse_verbosity),
        "functions": read_absent_at([], _refuse_replaced),
        "function_call": read_absent_at("none", _refuse_replaced),
    }
)
