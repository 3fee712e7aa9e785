# SPDX-License-Identifier: AGPL-3.0-or-later
"""The servers that people run, and how they differ where OpenAI's routes leave off.

What is declared without options is what a server documents for all of its models and settings.
docs/how-to/serve-jobs-with-the-bridge.md has the same table for operators.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote

from horde_sdk.generation_parameters.text.chat_policy import ChatFeature, ChatGuarantee

from horde.bridge.backend import Backend
from horde.bridge.config import Declared
from horde.json_text import JsonObject


class BackendKind(StrEnum):
    """Programs whose extra routes and sampling keys are known."""

    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"
    SGLANG = "sglang"
    TGI = "tgi"
    OLLAMA = "ollama"
    KOBOLDCPP = "koboldcpp"
    TABBY_API = "tabbyapi"
    LM_STUDIO = "lm studio"
    TENSORRT_LLM = "tensorrt-llm"
    OTHER = "other"


_PENALTIES: frozenset[Declared] = frozenset(
    {ChatFeature.PRESENCE_PENALTY, ChatFeature.FREQUENCY_PENALTY}
)
_FORMATS: frozenset[Declared] = frozenset({ChatFeature.JSON_OBJECT, ChatFeature.JSON_SCHEMA})
_SEED: frozenset[Declared] = frozenset({ChatFeature.SEED})
_REFUSES: frozenset[Declared] = frozenset({ChatGuarantee.PROMPT_OVERFLOW_REFUSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What is known of a kind of server.

    ``chat_sampling`` spells the payload's sampling keys beyond OpenAI's, ``text_sampling`` those
    of text jobs. ``takes_neutral`` when it knows them all, so that a neutral value, which stands
    against a default of its own, may always be sent.
    """

    owner: str = ""
    """``owned_by`` of its models."""
    supports: frozenset[Declared] = frozenset()
    chat_sampling: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: _spell("repetition_penalty")
    )
    text_sampling: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    takes_neutral: bool = False


def _spell(*repetition_penalty: str) -> Mapping[str, tuple[str, ...]]:
    return {"top_k": ("top_k",), "min_p": ("min_p",), "rep_pen": repetition_penalty}


DIALECTS: Mapping[BackendKind, Dialect] = {
    BackendKind.LLAMA_CPP: Dialect(
        owner="llamacpp",
        supports=_SEED | _PENALTIES | _FORMATS | _REFUSES,
        chat_sampling=_spell("repeat_penalty"),
        text_sampling={
            "typical": ("typical_p",),
            "rep_pen_range": ("repeat_last_n",),
            "dynatemp_range": ("dynatemp_range",),
            "dynatemp_exponent": ("dynatemp_exponent",),
        },
        takes_neutral=True,
    ),
    # Its tool calls depend on how it was started, which it does not report.
    BackendKind.VLLM: Dialect(
        owner="vllm", supports=_SEED | _PENALTIES | _FORMATS | _REFUSES, takes_neutral=True
    ),
    BackendKind.SGLANG: Dialect(owner="sglang", supports=_PENALTIES | _FORMATS | _REFUSES),
    BackendKind.TGI: Dialect(supports=_SEED | _REFUSES | {ChatFeature.FREQUENCY_PENALTY}),
    BackendKind.OLLAMA: Dialect(owner="library", supports=_SEED | _PENALTIES | _FORMATS),
    BackendKind.KOBOLDCPP: Dialect(
        owner="koboldcpp",
        supports=_SEED,
        chat_sampling=_spell("rep_pen"),
        text_sampling={"typical": ("typical",), "rep_pen_range": ("rep_pen_range",)},
        takes_neutral=True,
    ),
    BackendKind.TABBY_API: Dialect(owner="tabbyAPI", supports=_PENALTIES),
    BackendKind.LM_STUDIO: Dialect(
        owner="organization_owner",
        supports=_SEED | _PENALTIES | {ChatFeature.JSON_SCHEMA},
        chat_sampling=_spell("repeat_penalty"),
    ),
    BackendKind.TENSORRT_LLM: Dialect(owner="tensorrt_llm", supports=_SEED | _PENALTIES),
    BackendKind.OTHER: Dialect(chat_sampling=_spell("repeat_penalty", "repetition_penalty")),
}
_KINDS_BY_OWNER = {dialect.owner: kind for kind, dialect in DIALECTS.items() if dialect.owner}
# Where a model's entry may tell its context: vLLM and SGLang, then hosted services.
_CONTEXT_KEYS = ("max_model_len", "context_length", "context_window", "max_context_length")


