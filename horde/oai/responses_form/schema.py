# SPDX-License-Identifier: AGPL-3.0-or-later
"""The body of a response: what of it the horde is asked, what is shown again, and what is refused.

The four rules of the front decide every key. The first key at fault, in the order of the body, is
the one reported; what two keys say together is looked at behind them. Source:
docs/reference/front_responses.md, "Request".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypedDict, cast

from horde_sdk.generation_parameters.text.chat_limits import (
    MAX_CHAT_MAX_TOKENS,
    MIN_CHAT_MAX_TOKENS,
    OPENAI_SAMPLING_RANGES,
)

from horde.chat.parameters import check_range, is_integer
from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused
from horde.oai.leniency import CACHE_HINT, drop_keys
from horde.oai.readers import (
    ABSENT,
    NEUTRAL_SAMPLERS,
    Reader,
    drop,
    missing,
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
    read_top_logprobs,
    require_model,
    unsupported,
    unsupported_value,
    wrong_type,
)
from horde.oai.responses_form.items import Input, parse_input
from horde.oai.responses_form.tools import ToolSet, parse_tools

MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_CHARACTERS: Final = 64
MAX_METADATA_VALUE_CHARACTERS: Final = 512
ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
# What they would show cannot occur, or is shown anyway.
INCLUDABLE: Final = frozenset(
    {
        ENCRYPTED_REASONING,
        "web_search_call.results",
        "web_search_call.action.sources",
        "file_search_call.results",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    }
)
SUMMARIES: Final = ("auto", "concise", "detailed")
TRUNCATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"auto": "truncate_oldest", "disabled": "grow"}
)
"""The values of `truncation`, with the horde's `context_fit` that does the same."""
FORMATS: Final = ("text", "json_object", "json_schema")
_REPLACEMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "messages": "use 'input'",
        "max_tokens": "use 'max_output_tokens'",
        "max_completion_tokens": "use 'max_output_tokens'",
        "response_format": "use 'text.format'",
        "reasoning_effort": "use 'reasoning.effort'",
        "functions": "use 'tools'",
        "function_call": "use 'tool_choice'",
        "verbosity": "use 'text.verbosity'",
        "conversation": "use 'previous_response_id', or send the whole conversation as 'input'",
        "prompt": "send 'instructions' and 'input'",
        "include_reasoning": "use 'horde.include_reasoning'",
    }
)


class TextOptions(TypedDict):
    """The form of the text: as the horde is asked for it, and as the object shows it."""

    native: JsonObject | None
    shown: JsonObject


class ReasoningOptions(TypedDict, total=False):
    """How much to think, and what is shown of it."""

    effort: str | None
    summary: str | None


class ReadBody(TypedDict, total=False):
    """The keys of a body as their readers give them, but for those that are forwarded unread."""

    model: str
    models: list[str]
    input: Input
    instructions: str
    previous_response_id: str
    max_output_tokens: int
    tools: ToolSet
    tool_choice: object
    parallel_tool_calls: bool
    text: TextOptions
    reasoning: ReasoningOptions
    truncation: str
    metadata: JsonObject
    stream: bool
    store: bool
    background: bool
    horde: JsonObject


def read_body(body: object) -> ReadBody:
    """The keys of a body that ask for something, each checked at its place. Raises RequestRefused,
    or ChatRequestRefused of the shared validation.
    """
    read = cast(ReadBody, read_keys(body, READERS, _refuse_key))
    assert isinstance(body, dict)
    require_model(body)
    if "previous_response_id" not in read:
        if "input" not in read:
            raise missing("input")
        if not read["input"].raw:
            raise RequestRefused("invalid_value", "Invalid value: 'input' holds no item.", "input")
    return read


def _refuse_key(key: str, _value: object, _body: JsonObject) -> object:
    raise unsupported(key, _REPLACEMENTS.get(key))


