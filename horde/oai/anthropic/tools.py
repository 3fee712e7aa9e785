# SPDX-License-Identifier: AGPL-3.0-or-later
"""Tools and the choice among them, as functions of a chat request.

Source: docs/reference/front_messages.md, "Tools".
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from horde.chat.strict_schema import obeys_strict_rules
from horde.chat.tools import parse_tools
from horde.chat.wire import Function, JsonSchema, Tool, ToolChoice
from horde.chat_contract import ChatRequestRefused
from horde.json_text import JsonObject, write_document
from horde.oai.anthropic.refusals import (
    check_members,
    refuse,
    require_list,
    require_object,
    require_one_of,
    require_string,
    show,
    unsupported,
    wrong_type,
)

MAX_NATIVE_NAME_CHARACTERS: Final = 64
KEPT_NAME_CHARACTERS: Final = 55
NAME_DIGEST_DIGITS: Final = 8
_PLACE: Final = re.compile(r"tools\[(\d+)\]")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_BASH: Final = re.compile(r"bash_\d+")
_EDITOR: Final = re.compile(r"text_editor_\d+")
_OLDEST_EDITOR: Final = "text_editor_20241022"
_SEARCH: Final = re.compile(r"tool_search_tool_\w+")
_SERVER: Final = re.compile(r"(?:web_search|web_fetch|code_execution)_\w+")
_HINTS: Final = ("eager_input_streaming", "defer_loading", "allowed_callers")
_COMMON_KEYS: Final = ("type", "name", "strict", "input_examples", *_HINTS)
_BASH_SCHEMA: Final[JsonSchema] = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command to run."},
        "restart": {"type": "boolean", "description": "True starts the shell anew."},
    },
}
_EDITOR_COMMANDS: Final = ("view", "create", "str_replace", "insert")
_CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(slots=True)
class ToolSet:
    """The tools of a request. `origins` are the client's places of the tools that are kept, `names`
    the client's names of those that were shortened. `refused_characters` is the size of what an
    estimate counts though it would be refused, `refused_names` are the names of that.
    """

    tools: list[Tool] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    dropped_hints: list[str] = field(default_factory=list)
    refused_characters: int = 0
    refused_names: set[str] = field(default_factory=set)


class _RunsElsewhere(Exception):
    """A tool of a type that the horde has not; its text says why."""


def shorten_name(name: str) -> str:
    """A name that the horde takes: of a longer one the start, and a digest that tells it from
    others with that start.
    """
    if len(name) <= MAX_NATIVE_NAME_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{name[:KEPT_NAME_CHARACTERS]}_{digest[:NAME_DIGEST_DIGITS]}"


def parse_tool_set(value: object, *, is_estimate: bool) -> ToolSet:
    """The functions of `tools`. Raises RequestRefused, or ChatRequestRefused of the shared
    validation.
    """
    tool_set = ToolSet()
    seen: set[str] = set()
    for index, entry in enumerate(require_list(value, "tools")):
        path = f"tools.{index}"
        tool = require_object(entry, path)
        try:
            function = _build_function(tool, path)
        except _RunsElsewhere as refusal:
            if not is_estimate:
                raise unsupported(f"{path}.type", str(refusal)) from None
            tool_set.refused_characters += len(json.dumps(tool))
            if isinstance(refused_name := tool.get("name"), str):
                tool_set.refused_names.add(refused_name)
            continue
        if function is None:
            continue
        name = function["name"]
        if name in seen:
            raise refuse(f"{path}.name", "Tool names must be unique")
        seen.add(name)
        if shorten_name(name) != name:
            tool_set.names[shorten_name(name)] = name
            function["name"] = shorten_name(name)
        tool_set.tools.append({"type": "function", "function": function})
        tool_set.origins.append(index)
    _check_tools(tool_set)
    _drop_loose_strictness(tool_set)
    return tool_set


def _build_function(tool: JsonObject, path: str) -> Function | None:
    """The function of a tool under the client's name; None for a tool that asks for nothing."""
    kind = tool.get("type")
    if kind is None:
        return _build_custom(tool, path)
    kind = require_string(kind, f"{path}.type")
    if kind == "custom":
        return _build_custom(tool, path)
    if _BASH.fullmatch(kind):
        check_members(tool, _COMMON_KEYS, path)
        return _complete(tool, path, "bash", _BASH_SCHEMA, "Runs a shell command.")
    if _EDITOR.fullmatch(kind):
        return _build_editor(tool, kind, path)
    if _SEARCH.fullmatch(kind):
        return None  # every tool is always loaded, so there is nothing to search
    shown = show(kind)
    if _SERVER.fullmatch(kind):
        refusal = f"{shown} runs on Anthropic's servers and is not offered here"
    else:
        refusal = f"{shown} is not supported; send a custom tool with input_schema"
    raise _RunsElsewhere(refusal)


def _check_tools(tool_set: ToolSet) -> None:
    """Hold the functions to the shared limits, in the client's paths."""
    try:
        parse_tools(tool_set.tools)
    except ChatRequestRefused as refused:
        place = _PLACE.match(refused.path)
        if place is None:
            raise
        origin = tool_set.origins[int(place[1])]
        path = f"tools.{origin}.input_schema"
        message = refused.detail.replace(f"'{refused.path}'", f"'{path}'")
        raise unsupported(path, message) from None


