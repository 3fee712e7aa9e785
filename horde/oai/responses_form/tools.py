# SPDX-License-Identifier: AGPL-3.0-or-later
"""The tools of a response: flat functions, free-form tools and groups of both become the horde's
functions, and calls of those become the client's again.

Source: docs/reference/front_responses.md, "Tools".
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

from horde.chat.strict_schema import obeys_strict_rules
from horde.chat.wire import Tool
from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused, shorten_param
from horde.oai.leniency import CACHE_HINT, drop_keys
from horde.oai.readers import is_neutral, missing, unsupported, unsupported_value, wrong_type

MAX_TOOL_COUNT: Final = 128  # of a request, groups counted by their members
NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
SYNTAXES: Final = ("lark", "regex")
_HOSTED: Final = re.compile(
    r"(web_search|web_search_preview|computer_use_preview)(_[0-9]{4}_?[0-9]{2}_?[0-9]{2})?"
    r"|file_search|code_interpreter|image_generation|computer|mcp|tool_search"
    r"|programmatic_tool_calling"
)
_LOCAL: Final = frozenset({"local_shell", "shell", "apply_patch"})
_MEMBERS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "function": frozenset({"type", "name", "description", "parameters", "strict"}),
        "custom": frozenset({"type", "name", "description", "format"}),
        "namespace": frozenset({"type", "name", "description", "tools"}),
    }
)
# Members that ask for nothing at these values.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {"defer_loading": (False,), "async": (False,), "allowed_callers": (["direct"],)}
)
_INPUT_SCHEMA: Final[JsonObject] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """One tool as the client offered it, and as the horde is asked. `path` is the client's."""

    path: str
    name: str
    namespace: str | None
    is_custom: bool
    has_grammar: bool
    native: Tool

    @property
    def native_name(self) -> str:
        """The name that the worker sees."""
        return self.native["function"]["name"]


