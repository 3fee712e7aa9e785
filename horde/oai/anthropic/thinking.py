# SPDX-License-Identifier: AGPL-3.0-or-later
"""How much a model is asked to think, and whether the client is shown its thoughts.

Source: docs/reference/front_messages.md, "Thinking and effort".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from horde_sdk.generation_parameters.text.chat_policy import ChatReasoningEffort

from horde.chat.parameters import is_integer
from horde.oai.anthropic.refusals import (
    check_members,
    missing,
    require_object,
    require_one_of,
    require_string,
    wrong_type,
)

LOW_BUDGET_TOKENS: Final = 2048
MEDIUM_BUDGET_TOKENS: Final = 8192
EFFORTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "low": ChatReasoningEffort.LOW,
        "medium": ChatReasoningEffort.MEDIUM,
        "high": ChatReasoningEffort.HIGH,
        "xhigh": ChatReasoningEffort.XHIGH,
        "max": ChatReasoningEffort.XHIGH,
    }
)
EFFORT_PATH: Final = "output_config.effort"
_TYPES: Final = ("enabled", "disabled", "adaptive", "between_tools")


@dataclass(frozen=True, slots=True)
class Thinking:
    """What is asked of the model: `effort` is the horde's word, None for none, and `effort_path`
    the key it comes from.
    """

    is_shown: bool = False
    is_disabled: bool = False
    effort: str | None = None
    effort_path: str = "thinking"

    def with_effort(self, effort: str | None) -> "Thinking":
        """The same with the effort of `output_config`, which wins over a budget."""
        if effort is None or self.is_disabled:
            return self
        return Thinking(self.is_shown, effort=EFFORTS[effort], effort_path=EFFORT_PATH)


def parse_thinking(value: object) -> Thinking:
    """The `thinking` of a body. Raises RequestRefused."""
    thinking = require_object(value, "thinking")
    kind = require_one_of(thinking.get("type"), _TYPES, "thinking.type")
    check_members(thinking, ("type", "budget_tokens", "display"), "thinking")
    display = thinking.get("display")
    if display is not None:
        require_string(display, "thinking.display")
    if kind == "disabled":
        return Thinking(is_disabled=True, effort=ChatReasoningEffort.NONE)
    budget = thinking.get("budget_tokens")
    if budget is not None and not is_integer(budget):
        raise wrong_type("thinking.budget_tokens", "a valid integer")
    if kind == "enabled" and budget is None:
        raise missing("thinking.budget_tokens")
    effort = _grade(budget) if kind == "enabled" and isinstance(budget, int) else None
    return Thinking(is_shown=display != "omitted", effort=effort)


def _grade(budget_tokens: int) -> str:
    if budget_tokens <= LOW_BUDGET_TOKENS:
        return ChatReasoningEffort.LOW
    if budget_tokens <= MEDIUM_BUDGET_TOKENS:
        return ChatReasoningEffort.MEDIUM
    return ChatReasoningEffort.HIGH
