# SPDX-License-Identifier: AGPL-3.0-or-later
"""Names and sentences of users as others are shown them: without markup, and without slurs."""

import re
import unicodedata

# Unmistakable slurs and obscenities only: a name that merely looks odd is its owner's business.
_PROFANE_WORDS = frozenset(
    {
        "asshole",
        "bitch",
        "cunt",
        "dickhead",
        "faggot",
        "faggots",
        "fuck",
        "fucker",
        "fucking",
        "kike",
        "kikes",
    }
    | {"motherfucker", "nigga", "nigger", "niggers", "shit", "tranny", "whore"}
)
_LETTER_FOR_DIGIT = str.maketrans("013457@$", "oieastas")
MAX_CLEANED_LENGTH = 4096
_MARKUP = re.compile(r"<[^<>]{0,1000}>")
_WORD = re.compile(r"[^\W_]+")


def clean_shown_text(text: str) -> str:
    """A text of a worker's owner fit to be shown to others: no markup, no angle brackets, nothing
    invisible, trimmed.

    Spaces inside stay as they are: workers are found by their names. Of a longer text the first
    4096 characters count, more than any column holds.
    """
    return "".join(map(_show, _MARKUP.sub("", text[:MAX_CLEANED_LENGTH]))).strip()


def _show(character: str) -> str:
    """The character; a space for what breaks a line, nothing for angle brackets and what cannot be
    seen.
    """
    if character in "<>":
        return ""
    category = unicodedata.category(character)
    if character.isspace() and category != "Zs":
        return " "
    return "" if category.startswith("C") else character


def is_profane(text: str) -> bool:
    """Whether one of the words of a text is a slur or obscenity, digits for letters included."""
    plain = text.casefold().translate(_LETTER_FOR_DIGIT)
    return any(word in _PROFANE_WORDS for word in _WORD.findall(plain))


def clean_username(text: str) -> str:
    """A name fit to be shown anywhere: no invisible characters, no angle brackets, single spaces.

    Pages and clients that forget to escape a name must not become a hole.
    """
    visible = (" " if character.isspace() else character for character in text)
    kept = (
        character
        for character in visible
        if character not in "<>" and not unicodedata.category(character).startswith("C")
    )
    return " ".join("".join(kept).split())
