# SPDX-License-Identifier: AGPL-3.0-or-later
"""How fast a text job can honestly be: replies that come faster were not generated."""

MAX_TOKENS_PER_SECOND = 150.0
# By the size of the model, for owners nobody vouches for: billions of parameters, tokens a second.
UNTRUSTED_LIMITS = ((70.0, 30.0), (14.0, 100.0), (8.0, 150.0))
MIXTURE_MARK = "8x"  # of experts, of which a part works on each token
MIXTURE_FACTOR = 3.0
LEAST_JUDGED_TOKENS = 50  # less is over before a clock between two hosts tells anything


def is_unreasonably_fast(
    *,
    generated_tokens: int,
    seconds: float,
    model: str,
    multiplier: float,
    is_known: bool,
    owner_trusted: bool,
) -> bool:
    """Whether a reply came faster than its model can write. Short replies are not judged."""
    if generated_tokens < LEAST_JUDGED_TOKENS:
        return False
    limit = MAX_TOKENS_PER_SECOND
    if is_known and not owner_trusted:
        limit = min(limit, _find_model_limit(model, multiplier))
    return generated_tokens > limit * max(seconds, 0.0)


def _find_model_limit(model: str, multiplier: float) -> float:
    by_size = (limit for billions, limit in UNTRUSTED_LIMITS if multiplier >= billions)
    factor = MIXTURE_FACTOR if MIXTURE_MARK in model.lower() else 1.0
    return next(by_size, MAX_TOKENS_PER_SECOND) * factor
