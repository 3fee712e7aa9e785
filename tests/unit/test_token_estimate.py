# SPDX-License-Identifier: AGPL-3.0-or-later
"""How many tokens a text is taken to have."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.token_estimate import (
    NEWLINE,
    NO_TEXT,
    TextSize,
    estimate_prompt_tokens,
    measure_text,
)


def estimate(text: str) -> int:
    return estimate_prompt_tokens(measure_text(text))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("a", 1),
        ("Once upon a time", 6),
        ("Wörter wie überall", 6),  # a few accents leave the estimate at a third of the letters
        ("Съешь ещё этих мягких", 10),  # two bytes a letter: half a token
        ("天地玄黃宇宙洪荒", 6),  # three bytes: three quarters
        ("ท่านประธาน", 8),  # Thai, whose marks are characters of their own
        ("مُحَمَّد", 4),  # Arabic with its vowels written
        ("e\u0301" * 8, 6),  # an accent that combines is a character too
        ("🙂🙃", 2),
        ("👩‍👩‍👧‍👦", 7),  # four people joined into one sign
        ("hello 世界", 3),
        ("\u0000\u200b", 1),
    ],
)
def test_text_is_estimated_by_its_letters_or_its_bytes(text: str, tokens: int) -> None:
    assert estimate(text) == tokens


@given(st.text())
def test_the_estimate_is_the_larger_of_a_third_of_the_letters_and_a_quarter_of_the_bytes(
    text: str,
) -> None:
    assert estimate(text) == math.ceil(max(len(text) / 3, len(text.encode()) / 4))


@given(st.text(st.characters(max_codepoint=127)))
def test_english_is_estimated_as_it_always_was(text: str) -> None:
    assert estimate(text) == -(-len(text) // 3)


@given(st.lists(st.text()))
def test_sizes_add_up_as_texts_are_joined(texts: list[str]) -> None:
    joined = sum((measure_text(text) + NEWLINE for text in texts), start=NO_TEXT)
    assert joined == measure_text("".join(f"{text}\n" for text in texts))
    assert joined - joined == NO_TEXT


def test_an_unpaired_surrogate_is_measured_and_not_refused() -> None:
    assert measure_text("\ud800") == TextSize(1, 3)
