# SPDX-License-Identifier: AGPL-3.0-or-later
"""What an operator decides about a bridge. The values come from the command line; nothing here
reads the environment.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from horde_sdk.generation_parameters.text.chat_policy import ChatFeature, ChatGuarantee
from horde_sdk.worker.chat_declaration import IMAGE_PART_TRANSPORTS, ChatImageTransport

# The name is listed among the servers' validated backends, so it must not change.
BRIDGE_AGENT_NAME = "Horde Bridge"
# name:version:url; operators may put their own page
DEFAULT_BRIDGE_AGENT = f"{BRIDGE_AGENT_NAME}:1:https://bridge.invalid"

DEFAULT_MAX_LENGTH_TOKENS = 1024
MAX_TOKENS = 1_048_576  # the longest context a horde knows
# Short enough for the stop time-outs of service managers, long enough for most replies.
DEFAULT_GRACE_SECONDS = 30.0

Declared = ChatFeature | ChatGuarantee


class TokenCounting(StrEnum):
    """By what the bridge refuses prompts that are too long for a backend that would cut them."""

    BACKEND = "backend"
    """The backend's tokeniser, where it has a route for it."""
    ESTIMATE = "estimate"
    """The same, and where it has none an estimate, within less context than there is."""
    OFF = "off"
    """Nothing: the backend's own word counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeConfig:
    """One bridge: one horde, one backend, one model. Lengths are in tokens; None means what the
    backend reports.
    """

    api_url: str
    """Base of the horde's API, ending in ``/api``."""
    api_key: str = field(repr=False)
    backend_url: str
    """Base of the backend's OpenAI routes, ending in ``/v1``."""
    backend_key: str | None = field(default=None, repr=False)
    worker_name: str
    model: str | None = None
    """The name announced to the horde."""
    backend_model: str | None = None
    """The name the backend knows the model by."""
    threads: int = 1
    max_length: int | None = None
    max_context_length: int | None = None
    serves_chat: bool = True
    serves_text: bool = True
    supports: frozenset[Declared] = frozenset()
    """What the operator knows the backend does and the probe cannot see."""
    exclude: frozenset[Declared] = frozenset()
    """What is withheld from the declaration."""
    token_counting: TokenCounting = TokenCounting.BACKEND
    tools_max_temperature: float | None = None
    image_transports: frozenset[ChatImageTransport] = frozenset(ChatImageTransport)
    """How images and large conversations may come, should the backend see."""
    bridge_agent: str = DEFAULT_BRIDGE_AGENT
    grace_seconds: float = DEFAULT_GRACE_SECONDS

    def __post_init__(self) -> None:
        """Refuse a configuration the horde would refuse at the first pop.

        Raises ``ValueError`` with a sentence for the operator.
        """
        if not self.serves_chat and not self.serves_text:
            raise ValueError("A bridge that serves neither chat nor text jobs has nothing to do.")
        if not 1 <= self.threads <= 50:
            raise ValueError("The number of threads lies between 1 and 50.")
        for name, tokens in (
            ("max-length", self.max_length),
            ("max-context-length", self.max_context_length),
        ):
            if tokens is not None and not 1 <= tokens <= MAX_TOKENS:
                raise ValueError(f"{name} lies between 1 and {MAX_TOKENS}.")
        if self.tools_max_temperature is not None and not 0 <= self.tools_max_temperature <= 100:
            raise ValueError("tools-max-temperature is a number that is not negative.")
        if not 0 <= self.grace_seconds <= 86_400:
            raise ValueError("grace-seconds lies between 0 and 86400.")
        if not self.image_transports & IMAGE_PART_TRANSPORTS:
            raise ValueError(
                "An image-transport of url or base64 is needed: messages_url alone brings no"
                " images."
            )
        if self.bridge_agent.count(":") < 2 or not (
            self.bridge_agent.isascii() and self.bridge_agent.isprintable()
        ):
            raise ValueError("bridge-agent has three parts in plain letters, name:version:url.")
