# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the backend does, found out by asking it.

The horde routes by declarations, so a promise nobody keeps becomes a client's broken reply. The
probe reports what it can see; the operator adds what it cannot (``--supports``) and withholds what
should not be served (``--exclude``).
"""

from dataclasses import replace

from horde_sdk.generation_parameters.text.chat_policy import ChatGuarantee

from horde.bridge.backend import Backend, NoSuchRoute
from horde.bridge.config import DEFAULT_MAX_LENGTH_TOKENS, BridgeConfig, TokenCounting
from horde.bridge.counting import counts_texts
from horde.bridge.declaration import build_declaration, compute_chat_context
from horde.bridge.dialects import BackendKind, read_report
from horde.bridge.plan import BackendProfile, ServingPlan
from horde.bridge.refusals import BackendRefusal, BackendUnavailable
from horde.json_text import JsonObject
from horde.logger import get_logger

FRONT_OWNER = "aihorde"  # of the models that the OpenAI-compatible front of a horde lists
_KEY_STATUSES = (401, 403)

logger = get_logger(__name__)


class ProbeError(Exception):
    """The backend answers, but a fact the bridge needs is missing.

    The sentence says which option supplies it.
    """


class WrongOption(ProbeError):
    """What the operator said of the backend's address or key is wrong."""


def build_serving_plan(backend: Backend, config: BridgeConfig) -> ServingPlan:
    """Probe the backend and decide what to announce.

    Raises ``ProbeError`` when the context length stays unknown, ``WrongOption`` when the address or
    the key is wrong, and the errors of ``Backend`` while the backend is not ready.
    """
    try:
        profile = probe_backend(backend, config)
    except BackendRefusal as refusal:
        if refusal.status not in _KEY_STATUSES:
            raise
        hint = "refuses the key of" if backend.secrets else "wants a key, given by"
        raise WrongOption(
            f"The backend {hint} --backend-key or HORDE_BRIDGE_BACKEND_KEY ({refusal.status})."
        ) from refusal
    room = compute_chat_context(profile)
    max_length = config.max_length or min(DEFAULT_MAX_LENGTH_TOKENS, max(room // 2, 1))
    if max_length >= room:
        raise ProbeError(
            f"max-length {max_length} leaves no room for a prompt in {room} tokens of context."
        )
    model = config.model or profile.backend_model
    return ServingPlan(
        profile=profile,
        model=model,
        max_length=max_length,
        declaration=build_declaration(profile, config, model=model, max_length=max_length),
    )


def probe_backend(backend: Backend, config: BridgeConfig) -> BackendProfile:
    """Ask the backend what it is. Raises ``ProbeError`` and as ``Backend`` does."""
    entry = _choose_model(_list_models(backend, config.backend_model), config.backend_model)
    if entry.get("owned_by") == FRONT_OWNER:
        raise WrongOption(
            "--backend is the address of a horde's front, which would ask this worker itself;"
            " a backend with a model of its own is needed."
        )
    model = str(config.backend_model or entry["id"])
    facts = read_report(backend, entry, model)
    profile = BackendProfile(
        kind=facts.kind,
        backend_model=model,
        context_tokens=_require_context_tokens(
            facts.context_tokens, config.max_context_length, facts.kind
        ),
        supports=facts.supports | config.supports,
    )
    return _refuse_overflow(backend, profile, config)


def _refuse_overflow(
    backend: Backend, profile: BackendProfile, config: BridgeConfig
) -> BackendProfile:
    """The profile with the bridge refusing long prompts, where the backend does not and the bridge
    can.
    """
    value = ChatGuarantee.PROMPT_OVERFLOW_REFUSED
    counting = config.token_counting
    if value in profile.supports | config.exclude or counting is TokenCounting.OFF:
        return profile
    if counts_texts(backend, profile.kind):
        counting = TokenCounting.BACKEND
    elif counting is TokenCounting.BACKEND:
        return profile
    return replace(profile, supports=profile.supports | {value}, token_counting=counting)


def _list_models(backend: Backend, wanted: str | None) -> list[JsonObject]:
    """The models, none where a service lists none and the operator has named one."""
    try:
        return backend.list_models()
    except NoSuchRoute as error:
        if wanted is not None:
            return []
        raise WrongOption(
            "Nothing at the address of --backend lists models; it ends in /v1. For a service"
            " without such a list, state --backend-model and --max-context-length."
        ) from error


def _choose_model(models: list[JsonObject], wanted: str | None) -> JsonObject:
    """The entry of the wanted model, or of the first; an empty one when the backend lists something
    else. Raises ``BackendUnavailable`` while there is none: servers list models as they load them.
    """
    for entry in models:
        name = entry.get("id")
        if isinstance(name, str) and wanted in (None, name, name.removesuffix(":latest")):
            return entry
    if wanted is None:
        raise BackendUnavailable("it lists no model yet; --backend-model names one")
    logger.warning("horde.bridge.model_not_listed", extra={"model": wanted})
    # The server is still the one that the other entries tell of.
    owner = models[0].get("owned_by") if models else None
    return {"id": wanted, "owned_by": owner}


def _require_context_tokens(reported: int | None, configured: int | None, kind: BackendKind) -> int:
    """The smaller of what the backend has and what the operator allows."""
    known = [tokens for tokens in (reported, configured) if tokens is not None]
    if not known:
        hint = "; for Ollama, what OLLAMA_CONTEXT_LENGTH or num_ctx says"
        raise ProbeError(
            "The backend does not report its context length; state it with --max-context-length"
            f"{hint if kind is BackendKind.OLLAMA else ''}."
        )
    return min(known)