# --- readers: the value that counts, or ABSENT
# -------------------------------------------------------------------------


def _read_input(_key: str, value: object, _body: JsonObject) -> object:
    return parse_input(value)


def _read_string(key: str, value: object, _body: JsonObject) -> object:
    if not isinstance(value, str):
        raise wrong_type(key, "a string")
    return value


def _read_instructions(key: str, value: object, body: JsonObject) -> object:
    return _read_string(key, value, body) or ABSENT


def _read_boolean(key: str, value: object, _body: JsonObject) -> object:
    if not isinstance(value, bool):
        raise wrong_type(key, "a boolean")
    return value


def _read_object(key: str, value: object, _body: JsonObject) -> object:
    if not isinstance(value, dict):
        raise wrong_type(key, "an object")
    return ABSENT


def _read_output_limit(key: str, value: object, _body: JsonObject) -> object:
    if not is_integer(value):
        raise wrong_type(key, "an integer")
    check_range(key, value, MIN_CHAT_MAX_TOKENS, MAX_CHAT_MAX_TOKENS, is_whole=True)
    return value


def _read_call_limit(key: str, value: object, _body: JsonObject) -> object:
    """Of calls of OpenAI's own tools, of which there are none."""
    if not is_integer(value):
        raise wrong_type(key, "an integer")
    return value


def _read_tools(_key: str, value: object, _body: JsonObject) -> object:
    return parse_tools(value)


def _read_any(_key: str, value: object, _body: JsonObject) -> object:
    """Judged behind the other keys, together with them."""
    return value


def _read_text(key: str, value: object, _body: JsonObject) -> object:
    """`{format?, verbosity?}`, with the form in the horde's own shape under `native`."""
    members = _require_members(key, value, "format", "verbosity")
    if members.get("verbosity", "medium") != "medium":
        raise unsupported_value(f"{key}.verbosity", "has to be 'medium'")
    shown = members.get("format")
    native = None if shown is None else _read_format(f"{key}.format", shown)
    return {"shown": shown or {"type": "text"}, "native": native}