def _build_custom(tool: JsonObject, path: str) -> Function:
    check_members(tool, (*_COMMON_KEYS, "description", "input_schema"), path)
    schema = require_object(tool.get("input_schema"), f"{path}.input_schema")
    if schema.get("type") != "object":
        raise refuse(f"{path}.input_schema", "the type of a tool's schema has to be 'object'")
    name, description = _require_name(tool, path), tool.get("description")
    if description is not None:
        description = require_string(description, f"{path}.description")
    return _complete(tool, path, name, schema, description)


def _complete(
    tool: JsonObject, path: str, name: str, schema: JsonSchema, description: str | None
) -> Function:
    """A function with what any tool of the client may say beside its name and schema."""
    _check_callers(tool, path)
    function: Function = {"name": name, "parameters": schema}
    lines = [] if description is None else [description]
    if tool.get("input_examples") is not None:
        examples = require_list(tool["input_examples"], f"{path}.input_examples")
        lines += [
            write_document(require_object(example, f"{path}.input_examples.{index}"))
            for index, example in enumerate(examples)
        ]
    if lines:
        function["description"] = "\n".join(lines)
    strict = tool.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type(f"{path}.strict", "a valid boolean")
    if strict:
        function["strict"] = True
    return function


def _build_editor(tool: JsonObject, kind: str, path: str) -> Function:
    check_members(tool, (*_COMMON_KEYS, "max_characters"), path)
    commands = [*_EDITOR_COMMANDS, *(["undo_edit"] if kind == _OLDEST_EDITOR else [])]
    text = {"type": "string"}
    line_range = {"type": "array", "items": {"type": "integer"}}
    schema: JsonObject = {
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": commands},
            "path": text,
            "file_text": text,
            "old_str": text,
            "new_str": text,
            "insert_line": {"type": "integer"},
            "insert_text": text,
            "view_range": line_range,
        },
        "required": ["command", "path"],
    }
    description = "Views, creates and edits text files."
    return _complete(tool, path, _require_name(tool, path), schema, description)


def _require_name(tool: JsonObject, path: str) -> str:
    name = require_string(tool.get("name"), f"{path}.name")
    if not _NAME.fullmatch(name):
        raise refuse(f"{path}.name", "String should match pattern '^[a-zA-Z0-9_-]{1,128}$'")
    return name


def _check_callers(tool: JsonObject, path: str) -> None:
    callers = tool.get("allowed_callers")
    if callers is not None and "direct" not in require_list(callers, f"{path}.allowed_callers"):
        message = "only the model itself calls tools here: leave it out, or list 'direct'"
        raise unsupported(f"{path}.allowed_callers", message)


def _drop_loose_strictness(tool_set: ToolSet) -> None:
    """Strictness is a wish here: a schema that does not keep OpenAI's rules goes without."""
    for tool, origin in zip(tool_set.tools, tool_set.origins, strict=True):
        if "strict" in tool["function"] and not obeys_strict_rules(tool["function"]["parameters"]):
            del tool["function"]["strict"]
            tool_set.dropped_hints.append(f"tools.{origin}.strict")


@dataclass(frozen=True, slots=True)
class Choice:
    """What `tool_choice` asks for, before it is known which tools there are."""

    kind: str = "auto"
    name: str | None = None
    is_single: bool = False


def parse_choice(value: object) -> Choice:
    """The shape of a choice. Raises RequestRefused."""
    choice = require_object(value, "tool_choice")
    kind = require_one_of(choice.get("type"), (*_CHOICES, "tool"), "tool_choice.type")
    check_members(choice, ("type", "name", "disable_parallel_tool_use"), "tool_choice")
    name = choice.get("name")
    if kind == "tool":
        name = require_string(name, "tool_choice.name")
    elif name is not None:
        raise refuse("tool_choice.name", "Extra inputs are not permitted", "unsupported_parameter")
    is_single = choice.get("disable_parallel_tool_use")
    if is_single is not None and not isinstance(is_single, bool):
        raise wrong_type("tool_choice.disable_parallel_tool_use", "a valid boolean")
    return Choice(kind, name, bool(is_single))


def build_choice(choice: Choice, tool_set: ToolSet) -> JsonObject:
    """The keys of a chat request for a choice among these tools; none for one that an estimate only
    counts. Raises RequestRefused.
    """
    if choice.name in tool_set.refused_names:
        return {}
    if not tool_set.tools and not tool_set.refused_characters:
        if choice.kind in ("any", "tool"):
            message = "a tool can be required only where 'tools' are sent"
            raise refuse("tool_choice", message, "conflicting_parameters")
        return {}
    sent: ToolChoice
    if choice.name is None:
        sent = _CHOICES[choice.kind]
    else:
        name = shorten_name(choice.name)
        if all(tool["function"]["name"] != name for tool in tool_set.tools):
            message = f"Tool '{show(choice.name)}' not found in provided tools"
            raise refuse("tool_choice.name", message)
        sent = {"type": "function", "function": {"name": name}}
    single = choice.is_single and choice.kind != "none"
    return {"tool_choice": sent, **({"parallel_tool_calls": False} if single else {})}
