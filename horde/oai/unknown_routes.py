# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a client is told that calls a route of OpenAI's which the front does not have. Pure.

Source: docs/reference/chat_front.md, "Routes the front does not offer".
"""

import re
from typing import Final

MAX_SHOWN_PATH_CHARACTERS: Final = 200
MAX_SHOWN_METHOD_CHARACTERS: Final = 20
_BASE_URL: Final = "The base URL should end in /v1."
_NOT_OFFERED: Final = "The horde does not offer it."
_POINTERS: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), pointer)
    for pattern, pointer in (
        (r"/v1/v1/messages(/.*)?", "The base URL has no /v1: clients of this API add it."),
        (r"/v1/v1(/.*)?", _BASE_URL),
        (r"/chat/completions|/models(/.*)?|.*/chat/completions/chat/completions", _BASE_URL),
        (
            r"/v1/conversations(/.*)?",
            "Send the whole conversation as 'input' of /v1/responses, or a 'previous_response_id'.",
        ),
        (r"/v1/responses/(compact|input_tokens)", _NOT_OFFERED),
        (r"/v1/chat/completions/.+", "Completions are not stored."),
        (
            (
                r"/v1/(embeddings|images|audio|moderations|files|assistants|threads|batches"
                r"|realtime|skills|messages|complete)(/.*)?"
            ),
            _NOT_OFFERED,
        ),
    )
)


def build_unknown_url_message(method: str, path: str) -> str:
    """The method and the path, never the query, and where to go instead when that is known."""
    method = (
        method
        if len(method) <= MAX_SHOWN_METHOD_CHARACTERS
        else f"{method[:MAX_SHOWN_METHOD_CHARACTERS]}…"
    )
    shown = (
        path if len(path) <= MAX_SHOWN_PATH_CHARACTERS else f"{path[:MAX_SHOWN_PATH_CHARACTERS]}…"
    )
    pointer = next((text for pattern, text in _POINTERS if pattern.fullmatch(path)), None)
    message = f"Unknown request URL: {method} {shown}."
    return f"{message} {pointer}" if pointer else message