def _read_format(path: str, value: object) -> JsonObject | None:
    """The horde's `response_format`; None for plain text."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object")
    members = drop_keys(value, CACHE_HINT)
    kind = members.pop("type", None)
    if kind is None:
        raise missing(f"{path}.type")
    if kind not in FORMATS:
        raise unsupported_value(f"{path}.type", f"has to be one of {', '.join(FORMATS)}")
    if kind == "json_schema":
        if "name" not in members:
            message = (
                f"Missing required parameter: '{path}.name'. This API takes the schema flat, as"
                ' {"type": "json_schema", "name": …, "schema": …}.'
            )
            raise RequestRefused("missing_required_parameter", message, f"{path}.name")
        return {"type": kind, "json_schema": members}
    for member in members:
        raise unsupported(f"{path}.{member}")
    return None if kind == "text" else {"type": kind}


def _read_reasoning(key: str, value: object, body: JsonObject) -> object:
    members = _require_members(
        key, value, "effort", "summary", "generate_summary", "context", "mode"
    )
    for name in ("summary", "generate_summary"):
        if name in members and members[name] not in SUMMARIES:
            message = f"Invalid value: '{key}.{name}' has to be one of {', '.join(SUMMARIES)}."
            raise RequestRefused("invalid_value", message, f"{key}.{name}")
    for name, neutral in (("context", "auto"), ("mode", "standard")):
        if members.get(name, neutral) != neutral:
            raise unsupported_value(f"{key}.{name}", f"has to be '{neutral}'")
    if "effort" in members:
        read_reasoning_effort(f"{key}.effort", members["effort"], body)
    return {
        "effort": members.get("effort"),
        "summary": members.get("summary", members.get("generate_summary")),
    }


def _require_members(key: str, value: object, *known: str) -> JsonObject:
    if not isinstance(value, dict):
        raise wrong_type(key, "an object")
    members: JsonObject = drop_keys(value, CACHE_HINT)
    for name in members:
        if name not in known:
            raise unsupported(f"{key}.{name}")
    return members


def _read_include(key: str, value: object, _body: JsonObject) -> object:
    check_include(key, value)
    return ABSENT


def check_include(key: str, value: object) -> None:
    """Refuse what cannot be shown. Raises RequestRefused."""
    if not isinstance(value, list):
        raise wrong_type(key, "an array of strings")
    for index, entry in enumerate(value):
        if not isinstance(entry, str):
            raise wrong_type(f"{key}[{index}]", "a string")
        if entry not in INCLUDABLE:
            raise unsupported_value(
                f"{key}[{index}]", "names something that the horde does not have"
            )


def _read_truncation(key: str, value: object, body: JsonObject) -> object:
    if not isinstance(value, str) or value not in TRUNCATIONS:
        message = f"Invalid value: '{key}' has to be one of {', '.join(TRUNCATIONS)}."
        raise RequestRefused("invalid_value", message, key)
    options = body.get("horde")
    fit = options.get("context_fit") if isinstance(options, dict) else None
    if fit is not None and fit != TRUNCATIONS[value]:
        message = f"'{key}' and 'horde.context_fit' ask for different things; send one of them."
        raise RequestRefused("conflicting_parameters", message, key)
    return value


def _read_metadata(key: str, value: object, _body: JsonObject) -> object:
    if not isinstance(value, dict):
        raise wrong_type(key, "an object")
    if len(value) > MAX_METADATA_PAIRS:
        message = f"Invalid value: '{key}' may hold at most {MAX_METADATA_PAIRS} pairs."
        raise RequestRefused("invalid_value", message, key)
    for name, text in value.items():
        if not isinstance(text, str):
            raise wrong_type(f"{key}.{name}", "a string")
        if len(name) > MAX_METADATA_KEY_CHARACTERS or len(text) > MAX_METADATA_VALUE_CHARACTERS:
            message = (
                f"Invalid value: a key of '{key}' may hold {MAX_METADATA_KEY_CHARACTERS}"
                f" characters, a value {MAX_METADATA_VALUE_CHARACTERS}."
            )
            raise RequestRefused("invalid_value", message, key)
    return value


READERS: Final[Mapping[str, Reader]] = MappingProxyType(
    {
        "model": read_model,
        "models": read_models,
        "input": _read_input,
        "instructions": _read_instructions,
        "previous_response_id": _read_string,
        "max_output_tokens": _read_output_limit,
        "max_tool_calls": _read_call_limit,
        **dict.fromkeys(OPENAI_SAMPLING_RANGES, read_sampling),
        "seed": read_seed,
        "stop": read_stop,
        "stream": read_stream,
        "stream_options": read_stream_options,
        "tools": _read_tools,
        "tool_choice": _read_any,
        "parallel_tool_calls": _read_boolean,
        "text": _read_text,
        "reasoning": _read_reasoning,
        "include": _read_include,
        "truncation": _read_truncation,
        "metadata": _read_metadata,
        "store": _read_boolean,
        "background": _read_boolean,
        **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), _read_string),
        **dict.fromkeys(
            ("prompt_cache_retention", "prompt_cache_options", "service_tier"), read_ignored
        ),
        "client_metadata": _read_object,
        "horde": read_horde,
        CACHE_HINT: drop,
        "n": read_choice_count,
        **dict.fromkeys(NEUTRAL_SAMPLERS, read_neutral_sampler),
        "logprobs": read_logprobs,
        "top_logprobs": read_top_logprobs,
        "logit_bias": read_absent_at({}, unsupported),
        "context_management": read_absent_at([], unsupported),
        **dict.fromkeys(
            ("moderation", "background_options", "access_programs", "image"),
            read_absent_at({}, unsupported),
        ),
    }
)
