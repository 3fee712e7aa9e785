# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a bridge serves: the backend as it was found, and what follows for pops and jobs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from horde_sdk.generation_parameters.text.chat_policy import ChatFeature
from horde_sdk.worker.chat_declaration import ChatImageTransport, ChatWorkerDeclaration

from horde.bridge.config import BridgeConfig, Declared, TokenCounting
from horde.bridge.dialects import BackendKind
from horde.json_text import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendProfile:
    """A backend as probed.

    ``supports`` holds features and guarantees seen by the probe or named by the operator.
    ``token_counting`` is how the bridge itself refuses long prompts; off where the backend does.
    """

    kind: BackendKind
    backend_model: str
    context_tokens: int
    supports: frozenset[Declared]
    token_counting: TokenCounting = TokenCounting.OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """What the bridge announces, and what it holds its jobs against."""

    profile: BackendProfile
    model: str
    max_length: int
    declaration: ChatWorkerDeclaration

    def withhold(self, features: Iterable[ChatFeature], *, takes_text: bool) -> "ServingPlan":
        """The plan without features, and without text jobs beside chats, that the backend turned
        out not to serve.
        """
        old = self.declaration
        left = old.features - frozenset(features)
        prompt_jobs = old.prompt_jobs and (takes_text or not old.chat_jobs)
        return replace(self, declaration=replace(old, features=left, prompt_jobs=prompt_jobs))

    def build_pop_body(self, config: BridgeConfig) -> JsonObject:
        """The body of every pop. The text limits and the chat limits are the same numbers, but
        for a context that is kept smaller for chats since their tokens are only estimated.
        """
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


def choose_transports(
    features: frozenset[Declared], transports: frozenset[ChatImageTransport]
) -> frozenset[ChatImageTransport]:
    """How images may come: not at all to a backend that does not see."""
    return transports if ChatFeature.VISION in features else frozenset()
