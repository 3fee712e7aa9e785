# SPDX-License-Identifier: AGPL-3.0-or-later
"""The names a model goes by, and what the reference says of it."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horde import model_reference

CHRONOS = "elinas/chronos-70b-v2"


@pytest.fixture(autouse=True)
def bundled_models() -> Iterator[None]:
    model_reference.use_bundled_text_models()
    yield
    model_reference.use_bundled_text_models()


@pytest.mark.parametrize(
    ("name", "stripped"),
    [
        ("Foo-7B-Q4_K_M", "Foo"),
        ("Foo.i1-Q4_K_M", "Foo"),
        ("Foo-IQ3_XS", "Foo"),
        ("Foo-GPTQ-Int4", "Foo"),
        ("Foo-GPTQ-int8", "Foo"),
        ("Foo,xQ44.a-b_c", "Foo"),
        ("Foo-Q4_K_M", "Foo-Q4_K_M"),  # at least one letter or digit stands before the Q
        ("Foo-IQ1_S", "Foo-IQ1_S"),  # the digits are 2 to 9
        ("Foo-7b-q4_k_m", "Foo-7b-q4_k_m"),  # the Q is a capital
        ("Org/Foo", "Org/Foo"),
        ("", ""),
    ],
)
def test_quantisation_is_stripped_as_documented(name: str, stripped: str) -> None:
    assert model_reference.strip_quantisation(name) == stripped


@pytest.mark.parametrize(
    "name",
    [
        CHRONOS,
        f"{CHRONOS}::somebody#12",
        f"{CHRONOS}.i1-Q4_K_M",
        f"{CHRONOS}-IQ3_XS::somebody#12",
        f"aphrodite/{CHRONOS}",
        "koboldcpp/chronos-70b-v2",
    ],
)
def test_a_listed_model_is_known_under_each_of_its_names(name: str) -> None:
    assert model_reference.is_known_text_model(name)
    assert model_reference.get_text_model_multiplier(name) == pytest.approx(68.976648192)


@pytest.mark.parametrize(
    "name", ["", "::", "someone/else", CHRONOS.upper(), f"{CHRONOS} ", "x" * 300]
)
def test_an_unlisted_model_is_unknown_and_counts_one(name: str) -> None:
    assert not model_reference.is_known_text_model(name)
    assert model_reference.get_text_model_multiplier(name) == 1
    assert not model_reference.is_nsfw(name)


def test_the_bundled_list_holds_true_counts() -> None:
    entries = json.loads(model_reference.BUNDLED_FILE.read_bytes())
    assert len(entries) >= 60
    assert all(
        type(entry["parameters"]) is int and type(entry["nsfw"]) is bool
        for entry in entries.values()
    )
    assert model_reference.is_nsfw("Sao10K/L3-8B-Stheno-v3.2")
    assert not model_reference.is_nsfw(CHRONOS)
    assert CHRONOS in model_reference.list_text_model_names()


@pytest.mark.parametrize(
    "name",
    ["-" + "a" * 200_000, "-a" * 100_000, "-aQ2" + "_a" * 100_000, "-IQ" * 70_000, "." * 200_000],
)
def test_a_hostile_name_costs_no_more_than_its_length(name: str) -> None:
    started = time.process_time()
    model_reference.strip_quantisation(name)
    assert time.process_time() - started < 1


def test_a_refresh_replaces_the_list(tmp_path: Path) -> None:
    source = tmp_path / "db.json"
    source.write_text(
        json.dumps(
            {
                "a/b": {"parameters": 2_500_000_000, "nsfw": True, "url": "x"},
                "broken": {"parameters": "7B"},
            }
        )
    )
    assert model_reference.refresh_text_models(str(source)) == 1
    assert model_reference.get_text_model_multiplier("a/b") == 2.5
    assert model_reference.is_nsfw("a/b")
    assert not model_reference.is_known_text_model(CHRONOS)


@pytest.mark.parametrize(
    "content", ["[]", "{}", "not json", '{"a": {"parameters": true}}', "[" * 100_000]
)
def test_a_broken_source_keeps_the_list(tmp_path: Path, content: str) -> None:
    source = tmp_path / "db.json"
    source.write_text(content)
    with pytest.raises(model_reference.ModelReferenceError):
        model_reference.refresh_text_models(str(source))
    assert model_reference.is_known_text_model(CHRONOS)


@pytest.mark.parametrize(
    "source", ["/nowhere/at/all.json", "http://127.0.0.1:1/db.json", "http://[broken"]
)
def test_an_unreachable_source_keeps_the_list(source: str) -> None:
    with pytest.raises(model_reference.ModelReferenceError):
        model_reference.refresh_text_models(source)
    assert model_reference.is_known_text_model(CHRONOS)
