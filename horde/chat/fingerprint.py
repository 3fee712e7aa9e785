# SPDX-License-Identifier: AGPL-3.0-or-later
"""What makes two submissions of one operation key the same operation.

Source: docs/reference/chat_requests.md, "Operation key".
"""

import hashlib
import json
from typing import Final

from horde_sdk.generation_parameters.text.chat_limits import (
    CHAT_SAMPLING_DEFAULTS,
    DEFAULT_PARALLEL_TOOL_CALLS,
)
from horde_sdk.generation_parameters.text.chat_policy import ChatToolChoiceMode

from horde.chat.images import list_image_parts, rewrite_image_urls
from horde.chat.job import build_chat_extras
from horde.chat.request import ChatRequest
from horde.json_text import JsonObject

OPERATION_FINGERPRINT_EXCLUDED_HORDE_KEYS: Final = frozenset(
    {"availability_mode", "dry_run", "include_reasoning", "max_kudos", "operation_key"}
)
_IMAGE_MARK: Final = "\x00"  # no string of a body has a NUL, so nothing that was sent looks like it


def build_operation_fingerprint(chat: ChatRequest) -> str:
    """SHA-256, in hex, of what makes two submissions of one key the same operation.

    Sampling values and tool keys at their defaults count as left out, as the `horde` options do.
    Streaming is no part.
    """
    image_urls = [image.image_url["url"] for image in list_image_parts(chat.messages)]
    identity: JsonObject = {
        "messages": rewrite_image_urls(chat.messages, lambda _url: _IMAGE_MARK),
        "params": {
            key: value
            for key, value in chat.text_params.items()
            if CHAT_SAMPLING_DEFAULTS.get(key) != value
        },
        "models": sorted(chat.models),
        "horde": chat.horde.model_dump(
            mode="json", exclude=set(OPERATION_FINGERPRINT_EXCLUDED_HORDE_KEYS)
        ),
    }
    extras = build_chat_extras(chat)
    if extras.get("tool_choice") == ChatToolChoiceMode.AUTO.value:
        del extras["tool_choice"]
    if extras.get("parallel_tool_calls") is DEFAULT_PARALLEL_TOOL_CALLS:
        del extras["parallel_tool_calls"]
    if extras:
        identity["chat_extras"] = extras
    pieces = _write_canonical(identity).split(_write_canonical(_IMAGE_MARK))
    digest = hashlib.sha256(pieces[0].encode("utf-8", "surrogatepass"))
    for url, piece in zip(image_urls, pieces[1:], strict=True):
        digest.update(_write_canonical(url).encode("utf-8", "surrogatepass"))
        digest.update(piece.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _write_canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