@dataclass(frozen=True, slots=True)
class HostedTool:
    """A tool that only OpenAI's platform could run."""

    path: str
    kind: str


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request. `echo` is what the object shows of them."""

    offered: tuple[OfferedTool, ...] = ()
    hosted: tuple[HostedTool, ...] = ()
    echo: tuple[JsonObject, ...] = ()

    def find(self, native_name: str) -> OfferedTool | None:
        """The tool that the worker knows by a name."""
        return next((tool for tool in self.offered if tool.native_name == native_name), None)

    def list_not_enforced(self) -> list[str]:
        """The paths of what the horde does not do."""
        grammars = [f"{tool.path}.format" for tool in self.offered if tool.has_grammar]
        return [*(tool.path for tool in self.hosted), *grammars]


NO_TOOLS: Final = ToolSet()


def build_native_name(namespace: object, name: str) -> str:
    """The name of a function that stands in a group, or in none."""
    return f"{namespace}__{name}" if namespace else name


def parse_tools(value: object) -> ToolSet:
    """The tools in their order. Raises RequestRefused for the first at fault."""
    if not isinstance(value, list):
        raise wrong_type("tools", "an array of tools")
    offered: list[OfferedTool] = []
    hosted: list[HostedTool] = []
    echo: list[JsonObject] = []
    for index, tool in enumerate(value):
        shown = _read_tool(tool, f"tools[{index}]", offered, hosted)
        echo.append(shown)
        if len(offered) > MAX_TOOL_COUNT:
            raise unsupported_value("tools", f"may hold at most {MAX_TOOL_COUNT} tools")
    _check_names(offered)
    if hosted and not offered:
        raise build_hosted_refusal(hosted[0])
    return ToolSet(tuple(offered), tuple(hosted), tuple(echo))


def build_hosted_refusal(tool: HostedTool) -> RequestRefused:
    """400 of a tool that nobody here could run."""
    return unsupported_value(
        f"{tool.path}.type",
        f"is '{shorten_param(tool.kind)}', a tool of OpenAI's platform that the horde does not"
        " have",
    )


def _read_tool(
    tool: object, path: str, offered: list[OfferedTool], hosted: list[HostedTool]
) -> JsonObject:
    """Read one entry of `tools`; what the object shows of it."""
    kind = _require_kind(tool, path)
    assert isinstance(tool, dict)
    if kind in ("function", "custom"):
        read, shown = _read_own(tool, path, kind, None)
        offered.append(read)
        return shown
    if kind == "namespace":
        return _read_namespace(tool, path, offered)
    if _HOSTED.fullmatch(kind):
        hosted.append(HostedTool(path, kind))
        return tool
    raise _build_unknown_refusal(kind, path)


def _require_kind(tool: object, path: str) -> str:
    if not isinstance(tool, dict):
        raise wrong_type(path, "an object")
    kind = tool.get("type")
    if kind is None:
        raise missing(f"{path}.type")
    if not isinstance(kind, str):
        raise wrong_type(f"{path}.type", "a string")
    return kind


def _build_unknown_refusal(kind: str, path: str) -> RequestRefused:
    if kind in _LOCAL:
        return unsupported_value(
            f"{path}.type",
            f"is '{kind}', which the horde does not have; offer it as a 'function' or 'custom'"
            " tool",
        )
    return unsupported_value(
        f"{path}.type", "has to be 'function', 'custom' or 'namespace' for the horde"
    )


def _read_own(
    tool: JsonObject, path: str, kind: str, namespace: str | None
) -> tuple[OfferedTool, JsonObject]:
    """One function or free-form tool, and what the object shows of it."""
    _check_members(tool, path, kind)
    name = _require_name(tool, path, namespace)
    description, grammar = _read_description(tool, path), None
    native_name = build_native_name(namespace, name)
    if kind == "custom":
        grammar = _describe_grammar(tool.get("format"), f"{path}.format")
        text = "\n\n".join(part for part in (description, grammar) if part)
        described = {"description": text} if text else {}
        function = {"name": native_name, **described, "strict": True, "parameters": _INPUT_SCHEMA}
        shown = tool
    else:
        schema, strict = _read_schema(tool, path)
        described = {"description": description} if description is not None else {}
        function = {"name": native_name, **described, "parameters": schema}
        if strict:
            function["strict"] = True
        shown = {"parameters": None, **tool, "strict": strict}
    native = cast(Tool, {"type": "function", "function": function})
    is_custom, has_grammar = kind == "custom", grammar is not None
    return OfferedTool(path, name, namespace, is_custom, has_grammar, native), shown


def _read_namespace(tool: JsonObject, path: str, offered: list[OfferedTool]) -> JsonObject:
    _check_members(tool, path, "namespace")
    namespace = _require_name(tool, path, None)
    _read_description(tool, path)
    members = tool.get("tools")
    if not isinstance(members, list) or not members:
        raise wrong_type(f"{path}.tools", "a non-empty array of functions and custom tools")
    shown = []
    for index, member in enumerate(members):
        place = f"{path}.tools[{index}]"
        kind = _require_kind(member, place)
        if kind not in ("function", "custom"):
            raise unsupported_value(
                f"{place}.type", "has to be 'function' or 'custom' in a namespace"
            )
        read, echo = _read_own(member, place, kind, namespace)
        offered.append(read)
        shown.append(echo)
        if len(offered) > MAX_TOOL_COUNT:
            break
    return tool | {"tools": shown}


def _check_members(tool: JsonObject, path: str, kind: str) -> None:
    for key, value in drop_keys(tool, CACHE_HINT).items():
        if key in _MEMBERS[kind] or is_neutral(value, *_NEUTRAL.get(key, ())):
            continue
        if kind == "function" and key == "function" and isinstance(value, dict):
            message = (
                f"Missing required parameter: '{path}.name'. This API takes functions flat, as"
                ' {"type": "function", "name": …, "parameters": …}.'
            )
            raise RequestRefused("missing_required_parameter", message, f"{path}.name")
        raise unsupported(f"{path}.{key}")


def _require_name(tool: JsonObject, path: str, namespace: str | None) -> str:
    name = tool.get("name")
    if name is None:
        raise missing(f"{path}.name")
    if not isinstance(name, str):
        raise wrong_type(f"{path}.name", "a string")
    if not NAME.fullmatch(build_native_name(namespace, name)):
        of = "" if namespace is None else f", together with '{namespace}__' before it"
        message = f"Invalid value: '{path}.name' has to be 1 to 64 of A-Z a-z 0-9 _ -{of}."
        raise RequestRefused("invalid_value", message, f"{path}.name")
    return name


def _read_description(tool: JsonObject, path: str) -> str | None:
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise wrong_type(f"{path}.description", "a string")
    return description


def _read_schema(tool: JsonObject, path: str) -> tuple[JsonObject, bool]:
    """The parameters, and whether they are held to the schema. Absent means strict in this API, but
    a schema is never rewritten: one that does not obey the rules is not strict.
    """
    schema, strict = tool.get("parameters"), tool.get("strict")
    if schema is None:
        schema = {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise wrong_type(f"{path}.parameters", "an object")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type(f"{path}.strict", "a boolean")
    return schema, strict if strict is not None else _may_be_strict(schema)


def _may_be_strict(schema: JsonObject) -> bool:
    try:
        return obeys_strict_rules(schema)
    except RecursionError:  # the limit of nesting, which is checked later, refuses it
        return False


def _describe_grammar(form: object, path: str) -> str | None:
    """What a model is told of the form of a free text; None where any text will do."""
    if form is None:
        return None
    if not isinstance(form, dict):
        raise wrong_type(path, "an object")
    kind = form.get("type")
    if kind == "text":
        return None
    if kind != "grammar":
        raise unsupported_value(f"{path}.type", "has to be 'text' or 'grammar'")
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in SYNTAXES:
        message = f"Invalid value: '{path}.syntax' has to be one of {', '.join(SYNTAXES)}."
        raise RequestRefused("invalid_value", message, f"{path}.syntax")
    if not isinstance(definition, str):
        raise wrong_type(f"{path}.definition", "a string")
    return f"The argument `input` is the raw text. Grammar ({syntax}):\n{definition}"


def _check_names(offered: Sequence[OfferedTool]) -> None:
    seen: set[str] = set()
    for tool in offered:
        if tool.native_name in seen:
            message = f"Invalid value: '{tool.path}.name' names a tool that is there already."
            raise RequestRefused("invalid_value", message, f"{tool.path}.name")
        seen.add(tool.native_name)


# --- the choice
# ------------------------------------------------------------------------------------------

_MODES: Final = ("auto", "required")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tools the horde is offered, and with what `tool_choice`; None is none."""

    offered: tuple[OfferedTool, ...]
    native: Any


