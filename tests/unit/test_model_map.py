# SPDX-License-Identifier: AGPL-3.0-or-later
"""The operator's table of model names."""

import time
from pathlib import Path

import pytest

from horde.front_config import FrontConfig
from horde.model_map import ModelMap
from horde.settings import ConfigError


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("a", "a", True),
        ("a", "A", False),
        ("a", "ab", False),
        ("*", "", True),
        ("*", "anything/at:all", True),
        ("claude-*", "claude-", True),
        ("claude-*", "claude", False),
        ("*-mini", "gpt-mini", True),
        ("*-mini", "gpt-mini-2", False),
        ("a*b*c", "abc", True),
        ("a*b*c", "a1b2b3c", True),
        ("a*b*c", "acb", False),
        ("ab*ba", "aba", False),
        ("a*a", "a", False),
        ("a.c", "abc", False),
        ("[a]*", "a", False),
    ],
)
def test_patterns(pattern: str, name: str, *, is_match: bool) -> None:
    assert (ModelMap(((pattern, ("x",)),)).find(name) is not None) is is_match


def test_no_name_takes_long() -> None:
    started = time.process_time()
    assert ModelMap((("*a" * 100 + "b", ("x",)),)).find("a" * 200_000) is None
    assert time.process_time() - started < 1


def test_the_first_entry_counts_and_a_target_is_not_mapped_again() -> None:
    table = ModelMap.parse('[["a", "b"], ["a*", ["c", "d"]], ["b", "e"], ["a", "f"]]')
    assert table.find("a") == ("b",)
    assert table.find("ab") == ("c", "d")
    assert table.find("z") is None
    assert list(table.iter_aliases()) == [("a", ("b",)), ("b", ("e",))]


def test_a_table_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "names.json"
    path.write_text('[["a", "b"]]')
    config = FrontConfig.from_environment({"HORDE_OAI_MODEL_MAP": f"@{path}"})
    assert config.model_map.find("a") == ("b",)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "{}", "1", "[1]", '["a", "b"]', '[["a"]]', '[["a", "b", "c"]]', '[["", "b"]]'),
        *('[["a", []]]', '[["a", ["b", "b"]]]', '[["a", ["b", 1]]]', '[["a", null]]'),
        *('[["a", ["1", "2", "3", "4", "5", "6"]]]', '[["a\\u0000", "b"]]', "@/no/such/file"),
        "[" * 100_000,
    ],
)
def test_a_bad_table_stops_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="HORDE_OAI_MODEL_MAP"):
        FrontConfig.from_environment({"HORDE_OAI_MODEL_MAP": text})
