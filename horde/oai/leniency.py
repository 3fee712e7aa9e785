# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the front leaves out of a body instead of refusing it.

Agent loops append the message they received to the history, through SDKs that add keys of their
own. So every message the front returns is accepted back: what does not change what a worker gets is
left out. Source: docs/reference/chat_front.md, "Messages".
"""

from types import MappingProxyType
from typing import Any, Final

from horde.chat.messages import Leniency

# A hint for the caches of a provider, which clients put on messages, parts, calls and tools.
CACHE_HINT: Final = "cache_control"

ECHOED_MESSAGES: Final = Leniency(
    nulls=True,
    hints=frozenset({CACHE_HINT}),
    role_keys=MappingProxyType(
        {
            "assistant": frozenset(
                {"reasoning_content", "reasoning", "reasoning_details", "parsed"}
            ),
            "tool": frozenset({"name"}),
        }
    ),
    empty_role_keys=MappingProxyType({"assistant": frozenset({"annotations", "tool_calls"})}),
    empty_content=True,  # some SDKs write an absent content as no parts
    # What stream accumulators and parsers of the SDKs leave in calls.
    call_keys=frozenset({"index"}),
    function_keys=frozenset({"parsed_arguments"}),
    image_keys=frozenset({"format"}),  # some clients name the media type there
)


def drop_keys(value: object, *dropped: str) -> Any:
    """An object without its nulls and these keys; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {
        key: member for key, member in value.items() if key not in dropped and member is not None
    }
