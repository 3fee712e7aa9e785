# SPDX-License-Identifier: AGPL-3.0-or-later
"""How many tokens a text is taken to have where no tokenizer is at hand.

Sizing, trimming, the front and the bridge all ask here, so that none of them lets through what
another refuses. Prices are reckoned apart (`classes/kobold/pricing.py`), by characters alone.
"""

from dataclasses import dataclass
from typing import Final, Self

# Tokenizers are made of mostly English text: a token holds about four letters of it, taken as three
# to be careful. Letters of wide scripts, and marks that combine with them, take three bytes or four
# in UTF-8 and about a token each.
CHARACTERS_PER_PROMPT_TOKEN: Final = 3
BYTES_PER_PROMPT_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class TextSize:
    """What of a text the estimate reads; sizes add up as texts are joined."""

    characters: int
    utf8_bytes: int

    def __add__(self, other: Self) -> "TextSize":
        return TextSize(
            self.characters + other.characters,
            self.utf8_bytes + other.utf8_bytes,
        )

    def __sub__(self, other: Self) -> "TextSize":
        return TextSize(
            self.characters - other.characters,
            self.utf8_bytes - other.utf8_bytes,
        )


NO_TEXT: Final = TextSize(0, 0)
NEWLINE: Final = TextSize(1, 1)


def measure_text(text: str) -> TextSize:
    """The size of a text; an unpaired surrogate, which no body may hold, counts as three bytes."""
    return TextSize(len(text), len(text.encode("utf-8", "surrogatepass")))


def estimate_prompt_tokens(size: TextSize) -> int:
    """Tokens that a prompt of this size is taken to need, rounded up."""
    by_characters = -(-size.characters // CHARACTERS_PER_PROMPT_TOKEN)
    by_bytes = -(-size.utf8_bytes // BYTES_PER_PROMPT_TOKEN)
    return max(by_characters, by_bytes)


def estimate_generated_tokens(size: TextSize) -> int:
    """Tokens that a reply of this size is taken to be made of: a quarter of its bytes, rounded up.

    It times a worker, so it is not as careful as the estimate of a prompt: of English it is a
    quarter of the characters, as prices are.
    """
    return -(-size.utf8_bytes // BYTES_PER_PROMPT_TOKEN)
