# SPDX-License-Identifier: AGPL-3.0-or-later
"""The body of a message as a chat request of the horde.

Source: docs/reference/front_messages.md, "Request".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Self, cast

from horde_sdk.generation_parameters.text.chat_limits import (
    MAX_CHAT_MAX_TOKENS,
    MIN_CHAT_MAX_TOKENS,
)

from horde.chat.flattening import FlattenedChat
from horde.chat.tools import check_tool_spec_size, parse_response_format
from horde.chat_contract import (
    ChatContextFit,
    ChatHordeOptions,
    ChatRequestRefused,
    parse_horde_options,
)
from horde.json_text import JsonObject
from horde.oai.anthropic.blocks import CHARACTERS_PER_REFUSED_TOKEN
from horde.oai.anthropic.history import History, parse_history
from horde.oai.anthropic.keys import ESTIMATE_READERS, READERS, OutputConfig, ReadKeys, refuse_key
from horde.oai.anthropic.refusals import missing, refuse
from horde.oai.anthropic.thinking import Thinking
from horde.oai.anthropic.tools import ToolSet, build_choice
from horde.oai.errors import RequestRefused, build_contract_refusal, locate_names
from horde.oai.readers import read_keys

_MESSAGE_PATH: Final = re.compile(r"messages\[(\d{1,9})\].*", re.DOTALL)
_TOOL_PATH: Final = re.compile(r"tools\[(\d{1,9})\](.*)", re.DOTALL)
_FORMAT: Final = "response_format"
_PATHS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "stop": "stop_sequences",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "reasoning_effort": "thinking",
    }
)


@dataclass(slots=True, kw_only=True)
class MessagesRequest:
    """A validated body.

    `native_body` is submitted once its model was looked up. `model` is the name the client sent,
    which its answer repeats. `max_tokens` is what was sent: at 0 nothing is to be generated.
    `format_path` is the key that the format came from, `front_id` the front's own name of the call.
    """

    native_body: JsonObject
    model: str
    stream: bool
    horde: ChatHordeOptions
    thinking: Thinking
    include_reasoning: bool
    stop_sequences: tuple[str, ...]
    tools: ToolSet
    origins: list[str]
    estimated_prompt_tokens: int
    max_tokens: int
    dropped_hints: list[str]
    format_path: str
    front_id: str = field(default="", init=False)

    @property
    def is_length_open(self) -> bool:
        """Agents send the most that they know of in `max_tokens`, which in this API is a bound."""
        return True

    def locate(self, param: str) -> str:
        """The client's path of what the horde calls `param`."""
        return _locate(param, self.format_path, self.origins, self.tools.origins)

    @classmethod
    def parse(cls, body: object, context_fit: ChatContextFit) -> Self:
        """Validate a decoded body. `context_fit` counts unless the client sends its own.

        Raises RequestRefused for the first key at fault, in the order of the body.
        """
        return cls._parse(body, context_fit, is_estimate=False)

    @classmethod
    def parse_for_estimate(cls, body: object) -> Self:
        """Validate the body of a count, which needs no `max_tokens`; what only Anthropic's servers
        could serve is counted by its size.
        """
        return cls._parse(body, ChatContextFit.GROW, is_estimate=True)

    @classmethod
    def _parse(cls, body: object, context_fit: ChatContextFit, *, is_estimate: bool) -> Self:
        try:
            readers = ESTIMATE_READERS if is_estimate else READERS
            read = cast(ReadKeys, read_keys(body, readers, refuse_key))
            for key in ("model", "messages", *(() if is_estimate else ("max_tokens",))):
                if key not in read:
                    raise missing(key)
            system = read.get("system", "")
            history = parse_history(system, read["messages"], is_estimate=is_estimate)
            return cls._build(read, history, context_fit)
        except ChatRequestRefused as refused:
            path = _find_format_path(body if isinstance(body, dict) else {})
            raise _relocate(build_contract_refusal(refused), path) from None

    @classmethod
    def _build(cls, read: ReadKeys, history: History, context_fit: ChatContextFit) -> Self:
        tools = read.get("tools") or ToolSet()
        config = read.get("output_config", OutputConfig())
        thinking = read.get("thinking", Thinking()).with_effort(config.get("effort"))
        own_options = read.get("horde", {})
        horde = parse_horde_options(own_options)
        stream, max_tokens = bool(read.get("stream")), read.get("max_tokens", MIN_CHAT_MAX_TOKENS)
        if stream and horde.dry_run:
            message = "a dry run has nothing to stream"
            raise refuse("horde.dry_run", message, "conflicting_parameters")
        estimate = FlattenedChat.read(history.messages, tools.tools).estimate_tokens()
        return cls(
            native_body={
                "model": read["model"],
                "messages": history.messages,
                "max_tokens": min(max(max_tokens, MIN_CHAT_MAX_TOKENS), MAX_CHAT_MAX_TOKENS),
                "horde": {"context_fit": context_fit.value} | own_options,
                **_build_sampling(read, stream=stream),
                **_build_controls(read, tools),
            },
            model=read["model"],
            stream=stream,
            horde=horde,
            thinking=thinking,
            include_reasoning=bool(own_options.get("include_reasoning", thinking.is_shown)),
            stop_sequences=tuple(read.get("stop_sequences", ())),
            tools=tools,
            origins=history.origins,
            estimated_prompt_tokens=max(estimate + _count_refused(history, tools), 1),
            max_tokens=max_tokens,
            format_path=_find_format_path(read),
            dropped_hints=[
                *config.get("hints", ()),
                *read.get("context_management", ()),
                *tools.dropped_hints,
            ],
        )


