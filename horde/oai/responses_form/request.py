# SPDX-License-Identifier: AGPL-3.0-or-later
"""A response as it was asked for, and as the horde is asked for it.

Source: docs/reference/front_responses.md, "Request".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from horde_sdk.generation_parameters.text.chat_limits import OPENAI_SAMPLING_RANGES

from horde.chat.flattening import FlattenedChat
from horde.chat.messages import build_stored_messages, parse_messages
from horde.chat.strict_schema import check_strict_schemas
from horde.chat.tools import check_tool_spec_size, parse_response_format
from horde.chat.tools import parse_tools as parse_native_tools
from horde.chat.wire import Tool
from horde.chat_contract import (
    ChatHordeOptions,
    ChatRequestRefused,
    parse_horde_options,
)
from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused, build_contract_refusal, locate_names
from horde.oai.forms import ChatAnswer
from horde.oai.leniency import ECHOED_MESSAGES
from horde.oai.responses_form.conversation import build_conversation
from horde.oai.responses_form.items import Input, Item, ReferenceItem
from horde.oai.responses_form.schema import (
    TRUNCATIONS,
    ReadBody,
    ReasoningOptions,
    read_body,
)
from horde.oai.responses_form.tools import NO_TOOLS, Choice, ToolSet, parse_choice

_FORWARDED: Final = ("model", "models", *OPENAI_SAMPLING_RANGES, "seed", "stop", "stream")
_ECHOED: Final = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user", "temperature", "top_p"),
)
NO_INPUT: Final = Input([], [])
_PLACE: Final = re.compile(r"(messages|tools)\[(\d+)\](.*)", re.DOTALL)
_RENAMED: Final[dict[str, str]] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function.name": "tool_choice.name",
}
_PART: Final = re.compile(r"\.content\[(\d+)\]")


@dataclass(slots=True, kw_only=True)
class ResponsesRequest:
    """A body that was read. Its messages are there at once, or after `converse` when earlier items
    have to be looked up.

    `echo` holds the keys that the object shows again; `store` and `background` are as in force.
    """

    native_body: JsonObject
    model: str | None
    first_model: str
    stream: bool
    horde: ChatHordeOptions
    tools: ToolSet
    offered_paths: tuple[str, ...]
    echo: JsonObject
    input: Input
    instructions: str | None
    previous_response_id: str | None
    store: bool
    background: bool
    is_length_open: bool
    estimated_prompt_tokens: int = 0
    message_paths: tuple[str, ...] = field(default=())
    part_paths: Mapping[int, Sequence[str]] = field(default_factory=dict)  # by their message
    stored_items: list[JsonObject] = field(default_factory=list)  # references replaced
    links: tuple[str, ...] = ()  # native ids of the responses before it
    owner: str = ""  # of what is stored
    answer: ChatAnswer | None = None  # once the horde took it

    @property
    def include_reasoning(self) -> bool:
        """Whether the client is shown what the model thought."""
        return self.horde.include_reasoning

    @property
    def needs_items(self) -> bool:
        """Whether items of an earlier response belong to the conversation."""
        return self.previous_response_id is not None or any(
            isinstance(item, ReferenceItem) for item in self.input.items
        )

    def find_storage_param(self) -> str | None:
        """The key that needs stored responses; None when none does."""
        if self.background:
            return "background"
        if self.store:
            return "store"
        if self.previous_response_id is not None:
            return "previous_response_id"
        return "input" if self.needs_items else None

    @classmethod
    def parse(cls, body: object, default_max_tokens: int) -> "ResponsesRequest":
        """Validate a decoded body. Raises RequestRefused for the first key at fault."""
        try:
            read = read_body(body)
        except ChatRequestRefused as refused:
            raise build_contract_refusal(refused) from None
        tools = read.get("tools", NO_TOOLS)
        choice = parse_choice(read.get("tool_choice"), tools)
        background = read.get("background", False)
        request = cls(
            native_body=_build_native_body(read, choice, default_max_tokens),
            model=read.get("model"),
            first_model=read.get("model") or read["models"][0],
            stream=bool(read.get("stream")),
            horde=parse_horde_options(read.get("horde")),
            tools=tools,
            offered_paths=tuple(tool.path for tool in choice.offered),
            echo=_build_echo(read, tools),
            input=read.get("input", NO_INPUT),
            instructions=read.get("instructions"),
            previous_response_id=read.get("previous_response_id"),
            store=background or read.get("store", False),
            background=background,
            is_length_open="max_output_tokens" not in read,
        )
        request.stored_items = request.input.raw
        _check_combinations(read, request)
        request.check_specification()
        if not request.needs_items:
            request.converse(request.input.items)
        return request

    @property
    def _native_tools(self) -> list[Tool]:
        return cast(list[Tool], self.native_body.get("tools", []))

    def check_specification(self) -> None:
        """Hold tools and format to the rules of the horde. Raises RequestRefused."""
        body = self.native_body
        try:
            if "tools" in body:
                body["tools"] = parse_native_tools(body["tools"])
            text_format = parse_response_format(body.get("response_format"))
            check_tool_spec_size(body.get("tools"), body.get("tool_choice"), text_format)
            check_strict_schemas(self._native_tools, text_format)
        except ChatRequestRefused as refused:
            raise self._translate(build_contract_refusal(refused)) from None
        if text_format is not None:
            body["response_format"] = text_format

    def converse(self, items: Sequence[Item | None]) -> None:
        """Make the messages of all items, earlier ones first. Raises RequestRefused."""
        conversation = build_conversation(self.instructions, items)
        self.message_paths, self.part_paths = conversation.paths, conversation.part_paths
        try:
            messages = parse_messages(conversation.messages, ECHOED_MESSAGES)
        except ChatRequestRefused as refused:
            raise self._translate(build_contract_refusal(refused)) from None
        stored = build_stored_messages(messages)
        flattened = FlattenedChat.read(stored, self._native_tools)
        self.estimated_prompt_tokens = flattened.estimate_tokens()
        self.native_body["messages"] = messages

    def locate(self, param: str) -> str:
        """The client's own name of what the horde calls `param`."""
        place = _PLACE.fullmatch(param)
        if place is not None:
            return self._locate_entry(place.group(1), int(place.group(2)), place.group(3))
        if param == "response_format" or param.startswith("response_format."):
            rest = param.removeprefix("response_format").removeprefix(".json_schema")
            return f"text.format{rest}"
        return _RENAMED.get(param, param)

    def _locate_entry(self, kind: str, index: int, rest: str) -> str:
        paths = self.message_paths if kind == "messages" else self.offered_paths
        if index >= len(paths):
            return _RENAMED.get(kind, kind)
        if kind == "tools":
            return paths[index] + rest.removeprefix(".function")
        if rest == ".tool_call_id":
            return f"{paths[index]}.call_id"
        # Below the instructions, a text, or an earlier item there is nothing to point at.
        part = _PART.match(rest)
        if not paths[index].startswith("input[") or part is None:
            return paths[index]
        path, part_paths = paths[index], self.part_paths.get(index)
        if part_paths is not None:
            place = int(part.group(1))
            if place >= len(part_paths):
                return path
            path, rest = part_paths[place], rest[part.end() :]
        return path + rest.replace(".image_url.url", ".image_url").replace(
            ".image_url.detail", ".detail"
        )

    def _translate(self, refused: RequestRefused) -> RequestRefused:
        """A refusal of the shared validation in the names of this form."""
        param = refused.param
        if refused.code == "invalid_json_schema":
            param = "text.format.schema"
        elif param is not None:
            param = self.locate(param)
        message = locate_names(refused.message, self.locate)
        return RequestRefused(refused.code, message, param)


