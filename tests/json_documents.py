# SPDX-License-Identifier: AGPL-3.0-or-later
"""JSON documents as text, in every form that a client may write them in, and a way to compare two
texts that leaves nothing but spaces and the escapes of letters out.
"""

import json
from typing import Any

from hypothesis import strategies as st

_STRINGS = st.text(
    st.characters(exclude_characters="\x00", exclude_categories=("Cs",)), max_size=8
).flatmap(lambda text: st.sampled_from([json.dumps(text), json.dumps(text, ensure_ascii=False)]))
_NUMBERS = st.from_regex(
    r"-?(0|[1-9][0-9]{0,24})(\.[0-9]{1,12})?([eE][+-]?[0-9]{1,2})?", fullmatch=True
)
_LEAVES = st.one_of(st.sampled_from(["true", "false", "null", "-0", "1.0"]), _NUMBERS, _STRINGS)


def _write_array(members: list[str]) -> str:
    return f"[{', '.join(members)}]"


def _write_object(members: dict[str, str]) -> str:
    return "{" + ",".join(f"{json.dumps(key)} :{value}" for key, value in members.items()) + "}"


def _objects_of(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    keys = st.text(st.characters(exclude_characters="\x00", exclude_categories=("Cs",)), max_size=6)
    return st.lists(st.tuples(keys, values), max_size=5, unique_by=lambda pair: pair[0]).map(
        lambda pairs: _write_object(dict(pairs))
    )


documents = st.recursive(
    _LEAVES,
    lambda values: st.one_of(st.lists(values, max_size=4).map(_write_array), _objects_of(values)),
    max_leaves=12,
)
"""Any document."""

objects = _objects_of(documents)
"""Any object: what the schema of a tool may be as long as it is not strict."""


def describe(text: str | bytes) -> Any:
    """What a text says and how: objects as their pairs in order, numbers as they are written."""
    return json.loads(
        text,
        object_pairs_hook=lambda pairs: ("object", *pairs),
        parse_int=lambda number: ("number", number),
        parse_float=lambda number: ("number", number),
    )


def find_members(described: Any, *path: str) -> Any:
    """The part of a described text below these keys."""
    for name in path:
        described = dict(described[1:])[name]
    return described
