# SPDX-License-Identifier: AGPL-3.0-or-later
"""From what a backend supports to what the worker declares, and what that leaves to others."""

from collections.abc import Iterator, Mapping

from horde_sdk.generation_parameters.text.chat_policy import (
    ChatFeature,
    ChatGuarantee,
    ChatWorkerLimits,
)
from horde_sdk.worker.chat_declaration import ChatWorkerDeclaration

from horde.bridge.config import BridgeConfig, Declared, TokenCounting
from horde.bridge.counting import ESTIMATE_MARGIN
from horde.bridge.dialects import BackendKind
from horde.bridge.plan import BackendProfile, choose_transports

# What nothing can be promised without.
_NEEDS: Mapping[Declared, frozenset[Declared]] = {
    ChatGuarantee.TOOL_CHOICE_ENFORCED: frozenset({ChatFeature.TOOLS}),
    ChatGuarantee.SINGLE_TOOL_CALL_ENFORCED: frozenset({ChatFeature.TOOLS}),
    ChatGuarantee.STRUCTURED_OUTPUT_ENFORCED: frozenset({ChatFeature.JSON_SCHEMA}),
    ChatFeature.TOOLS_WITH_RESPONSE_FORMAT: frozenset({ChatFeature.TOOLS, ChatFeature.JSON_SCHEMA}),
}
_NONE: frozenset[Declared] = frozenset()
# What the bridge sees to by itself: it submits one call where one is wanted, and checks schemas.
_KEPT_BY_THE_BRIDGE: Mapping[Declared, Declared] = {
    ChatFeature.TOOLS: ChatGuarantee.SINGLE_TOOL_CALL_ENFORCED,
    ChatFeature.JSON_SCHEMA: ChatGuarantee.STRUCTURED_OUTPUT_ENFORCED,
}
_CHATS: Mapping[Declared, str] = {
    ChatGuarantee.PROMPT_OVERFLOW_REFUSED: "all strict ones, which is the default",
    ChatFeature.SEED: "with a seed",
    ChatFeature.REASONING_EFFORT: "with reasoning_effort",
    ChatFeature.PRESENCE_PENALTY: "with a presence_penalty",
    ChatFeature.FREQUENCY_PENALTY: "with a frequency_penalty",
    ChatFeature.VISION: "with images",
    ChatFeature.TOOLS: "with tools",
    ChatFeature.JSON_OBJECT: "with response_format json_object",
    ChatFeature.JSON_SCHEMA: "with response_format json_schema",
    ChatFeature.TOOLS_WITH_RESPONSE_FORMAT: "with tools and a response_format",
    ChatGuarantee.TOOL_CHOICE_ENFORCED: "with tool_choice required or a function, if strict",
    ChatGuarantee.STRUCTURED_OUTPUT_ENFORCED: "with a strict json_schema, if strict",
}
# Why the probe of a server did not find what it can find there.
_UNSEEN: Mapping[tuple[BackendKind, Declared], str] = {
    (BackendKind.LLAMA_CPP, ChatFeature.TOOLS): "the model's template renders no tools",
    (BackendKind.LLAMA_CPP, ChatFeature.VISION): "no projector for images is loaded",
    (BackendKind.OLLAMA, ChatFeature.TOOLS): "the model's template renders no tools",
    (BackendKind.OLLAMA, ChatFeature.VISION): "the model does not see",
}
_CUTS_PROMPTS = (BackendKind.OLLAMA, BackendKind.KOBOLDCPP, BackendKind.LM_STUDIO)


def build_declaration(
    profile: BackendProfile, config: BridgeConfig, *, model: str, max_length: int
) -> ChatWorkerDeclaration:
    """Turn what the backend supports into what the worker declares."""
    if not config.serves_chat:
        return ChatWorkerDeclaration(chat_jobs=False)
    features = choose_features(profile.supports, config.exclude)
    return ChatWorkerDeclaration(
        prompt_jobs=config.serves_text,
        model_id=model,
        features=features,
        limits=ChatWorkerLimits(
            max_context_length=compute_chat_context(profile),
            max_length=max_length,
            tools_max_temperature=config.tools_max_temperature,
        ),
        image_transports=choose_transports(features, config.image_transports),
    )


def choose_features(
    supports: frozenset[Declared], exclude: frozenset[Declared]
) -> frozenset[Declared]:
    """What is supported with all that it stands on and that the bridge adds, without what is
    excluded and what stands on that.
    """
    wanted = set(supports)
    for value in supports:
        wanted |= _NEEDS.get(value, _NONE)
    wanted |= {kept for value, kept in _KEPT_BY_THE_BRIDGE.items() if value in wanted}
    left = wanted - exclude
    return frozenset(value for value in left if _NEEDS.get(value, _NONE) <= left)


def compute_chat_context(profile: BackendProfile) -> int:
    """The context that is declared for chats, in tokens: less than there is where the bridge only
    estimates, so that a prompt which the horde takes to fit does.
    """
    if profile.token_counting is TokenCounting.ESTIMATE:
        return int(profile.context_tokens / ESTIMATE_MARGIN)
    return profile.context_tokens


def describe_refusing(profile: BackendProfile) -> str:
    """Who sees to it that a long prompt is refused, in words for the log."""
    if ChatGuarantee.PROMPT_OVERFLOW_REFUSED not in profile.supports:
        return "may be cut"
    return {
        TokenCounting.OFF: "refused by the backend",
        TokenCounting.BACKEND: "counted by its tokeniser and refused",
        TokenCounting.ESTIMATE: "estimated and refused",
    }[profile.token_counting]


def explain_gaps(
    profile: BackendProfile, config: BridgeConfig, declaration: ChatWorkerDeclaration
) -> Iterator[dict[str, str]]:
    """For each value that is not declared: the chats that go to other workers, why, and the
    remedy. What only misses something else that is named is left out.
    """
    if not config.serves_chat:
        return
    for value, chats in _CHATS.items():
        if value not in declaration.features and _NEEDS.get(value, _NONE) <= declaration.features:
            why, remedy = _explain_gap(value, profile, config)
            yield {"value": value.value, "chats": chats, "why": why, "remedy": remedy}


def _explain_gap(value: Declared, profile: BackendProfile, config: BridgeConfig) -> tuple[str, str]:
    server = "this server" if profile.kind is BackendKind.OTHER else profile.kind.value
    if value in config.exclude:
        return f"--exclude {value.value}", "none needed"
    remedy = f"--supports {value.value}, if the backend does it"
    if value is ChatGuarantee.PROMPT_OVERFLOW_REFUSED:
        cuts = profile.kind in _CUTS_PROMPTS
        why = "cuts long prompts silently" if cuts else "may cut long prompts silently"
        return f"{server} {why}", f"--count-tokens estimate; or {remedy}"
    return _UNSEEN.get((profile.kind, value), f"{server} does not say that it does it"), remedy
