# SPDX-License-Identifier: AGPL-3.0-or-later
"""Classes found by the models of a worker, and all others counted by kind."""

import random
from typing import Any

import pytest

from horde.classes.kobold.class_index import ClassIndex
from horde.classes.kobold.worker import RequestNeeds


def build_needs(*models: str, **changes: Any) -> RequestNeeds:
    values: dict[str, Any] = {
        "user_id": 1,
        "is_chat": False,
        "max_length": 80,
        "max_context_length": 1024,
    }
    return RequestNeeds(models=models, **(values | changes))


def list_numbers(index: ClassIndex, *models: str, chat_model: str | None = None) -> list[int]:
    return sorted(indexed.number for indexed in index.list_for(models, chat_model))


INDEX = ClassIndex(
    {
        1: build_needs("a"),
        2: build_needs("b"),
        3: build_needs("a", "b"),
        4: build_needs(),
        5: build_needs("a", is_chat=True),
        6: build_needs("c", trusted_workers=True),
    }
)


@pytest.mark.parametrize(
    ("models", "chat_model", "numbers"),
    [
        (("a",), None, [1, 3, 4]),
        (("a", "b"), None, [1, 2, 3, 4]),
        (("a",), "a", [1, 3, 4, 5]),
        ((), "a", [4, 5]),
        (("z",), "z", [4]),
    ],
)
def test_a_worker_is_compared_with_the_classes_of_its_models_alone(
    models: tuple[str, ...], chat_model: str | None, numbers: list[int]
) -> None:
    assert list_numbers(INDEX, *models, chat_model=chat_model) == numbers


def test_what_is_not_for_a_worker_is_counted_by_kind() -> None:
    own = INDEX.list_for(("a",), None)
    counts = {1: 10, 2: 20, 3: 30, 4: 40, 6: 60}
    others = INDEX.count_others(own, counts)
    assert sorted(others.values()) == [1, 20, 60]  # the chat class is not counted yet
    assert {kind.trusted_workers for kind, count in others.items() if count == 60} == {True}


def test_ten_thousand_models_are_one_kind() -> None:
    index = ClassIndex({number: build_needs(f"model {number}") for number in range(10_000)})
    own = index.list_for(("model 7",), None)
    assert [indexed.number for indexed in own] == [7]
    assert list(index.count_others(own, {}).values()) == [9999]


def test_an_index_made_from_an_earlier_one_holds_the_same() -> None:
    needs = {1: build_needs("a"), 7: build_needs("a", "z")}
    index = ClassIndex(needs, INDEX)
    assert list_numbers(index, "a") == [1, 7]
    assert index.count_others(index.list_for(("z",), None), {}) == ClassIndex(needs).count_others(
        ClassIndex(needs).list_for(("z",), None), {}
    )


def test_every_request_is_counted_once_whatever_the_worker_offers() -> None:
    draw = random.Random(3)
    needs = {
        number: build_needs(
            *draw.sample("abcdef", draw.randint(0, 3)),
            is_chat=False,
            nsfw=draw.random() < 0.5,
            max_length=draw.choice([16, 80, 500]),
        )
        for number in range(200)
    }
    counts = {number: draw.randint(1, 9) for number in needs}
    index = ClassIndex(needs)
    for _ in range(50):
        models = draw.sample("abcdef", draw.randint(1, 6))
        own = index.list_for(models, None)
        wanted = {
            number
            for number, of_class in needs.items()
            if not of_class.models or set(models) & set(of_class.models)
        }
        assert {indexed.number for indexed in own} == wanted
        left = sum(index.count_others(own, counts).values())
        assert left == sum(counts.values()) - sum(counts[number] for number in wanted)
