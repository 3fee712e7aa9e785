# SPDX-License-Identifier: AGPL-3.0-or-later
"""The replacement filter: some texts are rewritten before a worker sees them.

Rules are the moderators' own rows of `filters`; what they may cost is bounded, since an expression
can take for ever. Source: docs/explanation/countermeasures.md.
"""

import json
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import regex
from sqlalchemy import select
from sqlalchemy.orm import Session

from horde.classes.base.moderation import ModerationReason
from horde.classes.base.stats import Filter
from horde.database.caches import TimedCache
from horde.exceptions import BadRequest
from horde.logger import get_logger
from horde.model_reference import is_nsfw
from horde.return_codes import ReturnCode

logger = get_logger(__name__)

REPLACEMENT_FILTER_TYPE = 10
RULES_SECONDS = 10.0  # how long a changed rule may still act as before
# Of processor time for one request: twice what its longest text takes by our own rules.
SCREENING_SECONDS = 2.0
# A chat request at its bounds; more is no prompt a model could read.
MAX_SCREENED_CHARACTERS = 2 * 1024 * 1024
SUBSTITUTIONS_FILE = Path(__file__).parent.parent / "data" / "nsfw_model_substitutions.json"

# Possessive throughout: none of them can take longer than in proportion to the text.
_WEIGHT = regex.compile(r":\s*+[+-]?+\d++(?:\.\d++)?+\s*+(?=\))")  # the `:1.2` of `(text:1.2)`
# marks, invisible characters.
_HIDDEN_IN_WORD = regex.compile(r"(?<=[A-Za-z])[\u0300-\u036f\u00ad\u200b-\u200f\u2060\ufeff]++")
_BETWEEN_WORDS = regex.compile(r"[\p{P}$+<=>^`|~\s]++")
_LETTER = r"(?<![^\W_])[^\W\d_](?![^\W_])"  # a letter that stands alone
# `w-o-r-d`.
_DASHED_OUT = regex.compile(rf"{_LETTER}([\p{{P}}$+<=>^`|~]){_LETTER}(?:\1{_LETTER})++")
_SPACED_OUT = regex.compile(rf"{_LETTER}(?: {_LETTER}){{2,}}+")  # `w o r d`
# An age below 18. The look ahead halves the time of a search; `ty ` before it: twenty one is none.
_AGE = (
    "(?=[0-9efnost])(?<!ty )"
    "(?:1[0-7]|[1-9]|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    "|(?:thir|four|fif|six|seven)teen)"
)
_UNDERAGE = regex.compile(
    rf"\b{_AGE} ?(?:(?:year|yr)s? ?old|y ?o)\b|\baged? {_AGE}\b", regex.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Text that matches becomes `replacement`, which is literal: it refers to no group."""

    pattern: regex.Pattern[str]
    replacement: str
    filter_id: int | None = None  # None for the rules that come with the project

    def apply(self, text: str, seconds: float) -> str:
        """The text with every match replaced. Raises TimeoutError."""
        # An empty match is between characters: replacing it would fill the text instead of cleaning
        # it.
        return self.pattern.sub(
            lambda match: self.replacement if match.group() else "", text, timeout=seconds
        )

    def matches(self, text: str, seconds: float) -> bool:
        """Whether any part of the text matches. Raises TimeoutError."""
        return self.pattern.search(text, timeout=seconds) is not None


class PromptRejected(BadRequest):
    """A prompt of which nothing may be served. It carries the text in its stages, for whoever keeps
    evidence; the text is in no message.
    """

    def __init__(
        self, refused: BadRequest, prompts: Mapping[str, str | None], reason: ModerationReason
    ) -> None:
        super().__init__(refused.message, ReturnCode.CORRUPT_PROMPT)
        self.prompts, self.reason = prompts, reason


@contextmanager
def telling_what_was_judged(
    *, submitted: str, judged: str, models: Sequence[str]
) -> Iterator[None]:
    """Let a refusal of the prompt within the block carry the prompt."""
    try:
        yield
    except BadRequest as refused:
        if refused.rc is not ReturnCode.CORRUPT_PROMPT:
            raise
        is_for_model = any(is_nsfw(model) for model in models)
        raise PromptRejected(
            refused,
            {"submitted": submitted, "moderation": judged, "effective": None},
            ModerationReason.MODEL_REJECTION if is_for_model else ModerationReason.FILTER_REJECTION,
        ) from refused


class ScreeningBudget:
    """What one request may spend on rules; used by one thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def spend[T](self, rule: Rule, work: Callable[[str, float], T], text: str) -> T:
        """Let a rule work on a text. Raises BadRequest when the time is used up: what is not
        screened is not served.
        """
        started = time.thread_time()
        try:
            if self._seconds <= 0:
                raise TimeoutError
            return work(text, self._seconds)
        except (TimeoutError, RecursionError, MemoryError) as error:
            # The rule's id lets a moderator mend it; of the text nothing is logged.
            logger.warning(
                "horde.filter.gave_up",
                extra={"filter_id": rule.filter_id, "error_class": type(error).__name__},
            )
            raise _too_slow() from error
        finally:
            self._seconds -= time.thread_time() - started


_rules: TimedCache[None, tuple[Rule, ...]] = TimedCache(RULES_SECONDS)


def find_prompt_rewrite(
    session: Session, *, is_flagged: bool, models: Sequence[str], prompt: str
) -> Callable[[str], str] | None:
    """The function that rewrites each text of a request; None when its texts stay as they are.

    Texts of flagged users are always rewritten. Those of others are when a requested model was made
    for adult text and `prompt`, all of the request's text, mentions minors or matches a replacement
    rule. At most one statement, in ten seconds; none when neither can be the case. The function
    needs no session. Errors: this and the function raise BadRequest, `CorruptPrompt`, for a text
    that is too long or too slow to screen.
    """
    if not is_flagged and not any(is_nsfw(model) for model in models):
        return None
    if len(prompt) > MAX_SCREENED_CHARACTERS:
        raise _too_slow()
    rules = (*_rules.get(None, lambda: _list_replacement_rules(session)), *list_nsfw_model_rules())
    budget = ScreeningBudget(SCREENING_SECONDS)
    if not is_flagged and not _matches_any(rules, normalise_text(prompt), budget):
        return None
    return partial(rewrite_text, rules=rules, budget=budget)


def forget_replacement_rules() -> None:
    """Read the rules anew; other processes follow within seconds. Call it after the commit."""
    _rules.clear()


def check_prompt_left(prompt: str) -> None:
    """Refuse a request of which nothing is left; `prompt` is its rewritten text without role
    labels.

    Raises BadRequest, `CorruptPrompt`.
    """
    if not prompt.strip():
        raise BadRequest(
            "Nothing is left of the prompt once it is screened.", ReturnCode.CORRUPT_PROMPT
        )


def rewrite_text(text: str, *, rules: Sequence[Rule], budget: ScreeningBudget) -> str:
    """Normalise a text and apply rules in order; empty when nothing is left. Raises BadRequest,
    `CorruptPrompt`.
    """
    text = normalise_text(text)
    for rule in rules:
        text = budget.spend(rule, rule.apply, text)
    return " ".join(text.split())


def normalise_text(text: str) -> str:
    """Plain words with single spaces: what a rule has to match, however it was written.

    Weights are unwrapped, punctuation and line breaks become spaces, spaced-out letters are joined,
    accents are removed from Latin letters. Other scripts keep their marks, which are letters there.
    """
    if not text.isascii():
        text = _HIDDEN_IN_WORD.sub("", text.translate(_list_plain_letters()))
    # Before punctuation becomes spaces, or the article of `a w-o-r-d` would be joined as well.
    text = _DASHED_OUT.sub(
        lambda match: match.group().replace(match.group(1), ""), _WEIGHT.sub("", text)
    )
    text = _BETWEEN_WORDS.sub(" ", text).strip()
    return _SPACED_OUT.sub(lambda match: match.group().replace(" ", ""), text)


@cache
def list_nsfw_model_rules() -> tuple[Rule, ...]:
    """The substitutions that come with the project, which keep text for adult models among
    adults.
    """
    substitutions: dict[str, list[str]] = json.loads(SUBSTITUTIONS_FILE.read_text(encoding="utf-8"))
    words = (
        (replacement, sorted(terms, key=len, reverse=True))
        for replacement, terms in substitutions.items()
    )
    return (
        Rule(_UNDERAGE, "adult"),
        *(
            Rule(regex.compile(rf"\b(?:{'|'.join(terms)})\b", regex.IGNORECASE), replacement)
            for replacement, terms in words
        ),
    )


@cache
def _list_plain_letters() -> dict[int, str]:
    """Latin letters with accents, ligatures, full-width and mathematical letters, to the ASCII they
    look like.

    A table, because Unicode's own normalisation takes quadratic time on long runs of marks.
    """
    ranges = (
        range(0xC0, 0x250),
        range(0x1E00, 0x1F00),
        range(0xFB00, 0xFB07),
        range(0xFF01, 0xFF5F),
        range(0x1D400, 0x1D800),
    )
    return {
        code: plain
        for codes in ranges
        for code in codes
        if (plain := _find_plain_letter(chr(code)))
    }


def _find_plain_letter(character: str) -> str | None:
    plain = "".join(
        part for part in unicodedata.normalize("NFKD", character) if not unicodedata.combining(part)
    )
    return plain if plain.isascii() and plain != character else None


def _too_slow() -> BadRequest:
    return BadRequest(
        "The prompt takes too long to screen. Try a shorter one.", ReturnCode.CORRUPT_PROMPT
    )


def _matches_any(rules: Sequence[Rule], text: str, budget: ScreeningBudget) -> bool:
    return any(budget.spend(rule, rule.matches, text) for rule in rules)


def _list_replacement_rules(session: Session) -> tuple[Rule, ...]:
    rows = session.execute(
        select(Filter.id, Filter.regex, Filter.replacement)
        .where(Filter.filter_type == REPLACEMENT_FILTER_TYPE)
        .order_by(Filter.id)
    )
    return tuple(compile_rules((row.id, row.regex, row.replacement) for row in rows))


def compile_rules(rows: Iterator[tuple[int, str, str]]) -> Iterator[Rule]:
    """The rules that can be used; one that cannot is left out and logged, as the others still
    protect.
    """
    for filter_id, expression, replacement in rows:
        try:
            yield Rule(regex.compile(expression, regex.IGNORECASE), replacement, filter_id)
        except (regex.error, RecursionError, OverflowError, ValueError) as error:
            logger.warning(
                "horde.filter.invalid",
                extra={"filter_id": filter_id, "error_class": type(error).__name__},
            )
