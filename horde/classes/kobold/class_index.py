# SPDX-License-Identifier: AGPL-3.0-or-later
"""The classes of a queue by the models they list, so that a worker is compared with its own alone.

What is not for a worker's models is judged by kind: classes that differ in nothing but their models
are refused alike. Pure; made anew when the classes of the queue change.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from horde.classes.kobold.queue_class import least_needs_of_class
from horde.classes.kobold.worker import RequestNeeds

# No request lists it, since names are not empty: a class that is not for the worker.
NO_MODEL = ""


@dataclass(frozen=True, slots=True, eq=False)
class IndexedClass:
    """A class with its needs, those of its smallest request, and its kind."""

    number: int
    needs: RequestNeeds
    least: RequestNeeds
    kind: RequestNeeds


class ClassIndex:
    """The classes of one reading of the queue."""

    def __init__(
        self, needs: Mapping[int, RequestNeeds], before: "ClassIndex | None" = None
    ) -> None:
        """`before` is an earlier index, whose classes are taken over: their needs never change."""
        known = {} if before is None else before._classes
        self._classes: dict[int, IndexedClass] = {
            number: known.get(number) or _index_class(number, of_class)
            for number, of_class in needs.items()
        }
        self._by_model: dict[tuple[bool, str | None], list[IndexedClass]] = {}
        self._by_kind: dict[RequestNeeds, list[int]] = {}
        for number, indexed in self._classes.items():
            of_class = indexed.needs
            for model in of_class.models or (None,):
                self._by_model.setdefault((of_class.is_chat, model), []).append(indexed)
            self._by_kind.setdefault(indexed.kind, []).append(number)
        self._totals: tuple[object, dict[RequestNeeds, int]] = (None, {})

    @property
    def is_empty(self) -> bool:
        """Whether there is no class."""
        return not self._by_kind

    def list_for(self, models: Iterable[str], chat_model: str | None) -> list[IndexedClass]:
        """The classes that list one of the models, or none at all, each once."""
        found: dict[int, IndexedClass] = {}
        keys = [(False, None), *((False, model) for model in models), (True, chat_model)]
        for key in keys:
            for indexed in self._by_model.get(key, ()):
                found[indexed.number] = indexed
        return list(found.values())

    def count_others(
        self, own: Collection[IndexedClass], counts: Mapping[int, int]
    ) -> dict[RequestNeeds, int]:
        """Requests of each kind outside of a worker's own classes; `counts` has those of each
        class, and one that it does not know yet has one.
        """
        left = Counter(self._sum_kinds(counts))
        for indexed in own:
            left[indexed.kind] -= counts.get(indexed.number, 1)
        return {kind: count for kind, count in left.items() if count > 0}

    def _sum_kinds(self, counts: Mapping[int, int]) -> dict[RequestNeeds, int]:
        """Requests of each kind; kept for as long as the same counts are used."""
        used, totals = self._totals
        if used is not counts:
            totals = {
                kind: sum(counts.get(number, 1) for number in numbers)
                for kind, numbers in self._by_kind.items()
            }
            self._totals = counts, totals
        return totals


def _index_class(number: int, needs: RequestNeeds) -> IndexedClass:
    least = least_needs_of_class(needs)
    return IndexedClass(number, needs, least, replace(least, models=(NO_MODEL,), user_id=0))
