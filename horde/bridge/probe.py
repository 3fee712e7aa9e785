# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the backend does, found out by asking it, and the declaration that follows.

The horde routes by declarations, so a promise nobody keeps becomes a client's broken reply. The
probe reports what it can see; the operator adds what it cannot (``--supports``) and withholds what
should not be served (``--exclude``).
"""

from dataclasses import dataclass

from horde_sdk.generation_parameters.text.chat_policy import (
    ChatFeature,
    ChatGuarantee,
    ChatWorkerLimits,
)
from horde_sdk.worker.chat_declaration import (
    ChatBackendFacts,
    ChatImageTransport,
    ChatToolStrategy,
    ChatWorkerDeclaration,
    declare_from_backend,
)

from horde.bridge.backend import Backend, BackendKind, JsonObject
from horde.bridge.config import DEFAULT_MAX_LENGTH_TOKENS, BridgeConfig, Declared


class ProbeError(Exception):
    """The backend answers, but a fact the bridge needs is missing; the sentence says which option
    supplies it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendProfile:
    """A backend as probed. ``supports`` holds features and guarantees seen by the probe or named by
    the operator.
    """

    kind: BackendKind
    backend_model: str
    context_tokens: int
    supports: frozenset[Declared]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """What the bridge announces, and what it holds its jobs against."""

    profile: BackendProfile
    model: str
    max_length: int
    declaration: ChatWorkerDeclaration

    def build_pop_body(self, config: BridgeConfig) -> JsonObject:
        """The body of every pop. The text limits and the chat limits are the same numbers."""
        return {
            "name": config.worker_name,
            "models": [self.model],
            "bridge_agent": config.bridge_agent,
            "threads": config.threads,
            "amount": 1,
            "max_length": self.max_length,
            "max_context_length": self.profile.context_tokens,
            **self.declaration.to_pop_fields(),
        }


# llama.cpp applies seed and penalties, compiles both JSON formats into grammars, and answers 400 to
# a prompt that does not fit.
LLAMA_CPP_SUPPORTS: frozenset[Declared] = frozenset(
    {
        ChatFeature.SEED,
        ChatFeature.PRESENCE_PENALTY,
        ChatFeature.FREQUENCY_PENALTY,
        ChatFeature.JSON_OBJECT,
        ChatFeature.JSON_SCHEMA,
        ChatGuarantee.PROMPT_OVERFLOW_REFUSED,
    }
)
# Of vLLM the same is documented. Its tool calls depend on how it was started, which it does not
# report.
VLLM_SUPPORTS = LLAMA_CPP_SUPPORTS