_Told = tuple[int | None, frozenset[Declared]]
"""What a server tells of itself: its context in tokens, and what else it supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReport:
    """What a backend says of itself. ``context_tokens`` is that of one request."""

    kind: BackendKind
    context_tokens: int | None
    supports: frozenset[Declared]


def read_report(backend: Backend, entry: JsonObject, model: str) -> BackendReport:
    """Recognise a backend by its model's entry, and ask it what that kind can tell.

    Raises ``BackendUnavailable`` and ``BackendRefusal``, also while the model still loads.
    """
    kind = recognise_kind(entry)
    told = _ASK[kind](backend, model) if kind in _ASK else (None, frozenset[Declared]())
    if told is None:
        kind, told = BackendKind.OTHER, (None, frozenset())
    stated = [_read_tokens(entry.get(key)) for key in _CONTEXT_KEYS]
    return BackendReport(
        kind=kind,
        context_tokens=next((tokens for tokens in (told[0], *stated) if tokens), None),
        supports=DIALECTS[kind].supports | told[1],
    )


def recognise_kind(entry: JsonObject) -> BackendKind:
    """By whom the list of models names as the model's owner: TGI names the model itself."""
    owner = entry.get("owned_by")
    if not isinstance(owner, str):
        return BackendKind.OTHER
    if owner and owner == entry.get("id"):
        return BackendKind.TGI
    return _KINDS_BY_OWNER.get(owner, BackendKind.OTHER)


def _ask_llama_cpp(backend: Backend, model: str) -> _Told | None:
    """Tools when the model's template renders them, since the bridge's own schemas enforce the
    choice and the format; vision when a projector for images is loaded.
    """
    props = backend.find("/props")
    if not props:
        return None
    found: frozenset[Declared] = frozenset()
    capabilities = _get(props, "chat_template_caps")
    if _get(capabilities, "supports_tools") and _get(capabilities, "supports_tool_calls"):
        found |= {
            ChatFeature.TOOLS,
            ChatGuarantee.TOOL_CHOICE_ENFORCED,
            ChatFeature.TOOLS_WITH_RESPONSE_FORMAT,
        }
    if _get(props, "modalities", "vision") is True:
        found |= {ChatFeature.VISION}
    # `meta.n_ctx` of the list of models may be the sum of all slots.
    return _read_tokens(_get(props, "default_generation_settings", "n_ctx")), found


def _ask_ollama(backend: Backend, model: str) -> _Told | None:
    """The context it runs the model with, should it be loaded or have one of its own: what the
    model was trained for says nothing. A template with tools renders them and enforces nothing.
    """
    shown = backend.find("/api/show", {"model": model})
    capabilities = _get(shown, "capabilities")
    found: frozenset[Declared] = frozenset(
        ChatFeature(name)
        for name in ("tools", "vision")
        if isinstance(capabilities, list) and name in capabilities
    )
    running = _get(backend.find("/api/ps"), "models")
    loaded = (
        _read_tokens(_get(entry, "context_length"))
        for entry in (running if isinstance(running, list) else ())
        if model in (_get(entry, "name"), _get(entry, "model"))
    )
    own = re.search(r"^num_ctx\s+(\d{1,9})$", str(_get(shown, "parameters")), re.MULTILINE)
    return next((tokens for tokens in loaded if tokens), int(own[1]) if own else None), found


def _ask_tgi(backend: Backend, model: str) -> _Told | None:
    context = _read_tokens(_get(backend.find("/info"), "max_total_tokens"))
    return (context, frozenset()) if context else None


def _ask_koboldcpp(backend: Backend, model: str) -> _Told | None:
    answer = backend.find("/api/extra/true_max_context_length")
    return _read_tokens(_get(answer, "value")), frozenset()


def _ask_tabby_api(backend: Backend, model: str) -> _Told | None:
    answer = backend.find("/v1/model")
    return _read_tokens(_get(answer, "parameters", "max_seq_len")), frozenset()


def _ask_lm_studio(backend: Backend, model: str) -> _Told | None:
    answer = backend.find(f"/api/v0/models/{quote(model)}")
    return _read_tokens(_get(answer, "loaded_context_length")), frozenset()


_ASK: Mapping[BackendKind, Callable[[Backend, str], _Told | None]] = {
    BackendKind.LLAMA_CPP: _ask_llama_cpp,
    BackendKind.OLLAMA: _ask_ollama,
    BackendKind.TGI: _ask_tgi,
    BackendKind.KOBOLDCPP: _ask_koboldcpp,
    BackendKind.TABBY_API: _ask_tabby_api,
    BackendKind.LM_STUDIO: _ask_lm_studio,
}


def _get(value: object, *keys: str) -> Any:
    """A value deep in a JSON object; None where there is no such thing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _read_tokens(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
