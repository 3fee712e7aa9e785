# SPDX-License-Identifier: AGPL-3.0-or-later
"""What workers send: a pop that asks for jobs, and the reply to a text job."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from horde.shapes.base import LenientBody, Values, WholeNumber
from horde.shown_text import clean_shown_text

MAX_POPPED_MODELS = 200
MAX_WORKER_NAME_LENGTH = 100  # what the column holds
MAX_BRIDGE_AGENT_LENGTH = 1000  # one worker's agent grows with each reload of its settings
UNKNOWN_BRIDGE_AGENT = "unknown:0:unknown"

CountedName = Annotated[str, Field(max_length=4096)]


class TextPopBody(LenientBody):
    """The keys of a text pop; the chat declaration is checked by
    `parse_chat_declaration_fields`.
    """

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    models: Values[CountedName] = Field(default_factory=list)
    bridge_agent: str = UNKNOWN_BRIDGE_AGENT
    threads: Annotated[WholeNumber, Field(ge=1, le=50)] = 1
    amount: Annotated[WholeNumber, Field(ge=1, le=20)] = 1
    nsfw: bool = True
    priority_usernames: Values[CountedName] = Field(default_factory=list)
    max_length: Annotated[WholeNumber, Field(ge=1, le=2**31 - 1)] = 512
    max_context_length: Annotated[WholeNumber, Field(ge=1, le=2**31 - 1)] = 2048
    leaving: bool = False

    @property
    def clean_name(self) -> str:
        """The worker's name as it is shown, cut to what the column holds."""
        return clean_shown_text(self.name)[:MAX_WORKER_NAME_LENGTH].rstrip()

    @property
    def clean_agent(self) -> str:
        """The bridge agent without markup; a long one is cut, since one worker's grows with every
        reload.
        """
        return clean_shown_text(self.bridge_agent)[:MAX_BRIDGE_AGENT_LENGTH]

    @property
    def known_models(self) -> list[str]:
        """The models offered, each once, in order; the first 200 count."""
        return list(dict.fromkeys(self.models[:MAX_POPPED_MODELS]))


class SubmissionState(StrEnum):
    """How a worker ended a job."""

    OK = "ok"
    CENSORED = "censored"
    CSAM = "csam"
    FAULTED = "faulted"


class GenerationMetadata(LenientBody):
    """One entry of `gen_metadata` a text worker may send."""

    type: Annotated[str, Field(max_length=255)]
    value: Annotated[str, Field(max_length=255)]
    ref: Annotated[str, Field(max_length=255)] | None = None


class TextSubmitBody(LenientBody):
    """The keys of a text job's submit."""

    id: str
    generation: str
    state: SubmissionState = Field(default=SubmissionState.OK, strict=False)
    seed: Annotated[WholeNumber, Field(ge=-(2**63), le=2**63 - 1)] = 0
    gen_metadata: Values[GenerationMetadata] = Field(default_factory=list)
