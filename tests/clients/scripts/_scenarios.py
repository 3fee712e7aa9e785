# SPDX-License-Identifier: AGPL-3.0-or-later
"""What the scripts share. They run where only a client is installed, and print what they saw as one
JSON object.
"""

import json
import os
import traceback
from collections.abc import Callable

URL, KEY, MODEL = os.environ["HORDE_URL"], os.environ["HORDE_KEY"], os.environ["HORDE_MODEL"]
WRONG_KEY = "no-such-key-no-such-ke"

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": PARAMETERS,
    },
}


def ask(text: str) -> list[dict[str, object]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def run(*scenarios: Callable[[], object]) -> None:
    """Run each and print {name: what it returned, or {raised, traceback}}."""
    seen: dict[str, object] = {}
    for scenario in scenarios:
        try:
            seen[scenario.__name__] = scenario()
        except Exception as error:  # noqa: BLE001  whatever a library raises is what is seen
            seen[scenario.__name__] = {
                "raised": type(error).__name__,
                "traceback": traceback.format_exc()[-3000:],
            }
    print(json.dumps(seen))
