# SPDX-License-Identifier: AGPL-3.0-or-later
"""The body of a text completion: one native text request for each prompt.

The rules are those of chat completions. Samplers are honoured here, since text requests have keys
for them. Source: docs/reference/front_completions.md, "Request".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Self, TypedDict, cast

from horde_sdk.generation_parameters.text.chat_limits import MIN_CHAT_MAX_TOKENS

from horde.chat.parameters import check_range, is_integer, is_number
from horde.chat_contract import (
    ChatAvailabilityMode,
    ChatHordeOptions,
    ChatRequestRefused,
    parse_horde_options,
)
from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused, build_contract_refusal
from horde.oai.readers import (
    ABSENT,
    IGNORED_TYPES,
    Reader,
    read_absent_at,
    read_ignored,
    read_keys,
    read_model,
    read_models,
    read_sampling,
    read_stop,
    read_stream,
    read_stream_options,
    read_token_limit,
    require_model,
    unsupported,
    unsupported_value,
    wrong_type,
)

MAX_SAMPLE_COUNT: Final = 20  # of one prompt, as natively
MAX_CHOICE_COUNT: Final = 64
CONTEXT_FITS: Final = ("ignore", "reject", "grow")
DEFAULT_CONTEXT_FIT: Final = "grow"  # no prompt is cut without a word
# Options that text requests have no counterpart of.
_CHAT_OPTIONS: Final = frozenset(
    {"max_kudos", "operation_key", "conformance", "openai_guards", "include_reasoning"}
)


@dataclass(frozen=True, slots=True)
class _Sampler:
    """What a sampler is called natively, and the native range."""

    native: str
    least: float
    most: float
    is_whole: bool = False


_SAMPLERS: Final[Mapping[str, _Sampler]] = MappingProxyType(
    {
        "top_k": _Sampler("top_k", -1, 200, is_whole=True),
        "min_p": _Sampler("min_p", 0, 1),
        "top_a": _Sampler("top_a", 0, 1),
        **dict.fromkeys(("tfs", "tfs_z"), _Sampler("tfs", 0, 1)),
        **dict.fromkeys(("typical", "typical_p"), _Sampler("typical", 0, 1)),
        **dict.fromkeys(
            ("rep_pen", "repetition_penalty", "repeat_penalty"), _Sampler("rep_pen", 1, 3)
        ),
    }
)
_NATIVE_PARAMS: Final[Mapping[str, str]] = MappingProxyType(
    {"temperature": "temperature", "top_p": "top_p", "stop": "stop_sequence"}
)
_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "messages": "prompt",
        "max_length": "max_tokens",
        "max_context_length": "horde.max_context_length",
        "stop_sequence": "stop",
        "context_fit": "horde.context_fit",
        "workers": "horde.only",
    }
)


class _Read(TypedDict, total=False):
    """The keys of a body as their readers give them, but for the samplers."""

    model: str
    models: list[str]
    prompt: list[str]
    max_tokens: int
    stop: list[str]
    n: int
    echo: bool
    stream: bool
    horde: tuple[JsonObject, ChatHordeOptions]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCompletionRequest:
    """A validated body. `native_body` is what all of its native requests share; each has one of the
    prompts.
    """

    prompts: tuple[str, ...]
    models: tuple[str, ...]
    native_body: JsonObject
    sample_count: int
    max_tokens: int
    stops: tuple[str, ...]
    echo: bool
    stream: bool
    include_usage: bool
    is_fail_fast: bool
    is_dry_run: bool
    is_list: bool  # of models
    names: Mapping[str, str] = field(default_factory=dict)  # native to the client's own

    def locate(self, param: str) -> str:
        """The client's own name of what the horde calls a parameter."""
        return self.names.get(param, _NAMES.get(param, param))

    @classmethod
    def parse(cls, body: object, max_prompts: int) -> Self:
        """Validate a decoded body. Raises RequestRefused for the first key at fault."""
        try:
            keys = read_keys(body, _READERS, _refuse_key)
            read = cast(_Read, keys)
            assert isinstance(body, dict)
            require_model(body)
            prompts = _require_prompts(read, max_prompts)
            options, horde = read.get("horde", _NO_OPTIONS)
        except ChatRequestRefused as refused:
            raise build_contract_refusal(refused) from None
        sample_count = read.get("n", 1)
        _check_counts(body, len(prompts), sample_count)
        stream = bool(read.get("stream"))
        if horde.dry_run and stream:
            message = "A dry run has nothing to stream: send 'horde.dry_run' without 'stream'."
            raise RequestRefused("conflicting_parameters", message, "horde.dry_run")
        max_tokens = read.get("max_tokens", MIN_CHAT_MAX_TOKENS)
        models = (read["model"],) if "model" in read else tuple(read["models"])
        params: JsonObject = {"n": sample_count, "max_length": max_tokens}
        params |= _pick_params(body, keys)
        if horde.max_context_length is not None:
            params["max_context_length"] = horde.max_context_length
        return cls(
            prompts=prompts,
            models=models,
            native_body={"models": list(models), "params": params, **options},
            sample_count=sample_count,
            max_tokens=max_tokens,
            stops=tuple(read.get("stop", ())),
            echo=bool(read.get("echo")),
            stream=stream,
            include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            is_fail_fast=horde.availability_mode is ChatAvailabilityMode.FAIL_FAST,
            is_dry_run=horde.dry_run,
            is_list="models" in read,
            names={
                sampler.native: key
                for key, sampler in _SAMPLERS.items()
                if body.get(key) is not None
            },
        )


def _require_prompts(read: _Read, max_prompts: int) -> tuple[str, ...]:
    prompts = read.get("prompt")
    if prompts is None:
        raise RequestRefused(
            "missing_required_parameter", "Missing required parameter: 'prompt'.", "prompt"
        )
    if len(prompts) > max_prompts:
        raise unsupported_value("prompt", f"may hold at most {max_prompts} texts")
    return tuple(prompts)