def parse_choice(value: object, tools: ToolSet) -> Choice:
    """The choice among these tools. Raises RequestRefused."""
    if value is None:
        return Choice(tools.offered, None)
    if isinstance(value, str):
        return _parse_mode(value, tools)
    if not isinstance(value, dict):
        raise wrong_type("tool_choice", "a string or an object")
    kind = value.get("type")
    if kind == "allowed_tools":
        return _parse_allowed(value, tools)
    if kind not in ("function", "custom"):
        raise _build_choice_refusal(kind, tools)
    _check_choice_members(value, "tool_choice")
    tool = _find_chosen(value, "tool_choice", tools)
    if tool is None:
        message = (
            "Invalid value for 'tool_choice': the tool"
            f" '{shorten_param(str(value.get('name')))}' is not defined in 'tools'."
        )
        raise RequestRefused("conflicting_parameters", message, "tool_choice")
    return Choice(tools.offered, {"type": "function", "function": {"name": tool.native_name}})


def _parse_mode(mode: str, tools: ToolSet) -> Choice:
    if mode not in ("none", "auto", "required"):
        message = "Invalid value: 'tool_choice' has to be 'none', 'auto', 'required' or an object."
        raise RequestRefused("invalid_value", message, "tool_choice")
    if not tools.offered:
        if mode == "required":
            message = (
                "Invalid value for 'tool_choice': 'required' needs tools, and 'tools' has none."
            )
            raise RequestRefused("conflicting_parameters", message, "tool_choice")
        return Choice((), None)
    return Choice(tools.offered, mode)


def _build_choice_refusal(kind: object, tools: ToolSet) -> RequestRefused:
    for tool in tools.hosted:
        if tool.kind == kind:
            return build_hosted_refusal(tool)
    return unsupported_value(
        "tool_choice.type", "has to be 'function', 'custom' or 'allowed_tools' for the horde"
    )


def _check_choice_members(value: JsonObject, path: str) -> None:
    for key in drop_keys(value, CACHE_HINT):
        if key not in ("type", "name", "namespace"):
            raise unsupported(f"{path}.{key}")
    if not isinstance(value.get("name"), str):
        raise wrong_type(f"{path}.name", "a string")


def _find_chosen(value: JsonObject, path: str, tools: ToolSet) -> OfferedTool | None:
    namespace = value.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise wrong_type(f"{path}.namespace", "a string")
    return tools.find(build_native_name(namespace, str(value["name"])))


def _parse_allowed(value: JsonObject, tools: ToolSet) -> Choice:
    """Some of the tools: those alone are offered, with the mode as the choice."""
    for key in drop_keys(value, CACHE_HINT):
        if key not in ("type", "mode", "tools"):
            raise unsupported(f"tool_choice.{key}")
    mode, entries = value.get("mode", "auto"), value.get("tools")
    if mode not in _MODES:
        message = f"Invalid value: 'tool_choice.mode' has to be one of {', '.join(_MODES)}."
        raise RequestRefused("invalid_value", message, "tool_choice.mode")
    if not isinstance(entries, list) or not entries:
        raise wrong_type("tool_choice.tools", "a non-empty array of tools")
    names = set(_iter_allowed(entries, tools))
    if not names:
        raise _build_choice_refusal(entries[0].get("type"), tools)
    return Choice(tuple(tool for tool in tools.offered if tool.native_name in names), mode)


def _iter_allowed(entries: Sequence[object], tools: ToolSet) -> Iterator[str]:
    """The native names of listed tools; hosted ones are left out here as well."""
    hosted = {tool.kind for tool in tools.hosted}
    for index, entry in enumerate(entries):
        path = f"tool_choice.tools[{index}]"
        if not isinstance(entry, dict):
            raise wrong_type(path, "an object")
        if isinstance(entry.get("type"), str) and entry["type"] in hosted:
            continue
        tool = None
        if entry.get("type") in ("function", "custom"):
            _check_choice_members(entry, path)
            tool = _find_chosen(entry, path, tools)
        if tool is None:
            message = f"Invalid value: '{path}' names a tool that 'tools' does not have."
            raise RequestRefused("invalid_value", message, path)
        yield tool.native_name