def _build_sampling(read: ReadKeys, *, stream: bool) -> JsonObject:
    keys: Mapping[str, object] = read
    sent: JsonObject = {key: keys[key] for key in ("temperature", "top_p") if key in keys}
    if "stop_sequences" in read:
        sent["stop"] = read["stop_sequences"]
    return sent | ({"stream": True} if stream else {})


def _build_controls(read: ReadKeys, tools: ToolSet) -> JsonObject:
    """Tools, the choice among them, and the format. Raises RequestRefused and
    ChatRequestRefused.
    """
    controls: JsonObject = {"tools": tools.tools} if tools.tools else {}
    if "tool_choice" in read:
        controls |= build_choice(read["tool_choice"], tools)
    config = read.get("output_config", OutputConfig())
    output = config.get("format") or read.get("output_format")
    check_tool_spec_size(tools.tools, controls.get("tool_choice"), output)
    if output is not None:
        controls["response_format"] = parse_response_format(output)
    return controls


def _count_refused(history: History, tools: ToolSet) -> int:
    """Tokens that what cannot be served would take."""
    return -(
        -(history.refused_characters + tools.refused_characters) // CHARACTERS_PER_REFUSED_TOKEN
    )


# --- paths
# ------------------------------------------------------------------------------------------------


def _find_format_path(keys: Mapping[str, object]) -> str:
    """The key under which a client sends the format; an older one has that name of its own."""
    return "output_config.format" if keys.get("output_format") is None else "output_format"


def _locate(
    param: str, format_path: str, message_origins: list[str], tool_origins: list[int]
) -> str:
    if found := _MESSAGE_PATH.fullmatch(param):
        index = int(found[1])
        return message_origins[index] if index < len(message_origins) else "messages"
    if found := _TOOL_PATH.fullmatch(param):
        index, rest = int(found[1]), found[2].removeprefix(".function")
        place = tool_origins[index] if index < len(tool_origins) else index
        return f"tools.{place}{rest.replace('.parameters', '.input_schema', 1)}"
    if param.startswith("models["):
        return "model"
    if param == _FORMAT or param.startswith(f"{_FORMAT}."):
        return format_path + param.removeprefix(_FORMAT).removeprefix(".json_schema")
    return _PATHS.get(param, param)


def _relocate(refused: RequestRefused, format_path: str) -> RequestRefused:
    """A refusal of the shared validation in this form's own names."""
    if refused.param is None:
        return refused

    def locate(param: str) -> str:
        return _locate(param, format_path, [], [])

    message = locate_names(refused.message, locate)
    return RequestRefused(refused.code, message, locate(refused.param), status=refused.status)