def _check_counts(body: JsonObject, prompt_count: int, sample_count: int) -> None:
    if prompt_count * sample_count > MAX_CHOICE_COUNT:
        raise unsupported_value(
            "n", f"times the number of prompts may be at most {MAX_CHOICE_COUNT}"
        )
    best_of = body.get("best_of")
    if best_of is not None and best_of != sample_count:
        raise unsupported_value("best_of", "has to equal 'n': the horde returns all that it writes")


def _pick_params(body: JsonObject, read: JsonObject) -> JsonObject:
    """The native parameters of the sampling keys that were sent; the worker's own defaults stand
    for the rest.
    """
    params = {native: read[key] for key, native in _NATIVE_PARAMS.items() if key in read}
    for key, sampler in _SAMPLERS.items():
        if key not in read:
            continue
        if params.setdefault(sampler.native, read[key]) != read[key]:
            names = [name for name in body if _SAMPLERS.get(name) == sampler]
            quoted = " and ".join(f"'{name}'" for name in names)
            message = (
                f"{quoted} are one parameter and have to be equal when they are sent together."
            )
            raise RequestRefused("conflicting_parameters", message, names[-1])
    return params


def _refuse_key(key: str, _value: object, _body: JsonObject) -> object:
    raise unsupported(key)


def _refuse_seed(key: str) -> RequestRefused:
    return unsupported(key, "text requests take no seed. Leave it out")


def _read_prompt(key: str, value: object, _body: JsonObject) -> object:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise wrong_type(key, "a string or an array of strings")
    if any(is_integer(text) or isinstance(text, list) for text in texts):
        raise unsupported_value(
            key, "has to be text: no tokenizer is known here that would read token ids"
        )
    if not all(isinstance(text, str) for text in texts):
        raise wrong_type(key, "a string or an array of strings")
    if not texts or "" in texts:
        raise RequestRefused("invalid_value", "Invalid value: 'prompt' has to hold some text.", key)
    return texts


def _read_count(key: str, value: object, _body: JsonObject) -> object:
    if not is_integer(value):
        raise wrong_type(key, "an integer")
    check_range(key, value, 1, MAX_SAMPLE_COUNT, is_whole=True)
    return value


def _read_echo(key: str, value: object, _body: JsonObject) -> object:
    if not isinstance(value, bool):
        raise wrong_type(key, "a boolean")
    return value


def _read_best_of(key: str, value: object, _body: JsonObject) -> object:
    if not is_integer(value):
        raise wrong_type(key, "an integer")
    return ABSENT  # compared with `n` once that is read


def _read_sampler(key: str, value: object, _body: JsonObject) -> object:
    sampler = _SAMPLERS[key]
    if sampler.is_whole and not is_integer(value):
        raise wrong_type(key, "an integer")
    if not is_number(value):
        raise wrong_type(key, "a number")
    check_range(key, value, sampler.least, sampler.most, is_whole=sampler.is_whole)
    return 0 if key == "top_k" and value == -1 else value


def _read_zero(key: str, value: object, _body: JsonObject) -> object:
    if is_number(value) and value == 0:
        return ABSENT
    raise unsupported(key, "text requests have no such parameter. Leave it out")


_NO_OPTIONS: Final[tuple[JsonObject, ChatHordeOptions]] = (
    {"context_fit": DEFAULT_CONTEXT_FIT},
    parse_horde_options(None),
)


def _read_horde(key: str, value: object, _body: JsonObject) -> object:
    """The native keys, and the options of which they were made."""
    if not isinstance(value, dict):
        raise wrong_type(key, "an object")
    for name, member in value.items():
        if name in _CHAT_OPTIONS and member is not None:
            raise unsupported(f"{key}.{name}", "text requests have no such option. Leave it out")
    fit = value.get("context_fit")
    if fit is None:
        fit = DEFAULT_CONTEXT_FIT
    if fit not in CONTEXT_FITS:
        path = f"{key}.context_fit"
        message = f"Invalid value: '{path}' has to be one of {', '.join(CONTEXT_FITS)}."
        raise RequestRefused("invalid_value", message, path)
    options = parse_horde_options(
        {name: member for name, member in value.items() if name != "context_fit"}
    )
    native: JsonObject = {
        "context_fit": fit,
        "trusted_workers": options.trusted_workers,
        "validated_backends": options.validated_backends,
        "slow_workers": options.slow_workers,
        "dry_run": options.dry_run,
    }
    if workers := options.only or options.ignore:
        native |= {"workers": workers, "worker_blacklist": options.ignore is not None}
    return native, options


_READERS: Final[Mapping[str, Reader]] = MappingProxyType(
    {
        "model": read_model,
        "models": read_models,
        "prompt": _read_prompt,
        "max_tokens": read_token_limit,
        "temperature": read_sampling,
        "top_p": read_sampling,
        "stop": read_stop,
        "n": _read_count,
        "best_of": _read_best_of,
        "echo": _read_echo,
        "stream": read_stream,
        "stream_options": read_stream_options,
        "logprobs": read_absent_at(False, unsupported),
        "suffix": read_absent_at("", unsupported),
        "logit_bias": read_absent_at({}, unsupported),
        **dict.fromkeys(("frequency_penalty", "presence_penalty"), _read_zero),
        "seed": read_absent_at(ABSENT, _refuse_seed),
        **{
            key: read_ignored
            for key in ("user", "metadata", "store", "service_tier")
            if key in IGNORED_TYPES
        },
        **dict.fromkeys(_SAMPLERS, _read_sampler),
        "horde": _read_horde,
    }
)
