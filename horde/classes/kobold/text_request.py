# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a text request is: the shape of its body, and how its prompt is fitted into a context.

Source: docs/reference/text_requests.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from horde.chat.context import grow_context
from horde.chat_contract import MAX_CONTEXT_LENGTH
from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode
from horde.shapes.base import parse_shape
from horde.shapes.requests import TextContextFit, TextRequestBody
from horde.shapes.text_params import (
    DEFAULT_MAX_CONTEXT_LENGTH,
    DEFAULT_TEXT_MAX_LENGTH,
    TextParams,
    parse_text_params,
)
from horde.token_estimate import estimate_prompt_tokens, measure_text

MAX_TARGETED_WORKERS = 5  # further ids are dropped, as they always were on text
MAX_EXTRA_SOURCE_IMAGES = 5
FREE_EXTRA_SOURCE_IMAGES = 1  # what anybody may send


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A validated text request; lengths are tokens, `params` what the client sent of the known
    ones.
    """

    body: TextRequestBody
    params: TextParams = field(default_factory=TextParams)
    context_fit: TextContextFit = TextContextFit.IGNORE

    @property
    def n(self) -> int:
        """Generations asked for."""
        return self.params.get("n", 1)

    @property
    def max_length(self) -> int:
        """Tokens of output, or the default."""
        return self.params.get("max_length", DEFAULT_TEXT_MAX_LENGTH)

    @property
    def max_context_length(self) -> int:
        """Tokens of context, or the default."""
        return self.params.get("max_context_length", DEFAULT_MAX_CONTEXT_LENGTH)


def parse_text_request(body: Mapping[str, object]) -> TextRequest:
    """Validate a decoded body.

    Raises PayloadInvalid for its shape and its ranges, BadRequest for a `context_fit` that is none.
    """
    parsed = parse_shape(TextRequestBody, body)
    params = parse_text_params(parsed.params)
    if parsed.context_fit not in TextContextFit:
        raise BadRequest(f"'context_fit' has to be one of {', '.join(TextContextFit)}.")
    return TextRequest(body=parsed, params=params, context_fit=TextContextFit(parsed.context_fit))


def estimate_text_prompt_tokens(prompt: str) -> int:
    """Tokens a prompt is reckoned to need: careful, since no tokenizer is known here."""
    return estimate_prompt_tokens(measure_text(prompt))


def size_text_context(request: TextRequest, *, growth_bound: int | None) -> int:
    """The context a text request runs with, in tokens.

    `growth_bound` is the largest context an online worker of the models offers, None when there is
    none, which leaves no room to grow. Raises BadRequest with PromptExceedsContext when the prompt
    is refused for its length.
    """
    requested = request.max_context_length
    if request.context_fit is TextContextFit.IGNORE:
        return requested
    estimate = estimate_text_prompt_tokens(request.body.prompt)
    wanted = estimate + request.max_length
    context = requested
    if request.context_fit is TextContextFit.GROW and growth_bound is not None:
        context = grow_context(requested, wanted, min(growth_bound, MAX_CONTEXT_LENGTH))
    if wanted > context:
        message = (
            f"The prompt is estimated at {estimate} tokens and needs {wanted} tokens with its"
            " output, "
            f"which do not fit the context of {context} tokens."
        )
        raise BadRequest(message, ReturnCode.PROMPT_EXCEEDS_CONTEXT)
    return context
