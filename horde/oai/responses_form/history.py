# SPDX-License-Identifier: AGPL-3.0-or-later
"""What a request says by the ids of earlier responses and items: looked up, for the key that made
them alone.

Source: docs/reference/front_responses.md, "Stored responses".
"""

from collections.abc import Iterator, Sequence
from typing import Final, cast

from horde.json_text import JsonObject
from horde.oai.errors import RequestRefused, shorten_param
from horde.oai.responses_form.items import Item, ReferenceItem, parse_item
from horde.oai.responses_form.records import Record, find_request_id, find_request_id_of_item
from horde.oai.responses_form.request import ResponsesRequest
from horde.oai.responses_form.store import ResponseStore

MAX_LINKS: Final = 128
PREDECESSOR: Final = "previous_response_id"
_CONTINUABLE: Final = frozenset({"completed", "incomplete"})


async def find_history(
    request: ResponsesRequest, owner: str, store: ResponseStore
) -> list[Item | None]:
    """The items of the whole conversation, and on the request what is to be stored of it.

    Raises RequestRefused for an id that leads nowhere, StoreUnavailable.
    """
    links: list[Record] = []
    if request.previous_response_id is not None:
        links = await _find_links(request.previous_response_id, owner, store)
        await store.renew_life(links)
    request.links = tuple(record.request_id for record in links)
    own = await _resolve(request, owner, store)
    earlier = [item for record in links for item in _iter_items(record)]
    return [*(parse_item(item, PREDECESSOR) for item in earlier), *own]


async def _find_links(response_id: str, owner: str, store: ResponseStore) -> list[Record]:
    """A response and all before it, oldest first."""
    request_id = find_request_id(response_id)
    last = None if request_id is None else await store.find(request_id, owner)
    if last is None:
        raise _lost_link(response_id)
    if last.status not in _CONTINUABLE:
        message = (
            f"Invalid value: '{PREDECESSOR}' names a response that is {last.status}; it can be"
            " continued once it is completed."
        )
        raise RequestRefused("invalid_value", message, PREDECESSOR)
    if len(last.links) >= MAX_LINKS:
        message = f"Invalid value: '{PREDECESSOR}' ends a chain of {MAX_LINKS} responses."
        raise RequestRefused("invalid_value", message, PREDECESSOR)
    earlier = await store.find_all(last.links, owner) if last.links else []
    found = [record for record in earlier if record is not None]
    if len(found) < len(earlier):
        raise _lost_link(response_id)
    return [*found, last]


def _lost_link(response_id: str) -> RequestRefused:
    message = (
        f"Previous response with id '{shorten_param(response_id)}' not found. Responses are kept"
        " for a while, when they are made with store: true."
    )
    return RequestRefused("previous_response_not_found", message, PREDECESSOR, status=404)


def _iter_items(record: Record) -> Iterator[JsonObject]:
    yield from record.input
    yield from cast(list[JsonObject], record.response["output"])


async def _resolve(
    request: ResponsesRequest, owner: str, store: ResponseStore
) -> list[Item | None]:
    """The request's own items with what they refer to in place."""
    items, raw = list(request.input.items), list(request.input.raw)
    references = {
        index: item for index, item in enumerate(items) if isinstance(item, ReferenceItem)
    }
    found = await _find_items(list(references.values()), owner, store)
    for index, (path, item) in zip(references, found, strict=True):
        raw[index], items[index] = item, parse_item(item, path)
    request.stored_items = raw
    return items


async def _find_items(
    references: Sequence[ReferenceItem], owner: str, store: ResponseStore
) -> list[tuple[str, JsonObject]]:
    """The stored item of each reference, behind its path."""
    if not references:
        return []
    ids = [find_request_id_of_item(reference.item_id) for reference in references]
    wanted = list(dict.fromkeys(id_ for id_ in ids if id_ is not None))
    if len(wanted) > MAX_LINKS:
        raise RequestRefused(
            "invalid_value",
            f"Invalid value: 'input' refers to over {MAX_LINKS} responses.",
            "input",
        )
    records = dict(zip(wanted, await store.find_all(wanted, owner), strict=True)) if wanted else {}
    by_id = {
        item.get("id"): item
        for record in records.values()
        if record is not None
        for item in _iter_items(record)
    }
    return [(reference.path, _require_item(reference, by_id)) for reference in references]


def _require_item(reference: ReferenceItem, by_id: dict[object, JsonObject]) -> JsonObject:
    item = by_id.get(reference.item_id)
    if item is None:
        message = (
            f"Item with id '{shorten_param(reference.item_id)}' not found. Items of responses that"
            " were not stored are not kept: send the item itself."
        )
        raise RequestRefused("item_not_found", message, f"{reference.path}.id", status=404)
    return item
