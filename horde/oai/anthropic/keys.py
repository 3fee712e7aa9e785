# SPDX-License-Identifier: AGPL-3.0-or-later
"""The keys of a message's body, each read at its place.

The rules are those of chat completions. One departs from them: a *hint* is a key that even
Anthropic does not promise to honour and that agents send by default, so it is left out where it
cannot be honoured. Source: docs/reference/front_messages.md, "Keys".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypedDict

from horde.chat.parameters import is_integer, is_number
from horde.chat.strict_schema import obeys_strict_rules
from horde.json_text import JsonObject
from horde.oai.anthropic.errors import THREADS_UNSUPPORTED
from horde.oai.anthropic.history import parse_system
from horde.oai.anthropic.refusals import (
    check_members,
    extra,
    refuse,
    require_list,
    require_object,
    require_one_of,
    require_string,
    unsupported,
    wrong_type,
)
from horde.oai.anthropic.thinking import EFFORTS, Thinking, parse_thinking
from horde.oai.anthropic.tools import Choice, ToolSet, parse_choice, parse_tool_set
from horde.oai.leniency import CACHE_HINT
from horde.oai.readers import ABSENT, Reader, drop, read_horde, read_stop

NEUTRAL_TOP_K: Final = (0, -1)
SCHEMA_NAME: Final = "output"
CLEARED_THINKING: Final = "clear_thinking_"


def refuse_key(key: str, _value: object, _body: JsonObject) -> object:
    """400 of a key that has no reader."""
    raise extra(key)


def _read_model(key: str, value: object, _body: JsonObject) -> object:
    model = require_string(value, key)
    if not model:
        raise refuse(key, "String should have at least 1 character")
    return model


def _read_messages(key: str, value: object, _body: JsonObject) -> object:
    return require_list(value, key)  # what they hold is judged behind all keys


def _read_max_tokens(key: str, value: object, body: JsonObject) -> object:
    if not is_integer(value):
        raise wrong_type(key, "a valid integer")
    if value < 0:
        raise refuse(key, "Input should be greater than or equal to 0")
    if value == 0 and body.get("stream") is True:
        message = "nothing is generated at 0, so there is nothing to stream"
        raise refuse(key, message, "conflicting_parameters")
    return value


def _read_system(_key: str, value: object, _body: JsonObject) -> object:
    return parse_system(value)


def _read_stream(key: str, value: object, _body: JsonObject) -> object:
    if not isinstance(value, bool):
        raise wrong_type(key, "a valid boolean")
    return value


def _read_share(key: str, value: object, _body: JsonObject) -> object:
    if not is_number(value):
        raise wrong_type(key, "a valid number")
    if not 0 <= value <= 1:
        raise refuse(key, "Input should be between 0 and 1")
    return value


def _read_top_k(key: str, value: object, _body: JsonObject) -> object:
    if not is_integer(value):
        raise wrong_type(key, "a valid integer")
    if value not in NEUTRAL_TOP_K:
        raise unsupported(key, "only 0, which changes nothing, is accepted: the horde sets its own")
    return ABSENT


def _read_stop_sequences(key: str, value: object, body: JsonObject) -> object:
    for index, text in enumerate(require_list(value, key)):
        if not require_string(text, f"{key}.{index}").strip():
            raise refuse(f"{key}.{index}", "each stop sequence must hold more than blanks")
    return read_stop(key, value, body)


def _read_tools(_key: str, value: object, _body: JsonObject) -> object:
    return parse_tool_set(value, is_estimate=False)


def _estimate_tools(_key: str, value: object, _body: JsonObject) -> object:
    return parse_tool_set(value, is_estimate=True)


def _read_tool_choice(_key: str, value: object, _body: JsonObject) -> object:
    return parse_choice(value)


def _read_thinking(_key: str, value: object, _body: JsonObject) -> object:
    return parse_thinking(value)


class OutputConfig(TypedDict, total=False):
    """What `output_config` asks for; `hints` are paths of what nobody can follow."""

    effort: str
    format: JsonObject
    hints: list[str]


def _read_output_config(key: str, value: object, body: JsonObject) -> object:
    config = require_object(value, key)
    check_members(config, ("effort", "format", "task_budget"), key)
    read: OutputConfig = {}
    if config.get("effort") is not None:
        read["effort"] = require_one_of(config["effort"], EFFORTS, f"{key}.effort")
    if config.get("format") is not None:
        if body.get("output_format") is not None:
            message = "'output_format' and 'output_config.format' cannot be combined"
            raise refuse("output_format", message, "conflicting_parameters")
        read["format"] = _build_response_format(config["format"], f"{key}.format")
    if config.get("task_budget") is not None:
        require_object(config["task_budget"], f"{key}.task_budget")
        read["hints"] = [f"{key}.task_budget"]
    return read


def _read_output_format(key: str, value: object, _body: JsonObject) -> object:
    return _build_response_format(value, key)


def _build_response_format(value: object, path: str) -> JsonObject:
    output = require_object(value, path)
    check_members(output, ("type", "schema"), path)
    require_one_of(output.get("type"), ("json_schema",), f"{path}.type")
    schema = require_object(output.get("schema"), f"{path}.schema")
    named: JsonObject = {"name": SCHEMA_NAME, "schema": schema}
    if obeys_strict_rules(schema):
        named["strict"] = True
    return {"type": "json_schema", "json_schema": named}


def _read_context_management(key: str, value: object, _body: JsonObject) -> object:
    """Past thinking is never sent, so that clearing it asks for nothing; the rest is a hint."""
    edits = require_object(value, key).get("edits")
    if edits is None:
        return ABSENT
    kinds = [
        edit.get("type") for edit in require_list(edits, f"{key}.edits") if isinstance(edit, dict)
    ]
    is_asking = any(not str(kind).startswith(CLEARED_THINKING) for kind in kinds)
    return [key] if is_asking else ABSENT


def _read_metadata(key: str, value: object, _body: JsonObject) -> object:
    user_id = require_object(value, key).get("user_id")
    if user_id is not None:
        require_string(user_id, f"{key}.user_id")
    return ABSENT


def _read_service_tier(key: str, value: object, _body: JsonObject) -> object:
    require_string(value, key)
    return ABSENT


def _read_inference_geo(key: str, value: object, _body: JsonObject) -> object:
    if require_string(value, key) != "global":
        raise unsupported(key, "the horde promises no location; only 'global' is accepted")
    return ABSENT


def _refuse_unless_empty(key: str, value: object, _body: JsonObject) -> object:
    if value == []:
        return ABSENT
    raise unsupported(key, "not supported by the horde")


def _refuse_thread(key: str, value: object, _body: JsonObject) -> object:
    """The tool loops of SDKs ask for a conversation that the server holds, and send all messages
    themselves after a refusal with this code.
    """
    if value == []:
        return ABSENT
    message = "the front holds no conversations: send all messages, without a thread"
    raise refuse(key, message, THREADS_UNSUPPORTED)


def _refuse_always(key: str, _value: object, _body: JsonObject) -> object:
    raise unsupported(key, "not supported by the horde")


class ReadKeys(TypedDict, total=False):
    """The keys of a body as their readers give them."""

    model: str
    messages: list[object]
    max_tokens: int
    system: str
    stream: bool
    temperature: float
    top_p: float
    stop_sequences: list[str]
    tools: ToolSet
    tool_choice: Choice
    thinking: Thinking
    output_config: OutputConfig
    output_format: JsonObject
    context_management: list[str]
    horde: JsonObject


READERS: Final[Mapping[str, Reader]] = MappingProxyType(
    {
        "model": _read_model,
        "messages": _read_messages,
        "max_tokens": _read_max_tokens,
        "system": _read_system,
        "stream": _read_stream,
        "temperature": _read_share,
        "top_p": _read_share,
        "top_k": _read_top_k,
        "stop_sequences": _read_stop_sequences,
        "tools": _read_tools,
        "tool_choice": _read_tool_choice,
        "thinking": _read_thinking,
        "output_config": _read_output_config,
        "output_format": _read_output_format,
        "metadata": _read_metadata,
        CACHE_HINT: drop,
        "service_tier": _read_service_tier,
        "speed": drop,
        "inference_geo": _read_inference_geo,
        "container": _refuse_always,
        "mcp_servers": _refuse_unless_empty,
        "context_management": _read_context_management,
        **dict.fromkeys(
            (
                *("diagnostics", "user_profile_id", "workspace_id"),
                *("betas", "anthropic_beta", "anthropic_version"),
            ),
            drop,
        ),
        "thread": _refuse_thread,
        **dict.fromkeys(("compaction", "fallbacks"), _refuse_unless_empty),
        "horde": read_horde,
    }
)
"""A reader for each key that a message may have; a row of the reference for each."""

ESTIMATE_READERS: Final[Mapping[str, Reader]] = MappingProxyType(
    {
        **READERS,
        **dict.fromkeys(("max_tokens", "stream", "temperature", "top_p", "top_k"), drop),
        "tools": _estimate_tools,
    }
)
"""Those of a count, which reads no key that concerns the reply alone."""