def build_serving_plan(backend: Backend, config: BridgeConfig) -> ServingPlan:
    """Probe the backend and decide what to announce.

    Raises ``ProbeError`` when the context length or the model stays unknown, and the errors of
    ``Backend``.
    """
    profile = probe_backend(backend, config)
    max_length = config.max_length or min(
        DEFAULT_MAX_LENGTH_TOKENS, max(profile.context_tokens // 2, 1)
    )
    if max_length >= profile.context_tokens:
        raise ProbeError(
            f"max-length {max_length} leaves no room for a prompt in {profile.context_tokens}"
            " tokens of context."
        )
    model = config.model or profile.backend_model
    return ServingPlan(
        profile=profile,
        model=model,
        max_length=max_length,
        declaration=build_declaration(profile, config, model=model, max_length=max_length),
    )


def probe_backend(backend: Backend, config: BridgeConfig) -> BackendProfile:
    """Ask the backend what it is. Raises as ``build_serving_plan``."""
    models = backend.list_models()
    entry = _choose_model(models, config.backend_model)
    props = backend.find_props() or {}
    kind = _recognise_kind(entry, props)
    supports: frozenset[Declared] = config.supports
    if kind is BackendKind.LLAMA_CPP:
        supports |= LLAMA_CPP_SUPPORTS | _read_tool_support(props) | _read_vision(props)
    elif kind is BackendKind.VLLM:
        supports |= VLLM_SUPPORTS
    return BackendProfile(
        kind=kind,
        backend_model=str(config.backend_model or entry["id"]),
        context_tokens=_require_context_tokens(
            _read_context_tokens(entry, props), config.max_context_length
        ),
        supports=supports,
    )


def build_declaration(
    profile: BackendProfile, config: BridgeConfig, *, model: str, max_length: int
) -> ChatWorkerDeclaration:
    """Turn what the backend supports into what the worker declares."""
    if not config.serves_chat:
        return ChatWorkerDeclaration(chat_jobs=False)
    limits = ChatWorkerLimits(
        max_context_length=profile.context_tokens,
        max_length=max_length,
        tools_max_temperature=config.tools_max_temperature,
    )
    return declare_from_backend(
        build_facts(profile.supports, config.image_transports),
        model_id=model,
        limits=limits,
        prompt_jobs=config.serves_text,
        exclude=config.exclude,
    )


def build_facts(
    supports: frozenset[Declared], image_transports: frozenset[ChatImageTransport]
) -> ChatBackendFacts:
    """Put the supported features in the SDK's words.

    ``faults_on_unbuildable_schema`` is always true: the bridge checks each reply against the schema
    by itself, since backends drop keywords silently. A response format beside tools is never
    served.
    """
    strategy = ChatToolStrategy.NONE
    if ChatGuarantee.TOOL_CHOICE_ENFORCED in supports:
        strategy = ChatToolStrategy.GRAMMAR
    elif ChatFeature.TOOLS in supports:
        strategy = ChatToolStrategy.TEMPLATE
    return ChatBackendFacts(
        honours_seed=ChatFeature.SEED in supports,
        applies_presence_penalty=ChatFeature.PRESENCE_PENALTY in supports,
        applies_frequency_penalty=ChatFeature.FREQUENCY_PENALTY in supports,
        renders_tools=strategy is not ChatToolStrategy.NONE,
        tool_strategy=strategy,
        constrains_json_object=ChatFeature.JSON_OBJECT in supports,
        constrains_json_schema=ChatFeature.JSON_SCHEMA in supports,
        faults_on_unbuildable_schema=True,
        refuses_prompt_overflow=ChatGuarantee.PROMPT_OVERFLOW_REFUSED in supports,
        applies_reasoning_effort=ChatFeature.REASONING_EFFORT in supports,
        reads_images=ChatFeature.VISION in supports,
        image_transports=image_transports if ChatFeature.VISION in supports else frozenset(),
    )


def _choose_model(models: list[JsonObject], wanted: str | None) -> JsonObject:
    """The entry of the wanted model, or of the first; an empty one when the backend lists something
    else.
    """
    for entry in models:
        if wanted is None or entry.get("id") == wanted:
            return entry
    if wanted is None:
        raise ProbeError("The backend lists no model; name it with --backend-model.")
    return {"id": wanted}


def _recognise_kind(entry: JsonObject, props: JsonObject) -> BackendKind:
    """koboldcpp has a /props too, without llama.cpp's other routes, so the owner of the model
    decides.
    """
    owner = entry.get("owned_by")
    if owner == "llamacpp" and props:
        return BackendKind.LLAMA_CPP
    return BackendKind.VLLM if owner == "vllm" else BackendKind.OTHER


def _read_tool_support(props: JsonObject) -> frozenset[Declared]:
    """Tools when the model's template renders them; the choice is then enforced by the bridge's own
    schema.
    """
    capabilities = props.get("chat_template_caps")
    if (
        isinstance(capabilities, dict)
        and capabilities.get("supports_tools")
        and capabilities.get("supports_tool_calls")
    ):
        return frozenset({ChatFeature.TOOLS, ChatGuarantee.TOOL_CHOICE_ENFORCED})
    return frozenset()


def _read_vision(props: JsonObject) -> frozenset[Declared]:
    """Vision when llama.cpp has loaded a projector for images."""
    modalities = props.get("modalities")
    return (
        frozenset({ChatFeature.VISION})
        if isinstance(modalities, dict) and modalities.get("vision") is True
        else frozenset()
    )


def _read_context_tokens(entry: JsonObject, props: JsonObject) -> int | None:
    """The context of one slot. ``meta.n_ctx`` of llama.cpp's model list is not read: it may be the
    sum of all slots.
    """
    settings = props.get("default_generation_settings")
    candidates = (
        settings.get("n_ctx") if isinstance(settings, dict) else None,
        entry.get("max_model_len"),
    )
    return next((tokens for tokens in candidates if isinstance(tokens, int) and tokens > 0), None)


def _require_context_tokens(reported: int | None, configured: int | None) -> int:
    """The smaller of what the backend has and what the operator allows."""
    known = [tokens for tokens in (reported, configured) if tokens is not None]
    if not known:
        raise ProbeError(
            "The backend does not report its context length; state it with --max-context-length."
        )
    return min(known)
