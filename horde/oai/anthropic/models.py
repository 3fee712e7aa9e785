# SPDX-License-Identifier: AGPL-3.0-or-later
"""Models by the names that clients of Anthropic's API ask for.

Source: docs/reference/front_messages.md, "Model names" and "Models".
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from horde.json_text import JsonObject
from horde.model_map import ModelMap
from horde.oai.anthropic.errors import write_time
from horde.oai.anthropic.refusals import refuse, show
from horde.oai.errors import RequestRefused
from horde.oai.mapping import ModelCard
from horde.oai.models import ModelList

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 1000
EFFORT_PARAMETER: Final = "reasoning_effort"  # on the cards of models that take it
CURSORS: Final = ("after_id", "before_id")

type Cards = Mapping[str, ModelCard]


class NamedModels:
    """The models online, under their own names and those of the operator's table."""

    def __init__(self, models: ModelList, table: ModelMap) -> None:
        self._models, self._table = models, table

    async def resolve(self, name: str) -> tuple[str, ...]:
        """The models that stand for a name; the name itself when the table has none. Raises
        NativeUnavailable.
        """
        targets = self._table.find_exactly(name)
        if targets is None:
            targets = self._table.find(name)
            # What a worker serves under this very name is never mapped by a pattern.
            if targets is not None and name in await self._get_cards():
                targets = None
        return targets or (name,)

    async def takes_effort(self, models: Sequence[str]) -> bool:
        """Whether a worker of one of these models takes an effort of reasoning. Raises
        NativeUnavailable.
        """
        cards = await self._get_cards()
        return any(
            EFFORT_PARAMETER in cards[model]["supported_parameters"]
            for model in models
            if model in cards
        )

    async def list_page(self, query: Mapping[str, str]) -> JsonObject:
        """A page of the list. Raises RequestRefused for a wrong query, and NativeUnavailable."""
        limit = _parse_limit(query.get("limit"))
        cards = await self._get_cards()
        entries = [_build_entry(name, card) for name, card in cards.items()]
        for alias, targets in self._table.iter_aliases():
            if (entry := _build_alias(alias, targets, cards)) is not None:
                entries = [other for other in entries if other["id"] != alias] + [entry]
        return _build_page(sorted(entries, key=lambda entry: str(entry["id"])), limit, query)

    async def get_entry(self, name: str) -> JsonObject:
        """One model; a name of the table stands for its target. Raises RequestRefused (404), and
        NativeUnavailable.
        """
        cards, targets = await self._get_cards(), await self.resolve(name)
        entry = (
            _build_alias(name, targets, cards)
            if targets != (name,)
            else _build_entry(name, cards[name])
            if name in cards
            else None
        )
        if entry is None:
            raise build_unknown_model(name)
        return entry

    async def _get_cards(self) -> Cards:
        listed = await self._models.get_list()
        return {card["id"]: card for card in listed["data"]}


def build_unknown_model(name: str, rc: str | None = None) -> RequestRefused:
    """404 of a name, in the words that clients look for; `rc` is that of the horde's refusal."""
    metadata = {} if rc is None else {"rc": rc}
    return RequestRefused(
        "model_not_found", f"model: {show(name)}", "model", status=404, metadata=metadata
    )


def _build_entry(name: str, card: ModelCard, display_name: str | None = None) -> JsonObject:
    return {
        "type": "model",
        "id": name,
        "display_name": display_name or name,
        "created_at": write_time(datetime.fromtimestamp(card["created"], UTC)),
        "lifecycle": "active",
        "max_input_tokens": card["context_length"],
        "max_tokens": card["top_provider"]["max_completion_tokens"],
    }


def _build_alias(alias: str, targets: Sequence[str], cards: Cards) -> JsonObject | None:
    """The entry of the first target that is online; None when none is."""
    target = next((target for target in targets if target in cards), None)
    if target is None:
        return None
    return _build_entry(alias, cards[target], f"{alias} ({target})")


def _parse_limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_LIMIT):
        raise refuse("limit", f"Input should be an integer from 1 to {MAX_LIMIT}")
    return int(text)


def _build_page(entries: list[JsonObject], limit: int, query: Mapping[str, str]) -> JsonObject:
    places = {str(entry["id"]): place for place, entry in enumerate(entries)}
    cursors = [cursor for cursor in CURSORS if query.get(cursor)]
    if len(cursors) > 1:
        raise refuse("before_id", "'after_id' and 'before_id' cannot be combined")
    for cursor in cursors:
        if query[cursor] not in places:
            raise refuse(cursor, f"no model has the id '{show(query[cursor])}'")
    if cursors == ["before_id"]:
        rest = entries[: places[query["before_id"]]]
        page = rest[-limit:]
    else:
        rest = entries[places[query["after_id"]] + 1 :] if cursors else entries
        page = rest[:limit]
    return {
        "data": page,
        "has_more": len(rest) > len(page),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
