# SPDX-License-Identifier: AGPL-3.0-or-later
"""Names, templates and policies of styles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.classes.base.style import (
    StyleName,
    build_unique_name,
    fill_template,
    find_param_above_ceiling,
    find_strange_field,
    list_template_fields,
    merge_params,
    parse_style_name,
)


@pytest.mark.parametrize(
    ("text", "kind", "owner_id", "name"),
    [
        ("terse", None, None, "terse"),
        ("style::terse", "style", None, "terse"),
        ("collection::terse", "collection", None, "terse"),
        ("alice#12::terse", None, 12, "terse"),
        ("style::alice#12::terse", "style", 12, "terse"),
        ("alice#12::style::terse", "style", 12, "terse"),
        ("a#b#7::terse", None, 7, "terse"),
        ("terse::with::colons", None, None, "terse::with::colons"),
        ("style::terse::with::colons", "style", None, "terse::with::colons"),
        ("style::style::terse", "style", None, "style::terse"),
        ("alice#x::terse", None, None, "alice#x::terse"),
        ("#99999999999::terse", None, None, "#99999999999::terse"),
        ("", None, None, ""),
        ("::", None, None, "::"),
    ],
)
def test_a_name_is_read_with_its_prefixes(
    text: str, kind: str | None, owner_id: int | None, name: str
) -> None:
    assert parse_style_name(text) == StyleName(name=name, kind=kind, owner_id=owner_id)


@given(st.text(min_size=1).filter(lambda name: "::" not in name))
def test_the_name_that_is_shown_finds_its_style(name: str) -> None:
    shown = build_unique_name("alice#12", "style", name)
    assert parse_style_name(shown) == StyleName(name=name, kind="style", owner_id=12)


@pytest.mark.parametrize(
    ("template", "filled"),
    [
        ("{p}", "hello {p}"),
        ("Say: {p}!", "Say: hello {p}!"),
        ("{p} as {who}", "hello {p} as {who}"),
        ("{p}{nobody}", "hello {p}"),
        ('{"json": "{p}"}', '{"json": "hello {p}"}'),
        ("{{[INPUT]}}{p}{{[OUTPUT]}}", "{{[INPUT]}}hello {p}{{[OUTPUT]}}"),
        ("{{who}} {p}", "{{who}} hello {p}"),
        ("{ p } {p}", "{ p } hello {p}"),
    ],
)
def test_a_template_is_filled_once(template: str, filled: str) -> None:
    """What is put in holds braces itself, and is not read again."""
    assert fill_template(template, "hello {p}", {"who": "{who}"}) == filled


def test_fields_are_listed_once_in_order() -> None:
    assert list_template_fields("{p} {b} {a} {b} {{[X]}} {{c}}") == ["p", "b", "a"]


@pytest.mark.parametrize(
    ("template", "strange"),
    [
        ("{p}", None),
        ("{p.x}", "{p.x}"),
        ("{p[0]}", "{p[0]}"),
        ("{p!r}", "{p!r}"),
        ("{p:>8}", "{p:>8}"),
        ("{}", "{}"),
        ("{0}", "{0}"),
        ('{"a": 1}', None),
        ("{ p }", None),
        ("{{[NAME]}}", None),
    ],
)
def test_a_placeholder_that_is_no_bare_name_is_found(template: str, strange: str | None) -> None:
    assert find_strange_field(template) == strange


@pytest.mark.parametrize(
    ("policy", "merged"),
    [
        (None, {"temperature": 0.5, "n": 2, "max_length": 100}),
        ({"override": "none"}, {"temperature": 0.5, "n": 2, "max_length": 100}),
        (
            {"override": "listed", "overridable": ["temperature"]},
            {"temperature": 1.5, "n": 2, "max_length": 100},
        ),
        ({"override": "all"}, {"temperature": 1.5, "n": 2, "max_length": 100, "top_p": 0.9}),
    ],
)
def test_a_policy_says_what_of_the_style_a_request_replaces(
    policy: dict[str, object] | None, merged: dict[str, object]
) -> None:
    requested = {"temperature": 1.5, "top_p": 0.9, "n": 2, "max_length": 100}
    found = merge_params({"temperature": 0.5}, requested, policy, kept=("n", "max_length"))
    assert found == merged


def test_a_length_of_the_style_stands() -> None:
    found = merge_params({"max_length": 64}, {"max_length": 100}, None, kept=("max_length",))
    assert found == {"max_length": 64}


def test_a_param_above_a_ceiling_is_found_with_the_ceiling() -> None:
    policy = {"ceilings": {"max_length": 100, "n": 2}}
    assert find_param_above_ceiling({"max_length": 100, "n": 2}, policy) is None
    assert find_param_above_ceiling({"max_length": 101}, policy) == ("max_length", 100)
    assert find_param_above_ceiling({"max_length": 9999}, None) is None
