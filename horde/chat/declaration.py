# SPDX-License-Identifier: AGPL-3.0-or-later
"""The chat declaration of a text pop.

Source: docs/reference/chat_requests.md, "Chat declaration on pop".
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from horde_sdk.generation_parameters.text.chat_policy import KNOWN_CHAT_DECLARATIONS
from horde_sdk.worker.chat_declaration import ChatImageTransport

from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode

MAX_DECLARED_TOKENS: Final = 2**31 - 1  # what the columns hold
MAX_MODEL_ID_CHARACTERS: Final = 255  # likewise
_IMAGE_TRANSPORTS: Final = frozenset(transport.value for transport in ChatImageTransport)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDeclaration:
    """What a worker declared with `chat_jobs`; the lists hold known names only, sorted. Lengths are
    tokens.
    """

    prompt_jobs: bool
    model_id: str
    features: tuple[str, ...]
    max_context_length: int
    max_length: int
    tools_max_temperature: float | None
    image_transports: tuple[str, ...]


def parse_chat_declaration_fields(body: Mapping[str, object]) -> ChatDeclaration | None:
    """The declaration in a pop's body, which also holds its `models`; None withdraws any earlier
    one.

    Without `chat_jobs` the other chat fields are not read. Raises BadRequest with
    ChatDeclarationInvalid.
    """
    chat_jobs = _parse_boolean(body, "chat_jobs", default=False)
    prompt_jobs = _parse_boolean(body, "prompt_jobs", default=True)
    if not chat_jobs:
        if not prompt_jobs:
            raise _invalid("prompt_jobs can be false only on a pop that sets chat_jobs.")
        return None
    limits = _parse_limits(body.get("chat_limits"))
    return ChatDeclaration(
        prompt_jobs=prompt_jobs,
        model_id=_parse_model_id(body.get("model_id"), body.get("models")),
        features=_parse_names(body, "chat_features", KNOWN_CHAT_DECLARATIONS),
        max_context_length=_parse_tokens(limits, "max_context_length"),
        max_length=_parse_tokens(limits, "max_length"),
        tools_max_temperature=_parse_temperature(limits.get("tools_max_temperature")),
        image_transports=_parse_names(body, "image_transports", _IMAGE_TRANSPORTS),
    )


def _invalid(message: str) -> BadRequest:
    return BadRequest(message, ReturnCode.CHAT_DECLARATION_INVALID)


def _parse_boolean(body: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _invalid(f"{key} has to be a boolean.")
    return value


def _parse_limits(value: object) -> Mapping[str, object]:
    if value is None:
        raise _invalid("A pop with chat_jobs needs chat_limits.")
    if not isinstance(value, dict):
        raise _invalid("chat_limits has to be an object.")
    return value


def _parse_tokens(limits: Mapping[str, object], key: str) -> int:
    value = limits.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 1 <= value <= MAX_DECLARED_TOKENS
    ):
        raise _invalid(f"chat_limits.{key} has to be an integer from 1 to {MAX_DECLARED_TOKENS}.")
    return value


def _parse_temperature(value: object) -> float | None:
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= sys.float_info.max
    ):
        raise _invalid("chat_limits.tools_max_temperature has to be a number of at least 0.")
    return float(value)


def _parse_model_id(model_id: object, models: object) -> str:
    if model_id is None:
        raise _invalid("A pop with chat_jobs needs model_id.")
    if not isinstance(model_id, str) or not 1 <= len(model_id) <= MAX_MODEL_ID_CHARACTERS:
        raise _invalid(f"model_id has to be a string of 1 to {MAX_MODEL_ID_CHARACTERS} characters.")
    if not isinstance(models, list) or model_id not in models:
        raise _invalid(f"model_id '{model_id}' has to be one of the worker's models.")
    return model_id


def _parse_names(body: Mapping[str, object], key: str, known: frozenset[str]) -> tuple[str, ...]:
    """Names this server knows; others may come from a newer worker and are ignored."""
    value = body.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _invalid(f"{key} has to be an array of strings.")
    return tuple(sorted(known.intersection(value)))
