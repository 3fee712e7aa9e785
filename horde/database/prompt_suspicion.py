# SPDX-License-Identifier: AGPL-3.0-or-later
"""How suspicious a prompt is, by the moderators' rules.

Two groups of rules count: the types 10 and 11 together, and the type 20. A prompt that both match
is one to refuse. Rules are compiled once in ten seconds and searched within a bound of processor
time. Source: docs/reference/moderation.md, "Filters".
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import regex
from sqlalchemy.orm import Session

from horde.database.caches import TimedCache
from horde.database.filters import StoredFilter, list_filters
from horde.database.moderation import (
    RULES_SECONDS,
    Rule,
    ScreeningBudget,
    compile_rules,
    normalise_text,
)
from horde.exceptions import BadRequest

KNOWN_TYPES = (10, 11, 20)
FIRST_GROUP = frozenset({10, 11})
SECOND_GROUP = frozenset({20})
MAX_MATCHES = 100  # of one search; a rule that matches every letter finds no more
NEGATIVE_PROMPT_MARK = "###"

# Little people, which some write in place of a word of the first group.
_YOUNG_EMOJI = Rule(
    regex.compile("[\U0001f476\U0001f466-\U0001f467\U0001f9d2\U0001f37c\U0001f6bc]"), ""
)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """How many groups of rules match a prompt, and by which of its parts."""

    groups: int
    matches: tuple[str, ...]


_rules: TimedCache[None, tuple[tuple[int, Rule], ...]] = TimedCache(RULES_SECONDS)


def search_prompt(
    session: Session, prompt: str, *, budget: ScreeningBudget, filter_type: int | None = None
) -> Suspicion:
    """Search a prompt by the rules of both groups, or of one type. Text behind `###` is left out.

    Errors: BadRequest, `CorruptPrompt`, when the rules take too long over it.
    """
    searched = prompt.partition(NEGATIVE_PROMPT_MARK)[0]
    plain = normalise_text(searched)
    types = KNOWN_TYPES if filter_type is None else (filter_type,)
    rules = [
        (kind, rule)
        for kind, rule in _rules.get(None, lambda: _compile(list_filters(session)))
        if kind in types
    ]
    found: dict[int, list[str]] = {}
    for kind, rule in rules:
        found.setdefault(kind, []).extend(_find_matches(rule, plain, budget))
    if FIRST_GROUP & set(types):
        found.setdefault(10, []).extend(_find_matches(_YOUNG_EMOJI, searched, budget))
    matching = {kind for kind, matches in found.items() if matches}
    groups = sum(bool(matching & group) for group in (FIRST_GROUP, SECOND_GROUP))
    others = matching - FIRST_GROUP - SECOND_GROUP
    every_match = (match for kind in sorted(found) for match in found[kind])
    return Suspicion(groups + bool(others), tuple(dict.fromkeys(every_match))[:MAX_MATCHES])


def forget_rules() -> None:
    """Read the rules anew; other processes follow within seconds. Call it after the commit."""
    _rules.clear()


def combine_regexes(filters: Sequence[StoredFilter]) -> dict[int, str]:
    """The rules of each known type as one alternation; a type without rules is left out."""
    return {
        kind: "|".join(f"(?:{rule.regex})" for rule in filters if rule.filter_type == kind)
        for kind in KNOWN_TYPES
        if any(rule.filter_type == kind for rule in filters)
    }


def check_regex(text: str) -> None:
    """Refuse an expression that cannot be compiled. Errors: BadRequest."""
    try:
        regex.compile(text, regex.IGNORECASE)
    except (regex.error, RecursionError, MemoryError, OverflowError) as error:
        raise BadRequest(f"The expression cannot be compiled: {error}.") from None


def _compile(filters: Sequence[StoredFilter]) -> tuple[tuple[int, Rule], ...]:
    kinds = {stored.id: stored.filter_type for stored in filters}
    rows = ((stored.id, stored.regex, stored.replacement) for stored in filters)
    return tuple((kinds[rule.filter_id], rule) for rule in compile_rules(rows) if rule.filter_id)


def _find_matches(rule: Rule, text: str, budget: ScreeningBudget) -> list[str]:
    def find(text: str, seconds: float) -> list[str]:
        matches: Iterator[regex.Match[str]] = rule.pattern.finditer(text, timeout=seconds)
        found = []
        for match in matches:
            if match.group():
                found.append(match.group())
            if len(found) == MAX_MATCHES:
                break
        return found

    work: Callable[[str, float], list[str]] = find
    return budget.spend(rule, work, text)