def _build_native_body(read: ReadBody, choice: Choice, default_max_tokens: int) -> JsonObject:
    keys: Mapping[str, object] = read
    body: JsonObject = {key: keys[key] for key in _FORWARDED if key in keys}
    body["max_tokens"] = read.get("max_output_tokens", default_max_tokens)
    if choice.offered:
        body["tools"] = [tool.native for tool in choice.offered]
        if choice.native is not None:
            body["tool_choice"] = choice.native
        if "parallel_tool_calls" in read:
            body["parallel_tool_calls"] = read["parallel_tool_calls"]
    text, reasoning = read.get("text"), read.get("reasoning")
    if text is not None and text["native"] is not None:
        body["response_format"] = text["native"]
    if reasoning is not None and reasoning.get("effort") is not None:
        body["reasoning_effort"] = reasoning["effort"]
    # An overlong input is refused unless the client asked to have it cut.
    fit = TRUNCATIONS[read.get("truncation", "disabled")]
    body["horde"] = {"context_fit": fit} | read.get("horde", {})
    return body


def _build_echo(read: ReadBody, tools: ToolSet) -> JsonObject:
    keys: Mapping[str, object] = read
    reasoning, text = read.get("reasoning", ReasoningOptions()), read.get("text")
    return {
        **{key: keys.get(key) for key in _ECHOED},
        "metadata": read.get("metadata", {}),
        "parallel_tool_calls": read.get("parallel_tool_calls", True),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "text": {
            "format": {"type": "text"} if text is None else text["shown"],
            "verbosity": "medium",
        },
        "tool_choice": read.get("tool_choice", "auto"),
        "tools": list(tools.echo),
        "truncation": read.get("truncation", "disabled"),
    }


def _check_combinations(read: ReadBody, request: ResponsesRequest) -> None:
    """What two keys say together. Raises RequestRefused."""
    if request.background and read.get("store") is False:
        message = "A response in the background is stored: leave 'store' out, or send true."
        raise RequestRefused("conflicting_parameters", message, "store")
    if request.horde.dry_run and (request.stream or request.store):
        message = (
            "A dry run has nothing to stream or store: send 'horde.dry_run' without 'stream',"
            " 'store' and 'background'."
        )
        raise RequestRefused("conflicting_parameters", message, "horde.dry_run")
