# SPDX-License-Identifier: AGPL-3.0-or-later
"""The replacement filter on values: what is normalised, replaced, refused, and what it may cost."""

import logging
import time

import pytest
import regex

from horde.database import moderation
from horde.database.moderation import Rule, ScreeningBudget
from horde.exceptions import BadRequest
from horde.return_codes import ReturnCode


def rule(expression: str, replacement: str = "", filter_id: int = 1) -> Rule:
    return Rule(regex.compile(expression, regex.IGNORECASE), replacement, filter_id)


def rewrite(text: str, *rules: Rule) -> str:
    return moderation.rewrite_text(text, rules=rules, budget=ScreeningBudget(1.0))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("plain words", "plain words"),
        ("(weighted:1.2) ((twice:1.1):0.5)", "weighted twice"),
        ("at 10:30, really", "at 10 30 really"),
        ("semi_colons; and-dashes…", "semi colons and dashes"),
        ("one\n\ntwo\t three ", "one two three"),
        ("w o r d and w.o_r-d", "word and word"),
        ("a w-o-r-d, a w_o_r_d", "a word a word"),
        ("a b alone", "a b alone"),
        ("1 2 3 4", "1 2 3 4"),
        ("café cafe\u0301 ＦＵＬＬ 𝐛𝐨𝐥𝐝 ﬁn", "cafe cafe FULL bold fin"),
        ("h\u200bid\u00adden", "hidden"),
        ("й が हिन्दी", "й が हिन्दी"),
        ("### Instruction: go", "Instruction go"),
        ("", ""),
        ("!?", ""),
    ],
)
def test_text_is_made_plain(text: str, plain: str) -> None:
    assert moderation.normalise_text(text) == plain


@pytest.mark.parametrize(
    "text",
    [
        "a\u0300\u0316" * 400_000,
        "é" * 1_000_000,
        ":" + "1" * 1_000_000,
        ": " * 500_000,
        "a " * 500_000,
        ":1 " * 300_000,
        "a-" * 500_000,
        "a-b" * 300_000,
    ],
)
def test_making_text_plain_takes_time_in_proportion_to_it(text: str) -> None:
    started = time.thread_time()
    moderation.normalise_text(text)
    assert time.thread_time() - started < 5  # quadratic ways take minutes


def test_rules_apply_in_order_to_plain_text() -> None:
    assert (
        rewrite("A r-e-d, RED (hat:1.3)!", rule("red", "blue"), rule("blue hat", "cap"))
        == "A blue cap"
    )


def test_rewritten_text_gets_no_suffix() -> None:
    assert rewrite("one two") == "one two"


def test_a_replacement_is_literal() -> None:
    assert rewrite("abc", rule("(b)", r"\1\g<9>")) == r"a\1\g<9>c"


def test_empty_matches_are_left_alone() -> None:
    assert rewrite("axb", rule("x*", "y")) == "ayb"


def test_a_text_can_be_emptied() -> None:
    assert rewrite("all of it", rule(".*")) == ""


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("a 17-year-old", "a adult"),
        ("seventeen year old", "adult"),
        ("aged 15", "adult"),
        ("17yo and 16 y/o", "adult and adult"),
        ("a 21 year old", "a 21 year old"),
        ("twenty-one years old", "twenty one years old"),
        ("five years ago", "five years ago"),
        ("High-School girls and C h i l d r e n", "women and adults"),
        ("kidney", "kidney"),
    ],
)
def test_text_for_adult_models_stays_among_adults(text: str, rewritten: str) -> None:
    assert rewrite(text, *moderation.list_nsfw_model_rules()) == rewritten


def test_substitutions_leave_their_own_result_alone() -> None:
    for own_rule in moderation.list_nsfw_model_rules():
        assert (
            rewrite(own_rule.replacement, *moderation.list_nsfw_model_rules())
            == own_rule.replacement
        )


@pytest.mark.parametrize("expression", ["^(a|aa)+$", "(?R)"])
def test_a_rule_without_end_refuses_the_prompt_in_time(
    expression: str, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    with pytest.raises(BadRequest) as refusal, caplog.at_level(logging.WARNING):
        moderation.rewrite_text(
            "a" * 5000 + "b", rules=[rule(expression, filter_id=7)], budget=ScreeningBudget(0.1)
        )
    assert refusal.value.rc == ReturnCode.CORRUPT_PROMPT
    assert time.monotonic() - started < 60
    assert [record.filter_id for record in caplog.records] == [7]  # type: ignore[attr-defined]
    assert "aaaa" not in caplog.text


def test_texts_of_a_request_share_one_budget() -> None:
    budget = ScreeningBudget(0.1)
    with pytest.raises(BadRequest):
        moderation.rewrite_text("a" * 5000 + "b", rules=[rule("^(a|aa)+$")], budget=budget)
    with pytest.raises(BadRequest):
        moderation.rewrite_text("short", rules=[rule("x")], budget=budget)


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_a_prompt_of_nothing_is_refused(prompt: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        moderation.check_prompt_left(prompt)
    assert refusal.value.rc == ReturnCode.CORRUPT_PROMPT


def test_a_prompt_of_something_is_accepted() -> None:
    moderation.check_prompt_left("word")
